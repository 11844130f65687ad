"""torch's own database of operators: each has a rule or a reason, and every rule is judged by the database's own samples."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from tests.support.operators.judge import all_rows, even, judge
from tests.support.operators.opinfo import cases, entries, reason_of, rule_of, with_gradients

AXIS = 5
"""Devices along an axis: the database's dims are 5, 10 and 20."""
PAIRS = 3


@functools.cache
def ruled() -> list[str]:
    """Names of the entries that have a rule."""
    return [name for name in entries() if rule_of(name) is not None]


def judged(name: str, axes: int) -> int:
    """Judge the samples of an operator by every row, or by some pairs of rows; how many judgements were made."""
    count = 0
    for sample in cases(name):
        case = with_gradients(sample)
        op, values = case.op()
        found = list(itertools.product(all_rows(case), repeat=axes))[1:]
        for chosen in found if axes == 1 else random.Random(0).sample(found, min(PAIRS, len(found))):
            if even(op, values, chosen, (AXIS,) * axes):
                wrong = judge(case, chosen, (AXIS,) * axes)
                assert wrong == "", f"{case} by {[r.name for r in chosen]}: {wrong}"
                count += 1
    return count


def test_every_operator_has_a_rule_or_a_reason() -> None:
    without = [name for name in entries() if rule_of(name) is None and reason_of(name) is None]
    assert len(entries()) > 450 and without == []
    assert len(ruled()) > 0.7 * len(entries())


@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in range(8)])
@pytest.mark.slow(only=("1", "2"))
def test_rules_hold_for_the_samples_on_one_axis(part: int) -> None:
    assert sum(judged(name, 1) for name in ruled()[part::8]) > 200


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_rules_hold_for_the_samples_on_two_axes(part: int) -> None:
    assert sum(judged(name, 2) for name in ruled()[part::8]) > 50
