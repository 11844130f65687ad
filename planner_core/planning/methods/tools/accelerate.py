"""accelerate, by its YAML."""

from __future__ import annotations

from collections.abc import Iterator

from planner_core.planning.methods.layout import Layout
from planner_core.planning.methods.tools.tool import Tool

PRECISION_WORDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
"""Its words for `mixed_precision`, by the dtype that computes."""


def _list_layouts(num_gpus: int) -> Iterator[Layout]:
    """DDP; what its plugins run is of those tools."""
    yield Layout(dp=num_gpus)


ACCELERATE = Tool(
    name="accelerate",
    title="accelerate",
    description="A configuration for accelerate launch, for plans that split the batch only.",
    suffix=".yaml",
    writer="configs.accelerate.write_accelerate",
    launch="accelerate launch --config_file {file} train.py",
    states_ranks=True,
    data_parallel=("FSDP2",),
    layouts=_list_layouts,
    searched="of data-parallel ranks alone: by DDP, FSDP, HSDP, or ZeRO-1 to 3 of its DeepSpeed plugin",
    # No field of a plugin's section says another dtype: accelerate (its dataclasses.py) gives FSDP the one that computes for sums too.
    plugins={"fsdp2": "bfloat16", "deepspeed": "bfloat16"},
)
"""Its tensor ranks are not searched, which `price` reads."""
