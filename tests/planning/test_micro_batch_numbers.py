"""The numbers of micro-batches that a step may have, and their planners."""

from __future__ import annotations

import pytest

from planner_core.core import Graph, InputError
from planner_core.models import load_model
from planner_core.planning import Request, prepare_planner
from planner_core.planning.fitting.micro_batch_numbers import MicroBatchNumbers
from planner_core.planning.request import MOMENT

ASKED = Request("gpt2-xl", cluster="1x4-a100-pcie", layers=1, batch=12, seq=64, accumulate=1)


def quiet(text: str) -> None:
    """Tell nobody."""


def test_numbers_rise_and_fall_by_primes_and_each_has_one_planner() -> None:
    numbers = MicroBatchNumbers(prepare_planner(ASKED), None, quiet, several=True)
    assert list(numbers.larger_than(1)) == [2, 4, 12] and numbers.after(12) == 0
    assert list(numbers.smaller_than(12)) == [6, 3, 1] and numbers.before(1) == 0
    planner = numbers.at(4)
    assert planner is not None and planner.graph.workload["batch"] == 3 and planner.counts_open
    assert planner is numbers.at(4) is numbers.under(4, "none")
    saving = numbers.under(4, "full")
    assert saving.workload.recompute == "full" and saving is numbers.under(4, "full")
    assert saving.graph is planner.graph and saving.networks.operators is planner.networks.operators
    assert {p.workload.accumulate for p in numbers.prepared} == {1, 2, 3, 4, 6, 12}


def test_numbers_end_where_the_model_has_no_smaller_micro_batch() -> None:
    """Example inputs of six samples cannot be cut smaller."""

    def source(asked: Request) -> Graph:
        assert asked.accumulate is not None
        if asked.accumulate > 2:
            raise InputError("the example inputs have six samples")
        return load_model("gpt2-xl", batch=12 // asked.accumulate, seq=64, dtype="bfloat16", layers=1)

    numbers = MicroBatchNumbers(prepare_planner(ASKED), source, quiet, several=True)
    assert list(numbers.larger_than(1)) == [2] and numbers.at(4) is None


@pytest.mark.parametrize(
    ("accumulate", "micro_batch", "several"), [(1, None, False), (None, None, True), (None, 2, False)]
)
def test_numbers_are_those_that_the_request_leaves_open(
    accumulate: int | None, micro_batch: int | None, several: bool
) -> None:
    planner = prepare_planner(ASKED)
    asked = Request("gpt2-xl", cluster="1x4-a100-pcie", accumulate=accumulate, micro_batch=micro_batch)
    numbers = MicroBatchNumbers.around(planner, asked, None, quiet)
    assert numbers.several == several and bool(numbers.after(1)) == several
    assert not MicroBatchNumbers.around(planner, asked, planner.graph, quiet).several


def test_a_request_starts_with_one_micro_batch_and_its_own_allowance() -> None:
    open_request = Request("gpt2-xl", cluster="1x4-a100-pcie", layers=1, batch=12, seq=64, accumulate=None)
    numbers = MicroBatchNumbers.of_request(open_request, None, quiet, MOMENT)
    later = MicroBatchNumbers.of_request(open_request, None, quiet, MOMENT, numbers.first)
    assert numbers.first.workload.accumulate == 1 and numbers.several
    assert later.first.graphs is numbers.first.graphs and later.first.work is not numbers.first.work
