"""What each policy of recomputation keeps of real blocks."""

from __future__ import annotations

import pytest

from planner_core.core import RECOMPUTE, Block
from planner_core.models.zoo import load_snapshot
from planner_core.ops import kept_ops, last_saving, operator, recompute_policies
from planner_core.ops.operators import Kind


def block(name: str) -> Block:
    graph = load_snapshot(name, layers=None if name.startswith("resnet") else 2)
    return next(iter(graph.blocks.values()))


def short(names: tuple[str, ...]) -> list[str]:
    return [n.partition("/")[0].rpartition(".")[2] for n in names]


def test_what_is_kept_of_a_llama_layer() -> None:
    """torchtitan's `selective` keeps the first of its seven products and every second from there; the last is never read again."""
    layer = block("llama-3-8b")
    assert short(kept_ops(layer, "keep-attention")) == ["self_attn"]
    assert short(kept_ops(layer, "selective")) == ["q_proj", "v_proj", "self_attn", "gate_proj"]
    assert short(kept_ops(layer, "keep-matmuls")) == [
        "q_proj",
        "k_proj",
        "v_proj",
        "self_attn",
        "o_proj",
        "gate_proj",
        "up_proj",
    ]
    assert layer.ops[last_saving(layer)].name == "mlp.down_proj/linear"
    assert kept_ops(layer, "none") == kept_ops(layer, "full") == ()


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "gpt2-xl", "bert-large", "t5-large", "vit-large", "mixtral-8x7b", "resnet50-100k"]
)
def test_what_is_kept_is_read_and_whole(name: str) -> None:
    """Products with weights and attention only; one result each, which nobody writes and which the block does not hand back."""
    one = block(name)
    for policy in RECOMPUTE[1:]:
        for op in one.ops:
            if op.name in kept_ops(one, policy):
                assert operator(op.fn).kind in (Kind.PRODUCT, Kind.CONVOLUTION, Kind.ATTENTION), op.name
                assert len(op.outputs) == 1 and op.outputs[0] not in one.outputs
                assert one.ops.index(op) < last_saving(one)


def test_policies_that_keep_the_same_are_tried_once() -> None:
    """A block of ResNet has no attention, so that keeping it keeps nothing."""
    found = recompute_policies(block("resnet50-100k"), "auto")
    assert set(found) == {"none", "keep-matmuls", "selective", "full"} and found["full"] == ()
    assert list(recompute_policies(block("llama-3-8b"), "auto")) == list(RECOMPUTE[1:])
    assert list(recompute_policies(block("resnet50-100k"), "keep-attention")) == ["keep-attention"]
