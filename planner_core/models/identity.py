"""The fields by which a plan identifies its model."""

from __future__ import annotations

from typing import Any

from planner_core.core import Graph
from planner_core.models.loading import package_versions
from planner_core.models.zoo import SNAPSHOT_TRANSFORMERS


def model_identity(graph: Graph) -> dict[str, Any]:
    """The fields by which a plan identifies its model. `versions`: of the packages that name its operators; a zoo model that was planned
    without torch is that of its snapshot."""
    versions = package_versions()
    if graph.source.startswith("zoo:") and "torch" not in versions:
        versions = {**versions, "transformers": SNAPSHOT_TRANSFORMERS}
    return {
        "name": graph.name,
        "source": graph.source,
        "params": graph.num_params,
        "loss": graph.loss,
        "config": dict(graph.config),
        "layers": graph.num_repeats,
        "versions": versions,
        **({"own_shapes": {n: list(shape) for n, shape in graph.own_shapes.items()}} if graph.own_shapes else {}),
    }
