"""How long a GPU waits for the host that issues its kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import planner_core as shardscope
from planner_core.core import NoteKind, Pipeline, Plan, StageCost, Term
from planner_core.cost import seconds_waited_for_host, simulated_pipeline
from planner_core.cost.schedule.pipeline.timing import schedule_seconds
from planner_core.exporters import export_text
from planner_core.models import load_plan_graph
from planner_core.planning import Request
from planner_core.planning.analysis.legend import exposed_and_bubble, step_proof
from planner_core.planning.analysis.reporting import plan_report, text
from planner_core.planning.fitting.host_waits import note_host_wait, note_unknown_host
from planner_core.planning.pricing import split_pipeline_step
from tests.support.plans import planned, searched


def priced(model: str, **options: object) -> Plan:
    found = shardscope.price(model, cluster="1x8-h100:gpus=1", layout="dp=1", advise=False, **options)
    assert found.plan is not None
    return found.plan


def test_the_gpu_waits_only_where_the_host_is_slower() -> None:
    assert seconds_waited_for_host([(4.0, 1.0), (8.0, 2.0)]) == 0
    assert seconds_waited_for_host([(1.0, 4.0), (2.0, 8.0)]) == 12.0 - 3.0
    # forward puts the host 3 s ahead, which backward uses up: 3 + 4 seconds of work, and the host is done after 1 + 5
    assert seconds_waited_for_host([(4.0, 1.0), (3.0, 5.0)]) == 0


@pytest.mark.parametrize("work", [[(4.0, 1.0), (3.0, 5.0)], [(1.0, 3.0), (2.0, 1.0)], [(1.0, 4.0), (6.0, 2.0)]])
@pytest.mark.parametrize("times", [1, 2, 7])
@pytest.mark.parametrize("last", [(0.0, 0.0), (1.0, 9.0), (9.0, 1.0)])
def test_repeated_phases_wait_as_one_after_the_other(
    work: list[tuple[float, float]], times: int, last: tuple[float, float]
) -> None:
    """The closed form is that of a walk through all phases, which took a minute for 10^8 micro-batches."""
    issued = ended = 0.0
    for gpu, host in [*work * times, last]:
        ended = max(max(ended, issued) + gpu, issued + host)
        issued += host
    gpu_s = times * sum(gpu for gpu, _ in work) + last[0]
    assert seconds_waited_for_host(work, times, last) == pytest.approx(ended - gpu_s, abs=1e-12)
    # a late start is not made good: backward begins when forward is issued, after 4 s
    assert seconds_waited_for_host([(1.0, 4.0), (3.0, 1.0)]) == 7.0 - 4.0


def test_short_kernels_wait_and_long_ones_do_not() -> None:
    few, many = (priced("vit-large", micro_batch=n) for n in (8, 256))
    assert few.cost.host_wait_s > 0.5 * few.cost.step_time_s
    assert many.cost.host_wait_s == 0
    parts = few.cost.compute_time_s + few.cost.optimizer_time_s + few.cost.outside_time_s
    assert few.cost.step_time_s == pytest.approx(parts)  # the wait is in compute
    one, two = (priced("vit-large", micro_batch=n) for n in (1, 2))
    assert one.cost.step_time_s == pytest.approx(two.cost.step_time_s)  # both take what the host takes


def test_a_plan_and_a_price_of_its_layout_have_one_step() -> None:
    plan = searched(Request("vit-large", cluster="1x8-h100:gpus=1", batch=8, layers=4))
    stated = priced("vit-large", micro_batch=8, layers=4)
    assert plan.cost.host_wait_s > 0
    assert plan.cost.step_time_s == pytest.approx(stated.cost.step_time_s, rel=1e-12)
    assert plan.cost.gpu_time_s == pytest.approx(plan.cost.step_time_s - plan.cost.host_wait_s)


def test_the_shortest_step_leads_and_a_note_bounds_what_is_left() -> None:
    """ViT-large fully sharded keeps 16 GPUs busy for less time, and their hosts for longer, than data parallel does."""
    result = planned(Request("vit-large", cluster="2x8-h100", layers=4))
    best, fsdp = result.best, next(p for p in result.plans if p.name == "FSDP")
    assert fsdp.cost.gpu_time_s < best.cost.gpu_time_s and fsdp.cost.step_time_s > best.cost.step_time_s
    assert best.cost.step_time_s == min(p.cost.step_time_s for p in result.plans if p.fits)
    assert (
        not best.optimal
        and best.bound is not None
        and best.bound <= 1.0001 * min(p.cost.gpu_time_s for p in result.plans)
    )
    (note,) = [n for n in map(str, result.notes) if "waits for its host" in n]
    assert f"no such plan's step is shorter than {1e3 * best.bound:.4g} ms" in note
    assert note.endswith("larger micro-batches wait less, and compiled may")
    compiled = replace(best, workload=replace(best.workload, compiled=True))  # to compile was advised to who compiles
    assert str(*note_host_wait(compiled)).endswith("larger micro-batches wait less")


def test_a_plan_that_waits_has_its_gap_and_each_row_the_answer_of_its_own_space() -> None:
    """The only plan of data parallelism's space is the least of it, and as the best plan of all it is not proven. `compare` said of
    Alpa-like's plan that it is not proven, since best is the same, where `plan --method alpa` and Python said that it is."""
    result = planned(Request("vit-large", cluster="2x8-h100", layers=4))
    best, same = result.best, next(p for p in result.plans if p.name == "data parallel")
    assert best.bound and same.blocks == best.blocks and same.optimal and not best.optimal
    (gap,) = [n.sentence for n in best.notes if n.kind is NoteKind.GAP]
    above = 100 * (best.cost.step_time_s / best.bound - 1)
    words = re.fullmatch(
        r"not proven: at most ([\d.]+) % above the bound, which leaves out waits for the host", str(gap)
    )
    assert words and float(words[1]) == pytest.approx(above, rel=0.05)
    alpa = replace(same, name="Alpa-like", method="alpa", objective="communication")
    compared = replace(result, plans=(*result.plans, alpa))
    shown = {line.split("  ")[0]: line for line in text(compared).splitlines() if line}
    for plan, mark in ((best, "no"), (same, "but for waits"), (alpa, "yes")):
        assert shown[plan.name].split("  ")[-1].strip() == step_proof(plan) == mark
    assert any(line.startswith("but for waits: ") for line in shown)
    reported = {p["name"]: p["optimal"] for p in plan_report(compared)["plans"]}
    assert reported == {p.name: p.is_step_proven for p in compared.plans}
    assert reported["Alpa-like"] and not reported["best"] and not reported["data parallel"]


def test_the_host_of_a_rank_runs_ahead_in_a_bubble() -> None:
    """Two stages, forward 1 s and backward 2 s, 2 micro-batches in 1f1b: F F B B behind F B F B, 9 s of which each works 6."""
    one = StageCost(1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    cut = Pipeline(2, "1f1b", (1, 1))
    assert simulated_pipeline(cut, [one] * 2, 2).step_s == 9
    quick = replace(one, host_forward_s=1.0, host_backward_s=1.0)  # a pass is issued while the one before runs
    assert simulated_pipeline(cut, [quick] * 2, 2).step_s == 9
    late = replace(one, host_forward_s=4.0, host_backward_s=1.0)
    # rank 0 issues F0 until 4, F1 until 8; rank 1 F0 until 4 and B0 until 5, F1 until 9 and B1 until 10. Its last backward waits for F1,
    # which ends with its last kernel: 9, then 11. Rank 0 follows: 13.
    assert simulated_pipeline(cut, [late] * 2, 2).step_s == 13


def test_a_plan_with_stages_waits_too_and_keeps_its_hosts_in_its_file(tmp_path: Path) -> None:
    found = shardscope.price(
        "gpt2-xl", cluster="1x8-h100:gpus=2", layout="pp=2", micro_batch=1, accumulate=4, layers=8, advise=False
    )
    plan = found.plan
    assert plan is not None and plan.pipeline and plan.cost.pipeline is not None and plan.cost.host_wait_s > 0
    assert all(stage.host_forward_s > 0 for stage in plan.cost.pipeline.stages)
    # No second is in both the bubble and the wait: the bubble is that of hosts that are always ahead, and the table shows it.
    stages = [replace(s, host_forward_s=0.0, host_backward_s=0.0, host_step_s=0.0) for s in plan.cost.pipeline.stages]
    ahead = schedule_seconds(plan.pipeline, stages, 4)
    assert (
        ahead[0] == pytest.approx(plan.cost.step_time_s - plan.cost.host_wait_s)
        and plan.cost.pipeline.bubble_s in ahead[1]
    )
    assert exposed_and_bubble(plan)[1] == plan.cost.pipeline.bubble_s > 0
    assert sum(split_pipeline_step(plan).values()) == pytest.approx(plan.cost.step_time_s, rel=1e-12)
    shardscope.save_plan(plan, tmp_path / "plan.json")
    assert shardscope.load_plan(tmp_path / "plan.json").cost.pipeline == plan.cost.pipeline


def test_only_a_stack_whose_calls_are_known_waits() -> None:
    assert priced("vit-large", micro_batch=8, stack="torchtitan").cost.host_wait_s == 0


def test_the_wait_is_kept_in_a_plans_file(tmp_path: object) -> None:
    plan = priced("vit-large", micro_batch=8)
    file = f"{tmp_path}/plan.json"
    shardscope.save_plan(plan, file)
    assert shardscope.load_plan(file).cost == replace(plan.cost, traffic=shardscope.load_plan(file).cost.traffic)


def test_a_price_says_where_a_host_of_unknown_pace_may_be_slower_than_the_step() -> None:
    """torchtitan's ViT-large was 46 ms, where PyTorch's own stack takes 157 ms, without a word."""

    def needs(model: str, stack: str, layout: str = "fsdp=16", **options: object) -> float | None:
        """Return the seconds that the host is said to need; None if nothing is said."""
        options |= {"cluster": "2x8-h100", "advise": False}
        plan = shardscope.price(model, layout=layout, stack=stack, **options).plan
        assert plan is not None
        notes = note_unknown_host(plan, load_plan_graph(plan))
        assert all(note.kind is NoteKind.UNKNOWN_HOST for note in notes)
        seconds = [term.value for note in notes for term in note.sentence.parts if isinstance(term, Term)]
        return float(seconds[-1]) if seconds else None

    priced = partial(shardscope.price, "vit-large", layout="fsdp=16", cluster="2x8-h100", advise=False)
    known = priced().plan
    assert known is not None and known.cost.host_wait_s > 0
    assert needs("vit-large", "torchtitan") == pytest.approx(known.cost.step_time_s, rel=0.02)
    assert any("was not measured" in note for note in priced(stack="torchtitan").notes)
    assert needs("vit-large", "torch") is None
    assert needs("llama-3-8b", "torchtitan") is None  # its kernels are long
    # Each of four hosts issues its own stage: a quarter of what the host of a whole model does.
    staged, whole = (needs("t5-large", "torchtitan", f"{of},tp=2", accumulate=8) for of in ("dp=2,pp=4", "dp=8"))
    assert staged == pytest.approx(whole / 4, rel=0.02)


def test_an_export_says_that_its_tools_host_is_not_in_its_price() -> None:
    plan = shardscope.price("t5-large", cluster="1x8-h100", layout="fsdp=8", advise=False).plan
    assert plan is not None and plan.cost.host_wait_s > 0
    exported = export_text(plan, "torchtitan")
    assert exported.nearest is not None and exported.nearest.step_time_s < plan.cost.step_time_s / 2
    assert any("how fast a host issues the kernels of torchtitan was not measured" in r for r in exported.remarks)
