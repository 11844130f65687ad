"""Compare the order in which a run issued and awaited collectives with the plan's schedule (`cost.schedule.events`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from planner_core.cost import Event


@dataclass
class Window:
    """The events from the start of one unit to the start of the next."""

    name: str
    backward: bool
    traffic: list[str] = field(default_factory=list)
    values: list[tuple[str, str]] = field(default_factory=list)
    """The collectives for which operators wait: (operator, collective)."""


def first_difference(wanted: Sequence[Event], recorded: Sequence[Event], prefixes: Iterable[str]) -> str:
    """Describe the first difference between a run's order and the schedule; empty if both are equal.

    Weight traffic must be issued and waited for at the scheduled place among the units. A collective for which an operator waits must
    be waited for at once, inside its unit; only the sends of a ring are awaited after the kernel of a block. In forward these
    follow the order of the operators; several of one operator may have any order. In backward autograd chooses the order, so any order
    is right. If a unit begins backward twice, since two of its results have gradients, it counts once.
    """
    known = set(prefixes)
    ours, theirs = _split_into_windows(wanted, known), _split_into_windows(recorded, known)
    for want, theirs_here in zip(ours, theirs, strict=False):
        for a, b in (
            ([want.name], [theirs_here.name]),
            (want.traffic, theirs_here.traffic),
            (_ordered_texts(want, want), _ordered_texts(theirs_here, want)),
        ):
            if a != b:
                return f"{want.name}: scheduled {_format_lines(a)}; recorded {_format_lines(b)}"
    if len(ours) != len(theirs):
        return f"{len(ours)} units scheduled, {len(theirs)} recorded"
    return ""


def _format_lines(lines: Sequence[str]) -> str:
    return ", ".join(lines) or "nothing"


def _split_into_windows(events: Sequence[Event], known: set[str]) -> list[Window]:
    windows = [Window("the start", False)]
    returned: set[str] = set()
    for at, e in enumerate(events):
        unit = e.kind if e.kind in known else "the rest"
        if e.what in ("run", "return"):
            if e.what == "return" and unit in returned:
                continue
            # With the next forward pass (a micro-batch) all units may begin backward again.
            returned = {*returned, unit} if e.what == "return" else set()
            windows.append(Window(f"{e.what} {unit}", e.what == "return"))
        elif e.packed:  # weights or gradients; the collectives of operators are not packed
            windows[-1].traffic.append(f"{e.what} {e.kind} of {e.packed} on {e.axis}: {e.num_bytes}")
        elif e.what == "issue":
            waited = e.kind == "send_recv" or (
                at + 1 < len(events) and (events[at + 1].what, events[at + 1].kind) == ("wait", e.kind)
            )
            late = "" if waited else ", waited for late"
            windows[-1].values.append((getattr(e, "site", ""), f"{e.kind} on {e.axis}: {e.num_bytes}{late}"))
    return windows


def _ordered_texts(window: Window, like: Window) -> list[str]:
    """Sort the collectives of each operator in a forward window, and all of a backward window, so that lists can be compared.

    `like` says how many collectives each operator has.
    """
    texts = [text for _, text in window.values]
    if window.backward:
        return sorted(texts)
    sizes = [len(list(run)) for _, run in groupby(site for site, _ in like.values)]
    runs = [iter(texts[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    return [*(t for run in runs for t in sorted(run)), *texts[sum(sizes) :]]
