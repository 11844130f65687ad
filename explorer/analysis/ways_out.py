"""Ways out where no plan fits the memory: single changes of the settings, each as a ladder that is climbed until one fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from explorer.address import settings
from planner_core.core import (
    OPTIMIZERS,
    RECOMPUTE,
    Cluster,
    InputError,
    cluster_names,
    gpu_names,
    load_cluster,
    load_gpu,
)
from planner_core.models import DEFAULT_BATCH, ZOO
from planner_core.planning import USABLE_MEMORY

MOST_TRIED = 3
"""Rungs of a ladder that are planned."""
MOST_NODES = 64
FIRST = 2.0
"""How much too large a model is taken to be where the planner could not say."""


@dataclass(frozen=True, slots=True)
class Way:
    """One change: in words, and as settings."""

    words: str
    changes: Mapping[str, Any]


def ladders(values: Mapping[str, Any], cluster: Cluster, need: float | None) -> list[list[Way]]:
    """Changes of each kind, the smallest first that may do; `need` is the least memory that a plan takes, over what there is.

    Halving the batch, or doubling the GPUs, at most halves the memory of a GPU, so what is less than `need` is left out.
    """
    times = 2 ** math.ceil(math.log2(max(need or FIRST, 1.01)))
    kinds = (_budget, _micro_batches, _recomputation, _moments, _batches, _gpus, _nodes, _both)
    found = [list(kind(values, cluster, times, need or FIRST)) for kind in kinds]
    return [ladder[:MOST_TRIED] for ladder in found if ladder]


def _budget(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    own = load_cluster(settings.cluster(values)).gpu.memory_bytes
    if values["memory"] is not None and values["memory"] * 1e9 < own * USABLE_MEMORY:
        yield Way("Let a plan fill the GPU’s memory", {"memory": None})


def _micro_batches(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    if values["accumulate"] is not None:
        yield Way("Let the search choose the number of micro-batches", {"accumulate": None})


def _recomputation(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    if values["recompute"] == "none":
        yield Way(*_recomputed())


def _recomputed() -> tuple[str, Mapping[str, Any]]:
    if "auto" in RECOMPUTE:
        return "Let the search choose what to recompute", {"recompute": "auto"}
    return "Recompute every block in backward", {"recompute": "full"}


def _moments(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    if values["moments"] == "gpu" and OPTIMIZERS[values["optimizer"]] and cluster.gpu.host is not None:
        yield Way("Keep the optimizer’s moments in the host’s memory", {"moments": "host"})


def _batches(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    batch = batch_of(values)
    while values["accumulate"] is not None and times <= batch:  # else the search tried smaller parts of it
        if batch % times == 0:
            yield Way(
                f"Batch {batch // times:,} instead of {batch:,}".replace(",", "\u202f"), {"batch": batch // times}
            )
        times *= 2


def batch_of(values: Mapping[str, Any]) -> int:
    """Samples of one step."""
    model = ZOO.get(values["model"])
    return int(values["batch"] or (model.batch if model else DEFAULT_BATCH))


def _gpus(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    """GPUs of this or a later kind that hold enough, the smallest first."""
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
            yield Way(f"{load_gpu(name).name} instead of {cluster.gpu.name}", {"gpu": name})


def _nodes(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    node = cluster.levels[0].size
    now = cluster.num_gpus // node
    base = _base(values, cluster)
    while base is not None and now * times <= MOST_NODES:
        changes = {**base, "nodes": now * times}
        try:
            load_cluster(settings.cluster({**values, **changes}))
        except InputError:
            return
        yield Way(f"{now * times * node} GPUs instead of {cluster.num_gpus}", changes)
        times *= 2


def _base(values: Mapping[str, Any], cluster: Cluster) -> Mapping[str, Any] | None:
    """Settings of a cluster of the same nodes with a network between them; None where none is known."""
    if len(cluster.levels) > 1 or values["inter"] is not None:
        return {}
    for name in cluster_names():
        other = load_cluster(name)
        if len(other.levels) > 1 and other.gpu == cluster.gpu and other.levels[0].size == cluster.levels[0].size:
            return {**dict.fromkeys(settings.CLUSTER_KEYS), "cluster": name}
    return None


def _both(values: Mapping[str, Any], cluster: Cluster, times: int, need: float) -> Iterator[Way]:
    """Recomputation and more GPUs together, for what neither does alone."""
    if values["recompute"] == "none":
        words, changes = _recomputed()
        for way in _nodes(values, cluster, 2, need):
            yield Way(f"{words}, and {way.words}", {**changes, **way.changes})
