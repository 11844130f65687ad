"""FSDP2, PyTorch's fully_shard, by a module of Python."""

from __future__ import annotations

from collections.abc import Iterator

from planner_core.core import divisors
from planner_core.planning.methods.layout import Layout
from planner_core.planning.methods.tools.tool import Tool


def _list_layouts(num_gpus: int) -> Iterator[Layout]:
    """FSDP2 and HSDP: every rank has its own samples. With reshard_after_forward=False weights stay whole between forward and backward,
    and gradients and states are sharded: ZeRO-2."""
    # As many replicas as GPUs would be plain data parallelism, which is not FSDP.
    for replicas in divisors(num_gpus)[: -1 if num_gpus > 1 else 1]:
        yield Layout(dp=replicas, fsdp=num_gpus // replicas)
    if num_gpus > 1:
        yield Layout(dp=num_gpus, zero=2)


FSDP2 = Tool(
    name="fsdp2",
    title="FSDP2",
    other_names=("fsdp",),
    description="A Python module that shards a model by fully_shard, for plans that split the batch only (FSDP, HSDP).",
    suffix=".py",
    writer="data_parallel.write_fsdp2",
    data_parallel=("FSDP2",),
    layouts=_list_layouts,
    searched="with reshard_after_forward True, or False without replicas",
)
