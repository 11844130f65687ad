"""Any combination of rows, on real ranks, computes what one process computes: the rows and the runtime judge each other."""

from __future__ import annotations

import pytest

from planner_core.capture import capture_graph
from planner_core.verify.numbers import verify_all
from tests.runtime_plans import make_plan, random_choice
from tests.tiny_models import NAMES, tiny_config

QUICK = {("llama", (2, 2)), ("gpt2", (2,))}
CASES = [
    pytest.param(n, s, id=f"{n}-{'x'.join(map(str, s))}", marks=() if (n, s) in QUICK else pytest.mark.slow)
    for n in NAMES for s in ((2,), (2, 2))
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_random_plans_compute_the_same(name: str, sizes: tuple[int, ...]) -> None:
    graph = capture_graph(tiny_config(name), batch=4, seq=16, dtype="float32")
    plans = [make_plan(graph, sizes, random_choice(i), shard_storage=i % 2 == 1, seed=i) for i in range(3)]
    for i, found in enumerate(verify_all(plans)):
        assert found["numbers_ok"], (i, found["loss"], found["grad"], found["param"])
