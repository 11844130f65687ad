"""The best way to cut a row of copies into stages, by dynamic programming over copies.

A stage takes the copies from `first` to `last` (not included). It has `work_s` seconds of work of its own, and every later stage waits
`delay_s` seconds more for it:

    minimise   max over stages k of   delay_0 + ... + delay_(k-1) + work_k

The points of the program are (delay so far, longest so far), by number of stages and of copies. A point that another one dominates is
dropped, and a point that is not below the best known cut is not formed. So the result is the best of all cuts.

Example: 4 copies of 1 s per micro-batch in 2 stages, 2 micro-batches; work = 2 n, delay = n for n copies. 2 and 2 take max(4, 2 + 4) = 6;
3 and 1 take max(6, 3 + 2) = 6; 1 and 3 take max(2, 1 + 6) = 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

QUICK_PRECISION = 1e-3
"""How near to the least time of its kind the quick cut is, as a share."""
EQUAL_SUMS_SHARE = 1e-9
"""Share by which equal sums may differ."""


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage: seconds of its work, seconds by which it delays every later stage, and the caller's name for it."""

    work_s: float
    delay_s: float
    choice: object = None


Options = Callable[[int, int, int], Iterable[StageOption]]
"""(stage, first copy, the copy after the last) -> the options of the stage. If it has none, it has none with more copies either."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut: the copies and the choice of each stage, and its seconds."""

    seconds: float
    copies: tuple[int, ...]
    choices: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Point:
    delay_s: float
    longest_s: float
    copies: tuple[int, ...]
    choices: tuple[object, ...]


def best_partition(copies: int, stages: int, options: Options, below: float = float("inf")) -> Partition | None:
    """Find the cut of least seconds, if one is less than `below`; otherwise None. Every stage has at least one copy. With more copies no
    stage may be quicker."""
    fronts: dict[int, list[_Point]] = {0: [_Point(0.0, 0.0, (), ())]}
    if below == math.inf:  # the best cut may be as long as the quick one
        below = (1 + EQUAL_SUMS_SHARE) * _quick_cut_seconds(copies, stages, options)
    least_ends = _least_ends(copies, stages, options, below)
    for stage in range(stages):
        next_fronts: dict[int, list[_Point]] = {}
        num_later_stages = stages - 1 - stage
        for first, points in fronts.items():
            # Every later stage needs one copy at least, and the last stage takes all that are left.
            least = max(first + 1, least_ends[stage])
            ends = range(least, copies - num_later_stages + 1) if num_later_stages else (copies,)
            for last in ends:
                stage_options = list(options(stage, first, last))
                extended = [
                    p
                    for point in points
                    for option in stage_options
                    if (p := _append_stage(point, option, last - first)).longest_s < below
                ]
                if not extended:
                    break  # more copies need more memory, and take longer
                next_fronts[last] = _undominated([*next_fronts.get(last, ()), *extended])
        fronts = next_fronts
    ends_at = min(fronts.get(copies, ()), key=lambda p: p.longest_s, default=None)
    return Partition(ends_at.longest_s, ends_at.copies, ends_at.choices) if ends_at else None


def _quick_cut_seconds(copies: int, stages: int, options: Options) -> float:
    """The seconds of a good cut, from which on the program forms no points; infinite if none is found.

    In a given time each stage takes as many copies as it can, and the least time in which all copies are taken is sought."""

    def take_most(within: float) -> float:
        first, delay_s, longest_s = 0, 0.0, 0.0
        for stage in range(stages):
            most, taken, end = copies - (stages - 1 - stage), None, first
            for last in range(first + 1, most + 1) if most < copies else (copies,):
                option = min(options(stage, first, last), key=lambda o: o.work_s, default=None)
                if option is None or delay_s + option.work_s > within:
                    break
                taken, end = option, last
            if taken is None:
                return math.inf
            first, longest_s, delay_s = end, max(longest_s, delay_s + taken.work_s), delay_s + taken.delay_s
        return longest_s

    low, best = 0.0, take_most(math.inf)
    while best < math.inf and best - low > QUICK_PRECISION * best:
        middle = (low + best) / 2
        cut_s = take_most(middle)
        low, best = (low, cut_s) if cut_s < math.inf else (middle, best)
    return best


def _least_ends(copies: int, stages: int, options: Options, below: float) -> list[int]:
    """By stage the least end that leaves no more copies than the stages behind it can take, each by itself."""
    # Example: 10 copies, 3 stages, at most 4 copies a stage. The last two take 8, so the first stage ends at 2 or later.
    ends = [copies] * stages
    for stage in range(stages - 1, 0, -1):
        first, last = ends[stage], ends[stage]
        # Stages before this one need one copy each. What a stage cannot take, it cannot take with more copies either.
        while first > stage and any(o.work_s < below for o in options(stage, first - 1, last)):
            first -= 1
        ends[stage - 1] = first
    return ends


def _append_stage(point: _Point, option: StageOption, copies: int) -> _Point:
    # A stage pays the delays of the stages before it, and not its own: delay is added only after the maximum was taken.
    longest_s = max(point.longest_s, point.delay_s + option.work_s)
    return _Point(point.delay_s + option.delay_s, longest_s, (*point.copies, copies), (*point.choices, option.choice))


def _undominated(points: Iterable[_Point]) -> list[_Point]:
    """Return the points that no other point dominates."""
    front: list[_Point] = []
    # In order of delay, a point is worth keeping only if its longest is below that of all before: (1, 9), (2, 7), (3, 8) loses (3, 8).
    for point in sorted(points, key=lambda p: (p.delay_s, p.longest_s)):
        if not front or point.longest_s < front[-1].longest_s:
            front.append(point)
    return front
