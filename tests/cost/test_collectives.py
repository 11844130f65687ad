"""Collectives against the published formulas (docs/COST_MODEL.md), and what no cost model may do."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_core.core import Cluster, Level, load_cluster, load_gpu
from planner_core.core.errors import InputError
from planner_core.core.mesh import DeviceMesh, axis_names, parse_mesh
from planner_core.cost.communication.collectives import (
    COLLECTIVE_KINDS,
    algorithms,
    collective_time,
    collective_times,
    wire_bytes,
)
from planner_core.cost.communication.links import AxisLink, axis_links
from planner_core.cost.communication.redistribution import STEP_S, all_redistributions, decode, step_bytes

GPU = load_gpu("h100-sxm")
B_INTRA, B_NODE = 450e9, 400e9


def plain(*sizes: int, rates: tuple[float, ...] = (B_INTRA, B_NODE, 1e12), latency: float = 1e-30) -> Cluster:
    """A cluster at full efficiency and next to no latency, so that times are the bandwidth terms alone."""
    levels = tuple(Level(f"level{i}", size, rates[i], latency) for i, size in enumerate(sizes))
    return Cluster("plain", replace(GPU, launch_s=0.0, collectives=None), levels)


def links(cluster: Cluster, *sizes: int) -> tuple[AxisLink, ...]:
    return axis_links(cluster, DeviceMesh(axis_names(len(sizes)), sizes))


kinds_of_all = st.sampled_from(COLLECTIVE_KINDS)

# --- wire bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16, 100])
@pytest.mark.parametrize("num_bytes", [0, 1, 4, 1000, 10**12 + 7])
def test_wire_bytes_are_the_ring_formulas_rounded_down(n: int, num_bytes: int) -> None:
    assert wire_bytes("all_gather", num_bytes, n) == math.floor((n - 1) * num_bytes / n)
    assert wire_bytes("reduce_scatter", num_bytes, n) == math.floor((n - 1) * num_bytes / n)
    assert wire_bytes("all_reduce", num_bytes, n) == math.floor(2 * (n - 1) * num_bytes / n)
    assert wire_bytes("all_to_all", num_bytes, n) == (n - 1) * num_bytes // n**2


@pytest.mark.parametrize("n", [2, 3, 8])
def test_wire_bytes_are_what_a_ring_really_sends(n: int) -> None:
    """Walk the ring: each rank passes on one of n pieces per step until every rank has them all."""
    piece, sent = 12, 0
    held = [{rank} for rank in range(n)]
    while any(len(pieces) < n for pieces in held):
        step = sum(1 for rank in range(n) if len(held[rank]) < n)
        assert step == n
        newest = [(rank - len(held[rank]) + 1) % n for rank in range(n)]
        held = [pieces | {newest[rank - 1]} for rank, pieces in enumerate(held)]
        sent += piece
    assert sent == wire_bytes("all_gather", n * piece, n)
    assert 2 * sent == wire_bytes("all_reduce", n * piece, n)


def test_reduce_scatter_and_all_gather_send_what_one_all_reduce_does() -> None:
    """Megatron-LM's sequence parallelism costs the same wire bytes."""
    full = 4 * 2048 * 4096 * 2
    halves = wire_bytes("reduce_scatter", full, 8) + wire_bytes("all_gather", full, 8)
    assert halves == wire_bytes("all_reduce", full, 8)


def test_unknown_collectives_are_refused() -> None:
    for call in (
        lambda: wire_bytes("broadcast", 1, 2),
        lambda: wire_bytes("all_reduce", 1, 0),
        lambda: collective_time("broadcast", 0, AxisLink(1)),
        lambda: collective_times("broadcast", np.ones(1), AxisLink(1)),
    ):
        with pytest.raises(ValueError, match="is not a collective"):
            call()


# --- topology of an axis --------------------------------------------------------------------------


def test_last_axis_is_inside_the_node_and_the_first_shares_the_uplinks() -> None:
    outer, inner = links(plain(8, 2), 2, 8)
    assert (outer.levels, outer.members, outer.bytes_per_s) == (("level1",), (2,), B_NODE / 8)
    assert (inner.levels, inner.members, inner.bytes_per_s) == (("level0",), (8,), B_INTRA)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_effective_bandwidth_is_shared_among_concurrent_rings(tensor: int) -> None:
    """TAPS: min(B_intra, B_node / number of concurrent rings); with a tensor axis of t, t rings leave each node."""
    link = links(plain(8, 2), 16 // tensor, tensor)[0]
    assert link.bytes_per_s == min(B_INTRA, B_NODE / tensor)
    assert link.members == (() if tensor == 16 else (2,) if tensor == 8 else (8 // tensor, 2))


def test_three_axes_and_three_levels() -> None:
    cluster = plain(8, 4, 2, rates=(450e9, 400e9, 1600e9))
    data, pipe, tensor = links(cluster, 2, 4, 8)
    assert (data.levels, data.bytes_per_s) == (("level2",), 1600e9 / 32)
    assert (pipe.levels, pipe.bytes_per_s) == (("level1",), 400e9 / 8)
    assert (tensor.levels, tensor.bytes_per_s) == (("level0",), 450e9)


def test_the_slowest_hop_sets_the_latency_of_a_ring() -> None:
    cluster = load_cluster("2x8-h100")
    outer, inner = axis_links(cluster, parse_mesh("2x8", 16))
    (whole,) = axis_links(cluster, parse_mesh("16", 16))
    measured = cluster.gpu.collectives
    assert measured is not None
    near, far = measured.hop_s, measured.ring_hop_s
    assert (outer.latency_s, inner.latency_s, whole.latency_s) == (far, near, far)
    assert whole.launch_s == measured.base_s


def test_few_ranks_in_a_node_do_not_fill_its_links_and_its_switch_adds_for_eight() -> None:
    cluster = load_cluster("2x8-h100")
    measured = cluster.gpu.collectives
    assert measured is not None
    for mesh, local in (("16", 8), ("8x2", 2), ("4x4", 4), ("2x8", 8)):
        link = axis_links(cluster, parse_mesh(mesh, 16))[-1]
        rate = 450e9 * measured.efficiency * (1 - measured.few / local)
        assert link.stages[0].bytes_per_s == pytest.approx(rate, rel=1e-9)
        assert link.in_switch == (measured.in_switch if local == 8 else 1.0)


def test_groups_that_straddle_nodes_have_no_hierarchy_but_still_share_the_uplinks() -> None:
    """Groups of 12 on nodes of 8: the second node serves a piece of both groups."""
    outer, inner = links(plain(8, 3), 2, 12)
    assert inner.stages == ()
    assert inner.bytes_per_s == min(B_INTRA, B_NODE / 2)
    assert {a.name for a in algorithms("all_reduce", inner)} == {"ring"}
    assert outer.size == 2


def test_even_counts_on_uneven_nodes_are_not_taken_for_a_hierarchy() -> None:
    """6 of 3 nodes of 4: groups 0-5 and 6-11 hold 4 + 2 and 2 + 4 ranks."""
    assert links(plain(4, 3), 2, 6)[1].stages == ()


def test_size_one_axes_cost_nothing() -> None:
    link = links(plain(8, 2), 1, 16)[0]
    assert all(collective_time(kind, 1e9, link) == (0.0, "none") for kind in COLLECTIVE_KINDS)
    assert collective_times("all_reduce", np.array([1e9]), link).tolist() == [0.0]


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="has 8 devices but plain has 16 GPUs; sizes must multiply to 16"):
        links(plain(8, 2), 8)


# --- times, against TAPS --------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "k"), [(8, 2), (8, 4), (4, 16)])
@pytest.mark.parametrize("across", [4e9, 1e12])
def test_all_reduce_is_the_slower_of_the_two_terms_of_taps(m: int, k: int, across: float) -> None:
    """Inside and between nodes are busy at once; across, each rank sends its 1/m, and no faster than its own link."""
    n = 1e9
    (link,) = links(plain(m, k, rates=(450e9, across)), m * k)
    between = 2 * (k - 1) / k * n / m / min(across / m, 450e9)
    expected = max(2 * (m - 1) / m * n / 450e9, between)
    assert collective_time("all_reduce", n, link) == (pytest.approx(expected, rel=1e-9), "hierarchical")


@pytest.mark.parametrize(("m", "k"), [(8, 2), (8, 4), (4, 16)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_flat_ring_is_the_formula_of_taps(kind: str, m: int, k: int) -> None:
    n = 1e9
    (link,) = links(plain(m, k), m * k)
    expected = (m * k - 1) / (m * k) * n / min(B_INTRA, B_NODE / 1)
    assert collective_time(kind, n, link) == (pytest.approx(expected, rel=1e-9), "ring")


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_on_one_level_bandwidth_time_is_wire_bytes_over_bandwidth(kind: str) -> None:
    (link,) = links(plain(8), 8)
    seconds, _ = collective_time(kind, 8e9, link)
    assert seconds == pytest.approx(wire_bytes(kind, 8 * 10**9, 8) / B_INTRA, rel=1e-9)


def test_all_to_all_is_bound_by_what_leaves_the_node() -> None:
    """8 ranks of a node send 8/16 of their pieces out: 8·8·B/16² over the node's uplinks."""
    (link,) = links(plain(8, 2), 16)
    assert collective_time("all_to_all", 1e9, link)[0] == pytest.approx(64 * 1e9 / 256 / B_NODE, rel=1e-9)
    inside = (16 - 1) * 1e9 / 256 / 1e9
    (slow,) = links(plain(8, 2, rates=(1e9, 1e15)), 16)
    assert collective_time("all_to_all", 1e9, slow)[0] == pytest.approx(inside, rel=1e-9)


def test_all_to_all_of_groups_across_nodes_shares_the_uplinks_like_a_ring() -> None:
    link = links(plain(8, 2), 2, 8)[0]
    assert collective_time("all_to_all", 1e9, link)[0] == pytest.approx(1e9 / 4 / (B_NODE / 8), rel=1e-9)


def test_time_is_latency_transfer_and_the_root_of_their_product() -> None:
    """a + x + curve sqrt(a x) with the H100's constants: an all_reduce of 8 in the switch, and one of 2 x 8."""
    cluster = load_cluster("2x8-h100")
    c = cluster.gpu.collectives
    assert c is not None
    (whole,) = axis_links(cluster, parse_mesh("16", 16))
    _, inner = axis_links(cluster, parse_mesh("2x8", 16))
    for size in (1e3, 1e6, 1e9):
        a = c.summing * (c.base_s + 7 * c.hop_s)
        x = 2 * 7 / 8 * size * c.in_switch / (450e9 * c.efficiency * (1 - c.few / 8))
        assert collective_time("all_reduce", size, inner)[0] == pytest.approx(a + x + c.curve * math.sqrt(a * x))
        a += 2 * c.tree_hop_s
        x = max(x, size / (400e9 * c.outer_efficiency))
        assert collective_time("all_reduce", size, whole)[0] == pytest.approx(a + x + c.curve * math.sqrt(a * x))


def test_latency_terms() -> None:
    """Of 16 ranks on 2 nodes 14 hops of a ring stay inside and 2 lead out; a tree goes up and down; exchanges run at once."""
    cluster = load_cluster("2x8-h100")
    c = cluster.gpu.collectives
    assert c is not None
    (link,) = axis_links(cluster, parse_mesh("16", 16))
    fixed = {kind: algorithms(kind, link)[0].fixed_s for kind in COLLECTIVE_KINDS}
    assert fixed["all_gather"] == fixed["reduce_scatter"] == pytest.approx(c.base_s + 14 * c.hop_s + 2 * c.ring_hop_s)
    assert fixed["all_reduce"] == pytest.approx(c.summing * (c.base_s + 7 * c.hop_s) + 2 * c.tree_hop_s)
    assert fixed["all_to_all"] == pytest.approx(c.base_s + c.tree_hop_s)


@given(st.integers(2, 4), st.integers(2, 6), st.integers(2, 6), kinds_of_all, st.integers(1, 10**11))
def test_a_slower_level_more_is_never_faster(m: int, k: int, g: int, kind: str, size: int) -> None:
    """The same GPUs with k times g nodes on one fast level, and with groups of k nodes on a third, slower one."""
    gpu = load_gpu("h100-sxm")
    node = Level("node", m, 450e9, 1e-6, tree_latency_s=1e-6)
    two = Cluster("two", gpu, (node, Level("rail", k * g, 400e9, 9e-6, tree_latency_s=5e-5)))
    spine = Level("spine", g, 400e9 * k / 2, 2e-5, tree_latency_s=8e-5)
    three = Cluster("three", gpu, (node, Level("rail", k, 400e9, 9e-6, tree_latency_s=5e-5), spine))
    times = [collective_time(kind, size, links(c, m * k * g)[0])[0] for c in (two, three)]
    assert times[1] >= times[0] * (1 - 1e-12)


def test_no_collective_is_faster_than_a_launch() -> None:
    (link,) = axis_links(load_cluster("1x8-h100"), parse_mesh("8", 8))
    assert all(collective_time(kind, 1, link)[0] > link.launch_s for kind in COLLECTIVE_KINDS)


# --- properties -----------------------------------------------------------------------------------

CLUSTERS = ["1x4-a100-pcie", "1x8-h100", "2x8-h100", "2x8-v100-eth", "4x8-a100", "64x8-h100"]
kinds = st.sampled_from(COLLECTIVE_KINDS)
sizes = st.integers(0, 10**11)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Cluster, DeviceMesh]:
    """A bundled cluster or an odd one, with a mesh of one to three axes that fills it."""
    odd = st.tuples(st.integers(1, 9), st.integers(1, 6)).map(lambda s: plain(*s, latency=5e-6))
    cluster = draw(st.sampled_from(CLUSTERS).map(load_cluster) | odd)
    left, found = cluster.num_gpus, []
    for _ in range(draw(st.integers(0, 2))):
        found.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= found[-1]
    axis_sizes = (*found, left)
    return cluster, DeviceMesh(axis_names(len(axis_sizes)), axis_sizes)


@given(placed(), kinds, st.lists(sizes, max_size=5))
def test_many_sizes_at_once_equal_one_at_a_time(case: tuple[Cluster, DeviceMesh], kind: str, many: list[int]) -> None:
    for link in axis_links(*case):
        one = [collective_time(kind, size, link)[0] for size in many]
        assert collective_times(kind, np.array(many, dtype=np.int64), link).tolist() == one


@given(placed(), kinds, sizes, st.floats(1, 1e3), st.sampled_from([0, 1, None]))
def test_more_bandwidth_is_never_slower(
    case: tuple[Cluster, DeviceMesh], kind: str, size: int, factor: float, level: int | None
) -> None:
    cluster, mesh = case
    for before, after in zip(
        axis_links(cluster, mesh), axis_links(cluster.with_bandwidth(factor, level), mesh), strict=True
    ):
        assert collective_time(kind, size, after)[0] <= collective_time(kind, size, before)[0] * (1 + 1e-12)


@given(placed(), kinds, sizes, st.floats(1e-3, 1), st.sampled_from([0, 1, None]))
def test_less_latency_is_never_slower(
    case: tuple[Cluster, DeviceMesh], kind: str, size: int, factor: float, level: int | None
) -> None:
    cluster, mesh = case
    for before, after in zip(
        axis_links(cluster, mesh), axis_links(cluster.with_latency(factor, level), mesh), strict=True
    ):
        assert collective_time(kind, size, after)[0] <= collective_time(kind, size, before)[0] * (1 + 1e-12)


@given(placed(), kinds, st.lists(sizes, min_size=2, max_size=6))
def test_more_bytes_are_never_faster(case: tuple[Cluster, DeviceMesh], kind: str, many: list[int]) -> None:
    for link in axis_links(*case):
        seconds = [collective_time(kind, size, link)[0] for size in sorted(many)]
        assert all(a <= b for a, b in pairwise(seconds))
        assert all(math.isfinite(s) for s in seconds)


@given(placed())
def test_stages_multiply_to_the_axis(case: tuple[Cluster, DeviceMesh]) -> None:
    for link in axis_links(*case):
        assert not link.stages or math.prod(link.members) == link.size
        assert link.size == 1 or (len(link.levels) > 0 and link.bytes_per_s > 0 and link.exchange_s_per_byte > 0)


def test_links_inside_a_host_go_round_in_a_ring() -> None:
    """Pairs of GPUs on four PCIe slots of one host, of two hosts: no tree runs over the slots, and one hop of a turn over each pair."""
    pairs = plain(2, 4, 2, latency=1e-6)
    (assumed,), (stated,) = (links(replace(pairs, gpus_per_node=node), 16) for node in (None, 8))
    assert [stage.inside for stage in assumed.stages] == [True, False, False]
    assert [stage.inside for stage in stated.stages] == [True, True, False]
    assert stated.sum_s == pytest.approx((1 + 3 + 2) * 1e-6) and assumed.sum_s == pytest.approx((1 + 2 * 2 + 2) * 1e-6)


# --- ways from one placement to another -----------------------------------------------------------


@pytest.mark.parametrize("shape", [(128256, 4096), (64, 32)])
def test_a_way_costs_what_its_steps_cost(shape: tuple[int, ...]) -> None:
    """The table was put together from ways that a run does not make: (P, P) to (S(1), R) cost 15.0 ms where its steps take 10.9."""
    sizes = (2, 8)
    on_axes = links(load_cluster("2x8-h100"), *sizes)
    table = all_redistributions(shape, 4, sizes, on_axes)
    ways = 0
    for src, dst in np.argwhere(np.isfinite(table.cost) & (table.first >= 0)):
        at, seconds = decode(int(src), 2, 2), 0.0
        for step in table.steps(at, decode(int(dst), 2, 2)):
            num_bytes = step_bytes(shape, 4, at, step, sizes)
            seconds += STEP_S
            seconds += collective_time(step.collective, num_bytes, on_axes[step.axis])[0] if step.collective else 0.0
            at = (*at[: step.axis], step.dst, *at[step.axis + 1 :])
        assert table.cost[src, dst] == pytest.approx(seconds, rel=1e-9), (decode(int(src), 2, 2), at)
        ways += 1
    assert ways > 100


def test_one_rank_sends_nothing() -> None:
    """A weight in one shard was taken to be gathered, and copied into place: FSDP on one GPU was 5 % above its own price."""
    table = all_redistributions((64, 32), 4, (1,), links(load_cluster("1x8-h100:gpus=1"), 1))
    assert table.local[np.isfinite(table.cost)].all()
