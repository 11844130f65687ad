"""Functions that run as one operator: they must behave on meta as the GPU's fused kernels do, and not as their decomposition on the CPU,
and the model's own autograd functions may use nothing but their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner_core.models.capture.refusals import refuse
from planner_core.models.hooks import RECURRENT, canonical, tensors
from planner_core.models.hooks.callsites import OWN
from planner_core.models.hooks.wrappers import HELP


class FlashAttention(torch.autograd.Function):
    """Shapes and saved tensors of a flash attention kernel: q, k, v, result, log-sum-exp (and the mask, if any)."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Result [..., heads, query length, value width]; keys and values keep their own number of heads."""
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        rows = (*batch, *query.shape[-3:-1])
        # the flash kernels write [b, s, h, d] and hand out its transpose, so model code need not copy
        out = query.new_empty((*batch, query.shape[-2], query.shape[-3], value.shape[-1])).transpose(-2, -3)
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(rows, dtype=torch.float32), *([] if mask is None else [mask])
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gradients have the shapes of what they belong to."""
        saved = ctx.saved_tensors
        return (*(torch.empty_like(t) for t in saved[:3]), torch.empty_like(saved[5]) if len(saved) > 5 else None)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`scaled_dot_product_attention` on meta tensors, as the flash kernel would do it."""
    if query.dim() < 3:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)
    heads, groups = query.shape[-3], key.shape[-3]
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"attention of query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if heads != groups and not (enable_gqa and heads % groups == 0) and 1 not in (heads, groups):
        raise RuntimeError(f"attention of {heads} query heads and {groups} key heads")
    out: torch.Tensor = FlashAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return out


def kept_by_kernel(fn: str, args: Any) -> list[torch.Tensor]:
    """What a kernel keeps for backward whatever it is called with: that of a recurrent layer keeps all weights, also where the
    decomposition on meta would not need one."""
    return [t for t in tensors(args) if t.requires_grad] if fn in RECURRENT else []


class Alone:
    """The model's own autograd functions. Each runs as one operator, so it may use nothing but its arguments: what it reads beside them
    would be missing from the plan, and get no gradient. `foreign` says whether a tensor was made outside of it."""

    def __init__(self, foreign: Callable[[torch.Tensor], bool], scope: Callable[[], str]) -> None:
        self.foreign, self.scope = foreign, scope
        self.fn = ""  # of the one that runs

    def __call__(self, fn: str, func: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """What takes the place of a call of one; any other function is as it was."""
        if not hasattr(func, OWN):
            return func

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.fn = self.fn, fn
            inside: list[TorchFunctionMode] = getattr(func, OWN)
            inside.append(_Arguments(self, (*tensors((args, kwargs)), *operands)))
            try:
                return func(*args, **kwargs)
            finally:
                self.fn = before
                inside.pop()

        return run

    def check_module(self, scope: str) -> None:
        """Refuse a module that is called inside of one."""
        if self.fn:
            raise refuse(scope, f"is run inside the autograd function {self.fn}, whose ops cannot be seen", HELP)


class _Arguments(TorchFunctionMode):
    """Inside an autograd function: refuses a tensor from outside that is not among its arguments, nor a part of one."""

    def __init__(self, alone: Alone, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.alone = alone
        with torch._C.DisableTorchFunction():
            self.given = {id(t) for t in given}
            self.memory = {_memory(t) for t in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call inside."""
        if canonical(func) is not None:
            for tensor in tensors((args, kwargs)):
                with torch._C.DisableTorchFunction():
                    other = id(tensor) not in self.given and _memory(tensor) not in self.memory
                if other and self.alone.foreign(tensor):
                    raise refuse(
                        self.alone.scope(), f"uses a tensor inside the autograd function {self.alone.fn} that is not one of its arguments",
                        f"hand it over as an argument; if the function is there to save memory, {HELP}",
                    )  # fmt: skip
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
