"""Redistribute one rank's tensor. Each step is one collective, or a local change, along one mesh axis:

    P>R all_reduce    P>S reduce_scatter    S>R all_gather    S>S all_to_all    R>S slice    S>P pad with zeros    R>P divide

A dim with segments (q, k, v in one projection) is sharded segment by segment: every rank holds a part of each segment.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from planner_core.runtime.plan_reader import Edge, Placements, PlanMismatch, Segments, Step
from planner_core.runtime.program.collectives import (
    in_zeros,
    joined,
    neighbours,
    own_length,
    own_share,
    padded,
    part_of,
    shares,
    uneven,
)
from planner_core.runtime.program.collectives.torch_names import functional_all_gather, functional_reduce_scatter


def deliver(x: torch.Tensor, edge: Edge, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor after the edge's forward steps; a weight in `dtype`. In backward its gradient takes the edge's backward steps, in the
    tensor's own dtype."""
    weight, dtype = dtype is not None, dtype or x.dtype
    if not edge.forward and not (x.requires_grad and (edge.backward or _unplanned(edge, mesh))):
        return x.to(dtype)
    moved: torch.Tensor = _Moved.apply(x, edge, mesh, dtype, weight)
    return moved


def _unplanned(edge: Edge, mesh: DeviceMesh) -> bool:
    """Whether no steps bring a gradient through an edge, since none was planned."""
    if edge.backward or len(edge.gradient) != len(edge.wanted):
        return False
    return any(mesh.size(a) > 1 and g != w for a, (g, w) in enumerate(zip(edge.gradient, edge.wanted, strict=True)))


class _Moved(torch.autograd.Function):
    _shardscope = True  # not an op of the model

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, edge: Edge, mesh: DeviceMesh, dtype: torch.dtype, weight: bool
    ) -> torch.Tensor:
        ctx.edge, ctx.mesh, ctx.dtype, ctx.weight, ctx.shape = edge, mesh, x.dtype, weight, x.shape
        ctx.set_materialize_grads(bool(edge.backward))  # None of a model's own backward stays None if none was planned
        moved = move(x.to(dtype), edge.forward, mesh, edge.segments)
        return x.view_as(x) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        if gradient is None:
            return None, None, None, None, None
        moved = move(gradient.to(ctx.dtype), ctx.edge.backward, ctx.mesh, ctx.edge.segments)
        if _unplanned(ctx.edge, ctx.mesh) or moved.shape != ctx.shape:
            raise PlanMismatch(
                "a gradient came to a tensor to which the planned loss sends none; plan the model with a loss of all that it is trained on"
            )
        if ctx.weight and moved.untyped_storage().nbytes() > moved.nbytes:
            moved = moved.clone()  # the gradient stays until the step, and a slice would keep the whole alive
        return moved, None, None, None, None


def move(x: torch.Tensor, steps: Iterable[Step], mesh: DeviceMesh, segments: Segments) -> torch.Tensor:
    """The tensor after the steps, in order, without autograd."""
    for step in steps:
        if mesh.size(step.axis) > 1:
            x = _move(x, step, mesh, segments)
    return x


def _move(x: torch.Tensor, step: Step, mesh: DeviceMesh, segments: Segments) -> torch.Tensor:
    src, dst, group, n = step.src, step.dst, (mesh, step.axis), mesh.size(step.axis)
    if isinstance(dst, Replicate):
        if not isinstance(src, Shard):
            return all_reduce(x, mesh, step.axis)
        whole = uneven(segments, src.dim)
        if whole is not None:
            x = padded(x, src.dim, part_of(whole, n))
            return all_gather(x, src.dim, mesh, step.axis).narrow(src.dim, 0, whole)
        return _by_segment(all_gather(x, src.dim, mesh, step.axis), src.dim, n, segments)
    if isinstance(dst, Shard):
        if isinstance(src, Replicate):
            return own_share(x, dst.dim, n, mesh.get_local_rank(step.axis), segments).contiguous()
        if isinstance(src, Shard):
            return _exchange(x, src.dim, dst.dim, mesh, step.axis, segments)
        whole = uneven(segments, dst.dim)
        if whole is not None:
            x = padded(x, dst.dim, part_of(whole, n) * n)
        ranked = _by_rank(x, dst.dim, n, segments).contiguous()
        own = _done(functional_reduce_scatter(ranked, "sum", dst.dim, group))
        if whole is not None:
            own = own.narrow(dst.dim, 0, own_length(whole, n, mesh.get_local_rank(step.axis))).contiguous()
        return own
    return in_zeros(x, src.dim, n, mesh.get_local_rank(step.axis), segments) if isinstance(src, Shard) else x / n


def all_reduce(x: torch.Tensor, mesh: DeviceMesh, axis: int, reduction: str = "sum") -> torch.Tensor:
    """The sum (or max) of every rank's tensor along a mesh axis."""
    return _done(collectives.all_reduce(x.contiguous(), reduction, (mesh, axis)))


def all_gather(x: torch.Tensor, dim: int, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """The tensors of all ranks of a mesh axis, joined along `dim`."""
    return _done(functional_all_gather(x.contiguous(), dim, (mesh, axis)))


def exchange(
    pieces: torch.Tensor, counts: list[int], mesh: DeviceMesh, axis: int, received: list[int] | None = None
) -> torch.Tensor:
    """Send `counts[r]` of the pieces along dim 0 to each rank r of a mesh axis, and receive `received[r]` from it (default: as
    many); in order of ranks."""
    return _done(collectives.all_to_all_single(pieces.contiguous(), received or counts, counts, (mesh, axis)))


def send_recv(x: torch.Tensor, mesh: DeviceMesh, axis: int) -> Callable[[], torch.Tensor]:
    """Send a flat tensor to the next rank of a mesh axis, and receive one as long from the rank before. The result waits for it."""
    there, here = neighbours(x.numel(), mesh.size(axis), mesh.get_local_rank(axis))
    coming = collectives.all_to_all_single(x, here, there, (mesh, axis))
    return lambda: _done(coming)


def place(x: torch.Tensor, placements: Placements, mesh: DeviceMesh, segments: Segments) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds Replicate; on a Partial axis the tensor is divided by the ranks."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            x = own_share(x, placement.dim, mesh.size(axis), mesh.get_local_rank(axis), segments)
        elif not isinstance(placement, Replicate):
            x = x / mesh.size(axis)
    return x


def _done(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x


def _by_rank(x: torch.Tensor, dim: int, n: int, segments: Segments) -> torch.Tensor:
    if len(segments.get(dim, ())) < 2:
        return x
    return torch.cat(shares(x, dim, n, segments), dim)


def _by_segment(x: torch.Tensor, dim: int, n: int, segments: Segments) -> torch.Tensor:
    if len(segments.get(dim, ())) < 2:
        return x
    return joined(x.chunk(n, dim), dim, segments)


def _exchange(x: torch.Tensor, src: int, dst: int, mesh: DeviceMesh, axis: int, segments: Segments) -> torch.Tensor:
    n = mesh.size(axis)
    pieces = torch.cat([piece.unsqueeze(0) for piece in _by_rank(x, dst, n, segments).chunk(n, dst)])
    received = _done(collectives.all_to_all_single(pieces, None, None, (mesh, axis)))
    return _by_segment(torch.cat(received.unbind(0), src), src, n, segments)
