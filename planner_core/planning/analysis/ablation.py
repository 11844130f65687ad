"""What each restriction of a paper's method costs against the exact search: from the one to the other, one rung at a time.

    exact, least time -> least communication -> weights kept whole at use -> copies alike -> bytes for seconds -> its own space

Each rung adds one restriction to those before, so the difference between two rungs is what that one costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner_core.core import DeviceMesh, Graph, NoPlanFits, Plan
from planner_core.planning.methods.papers import LENSES, Lens
from planner_core.planning.pipeline import choose
from planner_core.planning.request import Progress
from planner_core.planning.session import Planner, meshes, replace_request
from planner_core.search.network import Restriction

SAYS = {
    "exact": "nothing is forbidden, least step time",
    "goal": "aims at the least communication, hidden or not, instead of the least step time",
    "kept": "keeps weights on the device that uses them: none is sharded and gathered at use",
    "alike": "runs all copies of a block alike",
    "volume": "counts bytes, as if every link were the same",
    "space": "splits every matrix of a block on every mesh axis, and never the batch",
}
"""What each rung adds, in words."""


@dataclass(frozen=True, slots=True)
class Rung:
    """The best plan under the restrictions up to `name` (see SAYS); None where no plan fits."""

    name: str
    plan: Plan | None


def rungs(planner: Planner, method: str, say: Progress = lambda text: None) -> Iterator[Rung]:
    """The rungs from the exact search down to a method of the papers; the last is the method itself.

    `say` is told what is being done, and may raise to stop.
    """
    target = LENSES[method]
    yield Rung("exact", _best(planner, None, say))
    lens = replace(target, restrict=_free, zero=planner.workload.zero, uniform=False, by_volume=False)
    yield Rung("goal", _best(planner, lens, say))
    if target.zero < planner.workload.zero:
        lens = replace(lens, zero=target.zero)
        yield Rung("kept", _best(planner, lens, say))
    lens = replace(lens, uniform=target.uniform)
    yield Rung("alike", _best(planner, lens, say))
    if target.by_volume:
        yield Rung("volume", _best(planner, target, say))
    elif method == "atp":
        yield Rung("space", _best(planner, target, say))


def _free(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
    return Restriction()


def _best(planner: Planner, lens: Lens | None, say: Callable[[str], None]) -> Plan | None:
    exact = replace_request(planner, method="exact", objective="time")
    try:
        return choose(exact, meshes(planner.request, planner.cluster), say, lens)
    except NoPlanFits:
        return None
