"""What builds a small model in a process of its own: its class, and its inputs with places for batch and sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner_core.models.sources import build_from_config, make_training_inputs

DEEPSPEED = Path(__file__).resolve().parents[2] / ".venv" / "deepspeed"
"""Where DeepSpeed lies, if `make test-all` could build it."""
BATCH, SEQ = 5, 19  # sizes that no config has, to see where batch and sequence length stand in the inputs


def model_spec(config: Mapping[str, Any]) -> dict[str, Any]:
    """`class`, and `inputs` by name: shape with "batch" and "seq", kind, and how high integers go."""
    module, parsed, _ = build_from_config(dict(config), "float32")
    text = parsed.get_text_config() if hasattr(parsed, "get_text_config") else parsed
    inputs = {}
    for name, value in make_training_inputs(module, parsed, BATCH, SEQ, "float32").items():
        shape = [{BATCH: "batch", SEQ: "seq"}.get(d, d) for d in value.shape]
        high = getattr(text, "vocab_size", None) if value.dim() > 1 else getattr(parsed, "num_labels", None)
        inputs[name] = [shape, "float" if value.is_floating_point() else "int", int(high or 2)]
    return {"class": type(module).__name__, "inputs": inputs}
