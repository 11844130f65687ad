"""The functions of a generated program with the operators of each line. No Streamlit here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner_core.core import BlockLabel

Line = tuple[str, str, Sequence[str]]
"""Of a generated program: its text, the label of its block, and its operators."""


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


def functions_of(lines: Sequence[Line]) -> tuple[Function, ...]:
    """Return the functions that hold operators."""
    functions: list[Function] = []
    body: list[CodeLine] = []
    label = ""
    for text, block, ops in [*lines, ("def ", "", [])]:
        if text.startswith("def "):
            functions += _function(body, label)
            body, label = [], block
        body.append(CodeLine(text, tuple(ops)))
    return tuple(functions)


def _function(lines: list[CodeLine], label: str) -> list[Function]:
    while lines and not lines[-1].text.strip():
        lines.pop()
    if not any(line.ops for line in lines):
        return []
    name = lines[0].text.removeprefix("def ").partition("(")[0]
    return [Function(name, BlockLabel.parse(label).block, tuple(lines))]
