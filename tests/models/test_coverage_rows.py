"""The sentences over the rows of `python -m bench.coverage`."""

from __future__ import annotations

from typing import Any

from bench.coverage import OUTCOMES, describe_outcomes, describe_seconds, read_rows


def test_configs_without_a_plan_are_accounted_for_and_types_of_two_classes_told_apart() -> None:
    """The page said "of 256 configs", then "of 244", and had prophetnet twice."""
    planned: dict[str, Any] = {"type": "prophetnet", "outcome": "plan", "first_s": 1.0, "first_mb": 500}
    rows: list[dict[str, Any]] = [
        {**planned, "class": "ProphetNetForCausalLM"},
        {**planned, "class": "ProphetNetForConditionalGeneration", "first_s": 2.0},
        {**planned, "type": "t5", "class": "T5ForConditionalGeneration", "first_s": 0.5},
        {"type": "led", "class": "LEDForConditionalGeneration", "outcome": "refused"},
        {"type": "flava", "class": "FlavaForPreTraining", "outcome": "transformers"},
    ]
    assert describe_outcomes(rows) == (
        "3 of 5 reach a plan; of the other 2, transformers itself cannot build or run 1 (flava), "
        "the planner refuses 1, with a reason (led)"
    )
    worst = "prophetnet (ProphetNetForConditionalGeneration) 2.0 s, prophetnet (ProphetNetForCausalLM) 1.0 s, t5 0.5 s"
    assert describe_seconds(rows)[0].endswith(f"the worst: {worst}")
    assert describe_outcomes(rows[:3]) == "3 of 3 reach a plan"


def test_every_kept_row_has_an_outcome_with_words() -> None:
    assert {row["outcome"] for row in read_rows()} <= {"plan", *OUTCOMES}
