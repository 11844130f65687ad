"""Set the number of layers of a Hugging Face config, whatever the name of the field is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError
from planner_core.models.sources.defaults import default_config

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
          "num_encoder_layers", "layers")  # fmt: skip


def with_layers(data: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """The config with `layers` layers: in its own field, or else in that of its text part, or else in all its parts. Lists with one
    entry for each layer are cut or repeated. Raises InputError if it has no such field."""
    if layers is None:
        return dict(data)
    if _depths(data):
        return _deep(data, layers)
    parts = {k: v for k, v in data.items() if isinstance(v, Mapping) and _depths(v)}
    parts = {"text_config": parts["text_config"]} if "text_config" in parts else parts
    if parts:
        return {**data, **{name: _deep(part, layers) for name, part in parts.items()}}
    by_default = _default_depths(data)
    if not by_default:
        raise InputError(
            f"the {data.get('model_type')} config names no number of layers that --layers {layers} could set; change its stages, or "
            "leave --layers out"
        )
    return {**data, **dict.fromkeys(by_default, layers)}


def _depths(data: Mapping[str, Any]) -> list[str]:
    return [k for k in DEPTHS if isinstance(data.get(k), int)]


def _default_depths(data: Mapping[str, Any]) -> list[str]:
    """The depths that the model type itself has, where the config leaves them to it."""
    own = default_config(data)
    return [k for k in DEPTHS if k in own.to_dict()] if own is not None else []


def _deep(data: Mapping[str, Any], layers: int) -> dict[str, Any]:
    names = _depths(data)
    old = {data[k] for k in names}
    lists = {k: v for k, v in data.items() if isinstance(v, list) and len(v) > 1 and len(v) in old}
    cut = {k: (v * (-(-layers // len(v))))[:layers] for k, v in lists.items()}
    by_number = {
        k: {n: part for n, part in v.items() if int(n) < layers}
        for k, v in data.items()
        if isinstance(v, Mapping) and v and all(str(n).isdecimal() for n in v) and k.startswith("per_layer")
    }
    return {**data, **dict.fromkeys(names, layers), **cut, **by_number}
