"""Keep some results of a recomputed block, so that they are not made again, under torch's own checkpoint.

`with keep():` is around an operator and the redistributions of its result. When the block runs again, the calls inside do not
compute and do not communicate, since the result is there. Autograd still gets their operands. The tensor between a product and
the sum of its terms over ranks was freed. In the second run it is only a tensor of the right shape, whose values nobody reads.
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
from torch.utils._python_dispatch import TorchDispatchMode

from planner_core.models.hooks import generator_states, restored_generators

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.convolution)
"""Kernels whose result autograd does not save for their own backward."""
DETACH = aten.detach.default
RERUN = object()
"""Marks a call that runs again: a view, or a copy that the product takes."""


class _ThreadState(threading.local):
    """The state of this thread: where results are kept, and whether the block runs again."""

    store: deque[Any] | None = None
    again = False
    is_replaying = False
    in_transit = False


_state = _ThreadState()


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """The two contexts for `context_fn` of torch's checkpoint: around the first run of a block, and around the second run."""
    store: deque[Any] = deque()
    return _BlockRun(store, again=False), _BlockRun(store, again=True, drawn=generator_states())


class _BlockRun(contextlib.AbstractContextManager[None]):
    """A block runs. It puts its kept results into `store`, or takes them from there. It may be entered several times. `drawn`: the states
    of the generators when it ran first, so that it draws the same numbers again."""

    def __init__(self, store: deque[Any], *, again: bool, drawn: tuple[Any, ...] | None = None) -> None:
        self.store, self.again, self.drawn = store, again, drawn

    def __enter__(self) -> None:
        self.draws = contextlib.ExitStack()
        if self.drawn is not None:
            self.draws.enter_context(restored_generators(self.drawn))
        self.before = _state.store, _state.again
        _state.store, _state.again = self.store, self.again

    def __exit__(self, *raised: object) -> None:
        _state.store, _state.again = self.before
        self.draws.close()


@contextlib.contextmanager
def keep(whole: bool = False) -> Iterator[None]:
    """Keep the result of what runs inside. `whole`: keep all that its calls make, since the operator saves some of it itself."""
    store = _state.store
    if store is None:
        yield
        return
    if not _state.again:
        record = _Record(whole)
        with record:
            yield
        store.append(record.calls)
        return
    if not store:
        raise RuntimeError(
            "a recomputed block keeps its results for one backward pass; call backward once, without retain_graph"
        )
    _state.is_replaying = True
    try:
        with _Replay(store.popleft()):
            yield
    finally:
        _state.is_replaying = False


def in_transit() -> contextlib.AbstractContextManager[None]:
    """Tensors that are made inside are on their way to other placements, so `keep` keeps their shapes only. In the second run nobody reads
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
    """Whether the results of the collectives that are now called are there already."""
    return _state.is_replaying


class _Record(TorchDispatchMode):
    """Notes what each call makes. For a product only the last result counts: that of the product, or of its redistributions."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.multiplied = whole, False
        self.calls: deque[Any] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func.namespace == "c10d" or func is DETACH
        ):  # writes a tensor that is noted already, or is the checkpoint's own
            return out
        if _is_view(out, (args, kwargs)):
            self.calls.append(RERUN)
            return out
        if not self.whole:
            if func.overloadpacket in PRODUCTS:
                self.calls, self.multiplied = deque([RERUN] * len(self.calls)), True
            elif self.multiplied:
                self.calls = deque(_without_values(call) for call in self.calls)
            else:
                self.calls.append(RERUN)
                return out
        held = (
            _without_values(out) if _state.in_transit else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        )
        self.calls.append(held)
        return out


class _Replay(TorchDispatchMode):
    """Returns for each call what it made in the first run."""

    def __init__(self, calls: deque[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = RERUN if func is DETACH else self.calls.popleft()
        if made is RERUN:
            return func(*args, **(kwargs or {}))
        return pytree.tree_map_only(_TensorShape, _TensorShape.tensor, made)


class _TensorShape:
    """A tensor whose values will not be read."""

    def __init__(self, like: torch.Tensor) -> None:
        self.size, self.stride, self.dtype, self.device = like.size(), like.stride(), like.dtype, like.device

    def tensor(self) -> torch.Tensor:
        """A new tensor of this shape."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def _without_values(call: Any) -> Any:
    return call if call is RERUN else pytree.tree_map_only(torch.Tensor, _TensorShape, call)


def _is_view(out: Any, given: Any) -> bool:
    """Whether the result of a call shares the memory of an operand."""
    old = {t.untyped_storage()._cdata for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
    made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return all(t.untyped_storage()._cdata in old for t in made)
