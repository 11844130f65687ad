"""Rows of groups: they agree inside, and fused projections are dealt part by part back to the weight."""

from __future__ import annotations

import pytest

from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.ops.grouping import coarsen
from planner_core.ops.strategy import block_strategies


@pytest.mark.parametrize("name", ZOO)
def test_what_one_op_makes_the_next_takes(name: str) -> None:
    coarse = coarsen(load_snapshot(name))
    for b in (coarse.top, *coarse.blocks.values()):
        found = block_strategies(b)
        assert found.unknown == ()
        for s in found.groups:
            for rows in s.rows:
                made = {}
                for op, row in zip(s.ops, rows, strict=True):
                    for v, pair in zip(op.inputs, row.inputs, strict=True):
                        assert made.get(v, pair)[0] == pair[0]
                        assert not b.block.values[v].grad or made.get(v, pair) == pair
                    made.update(zip(op.outputs, row.outputs, strict=True))


def test_fused_q_k_v_keep_their_parts() -> None:
    block = next(iter(coarsen(load_snapshot("gpt2-xl")).blocks.values()))
    segments = block_strategies(block).segments
    fused = {
        block.block.values[v].name: parts
        for (v, _), parts in segments.items()
        if block.block.values[v].kind == "parameter"
    }
    assert fused == {"attn.c_attn.weight": (1600, 1600, 1600), "attn.c_attn.bias": (1600, 1600, 1600)}


def test_fused_gate_and_up_keep_their_parts() -> None:
    block = next(iter(coarsen(load_snapshot("mixtral-8x7b")).blocks.values()))
    segments = block_strategies(block).segments
    fused = {
        block.block.values[v].name: parts
        for (v, _), parts in segments.items()
        if block.block.values[v].kind == "parameter"
    }
    assert list(fused.values()) == [(14336, 14336)]
