"""`--micro-batch`: the best plan whose data-parallel ranks compute so many samples at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from planner_core.core import InputError
from planner_core.cost import micro_batch
from planner_core.planning import Request, plan_model
from tests.support.plans import planned, searched
from tests.support.terms import terms

ASKED = Request("llama-3-8b", "1x8-h100", layers=1, batch=32, seq=2048, recompute="auto", accumulate=None)


def test_it_bounds_the_search() -> None:
    """Whatever the size, no plan of that size that is shown is faster than the best; and the size of the free optimum gives it back."""
    free = searched(ASKED)
    for size in (1, micro_batch(free)):
        result = planned(replace(ASKED, micro_batch=size))
        best = result.best
        assert {micro_batch(p) for p in result.plans} == {size}
        assert size * best.workload.accumulate * 8 >= 32
        assert best.fits and best.optimal
        fastest = min(p.cost.step_time_s for p in result.plans if p.fits)
        assert fastest >= best.cost.step_time_s * (1 - 1e-9)
        assert best.cost.step_time_s >= free.cost.step_time_s * (1 - 1e-9)
    assert best.cost.step_time_s == pytest.approx(free.cost.step_time_s)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"micro_batch": 5}, [("micro_batch", None), ("batch", None)]),
        ({"micro_batch": 0}, [("micro_batch", 0), ("micro_batch", 2)]),
        ({"micro_batch": 1, "accumulate": 3}, [("micro_batch", None), ("batch", None)]),
        ({"micro_batch": 1, "tool": "megatron"}, [("micro_batch", None), ("tool", "megatron"), ("accumulate", None)]),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], options: list[tuple[str, object]]) -> None:
    with pytest.raises(InputError) as refused:
        plan_model(replace(ASKED, **change))  # type: ignore[arg-type]
    assert terms(refused.value) == options


def test_only_plan_has_it() -> None:
    with pytest.raises(InputError, match=r"micro_batch is not an option of compare; here .* is given, as accumulate"):
        shardscope.compare("llama-3-8b", micro_batch=1)
