"""10. Topology: the same volume on NVLink and between nodes; volume's choice against topology's choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import Box, amount, column, svg, table, text
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.charts import Bar, Part, bars, nodes
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh, load_cluster
from planner_core.cost.communication import axis_links, collective_time, wire_bytes

BATCHES = (2, 4, 8, 16, 32, 64)
CODE = """\
import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)  # 2 nodes of 8
mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("data", "tensor"))
print("tensor group of rank 0:", dist.get_process_group_ranks(mesh.get_group("tensor")))  # one node, NVLink
print("data group of rank 0:", dist.get_process_group_ranks(mesh.get_group("data")))  # between nodes
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the GPUs: `tensor` of them share each layer, `data` groups share the batch."""

    data: int
    tensor: int
    inside: bool
    volume: int
    tensor_s: float
    data_s: float

    @property
    def seconds(self) -> float:
        """Time of all its communication."""
        return self.tensor_s + self.data_s

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.data} data × {self.tensor} tensor" + ("" if self.inside else ", across")


def two_nodes(cluster: Cluster) -> Cluster:
    """The learner's cluster if it has several nodes, else two of its nodes on the standard network."""
    if len(cluster.levels) > 1:
        levels = (cluster.levels[0], replace(cluster.levels[1], size=2))
        return replace(cluster, levels=levels)
    return replace(cluster, levels=(cluster.levels[0], load_cluster("2x8-h100").levels[1]))


def options(learner: Learner, batch: int) -> list[Option]:
    """Every data × tensor mesh of two nodes, with Megatron-LM's four all_reduces a layer and one of all gradients."""
    cluster, layer = two_nodes(learner.cluster), learner.layer()
    n, seq = cluster.num_gpus, learner.planner.workload.seq
    weights = learner.graph.num_params * 2
    found = []
    for tensor in [t for t in range(1, n + 1) if n % t == 0]:
        data = n // tensor
        if batch % data:
            continue  # a sample is not cut in two
        for inside in (True, False) if 1 < tensor < n else (True,):
            sizes, names = ((data, tensor), ("data", "tensor")) if inside else ((tensor, data), ("tensor", "data"))
            links = dict(zip(names, axis_links(cluster, DeviceMesh(names, sizes)), strict=True))
            activation = int(batch / data * seq * layer.hidden * 2)
            per_layer, t_time = (
                wire_bytes("all_reduce", activation, tensor),
                collective_time("all_reduce", activation, links["tensor"])[0],
            )
            grads = weights // tensor
            volume = 4 * layer.layers * per_layer + wire_bytes("all_reduce", grads, data)
            found.append(
                Option(
                    data,
                    tensor,
                    inside,
                    volume,
                    4 * layer.layers * t_time,
                    collective_time("all_reduce", grads, links["data"])[0],
                )
            )
    return found


def choices(learner: Learner, batch: int) -> tuple[Option, Option]:
    """The option with the least volume (of equal ones the slower, since volume cannot tell), and with the least time."""
    found = options(learner, batch)
    return min(found, key=lambda o: (o.volume, -o.seconds)), min(found, key=lambda o: o.seconds)


def scene(learner: Learner, values: Values) -> Scene:
    """Two layouts of equal volume, the cliff, and both choices."""
    learner, note = learner.transformer()
    batch, cluster = int(values["batch"]), two_nodes(learner.cluster)
    per, n = cluster.levels[0].size, cluster.num_gpus
    found = options(learner, batch)
    near, far = _both(found, per)
    by_volume, by_time = choices(learner, batch)
    inner, outer = cluster.levels[0], cluster.levels[1]
    links = (
        f"Inside a node {inner.name} gives each GPU {units.significant(inner.bytes_per_s / 1e9)} GB/s; "
        f"{outer.name} gives a whole node {units.significant(outer.bytes_per_s / 1e9)} GB/s, "
        f"{units.significant(outer.bytes_per_s / per / 1e9)} per GPU."
    )
    inside, across = [r // per for r in range(n)], [r % (n // per) for r in range(n)]
    size = int(batch / near.data * learner.planner.workload.seq * learner.layer().hidden * 2)
    steps = (
        Step("Neighbours", f"Two nodes. Equal numbers form a tensor group of {per}, and each group lies inside one node. {links}", svg(column(nodes(inside, per), text("a number is a tensor group", 13, muted=True), gap=8), "Tensor groups inside nodes")),
        Step("Strangers",
            "The same groups, dealt across the nodes. Every GPU sends exactly as many bytes as before; only the "
            "wires differ.", svg(column(nodes(across, per), text("a number is a tensor group", 13, muted=True), gap=8), "Tensor groups across nodes")),
        Step("The same volume, another time",
            f"Both send {amount(near.volume)} per GPU and step. Inside it takes "
            f"**{units.seconds(near.seconds)}**, across **{units.seconds(far.seconds)}**: "
            f"{units.significant(far.seconds / near.seconds)} times as long. " + _why(near, far), svg(_two(near, far), "Time inside and across")),
        _cliff_step(cluster, size),
        Step("Two choices",
            f"Least volume: {by_volume.name}, {amount(by_volume.volume)} in {units.seconds(by_volume.seconds)}. "
            "Bytes alone cannot tell groups inside from groups across, so the slower one is what they may give. "
            f"Least time, if its weights fit (lesson 1): **{by_time.name}**, {amount(by_time.volume)} in {units.seconds(by_time.seconds)}. " + ("Counting bytes alone would choose wrongly here." if by_volume != by_time else "Here both agree; try another batch."), _table(found, by_volume, by_time, 2 * learner.graph.num_params)),
    )  # fmt: skip
    numbers = {
        "near_s": near.seconds,
        "far_s": far.seconds,
        "volume": near.volume,
        "far_volume": far.volume,
        "size": size,
        "by_volume_s": by_volume.seconds,
        "by_time_s": by_time.seconds,
        "cliff_last": _cliff(cluster, size)[-1][2],
        "batch": batch,
        "ratio": far.seconds / near.seconds,
    }
    return Scene(steps, numbers, reveal=2, note=note)


def _cliff(cluster: Cluster, size: int) -> list[tuple[int, bool, float]]:
    """(GPUs, whether they are neighbours, seconds) of one all_reduce, all groups of that size at work."""
    n = cluster.num_gpus
    found = []
    for t in [t for t in range(2, n + 1) if n % t == 0]:
        near = axis_links(cluster, DeviceMesh(("data", "tensor"), (n // t, t)))[1]
        found.append((t, True, collective_time("all_reduce", size, near)[0]))
        if t < n:
            far = axis_links(cluster, DeviceMesh(("tensor", "data"), (t, n // t)))[0]
            found.append((t, False, collective_time("all_reduce", size, far)[0]))
    return found


def _cliff_step(cluster: Cluster, size: int) -> Step:
    found, per = _cliff(cluster, size), cluster.levels[0].size
    items = []
    for t, near, seconds in found:
        out = "" if near and t <= per else "leaves the node"
        items.append(Bar(f"{t} {'neighbours' if near else 'strangers'}", (Part("time", seconds, COMMUNICATION),), out))
    near_s, far_s = (next(s for t, near, s in found if t == 2 and near is want) for want in (True, False))
    says = (
        f"One all_reduce of {amount(size)}, all groups at work at once. Two neighbours take {units.seconds(near_s)}, two "
        f"strangers {units.seconds(far_s)}: {units.significant(far_s / near_s, 2)} times as long for the same bytes."
    )
    return Step("The cliff", says, svg(bars(items, units.seconds), "All_reduce time by group size and place"))


def _two(near: Option, far: Option) -> Box:
    made = []
    for name, o in (("groups inside", near), ("groups across", far)):
        grads = Part("gradients of the data groups", o.data_s, COMPUTE, True)
        made.append(Bar(name, (Part("tensor groups", o.tensor_s, COMMUNICATION), grads)))
    return bars(made, units.seconds)


def _table(found: list[Option], by_volume: Option, by_time: Option, weights: int) -> str:
    rows = []
    for o in found:
        marks = [w for w, b in (("least volume", by_volume), ("least time", by_time)) if b == o]
        rows.append(
            (
                o.name,
                units.memory(weights / o.tensor),
                amount(o.volume),
                units.seconds(o.tensor_s),
                units.seconds(o.data_s),
                units.seconds(o.seconds),
                ", ".join(marks),
            )
        )
    return table(
        ("mesh", "weights per GPU", "sent per GPU", "tensor groups", "gradients", "together", ""),
        rows,
        found.index(by_time),
    )


def question(learner: Learner, values: Values) -> Question:
    """How much longer does it take with the groups across?"""
    learner, _ = learner.transformer()
    per = two_nodes(learner.cluster).levels[0].size
    near, far = _both(options(learner, int(values["batch"])), per)
    ratio = far.seconds / near.seconds
    fact = f"{units.seconds(near.seconds)} inside, {units.seconds(far.seconds)} across. {_why(near, far)}"
    names = ("Longer, by more than a tenth", "About as long: the bytes are the same", "Shorter, by more than a tenth")
    right = 0 if ratio > 1.1 else 2 if ratio < 1 / 1.1 else 1
    wires = "The bytes are the same, the wires are not: what crosses between nodes shares the slower links. "
    slips = ("They do not take longer by so much. ", wires, "They do not take less time. ")
    whys = tuple(fact if i == right else slip + fact for i, slip in enumerate(slips))
    rows = tuple(zip(names, whys, strict=True))
    return asked(

            f"Both layouts send the same bytes, in a batch of {values['batch']}. With the groups across the "
            "nodes, all communication takes",
        rows[right], tuple(r for i, r in enumerate(rows) if i != right), right,
    )  # fmt: skip


def _both(found: list[Option], per: int) -> tuple[Option, Option]:
    """Tensor groups as large as a node: inside the nodes, and across them."""
    near, far = (o for o in found if o.tensor == per)
    return near, far


def _why(near: Option, far: Option) -> str:
    """Which part decides."""
    lost, won = far.tensor_s - near.tensor_s, near.data_s - far.data_s
    sums = (
        f"The layers' sums lose {units.seconds(lost)} by leaving the node, the gradients' sums win "
        f"{units.seconds(won)} by staying."
    )
    return sums if lost > won else sums + " With so small a batch the gradients are the larger part."


LESSON = Lesson(
    10, "Topology", "Bytes are not time: it matters over which wires they go.",
    (
        "TAP counts bytes. TAPS, its successor, asks which links carry them. Here are two nodes of your cluster "
        "with your model's layers.",),
    (
        ("Mesh", "the GPUs as a grid, e.g. 2 data × 8 tensor; neighbours on the last axis are neighbours in a node"),
        ("Tensor group", "the devices that share the weights of a layer; the groups share the batch, as in data parallelism"),
        ("Volume", "the bytes that each GPU sends in one step"),
    ),
    (Control("batch", "Batch, samples in one step", BATCHES, 16, kind="slider"),),
    scene, question, CODE, ("topology", "Your cluster and the load on its links"), uses_model=True,
    focus=links.same_batch_of_layers,
)  # fmt: skip
