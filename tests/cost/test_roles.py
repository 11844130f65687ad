"""The axes of a plan are named by what its operators do on them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from planner_core.core import Plan, plan_from_json, plan_to_json
from planner_core.cost import axis_roles, micro_batch, weight_roles
from planner_core.planning import Planner, Request, prepare_planner
from planner_core.planning.analysis.legend import describe_axes
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import time_band
from tests.support.plans import searched

LLAMA = Request("llama-3-8b", cluster="2x8-h100", batch=16, seq=1024, layers=2)


@pytest.fixture(scope="module")
def llama() -> Planner:
    return prepare_planner(LLAMA)


def of_layout(planner: Planner, text: str) -> Plan:
    plan = planner.of_layout(parse_layout(text))
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("layout", "names", "samples"),
    [
        ("dp=16", ("data",), 1),
        ("dp=16,zero=1", ("data",), 1),
        ("fsdp=16", ("shard",), 1),
        ("dp=2,fsdp=8", ("data", "shard"), 1),
        ("fsdp=4,tp=4,sp", ("shard", "tensor"), 4),
        ("dp=2,fsdp=2,tp=4", ("data", "shard", "tensor"), 4),
    ],
)
def test_stated_layouts_keep_their_names(llama: Planner, layout: str, names: tuple[str, ...], samples: int) -> None:
    plan = of_layout(llama, layout)
    assert plan.mesh.axis_names == axis_roles(plan) == weight_roles(plan) == names
    assert micro_batch(plan) == samples


def test_axes_of_one_role_are_told_apart() -> None:
    """FSDP that the search finds on two axes; a plan file needs names that differ."""
    best = searched(Request("llama-3-8b", cluster="2x8-h100", mesh="2x8", batch=16, layers=4, zero=3))
    assert axis_roles(best) == ("shard", "shard") and best.mesh.axis_names == ("shard_outer", "shard_inner")
    assert plan_from_json(plan_to_json(best)).mesh == best.mesh


def test_an_axis_that_splits_a_sample_is_for_context() -> None:
    """One sequence on all GPUs: weights are gathered, and each GPU has a part of the tokens."""
    best = searched(Request("llama-3-8b", cluster="1x8-h100", batch=1, seq=65536, layers=2, zero=3))
    assert set(axis_roles(best)) == {"context"} and set(weight_roles(best)) == {"shard"}
    assert micro_batch(best) == 1


def test_an_axis_on_which_all_do_the_same_is_idle() -> None:
    """Over Ethernet it is faster to compute everything in each node than to sum gradients between nodes."""
    result = shardscope.plan("bert-large", cluster="2x8-v100-eth", dtype="float16", layers=2, zero=3)
    best = result.best
    assert axis_roles(best) == best.mesh.axis_names == ("idle", "shard")
    assert not any(0 in t.axes for t in best.cost.traffic)
    assert time_band(best, result.cluster).kind.startswith("FSDP")


def test_an_axis_that_deals_experts_out_is_for_experts() -> None:
    """Attention's weights are gathered on it, and experts are not."""
    best = searched(Request("mixtral-8x7b", cluster="1x8-h100", batch=8, layers=2, zero=3))
    assert axis_roles(best) == ("expert",) and weight_roles(best) == ("shard",)


def test_no_axis_is_called_data_on_which_no_samples_are_dealt() -> None:
    """17 samples of 2 x 8 GPUs cannot be dealt: weights are whole and tokens are split, but attention is repeated on one axis (it was called data).
    The least bytes repeat most products on the other axis, and split one of its weights (it was called tensor)."""
    result = shardscope.compare("llama-3-8b", cluster="2x8-h100", batch=17, layers=4)
    for plan in result.plans:
        for axis, role in enumerate(axis_roles(plan)):
            assert role != "data" or axis in plan.data_axes, plan.name
    least = next(p for p in result.plans if p.name == "least communication")
    assert "idle" in axis_roles(least), axis_roles(least)


def test_samples_that_are_dealt_along_a_tensor_axis_are_said() -> None:
    """4 data x 4 tensor with 1 x 1 samples of 16: most of its products take whole weights along the axis named tensor."""
    result = shardscope.plan("llama-3-8b", cluster="2x8-h100", method="tap", accumulate=1, recompute="none", layers=4)
    line = describe_axes([replace(result.best, name="TAP")])[-1]
    assert line.startswith("TAP: samples are dealt along the tensor or idle axis")
    assert not any(
        "samples are dealt" in line for line in describe_axes([of_layout(prepare_planner(LLAMA), "fsdp=4,tp=4,sp")])
    )
