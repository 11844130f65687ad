"""Arguments that a planned model may get: tensors and plain values in nested containers; and which tensors hold samples in dim 0."""

from __future__ import annotations

import enum
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


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of example inputs: a tuple or list, a mapping, or one value."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


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
    names_by_kind: dict[str, list[str]] = {_WITHOUT: [], _WITH: []}
    for path, x in leaves:
        names_by_kind[_WITH if x.shape[0] in (1, leaves[0][1].shape[0]) else _WITHOUT].append(
            argument_name(path, names)
        )
    return names_by_kind if names_by_kind[_WITHOUT] else {}


def lacks_samples(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether an input had no samples when the model was planned. A new item of a list or dict is like the others in it."""
    # The plan has the names of its example inputs. Another batch may have more items in a list, which have no entry of their own.
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
    """Return a value that is equal for equal arguments without tensors. Numbers of other types differ (1, True)."""
    # By type and text: 1, 1.0 and True are equal and lead to other code, and nan is not equal to itself.
    return (type(leaf), repr(leaf)) if isinstance(leaf, (int, float)) else leaf


def _is_supported(leaf: Any) -> bool:
    """Return whether a leaf is a dense tensor, or holds no values that could change unseen."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.is_nested and leaf.layout == torch.strided
    return isinstance(leaf, _PLAIN_TYPES)


def _explain_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        kind = "nested" if leaf.is_nested else str(leaf.layout)
        return f"a tensor of kind {kind}, which a plan cannot split; give it dense (padded, if its rows differ)"
    named = f"of type {type(leaf).__name__}"
    if callable(leaf):
        return f"{named}, code that a plan does not follow from call to call; make it a part of the model"
    return (
        f"{named}, into which a plan does not look, so that its values would stay those of the first call; give its tensors and numbers as "
        "arguments of their own, or in a dict, list or tuple"
    )
