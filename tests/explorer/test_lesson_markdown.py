"""Lessons in Markdown: what a writer may put in a file, and what becomes of it."""

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
minutes = 5
key = "small"
title = "A small lesson"
idea = "One idea."
able = "do it"
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


def test_every_file_is_a_lesson_of_the_course() -> None:
    assert {p.stem for p in CONTENT.glob("*.md")} <= {f"{x.number:02}-{x.key}" for x in LESSONS}
