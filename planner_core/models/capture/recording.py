"""The recording: a tree of module calls over numbered values. It is folded into a Graph later."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from planner_core.core import Attr, TensorMeta, Value
from planner_core.models.hooks.torch_private import storage_id

Renumber = Callable[[int], int]
CHECKPOINT = "checkpoint"
"""The kind of a scope that is not a module call: what a checkpoint in the model's code runs, and recomputes in backward."""
MAX_SMALL_MODULES = 7
"""Equal modules with one matrix are blocks only if more than this many exist."""


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: a capture makes many objects and frees few, and each collection would walk all of them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass(slots=True)
class Record:
    """One recorded call. `site` is its full name; inputs, outputs and saved are numbers of values."""

    site: str
    fn: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: dict[str, Attr]
    module: str
    saved: tuple[int, ...]
    extra: tuple[TensorMeta, ...]


@dataclass(slots=True)
class Scope:
    """One module call and its calls in order. `start` is the recorder's clock when it began."""

    scope: str
    path: str
    kind: str
    items: list[Record | Scope | Replay] = field(default_factory=list)
    start: int = 0


@dataclass(slots=True)
class Replay:
    """A module call that was not traced, since it equals `template`.

    `ids` maps values of the template's arguments and results to those of this call. `born` is the time of the call.
    """

    scope: str
    path: str
    template: Scope
    ids: dict[int, int]
    born: int

    @property
    def kind(self) -> str:
        """The class name of the module."""
        return self.template.kind


@dataclass(slots=True)
class Recording:
    """All values and calls of one forward pass. `birth_times` holds when each constant was made (-1: before the run)."""

    values: list[Value]
    birth_times: dict[int, int]
    root: Scope
    params: dict[str, int]
    buffers: dict[str, int]
    buffer_names: dict[int, str] = field(default_factory=dict)
    """The name of each value that is a buffer, whole and not a view of one, and of each version that forward has written."""
    instantiated: dict[int, Scope] = field(default_factory=dict)  # id(replay) -> the scope written out
    checkpoint_parts: list[Scope] = field(default_factory=list)  # scopes that checkpoints in the model's code run

    def storage_root(self, vid: int) -> int:
        """Return the value that owns the memory of this one: views point to their base."""
        while self.values[vid].storage != vid:
            vid = self.values[vid].storage
        return vid

    def name_buffer(self, vid: int, name: str) -> None:
        """Note that a value is the buffer `name` of the model."""
        self.buffers[name] = vid
        self.buffer_names[vid] = name

    def add(self, value: Value, birth: int = -1) -> int:
        """Number a new value; `storage` -1 becomes its own number."""
        vid = len(self.values)
        self.values.append(replace(value, storage=vid) if value.storage < 0 else value)
        self.birth_times[vid] = birth
        return vid

    def add_version(self, vid: int) -> int:
        """Number a value like another one: a constant that was written in place, or that of another call."""
        version = self.add(self.values[vid])
        if vid in self.buffer_names:
            self.buffer_names[version] = self.buffer_names[vid]
        return version

    def match_saved(
        self, packed: Sequence[torch.Tensor], roots: Mapping[int, int], near: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[TensorMeta, ...]]:
        """Match the tensors that autograd saved with values.

        Args:
            packed: The saved tensors of a call.
            roots: The first value in each storage.
            near: The operands and results of the call, which are preferred among the values of a storage.

        Returns: the saved values, and the shapes and dtypes of saved tensors that are no value (e.g. log-sum-exp).
        """
        saved: list[int] = []
        extra: list[TensorMeta] = []
        seen: set[Any] = set()
        for tensor in packed:
            key = storage_id(tensor)
            if (key, tuple(tensor.shape), tensor.storage_offset()) in seen:
                continue
            seen.add((key, tuple(tensor.shape), tensor.storage_offset()))
            root = roots.get(key)
            if root is None:
                # An expanded dim (stride 0) takes no memory.
                shape = tuple(1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                extra.append(TensorMeta(shape, str(tensor.dtype).removeprefix("torch.")))
                continue
            # Views share a storage. The one that the call read or made is meant, if it is there in the shape that was saved.
            same = [v for v in near if self.values[v].storage == self.values[root].storage]
            exact = [v for v in same if self.values[v].meta.shape == tuple(tensor.shape)]
            vid = (exact or same or [root])[0]
            if vid not in saved:
                saved.append(vid)
        return tuple(sorted(saved, key=lambda v: near.index(v) if v in near else len(near))), tuple(extra)

    def flatten(self, node: Scope | Replay) -> list[Record]:
        """List all records under a node in order, with replays written out."""
        if isinstance(node, Replay):
            node = self.instantiate(node)
        records: list[Record] = []
        for item in node.items:
            if isinstance(item, Record):
                records.append(item)
            else:
                records.extend(self.flatten(item))
        return records

    def instantiate(self, call: Replay) -> Scope:
        """Return the scope that tracing this call would have recorded."""
        if id(call) not in self.instantiated:
            self.instantiated[id(call)] = self._instantiate_call(call)
        return self.instantiated[id(call)]

    def _instantiate_call(self, call: Replay) -> Scope:
        template, ids = call.template, dict(call.ids)
        computed = {vid for record in self.flatten(template) for vid in record.outputs}
        arguments = [
            (v, here) for v, here in call.ids.items() if v not in computed and self.values[v].kind != "parameter"
        ]
        # A view of an argument in the template is a view of the corresponding argument of this call.
        arguments_by_storage = {self.storage_root(v): here for v, here in reversed(arguments)}

        def storage(root: int) -> int:
            return arguments_by_storage[root] if root in arguments_by_storage else value(root)

        def value(vid: int) -> int:
            if vid not in ids:
                ids[vid] = self._number_counterpart(vid, call, storage)
            return ids[vid]

        copy = self._copy_scope(template, call, value)
        # A replayed result was made without what lies inside. One that is a view of a tensor made inside gets its base only here.
        for record in self.flatten(template):
            for vid in record.outputs:
                base = self.values[vid].storage
                if vid in call.ids and base != vid:
                    self.values[ids[vid]] = replace(self.values[ids[vid]], storage=value(base))
        return copy

    def _number_counterpart(self, vid: int, call: Replay, storage_of: Renumber) -> int:
        """Return the value of a replayed call that stands where `vid` stands in its template."""
        known, under = self.values[vid], call.template.path + "."
        if known.kind == "parameter":
            return (
                self.params[_replace_prefix(known.name, call.template.path, call.path)]
                if known.name.startswith(under)
                else vid
            )
        buffer = self.buffer_names.get(vid, "")
        if buffer.startswith(under):
            return self.buffer(_replace_prefix(buffer, call.template.path, call.path), known)
        # Older than the template's call: both calls read this one constant, e.g. a mask that the model made before its layers.
        if known.kind == "constant" and self.birth_times[vid] <= call.template.start:
            return vid
        storage = -1 if known.storage == vid else storage_of(known.storage)
        return self.add(replace(known, storage=storage), call.born)

    def buffer(self, name: str, like: Value) -> int:
        """Return the value of the buffer `name`, and add it at its first use."""
        if name not in self.buffers:
            self.name_buffer(self.add(replace(like, storage=-1)), name)
        return self.buffers[name]

    def _copy_scope(self, scope: Scope, call: Replay, value: Renumber) -> Scope:
        def ids(vids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value(v) for v in vids)

        copy = Scope(
            _replace_prefix(scope.scope, call.template.scope, call.scope),
            _replace_prefix(scope.path, call.template.path, call.path),
            scope.kind,
            start=scope.start,
        )
        for item in scope.items:
            if isinstance(item, Record):
                copy.items.append(
                    replace(
                        item,
                        site=_replace_prefix(item.site, call.template.scope, call.scope),
                        inputs=ids(item.inputs),
                        outputs=ids(item.outputs),
                        saved=ids(item.saved),
                    )
                )
            elif isinstance(item, Scope):
                copy.items.append(self._copy_scope(item, call, value))
            else:
                inner = self.instantiate(item)
                copy.items.append(self._copy_scope(inner, call, value))
        return copy


def _replace_prefix(name: str, old: str, new: str) -> str:
    return new + name[len(old) :]


def count_checkpoints(node: Scope) -> int:
    """Count the calls of checkpoints under a node, itself included."""
    return sum(n.kind == CHECKPOINT for n in walk_scopes(node))


def walk_scopes(node: Scope | Replay) -> Iterator[Scope | Replay]:
    """Yield every traced module call and every replay, outermost first."""
    yield node
    if isinstance(node, Scope):
        for item in node.items:
            if not isinstance(item, Record):
                yield from walk_scopes(item)
