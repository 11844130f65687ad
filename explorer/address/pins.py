"""Pinned plans: a plan by its id and the settings that made it, as text for the address.

    best@                       the best plan of the model at the default settings
    fsdp@batch:32;nodes:4       FSDP at batch 32 on four nodes
    edited@edit:best:keep~lm_head.weight:S(1)
                                a plan changed by hand (see `edits`)

An entry without `@` is a plan of the current settings, and follows them. No Streamlit here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.address import settings
from explorer.address.settings import REQUEST_KEYS, SETTINGS
from planner_core.core import Unreadable

SEPARATOR = "@"
EDITED_ID = "edited"
"""The id in the address of the plan that was changed by hand."""
PHRASES = {
    "cluster": "{}",
    "nodes": "{} nodes",
    "gpus": "{} GPUs a node",
    "intra": "{} GB/s inside",
    "inter": "{} GB/s between",
    "batch": "batch {}",
    "seq": "{} tokens",
    "accumulate": "{} micro-batches",
    "layers": "{} layers",
    "memory": "within {} GB",
    "mesh": "mesh {}",
    "method": "{}",
    "objective": "least {}",
    "tool": "for {}",
    "zero": "ZeRO {}",
    "chunks": "products in {} chunks",
}
VALUE_NAMES: Mapping[str, Mapping[Any, str]] = {
    **{k: settings.VALUE_NAMES[k] for k in ("dtype", "precision", "optimizer", "recompute")},
    "moments": settings.MOMENTS_NAMES,
}
"""Values that say by themselves what they are of."""


def format_pin(plan_id: str, values: Mapping[str, Any]) -> str:
    """Write a plan at these settings."""
    written = settings.to_query(values)
    parts = [f"{k}:{written[k]}" for k in REQUEST_KEYS if k != "model" and k in written]
    if plan_id == EDITED_ID and values["edit"]:  # a pin stands in a list, so it holds no comma
        parts.append(f"edit:{'~'.join(values['edit'])}")
    return f"{plan_id}{SEPARATOR}" + ";".join(parts)


def parse_pin(text: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (plan id, settings) of a pin, for the model of `values`; raises Unreadable."""
    plan_id, _, rest = text.partition(SEPARATOR)
    values_of_pin = {key: s.default for key, s in SETTINGS.items()} | {"model": values["model"]}
    for part in filter(None, rest.split(";")):
        key, _, value = part.partition(":")
        if key == "edit":
            value = value.replace("~", ",")
        elif key not in REQUEST_KEYS or key == "model":
            raise Unreadable(f"names “{key[:20]}”, which is not a setting")
        values_of_pin[key] = SETTINGS[key].parse(value)
    return plan_id, values_of_pin


def describe_changes(values: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe the settings that differ from `current`; empty if none does."""
    phrases = [_describe_value(k, values[k]) for k in REQUEST_KEYS if values[k] != current[k]]
    if values["edit"] and values["edit"] != current["edit"]:
        phrases.append("edits " + "; ".join(e.rpartition("/")[2].replace(":", " ") for e in values["edit"][1:]))
    return ", ".join(phrases)


def _describe_value(key: str, value: Any) -> str:
    if value is None:
        return f"usual {key}"
    if key in VALUE_NAMES:
        return VALUE_NAMES[key].get(value, str(value))
    return PHRASES.get(key, "{}").format(SETTINGS[key].format(value))
