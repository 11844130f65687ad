"""Micro-batches, measured runs, algorithms of collectives: every number computed again; typed answers; pictures in motion."""

from __future__ import annotations

import csv
import itertools
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from explorer.figures.svg_tensors import Drawing, text
from explorer.learn.learner import Learner
from explorer.learn.lesson import Option, number_question
from explorer.learn.lessons import BY_KEY, LESSONS, tensors
from explorer.learn.lessons.basics import l02_cuts, l03_placements, l04_collectives
from explorer.learn.lessons.layers import l05_mlp, l07_sequence, l11_debug
from explorer.learn.lessons.planners import l20_uneven, l21_long, l22_two_dims
from explorer.learn.lessons.times import l09_algorithms, l18_micro_batches, l19_measured, stated
from explorer.learn.pictures.film import Cell, Film, Flight
from explorer.learn.visit import answers, progress
from explorer.text import units
from planner_core.core import ASSETS, parse_placement
from planner_core.planning import price
from planner_core.planning.request import Request
from tests.support.fitted import FITTED, H100, NETWORK, across_s, inside_s, took_s, turn_s
from tests.support.lessons import LLAMA, numbers

pytestmark = pytest.mark.lessons


PARAMS, LAYERS, HIDDEN, INNER = 8_030_261_248, 32, 4096, 14336
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * INNER
PUBLISHED = ASSETS / "measurements" / "published"


# --- 18: micro-batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_18_the_gradients_of_micro_batches_add_up(m: int) -> None:
    c = l18_micro_batches.micro_batch_gradients(m)
    assert len(c["parts"]) == m and c["error"] == 0
    assert np.array_equal(sum(np.array(p.tolist()) for p in c["parts"]), np.array(c["whole"].tolist()))
    assert m == 1 or not np.array_equal(np.array(c["parts"][0].tolist()), np.array(c["whole"].tolist()))


def test_18_what_comes_again_and_what_comes_once() -> None:
    """Bytes per parameter on 16 GPUs: gathers of 2, scatters of 4. The embedding's rows are not gathered again for backward."""
    part, rows = 15 / 16, 128256 * HIDDEN
    want = {"ZeRO-1": (2 + 4, 0), "ZeRO-2": (2, 4), "FSDP (ZeRO-3)": (0, 8)}
    for way, (once, again) in want.items():
        got = l18_micro_batches.split_sent_bytes(LLAMA, way)
        spared = part * 2 * rows if way == "FSDP (ZeRO-3)" else 0
        # Norms stay whole: their gradients are summed.
        assert got[0] == pytest.approx(part * once * PARAMS, rel=1e-3, abs=3e6)
        assert got[1] == pytest.approx(part * again * PARAMS - spared, rel=1e-3, abs=3e6)
        four = numbers(18, way=way, m=4)
        assert four["sent"] == pytest.approx(four["once"] + 4 * four["again"])


def test_18_the_gathers_of_a_micro_batch() -> None:
    """All 32 layers: a gather forward, one backward, and the fp32 scatter; under ZeRO-1 once a step."""
    found = numbers(18, m=4)
    gather, scatter = (
        LAYERS * turn_s(size * (LAYER + 2 * HIDDEN), 2) * LAYER / (LAYER + 2 * HIDDEN) for size in (2, 4)
    )
    assert found["forward_again_s"] == pytest.approx(gather, rel=1e-3)
    assert found["backward_again_s"] == pytest.approx(gather + scatter, rel=1e-3)
    kept = numbers(18, way="ZeRO-1", m=4)
    assert kept["forward_again_s"] == 0 and kept["forward_once_s"] == pytest.approx(gather, rel=1e-3)


@pytest.mark.parametrize("way, layout", [("ZeRO-2", "dp=16,zero=2"), ("FSDP (ZeRO-3)", "fsdp=16")])
def test_18_prices_are_those_of_the_command_price(way: str, layout: str) -> None:
    told = price("llama-3-8b", layout=layout, micro_batch=1, accumulate=4, seq=2048, advise=False)
    assert told.plan is not None
    found = numbers(18, way=way, m=4)
    assert found["step_s"] == pytest.approx(told.plan.cost.step_time_s, rel=1e-6)
    assert found["peak"] == told.plan.cost.memory_bytes["peak"]


def test_18_the_last_step_names_the_quickest_that_fits() -> None:
    last = LESSONS[17].scene(LLAMA, LESSONS[17].defaults()).steps[-1]
    plans = {
        (name, m): stated.price_usual(LLAMA, str(way), l18_micro_batches.TOKENS // m, m).plan
        for way, name in LESSONS[17].controls[0].names.items()
        for m in (1, 2, 4, 8)
    }
    name, m = min((at for at in plans if plans[at].fits), key=lambda at: plans[at].cost.step_time_s)
    assert f"**{name} with {m} micro-batch" in last.says
    assert last.picture.count("does not fit") == sum(not plan.fits for plan in plans.values())


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_18_the_question_counts_the_gathers_of_a_kept_layer(m: int) -> None:
    """Walk through a step: gather what is not there; keep it until the backward pass of the same micro-batch."""
    there, gathers = False, 0
    for _ in range(m):
        for phase in ("forward", "backward"):
            gathers, there = gathers + (not there), phase == "forward"
    question = LESSONS[17].question(LLAMA, {**LESSONS[17].defaults(), "m": m})
    assert question.values[question.answer] == gathers == m


# --- 19: predicted and measured ---------------------------------------------------------------------


def published() -> list[tuple[dict[str, str], dict[str, str]]]:
    """Predicted runs with their shapes, read anew."""
    with (
        (PUBLISHED / "predicted.csv").open(encoding="utf-8", newline="") as a,
        (PUBLISHED / "runs.csv").open(encoding="utf-8", newline="") as b,
    ):
        shapes = {row["id"]: row for row in csv.DictReader(b)}
        return [(row, shapes[row["id"]]) for row in csv.DictReader(a)]


def test_19_flops_of_a_run() -> None:
    """MPT-70b on 512 H100: 80 layers of 8 192, all computed again: 8 FLOP per weight and token, and half of attention's square."""
    run = next(r for r in l19_measured.fitted_runs() if r.run.id == "r0001")
    tokens, d = 8 * 2048, 8192
    weights = 80 * (4 * d * d + 2 * d * 32768) + d * 50368
    assert run.flops == pytest.approx(tokens * (8 * weights + 4 * 2 * 80 * 2048 * d))
    # the source's own count, 8 times parameters and tokens a second, without attention
    assert run.flops == pytest.approx(8 * 64862437376 * tokens, rel=0.05)
    assert run.share == pytest.approx(run.flops / (989e12 * 16.2701))


@pytest.mark.parametrize("share", [40, 80])
def test_19_residuals_of_one_constant(share: int) -> None:
    found = numbers(19, share=share)
    rows = published()
    assert found["runs"] == len(rows) == 194
    errors = [
        abs(r.flops / (share / 100 * r.peak) / float(row["measured_s"]) - 1)
        for r, (row, _) in zip(l19_measured.fitted_runs(), rows, strict=True)
    ]
    assert found["median"] == pytest.approx(np.median(errors)) and found["nine"] == pytest.approx(
        np.quantile(errors, 0.9)
    )
    # no other constant has a smaller median error
    shares = np.array([r.share for r in l19_measured.fitted_runs()])
    least = min(np.median(np.abs(shares / c - 1)) for c in np.linspace(0.2, 0.8, 601))
    assert found["best_median"] <= least + 1e-9
    assert found["median"] >= found["best_median"] > 4 * found["planner_median"]


def test_19_the_planner_has_not_seen_the_runs_group() -> None:
    found = numbers(19)
    errors = [abs(float(row["group_out_s"]) / float(row["measured_s"]) - 1) for row, _ in published()]
    assert found["planner_median"] == pytest.approx(np.median(errors))
    assert found["planner_nine"] == pytest.approx(np.quantile(errors, 0.9))


def test_19_the_order_of_pairs() -> None:
    found, rows = numbers(19), published()
    flops = [
        r.flops / (4 / 3 if row["recompute"] == "full" else 1)
        for r, (row, _) in zip(l19_measured.fitted_runs(), rows, strict=True)
    ]
    right = count = 0
    for i, (a, _) in enumerate(rows):
        for j, (b, _) in enumerate(rows[:i]):
            if any(a[k] != b[k] for k in ("source", "model", "gpu")):
                continue
            x, y = float(a["measured_s"]) / flops[i], float(b["measured_s"]) / flops[j]
            if abs(math.log(x / y)) > 0.05:
                count += 1
                right += (x < y) == (float(a["group_out_s"]) / flops[i] < float(b["group_out_s"]) / flops[j])
    assert (found["pairs"], found["planner_order"]) == (count, pytest.approx(right / count))
    assert found["planner_order"] > 0.9 > found["one_order"] > found["one_alike"] > 0.5


# --- 9: rings, trees and switches --------------------------------------------------------------------


@pytest.mark.parametrize("n, size", [(2, 2**14), (64, 2**20), (512, 2**29)])
def test_9_formulas_from_the_fitted_constants(n: int, size: int) -> None:
    found = numbers(9, n=n, bytes=size)
    moved, start = 2 * (n - 1) / n * size / NETWORK, FITTED["summing"] * FITTED["base_s"]
    ring = start + 2 * (n - 1) * FITTED["summing"] * FITTED["ring_hop_s"]
    assert found["ring_s"] == pytest.approx(took_s(ring, moved), rel=1e-3)
    assert found["tree, in pieces_s"] == pytest.approx(across_s(size, n)) == pytest.approx(found["planner_s"])
    tree = start + 2 * math.log2(n) * FITTED["tree_hop_s"]
    assert found["tree, whole tensors_s"] == pytest.approx(took_s(tree, 2 * math.log2(n) * size / NETWORK))
    assert found["tree_hops"] == 2 * math.log2(n) and found["ring_hops"] == 2 * (n - 1)


def test_9_the_switch_and_the_planners_table() -> None:
    steps = LESSONS[8].scene(LLAMA, {**LESSONS[8].defaults(), "bytes": 2**26}).steps
    shown = [float(x) for x in re.findall(r"([\d.]+) ms", steps[4].says)]
    assert shown[0] == pytest.approx(1e3 * inside_s(2**26, 8), rel=0.01)
    rate = 450e9 * FITTED["efficiency"] * (1 - FITTED["few"] / 8)
    plain = took_s(FITTED["summing"] * (FITTED["base_s"] + 7 * FITTED["hop_s"]), 2 * 7 / 8 * 2**26 / rate)
    assert shown[1] == pytest.approx(1e3 * plain, rel=0.01)
    assert "512 GPUs of 64 nodes" in steps[5].picture
    assert f"{1e3 * turn_s(2**26, 64):.3g}"[:3] in steps[5].picture


@pytest.mark.parametrize(
    "states, sends",
    [(l09_algorithms.run_ring([3, 1, 4, 1]), None), (l09_algorithms.run_tree([3, 1, 4, 1]), 6)],
)
def test_9_all_members_hold_the_sum_at_the_end(states: list, sends: int | None) -> None:
    last = states[-1] if sends is None else states[-1][0]
    assert last == [9] * 4 and len(states) == 1 + (6 if sends is None else 4)
    if sends:
        assert sum(len(sent) for _, sent in states) == sends


def test_9_the_films_show_the_data_at_every_stop() -> None:
    ring, tree = (s.picture for s in LESSONS[8].scene(LLAMA, LESSONS[8].defaults()).steps[:2])
    states = l09_algorithms.run_ring(l09_algorithms.FIRST_NUMBERS)
    assert [at(ring, k) for k in range(len(states))] == [sorted(s) for s in states]
    rounds = l09_algorithms.run_tree(l09_algorithms.FIRST_NUMBERS)
    assert [at(tree, k) for k in range(len(rounds))] == [sorted(s) for s, _ in rounds]


def at(film: str, stop: int) -> list[float]:
    """The numbers that stand in a film's cells at one stop."""
    root = ElementTree.fromstring(film)
    cells = [
        g
        for g in root.iter("g")
        if g.get("class") == "cell" and int(g.get("data-from", "")) <= stop <= int(g.get("data-to", ""))
    ]
    return sorted(float((t.text or "").replace("−", "-")) for g in cells for t in g.iter("text"))


# --- 20: experts, uneven ------------------------------------------------------------------------------


@pytest.mark.parametrize("skew, factor, seed", [(0, 0, 0), (2, 125, 0), (3, 100, 4), (3, 200, 1)])
def test_20_loads_capacity_and_what_is_dropped(skew: int, factor: int, seed: int) -> None:
    load = l20_uneven.tokens_by_expert(skew, seed)
    found = numbers(20, skew=skew, factor=factor, seed=seed)
    assert sum(load) == found["tokens"] == 256 and found["hottest"] == max(load)
    assert found["ratio"] == max(load) / 32
    if factor:
        places = 32 * factor // 100
        assert found["capacity"] == places
        assert found["dropped"] == sum(x - places for x in load if x > places)
        assert found["empty"] == sum(places - x for x in load if x < places)
    else:
        assert (found["dropped"], found["empty"]) == (0, 0)
    # Mixtral: 32 layers, two of eight experts with three products of 4 096 by 14 336
    rate = H100["flops_efficiency"] * 989e12
    assert found["experts_s"] == pytest.approx(2 * 3 * 4096 * 14336 * 2 * 2048 * 32 / rate)


@pytest.mark.parametrize("skew, seed", [(0, 0), (2, 0), (3, 5)])
def test_20_the_question_is_the_share_of_waiting(skew: int, seed: int) -> None:
    load = l20_uneven.tokens_by_expert(skew, seed)
    question = LESSONS[19].question(LLAMA, {**LESSONS[19].defaults(), "skew": skew, "seed": seed})
    waits = sum(max(load) - x for x in load) / (8 * max(load))
    assert question.values[question.answer] == pytest.approx(100 * waits)


def test_20_an_unfair_router_is_less_even_and_fsdp_costs_what_the_command_says() -> None:
    fair, unfair = (np.mean([max(l20_uneven.tokens_by_expert(skew, seed)) for seed in range(6)]) for skew in (0, 3))
    assert fair > 32 and unfair > 2 * fair
    told = price("mixtral-8x7b", layout="fsdp=16", micro_batch=1, seq=2048, advise=False)
    assert told.plan is not None
    assert numbers(20)["step_s"] == pytest.approx(told.plan.cost.step_time_s, rel=1e-6)
    assert "takes routing to be fair" in LESSONS[19].scene(LLAMA, LESSONS[19].defaults()).steps[-1].says


@pytest.mark.parametrize("skew", [0, 3])
def test_20_experts_dealt_out_cost_what_the_command_says(skew: int) -> None:
    """With a fair router, and with the load of the fullest GPU of the lesson's router."""
    found = numbers(20, skew=skew)
    load = l20_uneven.tokens_by_expert(skew, LESSONS[19].defaults()["seed"])
    assert l20_uneven.fullest_over_mean(load, 8) == max(load) / 32 and l20_uneven.fullest_over_mean(load, 1) == 1
    for name, imbalance in (("dealt_s", 1.0), ("uneven_s", max(load) / 32)):
        told = price(
            "mixtral-8x7b", layout="fsdp=16,ep=8", micro_batch=1, seq=2048, expert_imbalance=imbalance, advise=False
        )
        assert told.plan is not None and found[name] == pytest.approx(told.plan.cost.step_time_s, rel=1e-6)
    assert found["dealt_s"] <= found["uneven_s"]


# --- 21: long sequences -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.sample
def test_21_the_ring_puts_the_softmax_together(n: int) -> None:
    c = l21_long.run_ring_attention(n)
    assert 0 <= c["error"] < 1e-12
    assert c["weights"][-1] == pytest.approx(c["first"])  # the sum that softmax divides by, over all keys
    assert all(
        b > a
        for before, after in zip(c["weights"], c["weights"][1:], strict=False)
        for a, b in zip(before, after, strict=True)
    )
    seen = [set() for _ in range(n)]
    for holds in c["holds"][:-1]:
        for r, part in enumerate(holds):
            seen[r].add(part)
    assert all(parts == set(range(n)) for parts in seen)


@pytest.mark.parametrize("n, tokens", [(2, 8192), (4, 131072)])
def test_21_balance_and_bytes(n: int, tokens: int) -> None:
    found = numbers(21, n=n, tokens=tokens)
    pairs = [sum(q + 1 for q in (2 * r, 2 * r + 1)) for r in range(n)]
    assert (found["most"], found["least"]) == (max(pairs), min(pairs))
    assert (
        sum(l21_long.causal_pairs(n, True)) == sum(pairs) == n * (2 * n + 1)
        and len(set(l21_long.causal_pairs(n, True))) == 1
    )
    assert found["ratio"] == pytest.approx(max(pairs) / (2 * n + 1))
    # 8 key-value heads of 128: keys and values of the other parts pass by; or everything is exchanged
    assert found["ring"] == (n - 1) * tokens // n * 2 * 1024 * 2
    assert found["heads exchanged"] == (n - 1) * (2 * 4096 + 2 * 1024) * tokens * 2 // n**2
    rate = H100["flops_efficiency"] * 989e12
    assert found["attention_s"] == pytest.approx(4 * tokens * tokens / 2 * 4096 / n / rate)


@pytest.mark.parametrize("n", [2, 4])
def test_21_the_question_is_about_twice_as_many_gpus(n: int) -> None:
    """Every pair of blocks of 4n of which the key's is not behind the query's; the last GPU has the last two queries' blocks."""
    blocks = range(4 * n)
    pairs = [(q, k) for q in blocks for k in blocks if k <= q]
    last = sum(q >= 4 * n - 2 for q, _ in pairs)
    question = LESSONS[20].question(LLAMA, {**LESSONS[20].defaults(), "n": n})
    assert question.values[question.answer] == pytest.approx(last / (len(pairs) / (2 * n)))


@pytest.mark.parametrize("n, tokens", [(2, 8192), (8, 32768)])
def test_21_the_table_follows_the_controls_and_is_the_planners(n: int, tokens: int) -> None:
    rest = 16 // n
    layouts = {
        "FSDP, a text for each GPU": "fsdp=16",
        f"a text for {n} GPUs, tensor and sequence parallel": f"fsdp={rest},tp={n},sp",
        f"a text for {n} GPUs, keys in a ring": f"fsdp={rest},cp={n}",
        f"a text for {n} GPUs, heads exchanged": f"fsdp={rest},cp={n},cp_type=ulysses",
    }
    found = l21_long.price_layouts(LLAMA, tokens, n)
    picture = LESSONS[20].scene(LLAMA, {"n": n, "tokens": tokens}).steps[4].picture
    assert set(found) == set(layouts)
    for way, layout in layouts.items():
        told = price("llama-3-8b", layout=layout, micro_batch=1, seq=tokens, recompute="full", advise=False)
        assert told.plan is not None
        peak, seconds, fits, texts = found[way]
        assert (peak, fits) == (told.plan.cost.memory_bytes["peak"], told.plan.fits)
        assert texts == (16 if layout == "fsdp=16" else rest) == told.plan.workload.batch
        assert seconds == pytest.approx(told.plan.cost.step_time_s, rel=1e-6)
        assert way in picture and units.seconds(seconds) in picture


def test_21_ways_that_a_model_cannot_follow_are_left_out() -> None:
    """GPT-2 XL has 25 heads: 8 GPUs cannot share them. Sixteen GPUs have no 32 to share a text."""
    learner = Learner(Request("gpt2-xl"))
    alone = {"FSDP, a text for each GPU"}
    assert set(l21_long.price_layouts(learner, 1024, 8)) == alone | {"a text for 8 GPUs, keys in a ring"}
    assert set(l21_long.price_layouts(learner, 1024, 32)) == alone


def test_21_a_model_with_too_few_positions_is_told() -> None:
    scene = LESSONS[20].scene(Learner(Request("gpt2-xl")), {"n": 8, "tokens": 8192})
    assert "GPT-2 XL cannot read a text of 8k tokens" in scene.steps[4].says


# --- 11: break it and debug it ------------------------------------------------------------------------


def attention(x: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> np.ndarray:
    """Grouped-query attention over all samples in one piece: 4 heads of 4, the first two on key-value head 0."""
    out = []
    for head in range(4):
        a, b = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        e = np.exp((x @ q[:, a]) @ (x @ k[:, b]).T / 2)
        out.append(e / e.sum(1, keepdims=True) @ (x @ v[:, b]))
    return np.concatenate(out, 1) @ o


def test_11_without_a_fault_the_pieces_are_the_layer() -> None:
    import torch

    gen = torch.Generator().manual_seed(0)
    weights = [torch.randn(s, generator=gen, dtype=torch.float64) for s in ((8, 16), (8, 8), (8, 8), (16, 8))]
    x = torch.randn(6, 8, generator=gen, dtype=torch.float64)
    want = attention(*(np.array(t.tolist()) for t in (x, *weights)))
    assert np.allclose(np.array(l11_debug.run_attention(x, weights, "").tolist()), want)
    for fault in ("kv", "order"):
        assert not np.allclose(np.array(l11_debug.run_attention(x, weights, fault).tolist()), want)


@pytest.mark.parametrize("fault", ["", *l11_debug.FAULTS])
def test_11_the_trace_has_every_message_one_after_the_other(fault: str) -> None:
    """Two neighbours sum what they wait for; H100's launches and the fitted latency make the times."""
    spans = l11_debug.trace_step(LLAMA.cluster, fault)
    sizes = [m[2] for m in l11_debug.list_messages(fault)]
    assert [s.words for s in spans if s.stream == "messages"] == [f"{size} B" for size in sizes]
    assert all(a.end == b.start for a, b in itertools.pairwise(spans)) and spans[0].start == 0
    kernels = [(s.words, round((s.end - s.start) / H100["launch_s"])) for s in spans if s.stream == "compute"]
    assert kernels == [("forward", 11), ("backward", 22), ("update", 8)]
    took = [s.end - s.start for s in spans if s.stream == "messages"]
    assert took[:2] == pytest.approx([inside_s(size, 2) for size in sizes[:2]]) and (fault == "sum") == (len(took) == 2)


def test_11_every_fault_shows_as_the_lesson_says() -> None:
    well = l11_debug.train("")
    assert well["loss"][-1] < 0.7 * well["loss"][0] and max(well["apart"]) == 0
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8  # of one of two GPUs: two heads, one key-value head
    assert [m[2] for m in well["messages"]] == [12 * 8 * 8, 12 * 8 * 8, 8 * weights]
    for case, fault in enumerate(l11_debug.FAULTS):
        run, found = l11_debug.train(fault), numbers(11, case=case)
        assert run["loss"][-1] < run["loss"][0], "the loss falls all the same"
        assert (found["first"] == pytest.approx(found["well_first"])) == (fault == "sum")
        assert (found["apart"] > 1e-3) == (fault == "sum") and found["last"] > found["well_last"]
        assert (found["bytes"] == found["well_bytes"]) == (fault == "order")
        question = LESSONS[10].question(LLAMA, {"case": case})
        assert question.options[question.answer] == l11_debug.NAMES[fault]
    signs = LESSONS[10].scene(LLAMA, {"case": 0}).steps[-1].picture
    assert signs.count("<td>wrong</td>") == 2 and signs.count("they part") == 1 and signs.count("too few bytes") == 1


# --- motion: the state of a picture is the state of the data --------------------------------------------


def cells(*tensors: object) -> list[float]:
    """All numbers of tensors as a picture shows them, sorted."""
    return sorted(float(f"{float(x):.2f}") for t in tensors for x in np.array(t.tolist()).ravel())  # type: ignore[attr-defined]


def film_of(number: int, step: int, **values: int | str) -> str:
    lesson = LESSONS[number - 1]
    return lesson.scene(LLAMA, {**lesson.defaults(), **values}).steps[step].picture


@pytest.mark.parametrize("cut, devices", [("columns", 2), ("rows", 4)])
def test_2_pieces_are_put_together_one_by_one(cut: str, devices: int) -> None:
    c, film = l02_cuts.multiply(cut, devices, 3), film_of(2, 3, cut=cut, devices=devices, seed=3)
    assert at(film, 0) == cells(*c["pieces"])
    if cut == "rows":
        for k in range(1, devices + 1):
            assert at(film, k) == cells(*c["pieces"], sum(c["pieces"][:k]))
    assert at(film, devices) == cells(*c["pieces"], c["y"])


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("case", range(len(l03_placements.CASES)))
def test_3_what_is_sent_moves_to_where_it_is_wanted(case: int, n: int) -> None:
    src, dst = l03_placements.CASES[case]
    whole, before = l03_placements.place_tensor(src, n, case + 1)
    film = l03_placements.redistribution_film(before, parse_placement(src), parse_placement(dst), whole)
    after = tensors.split(tensors.join(before, src), dst, n)
    markup = film.markup("moves")
    assert at(markup, 0) == cells(*before) and at(markup, len(film.said) - 1) == cells(*after)
    # a sum for all goes in slices, and the slices are gathered: twice as much; each device sends as much as the formula says
    assert len(film.flights) * 4 == n * l03_placements.sent(src, dst, n)


@pytest.mark.parametrize("n", [2, 5])
def test_4_the_ring_in_motion(n: int) -> None:
    states, film = l04_collectives.run_ring(n), film_of(4, 2 * (n - 1) + 1, n=n)
    assert [at(film, k) for k in range(len(states))] == [cells(s["data"]) for s in states]
    assert film.count('class="flight"') == n * 2 * (n - 1)


def test_5_7_22_sums_in_motion() -> None:
    c = l05_mlp.run_mlp("columns", 0)
    for step, terms, total in ((3, c["terms"], c["got"]), (4, c["grads"], c["grad"])):
        film = film_of(5, step)
        assert at(film, 0) == cells(*terms) and at(film, 1) == cells(total, total)
    tokens = np.array(l07_sequence.token_terms(4))
    film = film_of(7, 1)
    want = (tokens, tokens.sum(0), 2 * tokens.sum(0), np.tile(2 * tokens.sum(0), 4))
    assert [at(film, k) for k in range(4)] == [cells(x) for x in want]
    for step, kind in ((0, "column-first"), (1, "row-first")):
        tiles = l22_two_dims.multiply_tiles(kind)
        whole = tiles["x"] @ tiles["w"]
        assert at(film_of(22, step), 1) == cells(whole, whole)  # every column on two GPUs


@pytest.mark.parametrize("n, k", [(2, 1), (4, 2), (8, 2)])
def test_12_tokens_travel_and_come_home_in_motion(n: int, k: int) -> None:
    film = film_of(12, 2, n=n, k=k).replace(" ✓", "")
    ids = list(range(16))
    assert at(film, 0) == at(film, 2) == ids and at(film, 1) == sorted(ids + k * ids)
    assert film.count('class="flight"') == 2 * 16 * k


# --- typed answers, and films ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written, value",
    [
        ("12", (12,)),
        (" 1 234,5 ", (1234.5,)),
        ("-3", (-3,)),
        ("1.2.3", ()),
        ("²", ()),
        ("", ()),
        ("1e3", (1000,)),
        ("2,5E-1 GB", (250,)),
        ("1e", ()),
        ("1/0", ()),
        ("1,900", (1900, 1.9)),
        ("0,406", (0.406,)),
        ("1,234,567.5", (1234567.5,)),
        ("1.234,5", (1234.5,)),
        ("1,2,3", ()),
        ("5/4", (1.25,)),
        ("4 / 3", (4 / 3,)),
        ("≈ 1.5", (1.5,)),
        ("101 MB", (101,)),
        ("101mb", (101,)),
        ("0.101 GB", (101,)),
        ("101 apples", ()),
        ("MB", ()),
        ("12 ms", ()),
    ],
)
def test_a_number_is_read_as_people_write_it(written: str, value: tuple[float, ...]) -> None:
    assert answers.read_numbers(written, "MB") == pytest.approx(value)


@pytest.mark.parametrize(
    "written, unit, value",
    [
        ("1.3x", "times", 1.3),
        ("133 %", "times", 1.33),
        ("46%", "per cent", 46),
        ("8 products", "products", 8),
        ("1,900 tokens", "tokens", 1900),
        ("2650 µs", "ms", 2.65),
    ],
)
def test_a_unit_is_turned_into_the_one_asked_for(written: str, unit: str, value: float) -> None:
    assert answers.read_numbers(written, unit)[0] == pytest.approx(value)


def test_14_and_16_answer_what_students_type() -> None:
    fourteen, sixteen = (LESSONS[n - 1].question(LLAMA, LESSONS[n - 1].defaults()) for n in (14, 16))
    assert answers.judge_answer(fourteen, "1,900")[0] == answers.judge_answer(fourteen, "1 923")[0] == fourteen.answer
    assert "thousands" in answers.judge_answer(fourteen, "1.92")[1]
    assert answers.judge_answer(sixteen, "8/3")[0] == sixteen.answer
    assert "in the picture" in answers.judge_answer(sixteen, "4/3")[1]
    half = answers.judge_answer(sixteen, "3")
    assert half[0] not in (None, sixteen.answer) and "gradients in 2 bytes" in half[1]


def test_a_typed_answer_is_answered_by_its_mistake() -> None:
    right, *wrong = (
        Option(f"{value} MB", why, value)
        for value, why in ((100, "so"), (50, "half"), (200, "twice"), (101, "too near to tell"))
    )
    asked = number_question("How much?", "MB", right, tuple(wrong))
    assert sorted(asked.values) == [50, 100, 200] and asked.options[asked.answer] == "100 MB"
    assert answers.judge_answer(asked, "99") == (asked.answer, "so")
    assert answers.judge_answer(asked, "49.5")[1] == "half" and answers.judge_answer(asked, "200")[1] == "twice"
    assert answers.judge_answer(asked, "120")[1].startswith("Close, a little too large")
    assert answers.judge_answer(asked, "20")[1].startswith("Too small.")
    assert (
        "another order" in answers.judge_answer(asked, "100000")[1]
        and "not a number of MB" in answers.judge_answer(asked, "x")[1]
    )


def test_some_lessons_ask_for_a_number() -> None:
    assert sum(bool(x.question(LLAMA, x.defaults()).values) for x in LESSONS) >= 3


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: f"lesson{x.number}")
def test_every_expected_number_gets_its_own_answer(lesson) -> None:  # type: ignore[no-untyped-def]
    if not lesson.question(LLAMA, lesson.defaults()).values:
        return  # it offers words
    for control in lesson.controls:
        for option in control.options:
            question = lesson.question(LLAMA, {**lesson.defaults(), control.key: option})
            assert len(question.values) == len(question.options)
            for i, value in enumerate(question.values):
                assert answers.judge_answer(question, f"{value:.6f}") == (i, question.why[i])


@pytest.mark.parametrize("keys", [(), ("placements",), ("memory", "mlp", "folding"), BY_KEY])
def test_progress_travels_as_text(keys: tuple[str, ...]) -> None:
    assert progress.read_progress(",".join(sorted(keys))) == (set(keys), [])
    assert progress.from_cookie(".".join(keys)) == set(keys)


def test_answers_travel_in_the_cookie_and_only_to_their_question() -> None:
    question, other = (LESSONS[1].question(LLAMA, {**LESSONS[1].defaults(), "cut": cut}) for cut in ("columns", "rows"))
    for option in range(len(question.options)):
        kept = progress.write_answer(question, option)
        assert progress.read_answer(question, kept) == option and progress.read_answer(other, kept) is None
        cookie = f"memory.cuts~{kept}.mlp.no-lesson~1~ab"
        assert progress.answers_from_cookie(cookie) == {"cuts": kept}
        assert progress.from_cookie(cookie) == {"memory", "mlp"}
    assert progress.read_answer(question, "") is None and progress.answers_from_cookie("") == {}


@pytest.mark.parametrize("bad", ["x", "2", "²", "cuts~1", ",,"])
def test_progress_that_is_none_is_left_out(bad: str) -> None:
    assert progress.read_progress(f"cuts,{bad}") == ({"cuts"}, [part for part in bad.split(",") if part])
    assert all(5 <= x.minutes <= 20 for x in LESSONS)


def test_a_film_shows_each_cell_where_it_stands() -> None:
    one, two = text("1"), text("2")
    film = Film(
        100,
        50,
        ("a", "b <i>", "c"),
        Drawing(0, 0),
        (Cell(5, 5, (one, one, two)), Cell(50, 5, (None, two, None))),
        (Flight(0, (5, 5), (50, 5), one),),
    )
    markup = film.markup("two cells")
    assert [at(markup, k) for k in range(3)] == [[1], [1, 2], [2]]
    assert 'data-from="0" data-to="1"' in markup and 'data-way="5.0 5.0 50.0 5.0"' in markup and "<i>" not in markup
    with pytest.raises(ValueError, match="3 stops"):
        Film(1, 1, ("a", "b", "c"), Drawing(0, 0), (Cell(0, 0, (one,)),), ())
