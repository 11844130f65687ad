"""Results of a model that torch does not know as nested: dataclasses and namespaces of tensors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree


def register_result_types(out: Any) -> Any:
    """Register the dataclasses and namespaces of a result with torch, so that it finds their tensors. Return the result."""
    todo = [out]
    while todo:
        item = todo.pop()
        if isinstance(item, (tuple, list)):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif (dataclasses.is_dataclass(item) and not isinstance(item, (type, nn.Module))) or type(
            item
        ) is SimpleNamespace:
            if type(item) not in pytree.SUPPORTED_NODES:
                pytree.register_pytree_node(type(item), _flatten, _Rebuild(type(item)), flatten_with_keys_fn=_with_keys)
            todo += _flatten(item)[0]
    return out


def _flatten(item: Any) -> tuple[list[Any], tuple[str, ...]]:
    fields = dataclasses.fields(item) if dataclasses.is_dataclass(item) else ()
    names = tuple(f.name for f in fields if hasattr(item, f.name)) if fields else tuple(vars(item))
    return [getattr(item, name) for name in names], names


def _with_keys(item: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    values, names = _flatten(item)
    return [(pytree.GetAttrKey(n), v) for n, v in zip(names, values, strict=True)], names


class _Rebuild:
    """Rebuilds such an object from its values, without its own `__init__`."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, values: Any, names: tuple[str, ...]) -> Any:
        make: Any = self.kind.__new__
        result = make(self.kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(result, name, value)
        return result
