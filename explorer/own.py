"""A user's own Hugging Face config.json: data, never code. Captured in a process of its own, bounded in size and time."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from planner_core.errors import InputError
from planner_core.graph import Graph, from_json
from planner_core.planner import Request

MAX_BYTES = 1_000_000
TIME_LIMIT_S = 120
FOLDER = Path(tempfile.gettempdir()) / "shardscope-own"
CAPTURE = """
import json, sys
from pathlib import Path
from planner_core.graph import to_json
from planner_core.opening import open_model
graph = open_model(sys.argv[1], **json.loads(sys.argv[2]))
Path(sys.argv[3]).write_text(json.dumps(to_json(graph)), encoding="utf-8")
"""


def keep(content: bytes) -> str:
    """Store a config under its hash; raises InputError unless it is a config that names its model."""
    if len(content) > MAX_BYTES:
        raise InputError(f"the file has {len(content)} bytes; a config.json has at most {MAX_BYTES}")
    try:
        data = json.loads(content)
    except ValueError as error:
        raise InputError(f"the file is no JSON ({error}); give the model's config.json") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise InputError("the file has no model_type, so it is no Hugging Face config.json")
    name = hashlib.sha256(content).hexdigest()[:16]
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(content)
    return f"own-{name}"


def load_own(request: Request) -> Graph:
    """The graph of a stored config at the request's workload; captured in a subprocess the first time."""
    folder = FOLDER / request.model.removeprefix("own-")
    if not (folder / "config.json").is_file():
        raise InputError(
            "this link names a model of somebody's own config.json, which is not on this machine; upload it again"
        )
    options = {"batch": request.batch, "seq": request.seq, "dtype": request.dtype, "layers": request.layers}
    options = {k: v for k, v in options.items() if v is not None}
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
    target = folder / f"graph-{key}.json"
    if not target.is_file():
        _capture(folder / "config.json", options, target)
    return from_json(json.loads(target.read_text(encoding="utf-8")))


def _capture(config: Path, options: dict[str, Any], target: Path) -> None:
    command = [sys.executable, "-c", CAPTURE, str(config), json.dumps(options), str(target)]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parent.parent,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"reading the model took longer than {TIME_LIMIT_S} s; try it on the command line") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        reason = re.sub(r"^[\w.]+: ", "", last[0])
        raise InputError(f"the model could not be read: {reason[:300]}")
