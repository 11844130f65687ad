"""The code that `apply` generates for the block of a lesson's picture: the function of one rank, with its collectives in place."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from explorer.jobs.code import Line, functions_of
from explorer.learn.blocks.arranged import ArrangedBlock
from explorer.text.option_words import page_wording
from planner_core.core import InputError

COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}


@dataclass(frozen=True, slots=True)
class BlockCode:
    """The block's function and the exchanges that it calls.

    `sending_lines` are the lines of the function that talk to other GPUs. Where there is no code, `reason` says why.
    """

    source: str = ""
    sending_lines: tuple[str, ...] = ()
    reason: str = ""


def generate_block_code(case: ArrangedBlock | None) -> BlockCode:
    """The code of a block under its plan. It takes seconds: the model is built, without its weights, and recorded."""
    if case is None or case.plan is None:
        return BlockCode(reason="This choice cannot run, so there is no code of it.")
    from planner_core.runtime.training import blocks_of  # imports torch and the model's own library

    try:
        program = blocks_of(case.plan)
    except InputError as error:
        return BlockCode(reason=page_wording(error))
    return extract_block(program.lines, case.block)


def extract_block(lines: Sequence[Line], block: str) -> BlockCode:
    """The block's function out of a whole program, with the exchanges of the program that it calls."""
    name = next(f.name for f in functions_of(lines) if f.block == block)
    text = [line for line, _, _ in lines]
    body = ast.parse("\n".join(text)).body
    function = next(f for f in body if isinstance(f, ast.FunctionDef) and f.name == name)
    exchanges = [a for a in body if isinstance(a, ast.Assign) and _target(a) in _names(function)]
    senders = {_target(a) for a in exchanges if _names(a) & COLLECTIVES}
    sending = tuple(ast.unparse(line) for line in function.body if senders & _names(line))
    # cut from the text rather than unparsed: comments and line breaks stay
    parts = ["\n".join(text[node.lineno - 1 : node.end_lineno]) for node in (*exchanges, function)]
    return BlockCode("\n\n\n".join(["\n".join(parts[:-1]), parts[-1]]).strip("\n"), sending)


def _target(assignment: ast.Assign) -> str:
    target = assignment.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
