"""A stated layout is priced as the plan it is: traffic by arithmetic, the search's value, what would help, the best beside it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import planner_core as shardscope
from planner_core.core import ASSETS, InputError, Plan, load_cluster, load_timing
from planner_core.cost import axis_roles, zero_stage
from planner_core.planning import Planner
from planner_core.planning.analysis import price_report, price_text
from planner_core.planning.methods import Layout, check_layout, parse_layout
from planner_core.planning.pricing import (
    Budget,
    Pricer,
    Statement,
    count_model_flops,
    price_statement,
    time_band,
)
from tests.support.plans import pricer
from tests.support.terms import values_of

LAYERS = 2
HIDDEN, KV, FFN, VOCAB = 4096, 1024, 14336, 128256
MATRICES = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV + 3 * HIDDEN * FFN) + 2 * VOCAB * HIDDEN
"""Elements of the matrices of a Llama-3-8B of two layers."""
NORMS = (2 * LAYERS + 1) * HIDDEN


def stated(text: str, **changes: Any) -> Statement:
    return Statement(parse_layout(text), layers=LAYERS, **changes)


def planned(cluster: str, text: str, **changes: Any) -> tuple[Planner, Plan]:
    made, run = pricer("llama-3-8b", cluster), stated(text, **changes)
    plan = made.plan(run)
    assert plan is not None
    return made.planner(run), plan


def bytes_of(plan: Plan, least: int = 10**7) -> Counter[tuple[str, str, str]]:
    """Bytes by (phase, kind, role of the axis), without what is small (norms, the loss)."""
    found: Counter[tuple[str, str, str]] = Counter()
    for t in plan.cost.traffic:
        found[t.phase, t.kind, plan.mesh.name_of(t.axes)] += t.num_bytes
    return Counter({k: v for k, v in found.items() if v >= least})


# --- reading a layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("dp=2,fsdp=8,tp=4,sp,zero=1", Layout(dp=2, fsdp=8, tp=4, sp=True, zero=1)),
        ("fsdp=8", Layout(fsdp=8)),
        (" tp=4 , sp=0 ", Layout(tp=4)),
        ("hsdp=2x8", Layout(dp=2, fsdp=8)),
        ("dp=1", Layout()),
    ],
)
def test_a_layout_is_read_and_told_back(text: str, layout: Layout) -> None:
    assert parse_layout(text) == layout
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsdq=8", "layout 'fsdq=8': \"fsdq\" is not a word, as in dp=2,fsdp=8,tp=4,sp; did you mean fsdp"),
        (
            "dp=16 zero=1",
            "layout 'dp=16 zero=1': its words are not separated by commas; write it as dp=2,fsdp=8,tp=4,sp",
        ),
        ("fsdp=0", 'fsdp is "0", but must be a whole number from 1, as in dp=2,fsdp=8,tp=4,sp'),
        ("fsdp", 'fsdp is "", but must be'),
        ("dp=2,dp=4", "dp is given twice; leave one out"),
        ("dp=8,zero=4", 'zero is "4", but must be 0, 1 or 2'),
        ("dp=8,zero=3", "zero=3 shards the weights too; say fsdp=8 instead of dp=8,zero=3"),
        ("dp=1,zero=3,tp=8,sp", "zero=3 shards the weights too; say fsdp=N for N ranks instead of zero=3"),
        ("dp=8,sp", "sp splits tokens over the tensor ranks; give tp=2 or more, or leave sp out"),
        ("hsdp=8", 'hsdp is "8", but must be replicas x shards, e.g. hsdp=2x8'),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_layout(text)
    assert said in str(error.value)


def test_degrees_that_do_not_fill_the_cluster_say_what_would() -> None:
    for stated, filling in (("fsdp=8", "fsdp=16"), ("fsdp=4,cp=2", "fsdp=8,cp=2")):
        with pytest.raises(InputError) as refused:
            check_layout(parse_layout(stated), load_cluster("2x8-h100"))
        assert values_of(refused.value, "layout") == [stated, filling]


# --- what each layout sends, by arithmetic ------------------------------------------------------------------
# Weights travel in bf16 (2 bytes an element), gradients in fp32 (4), whatever the number of micro-batches says.


def test_data_parallel_sums_every_gradient_once_a_step() -> None:
    _, plan = planned("1x8-h100", "dp=8", accumulate=3, seq=512)
    assert bytes_of(plan) == {("backward", "all_reduce", "data"): 4 * (MATRICES + NORMS)}


def test_zero_1_scatters_gradients_and_gathers_weights_once_a_step() -> None:
    _, plan = planned("1x8-h100", "dp=8,zero=1", accumulate=3, seq=512)
    assert bytes_of(plan) == {
        ("forward", "all_gather", "data"): 2 * MATRICES,
        ("backward", "reduce_scatter", "data"): 4 * MATRICES,
    }


def test_zero_2_scatters_gradients_in_every_micro_batch() -> None:
    _, plan = planned("1x8-h100", "dp=8,zero=2", accumulate=3, seq=512)
    assert bytes_of(plan) == {
        ("forward", "all_gather", "data"): 2 * MATRICES,
        ("backward", "reduce_scatter", "data"): 3 * 4 * MATRICES,
    }


def test_hsdp_shards_inside_and_sums_shards_across_once_a_step() -> None:
    _, plan = planned("2x8-h100", "dp=2,fsdp=8", accumulate=3, seq=512)
    found = bytes_of(plan)
    # a sum may be sent as its two halves, which is as many bytes; norms go either way
    halves = found.pop(("backward", "all_gather", "data"), 0)
    if halves:
        assert found.pop(("backward", "reduce_scatter", "data")) == halves
        found["backward", "all_reduce", "data"] += halves
    embedding = VOCAB * HIDDEN  # looked up, its rows are not needed for backward
    wanted = {
        ("forward", "all_gather", "shard"): 3 * 2 * MATRICES,
        ("backward", "all_gather", "shard"): 3 * 2 * (MATRICES - embedding),
        ("backward", "reduce_scatter", "shard"): 3 * 4 * MATRICES,
        ("backward", "all_reduce", "data"): 4 * MATRICES // 8,
    }
    assert found == pytest.approx(wanted, rel=2e-4)
    assert plan.mesh.axis_sizes == (2, 8)


def test_three_axes_are_megatron_inside_hsdp() -> None:
    """Each product's sum over the tensor ranks is an all_reduce of tokens x hidden; weights are split by tp before they travel."""
    _, plan = planned("8x8-h100", "dp=4,fsdp=2,tp=8", seq=512)
    found = bytes_of(plan)
    inside = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV + 3 * HIDDEN * FFN)
    assert plan.mesh.axis_names == ("data", "shard", "tensor")
    stream = 2 * 512 * HIDDEN
    assert found["backward", "all_reduce", "tensor"] >= 2 * LAYERS * stream
    assert found["backward", "reduce_scatter", "shard"] >= 4 * inside // 8
    assert axis_roles(plan) == ("data", "shard", "tensor")


def test_sequence_parallelism_sends_halves_in_place_of_sums() -> None:
    found = bytes_of(planned("1x8-h100", "tp=8,sp", micro_batch=8, seq=512)[1])
    assert ("forward", "all_reduce", "tensor") not in found
    stream = 8 * 2 * 512 * HIDDEN
    assert found["forward", "all_gather", "tensor"] >= 2 * LAYERS * stream
    assert found["forward", "reduce_scatter", "tensor"] == 2 * LAYERS * stream


@pytest.mark.parametrize(
    ("cluster", "text", "roles", "zero"),
    [
        ("1x8-h100", "dp=8", ("data",), 0),
        ("1x8-h100", "dp=8,zero=1", ("data",), 1),
        ("1x8-h100", "dp=8,zero=2", ("data",), 2),
        ("1x8-h100", "fsdp=8", ("shard",), 3),
        ("2x8-h100", "fsdp=4,tp=4,sp", ("shard", "tensor"), 3),
        ("2x8-h100", "dp=2,tp=8,zero=1", ("data", "tensor"), 1),
    ],
)
def test_a_plan_says_what_its_axes_do(cluster: str, text: str, roles: tuple[str, ...], zero: int) -> None:
    _, plan = planned(cluster, text, seq=512)
    assert axis_roles(plan) == roles == plan.mesh.axis_names
    assert zero_stage(plan) == zero


@pytest.mark.parametrize(
    "text", ["dp=16,zero=1", "dp=16,zero=2", "dp=4,fsdp=4", "dp=2,fsdp=2,tp=4,sp", "dp=4,tp=4,zero=1"]
)
def test_the_search_finds_what_the_plan_is_priced_at(text: str) -> None:
    """The network's optimum is the price of the plan that is read off it, at stages and on joined axes that plans do not have yet."""
    made, run = pricer("llama-3-8b", "2x8-h100"), stated(text, accumulate=2, seq=1024)
    planner, layout = made.planner(run), run.layout
    problem = planner.of_space(layout.space())
    answer = planner.solve(problem, "time")
    plan = made.plan(run)
    assert plan is not None and answer.optimal
    assert plan.cost.step_time_s - plan.cost.host_wait_s == pytest.approx(answer.value, rel=1e-5)


@pytest.mark.parametrize("text", ["dp=16,zero=1", "dp=4,tp=4,zero=1"])
def test_weights_handed_out_rank_by_rank_take_a_call_for_each_matrix_and_rank(text: str) -> None:
    made, run = pricer("llama-3-8b", "2x8-h100"), stated(text, accumulate=2, seq=1024)
    usual, looped = (made.plan(run.but(rank_by_rank=loops)) for loops in (False, True))
    assert usual is not None and looped is not None
    matrices = 7 * LAYERS + 2
    calls = matrices * run.layout.dp * load_timing().rank_call_s
    seconds = [plan.cost.step_time_s - plan.cost.host_wait_s for plan in (usual, looped)]
    assert seconds[1] - seconds[0] == pytest.approx(calls, rel=1e-6)
    planner = made.planner(run.but(rank_by_rank=True))
    answer = planner.solve(planner.of_space(run.layout.space()), "time")
    assert answer.value == pytest.approx(seconds[1], rel=1e-5)
    assert looped.workload.rank_by_rank and not usual.workload.rank_by_rank


def test_weights_that_all_ranks_hold_are_not_handed_out() -> None:
    for text in ("dp=16", "fsdp=16"):
        run = stated(text, seq=1024)
        made = pricer("llama-3-8b", "2x8-h100")
        usual, looped = (made.plan(run.but(rank_by_rank=loops)) for loops in (False, True))
        assert usual is not None and looped is not None
        assert usual.cost.step_time_s == looped.cost.step_time_s


def test_states_take_the_memory_that_their_stage_says() -> None:
    """Adam in mixed precision: 4 bytes of weights and 8 of moments an element, 2 more of a working copy that is kept."""
    for text, share in (("dp=8", 1), ("dp=8,zero=1", 8), ("fsdp=8", 8)):
        _, plan = planned("1x8-h100", text, seq=512)
        memory = plan.cost.memory_bytes
        kept = 0 if text == "fsdp=8" else 2
        assert memory["optimizer"] == pytest.approx(8 * MATRICES / share, rel=0.01)
        assert memory["params"] == pytest.approx((4 / share + kept) * MATRICES, rel=0.01)


# --- figures -------------------------------------------------------------------------------------------------


def test_model_flops_are_six_per_weight_and_token_and_attentions() -> None:
    planner, _ = planned("1x8-h100", "fsdp=8", seq=1024)
    tokens = 8 * 1024
    products = 6 * tokens * (MATRICES - VOCAB * HIDDEN)  # the embedding is looked up, not multiplied
    # Half of the pairs of a causal mask, two FLOPs each: two products forward and four backward, as PaLM counts. Flash attention's backward
    # computes the scores again, which was counted as a fifth.
    attention = LAYERS * (2 + 4) * 8 * HIDDEN * 1024**2
    assert count_model_flops(planner.graph) == products + attention


def test_speed_is_tokens_over_seconds_and_gpus() -> None:
    priced = shardscope.price(
        "llama-3-8b", cluster="1x8-h100", layout="fsdp=8", accumulate=2, seq=1024, layers=2, advise=False
    )
    assert priced.plan is not None and priced.speed is not None
    step = priced.plan.cost.step_time_s
    assert priced.speed.tokens_per_s_per_gpu == pytest.approx(2 * 1024 / step)
    planner, _ = planned("1x8-h100", "fsdp=8", seq=1024)
    assert priced.speed.mfu == pytest.approx(2 * count_model_flops(planner.graph) / step / 8 / 989e12)
    assert priced.speed.low_s < step < priced.speed.high_s
    run = Budget(1e9, 2.0).to_json(priced.speed, 8)
    assert run["days"] == pytest.approx(1e9 / (8 * 2 * 1024 / step) / 86_400)
    assert run["cost"] == pytest.approx(run["days"] * 24 * 8 * 2.0)


@pytest.mark.parametrize("model", ["llama-3-8b", pytest.param("gpt2-xl", marks=pytest.mark.slow)])
def test_the_best_plan_takes_as_long_as_its_layout(model: str) -> None:
    """Without a batch `price` took one sample of a rank and `plan` the model's own batch, so that their step times told nothing."""
    best = shardscope.plan(model, cluster="1x8-h100", layers=2, tool="fsdp2").best
    priced = shardscope.price(model, cluster="1x8-h100", layers=2, layout="dp=8,zero=2", advise=False)
    assert (best.workload.accumulate, best.workload.recompute, priced.stated.recompute) == (1, "none", "none")
    assert priced.plan is not None and priced.stated.batch == best.workload.batch
    assert priced.plan.cost.step_time_s == pytest.approx(best.cost.step_time_s)


@pytest.mark.parametrize(
    ("layout", "options", "sizes"),
    [
        ("dp=2,tp=8", {}, (8, 1)),
        ("fsdp=16", {"accumulate": 4}, (1, 4)),
        ("dp=4,tp=2,pp=2", {}, (1, 4)),
        ("dp=4,tp=2,pp=2", {"accumulate": 2}, (2, 2)),
        ("fsdp=12", {}, (1, 1)),
        ("dp=5", {}, (3, 1)),
        ("fsdp=16", {"micro_batch": 3}, (3, 1)),
    ],
)
def test_a_step_has_the_batch_of_a_plan_where_no_size_is_stated(
    layout: str, options: dict[str, int], sizes: tuple[int, int]
) -> None:
    """16 samples, or the nearest number that the ranks share; a note says what is assumed, unless the size was stated."""
    pricer = Pricer("llama-3-8b", load_cluster("2x8-h100"))
    stated, notes = pricer.stated_model.state_run(parse_layout(layout), options)
    assert (stated.micro_batch, stated.accumulate) == sizes
    assert len(notes) == ("micro_batch" not in options)
    assert all(f"a step has {stated.batch} samples" in n for n in notes)
    assert all(
        f"micro-batch {stated.micro_batch} is assumed" in n
        if stated.batch == 16
        else "do not share the 16 that a plan has" in n and ("accumulate=4" in n) == ("accumulate" in options)
        for n in notes
    )


@pytest.mark.parametrize("seq", [None, 4096])
def test_tokens_that_nobody_stated_are_said_to_be_assumed(seq: int | None) -> None:
    priced = shardscope.price("llama-3-8b", cluster="1x8-h100", layers=1, layout="fsdp=8", advise=False, seq=seq)
    assert (", 4096 tokens by default, recompute" in price_text(priced)) == (seq is None)


@pytest.mark.parametrize(("cluster", "name"), [("1x8-h100", "best"), ("2x8-h100", "best of one stage")])
def test_the_best_plan_says_where_stages_were_not_searched(cluster: str, name: str) -> None:
    """Beside a stated layout of 9.05 s with stages stood a "best" of 36.2 s, and `plan` had one of 11.3 s."""
    layout = "fsdp=8" if name == "best" else "fsdp=16"
    priced = shardscope.price("llama-3-8b", cluster=cluster, layers=1, layout=layout, advise=False)
    assert f"\n{name}: micro-batch " in price_text(replace(priced, best=priced.plan, best_speed=priced.speed))


@pytest.mark.parametrize(
    ("cluster", "text", "kind", "others"),
    [
        ("1x8-h100", "fsdp=8", "FSDP, one node", 0.05),
        ("2x8-h100", "fsdp=16", "FSDP, to 128 GPUs", 0.05),
        ("2x8-h100", "dp=2,tp=8", "tensor parallel in a node", 0.05),
        ("1x8-h200", "dp=8", "data parallel or ZeRO-1, to 64 ranks", math.hypot(0.05, 0.15)),
    ],
)
def test_a_band_is_that_of_runs_like_it(cluster: str, text: str, kind: str, others: float) -> None:
    """Nine in ten of its kind, beside the spread of software stacks and of a GPU that no run was measured on."""
    row = json.loads((ASSETS / "bands.json").read_text(encoding="utf-8"))["kinds"][kind]
    width = math.hypot(row["p90"], 1.645 * others)
    _, plan = planned(cluster, text, seq=512)
    band = time_band(plan, load_cluster(cluster))
    assert band.kind == kind
    assert (band.low, band.high) == (pytest.approx(math.exp(-width)), pytest.approx(math.exp(width)))


@pytest.mark.parametrize(
    ("cluster", "text", "why"),
    [
        ("2x8-h100:nodes=4,gpus=4", "dp=2,tp=8", "do not state the network between their nodes"),
        ("1x8-h100", "dp=4,cp=2", "splits the tokens of a sample"),
    ],
)
def test_a_kind_of_run_of_which_nothing_was_published_has_no_band(cluster: str, text: str, why: str) -> None:
    _, plan = planned(cluster, text, seq=512)
    band = time_band(plan, load_cluster(cluster))
    assert (band.kind, band.low, band.high, band.runs) == ("not known for this kind of run", None, None, 0)
    assert why in band.why


# --- what is told of a statement ------------------------------------------------------------------------------


def test_a_layout_that_the_model_cannot_follow_says_why() -> None:
    priced = shardscope.price("llama-3-8b", cluster="2x8-h100", layout="tp=16", layers=2)
    assert not priced.legal
    assert priced.reasons == ("8 key and value heads cannot be dealt to tp=16 ranks; give a divisor of 8",)
    report = price_report(priced)
    assert (report["legal"], report["fits"], report["reasons"]) == (False, False, list(priced.reasons))
    assert priced.reasons[0] in price_text(priced)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("fsdp=16", {}),
        ("dp=2,tp=8", {"accumulate": 8, "recompute": "full"}),
        ("dp=2,fsdp=4,tp=2,sp", {"compiled": True}),
    ],
)
@pytest.mark.slow(but=("fsdp=16-more0",))
def test_the_best_is_never_slower_than_what_is_stated(text: str, more: dict[str, Any]) -> None:
    """Nor slower than a suggestion for as many samples: it chooses micro-batches, recomputation and the ZeRO stage."""
    asked = stated(text, seq=2048, **more)
    priced = price_statement(pricer("llama-3-8b", "2x8-h100"), asked)
    assert priced.plan is not None and priced.best is not None and priced.plan.fits
    alike = [s for s in priced.suggestions if (s.stated.batch, s.stated.compiled) == (asked.batch, asked.compiled)]
    least = min(p.cost.step_time_s for p in (priced.plan, *(s.plan for s in alike)))
    assert priced.best.cost.step_time_s <= least * (1 + 1e-9)
    assert priced.best.workload.compiled == asked.compiled and priced.best_speed is not None
    tokens = asked.batch * 2048 / priced.best.cost.step_time_s / 16
    assert priced.best_speed.tokens_per_s_per_gpu == pytest.approx(tokens)
    assert sum((priced.parts or {}).values()) == pytest.approx(priced.plan.cost.step_time_s)


def test_suggestions_are_single_changes_at_their_own_price() -> None:
    made = pricer("llama-3-8b", "2x8-h100")
    priced = price_statement(made, stated("dp=2,tp=8", accumulate=4, seq=8192))
    assert priced.plan is not None and priced.speed is not None and priced.suggestions
    speeds = [s.tokens_per_s_per_gpu for s in priced.suggestions]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > priced.speed.tokens_per_s_per_gpu
    assert any(s.change == "sequence parallelism" for s in priced.suggestions)
    fresh = Pricer("llama-3-8b", load_cluster("2x8-h100"))
    for s in priced.suggestions:
        again = fresh.plan(s.stated)
        assert again is not None and s.plan.fits
        assert again.cost.step_time_s == s.plan.cost.step_time_s


def test_where_nothing_fits_what_would_is_suggested() -> None:
    own = Pricer("llama-3-8b", load_cluster("1x8-h100"), memory_gb=20)
    priced = price_statement(own, stated("dp=8", micro_batch=2, seq=4096))
    assert priced.limited_by == "memory"
    assert priced.suggestions and all(s.plan.fits for s in priced.suggestions)
    assert any("FSDP over all ranks" in s.change for s in priced.suggestions)


def test_a_capture_is_asked_for_once() -> None:
    """What is suggested keeps the samples of a micro-batch where it can: a model is captured for each size only."""
    asked: list[int] = []

    def load(model: Any, **wanted: Any) -> Any:
        asked.append(wanted["batch"])
        return shardscope.load_model(model, **wanted)

    own = Pricer("llama-3-8b", load_cluster("2x8-h100"), load=load)
    price_statement(own, stated("fsdp=16", micro_batch=2, seq=512))
    # Two samples: those of one data-parallel rank beside the tensor ranks of a node and a stage on each node.
    assert sorted(asked) == [2, 16, 32, 64]


@pytest.mark.parametrize(
    ("recompute", "stack", "noted"),
    [
        (
            "selective",
            "megatron",
            "can be told none or full alone (its own selective, of core attention, is priced as none)",
        ),
        ("keep-attention", "torchtitan", "can be told none or selective or full alone"),
        ("full", "megatron", ""),
        ("selective", None, ""),
    ],
)
def test_a_recomputation_that_the_stack_lacks_is_priced_with_a_note(
    recompute: str, stack: str | None, noted: str
) -> None:
    """Megatron-LM's file would recompute every layer whole: 90 s where 77 s were priced."""
    run = Statement(parse_layout("dp=2,tp=4,sp"), seq=128, layers=2, recompute=recompute, stack=stack)
    priced = price_statement(Pricer("llama-3-8b", load_cluster("1x8-h100")), run, advise=False)
    notes = [str(note) for note in priced.notes if "is priced, but" in note]
    assert bool(notes) == bool(noted) and all(noted in note for note in notes)
