"""The baselines are their authors' plans, collective for collective (docs/BASELINES.md), and never beat the optimum."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from bench.baselines import SAME, compare
from planner_core.core import (
    DeviceMesh,
    Note,
    NoteKind,
    Pipeline,
    Plan,
    SearchFault,
    cluster_names,
    placements_by_pattern,
)
from planner_core.core.placement import Shard
from planner_core.cost import block_of, zero_stage
from planner_core.models.zoo import ZOO
from planner_core.ops import FLOPS_BOUND_KINDS, operator
from planner_core.planning import choose_mesh
from planner_core.planning.analysis import count_spaces, log10_size, unfold_problem
from planner_core.planning.fitting.baselines import better_of_baselines, describe_restriction_cost, plan_baselines
from planner_core.planning.methods.registry import METHODS
from planner_core.planning.methods.restrictions import (
    AxisRules,
    StreamTest,
    is_sequence_split,
    is_unsplit,
    is_used_in_parts,
)
from planner_core.planning.pipeline import plan_model
from planner_core.planning.planner import STATED_METHOD, Planner, candidate_meshes, prepare_planner, replace_request
from planner_core.planning.request import Request
from planner_core.search import describe_gap, make_objective, search_within_budget
from planner_core.search.network import Network, allow_only
from tests.support.plans import planned, search_alone, searched, with_ample_memory

HIDDEN = {
    "llama-3-8b": 4096,
    "llama-3-70b": 8192,
    "bert-large": 1024,
    "t5-large": 1024,
    "vit-large": 1024,
    "mixtral-8x7b": 4096,
}


@lru_cache
def plans(name: str, layers: int | None, mesh: str = "8", cluster: str = "1x8-h100") -> tuple[Planner, dict[str, Plan]]:
    # With memory for all of them: a layout that does not fit is shown near the least memory that it can take.
    planner = prepare_planner(Request(name, cluster=with_ample_memory(cluster), mesh=mesh, layers=layers))
    return planner, {p.method: p for p in plan_baselines(planner, candidate_meshes(planner.request, planner.cluster))}


def per_layer(name: str, method: str) -> Counter[tuple[str, str, str]]:
    """Collectives of one more layer: (phase, kind, count or bytes)."""
    found: Counter[tuple[str, str, str]] = Counter()
    for sign, layers in ((1, 3), (-1, 2)):
        for t in plans(name, layers)[1][method].cost.traffic:
            found[t.phase, t.kind, "count"] += sign * t.count
            found[t.phase, t.kind, "bytes"] += sign * t.num_bytes
            found[t.phase, t.kind, "wire"] += sign * t.wire_bytes
    return Counter({k: v for k, v in found.items() if v})


def stream_bytes(name: str) -> int:
    planner = plans(name, 2)[0]
    tokens = 197 if name == "vit-large" else planner.workload.seq
    return planner.workload.batch * tokens * HIDDEN[name] * 2


@pytest.mark.parametrize(
    ("name", "each_way"), [("llama-3-8b", 2), ("llama-3-70b", 2), ("bert-large", 2), ("vit-large", 2), ("t5-large", 5)]
)
@pytest.mark.slow(only=("llama-3-70b-2", "vit-large-2"))
def test_megatron_is_two_all_reduces_each_way(name: str, each_way: int) -> None:
    """b·s·h, forward and backward, for attention and for feed-forward; a T5 layer pair has five such parts (2 + 3)."""
    size = stream_bytes(name)
    wire = each_way * (2 * 7 * size // 8)
    assert per_layer(name, "megatron") == {
        ("forward", "all_reduce", "count"): each_way,
        ("forward", "all_reduce", "bytes"): each_way * size,
        ("forward", "all_reduce", "wire"): wire,
        ("backward", "all_reduce", "count"): each_way,
        ("backward", "all_reduce", "bytes"): each_way * size,
        ("backward", "all_reduce", "wire"): wire,
    }


@pytest.mark.parametrize(("name", "each_way"), [("llama-3-8b", 2), ("bert-large", 2), ("t5-large", 5)])
def test_sequence_parallelism_sends_the_same_in_two_halves(name: str, each_way: int) -> None:
    size = stream_bytes(name)
    found = per_layer(name, "megatron-sp")
    for phase in ("forward", "backward"):
        for kind in ("all_gather", "reduce_scatter"):
            assert found.pop((phase, kind, "count")) == each_way
            assert found.pop((phase, kind, "bytes")) == each_way * size
        wire = sum(found.pop((phase, kind, "wire")) for kind in ("all_gather", "reduce_scatter"))
        assert wire == per_layer(name, "megatron")[phase, "all_reduce", "wire"]
    # what is left are the gradients of norms and biases, which see a part of the tokens each
    assert {k[:2] for k in found} == {("backward", "all_reduce")}
    assert found["backward", "all_reduce", "bytes"] < 1e-3 * size


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("resnet")])
@pytest.mark.slow(only=("mixtral-8x7b",))
def test_data_parallel_sums_every_gradient_once(name: str) -> None:
    planner, found = plans(name, 2)
    plan = found["data-parallel"]
    sums = plan.cost.collectives()["backward"]["all_reduce"]
    assert sums["count"] == len(planner.graph.parameters())
    assert sums["bytes"] == 4 * planner.graph.num_params  # in float32
    # forward, only numbers of the size of the loss: its count of valid targets
    assert sum(k["bytes"] for k in plan.cost.collectives()["forward"].values()) <= 8
    assert all(str(p) == "R" for b in plan.blocks.values() for param in b.params.values() for p in param.stored)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl", "bert-large"])
def test_fsdp_gathers_twice_and_scatters_once(name: str) -> None:
    """Each matrix once forward, once backward, and its gradient is reduce-scattered; biases and norms are summed."""
    found = per_layer(name, "fsdp")
    block = next(iter(plans(name, 2)[0].coarse.blocks.values())).block
    weights = [v.meta for v in block.values if v.kind == "parameter" and len(v.meta.shape) >= 2]
    small = [v.meta for v in block.values if v.kind == "parameter" and len(v.meta.shape) < 2]
    size = sum(m.num_bytes for m in weights)
    in_bf16, in_float32 = size, 2 * size
    for phase, kind, sent in (
        ("forward", "all_gather", in_bf16),
        ("backward", "all_gather", in_bf16),
        ("backward", "reduce_scatter", in_float32),
    ):
        assert (found[phase, kind, "count"], found[phase, kind, "bytes"]) == (len(weights), sent)
    assert found["backward", "all_reduce", "count"] == len(small)
    assert found["backward", "all_reduce", "bytes"] == 2 * sum(m.num_bytes for m in small)


class _InputFeatures(AxisRules):
    """Megatron-LM's rules, and one layer's weight split by its input features."""

    layer = ""

    def apply(self, block: str, net: Network) -> None:
        super().apply(block, net)
        for name, states in net.tensors.items():
            if self.graph.blocks[block].values[int(name[1:])].name.endswith(f"{self.layer}.weight") if block else False:
                split = np.array([pair[0] == Shard(1) for pair in states.axis_states])
                net.factors.append(allow_only(name, split[states.index[:, 0]]))


@pytest.mark.parametrize("stream", [is_unsplit, is_sequence_split])
@pytest.mark.parametrize(
    ("layer", "is_row"), [("q_proj", False), ("up_proj", False), ("o_proj", True), ("down_proj", True)]
)
def test_a_layer_that_reads_the_stream_is_split_by_output_features(
    stream: StreamTest, layer: str, is_row: bool
) -> None:
    """Megatron-LM has no `RowParallelLinear` behind a norm; what heads and activations make has no other layer behind it."""
    planner = plans("llama-3-8b", 2)[0]
    rules = _InputFeatures(planner.graph, (stream,), (is_used_in_parts,))
    rules.layer = layer
    problem = planner.problem(planner.cost_model(candidate_meshes(planner.request, planner.cluster)[0], zero=0), rules)
    assert problem.is_infeasible != is_row


def test_heads_that_cannot_be_split_leave_no_megatron_plan() -> None:
    """GPT-2 XL has 25 heads: Megatron-LM cannot run it on 8 GPUs, so no plan goes by that name."""
    assert set(plans("gpt2-xl", 2)[1]) == {"data-parallel", "fsdp"}


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_megatron_shards_optimizer_states_where_the_space_holds_zero_1(stage: int | None) -> None:
    """Its distributed optimizer: the same tensor-parallel traffic, states of matrices sharded over the data axis, and less memory."""
    found, kept = (
        {p.method: p for p in plan_baselines(planner, candidate_meshes(planner.request, planner.cluster))}
        for planner in (
            prepare_planner(Request("llama-3-8b", cluster="1x8-h100", mesh="4x2", layers=2, zero=zero))
            for zero in (stage, 0)
        )
    )
    for name in ("megatron", "megatron-sp"):
        plan, before = found[name], kept[name]
        weights = [w for b in plan.blocks.values() for w in b.params.values() if len(w.stored) == 2]
        assert (zero_stage(before), zero_stage(plan)) == (0, 1)
        assert any(isinstance(w.stored[0], Shard) for w in weights)
        assert plan.cost.step_time_s <= before.cost.step_time_s
        assert plan.cost.memory_bytes["peak"] < before.cost.memory_bytes["peak"]
        tensor = [
            {(t.phase, t.kind, t.num_bytes) for t in p.cost.traffic if t.axes != (0,) and t.phase == "forward"}
            for p in (plan, before)
        ]
        assert tensor[0] == tensor[1]
    assert "data-parallel" not in found or found["data-parallel"].blocks == kept["data-parallel"].blocks


@pytest.mark.parametrize(
    ("name", "cluster"),
    [(n, "2x8-h100") for n in ZOO]
    + [("llama-3-8b", c) for c in ("1x8-h100", "1x4-a100-pcie")]
    + [
        pytest.param(n, c, marks=pytest.mark.slow)
        for n in ZOO
        for c in ("1x8-h100", "2x8-v100-eth", "1x4-a100-pcie")
        if n != "llama-3-8b" or c == "2x8-v100-eth"
    ],
)
@pytest.mark.slow(
    only=(
        "gpt2-xl-2x8-h100",
        "llama-3-70b-2x8-h100",
        "llama-3-8b-1x4-a100-pcie",
        "llama-3-8b-1x8-h100",
        "mixtral-8x7b-2x8-h100",
        "resnet50-100k-2x8-h100",
        "t5-large-2x8-h100",
        "vit-large-2x8-h100",
    )
)
def test_no_baseline_that_fits_beats_the_best(name: str, cluster: str) -> None:
    result = planned(Request(name, cluster=cluster, dtype="float16" if "v100" in cluster else "bfloat16"))
    for p in result.plans[1:]:
        if p.fits and result.searched.fits and result.searched.optimal:
            assert p.cost.step_time_s >= result.searched.cost.step_time_s * (1 - 1e-6), p.name


@pytest.mark.parametrize("name", ["llama-3-8b", "bert-large", "t5-large", "vit-large"])
@pytest.mark.slow(only=("t5-large",))
def test_least_communication_is_no_more_than_any_baseline(name: str) -> None:
    _, found = plans(name, 2)
    best = searched(Request(name, cluster="1x8-h100", mesh="8", layers=2, objective="communication"))
    for p in found.values():
        if p.fits:
            assert best.cost.comm_time_s <= p.cost.comm_time_s * (1 + 1e-5), p.name


# --- what the papers found -------------------------------------------------------------------------------


def test_tap_splits_the_feed_forward_alone_where_memory_is_not_tight() -> None:
    """TAP's partially sharded plan: with room for most weights, only the feed-forward of BERT-large is split."""
    plan = searched(Request("bert-large", cluster="1x8-h100", mesh="8", method="tap", memory_gb=6, precision="pure"))
    inside = {n: p for n, p in placements_by_pattern(plan).items() if ".layer.*." in n}
    split = {n for n, p in inside.items() if p != ["R"]}
    assert split
    assert all(
        n.endswith(("layer.*.output.dense.weight", "intermediate.dense.weight")) and "attention" not in n for n in split
    )


@pytest.mark.parametrize(
    ("name", "cluster", "least"), [("gpt2-xl", "2x8-v100-eth", 0.05), ("llama-3-8b", "2x8-h100", 0.2)]
)
@pytest.mark.slow(but=("gpt2-xl-2x8-v100-eth-0.05",))
def test_topology_saves_communication_over_volume(name: str, cluster: str, least: float) -> None:
    """TAPS: less communication than the plan of least volume, on the real links.

    In pure precision: with masters in float32 Llama-3-8B fills the memory, and both plans lie on the one mesh that is left.
    """
    planner = prepare_planner(Request(name, cluster=cluster, method="taps", precision="pure"))
    options = candidate_meshes(planner.request, planner.cluster)
    by_time = choose_mesh(planner, options)
    by_volume = choose_mesh(planner, options, method=replace(METHODS["taps"], by_volume=True))
    assert by_time.fits
    assert by_volume.fits
    assert by_time.cost.comm_time_s <= (1 - least) * by_volume.cost.comm_time_s


@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3-8b"])
def test_alpas_plan_does_no_product_twice(name: str, mesh: str) -> None:
    """Every product is split on every axis. On one axis data parallelism splits all of them too, and communicates no less."""
    planner, usual = plans(name, 2, mesh)
    plan = search_alone(Request(name, cluster=with_ample_memory("1x8-h100"), mesh=mesh, layers=2, method="alpa"))
    for label, block in plan.blocks.items():
        ops = {op.name: op for op in block_of(planner.graph, label).ops}
        for site, how in block.sites.items():
            if operator(ops[site].fn).kind in FLOPS_BOUND_KINDS:
                ends = [*(e.dst.forward for e in how.inputs), *(e.src.forward for e in how.outputs)]
                for axis in range(len(plan.mesh.axis_sizes)):
                    assert any(isinstance(end[axis], Shard) for end in ends), (label, site, axis)
    if mesh == "8":
        assert plan.cost.comm_time_s <= usual["data-parallel"].cost.comm_time_s * (1 + 1e-6)


def test_the_size_of_a_space_grows_with_the_copies_that_may_differ() -> None:
    """One more layer of GPT-2 is as many more choices every time; where all copies are alike it is none."""
    asked = Request("gpt2-xl", cluster="1x8-h100", mesh="8")
    for method, more in (("exact", True), ("tap", False)):
        size = [count_spaces(plan_model(replace(asked, layers=n, method=method), passes={}))[method] for n in (2, 3, 4)]
        assert size[1] - size[0] == pytest.approx(size[2] - size[1], abs=1e-6)
        assert (size[1] - size[0] > 1) == more


def test_the_size_of_a_space_counts_the_unfolded_variables() -> None:
    """Every variable of the unfolded network once, by the states that some plan has."""
    planner = plans("gpt2-xl", 3)[0]
    problem = planner.problem(candidate_meshes(planner.request, planner.cluster)[0])
    written = unfold_problem(problem, make_objective(problem, "time"))
    states = sum(math.log10(len(v["states"])) for v in written["variables"])
    assert 0.5 * states < log10_size(problem) <= states


def test_a_baseline_that_the_search_missed_is_taken() -> None:
    result = planned(Request("bert-large", cluster="1x8-h100", layers=2), "baselines")
    best, usual = result.best, next(p for p in result.plans if p.name == "Megatron-LM")
    assert better_of_baselines(best, [usual]) is best
    missed = replace(
        best,
        optimal=False,
        notes=(Note("laid out as dp=8"), Note("gap", NoteKind.GAP)),
        cost=replace(best.cost, step_time_s=2 * usual.cost.step_time_s),
    )
    taken = better_of_baselines(missed, [usual])
    assert (taken.blocks, taken.cost) == (usual.blocks, usual.cost)
    assert (taken.name, taken.method, taken.optimal, taken.notes[1:]) == (best.name, best.method, False, (Note("gap"),))
    # "laid out as" stood twice, for the plan that was replaced too
    assert str(taken.notes[0]).startswith("laid out as Megatron-LM, whose step is shorter ") and "waits" in str(
        taken.notes[0]
    )
    assert better_of_baselines(missed, [replace(usual, fits=False)]) is missed
    assert zero_stage(usual) == 1 and better_of_baselines(missed, [usual], (0, 3)) is missed
    assert better_of_baselines(replace(missed, method="tap"), [usual]).method == "tap"
    gap, staged = Note("at most 0.1 %", NoteKind.GAP), replace(usual, pipeline=Pipeline(2, "1f1b", (1, 1)))
    taken = better_of_baselines(replace(missed, bound=12.5, notes=(gap,)), [staged])
    assert taken.bound is None and [str(n) for n in taken.notes[1:]] == [
        "not proven: no plan of one pipeline stage takes less than 12.5 s"  # the bound is of no plan with stages
    ]
    short = replace(best, fits=False)
    taken = better_of_baselines(short, [replace(usual, fits=False), usual])
    assert taken.blocks == usual.blocks and taken.fits and taken.bound is None and "fits" in taken.notes[0].sentence


def test_a_bound_above_a_plan_raises() -> None:
    """No plan of a request is below its bound, so a plan that is tells of a fault: no report is made of it."""
    planner = plans("gpt2-xl", 1)[0]
    problem = planner.problem(candidate_meshes(planner.request, planner.cluster)[0])
    answer = planner.solve(problem, "time")
    plan = planner.plan(problem, answer, "best", "exact", "time")
    high = answer.value * 1.001
    with pytest.raises(SearchFault, match="of best"):
        planner.plan(problem, replace(answer, bound=high), "best", "exact", "time")
    with pytest.raises(SearchFault, match="of FSDP"):
        better_of_baselines(replace(plan, bound=high), [replace(plan, name="FSDP")])
    with pytest.raises(SearchFault, match="above the value"):
        describe_gap(answer.value, high)
    with pytest.raises(SearchFault, match="of TAP"):
        describe_restriction_cost(replace(plan, name="TAP"), {"best": replace(plan, bound=high)})


def test_a_bound_above_a_baseline_on_three_axes_raises() -> None:
    planner = plans("gpt2-xl", 1)[0]
    problem = planner.problem(DeviceMesh(("a", "b", "c"), (2, 2, 2)))
    answer = planner.solve(problem, "time")
    plan = replace(planner.plan(problem, answer, "best", "exact", "time"), bound=answer.value * 1.001)
    with pytest.raises(SearchFault, match="of FSDP"):
        better_of_baselines(plan, [replace(plan, name="FSDP")])
    # Operators of a stated layout may tell three axes apart, which those of the search do not.
    better_of_baselines(plan, [replace(plan, name="whatever we call it", method=STATED_METHOD)])


def test_a_bound_in_bytes_above_a_plan_raises() -> None:
    planner = replace_request(plans("gpt2-xl", 1)[0], method="tap", objective="communication")
    problem = planner.builders(METHODS["tap"], DeviceMesh(("data", "tensor"), (2, 4)))[0]()
    answer = planner.solve(problem, "communication")
    plan = planner.plan(problem, answer, "best", "tap", "communication")
    assert plan.bound is not None and plan.bound <= planner.value(plan) * (1 + 1e-5)
    with pytest.raises(SearchFault, match="of best"):
        planner.plan(problem, replace(answer, bound=answer.value + 0.001), "best", "tap", "communication")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", cluster_names())
@pytest.mark.parametrize("name", ZOO)
def test_a_baseline_never_communicates_less_under_its_own_constraints(name: str, cluster: str) -> None:
    rows = list(compare(name, cluster))
    assert [r["baseline"] for r in rows if r["outcome"].startswith("MORE")] == []


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("llama-3-8b", "2x8-h100"),
        ("gpt2-xl", "1x4-a100-pcie"),
        ("resnet50-100k", "1x8-h100"),
        ("t5-large", "1x4-a100-pcie"),  # within this budget some copies have no known way in some shared states
    ],
)
@pytest.mark.slow(but=("gpt2-xl-1x4-a100-pcie",))
def test_baselines_of_a_few_models_never_communicate_less(name: str, cluster: str) -> None:
    rows = list(compare(name, cluster))
    assert {r["baseline"] for r in rows} >= {"data parallel", "FSDP"}
    assert all(r["seconds"][1] <= r["seconds"][0] * (1 + SAME) for r in rows)


@pytest.mark.parametrize("name", ("gpt2-xl", "vit-large"))
def test_meshes_whose_axes_change_places_have_the_same_values_by_volume(name: str) -> None:
    planner = prepare_planner(Request(name, method="tap", layers=4))
    values = [
        search_within_budget(build(), objective="communication").value
        for mesh in candidate_meshes(planner.request, planner.cluster)
        if mesh.axis_sizes in ((2, 8), (8, 2))
        for build in planner.builders(METHODS["tap"], mesh)
    ]
    assert len(values) == 2 and values[0] == pytest.approx(values[1], rel=1e-9)


def test_a_mesh_that_says_the_same_by_volume_is_searched_once() -> None:
    planner = prepare_planner(Request("gpt2-xl", method="tap", layers=2))
    said: list[str] = []
    choose_mesh(planner, candidate_meshes(planner.request, planner.cluster), said.append)
    networks = [text for text in said if text.startswith("network of")]
    assert len(networks) == len(set(networks)) and sum("2" in text and "8" in text for text in networks) == 1


@pytest.mark.parametrize("method", [m for m in METHODS if m != "exact"])
@pytest.mark.slow(but=("tap",))
def test_no_stage_of_planning_changes_the_plan_of_another_method(method: str) -> None:
    request = Request("gpt2-xl", cluster="1x8-h100", method=method, layers=2)
    alone = plan_model(request, passes={})
    assert alone.plans == (planned(request).searched,)
