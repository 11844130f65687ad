"""A method or a baseline is one entry: what is registered can be asked for, is compared, and is known to the explorer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from explorer.address import settings
from explorer.text import glossary, words
from planner_core.core import InputError
from planner_core.planning.derived.comparison import compare_methods
from planner_core.planning.methods.registry import ALL, BASELINES, EXACT, METHODS, find_method
from planner_core.planning.pipeline import plan_model
from planner_core.planning.request import Request
from tests.support.terms import terms

SMALL = Request("bert-large", cluster="1x8-h100", layers=2, mesh="8")


def test_a_new_method_and_a_new_baseline_are_one_entry_each(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(METHODS["taps"], name="mine", title="Mine", words="weights kept, copies may differ", uniform=False)
    usual = replace(BASELINES["fsdp"], name="usual", title="our baseline")
    monkeypatch.setitem(METHODS, "mine", mine)  # type: ignore[arg-type]
    monkeypatch.setitem(BASELINES, "usual", usual)  # type: ignore[arg-type]
    assert plan_model(replace(SMALL, method="mine")).best.method == "mine"
    plans = {p.name: p for p in compare_methods(SMALL).plans}
    assert (plans["Mine"].method, plans["Mine"].objective) == ("mine", "communication")
    assert plans["Mine"].notes[0].sentence == "Mine: weights kept, copies may differ"
    assert plans["our baseline"].blocks == plans["FSDP"].blocks
    assert {p.method for p in plans.values()} >= {*METHODS, "usual"} - {"hf-expert"}


def test_an_entry_is_whole_and_names_are_used_once() -> None:
    assert next(iter(METHODS)) == EXACT.name == Request("gpt2-xl").method
    assert len(ALL) == len(METHODS) + len(BASELINES) == len({m.title for m in ALL.values()})
    for name, m in ALL.items():
        assert m.name == name and m.title and m.words and m.zero in (0, 3), name
        assert not m.words.endswith(".") and m.words[0].islower(), f"{name}: words follow a colon"


def test_what_alpa_like_forbids_stands_with_its_row() -> None:
    """With fewer restrictions than TAPS by its words it had 43.5 ms of communication, and TAPS 28.2: along an idle axis, which it forbids."""
    assert METHODS["alpa"].space == "never does a product twice"
    assert "no product done twice" in METHODS["alpa"].admits.sentence and "twice" not in METHODS["taps"].words


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_asked_for_by_the_words_of_a_table(name: str) -> None:
    title = METHODS[name].title
    for said in (name, name.upper(), title, title.lower()):
        assert replace(SMALL, method=said) == replace(SMALL, method=name), said
    assert find_method("megatron") == "megatron" and find_method("Nobody's") == "Nobody's"


def test_a_method_that_is_none_is_refused_as_it_was_written() -> None:
    with pytest.raises(InputError) as refused:
        plan_model(replace(SMALL, method="Nobodys"))
    assert terms(refused.value) == [("method", "Nobodys")]


def test_the_explorer_reads_its_lists_from_the_registry() -> None:
    assert list(settings.METHODS) == list(METHODS) == list(words.METHOD_TITLES)
    assert set(words.TITLES) == {b.title for b in BASELINES.values()}
    assert set(glossary.PLANS) == {"exact", "trade-off", *BASELINES}
    assert settings.SETTINGS["method"].parse("taps") == "taps"
