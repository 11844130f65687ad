"""The order of a search by lower bounds."""

from collections.abc import Callable

import numpy as np
import pytest

from planner_core.search.algebra import Incumbent, best_first


def _count_calls(bounds: dict[str, float], asked: list[str]) -> Callable[[str], float]:
    return lambda case: (asked.append(case), bounds[case])[1]


def test_a_dear_bound_is_worked_out_only_of_what_is_next() -> None:
    """The example of the module: a has the lower first bound and the higher second one."""
    asked = list[str]()
    best, bounds = Incumbent[str](), [{"a": 5.0, "b": 6.0, "c": 9.0}, {"a": 8.0, "b": 7.0, "c": 9.0}]
    searched = []
    for case in best_first("abc", [bounds[0].__getitem__, _count_calls(bounds[1], asked)], lambda: best.value):
        searched.append(case)
        best.offer(7.5, case)
    assert searched == ["b"] and asked == ["a", "b"] and best.solution == "b"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_case_is_found_and_none_that_cannot_be_better_is_searched(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(2, 30, size=12).astype(float)
    first, second = (values - random.integers(0, 12, size=12) for _ in range(2))
    best, searched = Incumbent[int](20.0), []
    for case in best_first(range(12), [lambda i: float(first[i]), lambda i: float(second[i])], lambda: best.value):
        assert max(first[case], second[case]) < best.value
        searched.append(case)
        best.offer(values[case], case)
    assert best.value == min(20.0, values.min())
    highest = np.maximum(first, second)[searched]
    assert list(highest) == sorted(highest)


def test_equal_bounds_keep_the_order_of_the_cases_and_a_lower_limit_ends_it() -> None:
    best = Incumbent[str](9.0)
    assert list(best_first("cab", [lambda case: 1.0], lambda: best.value)) == ["c", "a", "b"]
    limits = iter([9.0, 0.0])
    assert list(best_first("cab", [lambda case: 1.0], lambda: next(limits))) == ["c"]
    best.offer(9.0, "later")
    assert best.solution is None, "an equal value is not better"
