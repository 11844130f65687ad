"""The fields by which a plan identifies its model."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from typing import Any

from planner_core.core import Graph


def model_identity(graph: Graph) -> dict[str, Any]:
    """The fields by which a plan identifies its model."""
    return {
        "name": graph.name,
        "source": graph.source,
        "params": graph.num_params,
        "loss": graph.loss,
        "config": dict(graph.config),
        "layers": graph.num_repeats,
        "versions": _package_versions(),
    }


@functools.cache
def _package_versions() -> dict[str, str]:
    """The installed versions of torch and transformers, read without importing them. A plan's operators have the names that these
    versions give."""
    found = {}
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
