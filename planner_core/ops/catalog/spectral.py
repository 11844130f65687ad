"""Rules of ops that few models use: weight norm, Fourier transforms, windows, strided views, a loss of log-probabilities (see `rules`)."""

from __future__ import annotations

from planner_core.core import Op
from planner_core.ops.registry import DimOf, Internal, Rule, Shapes, Split, dims_attr, rule, split

_ONE_DIM = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft")


@rule("_weight_norm")
def _weight_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`v * g / |v|`, the norm over all dims but the one that g has: that one may be split."""
    v, g = ins
    own = [d for d, n in enumerate(g) if n > 1] if len(g) == len(v) else []
    return Rule(tuple(split(f"d{d}", [d, d], [d], v[d]) for d in own if len(own) == 1 and v[d] == g[d]))


@rule(*_ONE_DIM, "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2")
def _fourier(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Linear, and whole along the dims that it transforms."""
    rank = len(ins[0])
    if "dim" in op.attrs:
        along = dims_attr(op, "dim", rank)
    else:
        num = 1 if op.fn in _ONE_DIM else 2 if op.fn.endswith("2") else _num_sizes(op, rank)
        along = tuple(range(rank - num, rank))
    kept = [d for d in range(rank) if d not in along and ins[0][d] > 1]
    return Rule(tuple(split(f"d{d}", [d], [d], ins[0][d]) for d in kept), linear=(0,))


def _num_sizes(op: Op, rank: int) -> int:
    sizes = op.attrs.get("s")
    return len(sizes) if isinstance(sizes, tuple) else rank


@rule("nll_loss")
def _nll_loss(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens, as cross-entropy: a sum over the valid targets of every rank."""
    reduction = op.attrs.get("reduction", "mean")
    if len(ins) != 2 or len(ins[0]) != 2 or len(ins[1]) != 1 or reduction not in ("mean", "sum"):
        return Rule((), known=len(ins) == 2)
    count = (Internal("forward", "all_reduce", 4),) if reduction == "mean" else ()
    dims: tuple[DimOf, ...] = (0, 0)
    return Rule((Split("tokens", dims, (None,), (ins[0][0],), internal=count),))
