"""Every case of an operator; those that run by the same rows as an earlier one are repetitions of what combinations of rows do."""

from __future__ import annotations

import itertools

import pytest

from planner_core.ops.registry import operator
from tests.support.operators.cases import CASES
from tests.support.operators.judge import Case, put
from tests.support.operators.more_cases import MORE

EVERY: list[Case] = [*CASES, *MORE]


def mark_repetitions(keep: tuple[Case, ...] = ()) -> list[Case | object]:
    """Return every case as a parameter, `slow` if an earlier case has its rule, operands and arguments.

    A rule reads shapes and arguments, and not which function is called: such cases have the same rows. What is in `keep` is not marked.
    """
    seen: set[tuple[object, ...]] = set()
    parameters: list[Case | object] = []
    for case in EVERY:
        operands = tuple((tuple(x.shape), x.dtype) for x in case.tensors)
        others = repr(put((case.args, case.kwargs), itertools.repeat("tensor")))
        key = (operator(case.fn).rule, case.kinds, operands, others)
        repeats = key in seen and case not in keep
        parameters.append(pytest.param(case, marks=pytest.mark.slow) if repeats else case)
        seen.add(key)
    return parameters
