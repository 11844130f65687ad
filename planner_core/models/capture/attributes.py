"""Normalize the arguments of a call that are not tensors to a form that JSON can hold.

`describe` binds arguments to names (the operator's `arguments`; Python functions by their signature), makes dims
non-negative, and turns each kind of transposition, indexing and splitting into one form (`CallDescription`):
x.t(), x.transpose(0, 1) and x.permute(1, 0) all have dims = (1, 0).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from planner_core.core import Attr
from planner_core.models.hooks.callsites import tensors
from planner_core.ops import CallDescription, Kind, Operator, operator

_IGNORED = frozenset(
    {
        "_stacklevel",
        "memory_format",
        "copy",
        "non_blocking",
        "out",
        "device",
        "max_norm",
        "scale_grad_by_freq",
        "sparse",
        "norm_type",
        "layout",
        "pin_memory",
    }
)


def describe(
    fn: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]
) -> dict[str, Attr]:
    """Return the attributes of one call with the canonical name `fn` and the results `outs`."""
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    one = operator(fn)
    if one.described_by is CallDescription.BY_SHAPES:
        return {}
    if one.described_by is CallDescription.BY_ORDER and first is not None:
        return {"dims": _find_permutation(func, args, kwargs, first.dim())}
    if one.described_by is CallDescription.BY_INDEX and first is not None:
        return {"index": _describe_index(args[1], first)}
    bound = _bind_arguments(fn, func, args, kwargs)
    names = [n for n, v in bound.items() for _ in tensors(v)]
    ignored = {*_IGNORED, *one.ignored}
    attrs = {n: _literal_value(v) for n, v in bound.items() if not tensors(v) and n not in ignored and v is not None}
    if len(names) > len(set(names)):  # a list of tensors has one name
        names = []
    # Of `layer_norm(x, shape, bias=b)` the order alone would not say whether the second tensor is the weight or the bias.
    if len(names) > 1:
        attrs["arg_names"] = tuple(names)
    return _normalize_attributes(one, attrs, bound, first, outs)


def _bind_arguments(fn: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if fn == "to":
        return _bind_cast(func, args, kwargs)
    if fn == "einsum":
        return {"equation": args[0], "operands": args[1:]}
    patches = fn == "unfold" and inspect.isfunction(func)  # not the method of this name
    table = [] if patches else operator(fn).arguments.split()
    if not table and inspect.isfunction(func):
        try:
            signature = inspect.signature(func)
            bound = dict(signature.bind(*args, **kwargs).arguments)
            # What **kwargs collect are arguments by the names that the caller gave.
            rest = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
            return {k: v for n, a in bound.items() for k, v in (a.items() if n in rest else [(n, a)])}
        except (TypeError, ValueError):
            pass
    bound = {table[i] if i < len(table) else f"arg{i}": a for i, a in enumerate(args)}
    return {**bound, **kwargs}


def _bind_cast(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    # Three forms: `x.to(torch.half)`, `x.half()` whose name is that of a dtype, and `x.to(y)` which takes that of y.
    dtypes = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
    name = getattr(func, "__name__", "")
    if not dtypes and isinstance(getattr(torch, name, None), torch.dtype):
        dtypes = [getattr(torch, name)]
    others = {f"other{i}": a for i, a in enumerate(args[1:]) if isinstance(a, torch.Tensor)}
    return {"input": args[0] if args else None, **others, **({"dtype": dtypes[0]} if dtypes else {})}


def _literal_value(value: Any) -> Attr:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no infinity
    if isinstance(value, (tuple, list)):
        return tuple(_literal_value(v) for v in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value):
        return getattr(value, "__qualname__", None) or type(value).__qualname__
    return type(value).__qualname__


def _normalize_attributes(
    one: Operator, attrs: dict[str, Attr], bound: dict[str, Any], first: torch.Tensor | None, outs: list[torch.Tensor]
) -> dict[str, Attr]:
    ndim = first.dim() if first is not None else (tensors(bound.get("tensors")) or outs)[0].dim()
    if one.described_by is CallDescription.BY_DIM:
        return {"dim": _nonnegative_dim(bound.get("dim", 0), ndim)}
    if one.described_by is CallDescription.BY_SIZES:
        at = _nonnegative_dim(bound.get("dim", 0), ndim)
        return {"dim": at, "sizes": tuple(o.shape[at] for o in outs)}
    if one.described_by is CallDescription.BY_NEW_DIM:
        return {"dim": _nonnegative_dim(bound.get("dim", 0), ndim + 1)}
    _normalize_dims(one, attrs, ndim)
    if one.described_by is CallDescription.BY_SCALAR:
        for name in ("other", "exponent", "arg1"):
            if name in attrs:
                attrs["scalar"] = attrs.pop(name)
    if one.kind is Kind.CONVOLUTION:
        _normalize_convolution(one, attrs)
    if one.name == "as_strided" and first is not None:
        attrs["input_stride"] = tuple(first.stride())
    for name, value in one.defaults.items():
        attrs.setdefault(name, value)
    return attrs


def _normalize_dims(one: Operator, attrs: dict[str, Attr], ndim: int) -> None:
    """Set non-negative `dims` for reductions, and `dim` for other functions."""
    if "axis" in attrs:
        attrs["dim"] = attrs.pop("axis")
    if "keepdim" in one.arguments:
        attrs["dims"] = _nonnegative_dims(attrs.pop("dim", None), ndim)
        attrs["keepdim"] = bool(attrs.get("keepdim", False))
        return
    dim = attrs.get("dim", one.default_dim)
    if isinstance(dim, (int, tuple)):
        attrs["dim"] = _nonnegative_dims(dim, ndim) if isinstance(dim, tuple) else _nonnegative_dim(dim, ndim)


def _normalize_convolution(one: Operator, attrs: dict[str, Attr]) -> None:
    """Repeat stride, padding and dilation for each spatial dim."""
    num_spatial = int(one.name[-2])  # torch's names: conv2d, conv_transpose2d
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = attrs.get(name, default)
        attrs[name] = value if isinstance(value, (tuple, str)) else (value,) * num_spatial
    attrs.setdefault("groups", 1)


def _nonnegative_dim(dim: Any, ndim: int) -> int:
    # torch takes dims 0 and -1 of a scalar too.
    return int(dim) % max(ndim, 1)


def _nonnegative_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    if dims is None or dims == () or isinstance(dims, bool):  # x.var(False): another argument
        return tuple(range(ndim))
    return tuple(_nonnegative_dim(d, ndim) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _find_permutation(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int
) -> tuple[int, ...]:
    # Sizes 2, 3, 4, ... are distinct, so the shape of the result shows where each dim went, whatever the call is named.
    probe = torch.empty(tuple(range(2, 2 + ndim)), device="meta")
    with torch.no_grad():
        out = func(*[probe if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    return tuple(d - 2 for d in out.shape)


def _describe_index(index: Any, source: torch.Tensor) -> tuple[Attr, ...]:
    # Each form of one selection gets the same parts: of a matrix x[0], x[0, :] and x[0, ...] all have (int 0, whole slice).
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_dims_consumed(i) for i in items)
    parts: list[Attr] = []
    dim = 0
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    for item in items:
        if item is Ellipsis:
            rest = source.dim() - taken
            parts += [("slice", 0, source.shape[dim + i], 1) for i in range(rest)]
            dim += rest
        elif item is None:
            parts.append(("none",))
        elif isinstance(item, torch.Tensor):
            parts.append(("tensor", "mask") if item.dtype in (torch.bool, torch.uint8) else ("tensor",))
            dim += _dims_consumed(item)
        elif isinstance(item, slice):
            bounds = [int(i) if isinstance(i, torch.Tensor) else i for i in (item.start, item.stop, item.step)]
            parts.append(("slice", *slice(*bounds).indices(source.shape[dim])))
            dim += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            parts.append(("int", item % max(source.shape[dim], 1)))
            dim += 1
        else:
            parts.append(("other", _literal_value(item)))
            dim += _dims_consumed(item)
    return tuple(parts)


def _dims_consumed(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1
