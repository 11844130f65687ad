"""A machine that is better in one figure never has a slower best plan: random clusters of two and three levels."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner_core.core import Cluster, Level, NoPlanFits, Plan, load_gpu
from planner_core.planning import Request
from tests.support.plans import search_alone

GPUS = ("h100-sxm", "a100-80gb-sxm", "v100-32gb-sxm")
QUICK, ALL = 1, 24


def machine(dice: random.Random) -> Cluster:
    """Two to sixteen GPUs: nodes, often rails of nodes, often a slower spine above them."""
    speed, latency = dice.choice((50e9, 450e9)), dice.choice((1e-6, 5e-6))
    rail = Level("rail", dice.choice((2, 3)), speed / dice.choice((2, 10)), latency * 4)
    spine = Level("spine", 2, speed / dice.choice((20, 40)), latency * 10)
    node = Level("node", dice.choice((1, 2)), speed, latency)
    return Cluster("drawn", load_gpu(dice.choice(GPUS)), (node, *dice.choice(((rail,), (rail, spine)))))


def best(cluster: Cluster, memory_gb: float | None = None) -> Plan | None:
    """The fastest plan; None where nothing fits."""
    asked = Request("gpt2-xl", cluster=cluster.to_json(), layers=1, batch=12, seq=512, memory_gb=memory_gb)
    try:
        return search_alone(asked)
    except NoPlanFits:
        return None


def assert_no_slower(better: Plan | None, worse: Plan | None) -> None:
    """Up to what the better machine's proof leaves open."""
    if worse is None:
        return
    assert better is not None
    floor_s = better.cost.step_time_s if better.optimal else better.bound
    assert floor_s is not None
    assert floor_s <= worse.cost.step_time_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", [*range(QUICK), *(pytest.param(s, marks=pytest.mark.slow) for s in range(QUICK, ALL))])
def test_a_better_machine_is_never_slower(seed: int) -> None:
    """Twice the bandwidth of a level, less latency; and nodes that stand on one fast level, not two."""
    dice = random.Random(seed)
    cluster = machine(dice)
    plan = best(cluster)
    assert plan is not None
    level = dice.randrange(len(cluster.levels))
    assert_no_slower(best(cluster.with_bandwidth(2.0, level)), plan)
    assert_no_slower(best(cluster.with_latency(0.5, level)), plan)
    if len(cluster.levels) == 3:
        node, rail, spine = cluster.levels
        assert_no_slower(best(replace(cluster, levels=(node, replace(rail, size=rail.size * spine.size)))), plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ALL))
def test_a_tenth_more_memory_is_never_slower(seed: int) -> None:
    cluster = machine(random.Random(seed))
    plan = best(cluster)
    assert plan is not None
    tight = 0.8 * plan.cost.memory_bytes["peak"] / 1e9
    assert_no_slower(best(cluster, 1.1 * tight), best(cluster, tight))
