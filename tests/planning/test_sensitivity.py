"""The map of regions: what is swept, and crossovers found by bisection, on both sides of which the plan differs."""

from __future__ import annotations

import math
import random
import re

import pytest

from explorer.address import settings
from explorer.analysis import other_links as linked
from explorer.analysis import what_if as whatif
from explorer.figures import regions
from explorer.figures.palette import DARK, LIGHT
from planner_core.core.cluster import load_cluster
from planner_core.core.errors import NoPlanFits
from planner_core.core.plan import Plan
from planner_core.planning.analysis.sensitivity import (
    CLOSE,
    SAME,
    UNKNOWN,
    Crossover,
    MapAxis,
    RegionCell,
    cell,
    changes,
    crossover,
    mesh_kind,
    sweep,
)
from planner_core.planning.request import Request
from tests.pages.test_app import open_page, words
from tests.support.plans import planned


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
    found = crossover(look(1.0, 2.0), look(1000.0, 2.0), 0.0, look)
    assert found.low < border <= found.high <= found.low * (1 + CLOSE) * (1 + 1e-9)
    assert (found.below, found.above, found.y) == ("low", "high", 2.0)
    assert found.low <= found.value <= found.high
    assert len(asked) < 14


@pytest.mark.parametrize("border", [17, 64, 97, 128])
def test_a_stepped_quantity_ends_at_neighbours(border: int) -> None:
    look = step_at(border, [])
    found = crossover(look(16, 1), look(128, 1), 16, look)
    assert found.high - found.low == 16 and found.low < border <= found.high
    assert found.low % 16 == found.high % 16 == 0


def test_only_neighbours_in_a_row_that_differ_are_narrowed_down() -> None:
    x, y = MapAxis("inter", (1.0, 2.0, 4.0)), MapAxis("batch", (8.0, 16.0), 8.0)
    cells = list(sweep(x, y, lambda a, b: RegionCell(a, b, "a" if a < 3 or b > 8 else "b")))
    assert [(c.x, c.y) for c in cells] == [(a, b) for b in y.values for a in x.values]
    assert [(left.x, right.x, left.y) for left, right in changes(cells)] == [(2.0, 4.0, 8.0)]


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
    cells = list(sweep(SPEEDS, ROW, made.look, made.priced))
    assert sorted(c.x for c in cells) == list(SPEEDS.values)
    assert sorted(made.asked) == sorted(c.x for c in cells if c.searched)
    for c in cells:
        best = made.seconds(made.best(c.x), c.x)
        assert best * (1 - 1e-12) <= c.step_time_s <= best * (1 + SAME)
        assert not c.searched or c.kind == f"plan {made.best(c.x)}"


def test_flat_stretches_are_not_searched_and_steep_ones_are() -> None:
    flat, steep = MadeUp([(1.0, 0.004)]), MadeUp([(0.0, 1.0)])
    for made, searches in ((flat, 2), (steep, len(SPEEDS.values))):
        cells = list(sweep(SPEEDS, ROW, made.look, made.priced))
        assert len(made.asked) == searches == sum(c.searched for c in cells)
    by_column = MadeUp([(1.0, 0.004)])
    list(sweep(ROW, SPEEDS, lambda b, v: by_column.look(v, b), lambda c, b, v: by_column.seconds(0, v)))
    assert len(by_column.asked) == 2


def test_nothing_is_inferred_from_what_is_not_proven() -> None:
    made = MadeUp([(1.0, 0.0)], proven=False)
    assert all(c.searched for c in sweep(SPEEDS, ROW, made.look, made.priced))


def test_where_nothing_fits_at_both_ends_links_do_not_help() -> None:
    asked: list[float] = []

    def look(x: float, y: float) -> RegionCell:
        asked.append(x)
        return RegionCell(x, y, None)

    cells = list(sweep(SPEEDS, ROW, look, lambda c, x, y: math.inf))
    assert len(asked) == 2 and [c.kind for c in cells] == [None] * len(SPEEDS.values)


@pytest.mark.parametrize("seed", range(10))
def test_a_border_is_found_where_plans_take_equally_long(seed: int) -> None:
    draw = random.Random(seed)
    border = draw.uniform(1.2, 900)
    made = MadeUp([(2.0, 0.0), (1.0, border)])  # equally long at the border
    ends = [made.look(v, 8.0) for v in (1.0, 1000.0)]
    found = crossover(*ends, 0.0, made.look, made.priced)
    assert found.low < border <= found.high <= found.low * (1 + CLOSE) * (1 + 1e-9)
    assert len(made.asked) - 2 <= 2 < math.log2(math.log(1000) / math.log(1 + CLOSE))
    assert {found.low, found.high} <= {*made.asked, 1.0, 1000.0}, "both sides were searched"


def test_a_point_that_takes_too_long_is_a_kind_of_its_own() -> None:
    cells = [
        RegionCell(1.0, 8.0, "a"),
        RegionCell(2.0, 8.0, UNKNOWN),
        RegionCell(4.0, 8.0, "b"),
        RegionCell(8.0, 8.0, "c"),
    ]
    assert [(left.x, right.x) for left, right in changes(cells)] == [(4.0, 8.0)]
    drawn = regions.figure(MapAxis("inter", (1.0, 2.0, 4.0, 8.0)), MapAxis("batch", (8.0,), 8.0), cells, None, LIGHT)
    assert [t.text[0] for t in drawn.data if t.text is not None] == ["A", "B", "C", "?"]


def test_a_search_can_be_stopped_inside() -> None:
    """Between eliminations the search says that it goes on; what is said may raise to stop it there."""
    request = Request("t5-large", cluster="1x8-h100", layers=3, memory_gb=1.4, precision="pure")
    said: list[str] = []
    whatif.best(request, say=said.append)
    searches = [s for s in said if s.startswith("search on ")]
    assert len(searches) > 3 * len(set(searches)), "more often than once for each search"

    def stop(text: str) -> None:
        said.append(text)
        if said.count(text) == 4:
            raise TimeoutError

    said.clear()
    with pytest.raises(TimeoutError):
        whatif.best(request, say=stop)


def test_a_plan_priced_on_other_links_is_the_plan_repriced() -> None:
    result = planned(Request("gpt2-xl"))
    for plan in result.plans:
        seconds = linked.step_times(plan, result.graph)
        for factor in ("0.125", "1", "4"):
            there = linked.changed(result.cluster, ("1", factor), ())
            assert seconds(there) == pytest.approx(linked.repriced(plan, there, result.graph).cost.step_time_s)


def test_where_nothing_fits_is_a_kind_of_its_own() -> None:
    def nothing() -> Plan:
        raise NoPlanFits("too small")

    assert cell(1.0, 2.0, nothing) == RegionCell(1.0, 2.0, None)
    assert math.isinf(cell(1.0, 2.0, nothing).step_time_s)


def test_on_both_sides_of_a_real_crossover_the_plan_differs() -> None:
    """Llama-3-8B on two nodes: with slow links between them another mesh is best than with fast ones."""

    def plan(gb_per_s: float) -> Plan:
        return whatif.best(
            Request(
                "llama-3-8b",
                cluster=f"2x8-h100:inter={gb_per_s:.6g}",
                layers=2,
                memory_gb=500,
                recompute="none",
                accumulate=1,
            )
        )

    ends = [cell(v, 16.0, lambda v=v: plan(v), mesh_kind) for v in (25.0, 800.0)]
    found = crossover(*ends, 0.0, lambda a, b: cell(a, b, lambda: plan(a), mesh_kind))
    low, high = plan(found.low), plan(found.high)
    assert mesh_kind(low) == found.below != found.above == mesh_kind(high)
    assert found.high <= found.low * (1 + CLOSE) * (1 + 1e-9)
    # where the choice changes both take about as long, and each side's own plan is the faster one there
    assert low.cost.step_time_s == pytest.approx(high.cost.step_time_s, rel=0.1)


# --- in words and as a figure ------------------------------------------------------------------------------


def test_kinds_are_named_in_the_fields_terms() -> None:
    best = whatif.best(Request("llama-3-8b", memory_gb=73.6, zero=None))
    assert str(regions.sort_of(best)) == "data parallel 16, gradients and states sharded"
    best = whatif.best(Request("llama-3-8b", memory_gb=73.6, zero=3))
    assert str(regions.sort_of(best)) == "data parallel 16, weights sharded"
    wide = regions.Sort(tensor=16, leaves=True)
    assert str(wide) == "tensor parallel 16, tp between nodes"
    assert str(regions.Sort()) == "everything whole"


def test_axes_surround_what_stands() -> None:
    values, _ = settings.read({})
    cluster = load_cluster("2x8-h100")
    assert 400.0 in regions.axis_of("inter", values, cluster, 16).values
    assert 450.0 in regions.axis_of("intra", values, cluster, 16).values
    assert 16.0 in regions.axis_of("batch", values, cluster, 16).values
    x, y = regions.axis_of("inter", values, cluster, 16), regions.axis_of("batch", values, cluster, 16)
    assert regions.changes(x, 62.5, y, 32.0) == {"inter": 62.5, "batch": 32}


def test_crossovers_in_words() -> None:
    x, y = MapAxis("inter", (25.0, 50.0)), MapAxis("batch", (8.0, 16.0), 16.0)
    found = [Crossover(b, 61.0, 63.0, "one", "two") for b in y.values]
    (told,) = regions.told(x, y, found, {"one": "A", "two": "B"})
    assert told == "At 8 to 16 samples: A one below about 62 GB/s between nodes, B two above."
    (told,) = regions.told(y, x, [Crossover(25.0, 16.0, 32.0, "one", None)], {"one": "A"})
    assert told == "At 25 GB/s between nodes: A one up to 16 samples, nothing fits from 32 samples on."


def test_the_points_known_so_far_are_told_as_a_table() -> None:
    x, y = MapAxis("inter", (25.0, 50.0)), MapAxis("batch", (8.0, 16.0), 16.0)
    head, rows = regions.so_far(x, y, [RegionCell(25.0, 8.0, "a"), RegionCell(50.0, 8.0, "a", searched=False)])
    assert head[1:] == ["25.0", "50.0"] and all(head)
    assert rows == [["16", "·", "·"], ["8", "■", "□"]]
    assert regions.counted([RegionCell(25.0, 8.0, "a")], 3).startswith(
        "3 searches: 1 of the 1 points, and 2 to close in"
    )


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_map_shows_every_cell_with_a_letter(theme: object) -> None:
    x, y = MapAxis("inter", (25.0, 50.0)), MapAxis("batch", (8.0, 16.0), 16.0)
    cells = [RegionCell(a, b, "k" if a < 30 else None, 0.1, 10) for b in y.values for a in x.values]
    figure = regions.figure(x, y, cells, (25.0, 8.0), theme)  # type: ignore[arg-type]
    tiles = [t for t in figure.data if t.text is not None]
    assert sum(len(t.x) for t in tiles) == 4 and {t.text[0] for t in tiles} == {"A", "–"}
    assert "GB/s" in figure.layout.xaxis.title.text and "batch" in figure.layout.yaxis.title.text


@pytest.mark.parametrize(("model", "mesh"), [("gpt2-xl", "16"), pytest.param("vit-large", "", marks=pytest.mark.slow)])
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
