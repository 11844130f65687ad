"""What an engineer would expect of the chosen plan (issue 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import planner_core as shardscope
from planner_core.core import DeviceMesh, NoPlanFits, NoteKind, PipelineAxis, Plan, placements_by_pattern
from planner_core.cost import cost_model_of, price, price_with_host, step
from planner_core.cost.memory import peak_memory
from planner_core.models.zoo import ZOO
from planner_core.planning import choose_mesh
from planner_core.planning import request as request_module
from planner_core.planning.derived import comparison
from planner_core.planning.derived.comparison import compare_methods
from planner_core.planning.fitting import host_waits, mesh_search
from planner_core.planning.methods import parse_layout
from planner_core.planning.pipeline import plan_model
from planner_core.planning.planner import STATED, Planner, candidate_meshes, prepare_planner
from planner_core.planning.request import Clock, Request
from planner_core.search import search_within_budget
from planner_core.search.budget import memory_fit
from planner_core.search.network import Problem
from tests.support.plans import planned, search_alone, searched, with_ample_memory


def split(plan: Plan, part: str) -> dict[str, list[str]]:
    """Weights whose name holds `part` and which are sharded."""
    return {n: p for n, p in placements_by_pattern(plan).items() if part in n and any(x.startswith("S") for x in p)}


@pytest.mark.parametrize("name", ["gpt2-xl", "bert-large", "vit-large", "t5-large"])
@pytest.mark.slow(but=("gpt2-xl", "vit-large"))
def test_ample_memory_and_a_large_batch_give_data_parallel(name: str) -> None:
    """Within the model's own error (a few per cent) of pure data parallelism, and every matrix of a block is kept whole."""
    best = search_alone(
        Request(
            name,
            cluster=with_ample_memory("1x8-h200"),
            batch=4096 if name != "vit-large" else 8192,
            memory_gb=100000.0,
            zero=0,
        )
    )
    assert split(best, "layer") == {} and split(best, ".h.") == {} and split(best, "block") == {}


def test_tight_memory_is_kept_at_a_price() -> None:
    asked = Request("llama-3-8b", cluster="1x8-h100", batch=8, precision="pure")
    ample = search_alone(replace(asked, cluster=with_ample_memory("1x8-h100"), memory_gb=100000.0))
    tight = searched(replace(asked, memory_gb=38.5))
    assert tight.fits and tight.cost.memory_bytes["peak"] <= 38.5e9 < ample.cost.memory_bytes["peak"]
    assert tight.cost.step_time_s >= ample.cost.step_time_s


@pytest.mark.slow
def test_a_hundred_thousand_classes_are_split_and_the_backbone_is_not() -> None:
    """TAP's case: on 2x8 V100 over Ethernet the classifier is split by class, every convolution is data-parallel. TAP keeps states whole:
    where they may be sharded, those of convolutions are."""
    best = searched(Request("resnet50-100k", cluster="2x8-v100-eth", batch=1024, zero=0))
    classifier = split(best, "classifier")
    assert any("S(0)" in p for n, p in classifier.items() if n.endswith("weight"))
    convolutions = [n for n in placements_by_pattern(best) if "convolution" in n]
    assert len(convolutions) >= 10 and split(best, "convolution") == {}


@pytest.mark.slow
def test_llama_on_one_node_with_a_small_batch_is_no_worse_than_megatron() -> None:
    for batch in (1, 2, 4, 8):
        result = planned(Request("llama-3-8b", cluster="1x8-h100", batch=batch))
        megatron = [p for p in result.plans if p.method == "megatron"]
        assert megatron and result.best.cost.step_time_s <= megatron[0].cost.step_time_s * (1 + 1e-6)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "t5-large" else ()) for n in ZOO])
@pytest.mark.slow(but=("llama-3-8b", "gpt2-xl", "t5-large"))
def test_the_chosen_plan_fits_or_says_not(name: str) -> None:
    result = planned(Request(name))
    budget = result.cluster.gpu.memory_bytes
    for p in result.plans:
        assert not p.fits or p.cost.memory_bytes["peak"] <= budget, p.name
    assert result.best.fits or any(n.kind is NoteKind.SHORTAGE for n in result.best.notes)


@pytest.mark.parametrize("gb", [39.0, 41.0, 45.0, 60.0, 75.0])
@pytest.mark.slow(but=("39.0",))
def test_a_plan_under_an_explicit_budget_fits_it(gb: float) -> None:
    best = searched(Request("llama-3-8b", memory_gb=gb))
    assert best.fits and best.cost.memory_bytes["peak"] <= gb * 1e9


@pytest.mark.slow
def test_one_byte_under_a_plan_is_another_plan() -> None:
    asked = Request("llama-3-8b", cluster="1x8-h100", batch=8)
    first = searched(asked)
    peak = first.cost.memory_bytes["peak"]
    second = searched(replace(asked, memory_gb=(peak - 1) / 1e9))
    assert second.cost.memory_bytes["peak"] < peak
    assert second.cost.step_time_s >= first.cost.step_time_s * (1 - 1e-9)


def test_nothing_fits_a_thimble() -> None:
    with pytest.raises(NoPlanFits, match="least memory"):
        planned(Request("llama-3-70b", memory_gb=2.0))


@pytest.mark.parametrize("cluster", ["1x8-h100", "2x8-h100", "4x8-a100", "1x4-a100-pcie"])
@pytest.mark.slow(but=("1x4-a100-pcie",))
def test_every_factorisation_is_searched(cluster: str) -> None:
    """No single mesh is better than what is chosen when none is asked for: no step is shorter, and no plan has less work than the bound.
    Where GPUs wait for their hosts, the answer may have more work than a mesh's plan."""
    free = searched(Request("bert-large", cluster=cluster))
    n = free.mesh.num_devices
    assert free.bound is not None and free.bound <= free.cost.gpu_time_s * (1 + 1e-6)
    for text in [str(n), *(f"{a}x{n // a}" for a in range(2, n) if n % a == 0)]:
        one = searched(Request("bert-large", cluster=cluster, mesh=text))
        assert free.cost.step_time_s <= one.cost.step_time_s * (1 + 1e-6)
        assert free.bound <= one.cost.gpu_time_s * (1 + 1e-6)


@pytest.mark.parametrize(("model", "batch"), [("gpt2-xl", 2), pytest.param("bert-large", None, marks=pytest.mark.slow)])
def test_no_single_mesh_has_a_shorter_step_than_the_answer(model: str, batch: int | None) -> None:
    """The waits of the GPUs for their host, most of this step, count in what leads the answer. With two samples neither a trade-off nor a
    baseline is as short as the best plan of one axis."""
    asked = Request(model, cluster="1x8-h100", batch=batch, layers=4)
    free, *each = (plan_model(replace(asked, mesh=text)) for text in (None, "8", "2x4", "4x2"))
    shortest = min(r.best.cost.step_time_s for r in each)
    assert free.best.cost.host_wait_s > 0 and free.best.cost.step_time_s <= shortest * (1 + 1e-6)


def test_a_layout_that_fits_nowhere_is_not_taken_to_be_as_short_as_in_ample_memory() -> None:
    """Its plan of the least work was judged. So of a T5 of 2 x 1 001 layers three layouts of 8 tensor ranks seemed the most promising, and
    each was searched for 2 s under every recomputation, in vain."""
    planner = prepare_planner(Request("gpt2-xl", cluster="1x8-h100", batch=16, layers=4, recompute="auto"))
    problem = planner.problem(DeviceMesh(("data",), (8,)))
    ample, none = (host_waits._estimate_step_s(planner, problem, room) for room in (math.inf, problem.least_bytes / 2))
    assert none > ample * 1.1  # all blocks recompute, so the host issues their forward twice


def test_compare_says_what_each_restriction_costs() -> None:
    found = {p.name: p for p in compare_methods(Request("gpt2-xl", cluster="1x8-h100", layers=4)).plans}

    def step_and_sent(name: str) -> tuple[str, str]:
        cost = found[name].cost
        return f"{1e3 * cost.step_time_s:.4g} ms", f"{1e3 * cost.comm_time_s:.4g} ms"

    for name in ("TAP", "TAPS", "ATP"):
        (mine, sent), (best, of_best), (longer, least) = map(step_and_sent, (name, "best", "least communication"))
        # Each step stands beside its own communication.
        assert str(found[name].notes[1].sentence) == (
            f"a step takes {mine}, its communication {sent}; of best {best} and {of_best}; of least communication {longer} and {least}"
        )


def test_compare_plans_what_plan_plans() -> None:
    """`compare` took one micro-batch without recomputation, and said of a batch of 64 that no plan fits; `plan` has one that fits."""
    asked = {"cluster": "1x4-a100-pcie:gpus=2", "layers": 1, "batch": 64, "seq": 512, "memory_gb": 3}
    best = shardscope.plan("gpt2-xl", **asked).best
    assert best.fits and (best.workload.accumulate > 1 or best.workload.recompute != "none")
    result = shardscope.compare("gpt2-xl", **asked)
    assert (result.best.blocks, result.best.workload) == (best.blocks, best.workload)
    papers = [p for p in result.plans if p.method in ("tap", "taps", "atp", "alpa")]
    assert papers and {p.workload.accumulate for p in papers} == {best.workload.accumulate}
    assert all(p.fits for p in papers)
    told = next(n.sentence for n in result.notes if n.sentence.startswith("TAP, TAPS, ATP"))
    assert f"searched with {best.workload.accumulate} micro-batches" in told


def test_a_method_without_a_plan_in_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have a plan of every method where they have one at all, so TAP's search is made to refuse."""

    def search(planner: Planner, *args: Any, **options: Any) -> Plan:
        if planner.request.method == "tap":
            raise NoPlanFits("no plan fits: 1 GiB is missing")
        return choose_mesh(planner, *args, **options)

    monkeypatch.setattr(comparison, "choose_mesh", search)
    result = compare_methods(Request("gpt2-xl", cluster="1x8-h100", layers=1))
    rows, notes = {p.name for p in result.plans}, [str(n) for n in result.notes if "has no row" in str(n)]
    assert notes == ["TAP has no row: no plan fits: 1 GiB is missing"]
    assert "TAP" not in rows and {"TAPS", "ATP", "Alpa-like"} <= rows


def test_a_planner_that_is_changed_keeps_nothing_of_what_it_was() -> None:
    """Times of operators are shared between the networks of one planner; links, workload and layout may change them."""
    request = Request("llama-3-8b", cluster="2x8-h100", layers=2, mesh="2x8")

    def seconds(planner: Planner) -> float:
        return search_within_budget(planner.problem(candidate_meshes(planner.request, planner.cluster)[0])).bound

    slow = prepare_planner(replace(request, cluster="2x8-v100-eth", dtype="bfloat16"))
    used = prepare_planner(request)
    assert seconds(used) < seconds(slow) / 2
    assert seconds(used.changed(cluster=slow.cluster)) == seconds(slow)


def test_a_network_is_built_once_for_what_decides_it() -> None:
    """Whatever changes a price makes another network; the names of axes do not, and a second call takes the first one's."""
    planner = prepare_planner(Request("gpt2-xl", cluster="2x8-h100", layers=1, chunks=2))
    mesh = DeviceMesh(("outer", "inner"), (2, 8))
    first = planner.problem(mesh)
    assert planner.problem(mesh) is planner.problem(DeviceMesh(("data", "tensor"), (2, 8))) is first
    changes: tuple[dict[str, Any], ...] = ({"zero": 0}, {"by_volume": True}, {"usual": True})
    rank = DeviceMesh(("outer", "inner"), (2, 4))
    of_ranks = [planner.problem(planner.cost_model(rank, pipe=PipelineAxis(2, outer))) for outer in (0, 2)]
    of_stages = planner.of_space(parse_layout("dp=2,tp=8,zero=1").space())
    changed = [planner.problem(planner.cost_model(mesh, **change)) for change in changes]
    problems = [first, of_stages, planner.problem(mesh, uniform=True), *changed, *of_ranks]
    assert len({id(p) for p in problems}) == len(problems)
    assert len(planner.networks.tables) == len(problems) - 1, "equal copies are a restriction of the same network"
    assert len(planner.networks.runs) == 5, "ZeRO changes no block"


def test_the_memory_of_a_plan_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search walked it to see whether the plan fits, and its price walked it again."""
    planner = prepare_planner(Request("gpt2-xl", cluster="1x8-h100", layers=2, memory_gb=6))
    (mesh,) = (m for m in candidate_meshes(planner.request, planner.cluster) if len(m.axis_sizes) == 1)
    walked: list[int] = []

    def counted(*args: Any) -> dict[str, int]:
        walked.append(1)
        return peak_memory(*args)

    monkeypatch.setattr(memory_fit, "peak_memory", counted)
    monkeypatch.setattr(step, "peak_memory", counted)
    problem = planner.problem(mesh)
    answer = planner.solve(problem, "time")
    before = len(walked)
    plan = planner.plan(problem, answer, "best", "exact", "time")
    assert before and len(walked) == before
    assert plan.cost.memory_bytes == price(plan.blocks, planner.graph, cost_model_of(plan)).memory_bytes


def test_three_axes_hold_what_teams_run_on_them() -> None:
    """Replicate × shard × tensor: the search is never worse than HSDP with tensor parallelism, and takes seconds."""
    request = Request("llama-3-8b", cluster="2x8-h100", mesh="2x2x4", layers=2, layout="dp=2,fsdp=2,tp=4,sp")
    result = planned(request)
    (ours,) = [plan for plan in result.plans if plan.name == STATED]
    assert result.best.mesh.axis_sizes == ours.mesh.axis_sizes and ours.mesh.axis_names == ("data", "shard", "tensor")
    assert result.best.optimal and result.best.cost.step_time_s <= ours.cost.step_time_s


def test_a_mesh_that_was_searched_in_part_leaves_the_proof_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of a smaller space is not one of the whole space, also where that mesh loses."""
    planner = prepare_planner(Request("gpt2-xl", cluster="1x4-a100-pcie", layers=1, batch=8, seq=256))
    options = candidate_meshes(planner.request, planner.cluster)
    best = choose_mesh(planner, options)
    assert best.optimal
    build = Planner.problem

    def in_part(self: Planner, *args: Any, **options: Any) -> Problem:
        problem = build(self, *args, **options)
        sizes = problem.model.sizes
        (whole,) = [nets for (model, least), nets in self.networks.tables.items() if model.sizes == sizes and not least]
        return problem if sizes == best.mesh.axis_sizes else replace(problem, unrestricted=whole)

    monkeypatch.setattr(Planner, "problem", in_part)
    monkeypatch.setattr(mesh_search, "bound_of_whole_space", lambda *args: best.cost.step_time_s / 2)
    again = choose_mesh(planner, options)
    assert not again.optimal and again.cost.step_time_s == best.cost.step_time_s
    assert any(note.kind is NoteKind.GAP for note in again.notes)


def test_a_second_counts_for_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven seconds of search, of which three build a network: nothing counts twice."""
    ticks = iter((0.0, 2.0, 5.0, 7.0))
    monkeypatch.setattr(request_module.time, "perf_counter", lambda: next(ticks))
    clock = Clock()
    with clock("search"), clock("network"):
        pass
    assert clock.seconds["network"] == 3.0 and clock.seconds["search"] == 4.0


def test_the_search_of_a_plan_is_told_wherever_it_runs() -> None:
    """Also where the plan is found before any proof, as where the fastest of any memory fits."""
    told = plan_model(Request("gpt2-xl", cluster="1x8-h100", layers=2, recompute="auto", accumulate=None)).timings_s
    assert told["search"] > 1e-3


SHARED = Request(
    "llama-3-8b",
    "1x8-h100",
    batch=16,
    seq=2048,
    layers=1,
    precision="pure",
    memory_gb=4.5,
    recompute="full",
    accumulate=None,
)
"""Megatron-LM fits with four micro-batches of four samples, which eight data-parallel ranks cannot share."""


@pytest.mark.parametrize(
    "request_",
    [
        SHARED,
        pytest.param(
            Request("mixtral-8x7b", "1x8-h100", batch=64, layers=2, accumulate=None, recompute="auto", memory_gb=14),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_usual_layout_is_read_on_the_graph_of_its_own_micro_batches(request_: Request) -> None:
    result = planned(request_, "baselines", "notes")
    other = [p for p in result.plans if p.workload.accumulate != result.best.workload.accumulate]
    assert other
    for plan in result.plans:
        own = result.of_plan(plan)
        assert own.graph.workload["batch"] == own.workload.graph_batch == plan.graph_batch
        assert own.request.accumulate == plan.workload.accumulate
        again = price_with_host(plan.blocks, own.graph, cost_model_of(plan), own.coarse)
        assert again.step_time_s == pytest.approx(plan.cost.step_time_s, rel=1e-9)
        assert again.memory_bytes == plan.cost.memory_bytes


def test_a_layout_that_needs_more_samples_stands_at_fewer_micro_batches() -> None:
    """It is not said to have no plan: FSDP on eight ranks takes eight samples at once."""
    result = planned(SHARED, "baselines", "notes")
    usual = {p.method: p for p in result.plans}
    assert {usual[name].workload.accumulate for name in ("data-parallel", "fsdp")} == {2}
    assert usual["megatron"].workload.accumulate == 4
    assert not any("no plan of this model follows" in note.sentence for note in result.notes)
