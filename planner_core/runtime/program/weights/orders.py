"""The order of rows in fused dims: where each row of a rank lies in the model, and conversions between the plan's order and the
model's."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives import local_shard

FusedOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""The fused dims of a tensor that are sharded part by part, each with the sizes of its parts."""


def order_of(x: torch.Tensor) -> FusedOrder:
    """Return the order of a tensor; empty if its rows lie as in the model."""
    return getattr(x, "order", ())


@functools.cache
def _row_permutation(size: int, parts: tuple[int, ...], ranks: tuple[int, ...]) -> torch.Tensor:
    """Return the model's row at each place of the plan's order. Example: 4 rows in parts (1, 1) on 2 ranks: 0 2 1 3."""
    shares = []
    # The outermost axis is cut first, as in `shard_tensor`, so its position varies slowest.
    for place in itertools.product(*map(range, ranks)):
        rows = torch.arange(size)
        for count, rank in zip(ranks, place, strict=True):
            rows = local_shard(rows, 0, count, rank, {0: parts})
        shares.append(rows)
    return torch.cat(shares)


def model_rows(like: DTensor) -> list[tuple[int, torch.Tensor]]:
    """Return for each ordered dim the model's row at each place of the plan's order."""
    return [
        (
            dim,
            _row_permutation(like.shape[dim], parts, tuple(like.device_mesh.size(a) for a in sharding_axes(like, dim))),
        )
        for dim, parts in order_of(like)
    ]


def contiguous_runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Split rows into runs of neighbours: (first place here, first row in the model, length) of each."""
    starts = [k for k, row in enumerate(rows) if k == 0 or row != rows[k - 1] + 1]
    return [(a, rows[a], b - a) for a, b in itertools.pairwise([*starts, len(rows)])]


def sharding_axes(x: DTensor, dim: int) -> tuple[int, ...]:
    """Return the mesh axes that shard a dim."""
    return tuple(a for a, p in enumerate(x.placements) if isinstance(p, Shard) and p.dim == dim)


def as_plain_dtensor(x: DTensor) -> DTensor:
    """Return the tensor as torch's own class, which takes its rows for the model's."""
    return DTensor(x._local_tensor, x._spec, requires_grad=False)


def _without_shards(x: DTensor, dims: Sequence[int]) -> list[Any]:
    """Return the placements of the tensor when every rank has it whole along some dims."""
    return [Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in x.placements]


def permute_rows(x: DTensor, dims: Sequence[tuple[int, torch.Tensor]], placements: Sequence[Any]) -> DTensor:
    """Return a plain DTensor with these placements whose rows of some dims are permuted. Ranks gather it along these dims."""
    whole = _without_shards(x, [d for d, _ in dims])
    # Rows move between ranks, so a permuted dim has to be whole for a moment. Dims without a permutation stay sharded.
    gathered_tensor = as_plain_dtensor(x).redistribute(placements=whole)
    local = gathered_tensor._local_tensor
    for dim, index in dims:
        local = local.index_select(dim, index.to(local.device))
    result = DTensor.from_local(local, x.device_mesh, whole, run_check=False, shape=x.shape, stride=x.stride())
    return result.redistribute(placements=placements)


@torch.no_grad()
def in_model_order(x: DTensor, placements: Sequence[Any] | None = None) -> DTensor:
    """Return the tensor as a plain DTensor in the model's order. All ranks must call it if the tensor has an order."""
    if not order_of(x):
        return as_plain_dtensor(x)
    # `argsort` inverts a permutation. Example: 6 rows in 3 parts on 2 ranks lie as 0 2 4 1 3 5, and its argsort is 0 3 1 4 2 5.
    return permute_rows(x, [(dim, rows.argsort()) for dim, rows in model_rows(x)], placements or x.placements)


@torch.no_grad()
def resize(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor in the model's order, cut to a shape or padded to it with zeros.

    A DTensor keeps its placements, and ranks gather it along the dims whose sizes change, one tensor at a time: all ranks must call it.
    """
    if not isinstance(x, DTensor):
        return _resize_local(x, shape)
    # States that lie in the host's memory are gathered where ranks communicate.
    local = x._local_tensor.to(x.device_mesh.device_type)
    changed = [d for d, (n, wanted) in enumerate(zip(x.shape, shape, strict=True)) if n != wanted]
    whole = _without_shards(x, changed)
    plain = in_model_order(x if local is x._local_tensor else with_local(local, x))
    local = plain.redistribute(placements=whole)._local_tensor
    # torch cuts the new size into other parts than the old one (5 rows over 2 ranks: 3 and 2; 8 rows: 4 and 4), so rows move.
    local = _resize_local(local, [shape[d] if d in changed else n for d, n in enumerate(local.shape)])
    stride = torch.empty(tuple(shape), device="meta").stride()
    result = DTensor.from_local(local, x.device_mesh, whole, run_check=False, shape=torch.Size(shape), stride=stride)
    return result.redistribute(placements=x.placements)


def _resize_local(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    resized = x.new_zeros(tuple(shape))
    common = tuple(slice(min(n, wanted)) for n, wanted in zip(x.shape, shape, strict=True))
    resized[common] = x[common]
    return resized


@torch.no_grad()
def redistribute_like(x: DTensor, like: DTensor) -> DTensor:
    """Return the tensor with the placements and the order of another tensor of its shape."""
    return permute_rows(in_model_order(x), model_rows(like), like.placements)


def with_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return the plain DTensor of which this rank holds `local`, with the placements and shape of another."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def out_of_order_error(what: str) -> PlanMismatch:
    """Return the error for an operator that would take rows other than the model's."""
    return PlanMismatch(
        f"{what} was called on a weight or gradient of which several parts are one tensor (q, k and v), sharded over ranks; each rank has "
        "rows of every part, so a piece of it would be other rows than in the model; take .full_tensor() first, or compute with the "
        "DTensor itself"
    )
