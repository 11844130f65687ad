"""The kinds of MODEL arguments, and how the module and the inputs of each are built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.models.sources import huggingface
    from planner_core.models.sources.arguments import is_new, is_table, positional, spelled, state_of, unread_argument
    from planner_core.models.sources.config_fields import with_defaults
    from planner_core.models.sources.first_values import first_buffers
    from planner_core.models.sources.huggingface import _MAPPINGS, build, own_config
    from planner_core.models.sources.in_memory import copied, module_source
    from planner_core.models.sources.inputs import training_inputs
    from planner_core.models.sources.labels import limits, text_config
    from planner_core.models.sources.resolve import ModelSource, python_source

__all__ = [
    "_MAPPINGS",
    "ModelSource",
    "build",
    "copied",
    "first_buffers",
    "huggingface",
    "is_new",
    "is_table",
    "limits",
    "module_source",
    "own_config",
    "positional",
    "python_source",
    "spelled",
    "state_of",
    "text_config",
    "training_inputs",
    "unread_argument",
    "with_defaults",
]
_HOME = {
    "_MAPPINGS": "planner_core.models.sources.huggingface",
    "build": "planner_core.models.sources.huggingface",
    "first_buffers": "planner_core.models.sources.first_values",
    "limits": "planner_core.models.sources.labels",
    "text_config": "planner_core.models.sources.labels",
    "own_config": "planner_core.models.sources.huggingface",
    "is_new": "planner_core.models.sources.arguments",
    "is_table": "planner_core.models.sources.arguments",
    "positional": "planner_core.models.sources.arguments",
    "state_of": "planner_core.models.sources.arguments",
    "spelled": "planner_core.models.sources.arguments",
    "unread_argument": "planner_core.models.sources.arguments",
    "training_inputs": "planner_core.models.sources.inputs",
    "with_defaults": "planner_core.models.sources.config_fields",
    "copied": "planner_core.models.sources.in_memory",
    "module_source": "planner_core.models.sources.in_memory",
    "ModelSource": "planner_core.models.sources.resolve",
    "python_source": "planner_core.models.sources.resolve",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
