"""What other people's tools can be told: the layouts that their settings state, as parts of the one space of plans.

A tool takes degrees: how many ranks hold whole weights, over how many the weights are sharded, over how many products are. Each
combination of degrees that fills the cluster is one `Space`. A search for a tool looks at all of them.

Example: Megatron-LM on 4 GPUs takes tp = 1, 2 or 4, each with and without sequence parallelism and a distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from planner_core.core import Cluster, InputError, divisors
from planner_core.planning.methods.layout import Layout, Space

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


def _sharded(num_gpus: int) -> Iterator[Space]:
    """FSDP2 and HSDP: every rank has its own samples."""
    for replicas in divisors(num_gpus)[: -1 if num_gpus > 1 else 1]:
        yield Layout(dp=replicas, fsdp=num_gpus // replicas).space()


def _zero(num_gpus: int) -> Iterator[Space]:
    """DeepSpeed's ZeRO with whole weights."""
    for stage in (1, 2):
        yield Layout(dp=num_gpus, zero=stage).space()


def _megatron(num_gpus: int) -> Iterator[Space]:
    """Tensor and sequence parallelism beside data parallelism, and the distributed optimizer."""
    for tensor in divisors(num_gpus):
        data = num_gpus // tensor
        for sequence in (False, True) if tensor > 1 else (False,):
            for zero in (0, 1) if data > 1 else (0,):
                yield Layout(dp=data, tp=tensor, sp=sequence, zero=zero).space()


def _torchtitan(num_gpus: int) -> Iterator[Space]:
    """Replicate, FSDP2 or HSDP, beside tensor parallelism, which always splits the tokens between the products."""
    for tensor in divisors(num_gpus):
        data = num_gpus // tensor
        for replicas in divisors(data):
            yield Layout(dp=replicas, fsdp=data // replicas, tp=tensor, sp=tensor > 1).space()


TOOLS: Mapping[str, Callable[[int], Iterator[Space]]] = {
    "fsdp2": _sharded, "accelerate": _sharded, "deepspeed": _zero, "megatron": _megatron, "torchtitan": _torchtitan,
}  # fmt: skip
"""The tools, as `export --to` names them. The export of such a plan does what the plan says, but that FSDP2 and DeepSpeed shard norms and
biases too, which the space keeps whole."""
