"""A model source becomes a graph. Snapshots of the zoo open without torch; anything else is captured."""

from planner_core.models import fold
from planner_core.models.fold import FoldGroup, FoldStep, fold_steps, shared_subgraphs, weight_nodes
from planner_core.models.loading import (
    DEFAULT_BATCH,
    DEFAULT_SEQ,
    DTYPES,
    capture_graph,
    graph_of,
    load_model,
    open_model,
)
from planner_core.models.zoo import ZOO, load_snapshot

__all__ = [
    "DEFAULT_BATCH",
    "DEFAULT_SEQ",
    "DTYPES",
    "ZOO",
    "FoldGroup",
    "FoldStep",
    "capture_graph",
    "fold",
    "fold_steps",
    "graph_of",
    "load_model",
    "load_snapshot",
    "open_model",
    "shared_subgraphs",
    "weight_nodes",
]
