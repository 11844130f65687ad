"""Who sends to whom: the matrix of a plan holds exactly the plan's wire bytes, and each algorithm its own pattern."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from planner_core.core import PHASES, Cluster, Cost, Plan, PlannedModel, Traffic, Workload, load_cluster
from planner_core.core.mesh import DeviceMesh, axis_names
from planner_core.cost.communication.collectives import COLLECTIVE_KINDS, collective_time, wire_bytes
from planner_core.cost.communication.links import axis_links, rank_groups
from planner_core.cost.communication.routes import algorithm_hops, bytes_between_gpus, traffic_routes
from planner_core.planning.request import Request
from tests.support.plans import planned

ALGORITHMS = ("ring", "hierarchical", "pairwise")


def wire(plan: Plan, *phases: str) -> int:
    return sum(t.wire_bytes for t in plan.cost.traffic if t.phase in phases or not phases)


QUICK = (("llama-3-8b", "2x8-h100"), ("gpt2-xl", "4x8-a100"))


@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        pytest.param(m, c, marks=() if (m, c) in QUICK else pytest.mark.slow)
        for m in ("llama-3-8b", "gpt2-xl")
        for c in ("2x8-h100", "2x8-v100-eth", "4x8-a100")
    ],
)
def test_row_sums_are_the_plans_wire_bytes(model: str, cluster: str) -> None:
    result = planned(Request(model, cluster=cluster, layers=4))
    seen = set()
    for plan in result.plans:
        matrix = bytes_between_gpus(plan, result.cluster)
        assert np.all(np.diag(matrix) == 0)
        seen |= {t.algorithm for t in plan.cost.traffic}
        for axis in (0, 1):
            assert matrix.sum(axis=axis) == pytest.approx(np.full(plan.mesh.num_devices, wire(plan)))
        parts = [bytes_between_gpus(plan, result.cluster, (phase,)) for phase in PHASES]
        assert np.add.reduce(parts) == pytest.approx(matrix)
        assert parts[0].sum(axis=1).mean() == pytest.approx(wire(plan, "forward"))
    assert "ring" in seen


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shares_of_a_group_add_up(algorithm: str, size: int) -> None:
    members = (2, size // 2) if size % 2 == 0 and size > 2 else (size,)
    h = algorithm_hops(algorithm, size, members)
    assert h.share.sum() == pytest.approx(size)
    assert np.all(h.src != h.dst)
    rows = np.bincount(h.src, weights=h.share, minlength=size)
    assert rows == pytest.approx(np.ones(size))
    # a sum reaches everybody only over links that join everybody
    reached = {0}
    for _ in range(size):
        reached |= {int(b) for a, b in zip(h.src, h.dst, strict=True) if int(a) in reached}
    assert reached == set(range(size))


def one_collective(kind: str, algorithm: str, mesh: DeviceMesh, axis: int, size: int) -> Plan:
    traffic = Traffic("forward", kind, (axis,), 1, size, wire_bytes(kind, size, mesh.axis_sizes[axis]), 0.0, algorithm)
    model, load, machine = PlannedModel("none", 0, "", {}), Workload(1, 1), load_cluster("1x8-h100")
    cost = Cost(0, 0, 0, 0, (traffic,), {"peak": 0})
    return Plan("one", "exact", "time", True, model, load, machine, mesh, {}, cost)


def bytes_leaving_units(
    src: NDArray[np.int64], dst: NDArray[np.int64], num_bytes: NDArray[np.float64], unit_gpus: int
) -> NDArray[np.float64]:
    """[unit]: bytes that leave each unit of `unit_gpus` adjacent GPUs."""
    out = src // unit_gpus != dst // unit_gpus
    return np.bincount(src[out] // unit_gpus, weights=num_bytes[out], minlength=1).astype(np.float64)


def out_of_nodes(plan: Plan, cluster: Cluster) -> float:
    src, dst, size = next(traffic_routes(plan, cluster))
    return float(bytes_leaving_units(src, dst, size, 8).max())


def test_a_hierarchical_all_reduce_spares_the_link_between_nodes() -> None:
    """TAPS: 2(m-1)/m inside, then 2(k-1)/k of B/m on m rings across; a flat ring sends 2(n-1)/n of B once out of a node."""
    cluster, mesh, size = load_cluster("2x8-h100"), DeviceMesh(axis_names(1), (16,)), 2**20
    flat = out_of_nodes(one_collective("all_reduce", "ring", mesh, 0, size), cluster)
    deep = out_of_nodes(one_collective("all_reduce", "hierarchical", mesh, 0, size), cluster)
    assert flat == pytest.approx(2 * 15 / 16 * size)
    assert deep == pytest.approx(8 * 2 * 1 / 2 * size / 8)


def test_rings_across_nodes_share_the_uplink() -> None:
    """Eight groups of a 2×8 mesh's first axis each cross the node once: the load is eight times one ring's."""
    cluster, mesh, size = load_cluster("2x8-h100"), DeviceMesh(axis_names(2), (2, 8)), 2**20
    assert out_of_nodes(one_collective("all_gather", "ring", mesh, 0, size), cluster) == pytest.approx(8 * size / 2)
    assert out_of_nodes(one_collective("all_gather", "ring", mesh, 1, size), cluster) == 0


@pytest.mark.parametrize("sizes", [(16,), (2, 8), (4, 4), (8, 2)])
def test_the_wire_is_never_busier_than_the_time_of_the_collective(sizes: tuple[int, ...]) -> None:
    """The bytes that leave a unit by these routes need no longer than `collectives` says the whole takes."""
    cluster, mesh = load_cluster("2x8-h100"), DeviceMesh(axis_names(len(sizes)), sizes)
    for axis in range(len(sizes)):
        link = axis_links(cluster, mesh)[axis]
        for kind in COLLECTIVE_KINDS:
            for size in (2**16, 2**22, 2**28):
                seconds, algorithm = collective_time(kind, size, link)
                src, dst, num_bytes = next(traffic_routes(one_collective(kind, algorithm, mesh, axis, size), cluster))
                for level in range(2):
                    unit = cluster.unit_gpus(level)
                    busiest = bytes_leaving_units(src, dst, num_bytes, unit).max()
                    assert busiest / cluster.levels[level].bytes_per_s <= seconds * 1.0001


def test_groups_are_the_ranks_of_the_mesh() -> None:
    mesh = DeviceMesh(axis_names(2), (2, 4))
    assert rank_groups(mesh.axis_sizes, (0,)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rank_groups(mesh.axis_sizes, (1,)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="choose ring"):
        algorithm_hops("butterfly", 8)
