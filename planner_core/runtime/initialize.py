"""The first values of a model on meta, made parameter by parameter, so that no rank ever holds the whole model.

A Hugging Face model's own `_init_weights` chooses the values. The random numbers depend on the seed and the parameter's name
only. So every rank, every mesh and a single process start from the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from planner_core.core import InputError, named_check

Init = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the whole value of a parameter, for its name and the parameter, which may be on meta."""


def initializer(model: nn.Module, seed: int = 0, device: str = "cpu") -> Init:
    """Give buffers on meta their values, and return `init(name, parameter)`, which makes the value of a parameter."""
    for name, module in model.named_modules():
        meta = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
        for short, buffer in meta.items():
            module._buffers[short] = torch.zeros_like(buffer, device="cpu")
        if meta:
            params = dict(module._parameters)
            _initialize_module(model, module, name, seed, "cpu")
            module._parameters.update(params)

    def init(name: str, param: torch.Tensor) -> torch.Tensor:
        if not param.is_meta:
            return param.detach()
        path, _, short = name.rpartition(".")
        module = model.get_submodule(path)
        params = dict(module._parameters)
        _initialize_module(model, module, name, seed, device)
        value = module._parameters[short]
        module._parameters.update(params)
        assert value is not None
        return value.detach()

    return init


def _initialize_module(model: nn.Module, module: nn.Module, name: str, seed: int, device: str) -> None:
    """Give the module's own parameters new values."""
    for short, param in module._parameters.items():
        if param is not None:
            module._parameters[short] = nn.Parameter(torch.zeros(param.shape, dtype=param.dtype, device=device))
    with torch.random.fork_rng(devices=[device] if device == "cuda" else []), torch.no_grad():
        # without a GPU, `torch.manual_seed` notes the call stack for the time when there is one, at each weight
        set_seed = torch.default_generator.manual_seed if device == "cpu" else torch.manual_seed
        set_seed(seed + zlib.crc32(name.encode()))
        init_weights: Any = getattr(model, "_init_weights", None)
        reset: Any = getattr(module, "reset_parameters", None)
        if isinstance(module, ParametrizationList):
            _initialize_originals(module)
        elif init_weights is not None:
            module.__dict__.pop("_is_hf_initialized", None)
            try:
                init_weights(module)
            except AttributeError as error:  # AIMv2's asks for a field that its config does not have
                raise InputError(
                    f"{type(model).__name__} cannot give first values to its own weights ({error}), without a plan neither; start it ",
                    "from trained weights, and verify its plan with ",
                    named_check("fake"),
                ) from None
        elif reset is not None:
            reset()
        else:
            for param in module._parameters.values():
                if param is not None:
                    param.normal_(std=0.02)


def _initialize_originals(module: ParametrizationList) -> None:
    """Initialise the originals of a weight that a module computes (weight norm: a direction and its lengths), so that a usual
    weight follows.

    A model's own `_init_weights` writes into the computed weight, which is lost.
    """
    *_, last = module.parameters()
    module.right_inverse(torch.empty_like(last).normal_(std=0.02))
