"""More GPUs of the same kind: the cluster keeps its links, the sweep agrees with the planner, tensor parallelism stops in time."""

from __future__ import annotations

import pytest

from planner_core.core.cluster import cluster_names, load_cluster
from planner_core.core.errors import InputError
from planner_core.planning.analysis.scaling import (
    COUNTS,
    LEAST_GAIN,
    Size,
    best_plans_at,
    resize_cluster,
    tensor_degree,
)
from planner_core.planning.request import Request
from tests.support.plans import planned, searched


@pytest.mark.parametrize("name", cluster_names())
@pytest.mark.parametrize("num_gpus", COUNTS)
def test_a_resized_cluster_keeps_its_links(name: str, num_gpus: int) -> None:
    cluster = load_cluster(name)
    there = resize_cluster(cluster, num_gpus)
    assert there.num_gpus == num_gpus
    assert there.gpu == cluster.gpu
    for a, b in zip(cluster.levels, there.levels, strict=False):
        assert (a.name, a.unit_bytes_per_s, a.latency_s) == (b.name, b.unit_bytes_per_s, b.latency_s)
    if len(there.levels) > 1:
        assert there.levels[0].size == cluster.levels[0].size


def test_at_its_own_size_nothing_changes() -> None:
    cluster = load_cluster("2x8-h100")
    assert resize_cluster(cluster, 16).levels == cluster.levels


def test_gpus_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(InputError, match="multiple of 8"):
        resize_cluster(load_cluster("2x8-h100"), 20)


@pytest.fixture(scope="module")
def sizes() -> dict[str, Size]:
    """Llama-3-8B, six layers, on 16 GPUs by interconnect."""
    names = ("2x8-h100", "4x8-a100")
    return {n: best_plans_at(Request("llama-3-8b", layers=6), load_cluster(n), 16) for n in names}


@pytest.mark.slow
def test_the_best_mesh_is_the_planners(sizes: dict[str, Size]) -> None:
    plan = searched(Request("llama-3-8b", cluster="2x8-h100", layers=6))
    best = sizes["2x8-h100"].best
    assert best is not None
    assert best.step_time_s == pytest.approx(plan.cost.step_time_s)
    assert best.mesh == plan.mesh


def test_a_degree_is_never_better_than_the_exact_search(sizes: dict[str, Size]) -> None:
    for size in sizes.values():
        assert [o.degree for o in size.degrees] == [1, 2, 4, 8, 16]
        assert size.best is not None
        assert size.best.mesh.num_devices == 16
        assert all(o.step_time_s >= size.best.step_time_s * 0.9999 for o in size.degrees if o.fits)


def test_tensor_parallelism_stops_where_it_no_longer_pays(sizes: dict[str, Size]) -> None:
    for size in sizes.values():
        stop = size.last_paying
        assert stop is not None
        for degree, o in size.by_degree.items():
            assert degree <= stop.degree or o.step_time_s >= stop.step_time_s * (1 - LEAST_GAIN)


def test_a_batch_smaller_than_the_gpus_calls_for_tensor_parallelism() -> None:
    """With 16 samples on 64 GPUs no more than 16 can split the batch; the others must split the weights."""
    size = best_plans_at(Request("llama-3-8b", layers=4), load_cluster("2x8-h100"), 64)
    assert size.batch == 16
    assert size.best is not None and size.best.degree >= 4
    assert size.last_paying is not None and size.last_paying.degree >= 4


def test_degrees_are_read_from_the_plan() -> None:
    result = planned(Request("llama-3-8b", cluster="2x8-h100", layers=4))
    plans = {p.name: p for p in result.plans}
    megatron = plans["Megatron-LM"]
    assert tensor_degree(megatron, result.graph) == megatron.mesh.axis_sizes[-1]
    assert tensor_degree(plans["data parallel"], result.graph) == tensor_degree(plans["FSDP"], result.graph) == 1


def test_batch_and_progress_are_passed_on() -> None:
    told: list[str] = []
    size = best_plans_at(Request("gpt2-xl", layers=2), load_cluster("1x8-h100"), 4, batch=12, say=told.append)
    assert size.batch == 12
    assert any("degree 4" in t for t in told)

    class Stopped(Exception):
        pass

    def stop(text: str) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        best_plans_at(Request("gpt2-xl", layers=2), load_cluster("1x8-h100"), 4, say=stop)
