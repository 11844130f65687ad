"""The graphs of several numbers of samples, of which few are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner_core.core import Graph
from planner_core.models import BatchGraphs, batches, capture_graph

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that are captured."""
    seen: list[int] = []

    def capture(model: str, *, batch: int, seq: int | None, dtype: str, layers: int | None) -> Graph:
        seen.append(batch)
        return capture_graph(TINY, batch=batch, seq=seq, dtype=dtype, layers=layers)

    monkeypatch.setattr(batches, "open_model", capture)
    return seen


def opened(graphs: BatchGraphs, batch: int, **changes: Any) -> Graph:
    return graphs.open("tiny.json", **{"batch": batch, "seq": 32, "dtype": "bfloat16", "layers": None, **changes})


def test_three_captures_serve_every_number_of_samples(captured: list[int]) -> None:
    graphs = BatchGraphs()
    found = {b: opened(graphs, b) for b in (16, 8, 4, 2, 1, 12, 16)}
    assert captured == [16, 8, 4]
    for batch, graph in found.items():
        assert graph == capture_graph(TINY, batch=batch, seq=32), batch


def test_another_length_is_captured(captured: list[int]) -> None:
    graphs = BatchGraphs()
    for batch in (16, 8, 4, 2):
        opened(graphs, batch)
    assert opened(graphs, 2, seq=16).workload == {"batch": 2, "seq": 16}
    assert captured == [16, 8, 4, 2]


def test_a_capture_that_disagrees_ends_it(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is of another length with few samples follows from no two others."""
    known: Callable[..., Graph] = vars(batches)["open_model"]

    def capture(model: str, *, batch: int, seq: int | None, **rest: Any) -> Graph:
        return known(model, batch=batch, seq=32 if batch >= 8 else 16, **rest)

    monkeypatch.setattr(batches, "open_model", capture)
    graphs = BatchGraphs()
    assert [opened(graphs, b).workload["batch"] for b in (16, 8, 4, 2, 1)] == [16, 8, 4, 2, 1]
    assert captured == [16, 8, 4, 2, 1]
