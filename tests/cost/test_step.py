"""The price of the finished plan is the total of the network that chose it, for every zoo model and mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner_core.cost.communication.collectives import collective_time, wire_bytes
from planner_core.cost.schedule.exposed import exposed_parts
from planner_core.cost.step import price
from planner_core.cost.step_messages import plan_messages
from planner_core.cost.step_time import Component, Shares
from planner_core.cost.units import Buckets, is_small
from planner_core.models.zoo import ZOO
from planner_core.planning.analysis.unfolded_network import unfold_problem
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner
from planner_core.planning.request import Request
from planner_core.search.extract_plan import make_block_plans
from planner_core.search.lagrangian import make_objective, search_within_budget
from planner_core.search.network.folded import Problem
from tests.support.solvers import evaluate

TOLERANCE = 1e-4
"""Local moves cost a tenth of a nanosecond each in the network, so that the shorter of two free ways wins; plans do not count them."""


def planned(name: str, mesh: str, **options: object) -> tuple[Planner, Problem]:
    planner = prepare_planner(Request(name, cluster="2x8-h100", mesh=mesh, **options))  # type: ignore[arg-type]
    return planner, planner.problem(candidate_meshes(planner.request, planner.cluster)[0])


def assert_price_is_total(planner: Planner, problem: Problem, budget: float, objective: str = "time") -> None:
    answer = search_within_budget(problem, objective=objective, budget=budget)
    if answer.assignment is None:
        answer = search_within_budget(problem, objective=objective)
    assert answer.assignment is not None
    cost = price(make_block_plans(problem, answer.assignment), planner.graph, problem.model)
    assert cost.step_time_s == pytest.approx(answer.assignment.step_time_s, rel=TOLERANCE)
    assert cost.comm_time_s == pytest.approx(answer.assignment.totals[Component.COMMUNICATION], rel=TOLERANCE, abs=1e-6)


@pytest.mark.parametrize("mesh", ["16", "2x8", "4x4", "8x2"])
@pytest.mark.parametrize("name", ZOO)
def test_price_is_the_total_of_the_network(name: str, mesh: str) -> None:
    planner, problem = planned(name, mesh)
    assert_price_is_total(planner, problem, planner.budget)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b"])
def test_price_is_the_total_with_other_options(name: str, objective: str, recompute: str) -> None:
    planner, problem = planned(name, "2x8", layers=6, recompute=recompute, zero=0, batch=32)
    assert_price_is_total(planner, problem, float("inf"), objective)


def test_price_is_the_total_where_a_gradient_is_cut_before_it_is_scattered() -> None:
    """25 heads do not split over 32 ranks, so both ranks of the other axis make a gradient whole. Its way to a term of a sum, R to S to P,
    divides nothing, and where the network counted a division a bound was 1.2 % above the plan that it is of."""
    request = Request(
        "gpt2-xl", cluster="8x8-h100:inter=50", mesh="2x32", layers=4, batch=64, seq=512, recompute="full"
    )
    planner = prepare_planner(request)
    problem = planner.problem(candidate_meshes(request, planner.cluster)[0])
    answer = search_within_budget(problem, objective="time", budget=planner.budget)
    assert answer.assignment is not None
    blocks = make_block_plans(problem, answer.assignment)
    edges = [e for b in blocks.values() for site in b.sites.values() for e in site.inputs]
    ways = [[(s.axis, str(s.src), str(s.dst)) for s in e.backward] for e in edges]
    assert any((0, "R", "S(0)") in way and (0, "S(0)", "P") in way for way in ways), (
        "no gradient takes this way any more"
    )
    assert_price_is_total(planner, problem, planner.budget)


@pytest.mark.parametrize("recompute", ["none", "keep-attention"])
def test_price_is_the_total_where_attention_exchanges_queries(recompute: str) -> None:
    planner, problem = planned("llama-3-8b", "2x8", batch=1, seq=131072, recompute=recompute)
    assert_price_is_total(planner, problem, float("inf"))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_price_is_the_total_of_mixed_plans(share: float) -> None:
    """Under a budget some copies of a block run one way and the rest another."""
    planner, problem = planned("mixtral-8x7b", "2x8", layers=8)
    least, most = search_within_budget(problem, budget=1.0).least_memory, search_within_budget(problem).least_memory
    assert_price_is_total(planner, problem, least + share * (most - least))


def test_messages_add_up_to_the_cost() -> None:
    planner, problem = planned("llama-3-8b", "2x8")
    answer = search_within_budget(problem)
    assert answer.assignment is not None
    blocks = make_block_plans(problem, answer.assignment)
    cost = price(blocks, planner.graph, problem.model)
    found = list(plan_messages(blocks, planner.graph, problem.model))
    seconds = sum(m.count * collective_time(m.kind, m.num_bytes, problem.model.link(m.axes), m.share)[0] for m in found)
    assert cost.comm_time_s == pytest.approx(seconds)
    assert sum(t.count for t in cost.traffic) == sum(m.count for m in found)
    assert sum(t.num_bytes for t in cost.traffic) == sum(m.count * m.num_bytes for m in found)
    wire = sum(m.count * wire_bytes(m.kind, m.num_bytes, problem.model.link(m.axes).size) for m in found)
    assert sum(t.wire_bytes for t in cost.traffic) == wire
    assert cost.step_time_s == pytest.approx(cost.compute_time_s + cost.optimizer_time_s + cost.exposed_comm_time_s)
    assert cost.exposed_comm_time_s <= cost.comm_time_s


def test_what_shows_adds_up_and_grows_with_contention() -> None:
    planner, problem = planned("gpt2-xl", "16")
    answer = search_within_budget(problem)
    assert answer.assignment is not None
    blocks = make_block_plans(problem, answer.assignment)
    before = -1.0
    for contention in (0.0, 0.13, 0.5, 1.0):
        model = replace(problem.model, contention=contention)
        cost = price(blocks, planner.graph, model)
        parts = exposed_parts(blocks, planner.graph, model)
        assert sum(e.seconds for e in parts) == pytest.approx(cost.exposed_comm_time_s)
        assert before < cost.exposed_comm_time_s
        before = cost.exposed_comm_time_s


def test_the_assignment_costs_its_total_in_the_unfolded_network() -> None:
    """State by state: what the search hands to the plan is the solution whose cost it claims."""
    _, problem = planned("llama-3-8b", "2x8", layers=2)
    a = search_within_budget(problem).assignment
    assert a is not None
    objective = replace(make_objective(problem, "time"), fixed_shares=Shares())
    net = unfold_problem(problem, objective, a)
    at: dict[str, int] = {}

    def note(name: str, s: int) -> None:
        assert at.setdefault(name, s) == s, f"{name} is in two states"

    for v, s in a.top.items():
        note(v, s)
    for number, (call, mine) in enumerate(zip(problem.coarse.graph.calls(), a.copies, strict=True)):
        compiled, block = problem.blocks[call.block][mine.variant], problem.coarse.graph.blocks[call.block]
        pairs = zip((*block.inputs, *block.outputs), (*call.inputs, *call.outputs), strict=True)
        outer = {f"t{i}": f"t{o}" for i, o in pairs if f"t{i}" in compiled.net.sizes}
        for v, s in mine.states.items():
            note(outer.get(v, f"{number}:{call.prefix}:{v}"), s)
    assert evaluate(net, at) == pytest.approx(float(objective.weights() @ a.totals), rel=1e-9)


def test_the_shares_of_the_weights_in_one_message_add_up_to_it() -> None:
    """Those of a block do, and so do the small ones of the top block, whose gradients travel together."""
    graph = prepare_planner(Request("gpt2-xl")).graph
    for block in (graph.top, *graph.blocks.values()):
        buckets = Buckets.of_block(block)
        own = [i for i, v in enumerate(block.values) if v.kind == "parameter" and v.grad and i not in block.inputs]
        small = [i for i in own if is_small(block, i)]
        assert sum(map(buckets.share, small if block is graph.top else own)) == pytest.approx(1.0)
        assert all(buckets.share(i) == 1.0 for i in range(len(block.values)) if i not in own)
