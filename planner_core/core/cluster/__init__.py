"""Clusters, their GPUs, and the constants from which the time of a GPU's kernels follows."""

from planner_core.core.cluster.cluster import (
    CHANGES,
    MAX_GPUS,
    Cluster,
    Level,
    cluster_names,
    load_cluster,
)
from planner_core.core.cluster.constants import Timing, timing
from planner_core.core.cluster.gpu import Gpu, gpu_names, load_gpu
from planner_core.core.cluster.kernels import AttentionRate, Attentions, Collectives, HostLink, Products
from planner_core.core.cluster.numbers import slow_dtype_notes

__all__ = [
    "CHANGES",
    "MAX_GPUS",
    "AttentionRate",
    "Attentions",
    "Cluster",
    "Collectives",
    "Gpu",
    "HostLink",
    "Level",
    "Products",
    "Timing",
    "cluster_names",
    "gpu_names",
    "load_cluster",
    "load_gpu",
    "slow_dtype_notes",
    "timing",
]
