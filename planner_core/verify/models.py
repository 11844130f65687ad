"""Models to verify on: built from a plan's config, with weights and inputs that depend on a seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner_core.capture import own_loss, standin_loss
from planner_core.capture.hf import build, training_inputs
from planner_core.capture.sources import python_source
from planner_core.runtime.initial import initializer
from planner_core.runtime.params import Init
from planner_core.runtime.steering import Steered, Steering

SPREAD = 0.05


def build_model(config: Mapping[str, Any], dtype: str) -> tuple[nn.Module, Any]:
    """The module on meta and its config object (None for a user's own callable)."""
    if "callable" in config:
        return python_source(config["callable"]).module, None
    module, parsed, _ = build(config, dtype)
    return module, parsed


def gentle_initializer(model: nn.Module, seed: int) -> Init:
    """The model's own initial values, matrices scaled down to a spread of `SPREAD` at most.

    T5 starts so wild that a rounding error in one weight moves gradients by a percent, which would hide real faults.
    """
    init = initializer(model, seed)

    def gentle(name: str, param: torch.Tensor) -> torch.Tensor:
        value = init(name, param)
        return value * min(1.0, SPREAD / float(value.std())) if value.dim() > 1 and float(value.std()) > 0 else value

    return gentle


def materialise(model: nn.Module, init: Init) -> nn.Module:
    """The same module with whole weights on the CPU, tied ones tied."""
    made: dict[int, nn.Parameter] = {}
    values = {id(p): (p, init(name, p).clone()) for name, p in model.named_parameters()}
    for module in model.modules():
        for short, old in module._parameters.items():
            if old is not None and id(old) in values:
                made.setdefault(id(old), nn.Parameter(values[id(old)][1], requires_grad=old.requires_grad))
                module._parameters[short] = made[id(old)]
    return model


def example_inputs(
    model: nn.Module, config: Any, workload: Mapping[str, Any], seed: int, *, meta_signals: bool = False
) -> dict[str, torch.Tensor]:
    """One global batch: random tokens, labels (some of them ignored), images (left on meta with `meta_signals`)."""
    inputs = training_inputs(model, config, int(workload["batch"]), int(workload["seq"]), str(workload["dtype"]))
    random = torch.Generator().manual_seed(seed)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name, value in inputs.items():
        if value.is_floating_point():
            if not meta_signals:
                inputs[name] = torch.randn(value.shape, generator=random).to(value.dtype)
            continue
        classes = getattr(text, "vocab_size", None) if value.dim() > 1 else getattr(config, "num_labels", None)
        inputs[name] = torch.randint(0, int(classes or 2), value.shape, generator=random)
        if name == "labels" and value.dim() > 1:
            inputs[name][:, : max(1, value.shape[1] // 8)] = -100
    return inputs


def single_loss(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss that the graph trains on, in one process."""
    out = model(**inputs)
    own = own_loss(out)
    return standin_loss(out) if own is None else own


def planned_loss(steering: Steering, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same loss under a plan."""
    with steering.running() as scopes:
        out = steering.model(**inputs)
        loss = own_loss(out)
        if loss is None:
            with scopes.named("loss"):
                loss = standin_loss(out, lambda t: isinstance(t, Steered))
    return loss.local if isinstance(loss, Steered) else loss
