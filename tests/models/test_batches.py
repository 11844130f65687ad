"""The graphs of several numbers of samples, of which few are captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


DEEP_T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "num_layers": 8,
    "num_decoder_layers": 9,
    "vocab_size": 256,
}


def count_captures(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> list[tuple[int, int | None]]:
    """The batches and the numbers of layers with which a config is captured from now on."""
    seen: list[tuple[int, int | None]] = []

    def capture(model: str, *, batch: int, seq: int | None, dtype: str, layers: int | None) -> Graph:
        seen.append((batch, layers))
        return capture_graph(config, batch=batch, seq=seq, dtype=dtype, layers=layers)

    monkeypatch.setattr(batches, "open_model", capture)
    return seen


@pytest.mark.parametrize("config", [pytest.param({**TINY, "num_hidden_layers": 8}, marks=pytest.mark.slow), DEEP_T5])
def test_a_deep_model_is_captured_once(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of its layers show how sizes depend on the samples."""
    seen, graphs = count_captures(monkeypatch, config), BatchGraphs()
    found = {b: opened(graphs, b) for b in (16, 8, 4, 1)}
    assert seen == [(16, None), (16, 3), (8, 3), (4, 3)]
    for batch, graph in found.items():
        assert graph == capture_graph(config, batch=batch, seq=32), batch


def test_layers_that_few_do_not_have_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose blocks differ with its depth is captured with all of its layers."""
    config = {**TINY, "num_hidden_layers": 8}
    seen, graphs = count_captures(monkeypatch, config), BatchGraphs()
    known: Callable[..., Graph] = vars(batches)["open_model"]

    def capture(model: str, *, layers: int | None, **rest: Any) -> Graph:
        graph = known(model, layers=layers, **rest)
        return (
            replace(graph, blocks={n: replace(b, recomputed=True) for n, b in graph.blocks.items()})
            if layers
            else graph
        )

    monkeypatch.setattr(batches, "open_model", capture)
    assert [opened(graphs, b) for b in (16, 8)] == [capture_graph(config, batch=b, seq=32) for b in (16, 8)]
    assert seen == [(16, None), (16, 3), (8, 3), (8, None)]


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
