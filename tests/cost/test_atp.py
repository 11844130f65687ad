"""ATP's closed forms against the paper's figures, and each form against a count from first principles."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_core.cost import chunk_waits
from planner_core.cost.communication import LayerMatrix, chunk_timeline, reductions, wire_bytes

degrees = st.integers(1, 64)
GPT_LAYER = (
    LayerMatrix("qkv", 1, 3, column_first=True),
    LayerMatrix("attention out", 1, 1, column_first=False),
    LayerMatrix("FFN-1", 1, 4, column_first=True),
    LayerMatrix("FFN-2", 4, 1, column_first=False),
)
"""In units of the hidden size."""


@given(degrees, degrees)
def test_elements_all_reduced_per_layer(d1: int, d2: int) -> None:
    sums = reductions(d1, d2, GPT_LAYER)
    shares = {
        (phase, axis): sum(r.share for r in sums if (r.phase, r.axis) == (phase, axis))
        for phase in ("forward", "backward")
        for axis in (1, 2)
    }
    assert shares["forward", 2] == Fraction(3 + 4, d1) and shares["backward", 2] == Fraction(4 + 1, d1)
    assert shares["forward", 1] == shares["backward", 1] == Fraction(1 + 1, d2)


def test_megatron_lm_has_two_all_reduces_each_way() -> None:
    over_axis_1 = [r for r in reductions(8, 1, GPT_LAYER) if r.axis == 1]
    assert [(r.weight, r.phase) for r in over_axis_1] == [
        ("attention out", "forward"),
        ("FFN-2", "forward"),
        ("FFN-1", "backward"),
        ("qkv", "backward"),
    ]
    assert all(r.share == 1 for r in over_axis_1)


@pytest.mark.parametrize(
    ("mesh", "megabytes"),
    [
        ((8, 1), {"forward": 704.643, "backward": 704.643}),
        ((4, 2), {"forward": 654.311, "backward": 553.648}),
        ((2, 4), {"forward": 1157.628, "backward": 855.638}),
        ((1, 8), {"forward": 2466.250, "backward": 1761.608}),
    ],
)
def test_wire_megabytes_per_rank_and_layer(mesh: tuple[int, int], megabytes: dict[str, float]) -> None:
    tokens, hidden = 4 * 2048, 12288  # the published figure cuts (1, 8) forward, 2466.250752, to 2466.250
    sent = dict.fromkeys(megabytes, 0)
    for r in reductions(*mesh, GPT_LAYER):
        sent[r.phase] += wire_bytes("all_reduce", int(r.share * tokens * hidden * 2), mesh[r.axis - 1])
    assert {phase: size / 1e6 for phase, size in sent.items()} == pytest.approx(megabytes, abs=1e-3)


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
