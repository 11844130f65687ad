"""What a model may be given: tensors, numbers and words, in containers that torch looks into; and which of them hold samples."""

from __future__ import annotations

import enum
import functools
import numbers
import re
import types
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (
    bool,
    numbers.Number,
    str,
    bytes,
    frozenset,
    types.NoneType,
    enum.Enum,
    type,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
)
_PLACE = re.compile(r"\[[^\]]*\]")
_WITHOUT, _WITH = "inputs_without_samples", "inputs_with_samples"
"""Keys of a plan's `config`, where some inputs have no samples: the names of those whose dim 0 is not that of the batch, and of others."""


def spelled(path: tuple[Any, ...], names: Sequence[str] = ()) -> str:
    """The place of a leaf of (args, kwargs): `argument 2`, `labels`, `batch['x'][0]`. `names`: those of positional parameters."""
    kind, first, *rest = path
    by_place = kind == pytree.SequenceKey(0)
    known = dict(enumerate(names)) if by_place else {}
    name = known.get(first.idx, f"argument {first.idx + 1}") if by_place else first.key
    return f"{name}{pytree.keystr(tuple(rest))}"


def positional(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that may be given by their place."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature(function).parameters.values() if p.kind in kinds]


def tables_of(module: nn.Module, args: Any, kwargs: Any) -> dict[str, list[str]]:
    """For a plan's `config`: the tensors whose dim 0 is not as long as the first one's, and the others, if there are such. One row may
    stand for all samples, and another call may have one for each."""
    leaves = [
        (path, x)
        for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]
        if isinstance(x, torch.Tensor) and x.dim()
    ]
    names = positional(module.forward)
    found: dict[str, list[str]] = {_WITHOUT: [], _WITH: []}
    for path, x in leaves:
        found[_WITH if x.shape[0] in (1, leaves[0][1].shape[0]) else _WITHOUT].append(spelled(path, names))
    return found if found[_WITHOUT] else {}


def is_table(name: str, config: Mapping[str, Any]) -> bool:
    """Whether an input had no samples when the model was planned; a new one in a list or dict is as the others there."""
    tables, samples = ({*config.get(key, ())} for key in (_WITHOUT, _WITH))
    if name in tables or name in samples:
        return name in tables
    return _anywhere(name) in {*map(_anywhere, tables)} - {*map(_anywhere, samples)}


def is_new(name: str, config: Mapping[str, Any]) -> bool:
    """Whether an input was not there when the model was planned, with tables, so that nothing says whether it has samples."""
    return _WITHOUT in config and _anywhere(name) not in {*map(_anywhere, (*config[_WITHOUT], *config[_WITH]))}


def _anywhere(name: str) -> str:
    return _PLACE.sub("[]", name)


def unread_argument(args: Any, kwargs: Any) -> str:
    """Says which argument a plan cannot take, or would keep as it is at the first call, and what would do; empty if none is."""
    leaves = pytree.tree_leaves((args, kwargs))
    first = next((x for x in leaves if isinstance(x, torch.Tensor) and x.dim()), None)
    if first is not None and not first.shape[0]:
        return f"the first tensor has the shape {tuple(first.shape)}, and so no samples; give those of one step"
    if all(_plain(x) for x in leaves):
        return ""
    flat = pytree.tree_flatten_with_path((args, kwargs))[0]
    return next(f"{spelled(path)} is {_unread(leaf)}" for path, leaf in flat if not _plain(leaf))


def state_of(leaf: Any) -> Any:
    """What tells one argument beside tensors from another: equal numbers of other types differ (1, True), and a module by what it holds."""
    if isinstance(leaf, nn.Module):
        return id(leaf), *((n, state_of(v)) for m in leaf.modules() for n, v in _held(m))
    if isinstance(leaf, torch.Tensor):
        return id(leaf), leaf._version
    return (type(leaf), repr(leaf)) if isinstance(leaf, (int, float)) else leaf


def _plain(leaf: Any) -> bool:
    """Whether a leaf is dense, or has no values that may change unseen."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.is_nested and leaf.layout in (torch.strided, torch.sparse_coo)
    if isinstance(leaf, nn.Module):
        values = (v for m in leaf.modules() for _, v in _held(m))
        return not any(True for _ in leaf.parameters()) and all(isinstance(v, (*_PLAIN, torch.Tensor)) for v in values)
    if isinstance(leaf, functools.partial):
        return all(
            _plain(x) and not isinstance(x, torch.Tensor) for x in (leaf.func, *leaf.args, *leaf.keywords.values())
        )
    return isinstance(leaf, _PLAIN) or (isinstance(leaf, types.FunctionType) and _settled(leaf))


def _held(module: nn.Module) -> list[tuple[str, Any]]:
    """A module's own attributes and buffers."""
    return [
        *((n, v) for n, v in module.__dict__.items() if not n.startswith("_")),
        ("", module.training),
        *module._buffers.items(),
    ]


def _settled(function: types.FunctionType) -> bool:
    """Whether a function reads nothing outside of it but modules, classes and functions."""
    kinds = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    read = (function.__globals__.get(name, type) for name in function.__code__.co_names)
    return function.__module__.startswith("torch.") or (
        not function.__closure__ and all(isinstance(v, kinds) for v in read)
    )


def _unread(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        kind = "nested" if leaf.is_nested else str(leaf.layout)
        return (
            f"a tensor of kind {kind}, which a plan cannot split; give it dense (padded, if its rows differ), or as COO"
        )
    named = f"of type {type(leaf).__name__}"
    if isinstance(leaf, nn.Module) and any(True for _ in leaf.parameters()):
        return f"{named}, a module with weights, which a plan would leave as they are; make it a part of the model"
    return (
        f"{named}, into which a plan does not look, so that its values would stay those of the first call; give its tensors and numbers as "
        "arguments of their own, or in a dict, list or tuple"
    )
