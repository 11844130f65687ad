"""Losses are sums over tokens or elements. If these are sharded, each GPU has a term of the sum, so the loss is Partial."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import Op
from planner_core.ops.operators import Kind, LocalBytes, LocalExecution, Operator, operators
from planner_core.ops.rules import (
    WHOLE,
    DimOf,
    Internal,
    Rule,
    RuleFn,
    Shapes,
    Split,
    broadcast_splits,
    operand_dim,
    split,
)

_COUNT = Internal("forward", "all_reduce", 4)
"""A mean divides by the number of valid targets on all GPUs, which are summed by this collective."""
_WEIGHTS = Internal("forward", "all_reduce", 1, sends=(2,), least_item=4)
"""Of targets with a weight for each class, the weights are summed."""
_BY_WEIGHTS = frozenset({"mse_loss", "l1_loss", "huber_loss"})
"""Losses whose mean divides by the sum of the weights, if there are any, and not by the number of elements."""


def _without_legacy_arguments(rule: RuleFn) -> RuleFn:
    """Return a rule that leaves a loss whole if it is called by arguments of old (`size_average`, `reduce`), which say another
    reduction."""

    def rule_unless_legacy(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        old = any(op.attrs.get(name) is not None for name in ("size_average", "reduce"))
        return Rule(()) if old else rule(op, ins, outs)

    return rule_unless_legacy


def _cross_entropy(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens may be sharded: the loss is a sum over the valid targets of all ranks. Classes may be sharded: ranks exchange the
    maximum, the sum of exponentials and the logit of the target."""
    tokens = _per_target(op, ins, outs)
    plain = len(ins) == 2 and len(ins[0]) == 2 and len(ins[1]) == 1 and not op.attrs.get("label_smoothing")
    if not tokens.splits or not plain or op.attrs.get("reduction", "mean") == "none":
        return tokens
    exchange = Internal("forward", "all_reduce", 4 * ins[0][0], ("tokens",), count=3)
    classes = Split("classes", (1, None), (WHOLE,), (ins[0][1],), internal=(exchange,))
    return Rule((*tokens.splits, classes))


def _per_target(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Logits [sample, class, ...] and targets [sample, ...] (or a weight for each class), perhaps with a weight of each class: every
    dim but that of classes may be sharded."""
    logits, reduction = ins[0], op.attrs.get("reduction", "mean")
    if len(ins) not in (2, 3) or len(logits) < 2:
        return Rule((), is_known=len(ins) in (2, 3))
    soft, none, tokens = ins[1] == logits, reduction == "none", (logits[0], *logits[2:])
    named = op.attrs.get("arg_names", ("input", "target"))
    fits = (soft or ins[1] == tokens) and all(w == logits[1:2] for w in ins[2:]) and outs[0] == (tokens if none else ())
    if not fits or not isinstance(named, tuple) or named[:2] != ("input", "target"):
        return Rule(())
    count = (_COUNT if len(ins) == 2 else _WEIGHTS,) if reduction == "mean" and not soft else ()
    splits = []
    for dim in (0, *range(2, len(logits))):
        target_dim = dim if soft else max(0, dim - 1)
        out: DimOf = max(0, dim - 1) if none else None
        places = (dim, target_dim, None)[: len(ins)]
        splits.append(Split("tokens" if dim == 0 else f"d{dim}", places, (out,), (logits[dim],), internal=count))
    return Rule(tuple(splits))


def _saved_log_softmax_bytes(local: LocalBytes) -> int:
    """Return the bytes of the log-softmax, which cross-entropy keeps. Sharded by class it is in 32-bit
    (`runtime/program/operators/functions.py`)."""
    return 4 * local.ins[0] // local.item_bytes[0] if "classes" in local.splits else local.ins[0]


def _backward_log_softmax_bytes(local: LocalBytes) -> int:
    """Return the bytes that cross-entropy uses in backward beside the gradient of the logits: one copy of it. Sharded by class, the 32-bit
    tensor becomes the gradient, and only a gradient of fewer bits is a copy."""
    if "classes" not in local.splits:
        return local.ins[0]
    return 4 * local.ins[0] // local.item_bytes[0] if local.item_bytes[0] < 4 else 0


def _mean_loss(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims may be sharded if the operands are not broadcast along them; weights may be."""
    if op.attrs.get("reduction", "mean") not in ("mean", "sum"):
        return Rule(tuple(broadcast_splits(ins, outs[0])))
    if len(ins) > 2 and op.fn in _BY_WEIGHTS:
        return Rule(())
    rank = len(ins[0])
    same = [d for d, n in enumerate(ins[0]) if n > 1 and len(ins[1]) == rank and ins[1][d] == n]
    return Rule(tuple(split(f"d{d}", [operand_dim(s, rank, d) for s in ins], [None], ins[0][d]) for d in same))


def _row_loss(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples may be sharded, which are the first dim of every operand."""
    count = ins[0][0] if ins[0] else 1
    if (
        len(ins[0]) < 2
        or any(not s or s[0] != count for s in ins)
        or op.attrs.get("reduction", "mean") not in ("mean", "sum")
    ):
        return Rule(())
    return Rule((split("d0", [0] * len(ins), [None], count),))


def _ctc_loss(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples may be sharded if the lengths are tensors. Log-probabilities are [steps, batch, kinds], targets [batch, length]."""
    whole = len(ins) != 4 or len(ins[0]) != 3 or len(ins[1]) != 2
    if whole or op.attrs.get("reduction", "mean") not in ("mean", "sum"):
        return Rule(())
    return Rule((split("d0", [1, 0, 0, 0], [None], ins[0][1]),))


_LOSSES = (
    Operator(
        name="cross_entropy",
        kind=Kind.LOSS,
        rule=_cross_entropy,
        spellings=("cross_entropy_loss",),
        arguments="input target weight size_average ignore_index reduce reduction label_smoothing",
        defaults={"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0},
        extra_saved_bytes=_saved_log_softmax_bytes,
        backward_workspace_bytes=_backward_log_softmax_bytes,
        is_logits_loss=True,
        # forward: log-softmax and the loss. Backward: the gradient, the zeros of the sparse gradient, and log-softmax's gradient.
        # For a float32 loss of bfloat16 logits that is 30.8 bytes per logit, with 12 of the casts: fitted to published runs
        # (40 by count); compiled it is 10.8
        memory_passes=(2.0, 2.7, 0.7, 1.0),
        local_execution=LocalExecution.EXCHANGE,
        title="loss",
    ),
    Operator(
        name="nll_loss",
        kind=Kind.LOSS,
        rule=_per_target,
        spellings=("nll_loss_nd",),
        local_execution=LocalExecution.EXCHANGE,
        title="loss",
    ),
    # elementwise and then a sum: these join the group that makes their operands
    *operators(
        "mse_loss",
        kind=Kind.LOSS,
        rule=_mean_loss,
        leads_group=False,
        local_execution=LocalExecution.MEAN,
        title="loss",
    ),
    *operators(
        "l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
        kind=Kind.LOSS,
        rule=_mean_loss,
        leads_group=False,
        local_execution=LocalExecution.MEAN,
    ),
    *operators(
        "kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss",
        kind=Kind.LOSS,
        rule=_mean_loss,
        leads_group=False,
        local_execution=LocalExecution.MEAN,
    ),
    *operators(
        "triplet_margin_loss cosine_embedding_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss",
        kind=Kind.LOSS,
        rule=_row_loss,
        leads_group=False,
        local_execution=LocalExecution.MEAN,
    ),
    *operators("ctc_loss", kind=Kind.LOSS, rule=_ctc_loss, leads_group=False, local_execution=LocalExecution.MEAN),
)
OPERATORS = tuple(replace(loss, rule=_without_legacy_arguments(loss.rule)) for loss in _LOSSES)
