"""Numbers of lessons that no other test of theirs works out, and that every number of a lesson is in some test."""

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest

from explorer.learn.blocks import arranged
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.basics import l02_cuts, l03_placements
from explorer.learn.lessons.layers import l08_backward
from explorer.learn.lessons.planners import l10_topology, l13_choose, l24_think
from explorer.learn.lessons.times import l15_step, l19_measured
from planner_core.core import ASSETS
from tests.support.fitted import FITTED, NETWORK, NVLINK, across_s, inside_s, took_s
from tests.support.lessons import LLAMA, numbers

pytestmark = pytest.mark.lessons


PARAMS, LAYERS, HIDDEN, SEQ = 8_030_261_248, 32, 4096, 4096


def test_2_the_top_left_of_both_pieces() -> None:
    for cut in ("columns", "rows"):
        c, found = l02_cuts.multiply(cut, 2, 3), numbers(2, cut=cut, devices=2, seed=3)
        x, w = np.array(c["x"].tolist()), np.array(c["w"].tolist())
        pieces = [x @ w[:, :2], x @ w[:, 2:]] if cut == "columns" else [x[:, :2] @ w[:2], x[:, 2:] @ w[2:]]
        assert [found["piece0_00"], found["piece1_00"]] == [p[0, 0] for p in pieces]


def test_3_and_8_sums_and_corners() -> None:
    for case, (src, _) in enumerate(l03_placements.CASES):
        whole, _ = l03_placements.place_tensor(src, 2, case + 1)
        assert numbers(3, case=case, devices=2)["total"] == sum(map(sum, whole.tolist()))
    c = l08_backward.run_backward("data", 1)
    x, w = np.concatenate([np.array(t.tolist()) for t in c["xs"]]), np.array(c["ws"][0].tolist())
    found = numbers(8, seed=1)
    assert (found["gw00"], found["gx00"]) == ((2 * x.T @ x @ w)[0, 0], (2 * x @ w @ w.T)[0, 0])


def test_23_a_layer_has_seven_matrices() -> None:
    assert (numbers(23)["unique"], numbers(15)["layers"], numbers(20)["mean"]) == (7, LAYERS, 256 / 8)


def test_10_the_choices_by_volume_and_by_time() -> None:
    """Megatron-LM's sums over 8 × 2, inside and across: two samples for each of 8 groups, and half of the gradients on each GPU."""
    found, size = numbers(10, batch=16), 16 // 8 * SEQ * HIDDEN * 2
    near = next(o for o in l10_topology.list_layouts(LLAMA, 16) if (o.data, o.tensor, o.inside) == (8, 2, True))
    far = next(o for o in l10_topology.list_layouts(LLAMA, 16) if (o.data, o.tensor, o.inside) == (8, 2, False))
    assert near.tensor_s == pytest.approx(4 * LAYERS * inside_s(size, 2))
    assert far.tensor_s == pytest.approx(4 * LAYERS * across_s(size, 2))
    assert far.data_s == pytest.approx(inside_s(4 * PARAMS / 2, 8))  # the groups of the gradients lie in a node then
    assert found["by_time_s"] == near.seconds and found["by_volume_s"] == far.seconds
    least = min(o.volume for o in l10_topology.list_layouts(LLAMA, 16) if o.peak)
    assert least == far.volume == 4 * LAYERS * size + 2 * 7 * (4 * PARAMS // 2) // 8
    # all 16 sum 268 MB: inside and across at once, piece by piece
    one, rate = found["size"], NVLINK * (1 - FITTED["few"] / 8)
    inside, across = FITTED["in_switch"] * 2 * 7 / 8 * one / rate, one / 8 / NETWORK
    fixed = FITTED["summing"] * (FITTED["base_s"] + 7 * FITTED["hop_s"]) + 2 * FITTED["tree_hop_s"]
    assert found["cliff_last"] == pytest.approx(took_s(fixed, max(inside, across)), rel=0.02)


def test_22_every_mesh_on_the_clusters_own_links() -> None:
    item, found = 16 * SEQ * HIDDEN * 2, numbers(22, n=16)
    parts = (1.5, 7, 1, 3.5)  # q, k and v; gate and up; the inputs of o and down
    for d1, d2 in ((4, 4), (8, 2)):
        assert found[f"{d1}x{d2}_wires_s"] >= LAYERS * sum(inside_s(share * item / d1, d2) for share in parts)
    assert found["16x1_wires_s"] > LAYERS * 4 * inside_s(item, 8)
    assert found["1x16_wires_s"] > sum(inside_s(share * item, 8) for share in parts) * LAYERS


def test_13_the_best_choice_is_counted_like_any_other() -> None:
    found, shown = l13_choose.score_choices(LLAMA, "LlamaDecoderLayer", 4), numbers(13)
    best = [
        i for i in range(3**7) if found.comm_s[i] == shown["best_s"] and found.memory_bytes[i] == shown["best_bytes"]
    ]
    assert len(best) >= 1 and shown["best_bytes"] <= shown["mine_bytes"]
    counts = {
        len(arranged.arrange_by_hand(LLAMA, 4, tuple(l13_choose.LETTERS[c] for c in found.choice[i])).messages)
        for i in best
    }
    assert shown["best_messages"] in counts and shown["scored"] == np.isfinite(found.comm_s).sum()


def test_15_parts_of_a_step_by_hand() -> None:
    """FSDP: 32 layers wait for nothing, and each loses 0.196 of the traffic beside it; the last layer's sums end the step."""
    found, case = numbers(15), l15_step.plan_layout(LLAMA, "fsdp", 2048)[0]
    beside = LAYERS * (found["forward_traffic_s"] + found["backward_traffic_s"])
    assert 0.196 * beside == pytest.approx(found["contention_s"], rel=0.1)  # the embedding and the head are the rest
    assert found["not hidden_s"] == 0 == found["backward_waits_s"] and case.model.contention == 0.196


def test_19_the_best_constant_and_pairs_alike() -> None:
    found = numbers(19)
    shares = np.array([r.share for r in l19_measured.fitted_runs()])
    errors = np.abs(shares / found["best"] - 1)
    assert found["best_nine"] == pytest.approx(np.quantile(errors, 0.9)) and found["best_median"] == pytest.approx(
        np.median(errors)
    )
    with (ASSETS / "measurements/published/predicted.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    right = count = 0
    for i, (a, x) in enumerate(zip(l19_measured.fitted_runs(), rows, strict=True)):
        for b, y in list(zip(l19_measured.fitted_runs(), rows, strict=True))[:i]:
            same = (a.run.source, a.run.model, a.run.gpu, a.run.gpus) == (
                b.run.source,
                b.run.model,
                b.run.gpu,
                b.run.gpus,
            )
            if not same or a.run.workload.split(", ")[1] != b.run.workload.split(", ")[1]:
                continue
            work = [r.flops / (4 / 3 if "full recomputation" in r.run.workload else 1) for r in (a, b)]
            took = [float(row["measured_s"]) / w for row, w in zip((x, y), work, strict=True)]
            told = [float(row["group_out_s"]) / w for row, w in zip((x, y), work, strict=True)]
            if abs(math.log(took[0] / took[1])) > 0.05:
                count, right = count + 1, right + ((took[0] < took[1]) == (told[0] < told[1]))
    assert (found["pairs_alike"], found["planner_alike"]) == (count, pytest.approx(right / count))


def test_9_and_24_rates_and_solves() -> None:
    thought = l24_think.search_model(LLAMA, 8)
    found = numbers(24, t=8)
    assert numbers(9)["rate"] == NETWORK
    assert (
        found["one_ms"] == pytest.approx(1e3 * min(map(min, thought.run.copy_seconds.tolist())), abs=0.5e-3)
        and found["solves"] == thought.answer.solves >= 1
    )


MADE = re.compile(
    r"^(\d+_|\d+x\d+_wires_s$|tensor parallel|(data parallel|ZeRO-\d|FSDP|HSDP)|forward|backward|waited for|contention|not hidden|at the ends)"
)
"""Names that tests put together: by the number of GPUs, mesh, way, phase or part."""


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: f"lesson{x.number}")
def test_every_number_of_a_lesson_is_named_in_a_test(lesson) -> None:  # type: ignore[no-untyped-def]
    told = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_learn*.py"))
    plain = {"turn", "at", "when", "inner"}  # places in a list that test_17's question walks through; a layout's GPUs
    names = [n for n in lesson.scene(LLAMA, lesson.defaults()).numbers if not MADE.match(n) and n not in plain]
    assert not [name for name in names if not re.search(rf"""["']{re.escape(name)}["']""", told)]
