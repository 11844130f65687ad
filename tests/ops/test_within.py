"""Dims that a view merges: the inner one may be split where the mesh axes before split the outer one into single elements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner_core.ops import Row, can_run_together
from tests.support.operators.cases import t
from tests.support.operators.judge import Case, all_rows, even, judge
from tests.support.operators.local_judge import judge_local

SAMPLES, TOKENS, WIDTH = 2, 8, 3
MERGED = Case("view", lambda x: x.view(SAMPLES * TOKENS, WIDTH), (t(SAMPLES, TOKENS, WIDTH),), {}, "a")
CUT = Case("view", lambda x: x.view(SAMPLES, TOKENS, WIDTH), (t(SAMPLES * TOKENS, WIDTH),), {}, "a")


def of(case: Case) -> dict[str, Row]:
    return {row.name: row for row in all_rows(case)}


@pytest.mark.parametrize(("case", "inner"), [(MERGED, "d1"), (CUT, "d0.1")], ids=["merged", "cut"])
def test_tokens_are_split_inside_single_samples(case: Case, inner: str) -> None:
    """Samples on the first axis, tokens on the next: also on two axes, and beside an axis of one GPU."""
    op, values = case.op()
    samples, tokens, whole = of(case)["d0"], of(case)[inner], of(case)["R"]
    for chosen, sizes in (
        ((samples, tokens), (2, 4)),
        ((samples, tokens, tokens), (2, 2, 2)),
        ((samples, whole, tokens), (2, 1, 8)),
    ):
        assert can_run_together(chosen, sizes) and even(op, values, chosen, sizes)
        assert judge(case, chosen, sizes) == judge_local(case, chosen, sizes) == ""


@pytest.mark.parametrize(("case", "inner"), [(MERGED, "d1"), (CUT, "d0.1")], ids=["merged", "cut"])
def test_nowhere_else(case: Case, inner: str) -> None:
    """Behind the samples' axis, alone, or where a rank has several samples, tokens of a rank are not one piece of all: nothing is right."""
    samples, tokens = of(case)["d0"], of(case)[inner]
    for chosen, sizes in (((tokens, samples), (2, 2)), ((tokens,), (2,)), ((of(case)["R"], tokens), (2, 2))):
        assert not can_run_together(chosen, sizes)
        bold = tuple(replace(row, within=None) for row in chosen)
        assert judge(case, bold, sizes) != ""


def test_every_pair_that_goes_together_is_right() -> None:
    for case in (MERGED, CUT):
        op, values = case.op()
        for chosen in itertools.product(all_rows(case), repeat=2):
            if can_run_together(chosen, (2, 2)) and even(op, values, chosen, (2, 2)):
                assert judge(case, chosen, (2, 2)) == judge_local(case, chosen, (2, 2)) == ""
