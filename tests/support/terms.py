"""What a sentence says as values, for tests that ask for a fact and not for its words."""

from __future__ import annotations

from typing import Any

from planner_core.core import PlannerError, Sentence, Term


def terms(said: str | PlannerError) -> list[tuple[str, Any]]:
    """Return the name of each option and its value, in order; of other terms the kind and the value. An option by itself has None."""
    sentence = said.sentence if isinstance(said, PlannerError) else said
    assert isinstance(sentence, Sentence), f"no terms in {said!r}"
    return [(part.name or part.kind, part.value) for part in sentence.parts if isinstance(part, Term)]


def values_of(said: str | PlannerError, *names: str) -> list[Any]:
    """Return the values of the terms of these names."""
    return [value for name, value in terms(said) if name in names]
