"""What would make a plan fit the memory: single changes of the settings, each as a ladder climbed until one fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from explorer.address import settings
from explorer.text.words import cluster_words
from planner_core.core import (
    OPTIMIZERS,
    Cluster,
    InputError,
    cluster_names,
    gpu_names,
    load_cluster,
    load_gpu,
)
from planner_core.planning import USABLE_MEMORY

MAX_TRIED = 3
"""Rungs of a ladder that are planned."""
MAX_NODES = 64
UNKNOWN_NEED = 2.0
"""How much too large a model is assumed to be where the planner could not say."""
RECOMPUTATION_CHANGE: tuple[str, Mapping[str, Any]] = ("Let the search choose what to recompute", {"recompute": "auto"})


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change: in words, and as settings."""

    words: str
    changes: Mapping[str, Any]


def remedy_ladders(values: Mapping[str, Any], cluster: Cluster, need: float | None) -> list[list[Remedy]]:
    """Return changes of each kind, the smallest first; `need` is the least memory that a plan takes, over what there is.

    Halving the batch, or doubling the GPUs, at most halves the memory of a GPU, so smaller steps than `need` are left out.
    """
    times = 2 ** math.ceil(math.log2(max(need or UNKNOWN_NEED, 1.01)))
    kinds = (
        _lift_memory_limit,
        _choose_micro_batches,
        _allow_recomputation,
        _move_moments_to_host,
        _smaller_batches,
        _larger_gpus,
        _more_nodes,
        _other_clusters,
        _recomputation_and_nodes,
    )
    ladders = [list(kind(values, cluster, times, need or UNKNOWN_NEED)) for kind in kinds]
    return [ladder[:MAX_TRIED] for ladder in ladders if ladder]


def _lift_memory_limit(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    capacity = load_cluster(settings.cluster_spec(values)).gpu.memory_bytes
    if values["memory"] is not None and values["memory"] * 1e9 < capacity * USABLE_MEMORY:
        yield Remedy("Let a plan fill the GPU’s memory", {"memory": None})


def _choose_micro_batches(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    if values["accumulate"] is not None:
        yield Remedy("Let the search choose the number of micro-batches", {"accumulate": None})


def _allow_recomputation(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    if values["recompute"] == "none":
        yield Remedy(*RECOMPUTATION_CHANGE)


def _move_moments_to_host(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    if values["moments"] == "gpu" and OPTIMIZERS[values["optimizer"]] and cluster.gpu.host is not None:
        yield Remedy("Keep the optimizer’s moments in the host’s memory", {"moments": "host"})


def _smaller_batches(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    batch, _ = settings.batch_and_tokens(values)
    while values["accumulate"] is not None and times <= batch:  # else the search tried smaller parts of it
        if batch % times == 0:
            yield Remedy(
                f"Batch {batch // times:,} instead of {batch:,}".replace(",", "\u202f"), {"batch": batch // times}
            )
        times *= 2


def _larger_gpus(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    """Yield GPUs that hold enough and are no slower, the smallest first."""
    if values["memory"] is not None:
        return
    here = cluster.gpu.memory_bytes
    known = sorted((load_gpu(name).memory_bytes, name) for name in gpu_names())
    for size, name in known:
        if (
            size > here
            and size >= here * min(need, 1e3)
            and load_gpu(name).flops_per_s("bfloat16") >= cluster.gpu.flops_per_s("bfloat16")
        ):
            yield Remedy(f"{load_gpu(name).name} instead of {cluster.gpu.name}", {"gpu": name})


def _more_nodes(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    node, now = cluster.node_gpus, cluster.num_nodes
    base = _networked_cluster(values, cluster)
    while base is not None and now * times <= MAX_NODES:
        changes = {**base, "nodes": now * times}
        try:
            load_cluster(settings.cluster_spec({**values, **changes}))
        except InputError:
            return
        yield Remedy(f"{now * times * node} GPUs instead of {cluster.num_gpus}", changes)
        times *= 2


def _networked_cluster(values: Mapping[str, Any], cluster: Cluster) -> Mapping[str, Any] | None:
    """Return the settings of a cluster of the same nodes with a network between them; None where none is known."""
    if not cluster.is_one_node or values["inter"] is not None:
        return {}
    nodes = cluster.node_gpus, cluster.levels[0].size
    for name in cluster_names():
        other = load_cluster(name)
        if not other.is_one_node and other.gpu == cluster.gpu and (other.node_gpus, other.levels[0].size) == nodes:
            return {**dict.fromkeys(settings.CLUSTER_KEYS), "cluster": name}
    return None


def _other_clusters(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    """Yield clusters of the list that hold enough together, the smallest first, where no network between these nodes is known."""
    if _networked_cluster(values, cluster) is not None:
        return
    known = {name: load_cluster(name) for name in cluster_names()}
    sizes = {name: other.num_gpus * other.gpu.memory_bytes for name, other in known.items()}
    for name in sorted(sizes, key=sizes.__getitem__):
        if sizes[name] >= need * cluster.num_gpus * cluster.gpu.memory_bytes:
            changes = {**dict.fromkeys(settings.CLUSTER_KEYS), "cluster": name}
            yield Remedy(f"{cluster_words(known[name])} instead of {cluster_words(cluster)}", changes)


def _recomputation_and_nodes(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Remedy]:
    """Yield recomputation and more GPUs together, for what neither does alone."""
    if values["recompute"] == "none":
        words, changes = RECOMPUTATION_CHANGE
        for remedy in _more_nodes(values, cluster, 2, need):
            yield Remedy(f"{words}, and {remedy.words}", {**changes, **remedy.changes})
