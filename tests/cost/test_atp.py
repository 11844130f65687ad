"""ATP's closed forms against the paper's figures, and each form against a count from first principles."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_core.cost import chunk_waits
from planner_core.cost.communication.atp import (
    best_mesh,
    bracket,
    chunk_timeline,
    layer_cost,
    layer_wire_bytes,
    reduced_elements,
    reductions,
    replicated_norm_elements,
    ring_time_s,
)

degrees = st.integers(1, 64)


@given(degrees, degrees)
def test_elements_all_reduced_per_layer(d1: int, d2: int) -> None:
    assert reduced_elements(d1, d2, "forward", 2) == Fraction(3 + 4, d1)
    assert reduced_elements(d1, d2, "backward", 2) == Fraction(4 + 1, d1)
    assert reduced_elements(d1, d2, "forward", 1) == Fraction(1 + 1, d2)
    assert reduced_elements(d1, d2, "backward", 1) == Fraction(1 + 1, d2)


def test_megatron_lm_has_two_all_reduces_each_way() -> None:
    over_axis_1 = [r for r in reductions(8, 1) if r.axis == 1]
    assert [(r.weight, r.phase) for r in over_axis_1] == [
        ("attention out", "forward"),
        ("FFN-2", "forward"),
        ("FFN-1", "backward"),
        ("qkv", "backward"),
    ]
    assert all(r.share == 1 for r in over_axis_1)


@pytest.mark.parametrize(
    ("mesh", "value"),
    [
        ((4, 1), 3),
        ((4, 2), 6),
        ((8, 1), 7),
        ((2, 4), 10),
        ((1, 8), 21),
        ((8, 2), 10),
        ((16, 1), 15),
        ((8, 4), 16),
        ((16, 4), 24),
        ((16, 8), 36),
        ((32, 8), 52),
        ((32, 16), 76),
    ],
)
def test_bracket(mesh: tuple[int, int], value: float) -> None:
    assert bracket(*mesh) == value


@pytest.mark.parametrize(
    ("num_gpus", "mesh"),
    [
        (4, (4, 1)),
        (8, (4, 2)),
        (16, (8, 2)),
        (32, (8, 4)),
        (64, (16, 4)),
        (128, (16, 8)),
        (256, (32, 8)),
        (512, (32, 16)),
    ],
)
def test_best_mesh_at_equal_bandwidth(num_gpus: int, mesh: tuple[int, int]) -> None:
    assert best_mesh(num_gpus) == mesh


def test_communication_falls_with_the_number_of_gpus() -> None:
    costs = [layer_cost(*best_mesh(n)) for n in (4, 8, 16, 32, 64, 128, 256, 512)]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 5


@pytest.mark.parametrize(
    ("mesh", "forward", "backward"),
    [((8, 1), 704.643, 704.643), ((4, 2), 654.311, 553.648), ((2, 4), 1157.628, 855.638), ((1, 8), 2466.250, 1761.608)],
)
def test_wire_megabytes_per_rank_and_layer(mesh: tuple[int, int], forward: float, backward: float) -> None:
    tokens, hidden = 4 * 2048, 12288  # the published figure cuts (1, 8) forward, 2466.250752, to 2466.250
    assert layer_wire_bytes(*mesh, "forward", tokens, hidden) / 1e6 == pytest.approx(forward, abs=1e-3)
    assert layer_wire_bytes(*mesh, "backward", tokens, hidden) / 1e6 == pytest.approx(backward, abs=1e-3)


@given(st.integers(0, 5), st.integers(0, 5), st.floats(1e9, 1e12))
def test_ring_time_is_the_wire_bytes_over_bandwidth(e1: int, e2: int, bandwidth: float) -> None:
    d1, d2, tokens, hidden = 2**e1, 2**e2, 4096, 8192
    sent = sum(layer_wire_bytes(d1, d2, phase, tokens, hidden) for phase in ("forward", "backward"))
    seconds = ring_time_s(d1, d2, bandwidth, bandwidth, layers=1, tokens=tokens, hidden=hidden)
    assert seconds == pytest.approx(sent / bandwidth, rel=1e-9)


def test_ring_time_is_the_published_formula() -> None:
    layers, tokens, hidden, b1, b2, d1, d2 = 24, 8192, 4096, 50e9, 450e9, 4, 8
    expected = 8 * layers * tokens * hidden * 2 / 32 * ((d1 - 1) / b1 + 3 * (d2 - 1) / b2)
    assert ring_time_s(d1, d2, b1, b2, layers=layers, tokens=tokens, hidden=hidden) == pytest.approx(
        expected, rel=1e-12
    )


def test_replicated_norms_bring_megatron_lm_back() -> None:
    """With LayerNorm and residual whole over axis 2, (8, 1) costs 7.0 and (4, 2) 8.5 units of b·s·h."""
    assert best_mesh(8, replicated_norm=True) == (8, 1)
    assert layer_cost(8, 1, replicated_norm=True) == 7.0
    assert layer_cost(4, 2, replicated_norm=True) == 8.5
    assert layer_cost(4, 2) == 6.0
    assert replicated_norm_elements(4, 2) == Fraction(5, 2)
    assert replicated_norm_elements(8, 1) == 0


def test_a_slow_outer_axis_moves_the_mesh() -> None:
    assert best_mesh(16, 1.0, 100.0) == (1, 16)
    assert best_mesh(16, 100.0, 1.0) == (16, 1)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 50))
def test_closed_form_of_chunk_overlap_is_the_timeline(compute: float, reduce: float, chunks: int) -> None:
    spans = chunk_timeline([compute / chunks] * chunks, [reduce / chunks] * chunks)
    assert spans[-1].end_s == pytest.approx(_in_chunks(compute, reduce, chunks), rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20))
def test_timeline_keeps_the_order_of_each_stream_and_of_each_chunk(chunks: list[tuple[float, float]]) -> None:
    spans = chunk_timeline([c for c, _ in chunks], [r for _, r in chunks])
    for stream in ("compute", "communication"):
        mine = [s for s in spans if s.stream == stream]
        assert [s.chunk for s in mine] == list(range(len(chunks)))
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
    ends = {s.chunk: s.end_s for s in spans if s.stream == "compute"}
    assert all(s.start_s >= ends[s.chunk] for s in spans if s.stream == "communication")


def test_one_chunk_hides_nothing_and_many_hide_all_but_one() -> None:
    assert _in_chunks(8.0, 4.0, 1) == 12.0
    assert _in_chunks(8.0, 4.0, 4) == 9.0
    assert _in_chunks(4.0, 8.0, 4) == 9.0


def _in_chunks(compute: float, reduce: float, chunks: int) -> float:
    """Seconds of equal chunks without contention, as plans are priced."""
    return compute + float(chunk_waits(reduce / chunks, compute / chunks, chunks, 0.0))
