"""The syntax tree of generated code: its nodes, the names that it uses, its printer, and line breaks.

Everything that writes code makes nodes. Text is made once, when a function is complete, so that no part of the writer has to know
where Python wants parentheses, and no decision is read out of code.
"""

from __future__ import annotations

import ast
import cmath
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

WIDTH = 120
OPEN, CLOSE = "([{", ")]}"

WriteLeaf = Callable[[Any], ast.expr]
"""Writes a leaf of a template: a tensor, a device, or an object that cannot be written as a literal."""


# --- nodes ------------------------------------------------------------------------------------------


def path(dotted: str) -> ast.expr:
    """Return a name, or attributes of one: `w`, `F.linear`."""
    first, *rest = dotted.split(".")
    node: ast.expr = ast.Name(first, ast.Load())
    for name in rest:
        node = attribute(node, name)
    return node


def attribute(value: ast.expr, name: str) -> ast.Attribute:
    """Return `value.name`."""
    return ast.Attribute(value, name, ast.Load())


def make_call(function: str | ast.expr, /, *args: Any, **kwargs: Any) -> ast.Call:
    """Return a call. The function may be a dotted name; arguments are nodes, or values to write as literals."""
    callee = path(function) if isinstance(function, str) else function
    return ast.Call(callee, [literal(a) for a in args], [ast.keyword(k, literal(v)) for k, v in kwargs.items()])


def subscript(value: ast.expr, index: Any, write: WriteLeaf | None = None) -> ast.Subscript:
    """Return `value[index]`. Slices are written with colons, without a start of 0 or a step of 1."""
    items = [_slice_of(i, write) for i in (index if isinstance(index, tuple) else (index,))]
    return ast.Subscript(value, items[0] if len(items) == 1 else ast.Tuple(items, ast.Load()), ast.Load())


def _slice_of(item: Any, write: WriteLeaf | None) -> ast.expr:
    if not isinstance(item, slice):
        return literal(item, write)
    start, stop = (None if i is None else literal(i, write) for i in (item.start, item.stop))
    step = None if item.step in (None, 1) else literal(item.step, write)
    return ast.Slice(None if item.start == 0 else start, stop, step)


def literal(item: Any, write: WriteLeaf | None = None) -> ast.expr:
    """Write a value that may hold tensors and objects of the model, which `write` names. A node stays as it is."""
    if isinstance(item, ast.expr):
        return item
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        items = [literal(i, write) for i in item]
        return ast.List(items, ast.Load()) if isinstance(item, list) else ast.Tuple(items, ast.Load())
    if isinstance(item, dict):
        return ast.Dict([ast.Constant(k) for k in item], [literal(v, write) for v in item.values()])
    if isinstance(item, slice):
        return make_call("slice", *(literal(i, write) for i in (item.start, item.stop, item.step)))
    if item is None or item is Ellipsis:
        return ast.Constant(item)
    if isinstance(item, (bool, int, float, complex, str)):
        return _plain_literal(item)
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return path(str(item))
    assert write is not None, item
    return write(item)


def _plain_literal(item: bool | int | float | complex | str) -> ast.expr:
    # A numpy.float64 and an IntEnum are numbers too, but their own texts are not literals.
    kind: Any = next(k for k in (bool, int, float, complex, str) if isinstance(item, k))
    value: Any = kind(item)
    if isinstance(value, (float, complex)) and not cmath.isfinite(value):
        return make_call(kind.__name__, str(value))
    # Python has no negative numbers: a node of -2 would be printed as -2 ** x, which is -(2 ** x).
    if isinstance(value, (int, float)) and str(value).startswith("-"):
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def binary(first: ast.expr, operator: type[ast.operator | ast.cmpop], second: ast.expr) -> ast.expr:
    """Return two operands with an operator, or a comparison, between them."""
    if issubclass(operator, ast.cmpop):
        return ast.Compare(first, [operator()], [second])
    return ast.BinOp(first, operator(), second)


def stored(targets: Sequence[str], *, unpack: bool = False) -> ast.expr:
    """Return the target of an assignment; a tuple if there are several names, or if `unpack` says so."""
    names: list[ast.expr] = [ast.Name(n, ast.Store()) for n in targets]
    return ast.Tuple(names, ast.Store()) if unpack or len(names) != 1 else names[0]


def assign(target: str | ast.expr, value: ast.expr) -> ast.stmt:
    """Return `target = value`."""
    return ast.Assign([stored([target]) if isinstance(target, str) else target], value)


def function(name: str, parameters: Sequence[str], body: Sequence[ast.stmt]) -> ast.FunctionDef:
    """Return a function of parameters without defaults."""
    arguments = ast.arguments([], [ast.arg(p) for p in parameters], None, [], [], None, [])
    return ast.FunctionDef(name, arguments, list(body), [])


def with_block(context: ast.expr, body: Sequence[ast.stmt]) -> ast.With:
    """Return `with context:` around statements."""
    return ast.With([ast.withitem(context)], list(body))


# --- what a tree says ---------------------------------------------------------------------------------


def is_path(node: ast.expr) -> bool:
    """Return whether an expression is a name or an attribute of one, which costs nothing to write twice."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def used_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that code reads."""
    names = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


# --- printing -----------------------------------------------------------------------------------------


def print_function(node: ast.FunctionDef) -> str:
    """Return the text of a function, with one line for each statement."""
    lines = ast.unparse(ast.fix_missing_locations(node)).split("\n")
    last = node.body[-1]
    # Unparse writes parentheses; a person does not.
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple):
        names = [ast.unparse(n) for n in last.value.elts]
        lines[-1] = f"    return {', '.join(names)}{',' * (len(names) == 1)}"
    return "\n".join(lines)


# --- line breaks ------------------------------------------------------------------------------------


def wrap_lines(source: str) -> str:
    """Return the same program with lines of at most `WIDTH` columns where brackets allow it."""
    return "\n".join(line for long in source.split("\n") for line in _break_line(long))


def _break_line(line: str) -> list[str]:
    """Break one line after the opening bracket of its widest bracket, whose items are indented, as many in a line as fit."""
    if len(line) <= WIDTH or line.lstrip().startswith(("#", '"""')):
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
        if rows and len(rows[-1]) + 1 + len(item) <= WIDTH:
            rows[-1] += f" {item}"
        else:
            rows.append(margin + item)
    inner = [piece for row in rows for piece in (_break_line(row) if row.strip() != line.strip() else [row])]
    return [line[: start + 1], *inner, *_break_line(indent + line[end:])]


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
