"""Clusters that visitors uploaded: data under the hash of its content, which is its name in the address. No Streamlit here."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from explorer.address.stored import store_whole
from explorer.text.commands import OWN_PREFIX
from planner_core.core import Cluster, InputError
from planner_core.planning.pricing.calibration import Fit, read_fits
from planner_core.planning.pricing.calibration import replace_gpu as with_constants

FOLDER = Path(tempfile.gettempdir()) / "shardscope-own-clusters"
NAME_PATTERN = re.compile(rf"{OWN_PREFIX}[0-9a-f]{{16}}")
MAX_BYTES = 2**16
GPU_SCHEMA = "shardscope.gpu/1"
MAX_STORED = 50
"""Files that are kept, the latest."""


def store_cluster(content: bytes, here: Cluster | None = None) -> str:
    """Store a cluster file; return its name. Raises InputError with the first fault of a file that is not a cluster.

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
        data = _with_gpu(here, data)
        content = json.dumps(data).encode()
    Cluster.from_json(data, where="the file")
    name = f"{OWN_PREFIX}{hashlib.sha256(content).hexdigest()[:16]}"
    store_whole(cluster_path(name), content)
    for old in sorted(FOLDER.iterdir(), key=lambda f: f.stat().st_mtime, reverse=True)[MAX_STORED:]:
        old.unlink(missing_ok=True)
    return name


def _with_gpu(here: Cluster, gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster's data with another GPU, whose sources are kept."""
    new_gpu = Cluster.from_json({"gpu": gpu, "levels": here.to_json()["levels"]}, where="the file").gpu
    data = with_constants(here, new_gpu).to_json()
    about = f"{here.num_gpus} {new_gpu.name}"
    return {**data, "gpu": {**data["gpu"], "sources": gpu.get("sources", {})}, "description": about[:200]}


def calibration_fits(name: str) -> tuple[Fit, ...]:
    """Return the fits of a cluster that was calibrated; none of any other."""
    if not (is_uploaded(name) and cluster_path(name).is_file()):
        return ()
    gpu = json.loads(cluster_path(name).read_bytes()).get("gpu")
    return read_fits(gpu) if isinstance(gpu, dict) else ()


def cluster_json(cluster: Cluster) -> str:
    """Write the cluster as a file that `store_cluster` reads."""
    return json.dumps(cluster.to_json(), indent=1)


def cluster_path(name: str) -> Path:
    """Return the path of the file of this cluster."""
    return FOLDER / f"{name}.json"


def is_uploaded(name: str) -> bool:
    """Tell whether a name is that of an uploaded cluster, stored here or not."""
    return NAME_PATTERN.fullmatch(name) is not None
