"""Generated code as source: its one spelling, its line breaks, and the names that it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import pairwise

WIDTH = 120
OPEN, CLOSE = "([{", ")]}"
OPERATORS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda)


def normalize(expression: str) -> str:
    """Return an expression in Python's own spelling: without parentheses that say nothing."""
    return ast.unparse(ast.parse(expression, mode="eval"))


def parenthesize(expression: str) -> str:
    """Return an expression that can be written inside another: in parentheses if an operator is its root."""
    return f"({expression})" if isinstance(ast.parse(expression, mode="eval").body, OPERATORS) else expression


def is_path(expression: str) -> bool:
    """Return whether an expression is a name or an attribute of one, which costs nothing to write twice."""
    node = ast.parse(expression, mode="eval").body
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def used_names(lines: Iterable[str]) -> set[str]:
    """Return the names that statements read."""
    nodes = ast.walk(ast.parse("\n".join(lines)))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


# --- line breaks ------------------------------------------------------------------------------------


def wrap_lines(source: str, width: int = WIDTH) -> str:
    """Return the same program with lines of at most `width` columns where brackets allow it."""
    return "\n".join(line for long in source.split("\n") for line in _break_line(long, width))


def _break_line(line: str, width: int) -> list[str]:
    """Break one line after the opening bracket of its widest bracket, whose items are indented, as many in a line as fit."""
    if len(line) <= width or line.lstrip().startswith(("#", '"""')):
        return [line]
    indent, body = line[: len(line) - len(line.lstrip())], line.lstrip()
    for word in ("return ", "del "):
        if body.startswith(word) and not _outer_brackets(body):
            line = f"{indent}{word}({body.removeprefix(word)})"
    widest = max(_outer_brackets(line), key=lambda b: b[1] - b[0], default=None)
    if widest is None:
        return [line]
    start, end, commas = widest
    margin = indent + 4 * " "
    cuts = [start + 1, *(index + 1 for index in commas), end]
    items = [line[a:b].strip() for a, b in pairwise(cuts) if line[a:b].strip()]
    if commas and not items[-1].endswith(",") and not items[-1].startswith("*"):
        items[-1] += ","
    rows: list[str] = []
    for item in items:
        if rows and len(rows[-1]) + 1 + len(item) <= width:
            rows[-1] += f" {item}"
        else:
            rows.append(margin + item)
    inner = [piece for row in rows for piece in (_break_line(row, width) if row.strip() != line.strip() else [row])]
    return [line[: start + 1], *inner, *_break_line(indent + line[end:], width)]


def _outer_brackets(line: str) -> list[tuple[int, int, list[int]]]:
    """Return where each outermost bracket of a line opens and closes, and the places of its own commas."""
    brackets: list[tuple[int, int, list[int]]] = []
    opened: list[int] = []
    commas: list[int] = []
    quote = ""
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote and line[index - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char == "#":
            break
        elif char in OPEN:
            opened.append(index)
            commas = commas if len(opened) > 1 else []
        elif char in CLOSE and opened:
            start = opened.pop()
            if not opened and index > start + 1:
                brackets.append((start, index, commas))
        elif char == "," and len(opened) == 1:
            commas.append(index)
    return brackets
