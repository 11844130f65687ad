"""Layouts with context and expert ranks: what they send by arithmetic, what they are refused for, and that nothing beats the search."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from planner_core.core import RECOMPUTE, InputError, Plan, Shard, load_cluster
from planner_core.cost import axis_roles
from planner_core.planning import Planner, Request, plan_model
from planner_core.planning.methods import CP_TYPES, Layout, check_layout, parse_layout
from planner_core.planning.pipeline import add_baselines
from planner_core.planning.pricing import Pricer, Statement, price_statement
from planner_core.planning.pricing.suggest import find_suggestions, list_changes
from tests.support.plans import pricer

LAYERS, SEQ = 2, 4096
HIDDEN, KV, FFN, VOCAB = 4096, 1024, 14336, 128256
MATRICES = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV + 3 * HIDDEN * FFN) + 2 * VOCAB * HIDDEN
EXPERTS = LAYERS * 8 * 3 * HIDDEN * FFN
"""Elements of Mixtral's experts, of two layers."""


def stated(text: str, **changes: Any) -> Statement:
    return Statement(parse_layout(text), **{"layers": LAYERS, "seq": SEQ, **changes})


def planned(model: str, text: str, cluster: str = "2x8-h100", **changes: Any) -> tuple[Planner, Plan]:
    made, run = pricer(model, cluster), stated(text, **changes)
    check_layout(run.layout, made.cluster)
    plan = made.plan(run)
    assert plan is not None
    return made.planner(run), plan


def bytes_of(plan: Plan, role: str) -> Counter[tuple[str, str]]:
    """Bytes by phase and kind on the axis of a role."""
    found: Counter[tuple[str, str]] = Counter()
    for t in plan.cost.traffic:
        if plan.mesh.name_of(t.axes) == role:
            found[t.phase, t.kind] += t.num_bytes
    return found


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("fsdp=2,cp=8", Layout(fsdp=2, cp=8)),
        ("cp=4,cp_type=a2a", Layout(cp=4, cp_type="ulysses")),
        ("cp=4,cp_type=all_gather", Layout(cp=4, cp_type="gather")),
        ("cp=4,cp_type=p2p,tp=2,sp", Layout(cp=4, tp=2, sp=True)),
        ("dp=2,cp=4,zero=3", Layout(dp=2, cp=4, zero=3)),
        ("fsdp=8,ep=4", Layout(fsdp=8, ep=4)),
    ],
)
def test_a_layout_is_read_and_told_back(text: str, layout: Layout) -> None:
    assert parse_layout(text) == layout == parse_layout(str(layout))


def test_the_axes_stand_as_tools_order_their_ranks() -> None:
    assert Layout(dp=2, cp=4, tp=8).degrees == (("data", 2), ("context", 4), ("tensor", 8))
    assert Layout(fsdp=16, ep=8).degrees == (("shard", 2), ("expert", 8))
    assert Layout(fsdp=8, ep=8, tp=2).degrees == (("expert", 8), ("tensor", 2))
    assert (Layout(dp=2, fsdp=8, ep=4).degrees, Layout(dp=2, fsdp=8, ep=4).joined) == (
        (("data", 2), ("shard", 2), ("expert", 4)),
        (1,),
    )
    assert Layout(dp=2, fsdp=8, ep=8).joined == () and Layout(fsdp=8, ep=4).num_gpus == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "cp=4,cp_type=rings",
            'cp_type is "rings", but must be ring, ulysses, gather, or Megatron-LM\'s p2p, a2a, all_gather',
        ),
        ("fsdp=16,cp_type=gather", "cp_type says how attention runs over the context ranks; give cp=2 or more"),
        ("fsdp=2,cp=8,zero=3", "fsdp=2 shards the weights already; leave zero=3 out"),
        ("fsdp=16,ep=3", "the 3 ranks of ep are of the 16 ranks of fsdp; give a divisor of 16"),
        (
            "dp=2,fsdp=8,ep=4,cp=2,tp=2",
            "makes a mesh of 5 axes (data, shard, expert, context, tensor), and at most 4 can be priced",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        check_layout(parse_layout(text), load_cluster("8x8-h100" if "ep=4,cp=2" in text else "2x8-h100"))
    assert said in str(error.value)


# --- context ----------------------------------------------------------------------------------------------


def test_a_ring_passes_keys_and_values_to_all_others() -> None:
    """Weights are whole on the context ranks, and their gradients are summed over them and the data-parallel ranks as over one axis."""
    _, plan = planned("llama-3-8b", "dp=2,cp=8")
    assert axis_roles(plan) == ("data", "context")
    there = bytes_of(plan, "context")
    assert there["forward", "send_recv"] == LAYERS * 7 * 2 * KV * SEQ * 2
    assert bytes_of(plan, "data_context")["backward", "all_reduce"] == pytest.approx(4 * MATRICES, rel=1e-3)
    assert there["forward", "all_gather"] == there["backward", "all_reduce"] == 0


def test_ulysses_exchanges_heads_for_tokens() -> None:
    """Queries, keys, values and the result, and their gradients: nothing else of the activations travels."""
    there = bytes_of(planned("llama-3-8b", "dp=2,cp=8,cp_type=ulysses")[1], "context")
    exchanged = LAYERS * (2 * HIDDEN + 2 * KV) * SEQ * 2
    assert there["forward", "all_to_all"] == there["backward", "all_to_all"] == exchanged
    assert there["forward", "send_recv"] == 0


def test_a_gather_has_all_keys_and_values_everywhere() -> None:
    there = bytes_of(planned("llama-3-8b", "dp=2,cp=8,cp_type=gather")[1], "context")
    assert there["forward", "all_gather"] == LAYERS * 2 * KV * SEQ * 2
    assert there["backward", "reduce_scatter"] >= there["forward", "all_gather"]


@pytest.mark.parametrize("text", ["fsdp=2,cp=8", "cp=16,zero=3", "dp=16,zero=1"])
def test_context_ranks_share_the_states_as_data_ranks_do(text: str) -> None:
    """FSDP shards over all 16 of them: as many bytes of states as sixteen ranks of plain data parallelism have."""
    memory = planned("llama-3-8b", text)[1].cost.memory_bytes
    assert memory["optimizer"] == pytest.approx(8 * MATRICES / 16, rel=0.01)


def test_the_loss_and_the_experts_take_tokens_where_they_are() -> None:
    """Two samples on two ranks, and the tokens of each on eight: of what is flattened, each rank has one piece, and gathers nothing."""
    _, plan = planned("mixtral-8x7b", "dp=2,cp=8")
    there = bytes_of(plan, "context")
    assert there["forward", "all_gather"] == there["backward", "all_reduce"] == 0
    site = next(s for b in plan.blocks.values() for name, s in b.sites.items() if "moe_experts" in name)
    assert site.inputs[0].src.forward == (Shard(0), Shard(0))


# --- experts ----------------------------------------------------------------------------------------------


def test_tokens_are_sent_to_their_experts_and_back() -> None:
    """Two copies of each of the tokens of a group of eight ranks; backward as many, for the gradients and the tokens again."""
    _, plan = planned("mixtral-8x7b", "fsdp=16,ep=8")
    assert axis_roles(plan) == ("shard", "expert")
    copies = 8 * SEQ * 2 * HIDDEN * 2
    assert bytes_of(plan, "expert")["forward", "all_to_all"] == LAYERS * 2 * copies
    gathered = bytes_of(plan, "shard")["forward", "all_gather"]
    assert gathered >= 2 * EXPERTS // 8, "each rank gathers its own experts, whose other half lies on the other shard"
    assert bytes_of(plan, "expert")["forward", "all_gather"] < 2 * EXPERTS // 8, (
        "no expert's weight travels among their ranks"
    )


@pytest.mark.parametrize(("text", "share"), [("dp=8", 1), ("dp=8,ep=4", 4), ("dp=8,ep=8", 8)])
def test_experts_take_the_memory_of_those_that_a_rank_has(text: str, share: int) -> None:
    planner, plan = planned("mixtral-8x7b", text, "1x8-h100", seq=256)
    others = sum(math.prod(v.meta.shape) * n for v, n in _weights(planner) if "experts" not in v.name)
    assert plan.cost.memory_bytes["optimizer"] == pytest.approx(8 * (others + EXPERTS / share), rel=0.01)


def _weights(planner: Planner) -> list[tuple[Any, int]]:
    graph = planner.graph
    blocks = [(graph.top, 1), *((b, graph.num_repeats[name]) for name, b in graph.blocks.items())]
    return [(v, n) for block, n in blocks for v in block.values if v.kind == "parameter"]


# --- against the search -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "text"),
    [
        *(("llama-3-8b", f"fsdp=2,cp=8,cp_type={kind}") for kind in CP_TYPES),
        ("llama-3-8b", "cp=8,tp=2,sp"),
        ("mixtral-8x7b", "fsdp=16,ep=8"),
        ("mixtral-8x7b", "fsdp=8,ep=8,tp=2,sp"),
    ],
)
def test_it_is_a_plan_of_the_space_and_nothing_beats_the_search(model: str, text: str) -> None:
    """The search over all plans of the same mesh finds one that is as fast; the network's value is the price of the plan."""
    planner, plan = planned(model, text, seq=8192)
    problem = planner.of_space(parse_layout(text).space())
    answer = planner.solve(problem, "time")
    gpu_s = plan.cost.gpu_time_s  # searches compare the GPU's seconds
    if plan.fits:
        assert gpu_s == pytest.approx(answer.value, rel=1e-5)
    free = planner.solve(planner.problem(plan.mesh), "time")
    assert free.assignment is not None and free.value <= gpu_s * (1 + 1e-9)


def test_the_best_beside_it_is_never_slower_and_other_ways_of_attention_are_suggested() -> None:
    priced = price_statement(pricer("llama-3-8b", "2x8-h100"), stated("fsdp=2,cp=8", seq=32768))
    assert priced.plan is not None and priced.best is not None and priced.plan.fits
    assert axis_roles(priced.plan) == ("shard", "context")
    assert priced.best.cost.step_time_s <= priced.plan.cost.step_time_s * (1 + 1e-9)
    assert any(s.change == "cp_type=ulysses" for s in priced.suggestions)


def test_the_best_plan_of_long_samples_fits_where_context_ranks_do() -> None:
    """Numbers of micro-batches are planned on graphs of their own size: with one sample at once, context ranks fit."""
    small = Pricer("llama-3-8b", load_cluster("1x8-h100"), memory_gb=20)
    stated = Statement(parse_layout("fsdp=8"), seq=32_768, layers=2, recompute="full")
    plan = small.plan(stated)
    assert plan is not None and not plan.fits
    best = small.best(stated, plan)
    assert best.fits and best.workload.accumulate > 1 and best.workload.batch == stated.batch


def test_a_budget_that_no_plan_fits_still_has_a_price() -> None:
    """The statement is priced, and the report says what is missing."""
    small = Pricer("llama-3-8b", load_cluster("1x8-h100"), memory_gb=2)
    priced = price_statement(small, Statement(parse_layout("fsdp=8"), seq=2048, layers=2))
    assert priced.legal and priced.best is None
    assert any("no plan fits" in note and "1.9 GiB" in note for note in priced.notes)


def test_context_ranks_are_suggested_where_samples_are_long_and_there_are_none() -> None:
    """One sample of 131 072 tokens a GPU does not fit: its logits alone are 188 GiB. Over four context ranks it does."""
    run = stated("fsdp=8", seq=131072, recompute="full")
    made = pricer("llama-3-8b", "1x8-h100")
    plan = made.plan(run)
    assert plan is not None and not plan.fits
    found = [s for s in find_suggestions(made, run, plan) if s.stated.layout.cp > 1]
    assert found and all(s.plan.fits and s.stated.batch == run.batch for s in found)


def test_a_faster_attention_kernel_is_suggested_on_a_gpu_that_has_it() -> None:
    kernels = {kernel for _, s in list_changes(stated("fsdp=8"), 8, {"cudnn", "flash3"}) if (kernel := s.attention)}
    assert kernels == {"cudnn", "flash3"}
    assert not [s for _, s in list_changes(stated("fsdp=8"), 8, {"flash2"}) if s.attention]
    for stack, told in (("megatron", {"full"}), ("torchtitan", {"full", "selective"}), (None, set(RECOMPUTE[2:]))):
        changes = list_changes(stated("fsdp=8").but(stack=stack), 8, ())
        assert {
            s.recompute for _, s in changes if s.recompute != "none"
        } == told  # what the tool has no setting for helps no run of it
    assert not [s for _, s in list_changes(stated("fsdp=8", seq=2048), 8, ()) if s.layout.cp > 1]


# --- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "text", "changes", "said"),
    [
        (
            "llama-3-8b",
            "cp=16,cp_type=ulysses",
            {},
            "8 key and value heads cannot be dealt to cp=16 ranks; give a divisor of 8",
        ),
        ("llama-3-8b", "cp=8,tp=2,cp_type=ulysses", {}, "8 key and value heads cannot be dealt to tp=2 x cp=8 ranks"),
        (
            "llama-3-8b",
            "cp=16",
            {"seq": 1000},
            "a sequence of 1000 tokens cannot be split over cp=16 ranks; give a divisor",
        ),
        (
            "resnet50-100k",
            "cp=16",
            {"seq": None},
            "cp=16 splits the tokens of attention, which resnet50-100k does not have; leave cp out",
        ),
        (
            "llama-3-8b",
            "fsdp=16,ep=8",
            {},
            "ep=8 deals experts out, and llama-3-8b has none that tokens are sent to; leave ep out",
        ),
        ("mixtral-8x7b", "fsdp=16,ep=16", {}, "8 experts cannot be dealt to ep=16 ranks; give a divisor of 8"),
        (
            "mixtral-8x7b",
            "dp=2,cp=8",
            {"micro_batch": 2},
            "a micro-batch of 2 samples cannot be split by cp=8 where experts take the tokens",
        ),
    ],
)
def test_what_a_model_cannot_follow_says_why(model: str, text: str, changes: dict[str, Any], said: str) -> None:
    layers = None if model.startswith("resnet") else LAYERS
    run = stated(text, layers=layers, **changes)
    priced = price_statement(pricer(model, "2x8-h100"), run, advise=False)
    assert not priced.legal
    assert any(said in reason for reason in priced.reasons), priced.reasons


def test_a_request_may_state_them() -> None:
    asked = Request("mixtral-8x7b", batch=16, seq=1024, layers=2, mesh="2x8", layout="fsdp=16,ep=8")
    result = plan_model(asked, passes={"baselines": add_baselines})
    (own,) = (p for p in result.plans if p.name == "our current setup")
    assert own.mesh.axis_names == ("shard", "expert")
