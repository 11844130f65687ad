"""Every worked number of the lessons, computed again without the lesson; pictures, snippets, words and files."""

import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from explorer.address import settings
from explorer.figures import svg_tensors as draw
from explorer.figures.palette import DEVICES
from explorer.learn import export, recent, warm
from explorer.learn.blocks import arranged
from explorer.learn.blocks.placing import BlockMessage
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson
from explorer.learn.lessons import LESSONS, tensors
from explorer.learn.lessons.basics import l02_cuts, l03_placements, l04_collectives
from explorer.learn.lessons.layers import l05_mlp, l06_heads, l07_sequence, l08_backward
from explorer.learn.lessons.planners import l10_topology, l12_experts, l13_choose, l22_two_dims
from explorer.learn.visit import address
from explorer.text import units
from planner_core.models.zoo import load_snapshot
from planner_core.planning.request import Request
from tests.support.fitted import FITTED, H100, NETWORK, NVLINK, across_s, inside_s
from tests.support.lessons import LLAMA, numbers

pytestmark = pytest.mark.lessons


ROOT = Path(__file__).resolve().parents[2]
PARAMS = 8_030_261_248
LAYERS, HIDDEN, INNER, SEQ, BATCH = 32, 4096, 14336, 4096, 16
ROOM = int(0.92 * 81559 * 2**20)
"""Bytes of an H100's memory that plans may fill: what nvidia-smi reports, less the share that the simulation does not count."""
every = pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: f"lesson{x.number}")


@every
def test_a_control_says_which_step_it_changes_first(lesson: Lesson) -> None:
    """The page shows it from there on: a student who moves it earlier would see nothing happen."""
    usual = lesson.scene(LLAMA, lesson.defaults())
    for c in (c for c in lesson.controls if c.kind in ("slider", "choice")):
        others = [lesson.scene(LLAMA, {**lesson.defaults(), c.key: o}) for o in (c.options[0], c.options[-1])]
        pairs = [enumerate(zip(usual.steps, other.steps, strict=False), 1) for other in others]
        changed = [n for pair in pairs for n, (a, b) in pair if (a.says, a.picture) != (b.says, b.picture)]
        assert c.step == min(changed), c.label


# --- the worked numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch, each", [(1, 18), (4, 18), (16, 8), (4, 4)])
def test_1_memory_of_weights_gradients_and_optimizer(batch: int, each: int) -> None:
    """Weights of 2 bytes, or 2 and 4 that are kept; gradients alike; two averages. The lesson's bytes are the planner's."""
    weights, averages = {18: (2 + 4, 2 * 4), 8: (2, 2 * 2), 4: (2, 0)}[each]
    found = numbers(1, batch=batch, bytes=each)
    tables = LLAMA.graph.buffer_bytes  # of positions: half a kilobyte beside the weights
    assert found["1_params"] == weights * PARAMS + tables and found["1_optimizer"] == averages * PARAMS
    assert found["kept"] == each * PARAMS
    fits = []
    for n in (1, 2, 4, 8):
        parts = [found[f"{n}_{k}"] for k in ("params", "grads", "optimizer", "activations", "buffers")]
        assert sum(parts) == found[f"{n}_peak"]
        assert found[f"{n}_params"] == pytest.approx(weights * PARAMS / n, rel=1e-3)  # norms are too small to matter
        fits += [n] if found[f"{n}_peak"] <= ROOM else []
    assert found["fits_from"] == (fits[0] if fits else 0)
    # what one layer keeps at least: its input, in bf16
    steps = LESSONS[0].scene(LLAMA, {**LESSONS[0].defaults(), "batch": batch, "bytes": each}).steps
    if batch > 1:
        assert found["1_activations"] > LAYERS * batch * SEQ * HIDDEN * 2
    else:  # memory is fullest once all gradients are there
        assert found["1_activations"] == 0 and found["1_grads"] == 4 * PARAMS
        assert "freed already" in steps[4].says
        early = found["1_early"]
        assert f"{units.memory(early)} in all before the first gradient" in steps[4].says and early < found["1_peak"]
        assert 0 < found["1_early_activations"] < early - found["1_params"] - found["1_optimizer"]
    told = steps[3]
    assert f"{each} bytes per parameter" in told.says and units.memory(each * PARAMS) in told.says
    assert all(f"{k} bytes: {units.memory(k * PARAMS)}" in told.picture for k in (4, 8, 18))


@pytest.mark.parametrize("changed", [{}, {"batch": 1}, {"bytes": 8}])
def test_1_the_answer_follows_from_the_step_before_it(changed: dict[str, int]) -> None:
    """As a student does it: read the figures of the step before the question, divide, compare with the room."""
    values = {**LESSONS[0].defaults(), **changed}
    asked, scene = LESSONS[0].question(LLAMA, values), LESSONS[0].scene(LLAMA, values)
    told = scene.steps[scene.reveal - 1].says
    gib = {k: float(re.search(rf"{k}", told)[1]) for k in (r"fullest moment, (\S+) GiB", r"but \*\*(\S+) GiB")}  # type: ignore[index]
    peak, whole = gib.values()
    early = re.search(r"(\S+) GiB in all before the first gradient", told)
    first = float(early[1]) if early else peak
    needs = {n: max(peak / n, whole + (first - whole) / n) for n in (1, 2, 4, 8)}
    right = min((n for n in needs if needs[n] <= ROOM / 2**30), default=0)
    assert asked.options[asked.answer] == (f"{right} GPU{'s' * (right > 1)}" if right else "Not on one node at all")
    for n in (2, 4, 8):
        why = asked.why[asked.options.index(f"{n} GPUs")]
        shown = float(re.search(r"(\S+) GiB in all", why)[1])  # type: ignore[index]
        assert shown == pytest.approx(needs[n], rel=0.01)
        a = re.search(r"about (\S+) GiB whole and 1/\d of the other (\S+) GiB", why)
        b = re.search(r"about 1/\d of (\S+) GiB", why)
        made = float(a[1]) + float(a[2]) / n if a else float(b[1]) / n if b else 0.0
        assert shown == pytest.approx(made, rel=0.01)


def test_1_says_that_a_plan_fits_where_the_planner_does() -> None:
    """Between the 73.3 GiB that a plan may fill and the H100's 79.6 the lesson said "fits", and the planner "does not fit"."""
    close = Learner(Request("llama-3-8b", memory_gb=60))
    lesson, values = LESSONS[0], {"gpus": 2, "recompute": "full"}
    for learner, memory, words in ((LLAMA, ROOM, "leaves out"), (close, 60 * 10**9, "as you set it")):
        scene = lesson.scene(learner, {**lesson.defaults(), **values})
        assert scene.numbers["room"] == learner.planner.budget // 1 == memory
        assert f"a plan may fill {units.memory(memory)} of the " in scene.steps[0].says and words in scene.steps[0].says
        fits = scene.numbers["2_peak"] <= memory
        assert (scene.steps[0].title == "It runs") == fits
    assert ROOM > scene.numbers["2_peak"] > 60e9  # fits by the one limit, and not by the other


def test_1_opens_with_a_run_that_bursts_and_can_be_made_to_fit() -> None:
    lesson = LESSONS[0]
    at_first = lesson.scene(LLAMA, lesson.defaults())
    over = "91 GiB"  # as a reader subtracts 73.3 from 164
    assert "out of memory" in at_first.steps[0].title and f"{over} too much" in at_first.steps[0].says
    assert f"{over} too much" in at_first.steps[0].picture
    # recomputation is worth twice the GPUs here; what stays is the same
    again = {**lesson.defaults(), "recompute": "full", "gpus": 2}
    found = lesson.scene(LLAMA, again)
    free = units.difference(ROOM, found.numbers["2_peak"], units.memory)
    assert found.steps[0].title == "It runs" and f"{free} are free" in found.steps[0].says
    assert (found.numbers["fits_from"], at_first.numbers["fits_from"]) == (2, 4)
    assert found.numbers["1_params"] == at_first.numbers["1_params"]
    # the question can be worked out before it is answered: what stays whole on every GPU is told, and a tenth is between all needs and the room
    whole, numbers_ = at_first.numbers["shared_whole"], at_first.numbers
    assert units.memory(whole) in at_first.steps[4].says and at_first.reveal == 5
    for n in (2, 4, 8):
        needs = whole + (numbers_["1_peak"] - whole) / n
        assert needs == pytest.approx(numbers_[f"{n}_peak"], rel=0.01) and abs(needs / ROOM - 1) > 0.1
    assert "of 4 GPUs, each" in lesson.scene(LLAMA, {**lesson.defaults(), "gpus": 4}).steps[4].picture
    assert found.steps[0].picture.count(">GPU ") == 2 and "too much" not in found.steps[0].picture


@pytest.mark.parametrize("cut, devices, seed", list(itertools.product(("columns", "rows"), (2, 4), range(8))))
@pytest.mark.sample
def test_2_pieces_make_the_product(cut: str, devices: int, seed: int) -> None:
    c = l02_cuts.multiply(cut, devices, seed)
    x, w = np.array(c["x"].tolist()), np.array(c["w"].tolist())
    step = 4 // devices
    for r, piece in enumerate(c["pieces"]):
        cols = slice(r * step, (r + 1) * step)
        want = x @ w[:, cols] if cut == "columns" else x[:, cols] @ w[cols]
        assert np.array_equal(np.array(piece.tolist()), want)
    assert np.array_equal(np.array(c["joined"].tolist()), x @ w)
    found = numbers(2, cut=cut, devices=devices, seed=seed)
    assert found["error"] == 0
    assert found["y00"] == (x @ w)[0, 0]


MOVES = {
    ("P", "R"): ("all_reduce", lambda n: 2 * (n - 1) / n),
    ("P", "S"): ("reduce_scatter", lambda n: (n - 1) / n),
    ("S", "R"): ("all_gather", lambda n: (n - 1) / n),
    ("S", "S"): ("all_to_all", lambda n: (n - 1) / n**2),
    ("R", "S"): ("", lambda n: 0),
}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("case", range(len(l03_placements.CASES)))
def test_3_redistributions_give_the_tensor_and_cost_what_the_formulas_say(case: int, n: int) -> None:
    src, dst = l03_placements.CASES[case]
    name, share = MOVES[src[0], dst[0]]
    assert l03_placements.collective_between(src, dst) == name
    assert numbers(3, case=case, devices=n)["sent"] == math.floor(share(n) * 4 * 4 * 4)
    whole, before = l03_placements.place_tensor(src, n, case + 1)
    want = np.array(whole.tolist())
    after = tensors.split(tensors.join(before, src), dst, n)
    slices = np.split(want, n, axis=int(dst[2])) if dst[0] == "S" else [want] * n
    assert all(np.array_equal(np.array(a.tolist()), s) for a, s in zip(after, slices, strict=True))
    if src == "P":
        assert np.array_equal(sum(np.array(t.tolist()) for t in before), want)
        assert not np.array_equal(np.array(before[0].tolist()), want)


@pytest.mark.parametrize("n", range(2, 9))
def test_4_the_ring_sums_and_sends_what_the_formula_says(n: int) -> None:
    states = l04_collectives.run_ring(n)
    total = np.array(states[0]["data"].tolist()).sum(0)
    assert len(states) == 2 * (n - 1) + 1
    assert np.array_equal(np.array(states[-1]["data"].tolist()), np.tile(total, (n, 1)))
    half = states[n - 1]
    own = list(range(n))  # device r has the finished chunk r
    assert [float(half["data"][r, c]) for r, c in enumerate(own)] == [total[c] for c in own]
    found = numbers(4, n=n, bytes=2**26)
    assert found["wire"] == 2 * (n - 1) * 2**26 // n
    assert found["moved"] == pytest.approx(found["wire"], abs=1)
    assert found["half"] == (n - 1) * 2**26 // n
    assert found["seconds"] == pytest.approx(inside_s(2**26, n))
    # at the crossover latency and transfer are equal, x each: together x + x + curve · sqrt(x · x)
    fixed = FITTED["summing"] * (FITTED["base_s"] + (n - 1) * FITTED["hop_s"])
    assert inside_s(found["crossover"], n) == pytest.approx((2 + FITTED["curve"]) * fixed)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@pytest.mark.parametrize("seed", range(6))
def test_5_gelu_may_follow_columns_and_not_a_partial_sum(seed: int) -> None:
    c = l05_mlp.run_mlp("columns", seed)
    x, a, b = (np.array(c[k].tolist()) for k in ("x", "a", "b"))
    z = gelu(x @ a) @ b
    assert np.allclose(np.array(c["got"].tolist()), z, atol=1e-12)
    assert c["error"] < 1e-12 and c["grad_error"] < 1e-12
    bad = (gelu(x[:, :2] @ a[:2]) + gelu(x[:, 2:] @ a[2:])) @ b
    found = numbers(5, first="rows", seed=seed)
    assert found["error"] == pytest.approx(np.abs(bad - z).max())
    assert found["error"] > 0.01 and found["mended"] < 1e-12


@pytest.mark.parametrize("t", LESSONS[5].controls[0].options)
def test_6_heads_divide_or_not(t: int) -> None:
    found = numbers(6, t=t)
    even = 32 % t == 0 and 8 % t == 0
    assert (found["heads"], found["kv"], bool(found["even"])) == (32, 8, even)
    assert (0 <= found["error"] < 1e-12) if even else found["error"] == -1
    assert l06_heads.can_split(8, t) == (8 % t == 0)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_7_same_bytes_less_memory_and_the_loss(n: int) -> None:
    found = numbers(7, n=n)
    size = BATCH * SEQ * HIDDEN * 2
    assert found["all_reduce"] == 2 * (n - 1) * size // n == found["reduce_scatter"] + found["all_gather"]
    assert found["split"] < found["plain"]
    # Megatron-LM gathers two inputs a layer, and the last product's, again in backward: then all that is kept is split
    gathered = (2 * LAYERS + 1) * size * (n - 1) // n
    assert found["regathered"] == found["split"] - gathered
    assert found["regathered"] == pytest.approx(numbers(1, batch=BATCH)["1_activations"] / n, rel=0.01)
    assert found["logits"] == (n - 1) * BATCH * SEQ * 128256 * 2 // n
    assert found["small"] == 3 * (2 * (n - 1) * BATCH * SEQ * 4 // n)
    e = l07_sequence.split_embedding(n)
    table, words = np.array(e["table"].tolist()), e["words"].tolist()
    assert np.array_equal(np.array(e["got"].tolist()), table[words]) and found["embedding_error"] == 0
    for rank, term in enumerate(e["terms"]):
        own = [[w * n // len(table) == rank] for w in words]
        assert np.array_equal(np.array(term.tolist()), np.where(own, table[words], 0))
    assert found["table"] == 128256 * HIDDEN * 2
    c = l07_sequence.split_loss(n)
    logits, target = np.array(c["logits"].tolist()), np.array(c["target"].tolist())
    want = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(target)), target])
    assert c["got"] == pytest.approx(want) and found["error"] < 1e-12


@pytest.mark.parametrize("way, seed", list(itertools.product(l08_backward.CUTS, range(6))))
def test_8_gradients_of_the_pieces(way: str, seed: int) -> None:
    c = l08_backward.run_backward(way, seed)
    whole = l08_backward.run_backward("data", seed)
    x = np.concatenate([np.array(t.tolist()) for t in whole["xs"]])
    w = np.array(whole["ws"][0].tolist())
    assert np.array_equal(np.array(c["gw"].tolist()), 2 * x.T @ x @ w)  # of the sum of squares of X W
    assert np.array_equal(np.array(c["gx"].tolist()), 2 * x @ w @ w.T)
    cut = l08_backward.CUTS[way]
    for grads, want, placement in (
        (c["grads_w"], 2 * x.T @ x @ w, cut.grad_w),
        (c["grads_x"], 2 * x @ w @ w.T, cut.grad_x),
    ):
        got = [np.array(g.tolist()) for g in grads]
        joined = np.concatenate(got, int(placement[2])) if placement[0] == "S" else got[0] + got[1]
        assert np.array_equal(joined, want)
        assert placement != "P" or not np.array_equal(got[0], want)
    assert numbers(8, way=way, seed=seed)["error"] == 0


def test_23_folding_counts() -> None:
    found = numbers(23)
    assert found["matrices"] == 32 * 7 + 2
    assert found["folded"] == 3**7 + 3**2
    assert found["log10_unfolded"] == pytest.approx(226 * math.log10(3))
    assert found["copies"] == 32
    assert numbers(23, least=64)["shared"] == 0  # 32 layers are fewer than 64


def test_23_folding_of_another_model() -> None:
    t5 = Learner(Request("t5-large"))
    found = LESSONS[22].scene(t5, LESSONS[22].defaults()).numbers
    assert found["folded"] - 3 ** found["top"] == 3**6 + 3**10  # encoder and decoder block (TAP's poster)


@pytest.mark.parametrize("batch", [2, 16, 64])
@pytest.mark.sample
def test_10_volume_and_time_inside_and_across(batch: int) -> None:
    found = numbers(10, batch=batch)
    size = int(batch / 2 * SEQ * HIDDEN * 2)
    assert found["size"] == size
    volume = 4 * LAYERS * (2 * 7 * size // 8) + 4 * PARAMS // 8  # gradients have 4 bytes, as in lesson 1
    assert found["volume"] == found["far_volume"] == pytest.approx(volume, abs=2)
    near = next(o for o in l10_topology.list_layouts(LLAMA, batch) if o.tensor == 8 and o.inside)
    assert near.tensor_s == pytest.approx(4 * LAYERS * inside_s(size, 8))
    assert near.data_s == pytest.approx(across_s(4 * PARAMS / 8, 2))
    assert found["ratio"] == pytest.approx(found["far_s"] / found["near_s"])
    assert (found["ratio"] > 1) == (batch >= 16)  # of a small batch the gradients are the larger part
    options = l10_topology.list_layouts(LLAMA, batch)
    by_volume, by_time = l10_topology.least_volume_and_time(LLAMA, batch)
    can = [o for o in options if o.peak is not None]
    assert all(by_time.seconds <= o.seconds and by_volume.volume <= o.volume for o in can)
    assert by_time in can and by_volume in can
    # what keeps weights, gradients and averages in 18 bytes a parameter leaves no room on one GPU or on two; heads do not go into 16
    assert {o.tensor: o.peak is not None and o.peak <= ROOM for o in options} == {
        t: t in (4, 8) for t in (1, 2, 4, 8, 16) if batch >= 16 // t
    }
    assert all(18 * PARAMS / o.tensor < o.peak for o in options if o.peak)
    fitting = l10_topology.fastest_that_fits(LLAMA, batch)
    assert fitting and fitting.seconds == found["fitting_s"] == min(o.seconds for o in options if o.tensor in (4, 8))
    assert by_time.tensor in (4, 8) or "does not fit" in LESSONS[9].scene(LLAMA, {"batch": batch}).steps[4].says


@pytest.mark.parametrize("batch", [2, 16])
def test_10_the_question_is_the_time_of_the_parts_that_cross(batch: int) -> None:
    """Four sums a layer of [batch / 2, 4 096 tokens, 4 096]; four GPUs of a node share each, and two nodes send it once."""
    question = LESSONS[9].question(LLAMA, {"batch": batch})
    whole = 4 * LAYERS * batch // 2 * SEQ * HIDDEN * 2
    assert question.unit == "ms" and question.values[question.answer] == pytest.approx(1e3 * whole / 4 / NETWORK)
    found = numbers(10, batch=batch)
    told = f"{units.seconds(found['near_s'])} inside, {units.seconds(found['far_s'])} across"
    assert told in question.why[question.answer] and not any(
        told in w for w in question.why if w != question.why[question.answer]
    )


def test_10_where_the_time_of_the_largest_sum_comes_from() -> None:
    """Both levels at once: 2·7/8 of the tensor inside, where the switch adds, and an eighth of it, twice a half, across."""
    cluster = l10_topology.two_nodes(LLAMA.cluster)
    (_, inside, fast, one), (_, across, slow, other) = l10_topology.cost_by_level(cluster)
    assert inside == pytest.approx(2 * 7 / 8 * FITTED["in_switch"]) and fast == pytest.approx(
        NVLINK * (1 - FITTED["few"] / 8)
    )
    assert (across, slow) == (1 / 8, pytest.approx(NETWORK))
    whole = next(o for o in l10_topology.list_layouts(LLAMA, 16) if o.data == 16)
    assert one > other and whole.data_s == pytest.approx(4 * PARAMS * one, rel=0.05)
    assert whole.volume == 2 * 15 * 4 * PARAMS // 16  # lesson 16 says the same 60.2 GB


@pytest.mark.parametrize(
    "n, mesh",
    [
        (4, (4, 1)),
        (8, (4, 2)),
        (16, (8, 2)),
        (32, (8, 4)),
        (64, (16, 4)),
        (128, (16, 8)),
        (256, (32, 8)),
        (512, (32, 16)),
    ],
)
def test_22_best_mesh_is_the_papers(n: int, mesh: tuple[int, int]) -> None:
    found = numbers(22, n=n, ratio=1)
    assert (found["d1"], found["d2"]) == mesh
    # over axis 2: q, k and v (1.5 h), gate and up (7 h) forward, the inputs of o (h) and down (3.5 h) backward; over axis 1 four h
    factor = (1.5 + 7 + 1 + 3.5) / 4
    assert found["factor"] == factor == 3.25
    bracket = mesh[0] - 1 + factor * (mesh[1] - 1)
    assert found["best_s"] == pytest.approx(8 * LAYERS * BATCH * SEQ * HIDDEN * 2 / n * bracket / NVLINK)
    assert found["megatron_s"] == pytest.approx(8 * LAYERS * BATCH * SEQ * HIDDEN * 2 / n * (n - 1) / NVLINK)


@pytest.mark.parametrize("n", [4, 16, 64])
def test_22_the_table_adds_up_to_the_factor(n: int) -> None:
    found = numbers(22, n=n, ratio=1)
    table = LESSONS[21].scene(LLAMA, {**LESSONS[21].defaults(), "n": n, "ratio": 1}).steps[2].picture
    d1, d2 = int(found["d1"]), int(found["d2"])
    for first, axis, parts in ((4, 1, d2), (13, 2, d1)):
        assert f"{first / parts:g} · {parts} = {first}" in table, axis
    assert found["factor"] == 13 / 4


def test_22_gpts_layer_is_the_papers() -> None:
    gpt2 = Learner(Request("gpt2-xl"))
    layer, tokens = gpt2.layer(), gpt2.planner.workload.batch * gpt2.planner.workload.seq
    assert l22_two_dims.axis_ratio(layer) == 3
    for mesh in l22_two_dims.list_meshes(64):
        bracket = (mesh[0] - 1) / 2e11 + 3 * (mesh[1] - 1) / 4e11
        want = 8 * 48 * tokens * 1600 * 2 / 64 * bracket
        assert l22_two_dims.ring_s(layer, tokens, mesh, 2e11, 4e11) == pytest.approx(want)


def test_22_times_on_the_clusters_own_links() -> None:
    """16 GPUs are two nodes. On 2 × 8, axis 2 lies inside a node, and each pair of axis 1 has a network card of 50 GB/s."""
    item = BATCH * SEQ * HIDDEN * 2
    # forward q, k and v, gate and up, backward the inputs of o and down; over axis 1 four times the stream
    inside = [inside_s(share * item / 2, 8) for share in (1.5, 7, 1, 3.5)]
    assert numbers(22, n=16)["2x8_wires_s"] == pytest.approx(LAYERS * (sum(inside) + 4 * across_s(item / 8, 2)))
    # one node is even: all but latency and the switch's adding is the paper's formula
    megatron = numbers(22, n=8)
    assert megatron["8x1_wires_s"] == pytest.approx(LAYERS * 4 * inside_s(item, 8))
    assert megatron["8x1_wires_s"] == pytest.approx(megatron["megatron_s"], rel=0.1)


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_22_chunk_overlap_and_tiles(chunks: int) -> None:
    found = numbers(22, chunks=chunks)
    g, a = found["compute_s"], found["comm_s"]
    d1, d2, tokens = found["d1"], found["d2"], BATCH * SEQ
    # Gate, up and down.
    assert g == pytest.approx(2 * tokens * 3 * HIDDEN * INNER / (d1 * d2) / (H100["flops_efficiency"] * 989e12))
    first = 2 * (d2 - 1) / d2 * tokens * 2 * INNER * 2 / d1  # gate and up, summed over axis 2
    second = 2 * (d1 - 1) / d1 * tokens * HIDDEN * 2 / d2
    assert a == pytest.approx((first + second) / NVLINK)
    assert found["end_s"] == pytest.approx((g + a + (chunks - 1) * max(g, a)) / chunks)
    assert found["error"] == 0
    for kind in ("column-first", "row-first"):
        c = l22_two_dims.multiply_tiles(kind)
        want = np.array(c["x"].tolist()) @ np.array(c["w"].tolist())
        terms = {k: np.array(v.tolist()) for k, v in c["terms"].items()}
        halves = [terms[i, 0] + terms[i, 1] if kind == "column-first" else terms[0, i] + terms[1, i] for i in (0, 1)]
        assert np.array_equal(np.concatenate(halves, 1), want)


@pytest.mark.parametrize("n, k, seed", list(itertools.product((2, 4, 8), (1, 2), range(3))))
def test_12_tokens_travel_and_come_home(n: int, k: int, seed: int) -> None:
    found = numbers(12, n=n, k=k, seed=seed)
    c = l12_experts.route_tokens(n, k, seed)
    home = [t * n // 16 for t in range(16)]
    wants = c["chosen"].tolist()
    assert found["moved"] == sum(e != home[t] for t in range(16) for e in wants[t])
    assert found["busiest"] == max(sum(e in w for w in wants) for e in range(n))
    assert found["error"] == 0
    size = BATCH * SEQ * 4096 * 2
    assert found["expert"] == 2 * ((n - 1) * k * size // n**2)
    assert found["tensor"] == 2 * (n - 1) * size // n


@pytest.mark.sample
def test_13_the_optimum_among_all() -> None:
    lesson = LESSONS[12]
    for letters in (("S(0)", "S(0)", "S(0)", "S(1)", "S(0)", "S(0)", "S(1)"), ("R",) * 7, ("S(1)",) * 7):
        values = {**lesson.defaults(), **dict(zip(l13_choose.WEIGHTS, letters, strict=True))}
        found = l13_choose.score_choices(LLAMA, "LlamaDecoderLayer", 4)
        mine = l13_choose.row_of_choice(values)
        assert tuple(l13_choose.LETTERS[i] for i in found.choice[mine]) == letters
        shown = lesson.scene(LLAMA, values).numbers
        allowed = [i for i in range(3**7) if found.memory_bytes[i] <= shown["mine_bytes"]]
        assert shown["best_s"] == min(found.comm_s[i] for i in allowed)
        better = [
            i
            for i in range(3**7)
            if found.comm_s[i] <= shown["mine_s"]
            and found.memory_bytes[i] <= shown["mine_bytes"]
            and (found.comm_s[i], found.memory_bytes[i]) != (shown["mine_s"], shown["mine_bytes"])
        ]
        assert shown["better"] == len(better)
        assert (shown["space"], shown["mine_s"]) == (2187, found.comm_s[mine])


def sent_by_hand(devices: int, letters: list[str]) -> list[BlockMessage]:
    case = arranged.arrange_by_hand(LLAMA, devices, tuple(letters))
    assert case
    return [m.sent for m in case.messages]


def test_13_the_messages_of_a_placement() -> None:
    """Megatron-LM's placement sends four all_reduces of the activations; all copies whole only sum their gradients."""
    size = BATCH * SEQ * HIDDEN * 2
    megatron = sent_by_hand(4, ["S(0)"] * 3 + ["S(1)", "S(0)", "S(0)", "S(1)"])
    assert [(x.phase, x.where, x.moved.split(": ")[1], x.kind) for x in megatron] == [
        ("backward", "input_layernorm", "P to R", "all_reduce"),
        ("forward", "o_proj", "P to R", "all_reduce"),
        ("backward", "post_attention_layernorm", "P to R", "all_reduce"),
        ("forward", "down_proj", "P to R", "all_reduce"),
    ]
    assert all(x.num_bytes == size and x.seconds == pytest.approx(inside_s(size, 4)) for x in megatron)
    # down_proj kept whole: the hidden numbers, split by features, are exchanged for samples
    found = sent_by_hand(4, [str(LESSONS[12].defaults()[w]) for w in l13_choose.WEIGHTS])
    hidden = [x for x in found if x.kind == "all_to_all"]
    assert [x.num_bytes for x in hidden] == [BATCH * SEQ * INNER * 2] * 2
    grads = {x.where: x.num_bytes for x in found if x.moved == "gradient: P to R"}
    assert grads == {
        "input_layernorm": 4 * HIDDEN,
        "post_attention_layernorm": 4 * HIDDEN,
        "down_proj": 4 * HIDDEN * INNER,
    }  # summed in float32
    # between them the stream is split by samples: gathered behind the sum, its gradient scattered
    halves = [(x.kind, x.phase) for x in found if x.seconds == pytest.approx(inside_s(size, 4, sums=False))]
    assert halves == [("all_gather", "forward"), ("reduce_scatter", "backward")]
    whole = [(x.where, x.phase) for x in found if x.num_bytes == size and x.kind == "all_reduce"]
    assert whole == [("o_proj", "forward"), ("o_proj", "backward")]
    # a gradient bears its part of the time of its layer's bucket: q and o, k and v, three of the feed-forward part, two norms
    layer = 4 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * INNER + 2 * HIDDEN)
    together = inside_s(layer, 4)
    sums = [x for x in found if x.moved == "gradient: P to R"]
    assert all(x.seconds == pytest.approx(together * x.num_bytes / layer) for x in sums)
    shown = numbers(13)
    assert shown["mine_messages"] == len(found) == 9
    assert shown["mine_sent_s"] == pytest.approx(sum(x.seconds for x in found))


@pytest.mark.parametrize("t, seed", list(itertools.product((2, 4, 8), range(4))))
def test_13_messages_cost_what_the_candidate_costs(t: int, seed: int) -> None:
    """Two ways to the same figure: the table of all choices, and the plan with this one placed. The plan also pays for a
    stream that suits the model's ends, up to a few small sums."""
    found = l13_choose.score_choices(LLAMA, "LlamaDecoderLayer", t)
    i = int(np.random.default_rng(100 * t + seed).integers(3**7))
    letters = [l13_choose.LETTERS[c] for c in found.choice[i]]
    total = sum(x.seconds for x in sent_by_hand(t, letters))
    assert found.comm_s[i] * (1 - 1e-5) <= total <= found.comm_s[i] * 1.01


# --- every lesson ----------------------------------------------------------------------------------


def settings_of(lesson: Lesson) -> list[dict[str, int | str]]:
    """The defaults, then each control at each of its options."""
    found = [lesson.defaults()]
    for control in lesson.controls:
        found += [{**lesson.defaults(), control.key: o} for o in control.options if o != control.default]
    return found


@every
def test_steps_pictures_and_questions_at_every_setting(lesson: Lesson) -> None:
    for values in settings_of(lesson):
        scene, question = lesson.scene(LLAMA, values), lesson.question(LLAMA, values)
        assert 1 <= scene.reveal < len(scene.steps), values
        assert len(set(question.options)) == len(question.options) == len(question.why) >= 2, values
        assert 0 <= question.answer < len(question.options)
        assert len(set(question.why)) == len(question.why), "each answer is told what is right or wrong with it"
        assert all(math.isfinite(v) for v in scene.numbers.values()), values
        for step in scene.steps:
            ElementTree.fromstring(step.picture.replace("<tr class=mark>", "<tr>"))
            assert step.says and step.title and "nan" not in step.says
            label = re.search(r'aria-label="([^"]*)"', step.picture)
            assert "<table" in step.picture or (label and label[1])
            film = re.search(r'class="film".*? width="(\d+)"', step.picture)
            assert not film or 0.6 * int(film[1]) <= 368, "a phone of 400 pixels shows the whole of what moves"


def test_13_tells_one_time_for_one_choice() -> None:
    lesson = LESSONS[12]
    scene, question = lesson.scene(LLAMA, lesson.defaults()), lesson.question(LLAMA, lesson.defaults())
    mine, best = units.seconds(scene.numbers["mine_sent_s"]), units.seconds(scene.numbers["best_sent_s"])
    assert mine in question.ask and mine in scene.steps[0].picture
    assert mine in scene.steps[1].says and mine in scene.steps[2].says
    assert best in question.why[question.answer] and best in scene.steps[3].says


def test_13_the_question_can_be_worked_out_from_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four all_reduces of the stream, two forward and two backward (lessons 5 and 6); and what else is told is the plan's."""
    lesson = LESSONS[12]
    question, size = lesson.question(LLAMA, lesson.defaults()), BATCH * SEQ * HIDDEN * 2
    one = inside_s(size, 4)
    assert units.seconds(one, 4) in question.ask and draw.amount(size) in question.ask
    assert question.options[question.answer] == units.seconds(4 * one)
    steps = lesson.scene(LLAMA, lesson.defaults()).steps
    own = l13_choose.arrange_choice(LLAMA, lesson.defaults())
    assert own and own.plan and own.plan.cost and (peak := own.plan.cost.memory_bytes["peak"]) > ROOM
    assert f"{units.memory(peak)} at its fullest moment" in steps[2].says and "smaller parts" in steps[2].says
    # a small sum bears its share of the bucket's time, and the table says so
    assert "of its bucket" in steps[1].picture and "no latency of its own" in steps[1].says
    exact = l13_choose.arranged.arrange_best(LLAMA, 4)
    assert exact.plan and exact.plan.cost
    for told in (exact.seconds, exact.plan.cost.step_time_s, exact.plan.cost.step_time_s / LAYERS):
        assert units.seconds(told) in steps[5].says
    assert units.memory(exact.plan.cost.memory_bytes["peak"]) in steps[5].says
    kept = {str(p.working[0]) for p in exact.plan.blocks[exact.block].params.values()}
    parts = [p for p in exact.plan.blocks[exact.block].params.values() if p.stored != p.working and not p.gathered]
    told = (
        "as FSDP does" if exact.gathered else "as ZeRO does" if parts and kept == {"R"} else "keeps every weight where"
    )
    assert told in steps[5].says
    monkeypatch.setattr(l13_choose.arranged, "arrange_megatron", lambda *_: None)  # as with heads that do not divide
    cannot = lesson.question(LLAMA, lesson.defaults())
    assert cannot.options[cannot.answer] == "It cannot run here" and units.seconds(4 * one) in cannot.options


FIRST = (
    "placement",
    "partial",
    "replicate",
    "collective",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ring",
    "latency",
    "bandwidth",
    "tree",
    "Megatron-LM",
    "sequence parallel",
    "logits",
    "FSDP",
    "mesh",
    "tensor group",
    "row-first",
    "overlap",
    "front",
    "block",
    "axis",
    "grouped-query",
    "shared subgraph",
    "similar",
    "redistribution",
    "degree",
)
"""Words of the field that no lesson may use before the one that defines them."""


def said(lesson: Lesson) -> str:
    """All that a lesson says at its defaults."""
    scene, question = lesson.scene(LLAMA, lesson.defaults()), lesson.question(LLAMA, lesson.defaults())
    parts = [
        lesson.title,
        lesson.idea,
        *lesson.text,
        question.ask,
        *question.options,
        *question.why,
        *(c.label for c in lesson.controls),
    ]
    pictures = [re.sub(r"<[^>]+>", " ", s.picture) for s in scene.steps]
    return " ".join([*parts, *(m for _, m in lesson.terms), *(s.title + " " + s.says for s in scene.steps), *pictures])


def test_course() -> None:
    assert [x.number for x in LESSONS] == list(range(1, len(LESSONS) + 1))
    meanings = [(t, m) for x in LESSONS for names, m in x.terms for t in names.lower().split(", ")]
    assert len(dict(meanings)) == len(meanings), "a word is defined once"
    # The pages' words: Plans calls the fullest moment a peak, and draws whole plans by time and memory.
    assert "holds most" in dict(meanings)["peak"] and "time and memory of whole plans" in dict(meanings)["front"]
    for term in FIRST:
        defined = next(x.number for x in LESSONS if any(term.lower() in t.lower() for t, _ in x.terms))
        for lesson in LESSONS[: defined - 1]:
            assert not re.search(rf"\b{term}\b", said(lesson), re.IGNORECASE), f"{term} in lesson {lesson.number}"
    assert all(x.terms for x in LESSONS)


@pytest.mark.parametrize(
    "model",
    [
        "resnet50-100k",
        "vit-large",
        "mixtral-8x7b",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("gpt2-xl", "t5-large", "bert-large")),
    ],
)
@pytest.mark.slow(only=("mixtral-8x7b", "resnet50-100k"))
def test_every_lesson_has_something_to_show_for_other_models(model: str) -> None:
    learner = Learner(Request(model, cluster="1x4-a100-pcie"))
    for lesson in LESSONS:
        scene = lesson.scene(learner, lesson.defaults())
        assert lesson.question(learner, lesson.defaults()).options
        if model == "resnet50-100k" and lesson.number in (6, 7, 10, 13, 22):
            assert "ResNet" in scene.note


def test_a_users_own_model_is_shown() -> None:
    """What the explorer captured from a user's config serves as the learner's model."""
    own = replace(load_snapshot("gpt2-xl"), name="<b>mine</b>")
    learner = Learner(Request("own-0123"), load=lambda request: own)
    scene = LESSONS[0].scene(learner, LESSONS[0].defaults())
    assert scene.numbers["params"] == own.num_params


def test_text_in_pictures_is_escaped() -> None:
    box = draw.column(
        draw.text("<script>"), draw.tile(10, 10, ("P", 1), "a&b"), draw.titled(draw.Drawing(1, 1), '"<x>')
    )
    picture = draw.svg(box, '"<alt>')
    ElementTree.fromstring(picture)
    assert "<script" not in picture and "<alt>" not in picture
    assert "<i>" not in draw.table(("<i>",), [("<i>",)])


def test_a_colour_that_comes_again_has_a_second_mark() -> None:
    first, again = draw.tile(30, 20, ("S", 1)).body, draw.tile(30, 20, ("S", 9)).body
    assert "stroke-dasharray" in again and "stroke-dasharray" not in first
    assert (
        "GPU 9" in draw.device(9, draw.Drawing(10, 10)).body
        and "stroke-dasharray" in draw.device(9, draw.Drawing(10, 10)).body
    )
    dealt = LESSONS[5].scene(LLAMA, {"t": 16}).steps[1].picture
    assert all(f">GPU {r}<" in dealt for r in range(16)) and "stroke-dasharray" in dealt


@every
def test_hatching_means_partial_and_says_so(lesson: Lesson) -> None:
    """A hatched picture says "not summed yet"; what is whole on every device is grey."""
    hatch = re.compile(r'stroke-opacity="0.75" fill="none"')
    for values in settings_of(lesson):
        for step in lesson.scene(LLAMA, values).steps:
            if hatch.search(step.picture):
                assert "not summed yet" in step.picture, (lesson.number, step.title)
    whole = draw.tile(30, 20, ("R", None)).body
    assert draw.GREY in whole and not any(c in whole for c in DEVICES)


def test_looks_differ_without_colour() -> None:
    shard, partial, whole = (draw.tile(30, 20, (k, 0 if k != "R" else None)).body for k in "SPR")
    assert "<path" in partial and "<path" not in shard + whole
    assert draw.hatch(30, 20, "#000000").count("M") > 4


# --- the address and the files ---------------------------------------------------------------------


@every
def test_the_address_comes_back(lesson: Lesson) -> None:
    for values in settings_of(lesson):
        text = address.write_lesson_address(lesson, values, 2)
        assert address.read_address(text) == (lesson, values, 2, [])


@pytest.mark.parametrize(
    "bad",
    [{"lesson": "99"}, {"lesson": "²"}, {"lesson": "cuts", "with": "cut:sideways"}, {"lesson": "cuts", "with": "x"}],
)
def test_a_bad_address_is_told(bad: dict[str, str]) -> None:
    lesson, values, step, problems = address.read_address(bad)
    assert len(problems) == 1 and values == lesson.defaults() and step == 0


@every
def test_the_file_holds_everything_and_asks_nobody(lesson: Lesson) -> None:
    page = export.lesson_page(lesson, LLAMA, lesson.defaults())
    assert not re.search(r"(?:src|href)\s*=|https?://(?!www\.w3\.org)|@import|url\(", page)
    assert "{{" not in page.split("<script")[0]
    assert page.count('"picture"') >= 3
    assert lesson.title.replace("'", "&#x27;") in page


def test_file_names_and_cases() -> None:
    assert export.file_name(LESSONS[4]) == "05-column-then-row.html"
    names = [n for n, _ in export.list_cases(LESSONS[12], LLAMA, LESSONS[12].defaults())]
    assert len(names) == 4
    assert len(export.list_cases(LESSONS[3], LLAMA, LESSONS[3].defaults())) == 7
    assert export.inline_html("a <b> `c<d` **e**") == "a &lt;b&gt; <code>c&lt;d</code> <strong>e</strong>"


def test_10_the_cliff_between_neighbours_and_strangers() -> None:
    """Two neighbours on NVLink; two strangers on InfiniBand, where every GPU has an eighth of the node's 400 GB/s."""
    found = {
        (t, near): s for t, near, s in l10_topology._all_reduce_by_size(l10_topology.two_nodes(LLAMA.cluster), 2**26)
    }
    assert found[2, True] == pytest.approx(inside_s(2**26, 2))
    assert found[2, False] == pytest.approx(across_s(2**26, 2))


@every
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-xl", "t5-large", "resnet50-100k", "mixtral-8x7b"])
def test_the_link_shows_the_same_thing(lesson: Lesson, model: str) -> None:
    """Settings that the explorer can read, and a node or block that its model has."""
    learner = Learner(Request(model))
    found = recent.explorer_settings(lesson.number, learner, lesson.defaults())
    values, problems = settings.parse_query({"model": model, **found})
    assert not problems and set(found) <= set(settings.SETTINGS)
    there = Learner(Request(values["model"])).planner.coarse
    nodes = {f"{b}:{g.name}" for b, c in there.blocks.items() for g in c.groups} | {g.name for g in there.top.groups}
    assert values["node"] == "" or values["node"] in nodes
    assert values["block"] == "" or values["block"] in there.blocks
    wanted = {5: "gate_proj", 6: "scaled_dot_product_attention", 12: "moe_experts"}
    if model == "llama-3-8b" and lesson.number in wanted:
        assert wanted[lesson.number] in values["node"]


def test_nothing_is_computed_twice_for_a_step() -> None:
    assert recent.scene_and_question(2, LLAMA, LESSONS[1].defaults()) is recent.scene_and_question(
        2, LLAMA, LESSONS[1].defaults()
    )


@pytest.mark.parametrize("way", ["data", "column", "row", "fsdp"])
def test_8_a_wrong_answer_does_not_tell_the_right_one(way: str) -> None:
    question = LESSONS[7].question(LLAMA, {**LESSONS[7].defaults(), "way": way})
    right = question.why[question.answer]
    assert all(right not in why and why.endswith("?") for why in question.why if why != right)


def test_23_the_question_is_a_sum_and_the_product_has_its_own_answer() -> None:
    lesson = LESSONS[22]
    question = lesson.question(LLAMA, lesson.defaults())
    assert question.options[question.answer] == units.whole(3**7 + 3**2) and "scored apart" in question.ask
    assert "multiplied" in question.why[question.options.index(units.whole(3**9))]
    assert "scored alone" in question.why[question.options.index(units.whole(3 * 226))]
    steps = lesson.scene(LLAMA, lesson.defaults()).steps
    assert "apart" in steps[lesson.scene(LLAMA, lesson.defaults()).reveal - 1].says  # said before it is asked


def test_23_says_when_nothing_is_kept() -> None:
    some, none = (LESSONS[22].scene(LLAMA, {"least": n}).steps for n in (2, 64))
    assert "1 shared subgraph." in some[-2].says and "large number" not in some[-1].says
    assert "No block has 64 copies" in none[-2].says and "large number" in none[-1].says


def test_7_says_when_no_gpu_holds_what_is_kept() -> None:
    """98.6 GiB of activations for 4 samples on one GPU (lesson 1): 16 samples on 4 GPUs are more than an H100 has too."""
    at_16 = LESSONS[6].scene(LLAMA, {"n": 4})
    assert (
        at_16.numbers["regathered"] > ROOM
        and "at batch 16" in at_16.steps[3].says
        and "lesson 8" in at_16.steps[3].says
    )
    small = LESSONS[6].scene(Learner(Request("llama-3-8b", batch=1)), {"n": 4})
    assert small.numbers["regathered"] < ROOM and "lesson 8" not in small.steps[3].says


def test_the_next_lesson_is_computed_while_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "START_DELAY_S", 0.0)
    learner = Learner(Request("gpt2-xl", batch=24))
    warm.prefetch_next(1, learner).join()
    monkeypatch.setattr(recent._scene_and_question, "function", None)  # it is not called again
    assert recent.scene_and_question(2, learner, LESSONS[1].defaults())
    warm.prefetch_next(len(LESSONS), learner).join()  # no lesson follows


@pytest.mark.sample
def test_the_lessons_load_without_torch() -> None:
    """Torch is imported when a lesson computes with it, so that no page waits for it before it is drawn."""
    code = (
        "import sys, explorer.learn.lessons, explorer.learn.export, explorer.learn.warm; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
