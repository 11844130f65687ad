"""The source of each figure of a cluster: a data sheet or a measurement, as its file says, or the visitor. No Streamlit here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorer.address import own_cluster
from planner_core.core import ASSETS, Cluster

MINE = "mine"
"""The source of a figure that the visitor gave, or whose file names none."""
GPU = ("peak_flops", "memory_bytes", "memory_bytes_per_s", "efficiency")
LEVEL = ("unit_bytes_per_s", "latency_s")


@dataclass(frozen=True, slots=True)
class Sources:
    """A source for each of `GPU`, and for each of `LEVEL` on every level, innermost first."""

    gpu: Mapping[str, str]
    levels: tuple[Mapping[str, str], ...]


def of(values: Mapping[str, Any], cluster: Cluster) -> Sources:
    """Those of the cluster in the address; `cluster` is what its name and changes make."""
    data = _data(values["cluster"])
    there = values["gpu"] or data["gpu"]
    gpu = (
        there if isinstance(there, Mapping) else json.loads((ASSETS / "hardware" / f"{there}.json").read_text("utf-8"))
    )
    found = {key: _told(gpu, key) for key in GPU}
    measured = gpu.get("collectives", {}).get("source") or MINE
    levels = []
    for k in range(len(cluster.levels)):
        row = data["levels"][k] if k < len(data["levels"]) else {}
        changed = values["intra"] if k == 0 else values["inter"]
        states = "latency_s" in row or "latency_us" in row
        levels.append({
            "unit_bytes_per_s": MINE if changed else _told(row, "unit_bytes_per_s"),
            "latency_s": _told(row, "latency_s") if states else measured,
        })  # fmt: skip
    return Sources(found, tuple(levels))


def _data(name: str) -> dict[str, Any]:
    file = own_cluster.path(name) if own_cluster.is_own(name) else ASSETS / "clusters" / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def _told(row: Mapping[str, Any], key: str) -> str:
    sources = row.get("sources")
    told = sources.get(key) if isinstance(sources, Mapping) else None
    return told if isinstance(told, str) and told else MINE
