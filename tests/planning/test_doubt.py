"""Ties within the doubt of the prediction, and what each plan loses on a machine that is worse than assumed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

import planner_core as shardscope
from explorer.analysis.shortlist import shortlist
from explorer.text.recipe import describe_extra_work
from planner_core.core import InputError, load_cluster, placements_by_pattern
from planner_core.exporters.api import export_text
from planner_core.planning import candidate_meshes, plan_ids, prepare_planner, runs_on_stock_tools
from planner_core.planning.analysis.regret import SCENARIOS, plan_regrets, regret_text
from planner_core.planning.analysis.reporting import plan_report, recomputation, text
from planner_core.planning.fitting.baselines import plan_baselines
from planner_core.planning.methods import BASELINES, OF_MEGATRON, parse_layout
from planner_core.planning.pipeline import Result
from planner_core.planning.pricing import Pricer, Statement, time_band
from planner_core.planning.request import Request
from planner_core.planning.result import MAX_DOUBT, Simplicity, doubt_between
from tests.support.plans import planned, searched


@pytest.fixture(scope="module")
def result() -> Result:
    return planned(Request("llama-3-8b", layers=4), "baselines")


@pytest.fixture(scope="module")
def tight() -> Result:
    """Without recomputation FSDP lacks 0.4 GiB, and Megatron-LM's layouts lack more."""
    return planned(Request("llama-3-8b", cluster="1x8-h100", recompute="auto", accumulate=None), "baselines")


def test_ties_are_what_lies_within_the_doubt(result: Result) -> None:
    found = result.choice
    tied = {t.name for t in found.ties}
    for plan in result.plans[1:]:
        doubt = doubt_between(result.best, plan, result.cluster)
        assert 0 < doubt <= MAX_DOUBT
        slower = plan.cost.step_time_s / result.best.cost.step_time_s - 1
        if plan.fits and plan.name != result.best.name:
            assert (plan.name in tied) == (slower <= doubt)
    assert found.recommended in tied | {found.fastest}
    assert plan_report(result)["choice"]["recommended"] == found.recommended


def test_a_plan_that_was_searched_for_another_objective_may_tie(result: Result) -> None:
    """`compare` called best "faster than every other plan" beside TAPS's plan, which sends least and takes 2 % longer."""
    best, other = result.best, next(p for p in result.plans if p.method == "fsdp")
    cost = replace(other.cost, step_time_s=best.cost.step_time_s * 1.02)
    sends_least = replace(other, name="TAPS", method="taps", objective="communication", cost=cost, fits=True)
    choice = replace(result, plans=(best, sends_least)).choice
    assert [t.name for t in choice.ties] == ["TAPS"] and choice.recommended == best.name
    assert "a tie of best with TAPS (+2.0 %)" in choice.sentence


def test_the_same_plan_under_another_name_is_no_slower_plan(result: Result) -> None:
    """Data parallelism was the best plan of T5 on 8 GPUs, and "best" was called faster than every other."""
    best = result.best
    choice = replace(result, plans=(best, replace(best, name="data parallel", method="data-parallel"))).choice
    assert choice.same == ("data parallel",) and not choice.ties
    assert choice.sentence.startswith("best and data parallel are one plan")
    # The same layout with other micro-batches is another plan.
    staged = replace(best, name="other", workload=replace(best.workload, accumulate=2 * best.accumulate))
    assert not replace(result, plans=(best, staged)).choice.same


def test_of_ties_the_simplest_is_recommended(result: Result) -> None:
    """A baseline that takes 1 % longer is recommended and said to be given up; one that takes 11 % longer is no tie."""
    fsdp = next(p for p in result.plans if p.method == "fsdp")
    best = result.best

    def slower(share: float) -> Result:
        cost = replace(fsdp.cost, step_time_s=best.cost.step_time_s * (1 + share))
        return replace(result, plans=(best, replace(fsdp, cost=cost, fits=True)))

    tied, clear = slower(0.01).choice, slower(0.11).choice
    assert tied.recommended == fsdp.name and f"{best.name} may gain 1.0 %" in tied.sentence
    assert clear.recommended == best.name and not clear.ties


def test_a_baseline_of_mixed_recomputation_is_not_simpler(tight: Result) -> None:
    """No file of a stock tool says "recompute one block of 32", so FSDP's row is passed over for Megatron-LM's, which is slower."""
    slower = {t.name: t.slower for t in tight.choice.ties}
    assert slower["FSDP"] < slower["Megatron-LM + sequence parallel"]
    for plan in tight.plans:
        switches = {b.recompute for label, b in plan.blocks.items() if label}
        assert runs_on_stock_tools(plan) == (plan.method in BASELINES and switches in ({"none"}, {"full"}))
    assert tight.choice.recommended == "Megatron-LM + sequence parallel"
    assert tight.choice.simplicity is Simplicity.STOCK
    # Without Megatron-LM's rows the baseline that ties mixes, and none is simpler than the best plan.
    mixing = replace(tight, plans=tuple(p for p in tight.plans if p.method not in ("megatron", "megatron-sp")))
    tied = [p for p in mixing.plans if p.name in {t.name for t in mixing.choice.ties}]
    assert {p.name for p in tied} >= {"FSDP"} and not any(map(runs_on_stock_tools, tied))
    assert mixing.choice.recommended == mixing.best.name and mixing.choice.simplicity is None
    assert mixing.choice.sentence.endswith("best is the fastest, and none of them is simpler")
    # Of all ZeRO stages it takes 0.4 % less than the best of ZeRO-3 alone, since weights that stay gathered leave less room but send less.
    recomputed = sum(len(b.prefixes) for b in tight.best.blocks.values() if b.recompute == "keep-matmuls")
    listed = shortlist(plan_ids(mixing.plans), mixing.choice, "")
    assert recomputed == 2
    assert listed[0].what == "recommended; the best plan, at most 0.5 % above the bound"
    assert describe_extra_work(tight.best) == f"recompute {recomputed} of 32 blocks"
    zero_3 = searched(replace(tight.request, zero=3))
    assert zero_3.optimal and set(recomputation(zero_3).values()) == {"none"}
    assert tight.best.cost.step_time_s < 0.9965 * zero_3.cost.step_time_s


@pytest.mark.parametrize(("kind", "is_stated"), [("llama", True), ("granite", False)])
def test_a_plan_of_megatron_is_stock_where_its_flags_state_the_model(kind: str, is_stated: bool) -> None:
    """A plan that was recommended since "stock tools run it as it is" was refused by every export. Whatever the model, FSDP runs."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": kind, **sizes, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 16}
    graph = shardscope.load_model(config, batch=4, seq=16)
    planner = prepare_planner(Request("of a config", cluster="1x8-h100:gpus=2", batch=4, seq=16), graph)
    plans = plan_baselines(planner, candidate_meshes(planner.request, planner.cluster))
    stock = {p.method for p in plans if runs_on_stock_tools(p)}
    assert {"data-parallel", "fsdp"} <= stock
    for plan in (p for p in plans if p.method in OF_MEGATRON):
        assert (plan.method in stock) == is_stated
        with nullcontext() if is_stated else pytest.raises(InputError, match="Megatron-LM do not state"):
            export_text(plan, "megatron")


def test_a_baseline_is_as_fast_as_its_own_price(tight: Result) -> None:
    """Both mix recomputation: FSDP recomputes one block of 32, not all of them."""
    fsdp = next(p for p in tight.plans if p.method == "fsdp")
    stated = Statement(parse_layout("fsdp=8"), micro_batch=2, seq=4096, recompute="auto")
    priced = Pricer("llama-3-8b", tight.cluster).plan(stated)
    assert priced.fits and fsdp.fits
    assert fsdp.cost.step_time_s <= priced.cost.step_time_s * (1 + 1e-6)
    assert set(recomputation(fsdp).values()) == {"none", "keep-matmuls"}


def test_without_measured_runs_the_doubt_is_not_known() -> None:
    """No published run of which all is known deals out experts, so none says how far such a plan may be from the next."""
    found = planned(Request("mixtral-8x7b", layers=4), "baselines")
    best = replace(found.best, fits=True)
    assert (why := time_band(best, found.cluster).why)
    for share, ties in ((0.02, 1), (0.5, 0)):
        cost = replace(best.cost, step_time_s=best.cost.step_time_s * (1 + share))
        other = replace(found.plans[-1], fits=True, cost=cost)
        choice = replace(found, plans=(best, other)).choice
        assert len(choice.ties) == ties and choice.no_evidence["best"] == why
        assert "is not known: " in choice.sentence and "prediction's doubt" not in choice.sentence


@pytest.mark.parametrize(("share", "ties"), [(0.02, 1), (0.5, 0)])
def test_the_row_is_named_whose_doubt_is_not_known(result: Result, share: float, ties: int) -> None:
    """It was said of a fastest plan that has a band, and splits the tokens of no sample, since the next row has none."""
    found = planned(Request("mixtral-8x7b", layers=4), "baselines")
    why = time_band(found.best, found.cluster).why
    assert why and not time_band(result.best, result.cluster).why
    cost = replace(result.best.cost, step_time_s=result.best.cost.step_time_s * (1 + share))
    dealt = replace(found.best, name="expert row", fits=True, cost=cost)
    twin = replace(result.best, name="data parallel", method="data-parallel")
    # A row with the fastest plan under another name is not the next plan.
    for rows in ((result.best, dealt), (result.best, twin, dealt)):
        choice = replace(result, plans=rows).choice
        assert len(choice.ties) == ties and choice.no_evidence == {"expert row": why}
        assert choice.sentence.count(f"of expert row is not known: {why}") == 1


def test_the_weights_are_those_of_the_recommended_plan(result: Result) -> None:
    """Below another plan that is the fastest, the table, its head and the allocator's memory are of the one that -o writes."""
    fsdp = next(p for p in result.plans if p.method == "fsdp")
    cost = replace(fsdp.cost, step_time_s=result.best.cost.step_time_s * 1.01)
    tied = replace(result, plans=(result.best, replace(fsdp, cost=cost, fits=True)))
    assert tied.recommended.name == "FSDP" and placements_by_pattern(fsdp) != placements_by_pattern(result.best)
    lines = text(tied).splitlines()
    at = lines.index("how FSDP, the recommended plan, keeps the weights on each mesh axis:")
    rows = {cells[0]: cells[1:] for cells in map(str.split, lines[at + 3 :])}
    assert rows == placements_by_pattern(fsdp)
    assert [line for line in lines if line.startswith("FSDP: PyTorch's allocator will have about")]


def test_a_batch_that_cannot_be_dealt_out_is_named() -> None:
    found = planned(Request("llama-3-8b", cluster="4x8-a100", layers=1, batch=16), "baselines", "notes")
    (note,) = [
        n.sentence for n in found.notes if "cannot be dealt out to 32 GPUs" in n.sentence and "FSDP" in n.sentence
    ]
    assert str(note).startswith("data parallel, FSDP without a plan: 16 samples") and str(note).endswith(
        "batch=32 would do"
    )


def test_regret_prices_every_plan_in_every_scenario(result: Result) -> None:
    found = plan_regrets(result)
    plans = {p.name: p for p in result.plans}
    assert [r.name for r in found] == [p.name for p in result.plans if p.fits]
    for r in found:
        assert r.step_time_s[0] == pytest.approx(plans[r.name].cost.step_time_s, rel=1e-9)
        assert min(r.step_time_s) == r.step_time_s[0], "no worse machine is faster"
        assert r.worst == max(r.lost) >= 0
    assert all(min(column) == 0 for column in zip(*(r.lost for r in found), strict=True))
    assert SCENARIOS[0].title in regret_text(found)


def test_without_overlap_a_step_is_the_sum_of_its_work_and_traffic(result: Result) -> None:
    """Price 1 of a second of traffic beside compute: max(A + B, B) is the sum."""
    none = next(s for s in SCENARIOS if s.contention == 1.0)
    at = SCENARIOS.index(none)
    for r in plan_regrets(result):
        cost = next(p for p in result.plans if p.name == r.name).cost
        assert r.step_time_s[at] >= (cost.compute_time_s + cost.optimizer_time_s + cost.comm_time_s) * (1 - 1e-9)
    model = none.model(result.best, load_cluster("2x8-h100"))
    assert model.contention == 1.0 and model.links == SCENARIOS[0].model(result.best, result.cluster).links


def test_nothing_is_recommended_where_no_plan_fits() -> None:
    result = planned(Request("gpt2-xl", cluster="1x8-h100", batch=8192, accumulate=1, layers=4))
    choice = result.choice
    assert not result.best.fits and not choice.fits and not choice.ties
    assert choice.sentence == f"no plan fits, so none is recommended; {result.best.name} comes nearest"
    # Two nodes of eight GPUs may have stages: Llama-3-70B took 75 GiB in them where its row of one stage takes 100.
    assert replace(choice, leaves_stages=True).sentence.endswith("comes nearest, of one pipeline stage")


@pytest.mark.parametrize("stack", ["torch", "nanotron"])
def test_a_band_ends_at_the_pace_of_a_host_only_where_the_step_has_no_waits_of_its_own(stack: str) -> None:
    """A step of 12.0 s on torch, with 1 ms of waits, was shown as up to 43.8 s, which the legend called published runs."""
    found = planned(Request("t5-large", cluster="1x8-h100", mesh="8", batch=8, seq=512, stack=stack), "baselines")
    band, legend = time_band(found.best, found.cluster), " the upper end is what a host may need"
    assert band.low is not None and band.high is not None
    assert (band.host_s > 0) == (stack == "nanotron") == (legend in text(found))
    assert (band.high * band.low == pytest.approx(1)) == (stack == "torch")
