"""The published sizes become graphs within the memory of issue 5 (`bench.coverage --depth` times them), and what is refused beyond."""

from __future__ import annotations

import math
import resource
import threading
from typing import Any

import pytest

from planner_core.core.errors import CaptureError
from planner_core.core.graph import Graph
from planner_core.models.loading import capture_graph
from planner_core.models.sandbox import memory_limit as memory

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "num_hidden_layers": 126,
}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}
LIBRARIES_BYTES = 400 << 20
"""What a process that imported torch and transformers takes: 340 MB."""


def captured(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, batch: int = 2, seq: int = 4096) -> Graph:
    """The graph of a config, made in less than 1 GB."""
    capture_graph({**config, "num_hidden_layers": 4}, batch=1, seq=8)  # imports
    monkeypatch.setattr(memory, "LIMIT_BYTES", 10**9 - LIBRARIES_BYTES)
    return capture_graph(config, batch=batch, seq=seq)


def test_405b(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(LLAMA, monkeypatch)
    assert graph.num_repeats == {"LlamaDecoderLayer": 126} and 405e9 < graph.num_params < 406e9


def test_671b(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured({"model_type": "deepseek_v3"}, monkeypatch)
    assert sorted(graph.num_repeats.values()) == [3, 58] and 670e9 < graph.num_params < 672e9


def test_positions_that_are_repeated_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """ProphetNet has 16 x 512 x 512 of them, and as many again for each of 16 heads."""
    config = {"model_type": "prophetnet", "architectures": ["ProphetNetForCausalLM"], "num_decoder_layers": 2}
    capture_graph(config, batch=1, seq=8)  # imports
    monkeypatch.setattr(memory, "LIMIT_BYTES", 10**9 - LIBRARIES_BYTES)
    graph = capture_graph(config, batch=16, seq=510)
    constants = [v for b in (graph.top, *graph.blocks.values()) for v in b.values if v.kind == "constant"]
    assert max(math.prod(v.meta.shape) for v in constants) > 1 << 26


@pytest.mark.slow
def test_a_thousand_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured({**LLAMA, "num_hidden_layers": 1000}, monkeypatch)
    assert graph.num_repeats == {"LlamaDecoderLayer": 1000} and graph.num_params > 3e12


def test_a_capture_takes_at_most_two_gigabytes() -> None:
    """3.2 GB are refused, and the bound is gone afterwards."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with (
        pytest.raises(CaptureError, match="batch 20000 and 20000 tokens takes more than 2 GiB of memory"),
        memory.limited_memory("a model", batch=20_000, seq=20_000),
    ):
        bytearray(3_200_000_000)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert capture_graph(TINY, batch=1, seq=8).num_params > 0


def test_token_numbers_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose token numbers alone would take 3.2 GB is captured by its shapes."""
    assert captured(TINY, monkeypatch, batch=20_000, seq=20_000).num_params > 0


def test_a_servers_threads_do_not_bound_each_other() -> None:
    before, seen = resource.getrlimit(resource.RLIMIT_AS), []

    def work() -> None:
        with memory.limited_memory("a model", batch=1, seq=1):
            seen.append(resource.getrlimit(resource.RLIMIT_AS))

    with memory.limited_memory("a model", batch=1, seq=1):
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("std::bad_alloc")]
)
def test_refused_memory_is_told_whoever_met_it(error: Exception) -> None:
    with pytest.raises(CaptureError, match="more than 2 GiB"), memory.limited_memory("a model", batch=1, seq=1):
        try:
            raise error
        except Exception as cause:
            raise CaptureError("the model could not be run") from cause
