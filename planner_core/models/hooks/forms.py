"""Rewrite calls before they are recorded: to one that reads fewer operands, or to several that have sharding rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner_core.models.hooks.chance import DROPOUTS

Call = Callable[..., Any]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def rewrite_call(
    call: Call,
    func: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_constant: Callable[[torch.Tensor], bool],
    is_stored: Callable[[torch.Tensor], bool],
) -> Any:
    """Make a call as other calls, by `call(func, args, kwargs)`, and return its result; NotImplemented if it stays as it is.

    iter(x)                    unbind
    dropout of a weight        dropout of its clone, which has placements of its own: a mask needs them
    f(..., out=y)              y.copy_(f(...))
    x[arange(len(x)), i]       take_along_dim, which a rank can run on its own rows
    buffer.data                buffer.detach(), a view of it

    Args:
        is_constant: Whether a tensor has values that do not depend on an input.
        is_stored: Whether a tensor is neither a weight nor computed, writes into it aside.
    """
    # `==`, since each access to a property of a C type makes another method wrapper.
    if func == _GET_DATA and is_stored(args[0]):
        return call(torch.Tensor.detach, args, kwargs)
    if func is torch.Tensor.__iter__:
        return iter(call(torch.Tensor.unbind, args, kwargs))
    if getattr(func, "__name__", "") in DROPOUTS and isinstance(args[0], nn.Parameter) and not kwargs.get("inplace"):
        return call(func, (call(torch.clone, (args[0],), {}), *args[1:]), kwargs)
    if (
        func is torch.Tensor.__getitem__
        and isinstance(args[1], tuple)
        and isinstance(args[1][0], (torch.Tensor, list, range))
    ):
        x, (rows, *columns) = args
        rows = rows if isinstance(rows, torch.Tensor) else torch.as_tensor(rows)
        while columns and (columns[-1] == slice(None) if isinstance(columns[-1], slice) else columns[-1] is Ellipsis):
            columns.pop()  # full slices at the end select nothing
        if not columns and len(rows) == len(x) and is_constant(rows) and _is_arange(rows, len(x)):
            return call(torch.clone, (x,), {})
        if _indexes_each_row(x, rows, columns) and is_constant(rows) and _is_arange(rows, len(x)):
            return _take_from_each_row(lambda func, *args: call(func, args, {}), x, columns)
    target = kwargs.get("out")
    if not isinstance(target, torch.Tensor):
        return NotImplemented
    result = call(func, args, {name: value for name, value in kwargs.items() if name != "out"})
    return call(torch.Tensor.copy_, (target, result), {})


def _indexes_each_row(x: torch.Tensor, rows: torch.Tensor, columns: list[Any]) -> bool:
    """Return whether an index may pick elements of each row: rows [n] or [n, 1], then one or two indices [n] or [n, k]."""
    shapes = {
        p.shape if isinstance(p, torch.Tensor) and not p.dtype.is_floating_point and p.dtype != torch.bool else None
        for p in columns
    }
    if len(shapes) != 1 or None in shapes or len(columns) not in (1, 2) or x.dim() <= len(columns):
        return False
    shape = columns[0].shape
    return len(shape) in (1, 2) and shape[0] == len(x) and rows.shape == (len(x), *[1] * (len(shape) - 1))


def _is_arange(rows: torch.Tensor, n: int) -> bool:
    return rows.dtype in (torch.int64, torch.int32) and torch.equal(
        rows.flatten().cpu(), torch.arange(n, dtype=rows.dtype)
    )


def _take_from_each_row(call: Call, x: torch.Tensor, columns: list[torch.Tensor]) -> torch.Tensor:
    """Pick elements of each row by `take_along_dim`, which does not accept negative indices: these get the size added first."""
    at = [
        call(torch.where, call(torch.lt, p, 0), call(torch.add, p, size), p)
        for p, size in zip(columns, x.shape[1:], strict=False)
    ]
    if len(at) == 2:
        # Two indices into [n, a, b] are one into [n, a * b].
        at = [call(torch.add, call(torch.mul, at[0], x.shape[2]), at[1])]
        x = call(torch.flatten, x, 1, 2)
    index = at[0] if at[0].dtype == torch.int64 else call(torch.Tensor.to, at[0], torch.int64)
    shape = (len(x), -1, *[1] * (x.dim() - 2))
    elements = call(torch.take_along_dim, x, call(torch.Tensor.reshape, index, shape), 1)
    return call(torch.Tensor.squeeze, elements, 1) if index.dim() == 1 else elements  # type: ignore[no-any-return]


_WITH_SIZES_OF: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.view_as: torch.Tensor.view,
    torch.Tensor.reshape_as: torch.Tensor.reshape,
    torch.Tensor.expand_as: torch.Tensor.expand,
}


_RANDOM_LIKE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}


_ELEMENTWISE = {
    torch.max: torch.maximum,
    torch.min: torch.minimum,
    torch.Tensor.max: torch.maximum,
    torch.Tensor.min: torch.minimum,
}


def normalize_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Rewrite a call to an equal one that reads fewer operands.

    x.reshape_as(y)       x.reshape(y.shape)       the elements of y are not read, so no rank needs them
    x.type_as(y)          x.to(y.dtype)
    torch.randn_like(y)   torch.randn(y.shape)
    torch.max(x, y)       torch.maximum(x, y)      not a reduction
    """
    if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return func, (args[0], args[1].dtype, *args[2:]), kwargs
    if func in _ELEMENTWISE and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor):
        return _ELEMENTWISE[func], args, kwargs
    if func in _RANDOM_LIKE:
        y, *limits = args
        given = {"dtype": y.dtype, "device": y.device} | {
            k: v for k, v in kwargs.items() if k not in ("memory_format", "input")
        }
        limits = [0, *limits] if len(limits) == 1 else limits
        return _RANDOM_LIKE[func], (*limits, tuple(y.shape)), given
    if func not in _WITH_SIZES_OF and func is not torch.Tensor.type_as:
        return func, args, kwargs
    x, other = (*args, *kwargs.values())
    if func is torch.Tensor.type_as:
        return torch.Tensor.to, (x, other.dtype), {}
    return _WITH_SIZES_OF[func], (x, tuple(other.shape)), {}


def makes_kv_cache(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Return whether a model of transformers would make a cache of keys and values, which a training step does not use."""
    config: Any = getattr(model, "config", None)
    taken = inspect.signature(forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return bool(getattr(config, "use_cache", False)) and ("use_cache" in taken or open_ended)
