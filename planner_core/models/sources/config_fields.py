"""Complete a config by the defaults of its model type, and set its number of layers, whatever the name of that field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import InputError, named, require_packages

DEPTH_FIELDS = (
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
    """Return the default config object of the model type; None if the type is unknown or has no defaults."""
    from transformers import CONFIG_MAPPING

    # Some types have required fields, others need a package: whatever they raise, there are no defaults then.
    try:
        return CONFIG_MAPPING[str(data.get("model_type"))]()
    except Exception:
        return None


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of the model type to a config and its parts, without the fields that every config has. Raises NotInstalled."""
    require_packages("transformers")
    from transformers import PretrainedConfig

    default = default_config(data)
    if default is None:
        return dict(data)
    common = frozenset(PretrainedConfig().to_dict()) - {"model_type"}
    return _merge_fields(_drop_fields(default.to_dict(), common), data)


def _drop_fields(defaults: Mapping[str, Any], common: frozenset[str]) -> dict[str, Any]:
    """Drop fields in `common`, and those that are None, from `defaults` and their parts."""
    fields = {k: v for k, v in defaults.items() if v is not None and k not in common}
    return {k: _drop_fields(v, common) if _is_config(v) else v for k, v in fields.items()}


def _merge_fields(defaults: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `data` over `defaults`. A part of another model type stays as it is."""
    merged = {**defaults, **data}
    for name, part in defaults.items():
        given = data.get(name)
        if _is_config(part) and isinstance(given, Mapping):
            same = given.get("model_type", part["model_type"]) == part["model_type"]
            merged[name] = _merge_fields(part, given) if same else given
    return merged


def _is_config(value: Any) -> bool:
    return isinstance(value, Mapping) and "model_type" in value


# --- the number of layers --------------------------------------------------------------------------------------


def with_layers(data: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Set the number of layers: in the config's own field, otherwise in that of its text part, otherwise in all parts.

    Lists with one entry per layer are cut or repeated. Raises InputError if no field names a number of layers.
    """
    if layers is None:
        return dict(data)
    if _depth_fields(data):
        return _set_depth(data, layers)
    # A composite config (LLaVA) has its depths in its parts.
    parts = {k: v for k, v in data.items() if isinstance(v, Mapping) and _depth_fields(v)}
    # A model that reads images too is asked for layers of its text: its image part stays what it is.
    parts = {"text_config": parts["text_config"]} if "text_config" in parts else parts
    if parts:
        return {**data, **{name: _set_depth(part, layers) for name, part in parts.items()}}
    by_default = _default_depth_fields(data)
    if not by_default:
        raise InputError(
            f"the {data.get('model_type')} config names no number of layers that ",
            named("layers", layers),
            " could set; change its stages, or leave ",
            named("layers"),
            " out",
        )
    return {**data, **dict.fromkeys(by_default, layers)}


def _depth_fields(data: Mapping[str, Any]) -> list[str]:
    return [k for k in DEPTH_FIELDS if isinstance(data.get(k), int)]


def _default_depth_fields(data: Mapping[str, Any]) -> list[str]:
    """Return the depth fields of the model type, for a config that names none."""
    default = default_config(data)
    return [k for k in DEPTH_FIELDS if k in default.to_dict()] if default is not None else []


def _set_depth(data: Mapping[str, Any], layers: int) -> dict[str, Any]:
    names = _depth_fields(data)
    old = {data[k] for k in names}
    lists = {k: v for k, v in data.items() if isinstance(v, list) and len(v) > 1 and len(v) in old}
    cut = {k: (v * (-(-layers // len(v))))[:layers] for k, v in lists.items()}
    by_number = {
        k: {n: part for n, part in v.items() if int(n) < layers}
        for k, v in data.items()
        if isinstance(v, Mapping) and v and all(str(n).isdecimal() for n in v) and k.startswith("per_layer")
    }
    return {**data, **dict.fromkeys(names, layers), **cut, **by_number}
