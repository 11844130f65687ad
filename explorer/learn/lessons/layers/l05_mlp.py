"""5. Column, then row: the MLP with one all-reduce each way, and why GeLU may not follow a partial sum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.svg_tensors import (
    Drawing,
    arrow,
    column,
    device,
    difference,
    legend,
    matrix,
    owned,
    replicated,
    row,
    sign,
    svg,
)
from explorer.learn import links
from explorer.learn.blocks import arranged
from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.block import F_AND_G_BELOW
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.board import BoardState, board, numbers_of
from explorer.learn.pictures.film import Film

CODE = """\
import torch
import torch.nn.functional as F

same = torch.Generator().manual_seed(0)  # the numbers of the picture
X, A, B = (torch.randint(-2, 3, size, generator=same).double() for size in ((2, 4), (4, 4), (4, 4)))
Z = F.gelu(X @ A) @ B

# A by columns, B by rows: one sum at the end
terms = [F.gelu(X @ a) @ b for a, b in zip(A.chunk(2, dim=1), B.chunk(2, dim=0))]
print("columns, then rows: difference", (sum(terms) - Z).abs().max().item())  # rounding only

# A by rows: GeLU of a term is not a term of GeLU
wrong = [F.gelu(x @ a) for x, a in zip(X.chunk(2, dim=1), A.chunk(2, dim=0))]
print("rows first: difference", (sum(wrong) @ B - Z).abs().max().item())  # a different function
"""


@lru_cache(maxsize=64)
def compute(first: str, seed: int) -> dict[str, Any]:
    """The MLP Z = GeLU(X A) B, whole and on two devices, with the gradient of X by autograd both ways."""
    import torch
    from torch.nn.functional import gelu

    gen = torch.Generator().manual_seed(seed)
    x, a, b = (torch.randint(-2, 3, s, generator=gen).double() for s in ((2, 4), (4, 4), (4, 4)))
    x.requires_grad_()
    hidden = x @ a
    z = gelu(hidden) @ b
    (grad,) = torch.autograd.grad(z.sum(), x)
    columns = first == "columns"
    parts = list(a.chunk(2, dim=1 if columns else 0))
    inputs = [x.detach().clone().requires_grad_() for _ in range(2)]
    ins = inputs if columns else [t.chunk(2, dim=1)[r] for r, t in enumerate(inputs)]
    inner = [i @ p for i, p in zip(ins, parts, strict=True)]
    acted = [gelu(h) for h in inner]
    if columns:
        terms = [h @ q for h, q in zip(acted, b.chunk(2, dim=0), strict=True)]
        got = terms[0] + terms[1]
        grads = [torch.autograd.grad(t.sum(), i)[0] for t, i in zip(terms, inputs, strict=True)]
    else:
        terms, got = [h @ b for h in acted], (acted[0] + acted[1]) @ b
        summed = gelu(inner[0].detach() + inner[1].detach()) @ b
        grads = [grad, grad]
    error = float((got - z).detach().abs().max())
    mended = 0.0 if columns else float((summed - z).detach().abs().max())
    inner, acted, terms, grads = ([t.detach() for t in ts] for ts in (inner, acted, terms, grads))
    return {
        "x": x.detach(), "a": a, "b": b, "z": z.detach(), "hidden": hidden.detach(), "inner": inner, "acted": acted,
        "terms": terms, "got": got.detach(), "error": error, "mended": mended, "grad": grad, "grads": grads,
        "grad_error": float((sum(grads) - grad).abs().max()) if columns else 0.0, "act_whole": gelu(hidden).detach(),
    }  # fmt: skip


def scene(learner: Learner, values: Values) -> Scene:
    """The MLP on one GPU, the first product cut, GeLU, the sum, and the backward pass."""
    columns = values["first"] == "columns"
    c = compute(str(values["first"]), int(values["seed"]))
    steps = [
        Step(
            "On one GPU",
            "An MLP is two products with a GeLU between: `Z = GeLU(X · A) · B`. GeLU works on each number alone.",
            svg(_whole(c), "The MLP on one GPU"),
        )
    ]
    look, letter = ("S", "S(1)") if columns else ("P", "P")
    frames = [
        device(r, matrix(t, owned(r, look), "X·A", letter if columns else "P, not summed yet"))
        for r, t in enumerate(c["inner"])
    ]
    says = (
        "A is cut by columns, so each device has finished columns of `X · A`."
        if columns
        else "A is cut by rows, so each device has only a term of `X · A`."
    )
    steps.append(Step("First product", says, svg(column(row(*frames), legend(look)), "First product on two GPUs")))
    frames = [
        device(
            r,
            row(
                matrix(i, owned(r, look), "before", "" if columns else "P, not summed yet", 48),
                arrow(46, "GeLU"),
                matrix(t, owned(r, look if columns else ""), "after", "S(1)" if columns else "no placement", 54),
                gap=8,
            ),
        )
        for r, (i, t) in enumerate(zip(c["inner"], c["acted"], strict=True))
    ]
    steps.append(
        Step(
            "GeLU on each device",
            "Each device applies GeLU to what it has, without asking the other.",
            svg(column(*frames, gap=8), "GeLU on each of two GPUs"),
        )
    )
    steps += [*_after_columns(c), *_in_a_block(learner)] if columns else _after_rows(c)
    return Scene(tuple(steps), {k: c[k] for k in ("error", "mended", "grad_error")}, reveal=3)


def _whole(c: dict[str, Any]) -> Drawing:
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


def exchanged(terms: list[Any], total: Any, name: str) -> Film:
    """An all_reduce of two devices: each sends its term to the other, and both add."""
    places, wide = range(terms[0].numel()), terms[0].shape[1]
    before = [numbers_of(t, ("P", r)) for r, t in enumerate(terms)]
    moves = [(r, i, 1 - r, i) for r in range(2) for i in places]
    after = [numbers_of(total, ("R", None))] * 2
    stops = [
        BoardState(before, f"Each GPU has a term of {name}: hatched, P, not summed yet.", moves),
        BoardState(after, f"Each has added what it received: {name}, whole on both, grey, R."),
    ]
    return board(stops, wide, cell=64)


def _after_columns(c: dict[str, Any]) -> list[Step]:
    return [
        Step("Second product, one sum",
            "B is cut by rows to match, so the hidden numbers need no message at all. One **all_reduce** of the "
            f"terms gives Z. Largest difference: **{difference(c['error'])}**, rounding.", exchanged(c["terms"], c["got"], "Z").markup("Terms of Z are summed")),
        Step("Backward: f and g",
            "Going back (the loss here is the sum of all numbers of Z), X was used whole by both devices, so its gradient "
            "comes as terms: one **all_reduce** again. Megatron-LM calls the pair f and g: f does nothing forward and sums backward, g sums forward "
            f"and does nothing backward. Against autograd on one GPU: **{difference(c['grad_error'])}**.", exchanged(c["grads"], c["grad"], "the gradient of X").markup("Terms of the gradient of X are summed")),
    ]  # fmt: skip


def shown(learner: Learner, values: Values) -> Arranged | None:
    """The block that Megatron-LM cuts for two devices."""
    return arranged.megatron(learner, 2, False)


def _in_a_block(learner: Learner) -> list[Step]:
    """The feed-forward half of the block that the lessons to come complete."""
    case = arranged.megatron(learner, 2, False)
    if case is None:
        return []
    name = arranged.suited(learner)[0].name
    says = (
        f"The same in a layer of {name}: gate and up are cut by columns, down by rows. **Mind the labels**: PyTorch keeps a weight as "
        "[outputs, inputs], the other way round than the A and B above. So S(0) of a weight, its rows as kept, is a cut by columns of the mathematics, and "
        "S(1) one by rows. f stands before gate and up: it sums backward. g stands behind down: it sums forward. Between them SiLU of gate is multiplied with "
        "up, number by number. The line above, the residual stream, carries the input past both, to be added at the end. Lesson 6 adds the other half."
    )
    return [
        Step(
            "Where f and g stand",
            says,
            svg(drawn(case, F_AND_G_BELOW), "The feed-forward part of a block with f and g in place"),
        )
    ]


def _after_rows(c: dict[str, Any]) -> list[Step]:
    bad = row(
        matrix(c["acted"][0] + c["acted"][1], owned(5, ""), "GeLU(X₀·A₀) + GeLU(X₁·A₁)", "", 54),
        sign("≠"),
        matrix(c["act_whole"], replicated, "GeLU(X·A)", "", 54),
    )
    return [
        Step("The numbers are wrong",
            "GeLU bends: GeLU of a term is not a term of GeLU. Adding afterwards gives another function. Largest "
            f"difference in Z: **{c['error']:.2f}**.", svg(bad, "The sum of GeLUs differs from GeLU of the sum")),
        Step("The cure costs a message",
            f"Sum first, then GeLU: an all_reduce in the middle, and the difference is **{difference(c['mended'])}**. But "
            "that is a second all_reduce forward. Cutting A by columns needs none there: column, then row.", svg(row(matrix(c["hidden"], replicated, "X·A summed", "R"), arrow(46, "GeLU"), matrix(c["act_whole"], replicated, "GeLU(X·A)", "R", 54)), "Summed before GeLU")),
    ]  # fmt: skip


def question(learner: Learner, values: Values) -> Question:
    """May GeLU follow this cut?"""
    c = compute(str(values["first"]), int(values["seed"]))
    if values["first"] == "columns":
        return asked(
            "Both devices went on to GeLU without talking. How many all_reduces does the whole MLP need forward?",
            ("One, at the very end",
                "After B, cut by rows, each device has a term of Z; summing them once gives Z (difference "
                f"{difference(c['error'])}). Columns first, then rows: one all_reduce forward and, as you will see, one backward."),
            (
                ("Two, one after each product", "After the first product the columns are finished numbers: nothing is left to sum."),
                ("None", "Each device saw half of the rows of B, so its Z is only a term. Without a sum nobody has Z."),
                ("One per column of A", "A message carries a whole tensor. Cutting A by columns needs none."),
            ), 1,
        )  # fmt: skip
    return asked(
        "The devices hold terms of X·A and applied GeLU to their terms. What does adding up give now?",
        ("Wrong numbers",
            "GeLU is not a straight line, so GeLU(u) + GeLU(v) is not GeLU(u + v). Here Z is off by up to "
            f"{c['error']:.2f}."),
        (
            ("The right Z", f"Only if GeLU were a straight line. Here Z is off by up to {c['error']:.2f}."),
            ("The right Z up to rounding", f"Rounding is near 1e-15. The difference here is {c['error']:.2f}."),
        ), 0,
    )  # fmt: skip


LESSON = Lesson(
    5, "mlp", "Column, then row", "Two products with a bend between them: how the first is cut decides what the second one costs.",
    (
        "Most of a transformer's weights are in its MLPs. Choose how A is cut and see what GeLU makes of it. A "
        "gated MLP, as in Llama, is cut alike: gate and up by columns, down by rows.",),
    (
        ("MLP, feed-forward", "two weights with a nonlinear function such as GeLU between them"),
        ("Megatron-LM", "NVIDIA's training code; the way it splits transformers is that of lessons 5 to 7"),
        ("f and g", "Megatron-LM's names for the two points where the devices talk, each the other's backward"),
    ),
    (Control("first", "Cut A by", ("columns", "rows"), "columns", step=2), Control("seed", "Other numbers", tuple(range(6)), 0, kind="draw")),
    scene, question, CODE, ("fold", "The feed-forward part of this model, with its placements"),
    focus=links.feed_forward, block=shown,
)  # fmt: skip
