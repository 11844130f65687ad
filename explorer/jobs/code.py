"""The generated code of a plan's blocks with the operators of each line, from a process of its own: the server never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from explorer.jobs.export import ROOT, TIME_LIMIT_S, last_line, plan_text
from planner_core.core import Plan

PROGRAM = "planner_core.runtime.training.lines"


@dataclass(frozen=True, slots=True)
class CodeLine:
    """One line, and the operators that it holds, by their names in the block."""

    text: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the program; `block` is the repeated block that it computes, "" for a part between blocks."""

    name: str
    block: str
    lines: tuple[CodeLine, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """The functions in order, those of operators only; or why there are none."""

    functions: tuple[Function, ...]
    problem: str = ""


def code(plan: Plan) -> Code:
    """The generated code of a plan. A plan of a user's own code is not generated here, since that would run the code."""
    if (plan.model.get("config") or {}).get("callable"):
        return Code(
            (), "the blocks of a model of your own are written when the script runs, since an export runs no code"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "plan.json"
        source.write_text(plan_text(plan), encoding="utf-8")
        command = [sys.executable, "-m", PROGRAM, str(source)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Code((), f"writing the code took longer than {TIME_LIMIT_S} s")
    if done.returncode:
        return Code((), last_line(done.stderr))
    told = json.loads(done.stdout)
    return Code(functions_of([tuple(line) for line in told["lines"]]), told["why"])


def functions_of(lines: list[tuple[str, str, list[str]]]) -> tuple[Function, ...]:
    """The functions that hold operators. A line is its text, the label of its block, and its operators."""
    found: list[Function] = []
    own: list[CodeLine] = []
    label = ""
    for text, block, ops in [*lines, ("def ", "", [])]:
        if text.startswith("def "):
            found += _function(own, label)
            own, label = [], block
        own.append(CodeLine(text, tuple(ops)))
    return tuple(found)


def _function(lines: list[CodeLine], label: str) -> list[Function]:
    while lines and not lines[-1].text.strip():
        lines.pop()
    if not any(line.ops for line in lines):
        return []
    name = lines[0].text.removeprefix("def ").partition("(")[0]
    return [Function(name, label.partition("#")[0], tuple(lines))]
