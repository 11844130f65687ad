"""The map of regions: what is swept, and crossovers found by bisection, on both sides of which the plan differs."""

from __future__ import annotations

import math
import random
import re

import pytest

from explorer.analysis import what_if as whatif
from planner_core.core.errors import NoPlanFits
from planner_core.core.plan import Plan
from planner_core.planning.analysis.sensitivity import (
    CLOSE,
    SAME,
    MapAxis,
    RegionCell,
    find_crossover,
    kind_changes,
    mesh_kind,
    search_cell,
    sweep_map,
)
from planner_core.planning.request import Request
from tests.pages.test_app import open_page, words


def step_at(border: float, asked: list[float]) -> object:
    """A made-up planner whose choice changes at `border` of x."""

    def look(x: float, y: float) -> RegionCell:
        asked.append(x)
        return RegionCell(x, y, "low" if x < border else "high", 1.0, 1)

    return look


@pytest.mark.parametrize("border", [1.01, 62.0, 777.7, 999.0])
def test_bisection_closes_in_on_the_border(border: float) -> None:
    asked: list[float] = []
    look = step_at(border, asked)
    found = find_crossover(look(1.0, 2.0), look(1000.0, 2.0), 0.0, look)
    assert found.low < border <= found.high <= found.low * (1 + CLOSE) * (1 + 1e-9)
    assert (found.below, found.above, found.y) == ("low", "high", 2.0)
    assert found.low <= found.value <= found.high
    assert len(asked) < 14


@pytest.mark.parametrize("border", [17, 64, 97, 128])
def test_a_stepped_quantity_ends_at_neighbours(border: int) -> None:
    look = step_at(border, [])
    found = find_crossover(look(16, 1), look(128, 1), 16, look)
    assert found.high - found.low == 16 and found.low < border <= found.high
    assert found.low % 16 == found.high % 16 == 0


def test_only_neighbours_in_a_row_that_differ_are_narrowed_down() -> None:
    x, y = MapAxis("inter", (1.0, 2.0, 4.0)), MapAxis("batch", (8.0, 16.0), 8.0)
    cells = list(sweep_map(x, y, lambda a, b: RegionCell(a, b, "a" if a < 3 or b > 8 else "b")))
    assert [(c.x, c.y) for c in cells] == [(a, b) for b in y.values for a in x.values]
    assert [(left.x, right.x, left.y) for left, right in kind_changes(cells)] == [(2.0, 4.0, 8.0)]


class MadeUp:
    """A planner whose plans take a + b / x seconds on links of speed x; faster links never slow one down."""

    def __init__(self, plans: list[tuple[float, float]], proven: bool = True) -> None:
        self.plans, self.proven = plans, proven
        self.asked: list[float] = []

    def seconds(self, k: int, x: float) -> float:
        a, b = self.plans[k]
        return a + b / x

    def best(self, x: float) -> int:
        return min(range(len(self.plans)), key=lambda k: self.seconds(k, x))

    def look(self, x: float, y: float) -> RegionCell:
        self.asked.append(x)
        k = self.best(x)
        return RegionCell(x, y, f"plan {k}", self.seconds(k, x), 1, self.proven)

    def priced(self, found: RegionCell, x: float, y: float) -> float:
        assert found.searched, "only a searched cell has a plan"
        return self.seconds(int(str(found.kind).split()[1]), x)


SPEEDS = MapAxis("inter", tuple(2.0**k for k in range(9)), links=True)
ROW = MapAxis("batch", (8.0,), 8.0)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_inferred_is_within_a_hundredth_of_the_best(seed: int) -> None:
    draw = random.Random(seed)
    made = MadeUp([(draw.uniform(1, 3), draw.uniform(0, 4)) for _ in range(4)])
    cells = list(sweep_map(SPEEDS, ROW, made.look, made.priced))
    assert sorted(c.x for c in cells) == list(SPEEDS.values)
    assert sorted(made.asked) == sorted(c.x for c in cells if c.searched)
    for c in cells:
        best = made.seconds(made.best(c.x), c.x)
        assert best * (1 - 1e-12) <= c.step_time_s <= best * (1 + SAME)
        assert not c.searched or c.kind == f"plan {made.best(c.x)}"


def test_flat_stretches_are_not_searched_and_steep_ones_are() -> None:
    flat, steep = MadeUp([(1.0, 0.004)]), MadeUp([(0.0, 1.0)])
    for made, searches in ((flat, 2), (steep, len(SPEEDS.values))):
        cells = list(sweep_map(SPEEDS, ROW, made.look, made.priced))
        assert len(made.asked) == searches == sum(c.searched for c in cells)
    by_column = MadeUp([(1.0, 0.004)])
    list(sweep_map(ROW, SPEEDS, lambda b, v: by_column.look(v, b), lambda c, b, v: by_column.seconds(0, v)))
    assert len(by_column.asked) == 2


def test_nothing_is_inferred_from_what_is_not_proven() -> None:
    made = MadeUp([(1.0, 0.0)], proven=False)
    assert all(c.searched for c in sweep_map(SPEEDS, ROW, made.look, made.priced))


def test_where_nothing_fits_at_both_ends_links_do_not_help() -> None:
    asked: list[float] = []

    def look(x: float, y: float) -> RegionCell:
        asked.append(x)
        return RegionCell(x, y, None)

    cells = list(sweep_map(SPEEDS, ROW, look, lambda c, x, y: math.inf))
    assert len(asked) == 2 and [c.kind for c in cells] == [None] * len(SPEEDS.values)


@pytest.mark.parametrize("seed", range(10))
def test_a_border_is_found_where_plans_take_equally_long(seed: int) -> None:
    draw = random.Random(seed)
    border = draw.uniform(1.2, 900)
    made = MadeUp([(2.0, 0.0), (1.0, border)])  # equally long at the border
    ends = [made.look(v, 8.0) for v in (1.0, 1000.0)]
    found = find_crossover(*ends, 0.0, made.look, made.priced)
    assert found.low < border <= found.high <= found.low * (1 + CLOSE) * (1 + 1e-9)
    assert len(made.asked) - 2 <= 2 < math.log2(math.log(1000) / math.log(1 + CLOSE))
    assert {found.low, found.high} <= {*made.asked, 1.0, 1000.0}, "both sides were searched"


@pytest.mark.slow
def test_a_search_can_be_stopped_inside() -> None:
    """Between eliminations the search says that it goes on; what is said may raise to stop it there."""
    request = Request("t5-large", cluster="1x8-h100", layers=3, memory_gb=1.4, precision="pure")
    said: list[str] = []
    whatif.best_plan(request, say=said.append)
    searches = [s for s in said if s.startswith("search on ")]
    assert len(searches) > 3 * len(set(searches)), "more often than once for each search"

    def stop(text: str) -> None:
        said.append(text)
        if said.count(text) == 4:
            raise TimeoutError

    said.clear()
    with pytest.raises(TimeoutError):
        whatif.best_plan(request, say=stop)


def test_where_nothing_fits_is_a_kind_of_its_own() -> None:
    def nothing() -> Plan:
        raise NoPlanFits("too small")

    assert search_cell(1.0, 2.0, nothing) == RegionCell(1.0, 2.0, None)
    assert math.isinf(search_cell(1.0, 2.0, nothing).step_time_s)


@pytest.mark.slow
def test_on_both_sides_of_a_real_crossover_the_plan_differs() -> None:
    """Llama-3-8B on two nodes: with slow links between them another mesh is best than with fast ones."""

    def plan(gb_per_s: float) -> Plan:
        return whatif.best_plan(
            Request(
                "llama-3-8b",
                cluster=f"2x8-h100:inter={gb_per_s:.6g}",
                layers=2,
                memory_gb=500,
                recompute="none",
                accumulate=1,
            )
        )

    ends = [search_cell(v, 16.0, lambda v=v: plan(v), mesh_kind) for v in (25.0, 800.0)]
    found = find_crossover(*ends, 0.0, lambda a, b: search_cell(a, b, lambda: plan(a), mesh_kind))
    low, high = plan(found.low), plan(found.high)
    assert mesh_kind(low) == found.below != found.above == mesh_kind(high)
    assert found.high <= found.low * (1 + CLOSE) * (1 + 1e-9)
    # where the choice changes both take about as long, and each side's own plan is the faster one there
    assert low.cost.step_time_s == pytest.approx(high.cost.step_time_s, rel=0.1)


# --- in words and as a figure ------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "mesh"), [("gpt2-xl", "16"), pytest.param("vit-large", "", marks=pytest.mark.slow)])
@pytest.mark.slow(but=("vit-large-",))
def test_the_map_is_worked_out_on_demand(model: str, mesh: str) -> None:
    settings = {"map": "batch,inter", "accumulate": "1", "recompute": "none", "zero": "0"}
    at = open_page("plans", model=model, layers="1", mesh=mesh, **settings)
    assert not at.exception
    at.button(key="map_start").click().run()
    assert not at.exception
    assert "Where the choice changes" in words(at)
    assert "GB/s between nodes" in words(at)
    told = "\n".join(c.value for c in at.caption)
    assert (found := re.search(r"(\d+) searches: (\d+) of the (\d+) points", told)) and int(found[2]) < int(found[3])
    assert "lie between two searched points of the same kind" in told
    assert not [b for b in at.button if b.key in ("map_start", "map_stop")]
