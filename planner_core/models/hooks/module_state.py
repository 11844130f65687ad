"""The Python state of a model's modules: what attributes of modules, objects and classes hold, and the items of lists, dicts and sets,
at any depth (docs/SUPPORT.md says what is not compared)."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError
from planner_core.models.hooks.model_parts import MISSING, list_buffers, list_modules, list_parameters
from planner_core.models.hooks.torch_private import storage_id

MAX_VALUES = 1_000_000
"""A model that holds more values in its lists, dicts, sets, objects and arrays is refused. To compare as many takes 30 ms of each call."""
_PLAIN = (bool, int, float, str, type(None))
_WITHOUT_PARTS = frozenset(
    {*_PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size, torch.Tensor, nn.Parameter}
    | {FunctionType, BuiltinFunctionType, MethodType, ModuleType}
)
"""Types of values in which nothing is looked for. A function or a file is compared by identity."""
_TOOLS = (
    *("logging.", "threading.", "weakref.", "pathlib.", "lightning.", "pytorch_lightning."),
    *("torch.optim.", "torch.distributed.", "torch.utils.", "torch.fx."),
)
"""Packages of objects that change as a loop uses them, or are large (graphs), each with a dot. They are compared by identity."""
_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"_buffers", "_forward_hooks", "_forward_pre_hooks"} | {
    "_flat_weights",
    "_flat_weight_refs",
}
"""Attributes that every module has, and the weight lists that torch's recurrent layers derive."""


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, a bool or None, or a tuple of these."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


class Change(NamedTuple):
    """A changed value.

    holder, key  the name of what holds it, and its attribute, key or index there
    now          the value, MISSING for none
    is_added     whether it is a new attribute of an object or a module whose class has none of that name
    """

    holder: str
    key: Any
    now: Any
    is_added: bool

    @property
    def name(self) -> str:
        """The name of the value from the model on."""
        return f"{self.holder.removesuffix('_buffers').rstrip('.')}.{self.key}".strip(".")


class _Holder:
    """A container, or the attributes of a module, an object or a class, with the values that it held when this was made."""

    def __init__(self, name: str, source: Any, owner: type | None, weight_ids: set[int]) -> None:
        self.name, self._source, self._owner, self._weight_ids = name, source, owner, weight_ids
        self._hidden = _MODULE_INTERNALS if owner and issubclass(owner, nn.Module) else frozenset()
        self.values = self._read()
        is_sized = isinstance(source, (dict, MappingProxyType, list, tuple, deque))
        self._size = len(source) if is_sized else MISSING
        self.marks: dict[Any, Any] = {}

    def remember_marks(self) -> None:
        """Remember what tells whether its values are written in place."""
        marks = ((key, self._read_mark(value)) for key, value in self.values.items() if type(value) not in _PLAIN)
        self.marks = {key: mark for key, mark in marks if mark is not None}

    def is_unchanged(self) -> bool:
        """Return whether it has the same objects, of which none was written in place. Each call under a plan asks this of each holder, so
        no line of Python runs for a value."""
        if (
            self._size is MISSING or len(self._source) != self._size
        ):  # a set or slots, whose values are compared, or a change
            return False
        if self._size and not all(map(is_, self._list_values(), self.values.values())):
            return False
        return not self.marks or all(self._read_mark(self.values[key]) == mark for key, mark in self.marks.items())

    def _list_values(self) -> Iterable[Any]:
        """Return its values of the names that it had. In order where it can be: to look a million keys up takes ten times as long."""
        if isinstance(self._source, dict) and not self._hidden:
            return self._source.values() if all(map(is_, self._source, self.values)) else (MISSING,)
        if isinstance(self._source, (dict, MappingProxyType)):
            return map(self._source.get, self.values, repeat(MISSING))
        return cast(Iterable[Any], self._source)

    def list_changes(self) -> Iterator[Change]:
        """Yield the values that have changed."""
        before, now = self.values, self._read()
        for key in {**before, **now}:
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if (self._read_mark(new) != self.marks.get(key)) if old is new else not _are_equal(old, new):
                is_added = old is MISSING and self._owner is not None and not _has_attribute(self._owner, key)
                yield Change(self.name, key, new, is_added)

    def _read(self) -> dict[Any, Any]:
        source = self._source
        if isinstance(source, MappingProxyType):
            return {k: v for k, v in source.items() if not k.startswith("__")}
        if isinstance(source, dict):
            return {k: v for k, v in source.items() if k not in self._hidden} if self._hidden else dict(source)
        if isinstance(source, (list, tuple, deque)):
            return dict(enumerate(source))
        if isinstance(source, (set, frozenset)):
            return {x: x for x in source}
        return {slot: getattr(source, slot, MISSING) for slot in _slots(type(source))}

    def _read_mark(self, value: Any) -> Any:
        """Return what tells whether a value was written in place; None for a value of which nothing does, or need not."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._weight_ids or isinstance(value, nn.Parameter) or value.is_inference():
                return None
            # torch counts writes, so a tensor that was filled again with equal values has changed too. `x.data = y` it does not count.
            return value._version, storage_id(value)
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, random.Random):
            return str(value.getstate())
        numpy = sys.modules.get("numpy")
        if numpy and isinstance(value, numpy.ndarray):
            return value.shape, str(value.dtype), zlib.crc32(value.tobytes())
        if numpy and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            return str((getattr(value, "bit_generator", None) or value._bit_generator).state)
        return None


class ModuleState:
    """A snapshot of the Python state of a model's modules. Raises CaptureError if that is too large to compare."""

    def __init__(self, model: nn.Module) -> None:
        self._weight_ids = {id(t) for _, t in (*list_parameters(model), *list_buffers(model))}
        self._holders: list[_Holder] = []
        self._seen: set[int] = set()
        self._num_values = 0
        self._names = {id(m): name for name, m in list_modules(model)}
        # The last one is taken first: depth first, without a limit of depth, in the order of the modules.
        todo: list[tuple[str, Any]] = [(name, m) for name, m in reversed(list_modules(model))]
        while todo:
            name, value = todo.pop()
            todo += [*self._add_holders(self._names.get(id(value), name), value)][::-1]

    def list_changes(self) -> list[Change]:
        """List the values that have changed since the snapshot."""
        changed = [holder for holder in self._holders if not holder.is_unchanged()]
        return [change for holder in changed for change in holder.list_changes()]

    def first_change(self) -> str:
        """Return the name of a changed value that is not scratch; empty if none is."""
        return next((c.name for c in self.list_changes() if not scratch_tensors(c.now)), "")

    def _add_holders(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Add what holds the values of a value, and yield those that may hold others."""
        for holder_name, source, owner in _list_sources(name, value):
            if id(source) in self._seen:
                continue
            self._seen.add(id(source))
            is_class = isinstance(source, type)
            holder = _Holder(holder_name, vars(source) if is_class else source, owner, self._weight_ids)
            self._holders.append(holder)
            # Attributes of modules and classes are not counted: a model of 1 000 layers has 20 000 modules, with few attributes each.
            num_values = 0 if is_class or isinstance(value, nn.Module) else len(holder.values)
            self._count(name, num_values + sum(map(_array_size, holder.values.values())))
            holder.remember_marks()
            yield from ((f"{holder_name}.{k}".strip("."), v) for k, v in holder.values.items() if _may_hold(v))
        if (
            isinstance(value, nn.Module) and id(value) not in self._names
        ):  # in a list, where torch does not look for parts
            yield from ((f"{name}.{n}", part) for n, part in value._modules.items() if part is not None)

    def _count(self, name: str, values: int) -> None:
        self._num_values += values
        if self._num_values > MAX_VALUES:
            raise CaptureError(
                f"lists, dicts, sets, objects and arrays of the model hold more than {MAX_VALUES:,} values "
                f"({name or 'its own arrays'} among them), too many to compare at each call; keep numbers in a buffer, and what forward "
                "does not read outside of the model"
            )


def _may_hold(value: Any) -> bool:
    return type(value) not in _WITHOUT_PARTS and not isinstance(value, torch.Tensor) and not is_plain(value)


def _array_size(value: Any) -> int:
    numpy = sys.modules.get("numpy")
    return int(value.size) if numpy and isinstance(value, numpy.ndarray) else 0


def _list_sources(name: str, value: Any) -> Iterator[tuple[str, Any, type | None]]:
    """Yield what holds the values of a value: its name, a container or a class, and the class of the object whose attributes it has."""
    is_class = isinstance(value, type)
    kind = value if is_class else type(value)
    if isinstance(value, ModuleType) or (f"{kind.__module__}.".startswith(_TOOLS) and not isinstance(value, nn.Module)):
        return
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        yield name, value, None
    elif not is_class and _slots(kind):
        yield name, value, kind
    if not is_class and isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield name, attributes, kind
    for cls in kind.__mro__:
        if cls is not nn.Module and cls.__module__ != "builtins":
            yield cls.__name__, cls, None


def _slots(kind: type) -> list[str]:
    declared = [(c.__name__, vars(c).get("__slots__", ())) for c in kind.__mro__]
    names = [(cls, n) for cls, slots in declared for n in ((slots,) if isinstance(slots, str) else slots)]
    # A private name is stored with that of its class. Names with underscores on both sides (dict, weak references) are no values.
    return [f"_{cls.lstrip('_')}{n}" if n.startswith("__") else n for cls, n in names if not n.endswith("__")]


def _has_attribute(kind: type, name: str) -> bool:
    """Return whether a class has an attribute in whose place one of its objects would stand. A cached property stands there itself."""
    return not isinstance(getattr(kind, name, functools.cached_property(id)), functools.cached_property)


def scratch_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that a pass on meta has computed. They are scratch if the next pass replaces them before it reads
    them."""
    container = list(value) if isinstance(value, (set, frozenset, deque)) else value
    leaves = pytree.tree_leaves(container) if not isinstance(container, nn.Module) else []
    return [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) and x.is_meta]


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
