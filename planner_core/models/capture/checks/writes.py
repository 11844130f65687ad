"""Writes in place: find reads that would miss a write.

The values of a graph never change, so a write in place makes a new version of its target. That is right if the target itself is read
afterwards. If a view was written (`h[:, 0].add_(1)`), it is put back before the whole tensor is read
(`callsites.pop_written_views`). Any other read of the same memory would get the old version, and is refused. A constant into which
a computed tensor is written counts as computed from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner_core.core import CaptureError
from planner_core.models.capture.checks.refusals import refusal
from planner_core.models.hooks.torch_private import storage_id

OUTLIVES_STEP = "kept"
"""Attribute of an op that writes a tensor that outlives the step (a buffer): every rank must write all of it."""


@dataclass(frozen=True, slots=True)
class _Write:
    tensor: torch.Tensor
    time: int


class InplaceWrites:
    """The writes in place of one forward pass. Times are those of the recorder's clock."""

    def __init__(self) -> None:
        # id -> (a constant with values, its form on meta). The constant is kept so that its id stays its own.
        self.meta_forms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last: dict[int, _Write] = {}  # storage -> the last write to it

    def meta_form(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the form on meta of a constant that was written; None if it was not."""
        entry = self.meta_forms.get(id(tensor))
        return entry[1] if entry else None

    def add_meta_form(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a form on meta that stands for the constant in autograd."""
        form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.meta_forms[id(tensor)] = tensor, form
        return form

    def note_write(self, target: torch.Tensor, time: int) -> None:
        """Remember a write to `target`."""
        for key in (storage_id(target), self._storage_key(target)):
            self._last[key] = _Write(target, time)

    def check(self, scope: str, fn: str, args: tuple[Any, ...], tensor: torch.Tensor, time: int) -> None:
        """Refuse to read a `tensor` of time `time` whose memory was written since through another tensor."""
        last = self._last.get(self._storage_key(tensor)) if self._last else None
        if last is None or last.tensor is tensor or time >= last.time or _are_disjoint(last.tensor, tensor):
            return
        if fn == "setitem" and tensor is args[0] and len(args) > 2 and args[2] is last.tensor:
            return  # h[:, 0] += 1: Python puts the written view back
        raise stale_read_refusal(scope)

    def _storage_key(self, tensor: torch.Tensor) -> int:
        # Autograd holds the form on meta in place of the constant, so a write through either is one to both.
        return storage_id(self.meta_form(tensor) if self.meta_forms and id(tensor) in self.meta_forms else tensor)


def check_arguments_unwritten(scope: str, fn: str, given: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Refuse an autograd function of the model that has written into its arguments, `given` with their versions before the call."""
    if any(tensor._version != version for tensor, version in given):
        raise refusal(
            scope, f"writes in place into an argument of the autograd function {fn}", "let it return a new tensor"
        )


def _are_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two views of one storage, sliced along the same dims, share no element.

    In the strides (8, 1), offsets 3 and 12 are (0, 3) and (1, 4): [0:1, 3:5] and [1:2, 4:8] differ in the first dim.
    """
    if a.stride() != b.stride() or a.is_meta != b.is_meta:
        return False
    at = [a.storage_offset(), b.storage_offset()]
    for stride, *sizes in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        if stride == 0:
            return False
        (first, second), at = [x // stride for x in at], [x % stride for x in at]
        if first + sizes[0] <= second or second + sizes[1] <= first:
            return True
    return False


def stale_read_refusal(scope: str) -> CaptureError:
    """Return the error for a read that would miss a write."""
    return refusal(
        scope,
        "reads a tensor of which a part, or a view, was written in place before",
        "write into the tensor itself (h[:, 0] = ...), not into its .detach(), or make a new one",
    )


class RunningStatistics:
    """Buffers that a norm updates while it runs. No recorded call shows these writes."""

    def __init__(self) -> None:
        self._updated: set[int] = set()
        self._read: set[int] = set()

    def check(self, scope: str, fn: str, args: tuple[Any, ...], buffers: Iterable[torch.Tensor]) -> None:
        """Refuse a pass in which a norm updates `buffers`, operands of this call, and another call reads them, before or after."""
        norm = fn in ("batch_norm", "instance_norm")
        if norm and not (args[5] if len(args) > 5 else True):
            return  # evaluation: the norm reads its statistics and does not update them
        into, others = (self._updated, self._read) if norm else (self._read, self._updated)
        keys = set(map(storage_id, buffers))
        if keys & others:
            raise refusal(
                scope,
                "reads the running statistics that a norm updates in the same pass",
                "keep statistics of its own (a buffer that forward writes), or take those of the batch",
            )
        into |= keys


class WriteUndo:
    """Restore, after a pass, what it has written of its inputs, of buffers, and of tensors in the model's code."""

    def __init__(self) -> None:
        self._allocated_storages: set[int] = set()  # storages that the pass has allocated
        self._saved: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def note_results(self, results: Iterable[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        """Note the storages that a call allocated. A view of an operand allocates none."""
        self._allocated_storages.update({storage_id(t) for t in results} - {storage_id(t) for t in operands})

    def save(self, target: torch.Tensor) -> None:
        """Save the values of `target` before its first write."""
        at = storage_id(target)
        # nothing to restore: memory of this pass, tensors without values, and those without a plain storage (their id stands for it)
        if at not in self._allocated_storages and not target.is_meta and at != id(target):
            key = at, target.storage_offset(), target.shape, target.stride()
            if key not in self._saved:
                self._saved[key] = target, target.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Undo all writes."""
        for target, before in reversed(self._saved.values()):
            target.detach().copy_(before)
