"""Rules of ops that compute: elementwise, reductions, products, attention, losses (see `rules`)."""

from __future__ import annotations

from planner_core.core import Op
from planner_core.ops.catalog.elementwise import _elementwise
from planner_core.ops.registry import (
    WHOLE,
    DimOf,
    Internal,
    Rule,
    Shapes,
    Split,
    aligned,
    rule,
    split,
)


@rule("layer_norm", "rms_norm")
def _norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    shape = op.attrs.get("normalized_shape")
    inner = len(shape) if isinstance(shape, tuple) else 1
    rest: list[DimOf] = [None] * (len(ins) - 1)
    kept = range(len(ins[0]) - inner)
    return Rule(tuple(split(f"d{d}", [d, *rest], [d], ins[0][d]) for d in kept if ins[0][d] > 1))


@rule("group_norm", "instance_norm")
def _group_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    return Rule((split("d0", [0] + [None] * (len(ins) - 1), [0], ins[0][0]),))


@rule("batch_norm")
def _batch_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Channels are independent; a split batch sums its statistics (2C numbers forward, 2C backward)."""
    channels = ins[0][1]
    sync = tuple(Internal(phase, "all_reduce", 2 * channels * 4, ("d1",)) for phase in ("forward", "backward"))
    rest = [0] * (len(ins) - 1)
    batch = Split(
        "d0", (0, *[None] * len(rest)), (0,), (ins[0][0],), internal=sync if op.attrs.get("training", True) else ()
    )
    return Rule((batch, split("d1", [1, *rest], [1], channels)))


@rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d",
      "interpolate", "pixel_shuffle", "upsample")  # fmt: skip
def _pool(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    spatial = int(op.fn[-2]) if op.fn.endswith("d") else len(ins[0]) - 2
    kept = [d for d in range(len(ins[0]) - spatial) if ins[0][d] == outs[0][d] > 1]
    return Rule(tuple(split(f"d{d}", [d], [d] * len(outs), ins[0][d]) for d in kept))


@rule("scaled_dot_product_attention")
def _attention(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch and heads; query length only without a causal mask. Key and value heads bound the heads split."""
    q, k = ins[0], ins[1]
    mask = ins[3] if len(ins) > 3 else None

    def at(dim: int, key: DimOf, value: DimOf) -> list[DimOf]:
        return [dim, key, value] + ([aligned(mask, len(q), dim)] if mask is not None else [])

    if len(q) != 4:
        return Rule((split("batch", at(0, 0, 0), [0], q[0]),) if len(q) > 2 else ())
    found = [split("batch", at(0, 0, 0), [0], q[0])] if q[0] > 1 else []
    if q[1] > 1 and k[1] > 1:
        found.append(split("heads", at(1, 1, 1), [1], q[1], k[1]))
    if not op.attrs.get("is_causal") and q[2] > 1:
        found.append(split("queries", at(2, None, None), [2], q[2]))
    return Rule(tuple(found))


@rule("cross_entropy")
def _cross_entropy(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens: a sum over the valid targets of every rank; classes: max, sum of exponentials and target logit are exchanged."""
    logits, targets = ins[0], ins[1]
    if (
        len(logits) != 2
        or op.attrs.get("reduction", "mean") not in ("mean", "sum")
        or len(targets) != 1
        or len(ins) > 2
    ):
        return Rule((), known=len(ins) == 2)
    if op.attrs.get("label_smoothing"):
        return Rule(())
    count = (Internal("forward", "all_reduce", 4),) if op.attrs.get("reduction", "mean") == "mean" else ()
    tokens = Split("tokens", (0, 0), (None,), (logits[0],), internal=count)
    exchange = Internal("forward", "all_reduce", 4 * logits[0], ("tokens",), count=3)
    classes = Split("classes", (1, None), (WHOLE,), (logits[1],), internal=(exchange,))
    return Rule((tokens, classes))


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits")
def _mean_loss(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    if op.attrs.get("reduction", "mean") not in ("mean", "sum"):
        return Rule(tuple(_elementwise(ins, outs[0])))
    same = [d for d, n in enumerate(ins[0]) if n > 1 and all(len(s) == len(ins[0]) and s[d] == n for s in ins)]
    return Rule(tuple(split(f"d{d}", [d] * len(ins), [None], ins[0][d]) for d in same))


# --- what autograd keeps -----------------------------------------------------------------------------


# --- work --------------------------------------------------------------------------------------------
