"""What a model may be given: tensors, numbers and words, in containers that torch looks into."""

from __future__ import annotations

import enum
import numbers
import types
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (torch.Tensor, bool, numbers.Number, str, bytes, types.NoneType, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType,
          types.MethodType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, slice, range)  # fmt: skip


def spelled(path: tuple[Any, ...]) -> str:
    """The place of a leaf of (args, kwargs): `argument 2`, `labels`, `batch['x'][0]`."""
    kind, first, *rest = path
    name = f"argument {first.idx + 1}" if kind == pytree.SequenceKey(0) else str(first.key)
    return name + pytree.keystr(tuple(rest))


def unread_argument(args: Any, kwargs: Any) -> str:
    """Says which argument is one that a recording would keep as it is at the first call, and what would do; empty if none is."""
    if all(isinstance(x, _PLAIN) for x in pytree.tree_leaves((args, kwargs))):
        return ""
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        what = f"{spelled(path)} is of type {type(leaf).__name__}"
        if isinstance(leaf, nn.Module):
            if any(True for _ in leaf.parameters()):
                return (
                    f"{what}, a module with weights, which a plan would leave as they are; make it a part of the model"
                )
        elif not isinstance(leaf, _PLAIN):
            return (
                f"{what}, into which a plan does not look, so that its values would stay those of the first call; give its tensors and "
                "numbers as arguments of their own, or in a dict, list or tuple"
            )
    return ""
