"""Weights of a bucket move in one message as each would move by itself."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from planner_core.core import Graph, Plan
from planner_core.planning import choose_mesh
from planner_core.planning.planner import candidate_meshes, prepare_planner
from planner_core.planning.request import Request
from planner_core.runtime.program.buckets import (
    NO_MOVE,
    BucketMember,
    align_chains,
    message_key,
    pack_by_rank,
    start_move,
    unpack_by_rank,
)
from planner_core.runtime.program.collectives import Axis, AxisMove
from planner_core.runtime.write.operators import write_reshape
from planner_core.runtime.write.syntax import make_call, path
from planner_core.verification.api import scaled
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.numerics import verify_all
from tests.support.plans import planned
from tests.support.ranks import run_ranks

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Chooses(nn.Module):  # its scores choose positions, so they get no gradient; autograd keeps a view of the weight of `up`
    def __init__(self):
        super().__init__()
        self.scores, self.down = nn.Linear(256, 64), nn.Linear(1024, 256)
        self.up = nn.Parameter(torch.randn(1024, 1, 256) / 16)

    def forward(self, x):
        hidden = torch.relu(F.linear(x, self.up.reshape(1024, 256)))
        best = self.scores(x).topk(4).indices
        return x + self.down(hidden) + hidden.gather(-1, best).sum(-1, keepdim=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Chooses() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()

def make():
    return Model(), (torch.randn(64, 256),)
"""


def exchanged() -> list[bool | int]:
    """On this rank: whether three weights that travel together become what each becomes alone; and the number of messages."""
    axis = Axis("tensor", dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    torch.manual_seed(dist.get_rank())
    members = [
        BucketMember((4, 6), {}, AxisMove(axis, "all_to_all", 0, 1)),
        BucketMember((6, 2, 5), {}, AxisMove(axis, "all_to_all", 2, 0)),
        BucketMember((12, 3), {0: (4, 8)}, AxisMove(axis, "all_to_all", 1, 0)),  # two fused parts
        BucketMember((4, 6), {0: (2, 6)}, AxisMove(axis, "all_to_all", 0, 1)),
    ]
    tensors = [torch.randn(m.shape) for m in members]
    alone = [m.move.apply(t, m.segments) for m, t in zip(members, tensors, strict=True)]
    into = [torch.empty_like(t) for t in alone]
    sent = 0
    send = dist.all_to_all_single

    def counted(*args: object, **named: object) -> object:
        nonlocal sent
        sent += 1
        return send(*args, **named)

    dist.all_to_all_single = counted
    together = start_move(members, tensors)()
    start_move(members, tensors, out=into)()
    return [*(bool(torch.equal(a, b)) for found in (together, into) for a, b in zip(alone, found, strict=True)), sent]


def test_weights_that_change_their_sharded_dim_travel_together() -> None:
    for found in run_ranks(exchanged, 2, timeout_s=120):
        assert found == [True] * 8 + [2]


def test_chains_with_the_same_messages_are_aligned_at_these() -> None:
    """A slice sends nothing, and neither does a message on an axis of one rank."""
    axis, alone = Axis("tensor", None, 2, 0), Axis("data", None, 1, 0)
    cut, summed, sent = AxisMove(axis, "slice", None, 0), AxisMove(axis, "all_reduce"), AxisMove(alone, "all_reduce")
    chains = [(cut, summed), (summed, sent, cut), (summed,)]
    assert len(set(map(message_key, chains))) == 1 and message_key((cut, cut)) == () != message_key((summed,))
    first, second, third = align_chains(chains)
    assert first == (cut, summed, NO_MOVE, NO_MOVE)
    assert second == (NO_MOVE, summed, sent, cut)
    assert third == (NO_MOVE, summed, NO_MOVE, NO_MOVE)
    assert align_chains([(summed, cut)] * 2) == [(summed, cut)] * 2


@cache
def cut_in_part() -> tuple[Plan, Graph]:
    """On 64x8 GPT-2 gathers some weights on the tensor axis, so their gradients are cut there, and are summed with the others'."""
    planner = prepare_planner(Request("gpt2-xl", cluster="64x8-h100", mesh="64x8", batch=64), None)
    return choose_mesh(planner, candidate_meshes(planner.request, planner.cluster)), planner.graph


def test_gradients_that_are_cut_in_part_are_right() -> None:
    """Each rank has one sample, as in the plan: it merges the dim of samples with the tokens, of which the tensor ranks have a part each."""
    plan, _ = cut_in_part()
    small = scaled(plan, 4)
    assert small.workload.batch == small.mesh.axis_sizes[0] == 2
    (found,) = verify_all([small])
    assert found["ok"], (found["loss"], found["grad"])


@pytest.mark.slow
def test_gradients_that_are_cut_in_part_travel_as_scheduled() -> None:
    plan, graph = cut_in_part()
    report = verify_fake(plan, graph=graph)
    assert report["ok"] and report["order"]["ok"], report["order"]


def test_what_a_unit_does_not_wait_for_or_keeps(tmp_path: Path) -> None:
    """A weight without a gradient does not hold back the gradients of its layer. One of which autograd keeps a view is gathered once, in
    the unit's bucket, and its gradient is summed in float32 as the others are."""
    (tmp_path / "model.py").write_text(MODEL)
    found = planned(Request(f"{tmp_path}/model.py:make", cluster="1x8-h100", batch=64))
    assert any("the loss does not depend on them" in note for note in found.graph.assumptions)
    plan = next(p for p in found.plans if p.method == "fsdp")
    report = verify_fake(plan, graph=found.graph)
    assert report["ok"] and report["order"]["ok"], report
    (numbers,) = verify_all([scaled(plan, 2)])
    assert numbers["ok"], numbers["grad"]


def test_a_collective_is_written_once_in_a_reshape() -> None:
    weight = path("w.weight")
    in_place, gathered = (write_reshape(x, (6, 1, 3), (6, 3)) for x in (weight, make_call("gather", weight)))
    assert ast.unparse(in_place) == "w.weight.reshape(*w.weight.shape[:1], *w.weight.shape[-1:])"
    assert ast.unparse(gathered) == "gather(w.weight).reshape(-1, 3)"


# --- kernels ------------------------------------------------------------------------------------------


class _Calls(TorchDispatchMode):
    """The names of what is called, below autograd: on a GPU each is at least one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


VIEWS = {"view", "split", "slice", "unflatten", "permute", "alias", "detach", "as_strided", "movedim", "_unsafe_view"}


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 1, 0)])
def test_what_is_cut_by_rows_is_packed_and_unpacked_by_one_kernel(dims: tuple[int, ...]) -> None:
    """Each rank's rows, one weight after the other; a weight that is cut along another dim makes it a copy for each weight."""
    axis, shapes = Axis("world", None, 4, 0), [(8, 3), (4, 8), (16,)]
    wholes = [torch.randn(shape) for shape in shapes]
    scatter = [
        BucketMember(s, {}, AxisMove(axis, "reduce_scatter", None, d)) for s, d in zip(shapes, dims, strict=True)
    ]
    parts = [tuple(n // 4 if i == d else n for i, n in enumerate(s)) for s, d in zip(shapes, dims, strict=True)]
    gather = [BucketMember(s, {}, AxisMove(axis, "all_gather", d)) for s, d in zip(parts, dims, strict=True)]
    wanted = torch.stack(
        [torch.cat([w.chunk(4, d)[r].flatten() for w, d in zip(wholes, dims, strict=True)]) for r in range(4)]
    )
    found = [torch.empty(shape) for shape in shapes]
    with _Calls() as calls:
        flat = pack_by_rank(scatter, wholes)
        unpack_by_rank(gather, flat, found)
    assert torch.equal(flat.view(4, -1), wanted) and all(map(torch.equal, found, wholes))
    kernels = [n for n in calls.names if n not in VIEWS and not n.startswith(("new_", "empty"))]
    assert kernels == (["_chunk_cat", "split_with_sizes_copy"] if dims == (0, 0, 0) else ["copy_"] * 6)
