"""The parts that capture and run share: names of call sites, what modules hold, and mixture-of-experts and scan layers as single calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.hooks.callsites import (
        Frame,
        Scopes,
        buffer_bytes,
        canonical,
        is_inplace,
        outputs,
        parts_to_put_back,
        tensors,
        took_part,
        wrote_part,
    )
    from planner_core.models.hooks.chance import (
        DROPOUTS,
        RECURRENT,
        drawing_from,
        draws,
        drops,
        generator_states,
        host_drawing,
        host_state,
        set_host_state,
        without_masks,
    )
    from planner_core.models.hooks.finite import (
        TakenFinite,
    )
    from planner_core.models.hooks.forms import as_others, makes_cache, plain_form
    from planner_core.models.hooks.module_state import (
        MISSING,
        ModuleState,
        Replacement,
        WeightTypes,
        computed_in,
        holders,
        is_plain,
    )

__all__ = [
    "DROPOUTS",
    "MISSING",
    "RECURRENT",
    "Frame",
    "ModuleState",
    "Replacement",
    "Scopes",
    "TakenFinite",
    "WeightTypes",
    "as_others",
    "buffer_bytes",
    "canonical",
    "computed_in",
    "drawing_from",
    "draws",
    "drops",
    "generator_states",
    "holders",
    "host_drawing",
    "host_state",
    "is_inplace",
    "is_plain",
    "makes_cache",
    "outputs",
    "parts_to_put_back",
    "plain_form",
    "set_host_state",
    "tensors",
    "took_part",
    "without_masks",
    "wrote_part",
]
_HOME = {
    "callsites": (
        "Frame",
        "Scopes",
        "buffer_bytes",
        "canonical",
        "is_inplace",
        "outputs",
        "parts_to_put_back",
        "tensors",
        "took_part",
        "wrote_part",
    ),
    "chance": (
        "DROPOUTS",
        "RECURRENT",
        "drawing_from",
        "draws",
        "drops",
        "generator_states",
        "host_drawing",
        "host_state",
        "set_host_state",
        "without_masks",
    ),
    "finite": ("TakenFinite",),
    "forms": ("as_others", "makes_cache", "plain_form"),
    "module_state": ("MISSING", "ModuleState", "Replacement", "WeightTypes", "computed_in", "holders", "is_plain"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
