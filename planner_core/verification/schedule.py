"""Whether a run issued and waited for its collectives in the order of the plan's schedule (`cost.schedule.events`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from planner_core.cost import Event


@dataclass
class Window:
    """The events from the begin of one unit to the begin of the next."""

    name: str
    backward: bool
    traffic: list[str] = field(default_factory=list)
    values: list[tuple[str, str]] = field(default_factory=list)
    """The collectives for which operators wait: (operator, collective)."""


def difference(wanted: Sequence[Event], recorded: Sequence[Event], prefixes: Iterable[str]) -> str:
    """A sentence about the first difference between a run's order and the schedule; empty if there is none.

    Weight traffic must be issued and waited for at the scheduled place among the units. A collective for which an operator waits must
    be waited for at once, inside its unit; only the sends of a ring are waited for behind the kernel of a block. In forward these
    follow the order of the operators; several of one operator may have any order. In backward autograd chooses the order, so any order
    is right. If a unit begins backward twice, since two of its results have gradients, it counts once.
    """
    known = set(prefixes)
    ours, theirs = _windows(wanted, known), _windows(recorded, known)
    for want, found in zip(ours, theirs, strict=False):
        for a, b in (
            ([want.name], [found.name]),
            (want.traffic, found.traffic),
            (_texts(want, want), _texts(found, want)),
        ):
            if a != b:
                return f"{want.name}: scheduled {_shown(a)}; recorded {_shown(b)}"
    if len(ours) != len(theirs):
        return f"{len(ours)} units scheduled, {len(theirs)} recorded"
    return ""


def _shown(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "nothing"


def _windows(events: Sequence[Event], known: set[str]) -> list[Window]:
    found = [Window("the start", False)]
    returned: set[str] = set()
    for at, e in enumerate(events):
        unit = e.kind if e.kind in known else "the rest"
        if e.what in ("run", "return"):
            if e.what == "return" and unit in returned:
                continue
            returned = {*returned, unit} if e.what == "return" else set()
            found.append(Window(f"{e.what} {unit}", e.what == "return"))
        elif e.packed:
            found[-1].traffic.append(f"{e.what} {e.kind} of {e.packed} on {e.axis}: {e.num_bytes}")
        elif e.what == "issue":
            waited = e.kind == "send_recv" or (
                at + 1 < len(events) and (events[at + 1].what, events[at + 1].kind) == ("wait", e.kind)
            )
            late = "" if waited else ", waited for late"
            found[-1].values.append((getattr(e, "site", ""), f"{e.kind} on {e.axis}: {e.num_bytes}{late}"))
    return found


def _texts(window: Window, like: Window) -> list[str]:
    """The collectives for which operators wait, in an order that can be compared; with the operators that `like` has."""
    texts = [text for _, text in window.values]
    if window.backward:
        return sorted(texts)
    sizes = [len(list(run)) for _, run in groupby(site for site, _ in like.values)]
    runs = [iter(texts[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    return [*(t for run in runs for t in sorted(run)), *texts[sum(sizes) :]]
