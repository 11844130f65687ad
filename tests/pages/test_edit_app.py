"""Editing a plan on the page: the address holds it, the edited plan stands among the others, what cannot be is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from explorer.address import edits, pins, settings
from planner_core.core.placement import R, Shard
from tests.pages.test_app import open_page

if TYPE_CHECKING:
    pass

HEAD = "lm_head.weight"
UP = "LlamaDecoderLayer/mlp.up_proj.weight"


def test_edits_stand_in_the_address() -> None:
    asked = edits.Edits("best").put(UP, (R, Shard(0)), ((R, R),)).put(HEAD, (Shard(1), R), ((R, R),))
    text = ",".join(asked.write())
    assert text == f"best:keep,{UP}:R.S(0),{HEAD}:S(1).R"
    assert edits.parse_edits(settings.parse_query({"edit": text})[0]["edit"]) == asked
    assert asked.put(UP, (R, R), ((R, R),)).put(HEAD, (R, R), ((R, R),)).write() == ()
    for bad in (
        "best",
        "best:keep",
        "x:soon,a:R",
        "best:keep,a",
        "best:keep,a:Q",
        "best:keep,<b>:R",
        "best:keep" + ",a:R" * 41,
    ):
        values, told = settings.parse_query({"edit": bad})
        assert values["edit"] == () and len(told) == 1


def test_a_pin_of_an_edited_plan_holds_its_edits() -> None:
    values, _ = settings.parse_query({"edit": f"best:keep,{UP}:S(1)", "batch": "32"})
    text = pins.format_pin("edited", values)
    assert "," not in text
    name, back = pins.parse_pin(text, values)
    assert name == "edited" and back["edit"] == values["edit"] and back["batch"] == 32
    assert pins.describe_changes(back, {**values, "edit": ()}) == "edits mlp.up_proj.weight S(1)"
    assert pins.format_pin("best", values) == "best@batch:32"


def test_an_edit_is_told_at_once_and_joins_the_plans() -> None:
    # With all of an H100's memory the best plan keeps this weight whole anyway.
    at = open_page("plans", memory="73.6", tab="weight", plan="best")
    assert at.selectbox(key="edit_weight").value == "LlamaDecoderLayer/self_attn.q_proj.weight"
    at.selectbox(key="edit_weight").set_value(UP).run()
    at.selectbox(key=f"edit_{UP}_0").set_value("R").run()
    assert not at.exception and not at.error
    assert at.query_params["edit"] == f"best:keep,{UP}:R"
    assert {"step", "communication", "memory per GPU"} <= {m.label for m in at.metric}
    at.segmented_control(key="edit_rest").set_value("anew").run()
    assert at.query_params["edit"] == f"best:anew,{UP}:R"
    at.button(key="edit_choose").click().run()
    assert at.query_params["plan"] == "edited"
    at.button(key="edit_forget").click().run()
    assert not at.exception
    assert "edit" not in at.query_params and at.query_params.get("plan") == "best"


@pytest.mark.parametrize("page", ["overview", "compare", "whatif"])
@pytest.mark.slow(only=("compare",))
def test_every_page_knows_the_edited_plan(page: str) -> None:
    at = open_page(page, edit=f"best:keep,{UP}:S(1)", plan="edited", compare="edited,fsdp")
    assert not at.exception and not at.error and not at.warning


def test_what_cannot_be_is_told_and_the_rest_of_the_page_stands() -> None:
    at = open_page("plans", model="gpt2-xl", tab="weight", edit="best:keep,transformer.wte.weight:S(0)")
    assert [e.value for e in at.error] == [
        "Transformer.wte.weight cannot be stored as S(0): dim 0 has 50257 elements, which 16 GPUs cannot share evenly."
    ]
    at = open_page("plans", tab="weight", edit="no-such:keep,lm_head.weight:R")
    assert "not here any more" in at.error[0].value
    at = open_page("plans", tab="weight", edit="best:keep,lm_head.weight:S(x)")
    assert not at.exception and len(at.error) == 1
