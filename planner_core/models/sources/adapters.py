"""Adapters of low rank (LoRA) beside the linear layers of a model from a config, as peft puts them: all that was there is frozen.

    {"model_type": "llama", ..., "lora": {"rank": 16, "targets": ["q_proj", "v_proj"], "weights": "nf4"}}

`targets` are names of layers; without them every linear layer but the head has an adapter, as by peft's "all-linear". With `weights`
"nf4" every linear layer but the head keeps its frozen weight in 4 bits (`models.adapters.nf4`), as QLoRA does.

    y = W x + B (A x) · scale        W frozen, A [rank, in] and B [out, rank] trained

Example: a layer of 4096 x 4096 has 16.8 million weights that are frozen, and with rank 16 an adapter of 131 072.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner_core.core import InputError, shorten_value
from planner_core.models.adapters.nf4 import FourBitLinear

LORA = "lora"
"""The field of a config that asks for adapters."""
NF4 = "nf4"
"""The form of frozen weights in 4 bits."""
NF4_NOTE = (
    "every linear layer but the head keeps its frozen weight in 4 bits (NF4, double quantization: 0.516 bytes a number): this is a price; "
    "peft with bitsandbytes runs it as data parallel or FSDP, with all blocks recomputed or none, and no exported script does"
)
"""The assumption of a plan with such weights."""
MAX_RANK = 4096
DEFAULT_SCALE = 2
"""The scale of an adapter's result without `alpha` (then alpha / rank). It changes no cost."""


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear | FourBitLinear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer, self.scale = base, scale
        like: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, **like)
        self.lora_B = nn.Linear(rank, base.out_features, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's result to that of the frozen layer."""
        out: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scale
        return out


def add_adapters(model: nn.Module, asked: Any) -> nn.Module:
    """Freeze a model and add adapters to it. Raises InputError for a wrong rank, and for targets that do not exist."""
    rank, targets, scale = _read_request(asked)
    model.requires_grad_(False)
    # peft's "all-linear" leaves the output layer out as well.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [(n, layer) for n, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    adapted = [(name, layer) for name, layer in linear if not targets or name.rpartition(".")[2] in targets]
    if not adapted:
        there = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise InputError(
            f"lora: no linear layer is called {shorten_value(targets)}; the model has {', '.join(there) or 'none'}"
        )
    names = {name for name, _ in adapted}
    for name, layer in linear:
        parent, _, attribute = name.rpartition(".")
        base = FourBitLinear(layer) if asked.get("weights") == NF4 else layer
        setattr(model.get_submodule(parent), attribute, LoraLinear(base, rank, scale) if name in names else base)
    return model


def _read_request(asked: Any) -> tuple[int, tuple[str, ...], float]:
    if not isinstance(asked, Mapping) or not isinstance(asked.get("rank"), int) or not 1 <= asked["rank"] <= MAX_RANK:
        raise InputError(
            f'lora is {shorten_value(asked)}, but must have a rank from 1 to {MAX_RANK}, e.g. {{"rank": 16}}'
        )
    targets = asked.get("targets") or ()
    if not isinstance(targets, (list, tuple)) or not all(isinstance(t, str) for t in targets):
        raise InputError(
            f'lora: targets is {shorten_value(targets)}, but must be names of layers, e.g. ["q_proj", "v_proj"]'
        )
    if asked.get("weights") not in (None, NF4):
        raise InputError(f"lora: weights is {shorten_value(asked['weights'])}, but must be {NF4}, or left out")
    alpha = asked.get("alpha", DEFAULT_SCALE * asked["rank"])
    return asked["rank"], tuple(targets), float(alpha) / asked["rank"]


def is_in_four_bits(config: Mapping[str, Any]) -> bool:
    """Return whether a config asks for frozen weights in 4 bits."""
    return (config.get(LORA) or {}).get("weights") == NF4


def adapter_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a note about frozen weights in 4 bits, if a config asks for them."""
    return (NF4_NOTE,) if is_in_four_bits(config) else ()
