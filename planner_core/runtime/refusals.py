"""What a process refuses from the first `apply` on, since it would go wrong without a word."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner_core.runtime.plan_reader import PlanMismatch
from planner_core.runtime.program.setup import REPLACED


@functools.cache
def refuse_silent_faults() -> None:
    """Let optimizers refuse parameters that a plan has replaced, and numbers of shards be refused where those of tensors are meant."""
    register_optimizer_step_pre_hook(_check_parameters)
    # torch has no public way: an operator's own rule would not be asked for a single number
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number


def _check_parameters(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    if any(hasattr(p, REPLACED) for group in optimizer.param_groups for p in group["params"][:1]):
        raise PlanMismatch(
            "this optimizer has the parameters from before apply, which the plan has replaced; make it after apply, from "
            "model.parameters()"
        )


def _number(op: Any, args: Any, kwargs: Any) -> Any:
    """The number of a DTensor, as `.item()`, `float()` and conditions take it. DTensor itself would give this rank's term of a sum."""
    if any(p.is_partial() and n > 1 for p, n in zip(args[0].placements, args[0].device_mesh.shape, strict=True)):
        raise PlanMismatch(
            "this number (.item(), float() or a condition) was made of a weight or gradient that is sharded over ranks, and each rank "
            "has its own term of it; let all ranks call .full_tensor() first, as in grad.norm().full_tensor().item()"
        )
    return op(args[0].to_local())
