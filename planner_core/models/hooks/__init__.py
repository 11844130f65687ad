"""The parts that capture and run share: names of call sites, the forms in which calls are recorded, and what modules hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports

if TYPE_CHECKING:
    from planner_core.models.hooks.callsites import (
        canonical_name,
        is_library_file,
        recorded_results,
        tensors,
    )
    from planner_core.models.hooks.chance import (
        DROPOUTS,
        RECURRENT,
        draws_dropout_mask,
        draws_random_numbers,
        without_dropout_masks,
    )
    from planner_core.models.hooks.finite import AssumeFinite
    from planner_core.models.hooks.forms import makes_kv_cache, normalize_call, rewrite_call
    from planner_core.models.hooks.model_parts import buffer_bytes, names_by_parameter
    from planner_core.models.hooks.module_state import (
        ModuleState,
        WeightDtypes,
        replace_tensors,
        scratch_tensors,
    )
    from planner_core.models.hooks.torch_private import (
        TorchDispatchMode,
        disable_subclass_functions,
        preserve_version,
        storage_id,
        storage_key,
    )

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
