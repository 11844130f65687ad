"""What a process refuses or mends from the first `apply` on, since torch itself would go wrong with shards without a word."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops import _math_ops
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from planner_core.runtime.loop.optimizer_states import in_model_order
from planner_core.runtime.loop.whole_tensors import keep_model_order
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.gradients import forget, pending
from planner_core.runtime.program.operators.chances import draw_whole
from planner_core.runtime.program.setup import REPLACED
from planner_core.runtime.program.weights import owner_of

_ATEN = torch.ops.aten
_DRAWING = (_ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.bernoulli_.float, _ATEN.rand_like.default, _ATEN.randn_like.default,
            _ATEN.randint_like.default, _ATEN.randint_like.low_dtype)  # fmt: skip


@functools.cache
def refuse_silent_faults() -> None:
    """Change the functions of torch through which loops reach parameters under a plan: optimizers, autograd and numbers of DTensors."""
    register_optimizer_step_pre_hook(_check_parameters)
    torch.optim.Optimizer.zero_grad = _forgetting(torch.optim.Optimizer.zero_grad)  # type: ignore[method-assign]
    keep_model_order()
    in_model_order(torch.optim.Optimizer)
    torch.autograd.backward = _of_all(torch.autograd.backward)
    torch.autograd.grad = _of_all(torch.autograd.grad)
    _math_ops.common_reduction_strategy = _after_norms(_math_ops.common_reduction_strategy)
    # torch has no public way: an operator's own rule would not be asked for a single number
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[_ATEN._local_scalar_dense.default] = _number
    if not torch.cuda.is_available():
        handlers.update(dict.fromkeys(_DRAWING, draw_whole))


def _check_parameters(optimizer: torch.optim.Optimizer, *args: Any) -> None:
    if any(hasattr(p, REPLACED) for group in optimizer.param_groups for p in group["params"][:1]):
        raise PlanMismatch(
            "this optimizer has the parameters from before apply, which the plan has replaced; make it after apply, from "
            "model.parameters()"
        )
    waits = pending(p for group in optimizer.param_groups for p in group["params"])
    if waits:
        raise PlanMismatch(
            f"the optimizer steps, but gradients of {waits} were not summed over ranks: each backward pass since then ran inside "
            "no_sync(); let the last one of a step run outside of it"
        )


def _forgetting(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's `zero_grad` that leaves out what micro-batches inside `no_sync()` have kept for the last one, too."""

    @functools.wraps(zero_grad)
    def forgets(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        forget(p for group in self.param_groups for p in group["params"])
        zero_grad(self, *args, **kwargs)

    return forgets


def _after_norms(strategy: Callable[..., Any]) -> Callable[..., Any]:
    """torch's rule of sums, which takes the terms of norms (`w.norm(dim=0).sum()`) for terms of a sum. They are norms of parts."""

    @functools.wraps(strategy)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = next(a for a in args if hasattr(a, "strategies"))  # in torch 2.6 a mesh comes first
        if any(isinstance(p, _math_ops._NormPartial) for one in given.strategies for p in one.output_spec.placements):
            kwargs["reduction_linear"] = False
        return strategy(*args, **kwargs)

    return checked


def _of_all(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of autograd that refuses to look for the gradients of some parameters alone: those under a plan are not in its graph."""

    @functools.wraps(backward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 and backward.__name__ == "grad" else None)
        if any(owner_of(x) for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)):
            raise PlanMismatch(
                "gradients were asked for of some tensors alone (torch.autograd.grad, or backward with inputs=), but parameters under a "
                "plan get theirs by loss.backward(), in their .grad"
            )
        return backward(*args, **kwargs)

    return checked


def _number(op: Any, args: Any, kwargs: Any) -> Any:
    """The number of a DTensor, as `.item()`, `float()` and conditions take it. DTensor itself would give this rank's term of a sum."""
    if any(p.is_partial() and n > 1 for p, n in zip(args[0].placements, args[0].device_mesh.shape, strict=True)):
        raise PlanMismatch(
            "this number (.item(), float() or a condition) was made of a weight, a gradient or a result that is sharded over ranks, and "
            "each rank has its own term of it; let all ranks call .full_tensor() first, as in grad.norm().full_tensor().item()"
        )
    return op(args[0].to_local())


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Refuse weights with hooks on their gradients. A weight that is cut into parts is another tensor, without them."""
    for name, param in module.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise PlanMismatch(
                f"{name} has a hook on its gradient, which apply would drop; register it after apply "
                "(register_post_accumulate_grad_hook), or change gradients in the loop"
            )
