"""Arguments that a planned model may get: tensors and plain values in nested containers; and which tensors hold samples in dim 0."""

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

_PLAIN_TYPES = (
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
_INDEX = re.compile(r"\[[^\]]*\]")
_WITHOUT, _WITH = "inputs_without_samples", "inputs_with_samples"
"""Keys of a plan's `config` if some inputs have no samples: the names of inputs whose dim 0 is not the batch, and those of the others."""


def argument_name(path: tuple[Any, ...], names: Sequence[str] = ()) -> str:
    """Name a leaf of (args, kwargs): `argument 2`, `labels`, `batch['x'][0]`. `names` are those of positional parameters."""
    kind, first, *rest = path
    by_place = kind == pytree.SequenceKey(0)
    known = dict(enumerate(names)) if by_place else {}
    name = known.get(first.idx, f"argument {first.idx + 1}") if by_place else first.key
    return f"{name}{pytree.keystr(tuple(rest))}"


def positional_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of parameters that can be passed by position."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature(function).parameters.values() if p.kind in kinds]


def list_inputs_by_samples(module: nn.Module, args: Any, kwargs: Any) -> dict[str, list[str]]:
    """List tensors whose dim 0 differs from that of the first tensor, and the others, for a plan's `config`; empty if none differs.

    A tensor with one row counts as having samples: another call may pass one row for each sample.
    """
    leaves = [
        (path, x)
        for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]
        if isinstance(x, torch.Tensor) and x.dim()
    ]
    names = positional_names(module.forward)
    found: dict[str, list[str]] = {_WITHOUT: [], _WITH: []}
    for path, x in leaves:
        found[_WITH if x.shape[0] in (1, leaves[0][1].shape[0]) else _WITHOUT].append(argument_name(path, names))
    return found if found[_WITHOUT] else {}


def lacks_samples(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether an input had no samples when the model was planned. A new item of a list or dict is like the others in it."""
    tables, samples = ({*config.get(key, ())} for key in (_WITHOUT, _WITH))
    if name in tables or name in samples:
        return name in tables
    return _without_indices(name) in {*map(_without_indices, tables)} - {*map(_without_indices, samples)}


def is_unknown_input(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether an input is new since the model was planned, so it is unknown whether it has samples."""
    return _WITHOUT in config and _without_indices(name) not in {
        *map(_without_indices, (*config[_WITHOUT], *config[_WITH]))
    }


def _without_indices(name: str) -> str:
    return _INDEX.sub("[]", name)


def explain_unsupported(args: Any, kwargs: Any) -> str:
    """Explain which argument a plan cannot take, or would keep as at the first call, and what would help; empty if all are supported."""
    leaves = pytree.tree_leaves((args, kwargs))
    first = next((x for x in leaves if isinstance(x, torch.Tensor) and x.dim()), None)
    if first is not None and not first.shape[0]:
        return f"the first tensor has the shape {tuple(first.shape)}, and so no samples; give those of one step"
    if all(_is_supported(x) for x in leaves):
        return ""
    flat = pytree.tree_flatten_with_path((args, kwargs))[0]
    return next(f"{argument_name(path)} is {_explain_leaf(leaf)}" for path, leaf in flat if not _is_supported(leaf))


def argument_state(leaf: Any) -> Any:
    """Return a value that is equal for equal arguments. Numbers of other types differ (1, True); a module has the state of its values."""
    if isinstance(leaf, nn.Module):
        return id(leaf), *((n, argument_state(v)) for m in leaf.modules() for n, v in _module_values(m))
    if isinstance(leaf, torch.Tensor):
        return id(leaf), leaf._version
    return (type(leaf), repr(leaf)) if isinstance(leaf, (int, float)) else leaf


def _is_supported(leaf: Any) -> bool:
    """Return whether a leaf is a dense or COO tensor, or holds no values that could change unseen."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.is_nested and leaf.layout in (torch.strided, torch.sparse_coo)
    if isinstance(leaf, nn.Module):
        values = (v for m in leaf.modules() for _, v in _module_values(m))
        return not any(True for _ in leaf.parameters()) and all(
            isinstance(v, (*_PLAIN_TYPES, torch.Tensor)) for v in values
        )
    if isinstance(leaf, functools.partial):
        return all(
            _is_supported(x) and not isinstance(x, torch.Tensor)
            for x in (leaf.func, *leaf.args, *leaf.keywords.values())
        )
    return isinstance(leaf, _PLAIN_TYPES) or (isinstance(leaf, types.FunctionType) and _reads_only_code(leaf))


def _module_values(module: nn.Module) -> list[tuple[str, Any]]:
    """List the public attributes and the buffers of a module."""
    return [
        *((n, v) for n, v in module.__dict__.items() if not n.startswith("_")),
        ("", module.training),
        *module._buffers.items(),
    ]


def _reads_only_code(function: types.FunctionType) -> bool:
    """Return whether a function reads only modules, classes and functions outside of its body."""
    kinds = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    read = (function.__globals__.get(name, type) for name in function.__code__.co_names)
    return function.__module__.startswith("torch.") or (
        not function.__closure__ and all(isinstance(v, kinds) for v in read)
    )


def _explain_leaf(leaf: Any) -> str:
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
