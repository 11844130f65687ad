"""An uploaded model, a Hugging Face config.json or a `.pt2` file of torch.export: data, never code.

It is captured in a process of its own, bounded in size, memory and time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from explorer.address.stored import store_whole
from explorer.text.commands import OWN_PREFIX
from planner_core.core import Graph, InputError, graph_from_json
from planner_core.planning import Request

MAX_BYTES = 2**20
"""Of a config."""
MAX_EXPORTED_BYTES = 64 * 2**20
"""Of a .pt2 file; the uploader's own limit, maxUploadSize in .streamlit/config.toml, is the same 64 MB."""
CONFIG, EXPORTED = "config.json", "model.pt2"
ZIP = b"PK\x03\x04"
"""The first bytes of a .pt2 file."""
TIME_LIMIT_S = 120
MAX_STORED = 50
"""Models that are kept, the latest."""
POLL_S = 0.2
FOLDER = Path(tempfile.gettempdir()) / "shardscope-own"
CAPTURE = "planner_core.models.sandbox.write_graph"
"""The module that captures a config in a process of its own."""
FACTS = "capture.json"
"""What the first capture of a model found."""
UNNAMED = "your own model"


def store_model(content: bytes) -> str:
    """Store a config or a .pt2 file under its hash; raises InputError for what is neither."""
    if content.startswith(ZIP):
        if len(content) > MAX_EXPORTED_BYTES:
            raise InputError(
                f"the file has {len(content)} bytes; a .pt2 file has at most 64 MB here, give larger ones to the command line"
            )
        return _store_file(content, EXPORTED)
    if len(content) > MAX_BYTES:
        raise InputError(f"the file has {len(content)} bytes; a config.json has at most 1 MB, {MAX_BYTES} bytes")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the file is not JSON ({error}); give the model's config.json") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise InputError("the file lacks model_type, so it is not a Hugging Face config.json")
    return _store_file(content, CONFIG)


def _store_file(content: bytes, file: str) -> str:
    # By its content, so that the same file of two visitors is one model and is captured once.
    name = ("pt2" if file == EXPORTED else "") + hashlib.sha256(content).hexdigest()[:16]
    store_whole(FOLDER / name / file, content)
    _remove_oldest()
    return f"{OWN_PREFIX}{name}"


def _find_source(name: str) -> Path | None:
    """Return the stored file of a model; None where it is not on this machine."""
    folder = FOLDER / name.removeprefix(OWN_PREFIX)
    return next((folder / file for file in (CONFIG, EXPORTED) if (folder / file).is_file()), None)


def _remove_oldest() -> None:
    """Keep the latest models only."""
    # By the time of the folder, which every new graph in it renews.
    folders = sorted((f for f in FOLDER.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime, reverse=True)
    for old in folders[MAX_STORED:]:
        shutil.rmtree(old, ignore_errors=True)


def model_title(name: str) -> str:
    """Return the model's own name in the config, else its class; a general name where there is no such config."""
    file = _find_source(name)
    if file is None or file.name == EXPORTED:
        return UNNAMED if file is None else "your .pt2 model"
    data = json.loads(file.read_text(encoding="utf-8"))
    classes = data.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else data["model_type"]
    path = data.get("_name_or_path")
    return f"{(Path(path).name if isinstance(path, str) else '') or first}, yours"[:60]


def describe_capture(name: str) -> str | None:
    """Say what the capture found, and how long it took; None before the first."""
    file = FOLDER / name.removeprefix(OWN_PREFIX) / FACTS
    if not file.is_file():
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    blocks = ", ".join(f"{n:,} × {block}" for block, n in data["blocks"].items()) or "no repeated block"
    return f"{data['params'] / 1e9:,.2f} B parameters, {data['ops']:,} operations, {blocks}; read in {data['seconds']:.1f} s"


def load_graph(request: Request, report_progress: Callable[[str], None] | None = None) -> Graph:
    """Return the graph of a stored config at the request's workload; captured in a subprocess the first time.

    `report_progress` gets the progress, and may raise to stop.
    """
    folder, source = FOLDER / request.model.removeprefix(OWN_PREFIX), _find_source(request.model)
    if source is None:
        raise InputError("this link names a model of somebody's own, which is not on this machine; upload it again")
    batch = request.batch and request.batch // (request.accumulate or 1)  # a graph holds one micro-batch
    options = {"batch": batch, "seq": request.seq, "dtype": request.dtype, "layers": request.layers}
    # the example inputs of an exported program fix its sizes and formats
    options = {k: v for k, v in options.items() if v is not None and source.name == CONFIG}
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
    target = folder / f"graph-{key}.json"
    if target.is_file():
        return graph_from_json(json.loads(target.read_text(encoding="utf-8")))
    start = time.monotonic()
    _run_capture(source, options, target, report_progress or (lambda text: None))
    graph = graph_from_json(json.loads(target.read_text(encoding="utf-8")))
    facts = {
        "seconds": time.monotonic() - start,
        "params": graph.num_params,
        "ops": graph.num_ops,
        "blocks": graph.num_repeats,
    }
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return graph


def _run_capture(source: Path, options: dict[str, Any], target: Path, report_progress: Callable[[str], None]) -> None:
    """Run `CAPTURE`; the graph appears under its name when it is complete. Nothing that was started outlives this call."""
    part = target.with_suffix(f".{os.getpid()}.part")
    command = [sys.executable, "-m", CAPTURE, str(source), json.dumps(options), str(part)]
    root = Path(__file__).resolve().parents[2]
    start = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # A session of its own is a group of processes, which ends as a whole, with what the capture has started.
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            while child.poll() is None:
                elapsed_s = time.monotonic() - start
                if elapsed_s > TIME_LIMIT_S:
                    raise InputError(f"reading the model took longer than {TIME_LIMIT_S} s; try it on the command line")
                report_progress(f"reading the model (at most {TIME_LIMIT_S} s)")
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        errors.seek(0)
        lines = errors.read()[-20_000:].decode(errors="replace").strip().splitlines()
    if child.returncode:
        part.unlink(missing_ok=True)
        last = lines[-1] if lines else "it ended without a word"
        raise InputError(f"the model could not be read: {re.sub(r'^[A-Za-z_.]+: ', '', last)[:300]}")
    # Renamed when complete: another visitor's thread that looks for the graph finds all of it or nothing.
    part.replace(target)
