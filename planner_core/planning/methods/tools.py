"""What other people's tools can be told: the layouts that their settings state, as parts of the one space of plans.

A tool takes degrees: how many ranks hold whole weights, over how many the weights are sharded, over how many products are. Each
combination of degrees that fills the cluster is one `Space`. A search for a tool looks at all of them.

Example: Megatron-LM on 4 GPUs takes tp = 1, 2 or 4, each with and without sequence parallelism and a distributed optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from planner_core.core import Cluster, DeviceMesh, Graph, InputError, axis_names, divisors
from planner_core.planning.methods.hf_tp_plan import VendorRules
from planner_core.planning.methods.layout import Layout, Space
from planner_core.planning.methods.restrictions import (
    AxisRules,
    PairTest,
    batch_split,
    sequence_split,
    sharded,
    split_weight,
    summed,
)

FREE = "torchrun"
"""The form that runs every plan."""


def check_tool(tool: str | None) -> None:
    """Raise InputError for a tool whose settings are not known here."""
    if tool not in TOOLS:
        raise InputError(
            f"--for {tool!r} is not a tool whose settings can bound the search; give {FREE}, {', '.join(TOOLS)}"
        )


def spaces(tool: str | None, cluster: Cluster) -> tuple[Space, ...]:
    """All that a tool can be told on a cluster; empty if every plan may be chosen, since no tool is named or the form that runs
    every plan. Raises InputError for a tool whose settings are not known here."""
    if tool in (None, FREE):
        return ()
    check_tool(tool)
    return tuple(TOOLS[tool](cluster.num_gpus))


def _ruled(axes: Sequence[tuple[int, PairTest, PairTest]], stage: int, joined: tuple[int, ...] = ()) -> Space:
    """`axes`: the ranks of each axis, and the tests of its residual stream and of its weights."""
    sizes, streams, weights = zip(*[a for a in axes if a[0] > 1] or axes[:1], strict=True)
    mesh = DeviceMesh(axis_names(len(sizes)), sizes)
    return Space(mesh, functools.partial(_rules, streams, weights), tuple(sorted({0, stage})), joined)


def _rules(streams: tuple[PairTest, ...], weights: tuple[PairTest, ...], graph: Graph) -> AxisRules:
    return VendorRules(graph, streams, weights)


def _in_stage(stage: int) -> PairTest:
    """The test of a weight in a ZeRO stage: every weight that is trained, not matrices alone."""
    return lambda value, pair: bool(pair[3] == stage) if value.grad else summed(value, pair)


def _sharded(num_gpus: int) -> Iterator[Space]:
    """FSDP2 and HSDP: every rank has its own samples."""
    yield _ruled([(num_gpus, batch_split, _in_stage(3))], 3)
    for replicas in divisors(num_gpus)[1:-1]:
        yield _ruled([(replicas, batch_split, summed), (num_gpus // replicas, batch_split, _in_stage(3))], 3, (1,))


def _zero(num_gpus: int) -> Iterator[Space]:
    """DeepSpeed's ZeRO with whole weights."""
    for stage in (1, 2):
        yield _ruled([(num_gpus, batch_split, _in_stage(stage))], stage)


def _megatron(num_gpus: int) -> Iterator[Space]:
    """Tensor and sequence parallelism beside data parallelism, and the distributed optimizer."""
    for tensor in divisors(num_gpus):
        data = num_gpus // tensor
        for sequence in (False, True) if tensor > 1 else (False,):
            for zero in (0, 1) if data > 1 else (0,):
                yield Layout(dp=data, tp=tensor, sp=sequence, zero=zero).space()


def _torchtitan(num_gpus: int) -> Iterator[Space]:
    """Replicate or FSDP2, beside tensor parallelism, which always splits the tokens between the products."""
    for tensor in divisors(num_gpus):
        data = num_gpus // tensor
        for weights, stage in ((summed, 0), (sharded, 3)) if data > 1 else ((summed, 0),):
            yield _ruled([(data, batch_split, weights), (tensor, sequence_split, split_weight)], stage)


TOOLS: Mapping[str, Callable[[int], Iterator[Space]]] = {
    "fsdp2": _sharded, "accelerate": _sharded, "deepspeed": _zero, "megatron": _megatron, "torchtitan": _torchtitan,
}  # fmt: skip
"""The tools, as `export --to` names them. The export of such a plan does what the plan says, but that FSDP2 and DeepSpeed shard norms and
biases too, which the space keeps whole."""
