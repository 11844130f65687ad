"""The kinds of MODEL arguments, and how the module and the inputs of each are built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.sources import huggingface
    from planner_core.models.sources.arguments import (
        argument_name,
        argument_state,
        explain_unsupported,
        is_unknown_input,
        lacks_samples,
        positional_names,
    )
    from planner_core.models.sources.config_fields import with_defaults
    from planner_core.models.sources.first_values import initial_buffers
    from planner_core.models.sources.huggingface import _MAPPINGS, build_from_config, select_config
    from planner_core.models.sources.in_memory import copy_module, module_source
    from planner_core.models.sources.inputs import make_training_inputs
    from planner_core.models.sources.labels import text_config, value_limits
    from planner_core.models.sources.resolve import ModelSource, python_source

__all__ = [
    "_MAPPINGS",
    "ModelSource",
    "argument_name",
    "argument_state",
    "build_from_config",
    "copy_module",
    "explain_unsupported",
    "huggingface",
    "initial_buffers",
    "is_unknown_input",
    "lacks_samples",
    "make_training_inputs",
    "module_source",
    "positional_names",
    "python_source",
    "select_config",
    "text_config",
    "value_limits",
    "with_defaults",
]
_HOME = {
    "_MAPPINGS": "planner_core.models.sources.huggingface",
    "build_from_config": "planner_core.models.sources.huggingface",
    "initial_buffers": "planner_core.models.sources.first_values",
    "value_limits": "planner_core.models.sources.labels",
    "text_config": "planner_core.models.sources.labels",
    "select_config": "planner_core.models.sources.huggingface",
    "is_unknown_input": "planner_core.models.sources.arguments",
    "lacks_samples": "planner_core.models.sources.arguments",
    "positional_names": "planner_core.models.sources.arguments",
    "argument_state": "planner_core.models.sources.arguments",
    "argument_name": "planner_core.models.sources.arguments",
    "explain_unsupported": "planner_core.models.sources.arguments",
    "make_training_inputs": "planner_core.models.sources.inputs",
    "with_defaults": "planner_core.models.sources.config_fields",
    "copy_module": "planner_core.models.sources.in_memory",
    "module_source": "planner_core.models.sources.in_memory",
    "ModelSource": "planner_core.models.sources.resolve",
    "python_source": "planner_core.models.sources.resolve",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
