"""DeepSpeed, by its JSON."""

from __future__ import annotations

from collections.abc import Iterator

from planner_core.planning.methods.layout import Layout
from planner_core.planning.methods.tools.tool import Tool

DTYPE_SECTIONS = {"bfloat16": "bf16", "float16": "fp16"}
"""The sections that switch mixed precision on, by the dtype that computes."""
PARTITIONS = {"colwise": "column", "rowwise": "row"}
"""How AutoTP is told to split a layer, by the styles of `methods.tp_layout`."""


def _list_layouts(num_gpus: int) -> Iterator[Layout]:
    """DeepSpeed's ZeRO: stages 1 and 2 with whole weights, and stage 3, which gathers them at use."""
    for stage in (1, 2):
        yield Layout(dp=num_gpus, zero=stage)
    if num_gpus > 1:
        yield Layout(fsdp=num_gpus)


DEEPSPEED = Tool(
    name="deepspeed",
    title="DeepSpeed",
    description="A configuration for AutoTP or ZeRO, for plans that split matrices in pairs, or the batch only.",
    suffix=".json",
    writer="configs.deepspeed.write_deepspeed",
    launch="deepspeed --num_nodes {nodes} --num_gpus {per_node} train.py --deepspeed_config {file}",
    states_ranks=True,
    shards_pairs_only=True,
    states_offload=True,
    data_parallel=("ZeRO-1", "ZeRO-2", "ZeRO-3"),
    why_no_stages="DeepSpeed's pipeline runs a model whose code lists its layers (PipelineModule), which no configuration says",
    layouts=_list_layouts,
    searched="by ZeRO-1 to 3 over all ranks",
    # It keeps gradients in the dtype of the model (its engine.py: communication_data_type, get_data_types), float16 too, which has the
    # bytes of bfloat16.
    gradients="bfloat16",
)
"""Its tensor and context ranks are not searched, which `price` reads."""
