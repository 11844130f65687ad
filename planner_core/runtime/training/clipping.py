"""The norm of all gradients, of which each rank holds a part, and clipping by this norm."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.parallel import Parallel
from planner_core.runtime.program.gradients import find_pending
from planner_core.runtime.program.torch_private import local_part, multiply_in_place, norms_of
from planner_core.runtime.program.weights import find_weight
from planner_core.runtime.stages import StagedParallel

ShardingAxes = tuple[int, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, over parameters of which each rank holds a part: one all_reduce per mesh axis.

    All ranks must call it.

    Args:
        parameters: The parameters of a module that `apply` returned.
        max_norm: The largest norm that all gradients together have afterwards.
        norm_type: 2 for the root of the sum of squares, `inf` for the largest entry.
        error_if_nonfinite: Whether to refuse a norm that is not finite.

    Returns:
        The norm of all gradients together before clipping. It is the same on every rank.

    Raises:
        PlanMismatch: Every backward pass of this step ran inside `no_sync()`, or a rank did not call it.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.

    Example:
        >>> shardscope.clip_grad_norm_(model.parameters(), 1.0)
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    waiting = find_pending(params)
    if waiting:
        raise PlanMismatch(
            f"gradients of {waiting} were not summed over ranks yet, so they cannot be clipped: let the last backward pass of a step run "
            "outside of no_sync()"
        )
    grads = {id(p): p.grad for p in params if p.grad is not None}
    parallel = _find_parallel(params)
    # Ranks exchange their parts of the norm only where a gradient is sharded: elsewhere one rank may come alone.
    if parallel and any(isinstance(gradient, DTensor) for gradient in grads.values()):
        parallel.agreement.wait_for_all(parallel.agreement.CLIP, often=True)
    pipeline = parallel if isinstance(parallel, StagedParallel) else None
    counted_on_other_ranks = {id(p) for p in pipeline.counted_elsewhere()} if pipeline else ()
    total = total_norm([g for key, g in grads.items() if key not in counted_on_other_ranks], float(norm_type))
    if pipeline:
        total = pipeline.norm_of_all(total, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of all gradients is {float(total)}, so they cannot be clipped")
    # As torch's own function: no branch on the norm, so the host does not wait for the GPU.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    multiply_in_place([local_part(g) for g in grads.values()], scale)
    return total


def _find_parallel(params: Iterable[torch.Tensor]) -> Parallel | None:
    """Return the model under a plan that owns the parameters."""
    models = (weight.model() for weight in map(find_weight, params) if weight is not None and weight.model is not None)
    return next(filter(None, models), None)


@torch.no_grad()
def total_norm(grads: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all tensors together. Every element counts once, however the tensors are sharded."""
    # Example on an axis of 2: shards have the squares 1 and 3, and a replicated gradient has 5 on both ranks. The norm is
    # sqrt((1 + 3) + 5) = 3. To sum everything over ranks would count the 5 twice, so gradients are grouped by what shards them.
    groups: dict[ShardingAxes, list[torch.Tensor]] = {}
    mesh = None
    for grad in grads:
        split: ShardingAxes = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            split = tuple(a for a, p in enumerate(grad.placements) if isinstance(p, Shard) and mesh.size(a) > 1)
        groups.setdefault(split, []).append(local_part(grad))
    if not groups:
        return torch.zeros(())
    values = {split: _sum_of_powers(tensors, norm_type) for split, tensors in groups.items()}
    for axis in sorted({a for split in values for a in split}):
        assert mesh is not None
        # Sorted, so that all ranks stack the same groups in one order, whichever parameter came first.
        keys = [split for split in sorted(values) if axis in split]
        stacked = torch.stack([values[split] for split in keys])
        reduction = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(stacked, reduction, group=mesh.get_group(axis))
        values.update(zip(keys, stacked.unbind(), strict=True))
    parts = torch.stack(list(values.values()))
    return parts.max() if math.isinf(norm_type) else parts.sum() ** (1.0 / norm_type)


def _sum_of_powers(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of the powers of all elements, in float32 at least; for the infinite norm the largest element."""
    norms = torch.stack([n.float() if n.dtype.itemsize < 4 else n for n in norms_of(grads, norm_type)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
