"""Products in chunks: their price by hand, in the search and in the plan; and that they are chosen only where they gain."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner_core.core import (
    Edge,
    InputError,
    Op,
    P,
    Plan,
    R,
    Shard,
    SitePlan,
    Step,
    Workload,
    plan_from_json,
    plan_to_json,
)
from planner_core.cost import can_run_in_chunks, chunk_waits, cost_model_of, price, waited_message_seconds
from planner_core.cost.compute import kernel_seconds
from planner_core.cost.resolved_ops import block_of, rows_at
from planner_core.cost.step import site_time
from planner_core.cost.step_messages import result_messages
from planner_core.exporters import export_text
from planner_core.models import load_plan_graph
from planner_core.planning.pipeline import Result
from planner_core.planning.request import Request
from planner_core.verification.static import check_rules
from tests.support.plans import planned, searched

SLOW = Request("llama-3-8b", cluster="1x8-h100:intra=150", batch=2, seq=4096, mesh="2x4", layers=2)
"""Over links of 150 GB/s a sum takes about as long as the product that it can hide behind."""


@cache
def found(chunks: int) -> Result:
    return planned(replace(SLOW, chunks=chunks))


def cut(plan: Plan) -> list[tuple[str, str, Edge]]:
    """The results that are made in chunks: label of the block, operator, edge."""
    return [
        (label, name, edge)
        for label, b in plan.blocks.items()
        for name, site in b.sites.items()
        for edge in site.outputs
        if edge.chunks > 1
    ]


def site_of(plan: Plan) -> tuple[Op, SitePlan, str]:
    label, name, _ = cut(plan)[0]
    block = block_of(load_plan_graph(plan), label)
    return next(op for op in block.ops if op.name == name), plan.blocks[label].sites[name], label


def test_waits_by_hand() -> None:
    """Four chunks of 2 ms, each sent in 3 ms: three times 1 ms is waited for, and contention on what hides; then the last 3 ms."""
    assert chunk_waits(3.0, 2.0, 4, 0.1) == pytest.approx(3 * (1 + 0.2) + 3)
    assert chunk_waits(1.0, 2.0, 4, 0.0) == pytest.approx(1.0)
    assert chunk_waits(1.0, 0.0, 4, 0.0) == pytest.approx(4.0)


def test_the_fastest_plan_sums_in_chunks_where_links_are_slow() -> None:
    once, parts = found(1).best, found(4).best
    assert not cut(once) and [name for _, name, _ in cut(parts)] == ["mlp.down_proj/linear"]
    assert parts.optimal and parts.cost.gpu_time_s < once.cost.gpu_time_s
    assert once.chunks == 1 and parts.chunks == 4


def test_the_price_of_a_result_by_hand() -> None:
    plan = found(4).best
    op, site, label = site_of(plan)
    graph, model = load_plan_graph(plan), cost_model_of(plan)
    block = block_of(graph, label)
    messages = [m for m in result_messages(block, op, site, None, model) if m.phase == "forward"]
    assert [m.count for m in messages] == [3, 1]
    whole = replace(site, outputs=(replace(site.outputs[0], chunks=1),))
    (at_once,) = [m for m in result_messages(block, op, whole, None, model) if m.phase == "forward"]
    assert {4 * m.num_bytes for m in messages} == {at_once.num_bytes}
    each = waited_message_seconds(messages[1], model)
    kernel = kernel_seconds(op, block.values, rows_at(block, op, site), model, 4)[0] / 4
    hidden = min(each, kernel) * (1 - model.contention)
    assert sum(waited_message_seconds(m, model) for m in messages) == pytest.approx(3 * (each - hidden) + each)
    # Four small products, then joined.
    assert site_time(block, op, site, model)[0] > site_time(block, op, whole, model)[0]


def test_the_plan_is_the_sum_of_the_search() -> None:
    """The plan that is read and priced operator by operator takes as long as the search says, with recomputation too."""
    for recompute in ("none", "full", "selective"):
        plan = searched(replace(SLOW, chunks=4, recompute=recompute)) if recompute != "none" else found(4).best
        assert price(plan.blocks, load_plan_graph(plan), cost_model_of(plan)).step_time_s == pytest.approx(
            plan.cost.gpu_time_s, rel=1e-9
        )
        assert plan.optimal  # the value of the search is the bound that it proves


@pytest.mark.parametrize("cluster", ["1x8-h100", "1x4-a100-pcie", "2x8-v100-eth", "1x8-h100:intra=50"])
@pytest.mark.parametrize("chunks", [2, 8])
@pytest.mark.slow(but=("8-2x8-v100-eth",))
def test_to_allow_chunks_never_makes_a_step_longer(cluster: str, chunks: int) -> None:
    request = Request("llama-3-8b", cluster=cluster, batch=4, seq=1024, layers=1)
    at_once, in_parts = searched(request), searched(replace(request, chunks=chunks))
    assert in_parts.cost.gpu_time_s <= at_once.cost.gpu_time_s * (1 + 1e-9)


def test_baselines_run_as_tools_do() -> None:
    one, other = ({p.name: p.cost for p in found(n).plans if p.method not in ("exact", "")} for n in (1, 4))
    shared = [name for name in one if name in other and "trade-off" not in name and name != "best"]
    assert len(shared) > 2 and all(one[name] == other[name] for name in shared)


def test_what_cannot_be_cut() -> None:
    graph = found(4).graph
    block = next(iter(graph.blocks.values()))
    down = next(op for op in block.ops if op.name == "mlp.down_proj/linear")
    state = site_of(found(4).best)[1].outputs[0]
    assert can_run_in_chunks(block, down, state, (2, 4), 4)
    assert not can_run_in_chunks(block, down, state, (2, 1), 4)  # nothing is summed over one rank
    assert not can_run_in_chunks(block, down, state, (2, 4), 3)  # 4096 features are not three parts
    assert not can_run_in_chunks(block, down, replace(state, segments={2: (1, 1)}), (2, 4), 4)
    last = Step(1, P, Shard(2))
    assert not can_run_in_chunks(block, down, replace(state, forward=(last,)), (2, 4), 4)
    assert not can_run_in_chunks(block, down, replace(state, forward=(Step(0, P, R), last)), (2, 4), 4)
    scale = next(op for op in block.ops if op.fn == "mul")
    assert not can_run_in_chunks(block, scale, state, (2, 4), 4)


def test_a_file_keeps_chunks_and_an_impossible_one_is_found() -> None:
    plan = found(4).best
    data = plan_to_json(plan)
    assert plan_from_json(data) == plan
    assert check_rules(plan, load_plan_graph(plan)) == []
    label = cut(plan)[0][0]
    data["blocks"][label]["sites"]["mlp.up_proj/linear"][1][0].append(4)
    (said,) = check_rules(plan_from_json(data), load_plan_graph(plan))
    assert "up_proj" in said and "in 4 parts" in said


def test_other_tools_are_told_that_they_make_products_at_once() -> None:
    plan = found(4).best
    remarks = [export_text(plan, target).remarks for target in ("json", "torchrun")]
    assert not any("chunks" in r for found in remarks for r in found)
    try:
        told = " ".join(export_text(plan, "megatron").remarks)
    except InputError as error:
        told = str(error)
    assert "at once" in told or "nearest" in told


def test_a_number_of_chunks_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="chunks=3 is not one of 1, 2, 4, 8"):
        Workload(8, 16, chunks=3).check()


def test_atp_says_what_its_chunks_would_gain() -> None:
    request = Request("llama-3-8b", cluster="1x8-h100", mesh="2x4", layers=2, method="atp", precision="pure")
    note = next(note for note in map(str, searched(request).notes) if "chunks" in note)
    n = int(note.split("chunks=")[1][0])
    said = [float(part.split()[-1]) for part in note.split(" ms")[:2]]
    with_chunks = searched(replace(request, chunks=n)).cost.gpu_time_s
    assert 1e3 * with_chunks == pytest.approx(said[0], rel=2e-3) and said[0] < said[1]
