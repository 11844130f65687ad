"""What generated code runs on: collectives, weights that come and go, gradients in buckets. Torch only.

An exported script finds here what its blocks name.
"""

from planner_core.runtime.program.names import (
    Axis,
    F,
    Written,
    all_gather,
    all_reduce,
    all_to_all,
    attention,
    batch_norm,
    cross_entropy,
    digest_of,
    divide,
    dropout,
    embedding,
    expect,
    move,
    nll_loss,
    own_experts,
    pad,
    reduce_scatter,
    shard,
    torch,
    with_item,
)

__all__ = [
    "Axis",
    "F",
    "Written",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "batch_norm",
    "cross_entropy",
    "digest_of",
    "divide",
    "dropout",
    "embedding",
    "expect",
    "move",
    "nll_loss",
    "own_experts",
    "pad",
    "reduce_scatter",
    "shard",
    "torch",
    "with_item",
]
