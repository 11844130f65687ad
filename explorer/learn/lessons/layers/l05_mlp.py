"""5. Column, then row: the MLP with one all-reduce each way, and why GeLU may not follow a partial sum."""

from __future__ import annotations

from typing import Any

from explorer.figures.svg_tensors import (
    Drawing,
    arrow,
    column,
    device,
    legend,
    matrix,
    owned,
    replicated,
    row,
    sign,
)
from explorer.jobs.result_cache import remember
from explorer.learn.blocks import arranged
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.tensors import draw_piece, join, split
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.block import F_AND_G_BELOW, draw_block
from explorer.learn.pictures.board import BoardState, board_film, matrix_chunks
from explorer.learn.pictures.film import Film


@remember(64)
def run_mlp(first: str, seed: int) -> dict[str, Any]:
    """Return the MLP Z = GeLU(X A) B, whole and on two devices, with the gradient of X by autograd both ways."""
    import torch
    from torch.nn.functional import gelu

    gen = torch.Generator().manual_seed(seed)
    x, a, b = (torch.randint(-2, 3, s, generator=gen).double() for s in ((2, 4), (4, 4), (4, 4)))
    x.requires_grad_()
    hidden = x @ a
    z = gelu(hidden) @ b
    (grad,) = torch.autograd.grad(z.sum(), x)
    columns = first == "columns"
    inputs = [piece.requires_grad_() for piece in split(x.detach(), "R" if columns else "S(1)", 2)]
    inner = [i @ p for i, p in zip(inputs, split(a, "S(1)" if columns else "S(0)", 2), strict=True)]
    acted = [gelu(h) for h in inner]
    if columns:
        terms = [h @ q for h, q in zip(acted, split(b, "S(0)", 2), strict=True)]
        got = join(terms, "P")
        grads = [torch.autograd.grad(t.sum(), i)[0] for t, i in zip(terms, inputs, strict=True)]
    else:
        # As if GeLU of a term were a term of GeLU: the mistake that the lesson shows.
        terms, got = [h @ b for h in acted], join(acted, "P") @ b
        summed = gelu(join(inner, "P")) @ b
        grads = [grad, grad]
    error = float((got - z).detach().abs().max())
    mended = 0.0 if columns else float((summed - z).detach().abs().max())
    inner, acted, terms, grads = ([t.detach() for t in ts] for ts in (inner, acted, terms, grads))
    return {
        "x": x.detach(),
        "a": a,
        "b": b,
        "z": z.detach(),
        "hidden": hidden.detach(),
        "inner": inner,
        "acted": acted,
        "terms": terms,
        "got": got.detach(),
        "error": error,
        "mended": mended,
        "grad": grad,
        "grads": grads,
        "grad_error": float((sum(grads) - grad).abs().max()) if columns else 0.0,
        "act_whole": gelu(hidden).detach(),
    }


def live(learner: Learner, values: Values) -> Live:
    """Return the MLP on one GPU, the first product cut, GeLU, the sum, and the backward pass."""
    columns = values["first"] == "columns"
    c = run_mlp(str(values["first"]), int(values["seed"]))
    letter = "S(1)" if columns else "P"
    products = [device(r, draw_piece(t, r, letter, "X·A")) for r, t in enumerate(c["inner"])]
    pictures: dict[str, Picture] = {
        "whole": _draw_mlp(c),
        "product": column(row(*products), legend(letter[0])),
        "gelu": _draw_gelu(c, letter),
    }
    block = arranged.arrange_megatron(learner, 2, False) if columns else None
    if columns:
        pictures["sum"] = all_reduce_film(c["terms"], c["got"], "Z")
        pictures["backward"] = all_reduce_film(c["grads"], c["grad"], "the gradient of X")
    else:
        pictures |= _draw_rows_first(c)
    if block:
        pictures["block"] = draw_block(block, F_AND_G_BELOW)
    numbers = {k: c[k] for k in ("error", "mended", "grad_error")}
    return Live({"in_a_block": arranged.with_llama_block(learner)[0].name if block else ""}, pictures, numbers)


def _draw_gelu(c: dict[str, Any], letter: str) -> Drawing:
    """Return what each device has before and after GeLU; that of a term of a sum is neither a slice nor a term."""
    frames = []
    for r, (i, t) in enumerate(zip(c["inner"], c["acted"], strict=True)):
        left = draw_piece(i, r, letter, "before", 48)
        right = (
            matrix(t, owned(r, ""), "after", "no placement", 54)
            if letter == "P"
            else draw_piece(t, r, letter, "after", 54)
        )
        frames.append(device(r, row(left, arrow(46, "GeLU"), right, gap=8)))
    return column(*frames, gap=8)


def _draw_mlp(c: dict[str, Any]) -> Drawing:
    grey = replicated
    first = row(
        matrix(c["x"], grey, "X"), sign("·"), matrix(c["a"], grey, "A"), sign("="), matrix(c["hidden"], grey, "X·A")
    )
    second = row(
        arrow(46, "GeLU"),
        matrix(c["act_whole"], grey, "", "", 54),
        sign("·"),
        matrix(c["b"], grey, "B", "", 36),
        sign("="),
        matrix(c["z"], grey, "Z", "", 60),
        gap=9,
    )
    return column(first, second, gap=16)


def all_reduce_film(terms: list[Any], total: Any, name: str) -> Film:
    """Return an all_reduce of two devices: each sends its term to the other, and both add."""
    places, wide = range(terms[0].numel()), terms[0].shape[1]
    before = [matrix_chunks(t, ("P", r)) for r, t in enumerate(terms)]
    moves = [(r, i, 1 - r, i) for r in range(2) for i in places]
    after = [matrix_chunks(total, ("R", None))] * 2
    stops = [
        BoardState(before, f"Each GPU has a term of {name}: hatched, P, not summed yet.", moves),
        BoardState(after, f"Each has added what it received: {name}, whole on both, grey, R."),
    ]
    return board_film(stops, wide, cell=64)


def _draw_rows_first(c: dict[str, Any]) -> dict[str, Picture]:
    """Return the sum of GeLUs beside GeLU of the sum, and the sum taken first."""
    act = matrix(c["act_whole"], replicated, "GeLU(X·A)", "", 54)
    summed = matrix(c["acted"][0] + c["acted"][1], owned(5, ""), "GeLU(X₀·A₀) + GeLU(X₁·A₁)", "", 54)
    first = matrix(c["hidden"], replicated, "X·A summed", "R")
    then = matrix(c["act_whole"], replicated, "GeLU(X·A)", "R", 54)
    return {"wrong": row(summed, sign("≠"), act), "cure": row(first, arrow(46, "GeLU"), then)}


LESSON = read_lesson("05-mlp", live)
