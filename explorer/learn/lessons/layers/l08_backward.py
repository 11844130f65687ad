"""8. Backward: where each gradient is partial, and who sums it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from explorer.figures.svg_tensors import (
    Drawing,
    arrow,
    column,
    device,
    legend,
    matrix,
    number,
    owned,
    replicated,
    row,
    svg,
    table,
)
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked

N = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """How Y = X W is cut: placements of X, W, Y and of the gradients of X and W as each device makes them."""

    name: str
    x: str
    w: str
    y: str
    grad_x: str
    grad_w: str
    fix: str


WAYS = {
    "data": Cut("batch split: data parallel", "S(0)", "R", "S(0)", "S(0)", "P", "all_reduce of the weight's gradient"),
    "column": Cut("weight by columns", "R", "S(1)", "S(1)", "P", "S(1)", "all_reduce of the input's gradient"),
    "row": Cut(
        "weight by rows", "S(1)", "S(0)", "P", "S(1)", "S(0)", "nothing backward; the result was summed forward"
    ),
    "fsdp": Cut("FSDP", "S(0)", "R", "S(0)", "S(0)", "P", "reduce_scatter of the weight's gradient"),
}
CODE = """\
import torch

same = torch.Generator().manual_seed(2)  # the numbers of the picture
X, W = (torch.randint(-2, 3, (4, 4), generator=same).double() for _ in range(2))
(X @ W.requires_grad_()).square().sum().backward()  # the whole batch on one device

terms = []
for x in X.chunk(2):  # two devices, half of the batch each
    w = W.detach().clone().requires_grad_()
    (x @ w).square().sum().backward()
    terms.append(w.grad)  # Partial: a term of the gradient
print("top left of W's gradient:", " + ".join(f"{t[0, 0]:g}" for t in terms), f"= {W.grad[0, 0]:g}")
print("difference", (sum(terms) - W.grad).abs().max().item())  # the all_reduce of data parallelism

mine = sum(terms).chunk(2)  # FSDP: a reduce_scatter leaves each device one slice
"""


@lru_cache(maxsize=64)
def compute(way: str, seed: int) -> dict[str, Any]:
    """Forward and backward of sum((X W)²) whole and on two devices: gradients as each device makes them."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    x, w = torch.randint(-2, 3, (4, 4), generator=gen).double(), torch.randint(-2, 3, (4, 4), generator=gen).double()
    x.requires_grad_()
    w.requires_grad_()
    y = x @ w
    gx, gw = torch.autograd.grad(y.square().sum(), (x, w))
    cut = WAYS[way]
    xs, ws = _pieces(x.detach(), cut.x), _pieces(w.detach(), cut.w)
    leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in zip(xs, ws, strict=True)]
    ys = [a @ b for a, b in leaves]
    # where Y was summed (g) every device has the whole result, and its gradient
    seeds = [2 * (ys[0] + ys[1]).detach()] * N if cut.y == "P" else [2 * t.detach() for t in ys]
    found = [torch.autograd.grad(t, ab, s) for t, ab, s in zip(ys, leaves, seeds, strict=True)]
    grads_x, grads_w = [f[0] for f in found], [f[1] for f in found]
    joined = ((_join(grads_x, cut.grad_x), gx), (_join(grads_w, cut.grad_w), gw))
    error = max(float((got - want).abs().max()) for got, want in joined)
    return {
        "xs": xs, "ws": ws, "ys": [t.detach() for t in ys], "grads_x": grads_x, "grads_w": grads_w, "gx": gx, "gw": gw, "error": error,
    }  # fmt: skip


def _pieces(tensor: Any, placement: str) -> list[Any]:
    """What each device holds of a tensor that is sharded or replicated."""
    return list(tensor.chunk(N, int(placement[2]))) if placement[0] == "S" else [tensor.clone() for _ in range(N)]


def _join(pieces: list[Any], placement: str) -> Any:
    """The whole tensor: slices side by side, or terms summed."""
    import torch

    return torch.cat(pieces, int(placement[2])) if placement[0] == "S" else torch.stack(pieces).sum(0)


def scene(learner: Learner, values: Values) -> Scene:
    """Forward placements, gradients on each device, the sum, and all ways as one algebra."""
    way = str(values["way"])
    cut, c = WAYS[way], compute(way, int(values["seed"]))
    stored = (
        " Each device stores only a slice of W and gathers the rest just before use (all_gather)."
        if way == "fsdp"
        else ""
    )
    steps = [
        Step("Forward", f"{cut.name[:1].upper() + cut.name[1:]}. X is {cut.x}, W is {cut.w}, so Y is {cut.y}.{stored}", svg(column(*(_held(r, (("X", c["xs"][r], cut.x), ("W", c["ws"][r], cut.w), ("Y", c["ys"][r], cut.y))) for r in range(N)), gap=10), "Forward on two GPUs")),
        Step("Backward, on each device",
            f"Each device runs its own backward pass. The gradient of X comes out as {cut.grad_x}, that of W as "
            f"{cut.grad_w}.", svg(column(*(_held(r, (("gradient of X", c["grads_x"][r], cut.grad_x), ("gradient of W", c["grads_w"][r], cut.grad_w))) for r in range(N)), gap=10), "Backward on two GPUs")),
        Step("Who sums",
            f"To put right: {cut.fix}. Against autograd on one GPU the largest difference is "
            f"**{number(c['error'])}**.", svg(_sum(way, c), "The partial gradient is summed")),
        Step("One algebra",
            "Used whole while the work is split: its gradient is a sum of terms. That one rule is data "
            "parallelism, tensor parallelism and FSDP. Shardscope's planner applies it to every operation of a model. Pipeline "
            "stages, which deal out whole layers, are not in this course.", table(("way", "X", "W", "Y", "grad of X", "grad of W", "to put right"), [(w.name, w.x, w.w, w.y, w.grad_x, w.grad_w, w.fix) for w in WAYS.values()], list(WAYS).index(way))),
    ]  # fmt: skip
    return Scene(
        tuple(steps), {"error": c["error"], "gw00": float(c["gw"][0, 0]), "gx00": float(c["gx"][0, 0])}, reveal=1
    )


def _style(r: int, placement: str) -> Any:
    return replicated if placement == "R" else owned(r, placement[0])


def _held(r: int, what: tuple[tuple[str, Any, str], ...]) -> Drawing:
    boxes = [matrix(t, _style(r, p), name, "P, not summed yet" if p == "P" else p, cell=40) for name, t, p in what]
    return device(r, row(*boxes, gap=18, align=0))


def _sum(way: str, c: dict[str, Any]) -> Drawing:
    cut = WAYS[way]
    if way == "row":
        return column(
            *(
                _held(r, (("gradient of X", c["grads_x"][r], "S(1)"), ("gradient of W", c["grads_w"][r], "S(0)")))
                for r in range(N)
            ),
            gap=10,
        )
    terms, whole, name = (
        (c["grads_w"], c["gw"], "gradient of W") if cut.grad_w == "P" else (c["grads_x"], c["gx"], "gradient of X")
    )
    before = row(*(_held(r, ((name, terms[r], "P"),)) for r in range(N)), gap=10)
    slices = list(whole.chunk(N, 0)) if way == "fsdp" else [whole, whole]
    after = row(*(_held(r, ((name, slices[r], "S(0)" if way == "fsdp" else "R"),)) for r in range(N)), gap=10, align=0)
    return column(
        before,
        arrow(120, "reduce_scatter" if way == "fsdp" else "all_reduce"),
        after,
        legend("P", "S" if way == "fsdp" else "R"),
        gap=8,
    )


def _mistake(said: str, cut: Cut) -> str:
    """Why the gradient that an answer names is not Partial, or which Partial gradient it forgets."""
    if not said:
        return "One of them is a term: somebody sees only a part. "
    placement = cut.grad_w if said == "W" else cut.grad_x
    return f"Each device owns its {'slice' if placement[0] == 'S' else 'copy'} of {said} and finishes its gradient. "


def question(learner: Learner, values: Values) -> Question:
    """Which gradient is partial?"""
    cut = WAYS[str(values["way"])]
    right = "W" if cut.grad_w == "P" else "X" if cut.grad_x == "P" else ""
    name = {"W": "That of W", "X": "That of X", "": "Neither"}
    why = {
        "W":
            "W is used whole by both devices on different rows of X, so each device's gradient of W misses the "
            "other rows. What is used whole while the work is split gets a gradient in terms.",
        "X":
            "X is used whole by both devices with different columns of W, so each device's gradient of X misses "
            "the other columns.",
        "":
            "X and W are both cut along the inner dimension, and each device owns its slices: their gradients "
            "are finished.",
    }  # fmt: skip
    hint = "What does every device use whole, while the work is split?" if right else "Is anything used whole here?"
    wrong = tuple((name[k], _mistake(k, cut) + hint) for k in name if k != right)
    return asked(
        f"{cut.name[:1].upper() + cut.name[1:]}. In the backward pass, which gradient is only a term of a sum "
        "(Partial) on each device?",
        (name[right], why[right]),
        wrong,
        list(name).index(right),
    )


LESSON = Lesson(
    8, "backward", "Backward", "How forward is split decides which gradient is finished on each device, and which is not.",
    (
        "Every product runs three times: forward, for the gradient of its input, for the gradient of its weight. "
        "Each has its own placement. The loss here is the sum of the squares of Y's numbers, so the gradient of Y is 2 Y, and gradients of two halves of a batch add up. (Of a mean they would be averaged: DDP and FSDP divide by the number of devices.) **Data parallelism** splits the batch "
        "and keeps W whole. **FSDP** does too, but each device stores a slice of W only, and gathers the others' slices just before it uses W.",),
    (
        ("Data parallelism", "every device has all weights and a part of the batch; DDP in PyTorch"),
        ("FSDP, ZeRO-3", "data parallelism in which each device stores a slice of the weights and gathers them when used"),
    ),
    (
        Control("way", "Split", tuple(WAYS), "data", {k: w.name for k, w in WAYS.items()}),
        Control("seed", "Other numbers", tuple(range(6)), 2, kind="draw"),
    ),
    scene, question, CODE, ("compare", "Data parallelism, FSDP and Megatron-LM for this model"),
    focus=links.ways,
)  # fmt: skip
