"""10. Topology: the same volume on NVLink and between nodes; volume's choice against topology's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import Drawing, amount, column, svg, table, text
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.stacks import megatron, smallest
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars, nodes
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh, load_cluster
from planner_core.cost.communication import AxisLink, axis_links, collective_time, wire_bytes
from planner_core.planning.analysis import MOST_DOUBT

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

size = 16 // 2 * 4096 * 4096 * 2  # bytes that a layer sums: 8 samples of Llama-3-8B for each tensor group, in bf16
gradients = 4 * 8_030_261_248 / 8  # bytes of a GPU's gradients, in fp32
volume = 4 * 32 * 2 * 7 / 8 * size + 2 * 1 / 2 * gradients  # four sums in each of 32 layers, and one of the gradients
print(f"volume {volume / 1e9:.1f} GB per GPU and step, wherever the groups lie")
"""


@dataclass(frozen=True, slots=True)
class Option:
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
    """The learner's cluster if it has several nodes, else two of its nodes on the standard network."""
    if len(cluster.levels) > 1:
        levels = (cluster.levels[0], replace(cluster.levels[1], size=2))
        return replace(cluster, levels=levels)
    return replace(cluster, levels=(cluster.levels[0], load_cluster("2x8-h100").levels[1]))


def grad_bytes(learner: Learner) -> int:
    """Bytes of all gradients: in mixed precision 4 each, as in lesson 1."""
    return learner.graph.num_params * learner.planner.workload.kept_item(2)


def peak(learner: Learner, samples: int, tensor: int) -> int | None:
    """Bytes at the fullest moment of one of `tensor` GPUs that take `samples` one after the other and sum their gradients; None where the
    heads do not divide."""
    request = replace(learner.request, batch=samples, accumulate=samples, mesh=None, recompute="none", dtype="bfloat16")
    one = Learner(request, learner.load)
    found = megatron(one, tensor) if tensor > 1 else smallest(one, 1)
    return found["peak"] if found else None


@lru_cache(maxsize=64)
def options(learner: Learner, batch: int) -> tuple[Option, ...]:
    """Every data × tensor mesh of two nodes, with Megatron-LM's four all_reduces a layer and one of all gradients."""
    cluster, layer = two_nodes(learner.cluster), learner.layer()
    n, seq = cluster.num_gpus, learner.planner.workload.seq
    weights = grad_bytes(learner)
    found = []
    for tensor in [t for t in range(1, n + 1) if n % t == 0]:
        data = n // tensor
        if batch % data:
            continue  # a sample is not cut in two
        needs = peak(learner, batch // data, tensor)
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
            g_time = collective_time("all_reduce", grads, links["data"])[0]
            found.append(Option(data, tensor, inside, volume, 4 * layer.layers * t_time, g_time, needs))
    return tuple(found)


def choices(learner: Learner, batch: int) -> tuple[Option, Option]:
    """The option with the least volume (of equal ones the slower, since volume cannot tell), and with the least time."""
    found = options(learner, batch)
    found = tuple(o for o in found if o.peak is not None) or found  # where heads divide
    return min(found, key=lambda o: (o.volume, -o.seconds)), min(found, key=lambda o: o.seconds)


def quickest_that_fits(learner: Learner, batch: int) -> Option | None:
    """The option with the least time of those that a GPU has room for."""
    room = learner.cluster.gpu.memory_bytes
    return min((o for o in options(learner, batch) if o.peak and o.peak <= room), key=lambda o: o.seconds, default=None)


def tied(first: Option, others: Sequence[Option]) -> list[Option]:
    """`first` and those of `others` that no prediction tells from it, by the planner's rule for whole steps, which have the same compute
    on top."""
    close = [o for o in others if o != first and first.seconds <= o.seconds <= (1 + MOST_DOUBT) * first.seconds]
    return [first, *sorted(close, key=lambda o: o.seconds)]


def _named(found: Sequence[Option]) -> str:
    """`8 data × 2 tensor (124 ms) ≈ 16 data × 1 tensor (126 ms)`."""
    return " ≈ ".join(f"{o.name} ({units.seconds(o.seconds)})" for o in found)


def levels(cluster: Cluster) -> list[tuple[str, float, float, float]]:
    """For a sum over all GPUs: each level's name, the share of the tensor that a GPU sends there, the level's bytes per second, and the
    seconds of a byte of tensor."""
    link: AxisLink = axis_links(cluster, DeviceMesh(("data",), (cluster.num_gpus,)))[0]
    found, inside = [], 1
    for stage in link.stages:
        members = stage.members if stage.inside else link.size // inside
        share = 2 * (members - 1) / members / inside * (link.in_switch if stage.inside else 1.0)
        found.append((stage.level, share, stage.bytes_per_s, share / stage.bytes_per_s))
        inside *= stage.members
    return found


def scene(learner: Learner, values: Values) -> Scene:
    """Two layouts of equal volume, the cliff, and both choices."""
    learner, note = learner.transformer()
    batch, cluster = int(values["batch"]), two_nodes(learner.cluster)
    per, n = cluster.levels[0].size, cluster.num_gpus
    found = options(learner, batch)
    near, far = _both(found, per)
    by_volume, by_time = choices(learner, batch)
    fitting = quickest_that_fits(learner, batch)
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
            f"{units.significant(far.seconds / near.seconds)} times as long{_even(near, far)}. " + _why(near, far), svg(_two(near, far), "Time inside and across")),
        _cliff_step(cluster, size),
        Step("Two choices", _choices_say(learner, batch, by_volume, by_time, fitting), _table(found, by_volume, by_time, fitting, cluster.gpu.memory_bytes)),
        *_from_the_links(cluster, grad_bytes(learner)),
    )  # fmt: skip
    numbers = {
        "near_s": near.seconds, "far_s": far.seconds, "volume": near.volume, "far_volume": far.volume, "size": size,
        "by_volume_s": by_volume.seconds, "by_time_s": by_time.seconds, "cliff_last": _cliff(cluster, size)[-1][2],
        "batch": batch, "ratio": far.seconds / near.seconds, "grads": grad_bytes(learner), "fitting_s": fitting.seconds if fitting else 0.0,
    }  # fmt: skip
    return Scene(steps, numbers, reveal=2, note=" ".join(filter(None, (note, *_notes(learner, near)))))


def _notes(learner: Learner, near: Option) -> list[str]:
    """What is not as the learner's model and cluster have it."""
    found = []
    if near.peak is None:
        found.append(
            f"The heads of {learner.name} do not divide by {near.tensor} (lesson 6): groups of that size show the wires only."
        )
    if len(learner.cluster.levels) == 1:
        found.append("Your cluster is one node. Here two of it are joined by the network of a standard cluster.")
    return found


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
        items.append(
            StackedBar(f"{t} {'neighbours' if near else 'strangers'}", (BarPiece("time", seconds, COMMUNICATION),), out)
        )
    near_s, far_s = (next(s for t, near, s in found if t == 2 and near is want) for want in (True, False))
    says = (
        f"One all_reduce of {amount(size)}, all groups at work at once. Two neighbours take {units.seconds(near_s)}, two "
        f"strangers {units.seconds(far_s)}: {units.significant(far_s / near_s, 2)} times as long for the same bytes."
    )
    sizes = {t: s for t, near, s in found if near and t <= per}
    if sizes.get(per, 0.0) < sizes.get(per // 2, 0.0):
        says += f" All {per} of a node take less than {per // 2} of them: more GPUs fill the links better, and the switch adds their terms (lesson 9)."
    return Step("The cliff", says, svg(bars(items, units.seconds), "All_reduce time by group size and place"))


def _two(near: Option, far: Option) -> Drawing:
    made = []
    for name, o in (("groups inside", near), ("groups across", far)):
        grads = BarPiece("gradients of the data groups", o.data_s, COMPUTE, True)
        made.append(StackedBar(name, (BarPiece("tensor groups", o.tensor_s, COMMUNICATION), grads)))
    return bars(made, units.seconds)


def _choices_say(learner: Learner, batch: int, by_volume: Option, by_time: Option, fitting: Option | None) -> str:
    """Which layout bytes would take, which time, and which one can run."""
    room = learner.cluster.gpu.memory_bytes
    can = [o for o in options(learner, batch) if o.peak]
    says = (
        f"Least volume: {by_volume.name}, {amount(by_volume.volume)} in {units.seconds(by_volume.seconds)}. Groups inside a node and groups across send "
        f"the same bytes, so who counts bytes may get the slower of the two. Least time: {_named(tied(by_time, can))}. "
    )
    if len(tied(by_time, can)) > 1:
        says += f"The sign ≈ marks a tie: less than {units.percent(MOST_DOUBT)} more, which predictions of such layouts do not tell apart (lesson 15). "
    each = "But does it fit? The fullest moment is that of lesson 1, with the samples of each group taken one after the other. "
    if fitting is None:
        return says + each + "**None fits a GPU**: lesson 16 deals out what every group keeps."
    if fitting == by_time:
        return says + each + f"{by_time.name} fits."
    return (
        says
        + each
        + f"{by_time.name} does not fit. The quickest that fits: **{_named(tied(fitting, [o for o in can if o.peak and o.peak <= room]))}**."
    )


def _from_the_links(cluster: Cluster, grads: int) -> list[Step]:
    """Where the time of the largest sum comes from."""
    found = levels(cluster)
    if len(found) < 2:
        return []
    slowest = max(range(len(found)), key=lambda i: found[i][3])
    total = collective_time("all_reduce", grads, axis_links(cluster, DeviceMesh(("data",), (cluster.num_gpus,)))[0])[0]
    rows = [
        (
            name,
            f"{share:.3g}",
            amount(share * grads),
            f"{units.significant(rate / 1e9)} GB/s",
            units.seconds(each * grads),
        )
        for name, share, rate, each in found
    ]
    fast = units.significant(cluster.levels[0].bytes_per_s / 1e9)
    filled = (
        ""
        if rows[0][3] == f"{fast} GB/s"
        else f"A group of {cluster.levels[0].size} fills {rows[0][3]} of the {fast} there. "
    )
    says = (
        f"All {cluster.num_gpus} GPUs sum the gradients of the whole model, {amount(grads)}, as {cluster.num_gpus} data × 1 tensor does. First the GPUs of a node sum, each "
        f"a part of its own; then only these parts, 1/{cluster.levels[0].size} of the tensor per GPU, cross to the other nodes. Both go on at the same time, piece by "
        f"piece, so the longer counts: {rows[slowest][0]}. {filled}With the latencies the sum takes **{units.seconds(total)}**. Where switches add the terms "
        "(lesson 9), a GPU sends less inside the node than in a ring; the table before counts bytes as in a ring."
    )
    return [
        Step("Where a time comes from", says, table(("over", "of the tensor", "per GPU", "at", "takes"), rows, slowest))
    ]


def _table(found: tuple[Option, ...], by_volume: Option, by_time: Option, fitting: Option | None, room: float) -> str:
    rows = []
    for o in found:
        named = (("least volume", by_volume), ("least time", by_time), ("quickest that fits", fitting))
        needs = "heads do not divide"
        if o.peak:
            needs = units.memory(o.peak) + (" fits" if o.peak <= room else " does not fit")
        rows.append(
            (
                o.name,
                ", ".join(w for w, b in named if b == o),
                needs,
                amount(o.volume),
                units.seconds(o.tensor_s),
                units.seconds(o.data_s),
                units.seconds(o.seconds),
            )
        )
    head = ("mesh", "", "fullest moment", "sent per GPU", "tensor groups", "gradients", "together")
    return table(head, rows, found.index(fitting or by_time))


def question(learner: Learner, values: Values) -> Question:
    """How long do the bytes take that cross the nodes?"""
    learner, _ = learner.transformer()
    cluster, layer = two_nodes(learner.cluster), learner.layer()
    per, inner, outer = cluster.levels[0].size, cluster.levels[0], cluster.levels[1]
    near, far = _both(options(learner, int(values["batch"])), per)
    here, sums, rate = per // 2, 4 * layer.layers, outer.bytes_per_s / per
    whole = sums * (int(values["batch"]) // near.data * learner.planner.workload.seq * layer.hidden * 2)
    part, sent = whole / here, near.volume - wire_bytes("all_reduce", grad_bytes(learner) // near.tensor, near.data)
    shown, told = f"{units.significant(rate / 1e9)} GB/s", f"{units.significant(whole / 1e9, 4)} GB"
    why = (
        f"A part is {told} / {here} = {amount(part)}, and an all_reduce of two sends 2 · 1/2 = 1 times that: {amount(part)} ÷ {shown} = {units.seconds(part / rate)}. "
        f"With the latencies of {sums} sums, and what protocols add, they take {units.seconds(far.tensor_s)}; inside a node the same sums take {units.seconds(near.tensor_s)}. "
        f"The gradients have it the other way round. In all: {units.seconds(near.seconds)} inside, {units.seconds(far.seconds)} across."
    )
    wrong = (
        (whole / rate, f"That is for whole tensors. The {here} GPUs of a node share them: each sends its part only."),
        (sent / rate, "That is all that a GPU sends, as if all of it crossed. Most goes to GPUs of its own node."),
        (part / 2 / rate, "In a group of two each sends half of the tensor twice: once while sums are made, once while they go round."),
        (2 * part / rate, "An all_reduce of n sends 2 (n − 1) / n of the tensor (lesson 4). What is that for two?"),
        (part / outer.bytes_per_s, f"A node's rate is shared by its {per} GPUs, which all send at once."),
        (part / inner.bytes_per_s, f"That is {inner.name}'s rate. These parts leave the node."),
        (part / per / rate, f"Each GPU holds 1/{here} of every tensor: those of its group in its node share it, not all of the group."),
    )  # fmt: skip
    ask = (
        f"With the groups across, a group has {here} GPU{'s' * (here > 1)} in each node. In a step of {values['batch']} samples it sums {sums} tensors, {told} in all (2 bytes a number). First "
        f"those in a node sum, and each ends with its part of the sums, 1/{here}. Then it sums this part with its like in the other node, by an all_reduce of two. How long do "
        f"the bytes take that one GPU sends over {outer.name}, at {shown}?"
    )
    return typed(
        ask,
        "ms",
        (1e3 * part / rate, why),
        tuple((1e3 * s, w) for s, w in wrong),
        lambda value: units.seconds(value / 1e3),
    )


def _both(found: tuple[Option, ...], per: int) -> tuple[Option, Option]:
    """Tensor groups as large as a node: inside the nodes, and across them."""
    near, far = (o for o in found if o.tensor == per)
    return near, far


def _even(near: Option, far: Option) -> str:
    """Words behind the two times if they are a tie; else none."""
    ratio = far.seconds / near.seconds
    return ", which is a tie" if 1 / (1 + MOST_DOUBT) <= ratio <= 1 + MOST_DOUBT else ""


def _why(near: Option, far: Option) -> str:
    """Which part decides."""
    lost, won = far.tensor_s - near.tensor_s, near.data_s - far.data_s
    sums = (
        f"The layers' sums lose {units.seconds(lost)} by leaving the node, the gradients' sums win "
        f"{units.seconds(won)} by staying."
    )
    return sums if lost > won else sums + " With so small a batch the gradients are the larger part."


LESSON = Lesson(
    10, "topology", "Topology", "Two nodes of GPUs, and two ways to place the groups that share a layer.",
    (
        "TAP counts bytes. TAPS, its successor, asks which links carry them. Here are two nodes of your cluster "
        "with your model's layers.",),
    (
        ("Mesh", "the GPUs as a grid, e.g. 2 data × 8 tensor; neighbours on the last axis are neighbours in a node"),
        ("Axis", "one direction of the mesh; a collective runs along one axis"),
        ("Tensor group", "the devices that share the weights of a layer; the groups share the batch, as in data parallelism"),
        ("Volume", "the bytes that each GPU sends in one step"),
    ),
    (Control("batch", "Batch, samples in one step", BATCHES, 16, kind="slider", step=3),),
    scene, question, CODE, ("topology", "Your cluster and the load on its links"), uses_model=True,
    focus=links.same_batch_of_layers,
)  # fmt: skip
