"""Lessons in Markdown: what a writer may put in a file, and what becomes of it."""

import re
from pathlib import Path

import jinja2
import pytest

from explorer.figures.svg_tensors import text
from explorer.learn import markdown
from explorer.learn.learner import Learner
from explorer.learn.lesson import Lesson, Values
from explorer.learn.lessons import LESSONS
from explorer.learn.markdown import CONTENT, Live, read_lesson
from planner_core.planning import Request

FRONT = """+++
number = 1
chapter = "Small ones"
minutes = 5
key = "small"
title = "A small lesson"
idea = "One idea."
link = ["overview", "There"]

[[controls]]
key = "n"
label = "GPUs"
options = [2, 4]
default = 2
names = {2 = "a pair"}
+++
An introduction
in two lines.

# Words

- **Ring, chain**: each sends: to its neighbour

"""
CODE = "\n# PyTorch\n\n```python\n# a comment, no heading\nprint(1)\n```\n"
LEARNER = Learner(Request(model="gpt2-xl", cluster="1x8-h100"))


def live(learner: Learner, values: Values) -> Live:
    n = int(values["n"])
    return Live({"peak": n * 2**30, "many": list(range(n))}, {"one": text("a")}, {"peak": float(n)})


def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Lesson:
    (tmp_path / "small.md").write_text(FRONT + body + CODE)
    monkeypatch.setattr(markdown, "CONTENT", tmp_path)
    return read_lesson("small", live)


def test_steps_have_live_values_and_pictures_and_a_rule_hides_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "# Steps\n{% for k in many %}\n## Step {{ k }}\nIt takes\n{{ peak|memory }}.\n\n![Picture {{ k }} [of n]](one)\n{% if k == 0 %}\n\n---\n\n{% endif %}\n{% endfor %}\n"
    small = lesson(tmp_path, monkeypatch, body)
    scene = small.scene(LEARNER, {"n": 4})
    assert [(s.title, s.says) for s in scene.steps] == [(f"Step {k}", "It takes 4.00 GiB.") for k in range(4)]
    assert scene.reveal == 1 and scene.numbers == {"peak": 4.0}
    assert "Picture 2 [of n]" in scene.steps[2].picture
    assert (small.text, small.terms) == (
        ("An introduction in two lines.",),
        (("Ring, chain", "each sends: to its neighbour"),),
    )
    assert small.controls[0].name(2) == "a pair" and small.controls[0].name(4) == "4"
    assert small.code == "# a comment, no heading\nprint(1)\n"


def test_a_typed_answer_has_its_values_and_leaves_out_what_is_too_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "# Question\nHow much?\n<!-- unit: GiB -->\n\n- [x] {{ peak|memory }} <!-- {{ n }} -->\n  Right.\n- [ ] nearly <!-- {{ n * 1.01 }} -->\n  Left out.\n- [ ] twice <!-- {{ n * 2 }} -->\n  Wrong.\n"
    question = lesson(tmp_path, monkeypatch, body).question(LEARNER, {"n": 2})
    assert question.unit == "GiB" and question.ask == "How much?"
    assert dict(zip(question.options, question.values, strict=True)) == {"2.00 GiB": 2.0, "twice": 4.0}
    assert question.options[question.answer] == "2.00 GiB" and question.why[question.answer] == "Right."


def test_a_value_that_nobody_computed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = lesson(tmp_path, monkeypatch, "# Question\nIs {{ wrong }} right?\n- [x] yes\n  So.\n")
    with pytest.raises(jinja2.UndefinedError, match="wrong"):
        small.question(LEARNER, {"n": 2})


TABLE = """| link | takes |
| --- | --- |
{% for k in many %}
|{{ ">" if k == 1 }} {{ name }} S(0)|R | {{ k }} |
{% endfor %}
"""


def test_a_table_is_a_picture_and_a_name_with_a_bar_stays_one_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = "# Steps\n{% set name = 'a | b' %}\n## One\nSee.\n\n" + TABLE + "\n## Other\nOn.\n\n![a](one)\n"
    found = lesson(tmp_path, monkeypatch, steps).scene(LEARNER, {"n": 2}).steps
    assert [s.says for s in found] == ["See.", "On."]
    rows = re.findall(r"<tr.*?</tr>", found[0].picture)
    cells = [re.findall(r">([^<]+)</t[hd]>", row) for row in rows]
    assert cells == [["link", "takes"], ["a ∣ b S(0)|R", "0"], ["a ∣ b S(0)|R", "1"]]
    assert ["class=mark" in row for row in rows] == [False, False, True]


def test_a_table_is_drawn_as_bars_which_are_read_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = "| | compute | sum <!-- communication dotted --> | mark |\n| - | - | - | - |\n| **a** | 1.5 | 0.5 | late |\n| b | 1 | | |\n"
    steps = f"# Steps\n## One\nSee.\n\n![Time](bars seconds to 3 the end)\n\n{bars}"
    drawn = lesson(tmp_path, monkeypatch, steps).scene(LEARNER, {"n": 2}).steps[0].picture
    assert 'aria-label="Time. a: 2.00 s, late; b: 1.00 s. the end."' in drawn
    widths = [float(w) for w in re.findall(r'<rect width="([\d.]+)" height="26"', drawn)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.02) and widths[2] == pytest.approx(2 * widths[1], rel=0.02)
    assert re.findall(r'font-weight="(\d+)" fill="currentColor">([ab])</text>', drawn) == [("600", "a"), ("400", "b")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [("| a | b |\n| 1 | 2 |\n", "a rule below its head"), ("| a | b |\n| - | - |\n| 1 |\n", "has 1 cells, its head 2")],
)
def test_a_table_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, message: str
) -> None:
    small = lesson(tmp_path, monkeypatch, "# Steps\n## One\nSee.\n\n" + lines)
    with pytest.raises(ValueError, match=message):
        small.scene(LEARNER, {"n": 2})


def test_a_link_carries_the_settings_of_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = FRONT.replace(
        '"There"]', '"There"]\nfocus = {needs = "experts", op = "experts", show = "split", batch = "{n}"}'
    )
    (tmp_path / "small.md").write_text(front + CODE)
    monkeypatch.setattr(markdown, "CONTENT", tmp_path)
    found = read_lesson("small", live).focus(LEARNER, {"n": 4})
    node = "MixtralDecoderLayer:mlp.experts/moe_experts"
    assert found == {"model": "mixtral-8x7b", "show": "split", "batch": "4", "node": node}


def test_every_file_is_a_lesson_of_the_course() -> None:
    assert {p.stem for p in CONTENT.glob("*.md")} <= {f"{x.number:02}-{x.key}" for x in LESSONS}
