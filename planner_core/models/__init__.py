"""From a model source to a graph. Snapshots of the zoo open without torch; any other model is captured, which imports torch.

loading     `load_model`: the one entrance; batches: the graphs of one model for several numbers of samples
zoo         well-known models by name; snapshots/ writes and compares their graphs
sources/    builds a module and its inputs from a config, a file or an object
capture/    runs a module's forward and records it as a graph
exported/   files of torch.export
hooks/      what capture and run share: names of call sites, expert and scan layers as single calls
sandbox/    runs user code in a process of its own
fold        TAP's Algorithm 1, step by step
"""

from planner_core.models import fold
from planner_core.models.batches import BatchGraphs
from planner_core.models.fold import FoldGroup, FoldStep, fold_steps, shared_subgraphs, weight_nodes
from planner_core.models.loading import (
    DEFAULT_BATCH,
    DEFAULT_SEQ,
    DTYPES,
    VOCABULARY,
    brings_inputs,
    capture_graph,
    graph_of,
    load_model,
    open_model,
    whole_config,
    with_adapters,
    with_config,
)
from planner_core.models.zoo import ZOO, load_snapshot

__all__ = [
    "DEFAULT_BATCH",
    "DEFAULT_SEQ",
    "DTYPES",
    "VOCABULARY",
    "ZOO",
    "BatchGraphs",
    "FoldGroup",
    "FoldStep",
    "brings_inputs",
    "capture_graph",
    "fold",
    "fold_steps",
    "graph_of",
    "load_model",
    "load_snapshot",
    "open_model",
    "shared_subgraphs",
    "weight_nodes",
    "whole_config",
    "with_adapters",
    "with_config",
]
