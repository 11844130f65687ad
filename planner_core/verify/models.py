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
from planner_core.runtime.steering import Steered, Steering


def build_model(config: Mapping[str, Any], dtype: str) -> tuple[nn.Module, Any]:
    """The module on meta and its config object (None for a user's own callable)."""
    if "callable" in config:
        return python_source(config["callable"]).module, None
    module, parsed, _ = build(config, dtype)
    return module, parsed


def materialise(model: nn.Module, seed: int) -> nn.Module:
    """The same module with whole weights on the CPU, tied ones tied."""
    init = initializer(model, seed)
    made: dict[int, nn.Parameter] = {}
    values = {id(p): (p, init(name, p).clone()) for name, p in model.named_parameters()}
    for module in model.modules():
        for short, old in module._parameters.items():
            if old is not None and id(old) in values:
                made.setdefault(id(old), nn.Parameter(values[id(old)][1], requires_grad=old.requires_grad))
                module._parameters[short] = made[id(old)]
    return model


def example_inputs(model: nn.Module, config: Any, workload: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """One global batch: random tokens, labels (some of them ignored), images."""
    inputs = training_inputs(model, config, int(workload["batch"]), int(workload["seq"]), str(workload["dtype"]))
    random = torch.Generator().manual_seed(seed)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name, value in inputs.items():
        if value.is_floating_point():
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
