"""From a model source to a graph. Snapshots of the zoo open without torch; any other model is captured, which imports torch.

loading     `load_model`: the one entrance; batches: the graphs of one model for several numbers of samples
zoo         well-known models by name; snapshots/ writes and compares their graphs
sources/    builds a module and its inputs from a config, a file or an object
capture/    runs a module's forward and records it as a graph
exported/   files of torch.export
hooks/      what capture and run share: names of call sites, forms of calls, what modules hold
adapters/   code of transformers in a form that a graph can hold: experts and scans as single calls
sandbox/    runs user code in a process of its own
fold        TAP's Algorithm 1, step by step
"""

from planner_core.models import fold
from planner_core.models.batches import BatchGraphs
from planner_core.models.fold import FoldGroup, FoldStep, fold_steps, list_weight_nodes, shared_subgraphs
from planner_core.models.loading import (
    VOCABULARY,
    brings_inputs,
    capture_graph,
    default_sizes,
    identify_model,
    load_model,
    load_plan_graph,
    open_model,
    pad_vocabulary,
    trains_on_tokens,
    with_adapters,
)
from planner_core.models.zoo import SNAPSHOT_TRANSFORMERS, ZOO, load_snapshot
