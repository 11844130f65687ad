"""Plans changed by hand: the edit is in the plan, costs what it costs, never beats the optimum; what cannot be says why."""

from __future__ import annotations

from functools import lru_cache

import pytest

from planner_core.core import BlockLabel, InputError, NoPlanFits, NoteKind, Plan, ShardingError
from planner_core.core.placement import P, R, Shard, parse_placements
from planner_core.planning.derived import edit
from planner_core.planning.derived.edit import WeightKey
from planner_core.planning.pipeline import FIRST_PASSES, Result, plan_model
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.request import Request

UP: WeightKey = ("LlamaDecoderLayer", "mlp.up_proj.weight")
SAME = 1e-9


@lru_cache
def planned(model: str, mesh: str | None = "2x8", **asked: object) -> tuple[Planner, Result]:
    request = Request(model, mesh=mesh, layers=2, **asked)  # type: ignore[arg-type]
    result = plan_model(request, passes={"baselines": FIRST_PASSES["baselines"]})
    return prepare_planner(request, result.graph), result


def stored(plan: Plan, weight: WeightKey) -> set[str]:
    block, name = weight
    return {
        ",".join(map(str, b.params[name].stored))
        for label, b in plan.blocks.items()
        if BlockLabel.parse(label).block == block
    }


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("text", ["R,R", "R,S(0)", "S(1),R", "S(0),S(1)"])
def test_the_edited_weight_lies_as_asked_and_nothing_beats_the_optimum(text: str, keep: bool) -> None:
    planner, result = planned("llama-3-8b")
    found = edit.plan_with_pins(planner, result.best, {UP: parse_placements(text)}, keep=keep)
    assert stored(found, UP) == {text}
    assert found.name == found.method == "edited" and found.mesh == result.best.mesh
    assert found.cost.step_time_s >= result.best.cost.step_time_s * (1 - SAME)
    assert (
        "by hand: model.layers.*.mlp.up_proj.weight as" in found.notes[0].sentence
        and found.notes[0].kind is NoteKind.EDIT
    )
    if keep:
        for e in edit.editable_weights(planner.graph, result.best):
            if e.weight != UP:
                assert stored(found, e.weight) <= {",".join(map(str, s)) for s in e.stored}


def test_choosing_the_rest_anew_is_never_worse_than_keeping_it() -> None:
    planner, result = planned("gpt2-xl")
    weight = ("GPT2Block", "mlp.c_fc.weight")
    for text in ("R,R", "S(0),R", "R,S(1)", "S(1),S(0)"):
        kept, anew = (
            edit.plan_with_pins(planner, result.best, {weight: parse_placements(text)}, keep=k) for k in (True, False)
        )
        assert anew.cost.step_time_s <= kept.cost.step_time_s * (1 + SAME)


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2-xl", "t5-large", "mixtral-8x7b"])
@pytest.mark.slow(only=("t5-large",))
def test_keeping_a_plan_as_it_is_costs_nothing(model: str) -> None:
    """Of the fastest and of a baseline, whose rule for activations stays. A plan that was taken for its short waits may get activations
    of less work, since a search minimises the work of the GPUs."""
    planner, result = planned(model)
    for plan in (result.best, *(p for p in result.plans if p.method == "megatron")):
        same = edit.plan_with_pins(planner, plan, {}, keep=True)
        work, before = (p.cost.step_time_s - p.cost.host_wait_s for p in (same, plan))
        assert work <= before * (1 + 1e-6)
        assert work == pytest.approx(before, rel=1e-6) or (plan is result.best and plan.cost.host_wait_s > 0)
        for e in edit.editable_weights(planner.graph, plan):
            assert stored(same, e.weight) <= {",".join(map(str, s)) for s in e.stored}


def test_several_edits_hold_together() -> None:
    planner, result = planned("llama-3-8b")
    down: WeightKey = ("LlamaDecoderLayer", "mlp.down_proj.weight")
    found = edit.plan_with_pins(planner, result.best, {UP: (R, Shard(1)), down: (R, Shard(0))}, keep=False)
    assert stored(found, UP) == {"R,S(1)"} and stored(found, down) == {"R,S(0)"}


def test_what_cannot_be_says_why() -> None:
    planner, result = planned("gpt2-xl")

    def why(weight: WeightKey, *placements: object, of: Plan | None = None) -> str:
        with pytest.raises(InputError) as told:
            edit.plan_with_pins(planner, of or result.best, {weight: placements}, keep=False)  # type: ignore[dict-item]
        return str(told.value)

    assert "dim 0 has 50257 elements, which 8 GPUs cannot share evenly" in why(
        ("", "transformer.wte.weight"), R, Shard(0)
    )
    assert "has 1 dim" in why(("GPT2Block", "ln_1.weight"), R, Shard(1))
    assert "never stored as the terms of a sum" in why(("GPT2Block", "mlp.c_fc.weight"), P, R)
    assert "there is no weight" in why(("GPT2Block", "no.such"), R, R)
    assert "did you mean GPT2Block/mlp.c_fc.weight?" in why(("GPT2Block", "mlp.c_fc.weights"), R, R)
    assert "2 mesh axes" in why(("GPT2Block", "mlp.c_fc.weight"), R)
    assert "no way to run ln_1 uses it split so" in why(("GPT2Block", "ln_1.weight"), R, Shard(0))


def test_a_plan_that_keeps_its_weights_says_that_they_are_not_gathered() -> None:
    planner, result = planned("llama-3-8b", mesh="16", zero=0)
    with pytest.raises(InputError, match="does not gather weights at use"):
        edit.plan_with_pins(
            planner, result.best, {("LlamaDecoderLayer", "self_attn.k_proj.weight"): (Shard(0),)}, keep=False
        )


@pytest.mark.slow
def test_what_does_not_fit_the_memory_says_how_much_it_needs() -> None:
    planner, result = planned("llama-3-8b", memory_gb=11.0)
    assert result.best.fits
    whole = {e.weight: (R, R) for e in edit.editable_weights(planner.graph, result.best)}
    with pytest.raises(
        NoPlanFits, match=r"least memory that any plan needs is [\d.]+ GiB per GPU, but there are 10.2 GiB"
    ):
        edit.plan_with_pins(planner, result.best, whole, keep=True)


def test_an_edit_as_text() -> None:
    text = "LlamaDecoderLayer/mlp.up_proj.weight:R.S(0)"
    assert edit.parse_edit(text) == ("LlamaDecoderLayer/mlp.up_proj.weight", (R, Shard(0)))
    assert edit.weight_key(("", "lm_head.weight")) == "lm_head.weight"
    with pytest.raises(ShardingError):
        edit.parse_edit("lm_head.weight:Q")
    with pytest.raises(InputError):
        edit.parse_edit("lm_head.weight")
