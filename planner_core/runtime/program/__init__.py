"""The functions that generated code calls at run time: collectives, weights that are gathered and freed, gradients in buckets.

Exported scripts import from here the functions that their blocks call. Nothing but torch is imported.
"""

from planner_core.runtime.program.gradients import GradientBucket, ReductionQueue
from planner_core.runtime.program.names import (
    Axis,
    EditableFunctions,
    F,
    all_gather,
    all_reduce,
    all_to_all,
    attention,
    batch_norm,
    causal_attention,
    chunked,
    cross_entropy,
    dispatched_experts,
    divide,
    dropout,
    embedding,
    expect,
    histc,
    keep,
    laid_out,
    masked,
    move,
    nll_loss,
    own_experts,
    pad,
    plan_digest,
    reduce_scatter,
    ring_attention,
    shard,
    torch,
    with_item,
)
from planner_core.runtime.program.units import UnitCall
from planner_core.runtime.program.weights import WeightBucket

IN_FLIGHT = (
    (WeightBucket, "issue"),
    (WeightBucket, "wait"),
    (GradientBucket, "add_gradient"),
    (ReductionQueue, "push"),
    (ReductionQueue, "advance"),
)
"""The methods that gather weights ahead of their use and reduce gradients. What they allocate counts as in flight."""

__all__ = [
    "IN_FLIGHT",
    "Axis",
    "EditableFunctions",
    "F",
    "UnitCall",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "batch_norm",
    "causal_attention",
    "chunked",
    "cross_entropy",
    "dispatched_experts",
    "divide",
    "dropout",
    "embedding",
    "expect",
    "histc",
    "keep",
    "laid_out",
    "masked",
    "move",
    "nll_loss",
    "own_experts",
    "pad",
    "plan_digest",
    "reduce_scatter",
    "ring_attention",
    "shard",
    "torch",
    "with_item",
]
