"""Rows of groups: they agree inside, and fused projections are dealt part by part back to the weight."""

from __future__ import annotations

import pytest
import torch

from planner_core.models.capture.module import capture_module
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.ops.grouping import coarsen
from planner_core.ops.strategy import block_strategies, graph_strategies


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


def test_a_weight_that_calls_share_has_their_fused_parts_outside() -> None:
    """A cell that cuts one product into gates is called once a token, so its weights stand in the top block."""

    class Cell(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.again = torch.nn.Linear(4, 16), torch.nn.Linear(4, 16, bias=False)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            i, f, g, o = (self.into(x) + self.again(h)).chunk(4, -1)
            return torch.sigmoid(i + f + o) * torch.tanh(g)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x[:, 0]
            for t in range(1, x.shape[1]):
                h = self.cell(x[:, t], h)
            return h.sum()

    graph = capture_module(Net(), {"x": torch.zeros(2, 5, 4)})
    top = graph_strategies(coarsen(graph))[""].segments
    given = {v for call in graph.calls() for v in call.inputs if graph.top.values[v].kind == "parameter"}
    assert {graph.top.values[v].name for v in given} == {"cell.into.weight", "cell.into.bias", "cell.again.weight"}
    assert all(top[v, 0] == (4, 4, 4, 4) for v in given)


def test_what_blocks_pass_on_is_not_in_fused_parts() -> None:
    """A product with what equal blocks return is split: they return it in one piece."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 24)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                a, b, c = (block(x) * 2).split(8, -1)
                x = x + a * torch.tanh(b) + c
            return x.mean()

    graph = capture_module(Net(), {"x": torch.zeros(4, 8)})
    top = graph_strategies(coarsen(graph))[""]
    passed = {v for call in graph.calls() for v in (*call.inputs, *call.outputs)}
    assert len(list(graph.calls())) == 3
    assert any(parts == (8, 8, 8) for parts in top.segments.values())  # what is split
    assert not any(v in passed for v, _ in top.segments)
