"""10. Topology: the same volume on NVLink and between nodes; volume's choice against topology's choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from explorer import units
from explorer.learn.charts import Bar, Part, bars, nodes
from explorer.learn.draw import column, svg, table, text
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.palette import COMMUNICATION
from planner_core.cluster import Cluster, load_cluster
from planner_core.collectives import axis_links, collective_time, wire_bytes
from planner_core.mesh import DeviceMesh

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CODE = '''\
import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)  # 2 nodes of 8
mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("data", "tensor"))
print(dist.get_process_group_ranks(mesh.get_group("tensor")))  # 0..7: one node, NVLink
print(dist.get_process_group_ranks(mesh.get_group("data")))  # 0 and 8: between nodes
dist.destroy_process_group()
'''


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
        levels = cluster.levels[:1] + (replace(cluster.levels[1], size=2),)
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
        for inside in (True, False) if 1 < tensor < n else (True,):
            sizes, names = ((data, tensor), ("data", "tensor")) if inside else ((tensor, data), ("tensor", "data"))
            links = dict(zip(names, axis_links(cluster, DeviceMesh(names, sizes)), strict=True))
            activation = int(batch / data * seq * layer.hidden * 2)
            per_layer, t_time = wire_bytes("all_reduce", activation, tensor), collective_time("all_reduce", activation, links["tensor"])[0]
            grads = weights // tensor
            volume = 4 * layer.layers * per_layer + wire_bytes("all_reduce", grads, data)
            found.append(Option(data, tensor, inside, volume, 4 * layer.layers * t_time, collective_time("all_reduce", grads, links["data"])[0]))
    return found


def choices(learner: Learner, batch: int) -> tuple[Option, Option]:
    """The option with the least volume (of equal ones the slower, since volume cannot tell), and with the least time."""
    found = [o for o in options(learner, batch) if o.tensor > 1]
    return min(found, key=lambda o: (o.volume, -o.seconds)), min(found, key=lambda o: o.seconds)


def scene(learner: Learner, values: Values) -> Scene:
    """Two layouts of equal volume, the cliff, and both choices."""
    learner, note = learner.transformer()
    batch, cluster = int(values["batch"]), two_nodes(learner.cluster)
    per, n = cluster.levels[0].size, cluster.num_gpus
    found = options(learner, batch)
    near = next(o for o in found if o.tensor == per and o.inside)
    far = next(o for o in found if o.tensor == per and not o.inside)
    by_volume, by_time = choices(learner, batch)
    inner, outer = cluster.levels[0], cluster.levels[1]
    links = f"Inside a node {inner.name} gives each GPU {units.significant(inner.bytes_per_s / 1e9)} GB/s; {outer.name} gives a whole node {units.significant(outer.bytes_per_s / 1e9)} GB/s, {units.significant(outer.bytes_per_s / per / 1e9)} per GPU."
    inside, across = [r // per for r in range(n)], [r % (n // per) for r in range(n)]
    size = int(batch / near.data * learner.planner.workload.seq * learner.layer().hidden * 2)
    cliff = _cliff(cluster, size)
    steps = (
        Step("Neighbours", f"Two nodes. Equal numbers form a tensor group of {per}, and each group lies inside one node. {links}", svg(column(nodes(inside, per), text("a number is a tensor group", 13, muted=True), gap=8), "Tensor groups inside nodes")),
        Step("Strangers", "The same groups, dealt across the nodes. Every GPU sends exactly as many bytes as before; only the wires differ.", svg(column(nodes(across, per), text("a number is a tensor group", 13, muted=True), gap=8), "Tensor groups across nodes")),
        Step("The same volume, another time", f"Both send {units.traffic(near.volume)} per GPU and step. Inside it takes **{units.seconds(near.seconds)}**, across **{units.seconds(far.seconds)}**: {units.significant(far.seconds / near.seconds)} times as long.", svg(_two(near, far), "Time inside and across")),
        Step("The cliff", f"One all_reduce of {units.traffic(size)}, by how many neighbours take part. Up to {per} it stays in the node.", svg(bars([Bar(f"{t} GPUs", (Part("time", s, COMMUNICATION),), "leaves the node" if t > per else "") for t, s in cliff], units.seconds), "All_reduce time by group size")),
        Step("Two choices", f"Least volume is {by_volume.name} ({units.traffic(by_volume.volume)}, but {units.seconds(by_volume.seconds)}). Least time is **{by_time.name}** ({units.traffic(by_time.volume)}, {units.seconds(by_time.seconds)}). " + ("Counting bytes alone would choose wrongly here." if by_volume != by_time else "Here both agree; try another batch."), _table(found, by_volume, by_time)),
    )  # fmt: skip
    numbers = {"near_s": near.seconds, "far_s": far.seconds, "volume": near.volume, "far_volume": far.volume, "size": size, "by_volume_s": by_volume.seconds, "by_time_s": by_time.seconds, "cliff_last": cliff[-1][1], "batch": batch, "ratio": far.seconds / near.seconds}
    return Scene(steps, numbers, reveal=2, note=note)


def _cliff(cluster: Cluster, size: int) -> list[tuple[int, float]]:
    n = cluster.num_gpus
    found = []
    for t in [t for t in range(2, n + 1) if n % t == 0]:
        link = axis_links(cluster, DeviceMesh(("data", "tensor"), (n // t, t)))[1]
        found.append((t, collective_time("all_reduce", size, link)[0]))
    return found


def _two(near: Option, far: Option) -> object:
    make = lambda o: (Part("tensor groups", o.tensor_s, COMMUNICATION), Part("gradients of the data groups", o.data_s, "#0072B2", True))  # noqa: E731
    return bars([Bar("groups inside", make(near)), Bar("groups across", make(far))], units.seconds)


def _table(found: list[Option], by_volume: Option, by_time: Option) -> str:
    rows = []
    for o in found:
        marks = [w for w, b in (("least volume", by_volume), ("least time", by_time)) if b == o]
        rows.append((o.name, units.traffic(o.volume), units.seconds(o.tensor_s), units.seconds(o.data_s), units.seconds(o.seconds), ", ".join(marks)))
    return table(("mesh", "sent per GPU", "tensor", "data", "time", ""), rows, found.index(by_time))


def question(learner: Learner, values: Values) -> Question:
    """How much slower are groups across nodes?"""
    numbers = scene(learner, values).numbers
    ratio = numbers["ratio"]
    shown = f"{units.significant(ratio, 2)} times as long"
    fact = f"{units.seconds(numbers['near_s'])} inside, {units.seconds(numbers['far_s'])} across."
    return asked(
        "Both layouts send the same bytes. How long does all communication take with the groups across the nodes?",
        (shown, fact),
        (
            ("As long: the bytes are the same", f"The bytes are, the wires are not: every ring now crosses the links between nodes, and shares them with the others. {fact}"),
            (f"{units.significant(ratio * 10, 2)} times as long", fact),
            ("Half as long, two nodes help", f"The second node brings no faster links to a group that is split over both. {fact}"),
        ), 1,
    )  # fmt: skip


LESSON = Lesson(
    10, "Topology", "Bytes are not time: it matters over which wires they go.",
    ("TAP counts bytes. TAPS, its successor, asks which links carry them. Here are two nodes of your cluster with your model's layers.",),
    (
        ("Node", "one machine; its GPUs are joined by fast links such as NVLink"),
        ("Mesh", "the GPUs as a grid, e.g. 2 data × 8 tensor; neighbours on the last axis are neighbours in a node"),
        ("Volume", "the bytes that each GPU sends in one step"),
    ),
    (Control("batch", "Batch, samples in one step", BATCHES, 16, kind="slider"),),
    scene, question, CODE, ("topology", "Your cluster and the load on its links"), uses_model=True,
)  # fmt: skip
