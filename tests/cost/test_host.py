"""How long a GPU waits for the host that issues its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from planner_core.core import Plan
from planner_core.cost import seconds_waited_for_host


def priced(model: str, **options: object) -> Plan:
    found = shardscope.price(model, cluster="1x8-h100:gpus=1", layout="dp=1", advise=False, **options)
    assert found.plan is not None
    return found.plan


def test_the_gpu_waits_only_where_the_host_is_slower() -> None:
    assert seconds_waited_for_host([(4.0, 1.0), (8.0, 2.0)]) == 0
    assert seconds_waited_for_host([(1.0, 4.0), (2.0, 8.0)]) == 12.0 - 3.0
    # forward puts the host 3 s ahead, which backward uses up: 3 + 4 seconds of work, and the host is done after 1 + 5
    assert seconds_waited_for_host([(4.0, 1.0), (3.0, 5.0)]) == 0
    # a late start is not made good: backward begins when forward is issued, after 4 s
    assert seconds_waited_for_host([(1.0, 4.0), (3.0, 1.0)]) == 7.0 - 4.0


def test_short_kernels_wait_and_long_ones_do_not() -> None:
    few, many = (priced("vit-large", micro_batch=n) for n in (8, 256))
    assert few.cost.host_wait_s > 0.5 * few.cost.step_time_s
    assert many.cost.host_wait_s == 0
    parts = few.cost.compute_time_s + few.cost.optimizer_time_s + few.cost.outside_time_s
    assert few.cost.step_time_s == pytest.approx(parts)  # the wait is in compute
    one, two = (priced("vit-large", micro_batch=n) for n in (1, 2))
    assert one.cost.step_time_s == pytest.approx(two.cost.step_time_s)  # both take what the host takes


def test_only_a_stack_whose_calls_are_known_waits() -> None:
    assert priced("vit-large", micro_batch=8, stack="torchtitan").cost.host_wait_s == 0


def test_the_wait_is_kept_in_a_plans_file(tmp_path: object) -> None:
    plan = priced("vit-large", micro_batch=8)
    file = f"{tmp_path}/plan.json"
    shardscope.save_plan(plan, file)
    assert shardscope.load_plan(file).cost == replace(plan.cost, traffic=shardscope.load_plan(file).cost.traffic)
