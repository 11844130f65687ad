"""Collectives that are issued at one place leave in one launch, and become what each would become alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from planner_core.runtime import CountCollectives
from planner_core.runtime.program.collectives import Axis, coalesced_launch
from tests.support.ranks import run_ranks

MERGED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")


class Counted(CountCollectives):
    """Also notes the operators that communicate, in order."""

    def _count_collective(self, kind: str, func: Any, *rest: Any) -> None:
        self.order = [*getattr(self, "order", []), func._schema.name.partition("::")[2]]
        super()._count_collective(kind, func, *rest)


def issued() -> list[Any]:
    """On this rank: whether two collectives of each kind have the same results in one launch as alone; what was counted each time; and
    the operators of the launches."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    axis = Axis("data", mesh.get_group(), 2, dist.get_rank())
    torch.manual_seed(dist.get_rank())
    tensors = [torch.randn(6), torch.randn(4), torch.randn(2)]
    starts: list[Callable[..., Any]] = [axis.start_all_gather, axis.start_reduce_scatter, axis.start_all_reduce]

    def all_of() -> list[Any]:
        return [start(t, packed=n + 1) for start in starts for n, t in enumerate(tensors)]

    def packed(group: str) -> int:
        return axis.packed

    with Counted(mesh, packed) as alone:
        wanted = [finish() for finish in all_of()]
    with Counted(mesh, packed) as merged:
        with coalesced_launch():
            finishes = all_of()
        found = [finish() for finish in finishes]
        with coalesced_launch():
            first = axis.start_all_reduce(tensors[0], packed=1)
            early = first()  # it leaves when it is waited for
    same = [bool(torch.equal(a, b)) for a, b in zip(wanted, found, strict=True)]
    return [same, bool(torch.equal(early, wanted[6])), alone.table(), merged.table(), merged.order]


def test_what_leaves_in_one_launch_arrives_as_alone() -> None:
    for same, early, alone, merged, order in run_ranks(issued, 2, timeout_s=120):
        assert all(same) and early
        last = merged["forward"]["all_reduce"]
        assert last.pop("count") == alone["forward"]["all_reduce"].pop("count") + 1
        assert last.pop("bytes") == alone["forward"]["all_reduce"].pop("bytes") + 24
        last.pop("wire_bytes"), alone["forward"]["all_reduce"].pop("wire_bytes")
        assert merged == alone
        assert sorted(order) == sorted([*MERGED, "allreduce_"])
