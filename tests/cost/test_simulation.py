"""The simulated step: the schedule that a run follows, with seconds, beside the form that the search minimises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner_core.core import DeviceMesh, Plan
from planner_core.cost import simulated
from planner_core.cost.schedule.events import Stage, Unit
from planner_core.cost.schedule.simulation import _Clock
from planner_core.planning import Request, Result
from tests.support.plans import planned

MS = 1e-3


class Clock(_Clock):
    """Units that compute as long, and stages that send as long, as the test says."""

    def __init__(self, contention: float, forward_s: float, backward_s: float) -> None:
        super(_Clock, self).__init__()
        self.now = self.free = 0.0
        self.ends, self.sending = {}, []  # type: ignore[assignment]
        self.seconds = {"forward": forward_s, "backward": backward_s}
        self.contention = contention

    def _alone(self, unit: Unit, phase: str) -> float:
        return self.seconds[phase]

    def _sends(self, stage: Stage) -> float:
        return stage.num_bytes * MS


def gather(milliseconds: int) -> tuple[Stage, ...]:
    return (Stage("all_gather", 0, milliseconds),)


def scatter(milliseconds: int) -> tuple[Stage, ...]:
    return (Stage("reduce_scatter", 0, milliseconds),)


def test_the_worked_example() -> None:
    """The first gather delays, the second hides and slows: 4 + 10.4 + 10 ms, written down as 1 / (1 - k) of what runs beside it."""
    clock = Clock(0.1, 10 * MS, 0.0)
    clock.forward([Unit("a"), Unit("b")], [[gather(4)], [gather(4)]])
    assert clock.now == pytest.approx(24.4 * MS)


def test_traffic_that_lasts_longer_than_compute_is_waited_for() -> None:
    clock = Clock(0.1, 10 * MS, 0.0)
    clock.forward([Unit("a"), Unit("b")], [[gather(4)], [gather(30)]])
    assert clock.now == pytest.approx((4 + 30 + 10) * MS)


def test_reductions_run_beside_the_unit_before_and_the_last_is_waited_for() -> None:
    clock = Clock(0.1, 0.0, 10 * MS)
    clock.backward([Unit("a"), Unit("b"), Unit("c")], [[scatter(5)]] * 3)
    assert clock.now == pytest.approx((10 + 10.5 + 10.5 + 5) * MS)


def test_stages_of_a_gather_over_two_axes_come_one_after_the_other_and_only_the_last_hides() -> None:
    clock = Clock(0.1, 10 * MS, 0.0)
    two = (Stage("all_gather", 0, 3), Stage("all_gather", 1, 2))
    clock.forward([Unit("a"), Unit("b")], [[two], [two]])
    assert clock.now == pytest.approx((3 + 2 + 3 + 10.2 + 10) * MS)


CASES = {
    "llama": Request("llama-3-8b", layers=4),
    "bert": Request("bert-large"),
    "accumulating": Request("llama-3-8b", layers=4, batch=256, accumulate=4, recompute="full"),
    "t5": Request("t5-large", cluster="1x8-h100", layers=2),
}


@pytest.fixture(scope="module", params=CASES)
def result(request: pytest.FixtureRequest) -> Result:
    return planned(CASES[request.param])


def one_way(plan: Plan) -> bool:
    """Whether no weight is gathered over two axes at once, whose first gather a run waits for."""
    forms = [p for b in plan.blocks.values() for p in b.params.values()]
    return not any(len(p.gathered) > 1 for p in forms)


def test_the_form_of_the_search_is_close(result: Result) -> None:
    for plan in result.plans:
        apart = simulated(plan, result.graph) / plan.cost.step_time_s - 1
        assert not one_way(plan) or -0.02 < apart < 0.03, (plan.name, apart)


def test_no_step_is_shorter_than_its_compute_or_longer_than_all_work_one_after_the_other(result: Result) -> None:
    for plan in result.plans:
        c, seconds = plan.cost, simulated(plan, result.graph)
        assert c.compute_time_s + c.optimizer_time_s < seconds
        assert seconds < (c.compute_time_s + c.optimizer_time_s + c.comm_time_s) * 1.001


def test_micro_batches_between_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight micro-batches, four of them simulated, take as long as eight that are all simulated."""
    found = planned(Request("llama-3-8b", layers=2, batch=128, accumulate=8, recompute="full"))
    short = {p.name: simulated(p, found.graph) for p in found.plans}
    monkeypatch.setattr("planner_core.cost.schedule.simulation.STEADY", 8)
    assert short == pytest.approx({p.name: simulated(p, found.graph) for p in found.plans}, rel=1e-9)


def test_faster_links_shorten_the_simulated_step() -> None:
    found = planned(Request("llama-3-8b", layers=4))
    plan = next(p for p in found.plans if p.name == "FSDP")
    fast = found.cluster.with_bandwidth(2.0)
    assert simulated(replace(plan, cluster=fast.to_json()), found.graph) < simulated(plan, found.graph)
    assert isinstance(plan.mesh, DeviceMesh)
