"""Buffers of a model that will run begin with the values that constructors give them."""

from __future__ import annotations

import math

import torch
from torch import nn

from planner_core.models.sources import build_from_config
from planner_core.models.sources.first_values import parameters_on_meta
from planner_core.runtime import initializer


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.ones(4))
        self.register_buffer("running_var", torch.full((4,), 2.0) ** 2)
        self.scale = nn.Parameter(torch.ones(3))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        place = torch.arange(6.0)[:, None]
        rate = torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
        table = torch.zeros(6, 8)
        table[:, 0::2] = torch.sin(place * rate)
        table[:, 1::2] = torch.cos(place * rate)
        self.register_buffer("table", table[None])
        self.register_buffer("filled", torch.empty(2, 2).fill_(3.0).cumsum(0))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("drawn", torch.randn(4))
        self.register_buffer("of_drawn", torch.zeros(4).copy_(self.drawn))
        self.register_buffer("nothing", None)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Frozen(), Positions()])
        self.norm = nn.BatchNorm1d(4)


def test_buffers_have_the_values_of_constructors_and_parameters_none() -> None:
    def built() -> dict[str, torch.Tensor]:
        with parameters_on_meta():
            model = Both()
        assert all(p.is_meta for p in model.parameters())
        return dict(model.named_buffers())

    first, second, wanted = built(), built(), dict(Both().named_buffers())
    assert set(first) == set(wanted)
    for name, value in first.items():
        assert torch.equal(value, second[name]), "every rank has the same"
        assert "drawn" in name or torch.equal(value, wanted[name]), name


def test_modules_that_get_one_parameter_stay_tied() -> None:
    with parameters_on_meta():
        weight = nn.Parameter(torch.zeros(4, 4))
        model = nn.ParameterList([weight, weight])
    assert model[0] is model[1]


def test_a_frozen_batch_norm_scales_by_one() -> None:
    """transformers gives it no first values: it scaled by zero, so that RT-DETR's outputs and gradients were zero."""
    config = {"model_type": "rt_detr", "architectures": ["RTDetrModel"]}
    for to_run in (True, False):
        model, *_ = build_from_config(config, "float32", to_run=to_run)
        initializer(model)
        weights = [
            b for n, b in model.named_buffers() if n.startswith("backbone") and n.endswith("normalization.weight")
        ]
        assert len(weights) > 3 and all(bool((w == (1.0 if to_run else 0.0)).all()) for w in weights)
