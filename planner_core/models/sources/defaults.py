"""The values that a model type's own config has where a config.json does not say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
