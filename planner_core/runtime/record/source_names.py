"""The names that a model's own code gives to its results, found by the line that runs."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from types import FrameType

Statement = tuple[int, tuple[str, ...]]
"""First line of a statement, and the names that it assigns."""


def running_statement() -> tuple[str, tuple[str, ...]]:
    """`file:line` of the innermost statement of the model's own code, and the names that it assigns."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _foreign(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "", ()
    filename = frame.f_code.co_filename
    first, names = _statements(filename).get(frame.f_lineno, (frame.f_lineno, ()))
    return f"{filename}:{first}", names


def _foreign(filename: str) -> bool:
    return "/torch/" in filename or "/planner_core/" in filename or filename.startswith("<")


@functools.lru_cache(maxsize=256)
def _statements(filename: str) -> dict[int, Statement]:
    """line -> the innermost simple statement that covers it."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, Statement] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)):
            targets = node.targets[:1] if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = _names(targets[0]) if targets[0] is not None else ()
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = (node.lineno, names)
    return found


def _names(target: ast.expr) -> tuple[str, ...]:
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, (ast.Tuple, ast.List)):
        names = [_names(item) for item in target.elts]
        return tuple(n[0] if n else "" for n in names)
    if isinstance(target, ast.Subscript):
        return _names(target.value)
    return ()
