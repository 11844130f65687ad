"""Keep some results of a recomputed block, so that they are not computed again, under torch's own checkpoint.

`with keep():` surrounds an operator and the redistributions of its result. When the block is recomputed, the calls inside
neither compute nor communicate, since their results are there. Autograd still gets their operands. The tensor between a product
and the sum of its terms over ranks was freed; in the second run it has the right shape, and nobody reads its values.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.hooks import TorchDispatchMode, storage_id

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.convolution)
"""Kernels whose result autograd does not save for their own backward."""
DETACH = aten.detach.default
RERUN = object()
"""Marks a call that the second run computes: a view, or a copy that the product takes."""


class _ThreadState(threading.local):
    """The state of this thread: where results are kept, and whether the block is recomputed."""

    store: deque[Any] | None = None
    is_rerun = False
    is_replaying = False
    in_transit = False


_state = _ThreadState()


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the two contexts for `context_fn` of torch's checkpoint: of the first run of a block, and of its recomputation."""
    store: deque[Any] = deque()
    return _BlockRun(store, is_rerun=False), _BlockRun(store, is_rerun=True)


class _BlockRun(contextlib.AbstractContextManager[None]):
    """One run of a block, which puts its kept results into `store` or takes them from it. It may be entered several times."""

    def __init__(self, store: deque[Any], *, is_rerun: bool) -> None:
        self.store, self.is_rerun = store, is_rerun

    def __enter__(self) -> None:
        self.before = _state.store, _state.is_rerun
        _state.store, _state.is_rerun = self.store, self.is_rerun

    def __exit__(self, *raised: object) -> None:
        _state.store, _state.is_rerun = self.before


@contextlib.contextmanager
def keep(whole: bool = False) -> Iterator[None]:
    """Keep the result of the calls inside. `whole`: keep all their results, since the operator saves some of them itself."""
    store = _state.store
    if store is None:
        yield
        return
    if not _state.is_rerun:
        record = _Record(whole)
        with record:
            yield
        store.append(record.calls)
        return
    if not store:
        raise RuntimeError(
            "a recomputed block keeps its results for one backward pass; call backward once, without retain_graph"
        )
    # Collectives read this flag (`Axis._issue_collective`): the first run notes no call of c10d, so the second may make none.
    _state.is_replaying = True
    try:
        with _Replay(store.popleft()):
            yield
    finally:
        _state.is_replaying = False


def in_transit() -> contextlib.AbstractContextManager[None]:
    """Inside, tensors are on their way to other placements. `keep` keeps their shapes only, since the second run does not read
    their values."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() or _state.store is None else _in_transit()


@contextlib.contextmanager
def _in_transit() -> Iterator[None]:
    before, _state.in_transit = _state.in_transit, True
    try:
        yield
    finally:
        _state.in_transit = before


def is_replaying() -> bool:
    """Return whether the results of collectives that are called now are there already."""
    return _state.is_replaying


class _Record(TorchDispatchMode):
    """Notes what each call makes. Of a product only the last result counts: that of the product, or of its redistributions."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.multiplied = whole, False
        self.calls: deque[Any] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Writes a tensor that is noted already, or is the checkpoint's own.
        if func.namespace == "c10d" or func is DETACH:
            return out
        if _is_view(out, (args, kwargs)):
            self.calls.append(RERUN)
            return out
        if not self.whole:
            if func.overloadpacket in PRODUCTS:
                # What came before the product only prepared its operands: it runs again, so that no memory is kept for it.
                self.calls, self.multiplied = deque([RERUN] * len(self.calls)), True
            elif self.multiplied:
                # A redistribution after the product: only the last result will be read, so those before it keep their shapes alone.
                self.calls = deque(_without_values(call) for call in self.calls)
            else:
                self.calls.append(RERUN)
                return out
        kept_result = (
            _without_values(out) if _state.in_transit else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        )
        self.calls.append(kept_result)
        return out


class _Replay(TorchDispatchMode):
    """Returns for each call what it made in the first run."""

    def __init__(self, calls: deque[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Calls are matched by their order: both runs make the same ones, except `detach`, which torch's checkpoint adds in one of them.
        result = RERUN if func is DETACH else self.calls.popleft()
        if result is RERUN:
            return func(*args, **(kwargs or {}))
        return pytree.tree_map_only(_TensorShape, _TensorShape.tensor, result)


class _TensorShape:
    """A tensor whose values will not be read."""

    def __init__(self, like: torch.Tensor) -> None:
        self.size, self.stride, self.dtype, self.device = like.size(), like.stride(), like.dtype, like.device

    def tensor(self) -> torch.Tensor:
        """Return a new tensor of this shape."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def _without_values(call: Any) -> Any:
    return call if call is RERUN else pytree.tree_map_only(torch.Tensor, _TensorShape, call)


def _is_view(out: Any, given: Any) -> bool:
    """Return whether the result of a call shares the memory of an operand."""
    operand_memory = {storage_id(t) for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
    result = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return all(storage_id(t) in operand_memory for t in result)
