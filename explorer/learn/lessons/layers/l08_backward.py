"""8. Backward: where each gradient is partial, and who sums it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from explorer.figures.svg_tensors import Drawing, arrow, column, device, legend, row
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.tensors import draw_piece, join, split
from explorer.learn.markdown import Live, Picture, read_lesson

N = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """How Y = X W is cut: placements of X, W, Y and of the gradients of X and W as each device makes them."""

    x: str
    w: str
    y: str
    grad_x: str
    grad_w: str
    fix: str


CUTS = {
    "data": Cut("S(0)", "R", "S(0)", "S(0)", "P", "all_reduce of the weight's gradient"),
    "column": Cut("R", "S(1)", "S(1)", "P", "S(1)", "all_reduce of the input's gradient"),
    "row": Cut("S(1)", "S(0)", "P", "S(1)", "S(0)", "nothing backward; the result was summed forward"),
    "fsdp": Cut("S(0)", "R", "S(0)", "S(0)", "P", "reduce_scatter of the weight's gradient"),
}


@remember(64)
def run_backward(cut_name: str, seed: int) -> dict[str, Any]:
    """Run forward and backward of sum((X W)²) whole and on two devices: gradients as each device makes them."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    x, w = torch.randint(-2, 3, (4, 4), generator=gen).double(), torch.randint(-2, 3, (4, 4), generator=gen).double()
    x.requires_grad_()
    w.requires_grad_()
    y = x @ w
    gx, gw = torch.autograd.grad(y.square().sum(), (x, w))
    cut = CUTS[cut_name]
    xs, ws = split(x.detach(), cut.x, N), split(w.detach(), cut.w, N)
    leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in zip(xs, ws, strict=True)]
    ys = [a @ b for a, b in leaves]
    # where Y was summed (g) every device has the whole result, and its gradient
    seeds = [2 * (ys[0] + ys[1]).detach()] * N if cut.y == "P" else [2 * t.detach() for t in ys]
    gradients = [torch.autograd.grad(t, ab, s) for t, ab, s in zip(ys, leaves, seeds, strict=True)]
    grads_x, grads_w = [f[0] for f in gradients], [f[1] for f in gradients]
    joined = ((join(grads_x, cut.grad_x), gx), (join(grads_w, cut.grad_w), gw))
    error = max(float((got - want).abs().max()) for got, want in joined)
    return {
        "xs": xs,
        "ws": ws,
        "ys": [t.detach() for t in ys],
        "grads_x": grads_x,
        "grads_w": grads_w,
        "gx": gx,
        "gw": gw,
        "error": error,
    }


def live(learner: Learner, values: Values) -> Live:
    """Return forward placements, gradients on each device, the sum, and all ways as one algebra."""
    cut_name, names = str(values["way"]), LESSON.controls[0].names
    cut, c = CUTS[cut_name], run_backward(cut_name, int(values["seed"]))
    forward = [(("X", c["xs"][r], cut.x), ("W", c["ws"][r], cut.w), ("Y", c["ys"][r], cut.y)) for r in range(N)]
    gradients = [
        (("gradient of X", c["grads_x"][r], cut.grad_x), ("gradient of W", c["grads_w"][r], cut.grad_w))
        for r in range(N)
    ]
    backward = column(*(_draw_device(r, *what) for r, what in enumerate(gradients)), gap=10)
    pictures: dict[str, Picture] = {
        "forward": column(*(_draw_device(r, *what) for r, what in enumerate(forward)), gap=10),
        "backward": backward,
        "sum": _draw_sum(cut_name, c) if "P" in (cut.grad_x, cut.grad_w) else backward,
    }
    numbers = {"error": c["error"], "gw00": float(c["gw"][0, 0]), "gx00": float(c["gx"][0, 0])}
    return Live({"cut": cut, "cuts": CUTS, "names": names, "name": names[cut_name]}, pictures, numbers)


def _draw_device(r: int, *pieces: tuple[str, Any, str]) -> Drawing:
    """Return a device with (name, piece, placement) of what it holds."""
    return device(r, row(*(draw_piece(t, r, p, name, 40) for name, t, p in pieces), gap=18, align=0))


def _draw_sum(cut_name: str, c: dict[str, Any]) -> Drawing:
    """Return the gradient that is partial, before and after its sum."""
    name = "gradient of W" if CUTS[cut_name].grad_w == "P" else "gradient of X"
    terms, whole = (c["grads_w"], c["gw"]) if CUTS[cut_name].grad_w == "P" else (c["grads_x"], c["gx"])
    collective, placement = ("reduce_scatter", "S(0)") if cut_name == "fsdp" else ("all_reduce", "R")
    before = [_draw_device(r, (name, t, "P")) for r, t in enumerate(terms)]
    after = [_draw_device(r, (name, t, placement)) for r, t in enumerate(split(whole, placement, N))]
    return column(
        row(*before, gap=10), arrow(120, collective), row(*after, gap=10, align=0), legend("P", placement[0]), gap=8
    )


LESSON = read_lesson("08-backward", live)
