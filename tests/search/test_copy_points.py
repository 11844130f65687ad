"""Points of runs of equal blocks."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from planner_core.core import DeviceMesh
from planner_core.cost import Component
from planner_core.models import capture_graph
from planner_core.planning import Request, prepare_planner
from planner_core.search.budget.copy_points import RunPoints
from planner_core.search.budget.gap_closing import enumerate_points
from planner_core.search.budget.goal import Goal
from planner_core.search.folded_solver import FoldedTables
from planner_core.search.lagrangian import make_objective

CONFIG: dict[str, Any] = {
    "model_type": "exaone4",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "sliding_window": 16,
    "sliding_window_pattern": 4,
}


def test_runs_of_equal_margins_have_the_same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with and without a window alternate in twelve runs. What equal runs share is what each of them has by itself."""
    graph = capture_graph(CONFIG, batch=8, seq=64)
    planner = prepare_planner(Request("", cluster="1x8-h100", recompute="auto"), graph)
    problem = planner.problem(DeviceMesh(("world",), (8,)))
    objective = make_objective(problem, "time").with_prices(1e-12, 0.0)

    def points() -> tuple[np.ndarray, int]:
        folded = FoldedTables(problem, objective)
        solution = folded.best_assignment()
        assert solution is not None
        ends = (Component.AFTER_FORWARD, Component.AFTER_BACKWARD)
        limit = solution.bound * 1.0005
        found = enumerate_points(folded, Goal(objective, ends, limit, np.array([1e-12, 1.0, 1.0]), sample_size=12))
        assert found is not None
        return found.cost[np.lexsort(found.cost.T)], len({id(c.points_by_row) for c in found.copies})

    shared, kinds = points()
    numbers = count()
    monkeypatch.setattr(RunPoints, "kind", property(lambda self: next(numbers)))
    own, runs = points()
    assert kinds < runs == 12
    np.testing.assert_allclose(shared, own, rtol=1e-12)
