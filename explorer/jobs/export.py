"""Exports by the command line, in processes of their own: the server never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorer.text.option_words import word_terms
from planner_core.core import Plan, PlannerError, Sentence, plan_to_json
from planner_core.exporters import TARGETS

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 120


FORMS = tuple(t for t in TARGETS.values() if t.name != "json")
"""The forms of the page; the plan file itself is offered next to them."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """The file, or why there is none.

    `remarks`: what the exporter said (what the target cannot express). `nearest`: what the form costs against the plan (see
    `planner_core.exporters.nearest.FormCost`).
    """

    content: str
    remarks: tuple[str, ...]
    problem: str = ""
    nearest: Mapping[str, Any] | None = None


def plan_text(plan: Plan) -> str:
    """Return the text of the plan file."""
    return json.dumps(plan_to_json(plan), indent=1)


class ExportWorkers:
    """Processes for exports. Once started, one always waits with its imports done, so that a click waits for the writing alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: subprocess.Popen[str] | None = None
        self._started = False

    def start(self) -> None:
        """Keep a process waiting from now on."""
        with self._lock:
            self._started = True
            self._waiting = self._waiting or _open_worker()

    def run(self, arguments: Sequence[str]) -> str:
        """Run a command line in a process of its own and return what it printed. Raises PlannerError with what it said last."""
        with self._lock:
            worker, self._waiting = self._waiting, None
        # Two clicks at once: the second finds no waiting process, and starts its own.
        if worker is None or worker.poll() is not None:
            worker = _open_worker()
        try:
            output, errors = worker.communicate(json.dumps(arguments) + "\n", timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
            raise PlannerError(f"the export took longer than {TIME_LIMIT_S} s") from None
        if self._started:  # not before: the two would share the processors
            self.start()
        if worker.returncode:
            raise _read_error(errors)
        return output


def _open_worker() -> subprocess.Popen[str]:
    # From the project's folder, so that a checkout runs as an installed package does.
    command = [sys.executable, "-m", "explorer.jobs.export_worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


WORKERS = ExportWorkers()
"""Those of this server."""


def export(plan: Plan, target: str, suffix: str, *, near: bool = False) -> ExportedFile:
    """Write the plan in another form, as `python -m planner_core export` does; with `near` the nearest that the form can express."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / f"train{suffix}"
        arguments = ["export", _write_plan(plan, folder), "--to", target, "-o", str(result), "--json"]
        try:
            answer = json.loads(WORKERS.run([*arguments, *(["--nearest"] * near)]))
        except PlannerError as error:
            return ExportedFile("", (), word_terms(error.sentence))
        # the folder is gone when somebody reads them
        remarks = tuple(remark.replace(f"{folder}/", "") for remark in answer["remarks"])
        return ExportedFile(result.read_text(encoding="utf-8"), remarks, nearest=answer["nearest"])


def _write_plan(plan: Plan, folder: str) -> str:
    source = Path(folder) / "train.plan.json"  # as the page calls the file that a training script reads
    source.write_text(plan_text(plan), encoding="utf-8")
    return str(source)


def _read_error(stderr: str) -> PlannerError:
    """Return the error that a worker printed last, with its terms; a plain text where the worker itself failed."""
    last = stderr.strip().rpartition("\n")[2]
    try:
        return PlannerError(Sentence.from_json(json.loads(last)))
    except (ValueError, TypeError):
        return PlannerError(last_line(stderr))


def last_line(stderr: str) -> str:
    """Return what a process said last, without its warnings before."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return lines[-1][:900] if lines else "no reason given"
