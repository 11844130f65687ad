"""Sentences of lesson 9 and of 14 to 24 that tell more than a scene's numbers: held against the numbers they speak of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from explorer.figures.svg_tensors import amount
from explorer.learn.learner import Learner
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.planners import l20_uneven, l21_long
from explorer.learn.lessons.times import l09_algorithms, l15_step, l16_zero, l19_measured
from explorer.text import recipe, units
from planner_core.planning import doubt_between, plan, price
from planner_core.planning.request import Request
from tests.support.tiny_models import tiny_config

pytestmark = pytest.mark.lessons


LLAMA = Learner(Request("llama-3-8b"))


def says(number: int, step: int, **values: int | str) -> str:
    lesson = LESSONS[number - 1]
    return lesson.scene(LLAMA, {**lesson.defaults(), **values}).steps[step].says


def test_lessons_know_that_stages_are_in_the_course_and_in_the_planner() -> None:
    """Lesson 8 said that they are not in this course, and lesson 24 that the planner knows no plans of them."""
    assert "Pipeline stages" in LESSONS[24].title
    texts = {
        n: " ".join(step.says for step in LESSONS[n - 1].scene(LLAMA, LESSONS[n - 1].defaults()).steps) for n in (8, 24)
    }
    for said in texts.values():
        said = " ".join(said.split())
        (sentence,) = re.findall(r"[^.:]*[Pp]ipeline stages[^.]*\.", said)
        assert "(lesson 25)" in sentence and "not in this course" not in sentence and "have no" not in sentence


def test_14_to_18_name_a_way_alike_and_state_their_tokens() -> None:
    ways = set(LESSONS[13].scene(LLAMA, LESSONS[13].defaults()).numbers)
    assert {"ZeRO-1_s", "HSDP_s", "FSDP_s"} <= ways and "data parallel_s" not in ways
    assert LESSONS[14].controls[0].name("data") == "ZeRO-1" and "dp=16,zero=1" in str(
        l15_step.plan_layout(LLAMA, "data", 2048)[0].layout
    )
    assert f"{units.whole(4096)} tokens per GPU" in says(15, 1, tokens=4096)
    assert all("Model and cluster are yours" in " ".join(LESSONS[n - 1].text) for n in range(14, 19))
    assert "data sheet gives 295" in says(14, 0)  # 989e12 / 3.35e12


@pytest.mark.parametrize("m", [1, 4])
def test_16_the_moments_and_the_bytes_that_are_told_are_the_plans(m: int) -> None:
    found = l16_zero.price_stages(LLAMA, m)
    told = says(16, 4, m=m)
    if m == 1:
        late, early = told.split(" fullest before", 1)[0].split("activations are gone.")
        for name, case in found.items():
            memory = case.plan.cost.memory_bytes
            assert (name in late) == (memory["grads"] > memory["activations"]) != (name in early), name
    # the embedding's table is not gathered for backward: 128 256 rows of 4 096 numbers of 2 bytes
    less = m * 128256 * 4096 * 2 * 15 / 16
    rule = m * 8 * 15 / 16 * 8_030_261_248
    sentence = re.search(
        r"FSDP's (.*?) are (\S+) (\wB) less than its bytes per parameter make \((.*?)\):", says(16, 2, m=m)
    )
    assert sentence and sentence[4] == amount(rule) and sentence[1] == amount(found["FSDP (ZeRO-3)"].sent_bytes)
    size = float(sentence[2]) * {"MB": 1e6, "GB": 1e9}[sentence[3]]
    assert size == pytest.approx(less, rel=0.01)  # norms are the rest


def test_18_the_layers_are_told_apart_from_the_step() -> None:
    told = re.search(r"The layers take ([\d.]+) s of the step's ([\d.]+) s", says(18, 1))
    assert told and float(told[1]) < float(told[2])
    scene = LESSONS[17].scene(LLAMA, LESSONS[17].defaults())
    assert float(told[2]) == pytest.approx(scene.numbers["step_s"], rel=0.01)
    assert f">{told[1]} s<" in scene.steps[1].picture
    assert "are shown" in says(18, 1, m=8) and "The layers take" not in says(18, 1, m=8)


def test_9_the_listing_has_the_cluster_of_the_lesson() -> None:
    ring, tree = l09_algorithms.hop_seconds(l09_algorithms.node_link(LLAMA.cluster, 64))
    constants = re.search(r"hop, tree_hop, rate = (\S+), (\S+), (\S+) ", LESSONS[8].code)
    assert constants and [float(x) for x in constants.groups()[:2]] == pytest.approx([ring, tree], rel=0.01)
    link = l09_algorithms.node_link(LLAMA.cluster, 64)
    assert float(constants[3]) == link.stages[0].bytes_per_s
    others = re.search(r"start, curve = (\S+), (\S+) ", LESSONS[8].code)
    assert others and [float(x) for x in others.groups()] == pytest.approx(
        [link.summing * link.launch_s, link.curve], rel=0.01
    )
    assert says(9, 2).count(units.seconds(ring)) and says(9, 2).count(units.seconds(tree))


@pytest.mark.parametrize(
    "cluster, words",
    [
        ("2x8-h100", "Both are fitted to what NCCL reached"),
        ("2x8-v100-eth", "not measured. Nobody measured a tree there"),
        ("2x8-h100:gpu=v100-32gb-sxm", "No collective of V100-SXM2 32 GB was measured"),
    ],
)
def test_9_says_where_a_hop_comes_from(cluster: str, words: str) -> None:
    lesson = LESSONS[8]
    assert words in lesson.scene(Learner(Request("llama-3-8b", cluster=cluster)), lesson.defaults()).steps[2].says


def test_9_what_a_switch_saves_is_told_on_paper_measured_and_in_all() -> None:
    told = says(9, 4, bytes=2**26)
    assert "on paper 57 %" in told  # 8 / 14 of a ring's transfer
    took = [float(x) for x in re.findall(r"([\d.]+) ms", told)]
    share = re.search(r"ms, ([\d.]+) %", told)
    assert share and float(share[1]) == pytest.approx(100 * took[0] / took[1], abs=0.6)
    assert "More GPUs take less time" in says(9, 5, bytes=2**20)


@pytest.mark.parametrize("skew, seed", [(0, 0), (3, 2)])
def test_20_tokens_at_home_are_not_sent(skew: int, seed: int) -> None:
    experts = l20_uneven.choose_experts(skew, seed)
    arrive = [sum(e == gpu and token // 32 != gpu for token, e in enumerate(experts)) for gpu in range(8)]
    scene = LESSONS[19].scene(LLAMA, {**LESSONS[19].defaults(), "skew": skew, "seed": seed})
    assert scene.numbers["most_arrive"] == 2 * 4096 * max(arrive)
    assert f"so {max(arrive)} arrive: {amount(2 * 4096 * max(arrive))}" in scene.steps[4].says
    assert amount(2 * 4096 * min(arrive)) in scene.steps[4].says


@pytest.mark.parametrize("number, step", [(14, 5), (18, 4)])
def test_the_quickest_are_told_with_those_that_tie(number: int, step: int) -> None:
    told = re.search(r"Quickest [^:]*: \*\*(.*?)\*\*", says(number, step))
    assert told and " ≈ " in told[1]


def test_16_the_quickest_stage_is_told_with_those_that_the_doubt_does_not_tell_apart() -> None:
    """ZeRO-1 sends what ZeRO-2 sends, and one micro-batch leaves nothing to add up: they take the same. The doubt says who else ties."""
    told = re.search(r"Quickest [^:]*: \*\*(.*?)\*\*", says(16, 5))
    cases = {name: c.plan for name, c in l16_zero.price_stages(LLAMA, 1).items() if c.plan.fits}
    took = {name: plan.cost.step_time_s for name, plan in cases.items()}
    first = min(cases, key=lambda name: took[name])
    near = {
        name
        for name, plan in cases.items()
        if took[name] <= took[first] * (1 + doubt_between(cases[first], plan, LLAMA.cluster))
    }
    assert told and set(told[1].split(" ≈ ")) == near and {"ZeRO-1", "ZeRO-2"} <= near
    assert took["ZeRO-1"] == took["ZeRO-2"] == took[first]


def test_19_pairs_with_contradictions_are_counted_on_both_sides() -> None:
    told = re.search(
        r"gets (\d+) pairs wrong.* in (\d+) of the pairs that are predicted wrong, and in (\d+) of the (\d+) that",
        says(19, 5),
    )
    assert told
    wrong, odd, fine, right = map(int, told.groups())
    assert wrong + right == len(l19_measured.comparable_pairs(True)) and odd <= wrong and fine <= right
    both = [a.run.contradicted or b.run.contradicted for a, b in l19_measured.comparable_pairs(True)]
    assert odd + fine == sum(map(bool, both))


def test_21_ways_compare_by_tokens_per_second() -> None:
    cases = l21_long.price_layouts(LLAMA, 131072, 4)
    last = LESSONS[20].scene(LLAMA, LESSONS[20].defaults()).steps[4]
    for peak, seconds, _, texts in cases.values():
        assert units.memory(peak) in last.picture and units.whole(round(texts * 131072 / seconds)) in last.picture
    assert [x[3] for x in cases.values()] == [16, 4, 4, 4]
    fits = [x[2] for x in cases.values()]
    assert any(fits) and not all(fits) and "Some do not fit." in last.says


def test_21_ends_with_the_planners_own_choice() -> None:
    """The quickest plan that the library finds for the same texts; no stated way is quicker."""
    own = l21_long.choose_own_plan(LLAMA, 131072, 4)
    found = plan("llama-3-8b", cluster="2x8-h100", batch=4, seq=131072, recompute="full", accumulate=1)
    assert own is not None and own.fits
    assert own.cost.step_time_s == min(p.cost.step_time_s for p in found.plans if p.fits)
    last = LESSONS[20].scene(LLAMA, LESSONS[20].defaults()).steps[4]
    assert f"**{recipe.describe_layout(own)}**" in last.says and "context parallel" in recipe.describe_layout(own)
    assert last.picture.count("own choice<") == 1
    assert own.cost.step_time_s <= min(
        seconds for _, seconds, fits, texts in l21_long.price_layouts(LLAMA, 131072, 4).values() if fits and texts == 4
    )


def test_21_says_where_nothing_fits() -> None:
    last = LESSONS[20].scene(LLAMA, {**LESSONS[20].defaults(), "tokens": 1048576}).steps[4]
    assert "needs the least memory (none fits)" in last.says and "None fits" in last.says


# --- 12 and 20: experts of the model in the sentence ----------------------------------------------------


def test_the_experts_are_those_of_the_sentence(tmp_path: Path) -> None:
    """A config of its own: four experts, of which a token uses two, of three products of 32 by 32."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mixtral")))
    own = Learner(Request(str(tmp_path / "config.json"), batch=16, seq=32))
    found = own.experts()
    config = own.graph.config
    assert own.routed() == (own, "")
    assert (found.hidden, found.count, found.used) == (
        config["hidden_size"],
        config["num_local_experts"],
        config["num_experts_per_tok"],
    )
    each = 2 * 3 * config["hidden_size"] * config["intermediate_size"] * config["num_experts_per_tok"]
    assert found.flops == each * config["num_hidden_layers"]
    scene = LESSONS[19].scene(own, LESSONS[19].defaults())
    assert not scene.note and "Mixtral-8x7B" not in "".join(step.says for step in scene.steps)
    told = price(
        str(tmp_path / "config.json"), layout=f"fsdp=16,ep={found.count}", micro_batch=64, seq=32, advise=False
    )
    assert told.plan is not None
    assert scene.numbers["dealt_s"] == pytest.approx(told.plan.cost.step_time_s, rel=1e-6)


@pytest.mark.parametrize("number", [12, 20])
def test_a_model_without_experts_is_told_which_stands_in(number: int) -> None:
    lesson = LESSONS[number - 1]
    assert (
        lesson.scene(LLAMA, lesson.defaults()).note
        == "Llama-3-8B has no experts, so Mixtral-8x7B on your cluster is shown."
    )


def _value(shown: str) -> tuple[float, float]:
    """A printed number, and half a unit of its last digit."""
    plain = shown.replace("\u202f", "").replace(",", "")
    return float(plain), 0.5 * 10.0 ** -len(plain.partition(".")[2])


@pytest.mark.parametrize("number", range(1, 25))
def test_products_that_are_printed_hold_with_the_figures_that_are_printed(number: int) -> None:
    """`4 · 2.415 ms = 9.66 ms`: who works it out again from what is shown finds what is shown."""
    lesson = LESSONS[number - 1]
    question = lesson.question(LLAMA, lesson.defaults())
    texts = [step.says for step in lesson.scene(LLAMA, lesson.defaults()).steps]
    texts += [question.ask, *question.why]
    figure, unit = r"(\d[\d.,\u202f]*\d|\d)", r"(?: (?:ms|µs|s|GB|MB|GiB|TB/s|widths))?"
    for text in texts:
        for a, sign, b, c, percent in re.findall(
            rf"(?<![\d/·×^+] ){figure}{unit} ([·×/÷]) {figure}{unit} = (?:\*\*)?{figure}( %)?", text
        ):
            (x, _), (y, _), (told, half) = _value(a), _value(b), _value(c)
            made = (x * y if sign in "·×" else x / y) * (100 if percent else 1)
            # half a digit for the result's rounding, and a quarter for what is left of the factors'
            assert made == pytest.approx(told, rel=0, abs=1.5 * half), text
