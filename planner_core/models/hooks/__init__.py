"""The parts that capture and run share: names of call sites, what modules hold, and mixture-of-experts and scan layers as single calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.hooks.callsites import (
        Frame,
        Scopes,
        canonical_name,
        is_inplace,
        note_view,
        note_write,
        pop_written_views,
        recorded_results,
        tensors,
    )
    from planner_core.models.hooks.chance import (
        DROPOUTS,
        RECURRENT,
        draws_dropout_mask,
        draws_random_numbers,
        generator_states,
        host_state,
        restored_generators,
        seeded_host_generators,
        set_host_state,
        without_dropout_masks,
    )
    from planner_core.models.hooks.finite import (
        AssumeFinite,
    )
    from planner_core.models.hooks.forms import makes_kv_cache, normalize_call, rewrite_call
    from planner_core.models.hooks.model_parts import buffer_bytes
    from planner_core.models.hooks.module_state import (
        MISSING,
        ModuleState,
        TensorReplacement,
        WeightDtypes,
        is_plain,
        list_containers,
        scratch_tensors,
    )

__all__ = [
    "DROPOUTS",
    "MISSING",
    "RECURRENT",
    "AssumeFinite",
    "Frame",
    "ModuleState",
    "Scopes",
    "TensorReplacement",
    "WeightDtypes",
    "buffer_bytes",
    "canonical_name",
    "draws_dropout_mask",
    "draws_random_numbers",
    "generator_states",
    "host_state",
    "is_inplace",
    "is_plain",
    "list_containers",
    "makes_kv_cache",
    "normalize_call",
    "note_view",
    "note_write",
    "pop_written_views",
    "recorded_results",
    "restored_generators",
    "rewrite_call",
    "scratch_tensors",
    "seeded_host_generators",
    "set_host_state",
    "tensors",
    "without_dropout_masks",
]
_HOME = {
    "callsites": (
        "Frame",
        "Scopes",
        "canonical_name",
        "is_inplace",
        "recorded_results",
        "pop_written_views",
        "tensors",
        "note_view",
        "note_write",
    ),
    "chance": (
        "DROPOUTS",
        "RECURRENT",
        "restored_generators",
        "draws_random_numbers",
        "draws_dropout_mask",
        "generator_states",
        "seeded_host_generators",
        "host_state",
        "set_host_state",
        "without_dropout_masks",
    ),
    "finite": ("AssumeFinite",),
    "forms": ("rewrite_call", "makes_kv_cache", "normalize_call"),
    "model_parts": ("buffer_bytes",),
    "module_state": (
        "MISSING",
        "ModuleState",
        "TensorReplacement",
        "WeightDtypes",
        "scratch_tensors",
        "list_containers",
        "is_plain",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
