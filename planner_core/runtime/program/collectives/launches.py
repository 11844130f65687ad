"""Collectives of several weights in one launch."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from planner_core.runtime.program.torch_private import coalesce

COALESCED_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives of which torch.distributed issues several in one launch."""
_THREAD = threading.local()  # `pending`: the collectives of weights that are to leave together


class LaunchAxis(Protocol):
    """What a launch needs of an `Axis`: its group, and where to say how many collectives leave together."""

    group: Any
    packed: int


@dataclass(eq=False)
class PendingCollective:
    """A collective of `packed` weights or gradients (0: of one tensor of the computation). `args` begin with a tensor of its
    dtype. `work` is None until it is issued."""

    axis: LaunchAxis
    kind: str
    packed: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    work: Any = None

    def start(self) -> None:
        """Issue it, or inside `coalesced_launch` leave it to the launch."""
        pending = getattr(_THREAD, "pending", None)
        if pending is not None and self.packed and self.kind in COALESCED_KINDS:
            pending.append(self)
        else:
            self.issue()

    def issue(self, others: Sequence[PendingCollective] = ()) -> None:
        """Issue it, together with others of its kind, axis and dtype."""
        self.axis.packed, group = sum(max(1, p.packed) for p in (self, *others)), self.axis.group
        with coalesce(group) if others else contextlib.nullcontext() as merged:
            for p in (self, *others):
                work = p.call(*p.args, group=group, async_op=True)
                p.work = merged or work  # a coalesced launch has one work for all of its collectives
        self.axis.packed = 1

    def wait(self) -> None:
        """Wait until it has finished."""
        # It is in a launch that has not left yet, and nothing after this wait would issue it.
        if self.work is None:
            _issue_pending()
        self.work.wait()
        # Those of one launch are waited for once: at a second wait gloo writes results again, over what was added to them.
        getattr(self.work, "works", []).clear()


@contextlib.contextmanager
def coalesced_launch() -> Iterator[None]:
    """Inside, collectives of weights are not issued at once. At the end, or when one is waited for, those of one kind over one
    axis leave in one launch.

    NCCL runs this as one group call ("Aggregated Operations" of its guide), which pays the latency once.
    """
    # Nested launches join the outermost one, which alone issues.
    outer = getattr(_THREAD, "pending", None)
    _THREAD.pending = [] if outer is None else outer
    try:
        yield
        if outer is None:
            _issue_pending()
    finally:
        _THREAD.pending = outer


def _issue_pending() -> None:
    groups: dict[object, list[PendingCollective]] = {}
    for p in _THREAD.pending:
        alone = id(p) if p.args[0].is_meta else 0  # torch has no merged collectives of meta tensors
        groups.setdefault((p.kind, p.axis, p.args[0].dtype, alone), []).append(p)
    _THREAD.pending.clear()
    for group in groups.values():
        group[0].issue(group[1:])
