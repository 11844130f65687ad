"""The kinds of MODEL arguments, and how the module and the inputs of each are built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports

if TYPE_CHECKING:
    from planner_core.models.sources import huggingface
    from planner_core.models.sources.adapters import is_in_four_bits
    from planner_core.models.sources.arguments import (
        argument_name,
        argument_state,
        explain_unsupported,
        is_unknown_input,
        lacks_samples,
        positional_names,
    )
    from planner_core.models.sources.config_fields import with_defaults
    from planner_core.models.sources.huggingface import _MAPPINGS, build_from_config, select_config
    from planner_core.models.sources.in_memory import copy_module, module_source
    from planner_core.models.sources.inputs import make_training_inputs
    from planner_core.models.sources.labels import text_config, value_limits
    from planner_core.models.sources.resolve import ModelSource, python_source

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
