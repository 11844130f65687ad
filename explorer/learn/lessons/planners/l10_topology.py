"""10. Topology: the same volume on NVLink and between nodes; volume's choice against topology's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from explorer.figures.svg_tensors import column, text
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.stacks import megatron_memory, smallest_memory
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import nodes
from planner_core.core import Cluster, DeviceMesh, load_cluster
from planner_core.cost.communication import AxisLink, axis_links, collective_time, wire_bytes
from planner_core.planning import MAX_DOUBT


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """One way to use the GPUs: `tensor` of them share each layer, `data` groups share the batch. `peak` are the bytes of a GPU's
    fullest moment, None where the model's heads do not divide by `tensor`."""

    data: int
    tensor: int
    inside: bool
    volume: int
    tensor_s: float
    data_s: float
    peak: int | None

    @property
    def seconds(self) -> float:
        """Time of all its communication."""
        return self.tensor_s + self.data_s

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.data} data × {self.tensor} tensor" + ("" if self.inside else ", across")


def two_nodes(cluster: Cluster) -> Cluster:
    """Return the learner's cluster if it has several nodes, else two of its nodes on the standard network."""
    if len(cluster.levels) > 1:
        return cluster.with_sizes(cluster.levels[0].size, 2)
    return replace(cluster, levels=(*cluster.levels, load_cluster("2x8-h100").levels[1]), gpus_per_node=None)


def gradient_bytes(learner: Learner) -> int:
    """Return the bytes of all gradients: in mixed precision 4 each, as in lesson 1."""
    return learner.graph.num_params * learner.planner.workload.kept_item(2)


def peak_bytes(learner: Learner, samples: int, tensor: int) -> int | None:
    """Return the bytes at the fullest moment of one of `tensor` GPUs that take `samples` one after the other and sum their gradients; None
    where the heads do not divide."""
    request = replace(learner.request, batch=samples, accumulate=samples, mesh=None, recompute="none", dtype="bfloat16")
    one = Learner(request, learner.load)
    memory = megatron_memory(one, tensor) if tensor > 1 else smallest_memory(one, 1)
    return memory["peak"] if memory else None


@remember(64)
def list_layouts(learner: Learner, batch: int) -> tuple[GpuLayout, ...]:
    """Return every data × tensor mesh of two nodes, with Megatron-LM's four all_reduces a layer and one of all gradients."""
    cluster, layer = two_nodes(learner.cluster), learner.layer()
    n, seq = cluster.num_gpus, learner.planner.workload.seq
    weights = gradient_bytes(learner)
    layouts = []
    for tensor in [t for t in range(1, n + 1) if n % t == 0]:
        data = n // tensor
        if batch % data:
            continue  # a sample is not cut in two
        needs = peak_bytes(learner, batch // data, tensor)
        # The last axis of a mesh is inside a node. With one group, or with groups of one, both orders are the same mesh.
        for inside in (True, False) if 1 < tensor < n else (True,):
            sizes, names = ((data, tensor), ("data", "tensor")) if inside else ((tensor, data), ("tensor", "data"))
            links = dict(zip(names, axis_links(cluster, DeviceMesh(names, sizes)), strict=True))
            # 2 bytes of bfloat16. An all_reduce behind attention and one behind the MLP, forward and backward, make four.
            activation = int(batch / data * seq * layer.hidden * 2)
            per_layer = wire_bytes("all_reduce", activation, tensor)
            t_time = collective_time("all_reduce", activation, links["tensor"])[0]
            grads = weights // tensor
            volume = 4 * layer.layers * per_layer + wire_bytes("all_reduce", grads, data)
            g_time = collective_time("all_reduce", grads, links["data"])[0]
            layouts.append(GpuLayout(data, tensor, inside, volume, 4 * layer.layers * t_time, g_time, needs))
    return tuple(layouts)


def least_volume_and_time(learner: Learner, batch: int) -> tuple[GpuLayout, GpuLayout]:
    """Return the option with the least volume (of equal ones the slower, since volume cannot tell), and with the least time."""
    layouts = list_layouts(learner, batch)
    layouts = tuple(o for o in layouts if o.peak is not None) or layouts  # where heads divide
    return min(layouts, key=lambda o: (o.volume, -o.seconds)), min(layouts, key=lambda o: o.seconds)


def fastest_that_fits(learner: Learner, batch: int) -> GpuLayout | None:
    """Return the option with the least time of those that fit."""
    room = learner.usable_bytes
    return min(
        (o for o in list_layouts(learner, batch) if o.peak and o.peak <= room), key=lambda o: o.seconds, default=None
    )


def with_ties(first: GpuLayout, others: Sequence[GpuLayout]) -> list[GpuLayout]:
    """Return `first` and those of `others` that no prediction tells from it, by the planner's rule for whole steps, which have the same compute
    on top."""
    close = [o for o in others if o != first and first.seconds <= o.seconds <= (1 + MAX_DOUBT) * first.seconds]
    return [first, *sorted(close, key=lambda o: o.seconds)]


def cost_by_level(cluster: Cluster) -> list[tuple[str, float, float, float]]:
    """Return for a sum over all GPUs each level's name, the share of the tensor that a GPU sends there, the level's bytes per second, and the
    seconds of a byte of tensor."""
    link: AxisLink = axis_links(cluster, DeviceMesh(("data",), (cluster.num_gpus,)))[0]
    levels, inside = [], 1
    for stage in link.stages:
        members = stage.members if stage.inside else link.size // inside
        share = 2 * (members - 1) / members / inside * (link.in_switch if stage.inside else 1.0)
        levels.append((stage.level, share, stage.bytes_per_s, share / stage.bytes_per_s))
        inside *= stage.members
    return levels


def live(learner: Learner, values: Values) -> Live:
    """Return two layouts of equal volume, the cliff, and both choices."""
    given = learner
    learner, note = learner.transformer()
    batch, cluster = int(values["batch"]), two_nodes(learner.cluster)
    per, n = cluster.levels[0].size, cluster.num_gpus
    layouts, room = list_layouts(learner, batch), learner.usable_bytes
    near, far = _inside_and_across(layouts, per)
    by_volume, by_time = least_volume_and_time(learner, batch)
    fitting, grads = fastest_that_fits(learner, batch), gradient_bytes(learner)
    size = int(batch / near.data * learner.planner.workload.seq * learner.layer().hidden * 2)
    cliff = _all_reduce_by_size(cluster, size)
    numbers = {
        "near_s": near.seconds,
        "far_s": far.seconds,
        "volume": near.volume,
        "far_volume": far.volume,
        "size": size,
        "by_volume_s": by_volume.seconds,
        "by_time_s": by_time.seconds,
        "cliff_last": cliff[-1][2],
        "ratio": far.seconds / near.seconds,
        "grads": grads,
        "fitting_s": fitting.seconds if fitting else 0.0,
    }
    can = [o for o in layouts if o.peak]
    facts = {
        "near": near,
        "far": far,
        "a_tie": 1 / (1 + MAX_DOUBT) <= far.seconds / near.seconds <= 1 + MAX_DOUBT,
        "layouts": layouts,
        "cliff": cliff,
        "by_volume": by_volume,
        "by_time": by_time,
        "quickest": with_ties(by_time, can),
        "fitting": with_ties(fitting, [o for o in can if o.peak and o.peak <= room]) if fitting else [],
        "doubt": MAX_DOUBT,
        "links": _largest_sum(cluster, grads),
        "one_node": len(given.cluster.levels) == 1,
    }
    facts |= _cliff_facts(cliff, per) | _link_facts(cluster) | _crossing_bytes(learner, near, batch, grads)
    return Live(facts, _draw_groups(n, per), numbers, learner, note)


def _link_facts(cluster: Cluster) -> dict[str, Any]:
    """Return the names and GB/s of the links inside a node and between nodes."""
    inner, outer = cluster.levels[:2]
    rates = {"inner_rate": inner.bytes_per_s / 1e9, "outer_rate": outer.bytes_per_s / 1e9}
    return {"per": inner.size, "gpus": cluster.num_gpus, "inner": inner.name, "outer": outer.name, **rates}


def _crossing_bytes(learner: Learner, near: GpuLayout, batch: int, grads: int) -> dict[str, Any]:
    """Return what a GPU sends to the other node when the groups lie across: bytes of whole tensors and of its part, and all that it
    sends."""
    cluster, layer = two_nodes(learner.cluster), learner.layer()
    per, sums = cluster.levels[0].size, 4 * layer.layers
    whole = sums * (batch // near.data * learner.planner.workload.seq * layer.hidden * 2)
    sent = near.volume - wire_bytes("all_reduce", grads // near.tensor, near.data)
    # A group of a node's size that lies across two nodes has half of its GPUs on each.
    here, rate = per // 2, cluster.levels[1].bytes_per_s / per
    return {"here": here, "sums": sums, "rate": rate, "whole": whole, "part": whole / here, "sent": sent}


def _draw_groups(n: int, per: int) -> dict[str, Picture]:
    """Draw tensor groups as large as a node, inside the nodes and across them."""
    said = text("a number is a tensor group", 13, muted=True)
    dealt = {"inside": [r // per for r in range(n)], "across": [r % (n // per) for r in range(n)]}
    return {name: column(nodes(groups, per), said, gap=8) for name, groups in dealt.items()}


def _all_reduce_by_size(cluster: Cluster, size: int) -> list[tuple[int, bool, float]]:
    """Return (GPUs, whether they are neighbours, seconds) of one all_reduce, all groups of that size at work."""
    n = cluster.num_gpus
    times = []
    for t in [t for t in range(2, n + 1) if n % t == 0]:
        near = axis_links(cluster, DeviceMesh(("data", "tensor"), (n // t, t)))[1]
        times.append((t, True, collective_time("all_reduce", size, near)[0]))
        if t < n:
            far = axis_links(cluster, DeviceMesh(("tensor", "data"), (t, n // t)))[0]
            times.append((t, False, collective_time("all_reduce", size, far)[0]))
    return times


def _cliff_facts(cliff: list[tuple[int, bool, float]], per: int) -> dict[str, Any]:
    """Return two neighbours beside two strangers, and whether a full node takes less than half of it."""
    near, far = (next(s for t, is_near, s in cliff if t == 2 and is_near is want) for want in (True, False))
    sizes = {t: s for t, is_near, s in cliff if is_near and t <= per}
    quicker = sizes.get(per, 0.0) < sizes.get(per // 2, 0.0)
    return {"pair": {"near": near, "far": far}, "full_node_is_quicker": quicker}


def _largest_sum(cluster: Cluster, grads: int) -> dict[str, Any] | None:
    """Return where the time of the largest sum comes from; None where all GPUs are on one level."""
    levels = cost_by_level(cluster)
    if len(levels) < 2:
        return None
    link = axis_links(cluster, DeviceMesh(("data",), (cluster.num_gpus,)))[0]
    slowest = max(levels, key=lambda part: part[3])
    return {"parts": levels, "slowest": slowest[0], "total": collective_time("all_reduce", grads, link)[0]}


def _inside_and_across(layouts: tuple[GpuLayout, ...], per: int) -> tuple[GpuLayout, GpuLayout]:
    """Return tensor groups as large as a node: inside the nodes, and across them."""
    near, far = (o for o in layouts if o.tensor == per)
    return near, far


LESSON = read_lesson("10-topology", live)
