"""The PyTorch that lessons show: it runs as it stands, and prints the lessons' numbers with their names."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from explorer.learn.lesson import Lesson
from explorer.learn.lessons import LESSONS
from explorer.learn.lessons.basics import l04_collectives
from explorer.learn.lessons.layers import l08_backward, l11_debug
from explorer.learn.lessons.planners import l21_long
from explorer.learn.lessons.times import l18_micro_batches
from tests.support.lessons import LLAMA, numbers
from tests.support.torchrun import run_script

pytestmark = pytest.mark.lessons


SAID = {2: 2, 3: 6, 4: 1, 5: 1, 6: 1, 7: 2, 8: 1, 12: 1, 18: 3, 21: 1, 22: 1, 24: 1}
"""How many differences from the whole the snippets print."""


def printed(lesson: Lesson, folder: Path) -> str:
    """What the snippet prints; that of lesson 3 is for two processes."""
    if lesson.number != 3:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(lesson.code, f"lesson {lesson.number}", "exec"), {"__name__": "__main__"})
        return out.getvalue()
    (script := folder / "placements.py").write_text(lesson.code, encoding="utf-8")
    # Two processes may share a line.
    return "\n".join(filter(None, re.split(r"\n|(?<=\])(?=rank)", run_script(script))))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: f"lesson{x.number}")
def test_the_snippet_runs_and_names_what_it_prints(lesson: Lesson, tmp_path: Path) -> None:
    assert len(lesson.code.splitlines()) <= 25
    text = printed(lesson, tmp_path)
    told = [float(x) for line in re.findall(r"differences? (.*)", text) for x in re.findall(r"\d[\d.e+-]*", line)]
    if lesson.number == 5:
        # GeLU of a partial sum is another function.
        assert told.pop() == pytest.approx(numbers(5, first="rows")["error"])
    assert all(abs(x) < 1e-4 for x in told), "the pieces give what the whole gives"
    assert len(told) == SAID.get(lesson.number, 0)
    assert text and all(re.match("[a-zA-Z0-9]+ *[a-z]", line) for line in text.splitlines()), text


def test_snippets_print_the_numbers_of_the_pictures(tmp_path: Path) -> None:
    assert f"columns: top left {numbers(2)['y00']:g}," in printed(LESSONS[1], tmp_path)
    ring = l04_collectives.run_ring(4)
    assert f"sent {len(ring) - 1} chunks and holds {ring[-1]['data'][0].tolist()}" in printed(LESSONS[3], tmp_path)
    six = numbers(6)
    dealt = f"query heads 32 / 4 = {six['heads'] / 4:g} each, key-value heads 8 / 4 = {six['kv'] / 4:g} each"
    assert dealt in printed(LESSONS[5], tmp_path)
    seven, text = numbers(7), printed(LESSONS[6], tmp_path)
    assert f"loss {seven['loss']:.4f}, on one GPU {seven['loss']:.4f}" in text
    assert f"sent {seven['small'] / 1e6:.2f} MB instead of {seven['logits'] / 1e9:.1f} GB" in text
    nine, text = numbers(23), printed(LESSONS[22], tmp_path)
    assert (
        f"matrices {nine['matrices']:g}: 3^{nine['matrices']:g} plans, about 10^{nine['log10_unfolded']:.0f}; folded {nine['folded']:g}"
        in text
    )
    for step in LESSONS[22].scene(LLAMA, LESSONS[22].defaults()).steps[: int(nine["depths"]) - 1]:
        kinds = re.search(r"(\d+) kinds? of block", step.says)
        assert kinds and f"{step.title.lower()}: {kinds[1]} kinds of block repeat, copies 32" in text
    twelve = numbers(12)
    told = (
        f"moved {twelve['moved']:g} of 32 copies of tokens; the busiest expert has {twelve['busiest']:g}, the mean is 8"
    )
    assert told in (text := printed(LESSONS[11], tmp_path))
    assert (
        f"all_to_alls {twelve['expert'] / 1e6:.0f} MB per GPU, by one all_reduce {twelve['tensor'] / 1e6:.0f} MB"
        in text
    )
    text = printed(LESSONS[10], tmp_path)
    for name, case in (("kv", 1), ("order", 2)):
        assert f"{name}: first loss {numbers(11, case=case)['first']:.4f}" in text
    assert f"one GPU: first loss {numbers(11)['well_first']:.4f}" in text
    assert f"apart by {l11_debug.train('sum')['apart'][1]:.3g} before step 2" in text
    c = l08_backward.run_backward("data", 2)
    terms = " + ".join(f"{g[0, 0]:g}" for g in c["grads_w"])
    assert f"gradient: {terms} = {c['gw'][0, 0]:g}" in printed(LESSONS[7], tmp_path)


def test_snippets_on_time_and_memory_print_what_the_planner_computes(tmp_path: Path) -> None:
    """Figures that stand in a listing are the planner's, rounded; what follows from them agrees to a per cent."""
    said_ = {n: printed(LESSONS[n - 1], tmp_path) for n in (1, 9, 10, 14, 15, 16, 18, 20, 21, 22)}

    def told(number: int, pattern: str) -> list[float]:
        found = re.search(pattern, said_[number])
        assert found, (number, pattern)
        return [float(x) for x in found.groups()]

    assert told(1, r"kept (\d+) bytes per parameter.*Llama-3-8B (\d+) GiB") == [18, round(numbers(1)["kept"] / 2**30)]
    assert told(10, r"volume ([\d.]+) GB") == [round(numbers(10)["volume"] / 1e9, 1)]
    eleven = numbers(22)
    assert told(22, r"mesh 8 × 2: (\d+) ms") == [round(1e3 * eleven["best_s"])]
    assert told(22, r"mesh 16 × 1: (\d+) ms") == [round(1e3 * eleven["megatron_s"])]
    of = numbers(14)
    assert told(14, r"intensity (\d+)") == [round(of["intensity"])] and told(14, r"weights (\d+)") == [of["weights"]]
    assert told(14, r"gather (\S+) ms, compute (\S+) ms") == pytest.approx(
        [1e3 * of["gather_s"], 1e3 * of["compute_s"]], rel=0.01
    )
    assert told(14, r"crossing at (\d+)") == pytest.approx([of["crossing"]], rel=0.01)
    of = numbers(15)
    for phase in ("forward", "backward"):
        assert told(15, rf"{phase}: a layer begins every (\S+) ms") == pytest.approx([1e3 * of[f"{phase}_s"]], rel=0.01)
    assert told(15, r"forward: the traffic would decide from (\S+) ms") == pytest.approx(
        [1e3 * of["decides_s"]], rel=0.01
    )
    of = numbers(16)
    for name, shown in (
        ("data parallel", "data parallel"),
        ("ZeRO-1", "ZeRO-1"),
        ("ZeRO-2", "ZeRO-2"),
        ("FSDP (ZeRO-3)", "FSDP"),
    ):
        assert told(16, rf"{shown}: keeps \S+ GiB, sends (\S+) GB") == [round(of[f"{name} formula"] / 1e9, 1)]
    c = l18_micro_batches.micro_batch_gradients(4)
    terms = " + ".join(f"{p[0, 0]:g}" for p in c["parts"])
    assert f"top left: {terms} = {c['whole'][0, 0]:g}" in said_[18]
    of = numbers(9)
    want = [1e3 * of[f"{name}_s"] for name in ("ring", "tree, whole tensors", "tree, in pieces")]
    assert told(9, r"size 1048576: ring (\S+) ms, whole_tree (\S+) ms, pieces_tree (\S+) ms") == pytest.approx(
        want, rel=0.01
    )
    of = numbers(20)
    assert told(20, r"hottest (\d+) of a mean of 32: (\S+) times") == [of["hottest"], round(of["ratio"], 2)]
    assert told(20, r"capacity (\d+): dropped (\d+), empty places (\d+)") == [
        of["capacity"],
        of["dropped"],
        of["empty"],
    ]
    assert (
        f"sums of the first tokens {[round(x, 3) for x in l21_long.run_ring_attention(4)['weights'][-1]]}" in said_[21]
    )
    assert f"pairs of blocks {l21_long.causal_pairs(4, False)}, zigzag {l21_long.causal_pairs(4, True)}" in said_[21]


WHOLE = {
    13: {
        r"choices (\d+), can run (\d+), better in both than yours (\d+)": ("space", "scored", "better"),
        r"yours: (\S+) ms of communication, (\S+) GiB, (\d+) messages of (\S+) ms": (
            "mine_s ms",
            "mine_bytes GiB",
            "mine_messages",
            "mine_sent_s ms",
        ),
        r"optimum: (\S+) ms of communication, (\S+) GiB, (\d+) messages of (\S+) ms": (
            "best_s ms",
            "best_bytes GiB",
            "best_messages",
            "best_sent_s ms",
        ),
    },
    17: {
        r"fullest moment: (\S+) GiB, operation (\d+) \(backward begins at (\d+), the optimizer at (\d+)\)": (
            "peak GiB",
            "at",
            "turn",
            "optimizer",
        ),
        r"standing: (\S+) GiB; activations kept: (\S+) GiB; step (\S+) s": ("standing GiB", "kept GiB", "step_s"),
    },
    24: {
        r"ways of a copy 10\^(\S+), of all 10\^(\d+); products (\d+), copies (\d+)": (
            "ways",
            "all_ways",
            "products",
            "copies",
        ),
        r"least (\S+) ms, of one copy (\S+) ms": ("all_ms", "one_ms"),
        r"allowed (\S+) GiB: price (\S+) ms per GiB, bound (\S+) ms, best (\S+) ms, left (\d+)": (
            "room_gib",
            "price",
            "bound_ms",
            "best_ms",
            "left",
        ),
        r"bound (\S+) s, best \S+ s, solved (\d+) times, proven (\w+)": ("bound_s", "solves", "proven"),
    },
}
"""What the listings that ask the planner print, and the lesson's numbers that it is: together all of a lesson's numbers."""


@pytest.mark.parametrize("number", WHOLE)
def test_listings_that_ask_the_planner_print_every_number_of_their_lesson(number: int, tmp_path: Path) -> None:
    text, of, seen = printed(LESSONS[number - 1], tmp_path), numbers(number), set()
    for pattern, names in WHOLE[number].items():
        found = re.search(pattern, text)
        assert found, (pattern, text)
        for name, shown in zip(names, found.groups(), strict=True):
            key, _, unit = name.partition(" ")
            plain = float({"True": "1", "False": "0"}.get(shown, shown))
            half = 0.5 * 10.0 ** -len(shown.partition(".")[2])
            assert abs(of[key] / {"ms": 1e-3, "GiB": 2**30, "": 1}[unit] - plain) <= half * 1.001, (
                name,
                shown,
                of[key],
            )
            seen.add(key)
    left = {17: {"walk", "when"}}.get(number, set())  # the peak once more, and its moment in words
    assert set(of) == seen | left
    if number == 13:
        asked = LESSONS[12].question(LLAMA, LESSONS[12].defaults())
        usual = re.search(r"columns, then rows: 4 all_reduces of (\d+) MB, (\S+) ms", text)
        assert usual and f"{usual[1]} MB" in asked.ask and asked.options[asked.answer] == f"{usual[2]} ms"
