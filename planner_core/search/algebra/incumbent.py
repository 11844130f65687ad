"""Best first: the cases of a search in the order of their lower bounds, of which the dear ones are worked out only when they are next.

    queue of (bound, case) -> the least -> its next bound, and back into the queue; a case with all its bounds is searched

The first case whose bound is not below the limit, as a rule the incumbent's value, ends the order, since all that are left have bounds as
high. Example: by first bounds a and b take at least 5 and 6 s. The second bound of a is 8 s and that of b 7 s, so b is searched first. Its
plan takes 7.5 s, and a is not searched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Case = TypeVar("Case")
Solution = TypeVar("Solution")


@dataclass(slots=True)
class Incumbent(Generic[Solution]):
    """The best solution of a search so far. A better one has a lower `value`, also where there is none yet."""

    value: float = math.inf
    solution: Solution | None = None

    def offer(self, value: float, solution: Solution) -> None:
        """Take a solution in place of the incumbent, if its value is lower."""
        if value < self.value:
            self.value, self.solution = value, solution


def best_first(
    cases: Iterable[Case], bounds: Sequence[Callable[[Case], float]], limit: Callable[[], float]
) -> Iterator[Case]:
    """Yield the cases whose bounds are below a limit, the lowest first; of equal bounds, in the order of the cases.

    Args:
        bounds: Each gives a lower bound of a case, the cheapest first. The highest of those so far counts.
        limit: Returns the value that bounds have to be below, mostly that of the incumbent. It may change between two cases.
    """
    queue = [(bounds[0](case), number, case, 1) for number, case in enumerate(cases)]
    heapq.heapify(queue)
    while queue and queue[0][0] < limit():
        bound, number, case, known = heapq.heappop(queue)
        if known == len(bounds):
            yield case
        else:
            heapq.heappush(queue, (max(bound, bounds[known](case)), number, case, known + 1))
