"""Coarsening groups every op once, and nothing that a group holds inside is read from outside before it is made."""

from __future__ import annotations

import pytest
import torch

from planner_core.core.graph import Op
from planner_core.models.capture.module import capture_module
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.ops.grouping import CoarseBlock, coarsen
from planner_core.ops.registry import is_heavy
from planner_core.ops.strategy import block_strategies
from tests.support.random_graphs import random_graph


def blocks(name: str) -> list[CoarseBlock]:
    coarse = coarsen(load_snapshot(name))
    return [coarse.top, *coarse.blocks.values()]


@pytest.mark.parametrize("name", ZOO)
def test_every_op_is_in_one_group(name: str) -> None:
    for b in blocks(name):
        placed = sorted(p for g in b.groups for p in g.items) + [n for n in b.nodes if isinstance(n, int)]
        assert sorted(placed) == list(range(len(b.block.items)))


@pytest.mark.parametrize("name", ZOO)
def test_nodes_are_in_an_order_that_runs(name: str) -> None:
    for b in blocks(name):
        made = set(b.block.inputs) | {i for i, v in enumerate(b.block.values) if v.kind != "activation"}
        for node in b.nodes:
            items = [b.block.items[node]] if isinstance(node, int) else [b.block.items[p] for p in node.items]
            inside = {o for i in items for o in i.outputs}
            assert {v for i in items for v in i.inputs} <= made | inside
            made |= inside


@pytest.mark.parametrize("name", ZOO)
def test_a_group_has_one_weight_product_and_a_row_to_run_by(name: str) -> None:
    for b in blocks(name):
        for g, s in zip(b.groups, block_strategies(b).groups, strict=True):
            heavy = [op for p in g.items if isinstance(op := b.block.items[p], Op) and is_heavy(op)]
            assert len(heavy) <= 1
            assert s.rows, g.name
            assert all(r.name == "R" for r in s.rows[0])


def test_coarsening_is_smaller_and_counts_copies() -> None:
    coarse = coarsen(load_snapshot("llama-3-8b", layers=5))
    assert coarse.num_nodes == len(coarse.top.groups) + 5 * len(next(iter(coarse.blocks.values())).groups)
    assert coarse.num_nodes < coarse.graph.num_ops


def test_a_key_that_all_heads_share_is_summed_before_it_is_expanded() -> None:
    """Where heads are sharded, the gradient of one head's key is summed; else that of all heads would be gathered, which is larger."""

    class OneKey(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            queries = self.q(x).view(2, 4, 4, 8).transpose(1, 2)
            keys = self.k(x).view(2, 1, 4, 8).expand(2, 4, 4, 8)
            return (queries * keys).square().mean()

    top = coarsen(capture_module(OneKey(), {"x": torch.zeros(2, 4, 16)})).top
    expanded = [[top.block.items[p] for p in g.items] for g in top.groups]
    leading = [
        items[0].fn
        for items in expanded
        if isinstance(items[0], Op) and "expand" in [getattr(i, "fn", "") for i in items]
    ]
    assert leading == ["expand"]


@pytest.mark.parametrize("seed", range(20))
def test_random_models(seed: int) -> None:
    graph = random_graph(seed)
    coarse = coarsen(graph)
    for b in (coarse.top, *coarse.blocks.values()):
        assert sorted(p for g in b.groups for p in g.items) == [
            p for p, i in enumerate(b.block.items) if isinstance(i, Op)
        ]
