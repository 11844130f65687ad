"""Fields of a config that it leaves to its model type's own values, and its number of layers, whatever the name of that field is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError

DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "layers",
)


def default_config(data: Mapping[str, Any]) -> Any:
    """The config object of the model type alone, None where the type is not known or has no defaults."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[str(data.get("model_type"))]()
    except Exception:
        return None


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every field that its model type has by default, those of its parts too. What every config has is left out."""
    from transformers import PretrainedConfig

    own = default_config(data)
    if own is None:
        return dict(data)
    common = frozenset(PretrainedConfig().to_dict()) - {"model_type"}
    return _over(_without(own.to_dict(), common), data)


def _without(own: Mapping[str, Any], common: frozenset[str]) -> dict[str, Any]:
    """`own` without the fields of `common` and those that are None, in its parts too."""
    kept = {k: v for k, v in own.items() if v is not None and k not in common}
    return {k: _without(v, common) if _is_config(v) else v for k, v in kept.items()}


def _over(own: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """`data`, and what it leaves to `own`. A part of another model type is taken as it is."""
    found = {**own, **data}
    for name, part in own.items():
        given = data.get(name)
        if _is_config(part) and isinstance(given, Mapping):
            same = given.get("model_type", part["model_type"]) == part["model_type"]
            found[name] = _over(part, given) if same else given
    return found


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) and "model_type" in value


# --- the number of layers --------------------------------------------------------------------------------------


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
