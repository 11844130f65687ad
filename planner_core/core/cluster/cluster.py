"""The machines: a GPU's roofline, and the levels of links (GPU, node, group of nodes) that join many of them.

A cluster is a tree of equal units. Level 0 joins GPUs into nodes, level 1 joins nodes into the next unit, and so on, unless
`gpus_per_node` says that a host has more or fewer GPUs than level 0. Rank r is in unit r // (GPUs per unit) of every level. A user's
file is checked against `assets/cluster.schema.json` and `assets/gpu.schema.json`. Bandwidths are one way, in bytes per second. GB is
10^9 bytes.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from planner_core.core.cluster.gpu import Gpu, gpu_from_json, gpu_names
from planner_core.core.errors import InputError
from planner_core.core.files import ASSETS, is_file
from planner_core.core.forms import first_schema_fault, list_names, read_json, shorten_value, suggest_names

SCHEMA = "shardscope.cluster/1"
MAX_GPUS = 100_000
MAX_FILE_BYTES = 1_000_000
UNNAMED = "my-cluster"

_BANDWIDTHS = {"unit_bytes_per_s": 1.0, "unit_gb_per_s": 1e9, "unit_gbit_per_s": 1e9 / 8}
_LATENCIES = {"latency_s": 1.0, "latency_us": 1e-6}
CHANGES = ("nodes", "gpus", "intra", "inter", "gpu")
"""What `NAME:nodes=4,gpus=8,intra=450,inter=400,gpu=a100-80gb-sxm` may change: nodes, GPUs per node, GB/s one way out of a GPU
inside a node and out of a node, and the GPU itself: a name, or a file such as calibration writes."""
MAX_CHANGE = 1e6
MAX_USUAL_NODE = 16
"""GPUs of the largest hosts that are sold (DGX-2); level 0 of more is likely a rack."""


@dataclass(frozen=True, slots=True)
class Level:
    """Links of one kind, which join `size` child units. Each unit can send `unit_bytes_per_s` times `efficiency`.

    `latency_s`: seconds before the first byte of a ring step over this level arrives. `tree_latency_s`: the same for a step of a
    tree (0: as for a ring).
    """

    name: str
    size: int
    unit_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    tree_latency_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Reachable bytes per second that one child unit sends."""
        return self.efficiency * self.unit_bytes_per_s


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal GPUs in a tree of `levels`, innermost first; the product of the level sizes is the number of GPUs.

    `gpus_per_node`: GPUs of one host, whose processes are started together; None: those that level 0 joins. Several levels may lie inside
    a host (pairs on NVLink, joined by PCIe), and level 0 may join several hosts (a rack on NVLink).
    """

    name: str
    gpu: Gpu
    levels: tuple[Level, ...]
    description: str = ""
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        """Raise InputError for hosts that the levels cut unevenly."""
        node, units = self.gpus_per_node, [self.unit_gpus(i + 1) for i in range(len(self.levels))]
        if node and (node > self.num_gpus or any(unit % node and node % unit for unit in units)):
            raise InputError(
                f"gpus_per_node is {node}, but the levels join {', '.join(map(str, units))} GPUs; give a number that divides each of "
                "these or is a multiple of it"
            )

    @property
    def num_gpus(self) -> int:
        """Product of the level sizes."""
        return math.prod(level.size for level in self.levels)

    def unit_gpus(self, level: int) -> int:
        """GPUs in one child unit of `level`: 1 for level 0, the GPUs of a node for level 1, and so on."""
        return math.prod(inner.size for inner in self.levels[:level])

    @property
    def node_gpus(self) -> int:
        """GPUs of one host."""
        return self.gpus_per_node or self.levels[0].size

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self.num_gpus // self.node_gpus

    @property
    def near_gpus(self) -> int:
        """GPUs that talk to each other without the network between nodes: those of a host, or of level 0 where it joins several hosts."""
        return max(self.node_gpus, self.levels[0].size)

    @property
    def network(self) -> Level | None:
        """The innermost links between nodes; None in one node."""
        return next((level for i, level in enumerate(self.levels) if not self.is_inside(i)), None)

    def is_inside(self, level: int) -> bool:
        """Return whether the links of a level join GPUs without the network between nodes, as those of level 0 do."""
        return level == 0 or self.unit_gpus(level + 1) <= self.node_gpus

    def with_memory(self, memory_bytes: int) -> Cluster:
        """Return the same cluster of GPUs with another memory size."""
        if memory_bytes <= 0:
            raise InputError(f"memory per GPU is {memory_bytes} bytes, but must be positive; give for example 80e9")
        return replace(self, gpu=replace(self.gpu, memory_bytes=memory_bytes))

    def with_bandwidth(self, factor: float, level: int | None = None) -> Cluster:
        """Return the same cluster with `factor` times the bandwidth on one level, or on all."""
        return self._scale_levels("unit_bytes_per_s", factor, level)

    def with_latency(self, factor: float, level: int | None = None) -> Cluster:
        """Return the same cluster with `factor` times the latency on one level, or on all."""
        return self._scale_levels("latency_s", factor, level)._scale_levels("tree_latency_s", factor, level)

    def with_sizes(self, *sizes: int) -> Cluster:
        """Return a cluster of as many levels as `sizes`, the innermost first: `with_sizes(8)` is one node of eight GPUs."""
        levels = zip(self.levels, sizes, strict=False)
        return replace(self, levels=tuple(replace(level, size=n) for level, n in levels), gpus_per_node=None)

    def part(self, *sizes: int) -> Cluster:
        """Return the first GPUs of the cluster: so many units of each level, the innermost first. Levels of one unit have no links, and are
        left out above the innermost."""
        host, unit = 1, 1
        for level, size in zip(self.levels, sizes, strict=False):
            # Example: of hosts of 4 in a rack of 64, a part of 2 GPUs is in one host, and one of 6 has even hosts of 2.
            of_host = max(1, self.node_gpus // unit)
            host *= size if size <= min(of_host, level.size) else math.gcd(size, of_host, level.size)
            unit *= level.size
        levels = [replace(level, size=n) for level, n in zip(self.levels, sizes, strict=False)]
        kept = (levels[0], *(level for level in levels[1:] if level.size > 1))
        return replace(self, levels=kept, gpus_per_node=self.gpus_per_node and host)

    def _scale_levels(self, field: str, factor: float, level: int | None) -> Cluster:
        if not (math.isfinite(factor) and factor > 0):
            raise InputError(f"a link cannot be scaled by {factor}; give a positive factor such as 2")
        levels = tuple(
            replace(one, **{field: getattr(one, field) * factor}) if level in (None, i) else one
            for i, one in enumerate(self.levels)
        )
        return replace(self, levels=levels)

    @property
    def is_one_node(self) -> bool:
        """Whether all GPUs are in one node, so that no message leaves it."""
        return self.num_gpus <= self.near_gpus

    def to_json(self) -> dict[str, Any]:
        """Plain data that does not refer to other files: `Cluster.from_json(c.to_json()) == c`."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "description": self.description,
            "num_gpus": self.num_gpus,
            **({} if self.gpus_per_node is None else {"gpus_per_node": self.gpus_per_node}),
            "gpu": self.gpu.to_json(),
            "levels": [
                {
                    "name": level.name,
                    "size": level.size,
                    "unit_bytes_per_s": level.unit_bytes_per_s,
                    "efficiency": level.efficiency,
                    "latency_s": level.latency_s,
                    "tree_latency_s": level.tree_latency_s,
                }
                for level in self.levels
            ],
        }

    @staticmethod
    def from_json(data: Any, where: str = "cluster", name: str = UNNAMED) -> Cluster:
        """Read and check a cluster. Every message begins with `where`; `name` is used if the data has no name. Raises InputError."""
        gpus = f"one of {list_names(gpu_names())}, or an object like the files of assets/hardware"
        wrong = first_schema_fault(data, "cluster", where, {"gpu": gpus})
        if wrong:
            raise InputError(wrong)
        return _cluster_from_json(data, where, name)


def _cluster_from_json(data: Mapping[str, Any], where: str, name: str) -> Cluster:
    """Return a cluster from data that has its form. Raises InputError for faults that a schema cannot express."""
    gpu = gpu_from_json(data["gpu"], where)
    node = data.get("gpus_per_node")
    units = list(itertools.accumulate((int(row["size"]) for row in data["levels"]), operator.mul))
    levels = tuple(
        _level_from_json(row, i, i == 0 or unit <= (node or 0), gpu, where)
        for i, (row, unit) in enumerate(zip(data["levels"], units, strict=True))
    )
    try:
        cluster = Cluster(data.get("name", name), gpu, levels, data.get("description", ""), node)
    except InputError as error:
        raise InputError(f"{where}: ", error.sentence) from None
    sizes = "×".join(str(level.size) for level in levels)
    if cluster.num_gpus > MAX_GPUS:
        raise InputError(
            f"{where}: level sizes {sizes} make {cluster.num_gpus} GPUs; at most {MAX_GPUS} can be planned"
        )
    if data.get("num_gpus", cluster.num_gpus) != cluster.num_gpus:
        raise InputError(
            f"{where}: num_gpus is {data['num_gpus']}, but level sizes {sizes} make {cluster.num_gpus}; change one or leave num_gpus out"
        )
    return cluster


def assumed_node_notes(cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence on the GPUs of a node where a cluster does not state them, and its levels leave in doubt that level 0 is a node."""
    inner, *outer = cluster.levels
    if cluster.gpus_per_node is not None or (len(outer) < 2 and inner.size <= MAX_USUAL_NODE):
        return ()
    return (
        f"level 0 of the cluster ({inner.name}) is taken for a node, of {inner.size} GPUs; gpus_per_node in its file states another number",
    )


@cache
def cluster_names() -> tuple[str, ...]:
    """Return the clusters that come with the project."""
    return tuple(sorted(path.stem for path in (ASSETS / "clusters").glob("*.json")))


def load_cluster(source: str | Path | Mapping[str, Any] | Cluster) -> Cluster:
    """Read a cluster.

    Args:
        source: The name of a cluster that comes with the project, in another size too (`"4x8-h100"`: 4 nodes of 8 GPUs) and with
            changes (`"2x8-h100:nodes=4,inter=400"`: GB/s one way out of a node; there are `nodes`, `gpus`, `intra`, `inter` and
            `gpu`); the path of a JSON file, which takes the same changes; the content of such a file; or a `Cluster`, which is
            returned.

    Returns:
        The cluster: a GPU, and the levels of links that join many of them, bandwidths in bytes per second, one way.

    Raises:
        InputError: The cluster does not exist, or its description is wrong. The message names the first fault.

    Example:
        >>> shardscope.load_cluster("2x8-h100").num_gpus
        16
        >>> links = [{"name": "NVLink", "size": 4, "unit_gb_per_s": 450, "latency_us": 3}]
        >>> shardscope.load_cluster({"gpu": "h100-sxm", "levels": links}).num_gpus
        4
    """
    if isinstance(source, Cluster):
        return source
    if isinstance(source, Mapping):
        return Cluster.from_json(source)
    text = str(source)
    name, _, changes = text.partition(":")
    if changes and (name in cluster_names() or name.endswith(".json")):
        return _apply_changes(name, changes)
    known, size = _known_cluster_resized(name)
    if known:
        stated = {part.partition("=")[0].strip() for part in changes.split(",")}
        # What a user states after the colon wins over what follows from the size: 3x4-h100:inter=400 has 400 GB/s.
        unchanged = [f"{key}={value}" for key, value in size.items() if key not in stated]
        return replace(_apply_changes(known, ",".join([*unchanged, *filter(None, [changes])])), name=text)
    # Before any file: one of this name in the working folder must not change what a command means.
    if text in cluster_names():
        path = ASSETS / "clusters" / f"{text}.json"
        # A test checks the form of every file there, so it is not checked again.
        return _cluster_from_json(_read_json(path), f"cluster {text}", text)
    path = Path(text)
    if path.suffix == ".json" or "/" in text or is_file(path):
        return Cluster.from_json(_read_json(path), where=f"cluster file {path.name}", name=path.stem)
    _refuse_uneven_nodes(name)
    raise InputError(
        f"no cluster is called {shorten_value(text)}; {suggest_names(text, cluster_names()).rstrip('?')}, or give a JSON file"
    )


def _refuse_uneven_nodes(name: str) -> None:
    """Raise InputError for nodes of several sizes, as in 6+8-h100, with the equal nodes that use most of their GPUs: 2x6-h100."""
    parts = re.fullmatch(r"(\d{1,6}(?:\+\d{1,6})+)-(.+)", name)
    if parts is None:
        return
    nodes = [int(size) for size in parts[1].split("+")]
    # k GPUs of every node that has so many: 2 x 6 of 6+8, but 2 x 8 of 1+8+8
    used, count, size = max((sum(n >= k for n in nodes) * k, sum(n >= k for n in nodes), k) for k in nodes)
    raise InputError(
        f"{shorten_value(name)} has nodes of {' and '.join(map(str, nodes))} GPUs, and a mesh needs equal nodes; "
        f"{count}x{size}-{parts[2]} uses {used} of the {sum(nodes)}"
    )


def _known_cluster_resized(name: str) -> tuple[str, dict[str, str]]:
    """Find a cluster that comes with the project, and the changes that turn it into `name`. The name is "" if no cluster has the GPU.

    `4x8-h100` is 2x8-h100 with nodes=4 and gpus=8. Several clusters may have the GPU: two levels of links fit any number of nodes,
    one level does not say how nodes are linked. A node with fewer GPUs has as many fewer network cards: in 3x4-h100 it sends half
    of what a node of 8 sends.
    """
    size = re.fullmatch(r"(\d{1,6})x(\d{1,6})-(.+)", name)
    of_this_gpu = [known for known in cluster_names() if size and known.partition("-")[2] == size[3]]
    if size is None or not of_this_gpu or name in of_this_gpu:
        return "", {}
    # False sorts before True, and `min` keeps the first of equals: a cluster with two levels, or else the first in the alphabet.
    known = min(map(load_cluster, of_this_gpu), key=lambda cluster: len(cluster.levels) != 2)
    changes, node = {"nodes": size[1], "gpus": size[2]}, known.levels[0].size
    if len(known.levels) > 1 and int(size[2]) < node:
        changes["inter"] = f"{known.levels[1].unit_bytes_per_s / 1e9 * int(size[2]) / node:g}"
    return known.name, changes


def split_size(name: str) -> tuple[str, dict[str, str]]:
    """Return the known cluster that `name` states in another size, and the changes to that size: 2x8-h100 and nodes=4, gpus=8 of 4x8-h100.

    A known name, and one that is of no known cluster, is returned as it is. Raises InputError for a size that no cluster has.
    """
    known, changes = _known_cluster_resized(name)
    if not known:
        return name, {}
    load_cluster(name)
    if int(changes["gpus"]) == load_cluster(known).levels[0].size:
        del changes["gpus"]
    return known, changes


def _apply_changes(name: str, changes: str) -> Cluster:
    """Return the cluster with changes such as `nodes=4,inter=400,gpu=h200-sxm`. The links get the latencies that belong to the new GPU."""
    where = f"cluster {name}:{changes[:80]}"
    texts = _parse_changes(changes, where)
    data = _read_json(ASSETS / "clusters" / f"{name}.json" if name in cluster_names() else Path(name))
    cluster = Cluster.from_json(data, where, Path(name).stem)
    # The GPU is changed in the data, before it is read: latencies that a file leaves out are those measured with the GPU.
    if "gpu" in texts:
        cluster = _cluster_from_json({**data, "gpu": _gpu_data(texts.pop("gpu"))}, where, cluster.name)
    numbers = {key: _parse_change(key, text, where) for key, text in texts.items()}
    # `nodes` is the size of the one level above: with two such levels it would be open which of them it changes.
    inner, *outer = cluster.levels
    within = [level for i, level in enumerate(outer, 1) if cluster.gpus_per_node and cluster.is_inside(i)]
    outer = outer[len(within) :]
    if len(outer) > 1 and "nodes" in numbers:
        raise InputError(
            f"{where}: {len(outer)} levels of links join its nodes; give a JSON file to change their number"
        )
    if cluster.node_gpus != inner.size and numbers.keys() & {"nodes", "gpus"}:
        raise InputError(
            f"{where}: its nodes of {cluster.node_gpus} GPUs are not its level 0, of {inner.size}; give a JSON file to change their number"
        )
    nodes = int(numbers.get("nodes", outer[0].size if outer else 1))
    if nodes > 1 and not outer and "inter" not in numbers:
        raise InputError(
            f"{where}: a cluster of one node does not say how nodes are linked; give the GB/s too, for example inter=400"
        )
    inner = replace(
        inner,
        size=int(numbers.get("gpus", inner.size)),
        unit_bytes_per_s=numbers.get("intra", inner.unit_bytes_per_s / 1e9) * 1e9,
    )
    # A cluster of one node has no link out of it; the new one takes the latencies that were measured with its GPU.
    unknown = {"name": "network", "size": nodes, "unit_bytes_per_s": 0.0}
    link = outer[0] if outer else _level_from_json(unknown, 1, False, cluster.gpu, where)
    speed = numbers.get("inter", link.unit_bytes_per_s / 1e9) * 1e9
    # A level of one unit has no links. It is left out, so that no price meets a group of one.
    network = (replace(link, size=nodes, unit_bytes_per_s=speed), *outer[1:]) if nodes > 1 else ()
    node = inner.size if cluster.gpus_per_node and "gpus" in numbers else cluster.gpus_per_node
    changed = replace(
        cluster, name=f"{cluster.name}:{changes}", levels=(inner, *within, *network), description="", gpus_per_node=node
    )
    if changed.num_gpus > MAX_GPUS:
        raise InputError(f"{where}: makes {changed.num_gpus} GPUs; at most {MAX_GPUS} can be planned")
    return changed


def _gpu_data(name: str) -> Any:
    """Return a GPU's name, or the content of its file, which calibration may have written."""
    if not name.endswith(".json"):
        return name
    data = _read_json(Path(name))
    wrong = first_schema_fault(data, "gpu", f"GPU file {Path(name).name}")
    if wrong:
        raise InputError(wrong)
    return data


def _parse_changes(changes: str, where: str) -> dict[str, str]:
    """Return the changes by name. Raises InputError for an unknown one."""
    by_name: dict[str, str] = {}
    for part in changes.split(","):
        key, _, text = (word.strip() for word in part.partition("="))
        if key not in CHANGES:
            raise InputError(f"{where}: {shorten_value(key)} is not a change; there are {', '.join(CHANGES)}")
        if key in by_name:
            raise InputError(f"{where}: {key} is given twice; leave one out")
        by_name[key] = text
    return by_name


def _parse_change(key: str, text: str, where: str) -> float:
    """Return the number of a change. Counts are whole numbers."""
    count = key in ("nodes", "gpus")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < MAX_CHANGE or (count and value != int(value)):
        what = "a whole number from 1" if count else "GB/s one way, more than 0"
        example = {"nodes": "nodes=4", "gpus": "gpus=8", "intra": "intra=450", "inter": "inter=400"}[key]
        raise InputError(f"{where}: {key} is {shorten_value(text)}, but must be {what}; give for example {example}")
    return value


def _read_json(path: Path) -> Any:
    advice = f"give a cluster by name ({list_names(cluster_names())}), or a file of the form of those in {ASSETS / 'clusters'}"
    return read_json(path, path.name, MAX_FILE_BYTES, advice)


def _level_from_json(data: Mapping[str, Any], index: int, inside: bool, gpu: Gpu, where: str) -> Level:
    """Return a level of links, `inside` a node or between nodes. Figures that the data does not have are those measured with this GPU."""
    measured = gpu.collectives
    latency, tree, efficiency = 0.0, 0.0, 1.0
    if measured is not None:
        # Inside a node a step takes the same in a ring and in a tree; between nodes trees were measured by themselves.
        latency, tree = (measured.hop_s, measured.hop_s) if inside else (measured.ring_hop_s, measured.tree_hop_s)
        efficiency = measured.efficiency if inside else measured.outer_efficiency
    # A stated latency is for rings and trees alike, so the measured one of trees does not apply then.
    stated = any(key in data for key in _LATENCIES)
    if not stated and measured is None:
        raise InputError(
            f"{where}: level {index} says no latency, and no collective of {gpu.name} was measured; give latency_us, e.g. 3"
        )
    latency = _convert_units(data, _LATENCIES) if stated else latency
    return Level(
        name=data.get("name", f"level {index}"),
        size=int(data["size"]),
        unit_bytes_per_s=_convert_units(data, _BANDWIDTHS),
        latency_s=latency,
        efficiency=float(data.get("efficiency", efficiency)),
        tree_latency_s=float(data.get("tree_latency_s", 0.0 if stated else tree)),
    )


def _convert_units(data: Mapping[str, Any], units: Mapping[str, float]) -> float:
    """Return the value of the one field of `units` that is given, converted to the first of these units."""
    return next(float(data[key]) * unit for key, unit in units.items() if key in data)
