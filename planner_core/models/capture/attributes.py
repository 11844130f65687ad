"""The arguments of a call that are no tensors, in a normal form that JSON can hold.

`describe` binds arguments to names (tables below; Python functions by their signature), makes dims
non-negative, and turns every kind of transposition, indexing and splitting into one form each.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from planner_core.core import Attr

Call = tuple[tuple[Any, ...], dict[str, Any]]

_NAMES = {
    "linear": "input weight bias", "bilinear": "input1 input2 weight bias",
    "conv1d": "input weight bias stride padding dilation groups",
    "conv_transpose1d": "input weight bias stride padding output_padding groups dilation",
    "layer_norm": "input normalized_shape weight bias eps", "rms_norm": "input normalized_shape weight eps",
    "group_norm": "input num_groups weight bias eps",
    "batch_norm": "input running_mean running_var weight bias training momentum eps",
    "embedding": "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing",
    "addmm": "input mat1 mat2", "baddbmm": "input batch1 batch2", "matmul": "input other", "bmm": "input mat2",
    "mm": "input mat2", "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal",
    "where": "condition input other", "softmax": "input dim _stacklevel dtype", "log_softmax": "input dim _stacklevel dtype",
    "sum": "input dim keepdim", "mean": "input dim keepdim", "prod": "input dim keepdim", "var": "input dim unbiased keepdim",
    "std": "input dim unbiased keepdim", "amax": "input dim keepdim", "amin": "input dim keepdim",
    "max": "input dim keepdim", "min": "input dim keepdim", "argmax": "input dim keepdim", "argmin": "input dim keepdim",
    "logsumexp": "input dim keepdim", "norm": "input p dim keepdim dtype", "any": "input dim keepdim",
    "all": "input dim keepdim", "cumsum": "input dim", "cumprod": "input dim", "sort": "input dim descending stable",
    "topk": "input k dim largest sorted", "gather": "input dim index", "scatter": "input dim index src",
    "scatter_": "input dim index src", "scatter_add": "input dim index src", "index_select": "input dim index",
    "index_add": "input dim index source", "index_add_": "input dim index source", "masked_fill": "input mask value",
    "masked_fill_": "input mask value", "unsqueeze": "input dim", "squeeze": "input dim",
    "flatten": "input start_dim end_dim", "chunk": "input chunks dim", "split": "input split_size dim",
    "unbind": "input dim", "narrow": "input dim start length", "select": "input dim index", "cat": "tensors dim",
    "stack": "tensors dim", "repeat_interleave": "input repeats dim", "roll": "input shifts dims",
    "pad": "input pad mode value", "clamp": "input min max", "tril": "input diagonal", "triu": "input diagonal",
    "add": "input other", "sub": "input other", "mul": "input other", "div": "input other", "pow": "input exponent",
    "glu": "input dim", "unfold": "input dimension size step", "diff": "input n dim", "flip": "input dims",
    "linalg_vector_norm": "input ord dim keepdim dtype", "_weight_norm": "v g dim", "as_strided": "input size stride storage_offset",
    "einsum": "equation operands", "one_hot": "input num_classes", "gelu": "input", "dropout": "input p training",
}  # fmt: skip
for _d in ("2", "3"):
    _NAMES[f"conv{_d}d"] = _NAMES["conv1d"]
    _NAMES[f"conv_transpose{_d}d"] = _NAMES["conv_transpose1d"]
for _d in ("fft", "ifft", "rfft", "irfft"):
    _NAMES[f"fft_{_d}"] = "input n dim norm"
for _d in ("fftn", "ifftn", "rfftn", "irfftn", "fft2", "ifft2", "rfft2", "irfft2"):
    _NAMES[f"fft_{_d}"] = "input s dim norm"
_SHAPES = frozenset({"view", "reshape", "expand", "view_as", "reshape_as", "expand_as", "flatten", "unflatten", "repeat",
                     "ravel", "broadcast_to", "new_zeros", "new_ones", "new_empty"})  # fmt: skip
_PERMUTES = frozenset({"transpose", "transpose_", "permute", "t", "T", "mT", "H", "mH", "movedim", "adjoint"})
_SPLITS = frozenset({"split", "chunk", "tensor_split", "split_with_sizes", "unbind", "unsafe_chunk", "unsafe_split"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "rsub", "rdiv", "rpow"})
_JUNK = frozenset({"_stacklevel", "size_average", "reduce", "memory_format", "copy", "non_blocking", "out", "device",
                   "max_norm", "scale_grad_by_freq", "sparse", "norm_type", "layout", "pin_memory"})  # fmt: skip
_LAST = {"topk": -1, "sort": -1, "chunk": 0, "split": 0, "cat": 0, "stack": 0, "glu": -1, "softmax": -1, "log_softmax": -1,
         "argsort": -1, "unbind": 0, "diff": -1}  # fmt: skip


def describe(
    fn: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[torch.Tensor]
) -> dict[str, Attr]:
    """Attributes of one call whose results are `outs`, by the canonical name `fn`."""
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if fn in _SHAPES:
        return {}
    if fn in _PERMUTES and first is not None:
        return {"dims": _permutation(func, args, kwargs, first.dim())}
    if fn in ("getitem", "setitem") and first is not None:
        return {"index": _index(args[1], first)}
    bound = _bind(fn, func, args, kwargs)
    names = [n for n, v in bound.items() for _ in _tensor_leaves(v)]
    attrs = {n: _literal(v) for n, v in bound.items() if not _tensor_leaves(v) and n not in _JUNK and v is not None}
    if len(names) > 1 and fn not in ("cat", "stack", "einsum"):
        attrs["arg_names"] = tuple(names)
    return _normal(fn, attrs, bound, first, outs)


def _bind(fn: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if fn == "to":
        return _target(func, args, kwargs)
    if fn == "einsum":
        return {"equation": args[0], "operands": args[1:]}
    patches = fn == "unfold" and inspect.isfunction(func)  # not the method of this name
    table = [] if patches else _NAMES.get(fn, _NAMES.get(fn.rstrip("_"), "")).split()
    if not table and inspect.isfunction(func):
        try:
            signature = inspect.signature(func)
            bound = dict(signature.bind(*args, **kwargs).arguments)
            rest = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
            return {k: v for n, a in bound.items() for k, v in (a.items() if n in rest else [(n, a)])}
        except (TypeError, ValueError):
            pass
    bound = {table[i] if i < len(table) else f"arg{i}": a for i, a in enumerate(args)}
    return {**bound, **kwargs}


def _target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    dtypes = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
    name = getattr(func, "__name__", "")
    if not dtypes and isinstance(getattr(torch, name, None), torch.dtype):
        dtypes = [getattr(torch, name)]
    others = {f"other{i}": a for i, a in enumerate(args[1:]) if isinstance(a, torch.Tensor)}
    return {"input": args[0] if args else None, **others, **({"dtype": dtypes[0]} if dtypes else {})}


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensor_leaves(v)]
    return []


def _literal(value: Any) -> Attr:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return tuple(_literal(v) for v in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value):
        return getattr(value, "__qualname__", None) or type(value).__qualname__
    return type(value).__qualname__


def _normal(
    fn: str, attrs: dict[str, Attr], bound: dict[str, Any], first: torch.Tensor | None, outs: list[torch.Tensor]
) -> dict[str, Attr]:
    ndim = first.dim() if first is not None else (_tensor_leaves(bound.get("tensors")) or outs)[0].dim()
    if fn in _SPLITS:
        at = _dim(bound.get("dim", 0), ndim)
        return {"dim": at} if fn == "unbind" else {"dim": at, "sizes": tuple(o.shape[at] for o in outs)}
    if fn in ("stack", "unsqueeze"):
        return {"dim": _dim(bound.get("dim", 0), ndim + 1)}
    _normal_dims(fn, attrs, ndim)
    if fn.rstrip("_") in _ARITHMETIC:
        for name in ("other", "exponent", "arg1"):
            if name in attrs:
                attrs["scalar"] = attrs.pop(name)
    _defaults(fn, attrs, first)
    return attrs


def _normal_dims(fn: str, attrs: dict[str, Attr], ndim: int) -> None:
    """Non-negative `dims` for reductions, `dim` for the rest."""
    if "axis" in attrs:
        attrs["dim"] = attrs.pop("axis")
    if "keepdim" in _NAMES.get(fn, ""):
        attrs["dims"] = _dims(attrs.pop("dim", None), ndim)
        attrs["keepdim"] = bool(attrs.get("keepdim", False))
        return
    dim = attrs.get("dim", _LAST.get(fn))
    if isinstance(dim, (int, tuple)):
        attrs["dim"] = _dims(dim, ndim) if isinstance(dim, tuple) else _dim(dim, ndim)


def _defaults(fn: str, attrs: dict[str, Attr], first: torch.Tensor | None) -> None:
    if fn.startswith("conv"):
        n = int(fn[-2])
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = attrs.get(name, default)
            attrs[name] = value if isinstance(value, (tuple, str)) else (value,) * n
        attrs.setdefault("groups", 1)
    elif fn == "scaled_dot_product_attention":
        attrs.pop("dropout_p", None)
        attrs.setdefault("is_causal", False)
        attrs.setdefault("enable_gqa", False)
    elif fn == "as_strided" and first is not None:
        attrs["input_stride"] = tuple(first.stride())
    elif fn == "cross_entropy":
        attrs.setdefault("reduction", "mean")
        attrs.setdefault("ignore_index", -100)
        attrs.setdefault("label_smoothing", 0.0)


def _dim(dim: Any, ndim: int) -> int:
    return int(dim) % max(ndim, 1)


def _dims(dims: Any, ndim: int) -> tuple[int, ...]:
    if dims is None or dims == ():
        return tuple(range(ndim))
    return tuple(_dim(d, ndim) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _permutation(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> tuple[int, ...]:
    # distinct sizes tell where each dim went, whichever way the call spelled it
    probe = torch.empty(tuple(range(2, 2 + ndim)), device="meta")
    with torch.no_grad():
        out = func(*[probe if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    return tuple(d - 2 for d in out.shape)


def _index(index: Any, source: torch.Tensor) -> tuple[Attr, ...]:
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(_consumes(i) for i in items)
    found: list[Attr] = []
    dim = 0
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    for item in items:
        if item is Ellipsis:
            rest = source.dim() - taken
            found += [("slice", 0, source.shape[dim + i], 1) for i in range(rest)]
            dim += rest
        elif item is None:
            found.append(("none",))
        elif isinstance(item, torch.Tensor):
            found.append(("tensor",))
            dim += _consumes(item)
        elif isinstance(item, slice):
            bounds = [int(i) if isinstance(i, torch.Tensor) else i for i in (item.start, item.stop, item.step)]
            found.append(("slice", *slice(*bounds).indices(source.shape[dim])))
            dim += 1
        elif isinstance(item, (bool, int)) and not isinstance(item, bool):
            found.append(("int", item % max(source.shape[dim], 1)))
            dim += 1
        else:
            found.append(("other", _literal(item)))
            dim += _consumes(item)
    return tuple(found)


def _consumes(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1
