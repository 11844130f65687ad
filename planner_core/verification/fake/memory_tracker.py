"""Measure the peak memory of one rank, from what is allocated and freed. Storages are counted, so views count once.

Only tensors on meta count: there a step allocates what it would allocate on a GPU. The input batch is on the CPU, so it does not
count, and neither do slices of it.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from planner_core.models.hooks import TorchDispatchMode, buffer_bytes, storage_id, storage_key

RETURNS_OPERAND = ("_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor")
"""Ops that return their operand's memory, although on meta the result is another storage."""
IN_FLIGHT = "in_flight"
"""The kind of weights that are gathered ahead of their use, and of gradients in buckets."""
MEMORY_KINDS = ("params", "grads", "optimizer", "activations", "buffers", IN_FLIGHT)
CONSTANTS = "constants"
"""The kind of tensors that are computed from inputs alone, before the first operator takes one. A prediction counts those that operators
take, and not what is freed on the way to them, nor the inputs."""


@dataclass(slots=True)
class _Storage:
    """A storage that is alive. `watch`: a weak reference, whose callback counts its end."""

    num_bytes: int
    kind: str
    watch: object


class MemoryTracker(TorchDispatchMode):
    """Live bytes by kind, and these bytes when their sum was highest. New storages have the kind `kind`.

    Tensors on the way to a constant (`CONSTANTS`: a video autoencoder normalizes the patches that it predicts) are no part of that sum.
    `peak_of_constants` is their own highest sum, with the constants. Masks and positions have values, on the CPU, so they do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignored = False
        """Nothing is counted while it is true."""
        self.kind = "activations"
        self.live = dict.fromkeys(MEMORY_KINDS, 0)
        self.peak = dict(self.live)
        self.released_bytes = self.peak_of_saved_results = 0
        """Bytes of results that the loop has released, and the highest sum if it had kept them until backward ended."""
        self.peak_of_constants = self._live_constants = 0
        self.makes_constants = False
        """Whether the program is making its constants. The batch that ranks gather of their inputs is predicted, and counts."""
        self._known: dict[int, _Storage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes back as ops on local tensors
        out = func(*args, **(kwargs or {}))
        if self.ignored:
            return out
        given = pytree.tree_leaves((args, kwargs))
        if func is torch.ops.aten.empty_like.default and not args[0].is_meta:
            self.add_inputs([out])  # the form on meta of a constant with values, on its way to an op
            return out
        if func._schema.name in RETURNS_OPERAND:
            self._forget_tensor(args[0])
        operands = [t for t in given if isinstance(t, torch.Tensor)]
        old = {storage_id(t) for t in operands}
        kind = CONSTANTS if self.makes_constants and self._are_constants(operands) else self.kind
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and storage_id(tensor) not in old:
                self.add(tensor, kind)
        return out

    def report_peaks(self) -> dict[str, Any]:
        """Return the peak by kind with its sum, and the peak of constants, as plain data."""
        return {
            "memory": {**self.peak, "peak": sum(self.peak.values())},
            "peak_of_constants": self.peak_of_constants,
        }

    def in_constants(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that makes a program's constants, such that what it makes is of the kind CONSTANTS."""

        def make_constants(*args: Any, **kwargs: Any) -> Any:
            self.makes_constants = True
            try:
                return function(*args, **kwargs)
            finally:
                self.makes_constants = False
                self._count_lasting_constants()

        return make_constants

    def _count_lasting_constants(self) -> None:
        """Count the constants that operators take, which a prediction counts too. Those on the way to them are freed by now."""
        for storage in self._known.values():
            if storage.kind == CONSTANTS and storage.num_bytes:
                self._count_as(storage, self.kind)

    def _are_constants(self, operands: Iterable[torch.Tensor]) -> bool:
        """Return whether all operands on meta are inputs of the step or constants."""
        known = [self._known.get(storage_id(t)) for t in operands if t.is_meta]
        return bool(known) and all(entry is not None and entry.kind == CONSTANTS for entry in known)

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        """Count a tensor's storage as `kind`, even if it was counted as another kind before."""
        # A DTensor is a wrapper without memory: what a rank holds is the storage of its local part.
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if (known := self._known.get(storage_key(storage))) is not None:
            self._count_as(known, kind)
        else:
            self._watch_storage(storage, storage.nbytes(), kind)
            self._add_bytes(kind, storage.nbytes())

    def _count_as(self, storage: _Storage, kind: str) -> None:
        """Count a storage as another kind from now on."""
        self._add_bytes(storage.kind, -storage.num_bytes)
        storage.kind = kind
        self._add_bytes(kind, storage.num_bytes)

    def _watch_storage(self, storage: torch.UntypedStorage, num_bytes: int, kind: str) -> None:
        # The callback holds the key alone. If it held the storage, that would never be freed.
        key = storage_key(storage)
        self._known[key] = _Storage(num_bytes, kind, weakref.ref(storage, lambda _: self._free_storage(key)))

    def add_all(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count the storages of several tensors."""
        for tensor in tensors:
            if tensor.is_meta:
                self.add(tensor, kind)

    def add_inputs(self, tensors: Iterable[Any]) -> None:
        """Note the inputs of a step. They do not count, and neither do the constants that are computed from them alone."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._watch_storage(tensor.untyped_storage(), 0, CONSTANTS)

    def add_buffers(self, model: torch.nn.Module) -> None:
        """Count a model's buffers. They have values and so are not on meta, but a GPU holds them."""
        self._add_bytes("params", buffer_bytes(model))

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Follow storages that are resized (freed and allocated once more) while entered."""
        resize = torch.UntypedStorage.resize_

        def resize_tracked(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            out, key = resize(storage, num_bytes), storage_key(storage)
            if key not in self._known and storage.device.type == "meta":
                # It was made before memory was counted, such as the buffers that a stage receives into.
                self._watch_storage(storage, 0, self.kind)
            if (known := self._known.get(key)) is not None:
                before, known.num_bytes = known.num_bytes, num_bytes
                self._add_bytes(known.kind, num_bytes - before)
            return out

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_tracked):
            yield

    @contextlib.contextmanager
    def counted_as(self, tensors: Iterable[Any], kind: str, before: str) -> Iterator[None]:
        """Count the storages among `tensors` of the kind `before` as `kind` while entered."""
        keys = {storage_id(t) for t in tensors if isinstance(t, torch.Tensor) and t.is_meta}
        moved = [k for k in keys if k in self._known and self._known[k].kind == before]
        for key in moved:
            self._change_kind(key, kind)
        try:
            yield
        finally:
            for key in moved:
                if key in self._known:
                    self._change_kind(key, before)

    @contextlib.contextmanager
    def releasing_results(self) -> Iterator[None]:
        """Note the bytes that the loop frees while entered: what the model returned, except its loss."""
        before = sum(self.live.values())
        yield
        self.released_bytes = before - sum(self.live.values())

    def _change_kind(self, key: int, kind: str) -> None:
        storage = self._known[key]
        # The sum stays the same, so this is no new peak.
        self.live[storage.kind] -= storage.num_bytes
        self.live[kind] += storage.num_bytes
        storage.kind = kind

    def _add_bytes(self, kind: str, num_bytes: int) -> None:
        if kind == CONSTANTS:
            self._live_constants += num_bytes
            self.peak_of_constants = max(self.peak_of_constants, self._live_constants)
            return
        self.live[kind] += num_bytes
        total = sum(self.live.values())
        self.peak_of_saved_results = max(self.peak_of_saved_results, total + self.released_bytes)
        # All kinds at the moment of the highest sum. The peaks of the kinds come at other times, and would add up to more.
        if total > sum(self.peak.values()):
            self.peak = dict(self.live)

    def _forget_tensor(self, tensor: torch.Tensor) -> None:
        if (storage := self._known.get(storage_id(tensor))) is not None:
            self._add_bytes(storage.kind, -storage.num_bytes)
            # The entry stays, with no bytes: the storage is there until its last tensor is freed, and `_free_storage` looks for its
            # key then.
            storage.num_bytes = 0

    def _free_storage(self, key: int) -> None:
        storage = self._known.pop(key)
        self._add_bytes(storage.kind, -storage.num_bytes)
