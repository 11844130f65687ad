"""Exports and verification by the command line, in processes of their own: the server never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_core.core import Plan, PlannerError, plan_to_json
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


def export(plan: Plan, target: str, suffix: str, *, near: bool = False) -> ExportedFile:
    """Write the plan in another form, by `python -m planner_core export`; with `near` the nearest that the form can express."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / f"train{suffix}"
        options = ["--to", target, "-o", str(result), "--json", *(["--nearest"] * near)]
        try:
            answer = run_module(plan, folder, "the export", "planner_core", "export", options=options)
        except PlannerError as error:
            return ExportedFile("", (), str(error))
        return ExportedFile(result.read_text(encoding="utf-8"), tuple(answer["remarks"]), nearest=answer["nearest"])


def run_module(plan: Plan, folder: str, what: str, *module: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON that `python -m MODULE plan.json OPTIONS` prints; the plan's file is written into `folder`.

    Raises:
        PlannerError: what the process said last where it failed, or that `what` took too long.
    """
    command = _command(plan, folder, *module, options=options)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PlannerError(f"{what} took longer than {TIME_LIMIT_S} s") from None
    if done.returncode:
        raise PlannerError(last_line(done.stderr))
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _command(plan: Plan, folder: str, *module: str, options: Sequence[str] = ()) -> list[str]:
    source = Path(folder) / "plan.json"
    source.write_text(plan_text(plan), encoding="utf-8")
    return [sys.executable, "-m", *module, str(source), *options]


def last_line(stderr: str) -> str:
    """Return what a process said last, without its warnings before."""
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return lines[-1][:900] if lines else "no reason given"


def run_verification(plan: Plan, *options: str, tick: Callable[[float], None] | None = None) -> dict[str, Any]:
    """Return what verification found; `tick(seconds)` is called while it runs and may raise to stop it."""
    with tempfile.TemporaryDirectory() as folder:
        return _watched(_command(plan, folder, "planner_core", "verify", options=[*options, "--json"]), tick)


def _watched(command: list[str], tick: Callable[[float], None] | None) -> dict[str, Any]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    waited = 0.0
    try:
        while True:
            try:
                out, err = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                waited += 0.5
                if tick:
                    tick(waited)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    try:
        outcome: dict[str, Any] = json.loads(out)
    except ValueError:
        raise PlannerError(last_line(err)) from None
    return outcome
