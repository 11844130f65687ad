"""The names that a model's own code gives to its results, by the line that runs; and collectives that such a line calls."""

# mypy: allow-untyped-calls
from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import tokenize
from types import CodeType, FrameType
from typing import Any

from planner_core.models.hooks import TorchDispatchMode, is_library_file
from planner_core.runtime.mismatch import PlanMismatch

Statement = tuple[int, tuple[str, ...]]
"""First line of a statement, and the names that it assigns."""


def running_statement() -> tuple[str, tuple[str, ...]]:
    """Return `file:line` of the innermost statement of the model's own code, and the names that it assigns."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "", ()
    first, names = _statements_by_line(frame.f_code).get(frame.f_lineno, (frame.f_lineno, ()))
    return f"{frame.f_code.co_filename}:{first}", names


class RefuseCollectives(TorchDispatchMode):
    """Inside, a collective that the model's own code calls raises PlanMismatch, since its tensors are not this rank's part.

    A mode is of one thread: a checkpoint that another one writes meanwhile goes on.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator that is no collective."""
        # Functions of torch.distributed end in operators of `c10d`, and those that a compiler traces in `_c10d_functional`.
        if func.namespace in ("c10d", "_c10d_functional"):
            line = running_statement()[0].rpartition("/")[2]
            name = func._schema.name.rpartition(":")[2].strip("_")
            raise PlanMismatch(
                f"the model's own code calls a collective of torch.distributed ({name}) at {line}: under a plan its tensors are the whole "
                "ones, as in one process, and the plan adds the collectives; leave its own out (by an option of the layer, or a condition "
                "on an attribute that is set before apply, and not on dist.is_initialized())"
            )
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=4096)
def _statements_by_line(code: CodeType) -> dict[int, Statement]:
    """Return the innermost simple statement that covers each line of a function.

    Only the function's own lines are parsed: all of transformers' file would take a third of a second in every rank.
    """
    if code.co_name.startswith("<"):  # a lambda or a comprehension is part of a statement, a module is a file
        return _statements_of_file(code.co_filename)
    lines, before = linecache.getlines(code.co_filename), code.co_firstlineno - 1
    try:
        block = inspect.getblock(lines[before:])
    except (SyntaxError, tokenize.TokenError):
        return {}
    if not block or not block[0][0].isspace():
        return _statements_in(block, before)
    # a method is indented; to dedent it would change its strings
    return _statements_in(["if True:\n", *block], before - 1)


@functools.lru_cache(maxsize=256)
def _statements_of_file(filename: str) -> dict[int, Statement]:
    return _statements_in(linecache.getlines(filename), 0)


def _statements_in(lines: list[str], before: int) -> dict[int, Statement]:
    """Return the statements of some lines of a file that follow `before` others."""
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return {}
    statements: dict[int, Statement] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)):
            targets = node.targets[:1] if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = _assigned_names(targets[0]) if targets[0] is not None else ()
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                statements[before + line] = (before + node.lineno, names)
    return statements


def _assigned_names(target: ast.expr) -> tuple[str, ...]:
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, (ast.Tuple, ast.List)):
        names = [_assigned_names(item) for item in target.elts]
        return tuple(n[0] if n else "" for n in names)
    if isinstance(target, ast.Subscript):
        return _assigned_names(target.value)
    return ()
