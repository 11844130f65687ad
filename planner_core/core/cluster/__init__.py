"""Clusters, their GPUs, and the constants from which the time of a GPU's kernels follows."""

from planner_core.core.cluster.cluster import (
    MAX_GPUS,
    Cluster,
    Level,
    cluster_names,
    load_cluster,
    split_size,
)
from planner_core.core.cluster.constants import Timing, load_timing
from planner_core.core.cluster.gpu import Gpu, gpu_names, load_gpu
from planner_core.core.cluster.kernels import Collectives
from planner_core.core.cluster.numbers import slow_dtype_notes
