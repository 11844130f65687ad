"""Plans of the shortest step, where the GPU waits for its host."""

import pytest

from planner_core.planning import Request
from planner_core.planning.fitting import host_waits
from planner_core.planning.methods import Layout, unsearchable_faults
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.request import Progress
from tests.support.plans import search_alone


def count_estimates(request: Request, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Search a request; return the layouts that were bounded, and those of which a network was solved."""
    bounded: list[str] = []
    estimated: list[str] = []
    bound, estimate = host_waits._LayoutBounds.seconds, host_waits._estimate_layout_s

    def bound_one(self: host_waits._LayoutBounds, layout: Layout) -> float:
        bounded.append(str(layout))
        return bound(self, layout)

    def estimate_one(planner: Planner, report_progress: Progress, layout: Layout, **budget: float) -> float:
        estimated.append(str(layout))
        return estimate(planner, report_progress, layout, **budget)

    monkeypatch.setattr(host_waits._LayoutBounds, "seconds", bound_one)
    monkeypatch.setattr(host_waits, "_estimate_layout_s", estimate_one)
    search_alone(request)
    return bounded, estimated


@pytest.mark.parametrize(
    "request_",
    [
        Request("bert-large", cluster="1x4-a100-pcie", batch=4, recompute="auto"),
        Request("gpt2-xl", cluster="2x2-h100", batch=8, accumulate=2, zero=1),
        Request("llama-3-8b", cluster="2x2-h100", batch=2, seq=1024, recompute="auto"),
        Request("mixtral-8x7b", cluster="1x8-h100", batch=8, seq=256, layers=2),
        Request("t5-large", cluster="2x2-h100", batch=2, compiled=True),
    ],
    ids=lambda r: r.model,
)
@pytest.mark.slow(only=("t5-large", "mixtral-8x7b"))
def test_no_layout_is_estimated_below_its_bound(request_: Request) -> None:
    """A bound above an estimate would leave out the layout of the shortest step."""
    planner = prepare_planner(request_)
    bounds = host_waits._LayoutBounds(planner)
    layouts = [x for x in host_waits._list_admitted_layouts(planner) if not unsearchable_faults(planner.graph, x)]
    pairs = [(bounds.seconds(x), host_waits._estimate_layout_s(planner, lambda _: None, x)) for x in layouts]
    assert all(bound <= estimate for bound, estimate in pairs)
    # Bounds that are far below would exclude nothing.
    finite = [bound / estimate for bound, estimate in pairs if estimate < float("inf")]
    assert finite and max(finite) > 0.7


def test_bounds_leave_one_of_many_layouts_to_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layout's network was built and solved: 39 for BERT-large, of which plain data parallelism alone is the quickest."""
    bounded, estimated = count_estimates(Request("bert-large", cluster="2x8-h100", batch=16), monkeypatch)
    assert len(bounded) > 30
    assert set(estimated) == {"dp=16"}
