"""Exports in processes of their own: the server never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorer.text.option_words import word_terms
from planner_core.core import Plan, PlannerError, Sentence, plan_to_json
from planner_core.exporters import Remark, RemarkKind
from planner_core.planning.methods import TARGETS

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
    remarks: tuple[Remark, ...]
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

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have an export written in a process of its own (see `export_worker`). Raises PlannerError with what it said last."""
        with self._lock:
            worker, self._waiting = self._waiting, None
        # Two clicks at once: the second finds no waiting process, and starts its own.
        if worker is None or worker.poll() is not None:
            worker = _open_worker()
        try:
            output, errors = worker.communicate(json.dumps(order) + "\n", timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
            raise PlannerError(f"the export took longer than {TIME_LIMIT_S} s") from None
        if self._started:  # not before: the two would share the processors
            self.start()
        if worker.returncode:
            raise _read_error(errors)
        answer: dict[str, Any] = json.loads(output)
        return answer


def _open_worker() -> subprocess.Popen[str]:
    # From the project's folder, so that a checkout runs as an installed package does.
    command = [sys.executable, "-m", "explorer.jobs.export_worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


WORKERS = ExportWorkers()
"""Those of this server."""


def export(plan: Plan, target: str, **options: bool) -> ExportedFile:
    """Write the plan in another form. `options`: those of `export_text`."""
    try:
        answer = WORKERS.run({"plan": plan_to_json(plan), "form": target, "options": options})
    except PlannerError as error:
        return ExportedFile("", (), word_terms(error.sentence))
    remarks = tuple(
        Remark(*Sentence.from_json(parts).parts, kind=RemarkKind(kind)) for kind, parts in answer["remarks"]
    )
    return ExportedFile(answer["content"], remarks, nearest=answer["nearest"])


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
