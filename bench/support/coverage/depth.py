"""From config to graph as models grow deeper: seconds without imports, and memory, for docs/TRANSFORMERS.md.

    python -m bench.coverage --depth

Each model in a forked child that has imported all it needs; the best of five runs. Wall-clock time depends on what else the
machine does, so processor time stands beside it.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

from bench.support.coverage.children import in_child, warm

ROWS = Path(__file__).parents[1] / "results" / "depth.jsonl"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-405B": {**LLAMA, "num_hidden_layers": 126},
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
    "Llama-3-405B, 1,000 layers": {**LLAMA, "num_hidden_layers": 1000},
}


def measure_depth() -> None:
    """Measure all models and keep the rows."""
    warm()
    _once(next(iter(MODELS.values())))  # the files of the models, imported before the fork
    _once({**MODELS["DeepSeek-V3"], "num_hidden_layers": 4})
    with ROWS.open("w", encoding="utf-8") as file:
        for name, config in MODELS.items():

            def measure(tell: Any, config: dict[str, Any] = config) -> None:
                rows = [_once(config) for _ in range(5)]
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                tell(
                    **{
                        **rows[0],
                        "wall_s": min(r["wall_s"] for r in rows),
                        "cpu_s": min(r["cpu_s"] for r in rows),
                        "rss_mb": peak,
                    }
                )

            row = {"name": name, **in_child(measure)}
            print(row, flush=True)
            file.write(json.dumps(row) + "\n")


def _once(config: dict[str, Any]) -> dict[str, Any]:
    from planner_core.models import capture_graph

    wall, cpu = time.perf_counter(), time.process_time()
    graph = capture_graph(config, batch=2, seq=4096)
    took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return {"params": graph.num_params, "ops": graph.num_ops, "blocks": graph.num_repeats, "outcome": "graph", **took}
