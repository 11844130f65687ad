"""The code that the runtime writes for the block of a lesson's picture: the function of one rank, with its collectives in place."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from explorer.jobs.code import Line, functions_of
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Values
from explorer.learn.lessons import LESSONS
from planner_core.core import InputError, Plan

SENDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}


@dataclass(frozen=True, slots=True)
class Written:
    """The block's function and the exchanges that it calls; `talks` are the lines of the function that talk to other GPUs. Where there is
    none, `why` says so."""

    source: str = ""
    talks: tuple[str, ...] = ()
    why: str = ""


def written(number: int, learner: Learner, values: Values) -> Written:
    """The code of lesson `number`'s block. The first time takes seconds: the model is built, without its weights, and recorded."""
    return _written(number, learner, tuple(values.items()))


@lru_cache(maxsize=16)
def _written(number: int, learner: Learner, values: tuple[tuple[str, Choice], ...]) -> Written:
    state = LESSONS[number - 1].block
    case = state(learner, dict(values)) if state else None
    if case is None or case.plan is None:
        return Written(why="This choice cannot run, so there is no code of it.")
    return of_plan(case.plan, case.block)


def of_plan(plan: Plan, block: str) -> Written:
    """The function of one block of a plan, e.g. of `LlamaDecoderLayer`."""
    from planner_core.runtime.training import blocks_of  # torch and the model's own library

    try:
        made = blocks_of(plan)
    except InputError as error:
        return Written(why=str(error))
    if not made.source:
        return Written(why=made.why)
    return cut_out(made.lines, block)


def cut_out(lines: Sequence[Line], block: str) -> Written:
    """The block's function out of a whole program, with those of the program's exchanges that it calls."""
    name = next(f.name for f in functions_of(lines) if f.block == block)
    text = [line for line, _, _ in lines]
    body = ast.parse("\n".join(text)).body
    found = next(f for f in body if isinstance(f, ast.FunctionDef) and f.name == name)
    names = {n.id for n in ast.walk(found) if isinstance(n, ast.Name)}
    exchanges = [
        a for a in body if isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name) and a.targets[0].id in names
    ]
    sends = [a for a in exchanges if {n.id for n in ast.walk(a) if isinstance(n, ast.Name)} & SENDS]
    called = {a.targets[0].id for a in sends if isinstance(a.targets[0], ast.Name)}
    talks = tuple(
        ast.unparse(line) for line in found.body if called & {n.id for n in ast.walk(line) if isinstance(n, ast.Name)}
    )

    def of(node: ast.stmt) -> str:
        return "\n".join(text[node.lineno - 1 : node.end_lineno])

    head = "\n".join(map(of, exchanges))
    return Written(f"{head}\n\n\n{of(found)}".strip("\n"), talks)
