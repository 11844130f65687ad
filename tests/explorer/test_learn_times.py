"""The lessons on time and memory: every number computed again, prices by another way through the library."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from explorer.address import settings
from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.times import l14_pays, l15_step, l16_zero, l17_memory_walk, stated
from explorer.text import units
from planner_core.core import ASSETS, Plan
from planner_core.planning import Planner, price
from planner_core.planning.methods import Layout
from planner_core.planning.request import Request
from tests.support.fitted import H100, inside_s, turn_s
from tests.support.lessons import LLAMA, numbers

pytestmark = pytest.mark.lessons


LAYERS, HIDDEN, INNER, SEQ = 32, 4096, 14336, 4096
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * INNER
"""Weights of a layer's products: q and o, k and v, gate, up and down."""
FLOPS_PER_S = H100["flops_efficiency"] * 989e12


# --- several learners at once ------------------------------------------------------------------------


def test_two_learners_of_one_lesson_wait_for_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Planner] = []

    def choose(planner: Planner, *_: object, **__: object) -> object:
        searched.append(planner)
        time.sleep(0.3)  # a second search would begin meanwhile
        return object()

    monkeypatch.setattr(stated, "choose_mesh", choose)
    learner = Learner(Request("llama-3-8b", cluster="1x8-h100", layers=2, seq=1024))
    with ThreadPoolExecutor(2) as pool:
        plans = [pool.submit(stated.choose_plan, learner, 8) for _ in range(2)]
    assert len(searched) == 1 and plans[0].result() is plans[1].result()


def test_a_search_leaves_what_learners_share_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of two learners on one planner met in its tables, and the page crashed."""
    searching: list[Planner] = []
    of_layout = Planner.of_layout

    def watched(planner: Planner, *args: Any) -> Plan | None:
        searching.append(planner)
        return of_layout(planner, *args)

    monkeypatch.setattr(Planner, "of_layout", watched)
    learner = Learner(Request("llama-3-8b", cluster="1x8-h100", layers=2, seq=1024))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(stated.price_batch, learner, Layout(fsdp=8, zero=z), 8) for z in (2, 3)]
        chosen = pool.submit(stated.choose_plan, learner, 8).result()
    cases = [case.result() for case in asked]
    assert chosen and all(cases) and len({id(planner) for planner in searching}) == len(searching) == 2
    one, other = searching
    for name in ("networks", "work", "graphs", "clock"):
        assert getattr(one, name) is not getattr(other, name), name
    for name in ("tables", "problems", "runs", "operators"):
        assert getattr(one.networks, name) is not getattr(other.networks, name), name
    shared = [learner.planner, *(case.planner for case in cases if case)]
    for planner in shared:
        assert planner.networks.is_empty
        assert planner.work.remaining == planner.effort.request


# --- 14: when does it pay? -------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [512, 1024, 8192])
def test_14_compute_gather_and_sums_of_a_layer(tokens: int) -> None:
    found = numbers(14, tokens=tokens)
    assert found["weights"] == LAYER
    assert found["compute_s"] == pytest.approx(2 * LAYER * tokens / FLOPS_PER_S)
    assert found["gather_s"] == pytest.approx(turn_s(2 * LAYER, 2))
    assert found["sums_s"] == pytest.approx(2 * inside_s(8 * tokens * HIDDEN * 2, 8))
    assert found["crossing"] == pytest.approx(turn_s(2 * LAYER, 2) * FLOPS_PER_S / (2 * LAYER))
    bytes_moved = 2 * (tokens * HIDDEN + HIDDEN * INNER + tokens * INNER)
    assert found["intensity"] == pytest.approx(2 * tokens * HIDDEN * INNER / bytes_moved)
    assert found["ridge"] == pytest.approx(FLOPS_PER_S / (3.35e12 * H100["memory_efficiency"]))


def test_14_slower_wires_move_the_crossing() -> None:
    """An eighth of the bandwidth: the transfer is eight times as long, the latency as before."""
    now, slow = (numbers(14, speed=speed)["crossing"] for speed in (8, 1))
    assert 6 < slow / now < 8


@pytest.mark.parametrize(
    "name, layout, micro_batch",
    [
        ("ZeRO-1", "dp=16,zero=1", 1),
        ("FSDP", "fsdp=16", 1),
        ("HSDP", "dp=2,fsdp=8", 1),
        ("tensor parallel 8", "fsdp=2,tp=8,sp", 8),
    ],
)
def test_14_prices_are_those_of_the_command_price(name: str, layout: str, micro_batch: int) -> None:
    """8 samples of 1 024 tokens in a group of 8 GPUs, or one for each: the same tokens per GPU."""
    found = price("llama-3-8b", layout=layout, micro_batch=micro_batch, seq=1024, advise=False)
    assert found.plan is not None
    assert numbers(14, tokens=1024)[f"{name}_s"] == pytest.approx(found.plan.cost.step_time_s, rel=1e-6)


@pytest.mark.parametrize("number, zero_1, fsdp", [(14, 0, 1), (16, 1, 3)])
def test_waits_for_the_host_are_a_part_of_their_own(number: int, zero_1: int, fsdp: int) -> None:
    """FSDP copies each layer that it gathers, so it computes longer than ZeRO-1. GPT-2 XL's kernels are so short that the GPU waits for
    the host as well, for longer than it computes: seconds that are of neither layout's products."""
    scene = LESSONS[number - 1].scene(Learner(Request("gpt2-xl")), LESSONS[number - 1].defaults())
    (markup,) = (s.picture for s in scene.steps if "price" in s.title.lower())
    computed = [_read_ms(x) for x in re.findall(r"<title>compute: ([^<]+)</title>", markup)]
    waited = [_read_ms(x) for x in re.findall(r"<title>waits for the host: ([^<]+)</title>", markup)]
    assert computed[zero_1] < computed[fsdp]
    assert len(waited) == len(computed)
    assert waited[zero_1] > computed[zero_1]


def _read_ms(shown: str) -> float:
    figure, unit = shown.split()
    return float(figure) * {"s": 1e3, "ms": 1, "µs": 1e-3}[unit]


def test_14_the_map_has_its_regimes() -> None:
    """Few tokens and slow links: tensor parallelism in the node. Many: only what is gathered from all GPUs still fits."""
    cases = {tokens: l14_pays.price_layouts(LLAMA, tokens) for tokens in l14_pays.TOKENS}
    slow, fast = (l14_pays.scale_outer_links(LLAMA.cluster, speed) for speed in (1, 16))
    assert l14_pays.best_layout(cases[512], slow) == "tensor parallel 8"
    assert [name for name, case in cases[8192].items() if case.plan.fits] == ["FSDP"]
    assert l14_pays.best_layout(cases[8192], fast) == l14_pays.best_layout(cases[8192], slow) == "FSDP"
    for found in cases.values():
        for cluster in (slow, fast):
            took = {name: sum(case.seconds(cluster)) for name, case in found.items() if case.plan.fits}
            assert l14_pays.fastest_with_ties(found, cluster).split(" ≈ ")[0] == min(took, key=lambda name: took[name])


def test_14_the_question_asks_for_the_crossing() -> None:
    question = LESSONS[13].question(LLAMA, LESSONS[13].defaults())
    told = re.sub(r"\D", "", question.options[question.answer])
    assert int(told) == pytest.approx(numbers(14)["crossing"], rel=0.05)


# --- 15: a step in time ----------------------------------------------------------------------------

WAYS = {
    "data": ("dp=16,zero=1", 1),
    "fsdp": ("fsdp=16", 1),
    "hsdp": ("dp=2,fsdp=8", 1),
    "tensor": ("fsdp=2,tp=8,sp", 8),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample
def test_15_the_parts_add_up_to_the_price_of_the_command(way: str) -> None:
    layout, micro_batch = WAYS[way]
    found, told = (
        numbers(15, way=way, tokens=2048),
        price("llama-3-8b", layout=layout, micro_batch=micro_batch, seq=2048, advise=False),
    )
    assert told.plan is not None
    cost = told.plan.cost
    assert found["step_s"] == pytest.approx(cost.step_time_s, rel=1e-6)
    what = ("compute", "host", "waited for", "contention", "not hidden", "at the ends", "optimizer")
    parts = [found[f"{x}_s"] for x in what]
    assert sum(parts) == pytest.approx(cost.step_time_s, rel=1e-6)
    assert found["compute_s"] == pytest.approx(cost.gpu_compute_s, rel=1e-6)
    assert found["host_s"] == pytest.approx(cost.host_wait_s, rel=1e-6)


def test_15_a_layer_takes_its_longer_side() -> None:
    """FSDP over two nodes: a layer's gather beside its compute, and backward the gather again and the fp32 scatter."""
    found, k = numbers(15, way="fsdp", tokens=2048), 0.196
    layer = LAYER + 2 * HIDDEN  # the norms ride in the same bucket, and stay whole
    gather, scatter = turn_s(2 * layer, 2) * LAYER / layer, turn_s(4 * layer, 2) * LAYER / layer
    assert found["forward_traffic_s"] == pytest.approx(gather)
    # And the sums of two norms' gradients.
    assert found["backward_traffic_s"] == pytest.approx(gather + scatter, rel=1e-3)
    for phase in ("forward", "backward"):
        traffic = found[f"{phase}_traffic_s"]
        compute = found["forward_compute_s"] if phase == "forward" else found["backward_s"] - k * traffic
        assert found[f"{phase}_s"] == pytest.approx(max(compute + k * traffic, traffic))
    assert found["forward_waits_s"] == 0
    # few tokens: the gather is the longer side and decides
    few = numbers(15, way="fsdp", tokens=512)
    assert few["forward_s"] == few["forward_traffic_s"] == pytest.approx(gather)


def test_15_a_bucket_pays_one_latency() -> None:
    found = numbers(15, way="fsdp")
    sizes = [HIDDEN * HIDDEN, HIDDEN * 1024, HIDDEN * 1024, HIDDEN * HIDDEN, *[HIDDEN * INNER] * 3]
    assert found["apart_s"] == pytest.approx(sum(turn_s(2 * size, 2) for size in sizes))
    assert found["bucket_s"] == pytest.approx(turn_s(2 * LAYER, 2))


def test_15_layers_one_after_the_other_take_what_the_formula_says() -> None:
    """Layer by layer on two streams: the next gather starts with this layer's compute, a layer when its weights are there."""
    case, _ = l15_step.plan_layout(LLAMA, "fsdp", 512)
    for p in l15_step.layer_phases(case):
        now = gathered = 0.0
        for _ in range(100):
            start = max(now, gathered)
            now, gathered = start + p.busy, start + p.traffic
        assert max(now, gathered) == pytest.approx(100 * p.seconds)


@pytest.mark.parametrize(
    "number, controls, wanted",
    [
        (14, {"tokens": 1024, "speed": 4}, {"batch": 16, "seq": 1024, "accumulate": 1, "inter": 200.0}),
        (14, {"tokens": 8192, "speed": 8}, {"batch": 32, "seq": 4096, "accumulate": 1, "inter": None}),
        (15, {"tokens": 512}, {"batch": 16, "seq": 512, "accumulate": 1}),
        (16, {"m": 4}, {"batch": 64, "seq": 2048, "accumulate": 4}),
        (17, {"m": 2, "recompute": "full"}, {"batch": 32, "seq": 4096, "accumulate": 2, "recompute": "full"}),
        (18, {"m": 8}, {"batch": 128, "seq": 1024, "accumulate": 8}),
    ],
)
def test_the_link_carries_the_lessons_tokens(
    number: int, controls: dict[str, int | str], wanted: dict[str, object]
) -> None:
    lesson = LESSONS[number - 1]
    assert lesson.focus
    values, problems = settings.parse_query(lesson.focus(LLAMA, {**lesson.defaults(), **controls}))
    assert not problems and {k: values[k] for k in wanted} == wanted


def test_15_the_question_is_where_both_sides_are_equal() -> None:
    for tokens in (512, 8192):
        found, question = (
            numbers(15, way="fsdp", tokens=tokens),
            LESSONS[14].question(LLAMA, {"way": "fsdp", "tokens": tokens}),
        )
        x = question.values[question.answer] / 1e3
        assert x == pytest.approx(found["forward_compute_s"] + 0.196 * x) == pytest.approx(found["decides_s"])


def test_15_the_optimizer_is_told_byte_by_byte() -> None:
    """AdamW in mixed precision: weight 4 + 4, two averages 8 + 8, gradient 4, clipped by three passes of 4, the copy of 2 from 4."""
    found = numbers(15, way="fsdp")
    assert found["bytes_each"] == 8 + 16 + 4 + 3 * 4 + (4 + 2)
    assert found["updated"] == pytest.approx(PARAMS / 16, rel=2e-3)  # norms stay whole
    rate = 3.35e12 * H100["memory_efficiency"]
    assert found["optimizer_s"] == pytest.approx(found["updated"] * 46 / rate)
    assert found["bytes_one_by_one"] == 20 * 4 + 3 * 4 + (4 + 2)
    step = LESSONS[14].scene(LLAMA, LESSONS[14].defaults()).steps[6]
    assert "98 bytes" in step.says and f"takes {units.seconds(found['optimizer_s'])}" in step.says
    assert "46 bytes" in step.picture


@pytest.mark.parametrize("number", [14, 15, 16, 17, 18, 20, 21])
@pytest.mark.slow(but=("15", "20"))
def test_a_gpu_that_is_slow_in_the_learners_numbers_is_told(number: int) -> None:
    """The V100 has tensor cores for fp16 only: the planner prices bf16 at its rate in fp32, an eighth."""
    lesson, notes = LESSONS[number - 1], {}
    for dtype in ("bfloat16", "float16", "float32"):
        learner = Learner(Request("gpt2-xl", cluster="2x8-v100-eth", dtype=dtype))
        notes[dtype] = lesson.scene(learner, lesson.defaults()).note
    assert (
        "no tensor cores for bfloat16" in notes["bfloat16"]
        and "15.7 TFLOP/s; in float16 it is 125" in notes["bfloat16"]
    )
    assert "tensor cores" not in notes["float16"] + notes["float32"]
    assert "in fp16 here, not in fp32" in notes["float32"]


def test_14_computes_in_the_learners_numbers() -> None:
    slow, fast = (
        LESSONS[13].scene(Learner(Request("gpt2-xl", cluster="2x8-v100-eth", dtype=d)), LESSONS[13].defaults()).numbers
        for d in ("bfloat16", "float16")
    )
    assert slow["compute_s"] / fast["compute_s"] == pytest.approx(125 / 15.7)
    assert slow["ridge"] / fast["ridge"] == pytest.approx(15.7 / 125)


def test_15_ties_tell_the_bands_of_published_runs() -> None:
    table = LESSONS[14].scene(LLAMA, LESSONS[14].defaults()).steps[-1].picture
    kinds = json.loads((ASSETS / "bands.json").read_text(encoding="utf-8"))["kinds"]
    for kind in ("FSDP, to 128 GPUs", "tensor parallel in a node"):
        assert f"{kind}, {kinds[kind]['n']} runs" in table


# --- 16: ZeRO 0 to 3 and HSDP ----------------------------------------------------------------------

PARAMS = 8_030_261_248
LAYOUTS = {
    "data parallel": "dp=16",
    "ZeRO-1": "dp=16,zero=1",
    "ZeRO-2": "dp=16,zero=2",
    "FSDP (ZeRO-3)": "fsdp=16",
    "HSDP": "dp=2,fsdp=8",
}


@pytest.mark.parametrize("m", [1, 4])
def test_16_the_rule_is_what_the_planner_counts(m: int) -> None:
    """Bytes per parameter, weights in 2 and gradients in 4; the embedding's rows are not gathered again for backward."""
    found = numbers(16, m=m)
    rules = {
        "data parallel": 2 * 4,
        "ZeRO-1": 2 + 4,
        "ZeRO-2": 2 + m * 4,
        "FSDP (ZeRO-3)": m * (2 + 2 + 4),
    }
    for name, each in rules.items():
        assert found[f"{name} formula"] == pytest.approx(15 / 16 * each * PARAMS)
    assert found["HSDP formula"] == pytest.approx(7 / 8 * m * 8 * PARAMS + 2 * 1 / 2 * 4 * PARAMS / 8)
    for name in LAYOUTS:
        part = 7 / 8 if name == "HSDP" else 15 / 16
        spared = m * part * 2 * 128256 * HIDDEN if name in ("FSDP (ZeRO-3)", "HSDP") else 0
        assert found[f"{name} sent"] == pytest.approx(found[f"{name} formula"] - spared, rel=1e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_16_memory_and_time_are_those_of_the_command_price(name: str) -> None:
    told = price("llama-3-8b", layout=LAYOUTS[name], micro_batch=1, accumulate=4, seq=2048, advise=False)
    assert told.plan is not None
    found, cost = numbers(16, m=4), told.plan.cost
    assert found[f"{name} s"] == pytest.approx(cost.step_time_s, rel=1e-6)
    assert found[f"{name} peak"] == cost.memory_bytes["peak"]


def test_16_every_stage_deals_out_one_kind_more() -> None:
    """18 bytes per parameter: 2 to compute with, 4 of the optimizer's own weights, 8 of averages, 4 of gradients."""
    told = [sum(l16_zero.kept_per_parameter(stage, 16).values()) for stage in range(4)]
    assert told == pytest.approx([18, 2 + 12 / 16 + 4, 2 + 16 / 16, 16 / 16])
    # what is kept all the time is in the planner's own peak, where a micro-batch came before
    found = numbers(16, m=4)
    for stage, name in enumerate(list(LAYOUTS)[:4]):
        assert found[f"{name} peak"] >= told[stage] * PARAMS
    four = LESSONS[15].question(LLAMA, {"m": 4})
    assert four.options[four.answer] == "11 times"  # with twice as many: 8 · 8 / 6


# --- 17: memory through a step ---------------------------------------------------------------------


@pytest.mark.parametrize("recompute, m", [("none", 1), ("none", 4), ("full", 1), ("full", 8)])
@pytest.mark.sample
def test_17_the_highest_point_of_the_curve_is_the_plans_memory(recompute: str, m: int) -> None:
    found = numbers(17, recompute=recompute, m=m)
    told = price(
        "llama-3-8b",
        layout="fsdp=16",
        micro_batch=max(1, 2 // m),
        accumulate=m,
        seq=min(SEQ, 8192 // m),
        recompute=recompute,
        advise=False,
    )
    assert told.plan is not None
    cost = told.plan.cost
    assert found["peak"] == found["walk"] == cost.memory_bytes["peak"]
    assert found["step_s"] == pytest.approx(cost.step_time_s, rel=1e-6)
    # fp32 weights and two averages, dealt out to 16 GPUs; norms stay whole
    assert found["standing"] == pytest.approx(12 * PARAMS / 16, rel=2e-3)


def test_17_what_is_kept_goes_with_the_tokens_and_recomputation_keeps_inputs() -> None:
    one, four = (numbers(17, m=m)["kept"] for m in (1, 4))
    assert one / four == pytest.approx(4, rel=0.01)
    inputs = LAYERS * 8192 * HIDDEN * 2
    # The loss keeps its logits in fp32.
    assert inputs < numbers(17, recompute="full")["kept"] < 1.3 * inputs + 8192 * 128256 * 4


def test_17_the_question_asks_for_the_highest_point() -> None:
    for values in ({"recompute": "none", "m": 1}, {"recompute": "full", "m": 8}):
        case = stated.price_usual(LLAMA, "FSDP (ZeRO-3)", 8192 // values["m"], values["m"], values["recompute"])
        found, turn, step = l17_memory_walk.memory_moments(case)
        at = max(range(len(found)), key=lambda i: found[i].total)
        question = LESSONS[16].question(LLAMA, values)
        assert question.answer == l17_memory_walk.phase_of_peak(case)
        right = question.options[question.answer]
        assert (at < turn) == (right in ("On the way forward",)) or abs(at - turn) <= turn // 20
        assert (at >= step) == (right == "In the optimizer's step")
