"""Clusters that visitors uploaded: data under the hash of its content, which is its name in the address. No Streamlit here."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_core.core import Cluster, InputError
from planner_core.planning.pricing.calibration import Fit, fits_of
from planner_core.planning.pricing.calibration import with_gpu as with_constants

FOLDER = Path(tempfile.gettempdir()) / "shardscope-own-clusters"
NAME = re.compile(r"own-[0-9a-f]{16}")
MAX_BYTES = 2**16
GPU_SCHEMA = "shardscope.gpu/1"
KEPT = 50
"""Files that are kept, the latest."""


def keep(content: bytes, here: Cluster | None = None) -> str:
    """Store a cluster file; returns its name. Raises InputError with the first fault of a file that does not describe a cluster.

    The hardware file of a GPU, as `calibrate` writes it, becomes the cluster `here` with this GPU.
    """
    if len(content) > MAX_BYTES:
        raise InputError(f"the file has {len(content)} bytes; a cluster file has at most {MAX_BYTES}")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the file is not JSON ({error}); give a file of the form of those in assets/clusters"
        ) from None
    if here is not None and isinstance(data, dict) and data.get("schema") == GPU_SCHEMA:
        data = _on(here, data)
        content = json.dumps(data).encode()
    Cluster.from_json(data, where="the file")
    name = f"own-{hashlib.sha256(content).hexdigest()[:16]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    path(name).write_bytes(content)
    for old in sorted(FOLDER.iterdir(), key=lambda f: f.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
    return name


def _on(here: Cluster, gpu: dict[str, Any]) -> dict[str, Any]:
    """The cluster's data with another GPU, whose sources are kept."""
    there = Cluster.from_json({"gpu": gpu, "levels": here.to_json()["levels"]}, where="the file").gpu
    data = with_constants(here, there).to_json()
    about = f"{here.num_gpus} {there.name}"
    return {**data, "gpu": {**data["gpu"], "sources": gpu.get("sources", {})}, "description": about[:200]}


def fits(name: str) -> tuple[Fit, ...]:
    """The fits of a cluster that was calibrated; none of any other."""
    if not (is_own(name) and path(name).is_file()):
        return ()
    gpu = json.loads(path(name).read_bytes()).get("gpu")
    return fits_of(gpu) if isinstance(gpu, dict) else ()


@dataclass(frozen=True, slots=True)
class Figures:
    """A GPU as its data sheet has it: products in 16 bits without sparsity, memory, and how fast that is read."""

    name: str
    half_tflops: float
    memory_gib: float
    memory_gb_per_s: float
    links: tuple[tuple[float, float], ...] = ()
    """For each level, innermost first: GB/s that a unit sends, one way, and microseconds before the first byte."""


def figures(cluster: Cluster) -> Figures:
    """Those of the cluster's GPU."""
    gpu = cluster.gpu
    links = tuple((level.unit_bytes_per_s / 1e9, level.latency_s * 1e6) for level in cluster.levels)
    peak = _half(dict(gpu.peak_flops)) / 1e12
    return Figures(gpu.name, peak, gpu.memory_bytes / 2**30, gpu.memory_bytes_per_s / 1e9, links)


def with_figures(
    cluster: Cluster, wanted: Figures, gpu_sources: Mapping[str, str], levels: Sequence[Mapping[str, str]]
) -> bytes:
    """The cluster's file with these figures and the source of each, by its name in the file.

    Other types than the 16-bit one are as much faster or slower as that one. The share of its peaks that the GPU reaches stays that of
    the GPU before, since no data sheet says it.
    """
    data = cluster.to_json()
    gpu = data["gpu"]
    faster = wanted.half_tflops * 1e12 / _half(gpu["peak_flops"])
    gpu |= {
        "name": wanted.name.strip() or "GPU by its figures", "memory_bytes": round(wanted.memory_gib * 2**30),
        "memory_bytes_per_s": wanted.memory_gb_per_s * 1e9,
        "peak_flops": {dtype: peak * faster for dtype, peak in gpu["peak_flops"].items()},
    }  # fmt: skip
    gpu["sources"] = dict(gpu_sources)
    now = figures(cluster)
    for k, (level, sources) in enumerate(zip(data["levels"], levels, strict=True)):
        level["sources"] = dict(sources)
        if k < len(wanted.links) and wanted.links[k] != now.links[k]:
            level["unit_bytes_per_s"], latency_us = wanted.links[k][0] * 1e9, wanted.links[k][1]
            if latency_us != now.links[k][1]:
                level["latency_s"] = latency_us / 1e6
                del level["tree_latency_s"]  # a tree's step takes as long as a ring's where nothing else is known
    about = f"{cluster.num_gpus} {gpu['name']}, by its figures; reaches the shares of its peaks that {cluster.gpu.name} does"
    return json.dumps({**data, "description": about}).encode()


def _half(peaks: Mapping[str, float]) -> float:
    """The peak in 16 bits; older GPUs have no bf16."""
    return peaks.get("bfloat16") or peaks["float16"]


def path(name: str) -> Path:
    """The path of the file of this cluster."""
    return FOLDER / f"{name}.json"


def is_own(name: str) -> bool:
    """Whether a name is that of an uploaded cluster, there or not."""
    return NAME.fullmatch(name) is not None
