"""What belongs to the program that trains: each property of a stack changes what its code says it changes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from planner_core.core import Pipeline, Plan, Stack, StageCost, load_cluster, load_stack
from planner_core.cost import block_of, cost_model_of, simulated_pipeline, weight_seconds
from planner_core.planning.methods.layout import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.pricing.bands import time_band

CLUSTER = load_cluster("2x8-a100")
MODEL = "llama-3-8b"
Price = Callable[..., Plan]


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> Price:
    """Prices a layout of a small model under torch's stack with changes."""

    def price(layout: str = "dp=8,tp=2", *, recompute: str = "none", accumulate: int = 4, **changes: object) -> Plan:
        def stack(name: str) -> Stack:
            # It keeps its sums: cast for the update, they would move the peak out of backward, where most changes show.
            return replace(load_stack(name), keeps_sums=True, **changes)  # type: ignore[arg-type]

        monkeypatch.setattr("planner_core.core.workload.software.load_stack", stack)
        stated = Statement(
            parse_layout(layout), 1, accumulate, 2048, layers=4, recompute=recompute, gradients="bfloat16"
        )
        found = Pricer(MODEL, CLUSTER).plan(stated)
        assert found is not None
        return found

    return price


def test_a_checkpoint_to_the_end_runs_the_last_product_again(priced: Price) -> None:
    needed, whole = (priced(recompute="full", checkpoints=c).cost for c in ("needed", "whole"))
    # the down projection is 58.7 of 218 million weights of a layer: as much of a forward runs again
    forward = 4 * 2048 * 4 * 2 * 58.7e6 / 2 / 312e12
    assert 1.0 < (whole.compute_time_s - needed.compute_time_s) / forward < 2.0
    assert abs(whole.memory_bytes["peak"] - needed.memory_bytes["peak"]) < 2**20
    assert priced(checkpoints="whole").cost.step_time_s == pytest.approx(priced().cost.step_time_s)


def test_a_norm_kernel_keeps_its_operand_alone(priced: Price) -> None:
    one, several = (priced("dp=16", norms=n).cost for n in ("kernel", "operators"))
    tokens, width = 2048, 4096
    # nine norms: a float32 copy and the normed tensor, but for the operand, which is kept instead
    saved = 9 * tokens * width * (4 + 2 - 2)
    assert several.memory_bytes["activations"] - one.memory_bytes["activations"] == saved
    assert one.compute_time_s < several.compute_time_s


def test_gathered_logits_are_whole_on_each_tensor_rank(priced: Price) -> None:
    parts, whole = (priced(loss=loss) for loss in ("eager", "gathered"))
    (loss,) = [op for op in whole.blocks[""].sites if "cross_entropy" in op]
    assert str(whole.blocks[""].sites[loss].inputs[0].dst).split("|")[0].endswith("R")
    # half of three float32 copies more, and the logits in bfloat16, of this micro-batch and of the one before
    words, tokens = 128256, 2048
    more = whole.cost.memory_bytes["peak"] - parts.cost.memory_bytes["peak"]
    assert more > words * tokens * (3 * 4 / 2 + 2 * 2)


def test_late_sums_are_float32_and_hide_behind_nothing(priced: Price) -> None:
    beside, late = (priced("dp=16,zero=1", sums=s).cost for s in ("beside", "late"))
    kinds = {t.kind: t for t in late.traffic if t.phase == "backward"}
    assert set(kinds) == {"all_reduce"}
    assert kinds["all_reduce"].num_bytes == 2 * sum(t.num_bytes for t in beside.traffic if t.phase == "backward")
    assert late.exposed_comm_time_s > beside.exposed_comm_time_s + 0.9 * kinds["all_reduce"].time_s


PASS_S = 2 * 1.923e9 / CLUSTER.gpu.bytes_per_s * 1.01
"""Seconds of one pass over the bfloat16 gradients of the model's 1.92 G weights, with 1 % for waits between two nodes."""
COPY, SUM = 1.82, 3.71  # passes, `assets/timing.json`


@pytest.mark.parametrize("accumulate, passes", [(1, COPY), (4, COPY + 3 * SUM)])
def test_a_product_adds_to_the_gradient_itself(priced: Price, accumulate: int, passes: float) -> None:
    kernel, product = (
        priced("dp=16", accumulate=accumulate, summed_in=s).cost.compute_time_s for s in ("kernel", "product")
    )
    assert kernel - product == pytest.approx(passes * PASS_S, rel=0.02)


@pytest.mark.parametrize("accumulate, sums", [(1, 0), (4, 3)])
def test_zero_1_adds_up_whole_gradients_from_the_second_micro_batch_on(
    priced: Price, accumulate: int, sums: int
) -> None:
    none, one, two = (priced(f"dp=16,zero={z}", accumulate=accumulate).cost.compute_time_s for z in (0, 1, 2))
    assert none == one == pytest.approx(two + sums * (SUM - COPY) * PASS_S, rel=1e-3)


def test_a_buffer_of_gradients_is_added_to_by_each_micro_batch(priced: Price) -> None:
    made, standing = (
        priced("dp=16,zero=1", accumulate=1, gradient_buffer=b).cost.compute_time_s for b in (False, True)
    )
    assert standing - made == pytest.approx((SUM - COPY) * PASS_S, rel=0.02)


def test_one_gpu_keeps_the_gradient_that_autograd_makes() -> None:
    """Nothing is sent, so it is written again only for another dtype: 1.6 billion weights, from bfloat16 into float32. torch's optimizer
    takes float32, in whatever dtype gradients would be summed."""
    one = Pricer("gpt2-xl", load_cluster("1x8-h100:gpus=1"))
    for stack, gradients, passes in (
        ("torch", "float32", 2 * COPY),
        ("torch", "bfloat16", 2 * COPY),
        ("deepspeed", "bfloat16", 0),
    ):
        stated = Statement(parse_layout("dp=1"), 1, 1, 256, stack=stack, gradients=gradients)
        plan, planner = one.plan(stated), one.planner(stated)
        assert plan is not None
        model = cost_model_of(plan, one.cluster)
        spent = sum(
            len(bp.prefixes) * weight_seconds(block, op, bp.sites[op.name], False, model)[1]
            for bp, block in ((bp, block_of(planner.graph, label)) for label, bp in plan.blocks.items())
            for op in block.ops
        )
        assert spent == pytest.approx(passes * 2 * 1.64e9 / one.cluster.gpu.bytes_per_s, rel=0.02)


def test_packed_projections_keep_three_tensors_more(priced: Price) -> None:
    packed, apart = (priced("dp=16", qkv=q).cost.memory_bytes["activations"] for q in ("packed", ""))
    assert packed - apart == pytest.approx(4 * 3 * 2048 * 4096 * 2, rel=0.01)


def test_tensor_ranks_send_parts(priced: Price) -> None:
    whole, parts = (priced("dp=4,tp=2,pp=2", boundary=b).cost.pipeline for b in ("whole", "parts"))
    assert whole is not None and parts is not None
    assert parts.stages[0].send_bytes * 2 == whole.stages[0].send_bytes


def test_a_softmax_kernel_keeps_the_scores(priced: Price) -> None:
    flash, softmax = (priced("dp=16", attention=a).cost for a in ("flash2", "softmax"))
    scores = 32 * 2048 * 2048 * 2
    kept = softmax.memory_bytes["activations"] - flash.memory_bytes["activations"]
    assert kept == pytest.approx(4 * scores, rel=0.1)
    assert softmax.compute_time_s > flash.compute_time_s


def test_gradients_of_a_stage_do_not_hold_the_one_before() -> None:
    """Three stages of 1 s and 2 s, whose gradients take 10 s more than their backward: all leave at about the same time."""
    one = StageCost(
        forward_s=1, backward_s=2, weight_s=1, first_s=0, last_s=10, step_s=0, send_s=0, send_bytes=0, peak_bytes=0
    )
    found = simulated_pipeline(Pipeline(3, "1f1b", (1, 1, 1)), [one] * 3, 3)
    assert found.step_s == 3 * 3 + 2 * 3 + 10
    assert found.once_s == (10, 10, 10)
    gathers = replace(one, first_s=4, last_s=0)
    assert simulated_pipeline(Pipeline(3, "1f1b", (1, 1, 1)), [gathers] * 3, 3).step_s == 4 + 3 * 3 + 2 * 3


def test_a_step_with_stages_has_the_band_of_published_ones(priced: Price) -> None:
    band = time_band(priced("dp=4,tp=2,pp=2"), CLUSTER)
    assert band.kind == "pipeline stages" and band.low is not None and band.high is not None
    assert band.low < 0.9 and band.high > 1.1


def test_stages_whose_operators_communicate_over_nodes_have_no_band(priced: Price) -> None:
    band = time_band(priced("tp=8,pp=2"), load_cluster("2x8-a100:nodes=4,gpus=4"))
    assert (band.kind, band.low, band.high) == ("not known for this kind of run", None, None)
