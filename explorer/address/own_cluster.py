"""Clusters that visitors uploaded: data under the hash of its content, which is its name in the address. No Streamlit here."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner_core.core import Cluster, InputError

FOLDER = Path(tempfile.gettempdir()) / "shardscope-own-clusters"
NAME = re.compile(r"own-[0-9a-f]{16}")
MAX_BYTES = 2**16
KEPT = 50
"""Files that are kept, the latest."""


def keep(content: bytes) -> str:
    """Store a cluster file; returns its name. Raises InputError with the first fault of one that is none."""
    if len(content) > MAX_BYTES:
        raise InputError(f"the file has {len(content)} bytes; a cluster file has at most {MAX_BYTES}")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the file is not JSON ({error}); give a file of the form of those in assets/clusters"
        ) from None
    Cluster.from_json(data, where="the file")
    name = f"own-{hashlib.sha256(content).hexdigest()[:16]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    path(name).write_bytes(content)
    for old in sorted(FOLDER.iterdir(), key=lambda f: f.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
    return name


@dataclass(frozen=True, slots=True)
class Figures:
    """A GPU as its data sheet has it: products in 16 bits without sparsity, memory, and how fast that is read."""

    name: str
    half_tflops: float
    memory_gib: float
    memory_gb_per_s: float


def figures(cluster: Cluster) -> Figures:
    """Those of the cluster's GPU."""
    gpu = cluster.gpu
    return Figures(gpu.name, _half(dict(gpu.peak_flops)) / 1e12, gpu.memory_bytes / 2**30, gpu.memory_bytes_per_s / 1e9)


def with_gpu(cluster: Cluster, figures: Figures) -> bytes:
    """The cluster's file with a GPU of these figures. Its other types are as much faster or slower; what share of its peaks it
    reaches stays that of the GPU before, since no data sheet says it."""
    data = cluster.to_json()
    gpu = data["gpu"]
    faster = figures.half_tflops * 1e12 / _half(gpu["peak_flops"])
    gpu |= {
        "name": figures.name.strip() or "GPU by its figures", "memory_bytes": round(figures.memory_gib * 2**30),
        "memory_bytes_per_s": figures.memory_gb_per_s * 1e9,
        "peak_flops": {dtype: peak * faster for dtype, peak in gpu["peak_flops"].items()},
    }  # fmt: skip
    about = f"{cluster.num_gpus} {gpu['name']}, by its figures; reaches the shares of its peaks that {cluster.gpu.name} does"
    return json.dumps({**data, "description": about}).encode()


def _half(peaks: Mapping[str, float]) -> float:
    """The peak in 16 bits; older GPUs have no bf16."""
    return peaks.get("bfloat16") or peaks["float16"]


def path(name: str) -> Path:
    """Where the cluster of this name lies."""
    return FOLDER / f"{name}.json"


def is_own(name: str) -> bool:
    """Whether a name is that of an uploaded cluster, there or not."""
    return NAME.fullmatch(name) is not None
