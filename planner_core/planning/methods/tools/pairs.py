"""The tools that take layers by name, which are sharded in pairs: PyTorch's parallelize_module, and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from planner_core.core import divisors
from planner_core.planning.methods.layout import Layout
from planner_core.planning.methods.tools.tool import PairForm, Tool

SEARCHED = "with layers sharded in pairs"
STYLES = {
    "colwise": "colwise",
    "gathered": "colwise_gather_output",
    "rowwise": "rowwise",
    "sliced": "rowwise_split_input",
    "vocabulary": "embedding_rowwise",
    "features": "embedding_colwise",
}
"""Names of the styles in transformers 5, by those of `methods.tp_layout`."""
EXPERT_STYLE = "moe_tp_experts"
"""Its style of fused experts."""


def _list_layouts(num_gpus: int, *, tokens: bool) -> Iterator[Layout]:
    """Layers split in pairs, with or without `tokens` split between them, beside data parallelism, DDP or FSDP2, by the trainer."""
    for tensor in divisors(num_gpus)[1:]:
        ranks = num_gpus // tensor
        for sequence in (False, True) if tokens else (False,):
            yield Layout(dp=ranks, tp=tensor, sp=sequence)
            if ranks > 1:
                yield Layout(fsdp=ranks, tp=tensor, sp=sequence)


PARALLELIZE_MODULE = Tool(
    name="parallelize_module",
    title="parallelize_module",
    description="A Python module to import into your own trainer: stock PyTorch styles, for plans that split matrices in pairs.",
    suffix=".py",
    writer="parallelize_module.write_parallelize_module",
    shards_pairs_only=True,
    layouts=partial(_list_layouts, tokens=True),
    searched=SEARCHED,
    pairs=PairForm(each_column=False, sums=False, experts=False, tokens=True),
)
HF = Tool(
    name="hf",
    title="transformers",
    other_names=("huggingface",),
    description="A DistributedConfig for from_pretrained, for plans that split matrices in pairs.",
    suffix=".json",
    writer="configs.huggingface.write_hf",
    states_ranks=True,
    shards_pairs_only=True,
    layouts=partial(_list_layouts, tokens=False),
    searched=SEARCHED,
    pairs=PairForm(each_column=True, sums=True, experts=True, tokens=False),
)
