"""Weights of a bucket move in one message as each would move by itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from planner_core.runtime.program.buckets import Member, start
from planner_core.runtime.program.collectives import Axis, AxisMove
from planner_core.verification.processes import run_ranks


def exchanged() -> list[bool | int]:
    """On this rank: whether three weights that travel together become what each becomes alone; and the number of messages."""
    axis = Axis("tensor", dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    torch.manual_seed(dist.get_rank())
    members = [
        Member((4, 6), {}, AxisMove(axis, "all_to_all", 0, 1)),
        Member((6, 2, 5), {}, AxisMove(axis, "all_to_all", 2, 0)),
        Member((12, 3), {0: (4, 8)}, AxisMove(axis, "all_to_all", 1, 0)),  # two fused parts
        Member((4, 6), {0: (2, 6)}, AxisMove(axis, "all_to_all", 0, 1)),
    ]
    tensors = [torch.randn(m.shape) for m in members]
    alone = [m.step.take(t, m.segments) for m, t in zip(members, tensors, strict=True)]
    into = [torch.empty_like(t) for t in alone]
    sent = 0
    send = dist.all_to_all_single

    def counted(*args: object, **named: object) -> object:
        nonlocal sent
        sent += 1
        return send(*args, **named)

    dist.all_to_all_single = counted
    together = start(members, tensors)()
    start(members, tensors, into=into)()
    return [*(bool(torch.equal(a, b)) for found in (together, into) for a, b in zip(alone, found, strict=True)), sent]


def test_weights_that_change_their_sharded_dim_travel_together() -> None:
    for found in run_ranks(exchanged, 2, timeout_s=120):
        assert found == [True] * 8 + [2]
