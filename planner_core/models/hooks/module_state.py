"""The Python state of a model's modules: attributes, those of configs, and items of lists, dicts and sets, one level deep."""

# mypy: allow-untyped-calls

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.models.hooks.model_parts import MISSING, list_buffers, list_modules, list_parameters

MAX_ITEMS = 64
"""A container of more items is taken for data and not compared."""
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque)
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"_buffers", "_forward_hooks", "_forward_pre_hooks"} | {
    "_flat_weights",
    "_flat_weight_refs",
}
"""Attributes that every module has, and the weight lists that torch's recurrent layers derive."""

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, a bool or None, or a tuple of these."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def list_containers(model: nn.Module) -> Iterator[tuple[str, Container]]:
    """Yield every container of state, each once, with its name: a module's `__dict__`, and its lists, dicts, sets and objects."""
    seen: set[int] = set()
    for name, module in list_modules(model):
        # Also where it is large: `MAX_ITEMS` is for containers of data, and a module's attributes are its state.
        yield name, module.__dict__
        for key, value in list(module.__dict__.items()):
            # Most attributes are of these: a model of 1 000 layers has 600 000.
            if key in _MODULE_INTERNALS or type(value) in _PLAIN:
                continue
            container = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
            other = isinstance(value, (nn.Module, torch.Tensor, type)) or callable(value)
            if (
                isinstance(container, _CONTAINERS)
                and not other
                and id(container) not in seen
                and len(container) <= MAX_ITEMS
            ):
                seen.add(id(container))
                yield f"{name}.{key}".strip("."), container


class ModuleState:
    """A snapshot of the Python state of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._weight_ids = {id(t) for _, t in (*list_parameters(model), *list_buffers(model))}
        self._snapshots = [
            (name, container, self._read_entries(container)) for name, container in list_containers(model)
        ]

    def list_changes(self) -> list[tuple[str, Any]]:
        """List the values that have changed since the snapshot, with their names; MISSING for one that was removed."""
        changes = []
        for name, container, before in self._snapshots:
            now = self._read_entries(container)
            for key in {**before, **now}:
                if _has_changed(before.get(key, MISSING), now.get(key, MISSING)):
                    path = f"{name.removesuffix('_buffers').rstrip('.')}.{key}".strip(".")
                    changes.append(
                        (
                            path,
                            container[key]
                            if isinstance(container, dict) and key in container
                            else now.get(key, MISSING),
                        )
                    )
        return changes

    def first_change(self) -> str:
        """Return the name of a changed value that is not scratch; empty if none is."""
        return next((name for name, value in self.list_changes() if not scratch_tensors(value)), "")

    def _read_entries(self, container: Container) -> dict[Any, Any]:
        """Return the entries of a container by key or index: a tensor that is not a weight with its version, a generator by its state."""
        items = container.items() if isinstance(container, dict) else enumerate(container)
        return {
            key: value
            if type(value) in _PLAIN
            else (value, value._version)
            if isinstance(value, torch.Tensor) and self._counts_writes(value)
            else _comparable_state(value)
            for key, value in items
            if not (isinstance(key, str) and key in _MODULE_INTERNALS)
        }

    def _counts_writes(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._weight_ids and not tensor.is_inference()


def scratch_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that a pass on meta has computed. They are scratch if the next pass replaces them before it reads
    them."""
    container = list(value) if isinstance(value, (set, frozenset, deque)) else value
    leaves = pytree.tree_leaves(container) if not isinstance(container, nn.Module) else []
    return [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) and x.is_meta]


def _has_changed(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple) and before and isinstance(before[0], torch.Tensor):
        # The version counts writes in place, so a tensor that was filled again with equal values has changed too.
        return before[0] is not now[0] or before[1] != now[1]
    return not _are_equal(before, now)


def _are_equal(before: Any, now: Any) -> bool:
    """Compare two values. A container that each pass replaces by one with equal items is scratch and not state."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if is_plain(now):
        return bool(before == now)
    if type(now) not in (list, dict, deque) or len(before) != len(now):
        return False
    if isinstance(now, dict):
        return all(key in before and _are_equal(before[key], value) for key, value in now.items())
    return all(map(_are_equal, before, now))


def _comparable_state(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return str(value.getstate())
    if numpy and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return str((getattr(value, "bit_generator", None) or value._bit_generator).state)
    return value


class WeightDtypes:
    """The dtypes of a model's weights. Code may convert a weight at its first call (routers of transformers, to float32)."""

    def __init__(self, model: nn.Module) -> None:
        self._dtypes = [(p, p.dtype) for _, p in list_parameters(model)]

    def restore(self) -> None:
        """Convert the weights back, so that each pass starts from the same dtypes."""
        for param, dtype in self._dtypes:
            if param.dtype != dtype:
                param.data = param.data.to(dtype)


def replace_tensors(model: nn.Module, replacements: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors, by id, in the attributes of modules and in the lists, dicts and objects that these hold."""
    modules = [part for _, part in list_modules(model)]
    seen = {id(m) for m in modules}
    todo: list[tuple[Iterable[tuple[Any, Any]], Any]] = [(_plain_attributes(m).items(), m.__dict__) for m in modules]

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return replacements.get(id(value), value)
        if isinstance(value, tuple):
            items = [*map(replaced, value)]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        # A tuple cannot be written, so it was built again above. What can be written is visited once, and its items are replaced in it.
        if id(value) not in seen:
            seen.add(id(value))
            todo.extend(_writable_items(value))
        return value

    for items, container in todo:  # grows meanwhile
        for key, item in [*items]:
            if (new := replaced(item)) is not item:
                container[key] = new


def _writable_items(value: Any) -> Iterator[tuple[Iterable[tuple[Any, Any]], Any]]:
    """Yield the items of a list, a dict or an object, with the container into which they can be written; nothing for other values."""
    container = value if isinstance(value, (list, deque, dict)) else getattr(value, "__dict__", None)
    if isinstance(container, (list, deque)):
        yield enumerate(container), container
    elif isinstance(container, dict) and not isinstance(value, (type, FunctionType, ModuleType)):
        yield container.items(), container


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in module.__dict__.items() if k not in _MODULE_INTERNALS}
