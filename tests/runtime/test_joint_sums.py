"""Gradients that are whole on several axes in the end are summed over all of them by one all_reduce, in price and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner_core.core import P, Plan, R, Shard, Step, group_sums, load_cluster
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.verification.api import verify
from tests.support.tiny_models import tiny_config


def stated(layout: str, folder: Path, cluster: str = "2x2-h100") -> Plan:
    """The plan of a small Llama under a layout."""
    (folder / "config.json").write_text(json.dumps(tiny_config("llama")))
    pricer = Pricer(str(folder / "config.json"), load_cluster(cluster))
    plan = pricer.plan(Statement(parse_layout(layout), micro_batch=2, accumulate=2, seq=32, precision="mixed"))
    assert plan is not None
    return plan


def summed_bytes(plan: Plan) -> dict[tuple[int, ...], int]:
    """Bytes of the sums of backward by their axes."""
    return {t.axes: t.num_bytes for t in plan.cost.traffic if (t.phase, t.kind) == ("backward", "all_reduce")}


def test_steps_of_one_sum_are_one_move() -> None:
    sums, scatter = (Step(0, P, R), Step(2, P, R)), Step(1, P, Shard(0))
    assert group_sums((scatter, *sums)) == ((scatter,), sums)
    assert group_sums((sums[0], scatter, sums[1])) == ((sums[0],), (scatter,), (sums[1],))


@pytest.mark.parametrize("ranks", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_sums_over_data_and_context_as_over_one_axis(ranks: int | None, tmp_path: Path) -> None:
    """A run whose gradients were summed axis by axis would show two rows of them, with all bytes in each."""
    plan = stated("dp=2,cp=2,zero=0", tmp_path)
    told = verify(plan, ranks=ranks)
    assert told["ok"], told
    rows = {
        json.dumps(at): size
        for phase, kind, at, _, size, _ in told["by_axis"]
        if (phase, kind) == ("backward", "all_reduce")
    }
    assert set(rows) == {"[0, 1]"}
    if ranks is None:
        assert rows["[0, 1]"] == summed_bytes(plan)[0, 1]
