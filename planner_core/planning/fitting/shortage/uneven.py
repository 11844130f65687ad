"""What the GPUs of a mesh do not share evenly: the samples of a step, a model's weights, its vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner_core.core import (
    STANDIN_LOSS,
    Graph,
    Note,
    NoteKind,
    Plan,
    Sentence,
    Shard,
    Value,
    named,
)
from planner_core.cost import DATA, IDLE, SHARD, axis_roles, block_of
from planner_core.models import VOCABULARY
from planner_core.planning.methods.layout import parse_layout
from planner_core.planning.planner import Planner

MOSTLY = 0.5
"""An axis is called idle if less than this share of the weights' elements is sharded on it."""


@dataclass(frozen=True, slots=True)
class UnevenBatch:
    """A number of samples that the GPUs cannot share evenly, and the nearest numbers that they can: `below` is 0 if there is none."""

    batch: int
    gpus: int
    below: int
    above: int

    @property
    def note(self) -> Note:
        """The same as a note."""
        near = f"{self.below:,} or {self.above:,} do" if self.below else f"{self.above:,} do"
        sentence = f"{self.batch:,} samples do not divide over {self.gpus:,} GPUs; {near}"
        return Note(sentence, NoteKind.UNEVEN_BATCH)


def find_uneven_batch(planner: Planner) -> UnevenBatch | None:
    """Return the nearest numbers of samples on both sides that all GPUs can share evenly; None if the request's number is one, or if there
    are fewer samples than GPUs, which share each sample then."""
    batch, gpus = planner.workload.batch, planner.cluster.num_gpus
    below = batch // gpus * gpus
    return UnevenBatch(batch, gpus, below, below + gpus) if batch > gpus and below != batch else None


def note_small_batch(batch: int, num_gpus: int, accumulate: int) -> tuple[Note, ...]:
    """Return a note that a step has fewer samples than GPUs, with the batch that gives each GPU a sample of each of `accumulate`
    micro-batches."""
    if batch >= num_gpus:
        return ()
    few = f"{batch:,} sample{'s' * (batch > 1)} a step give each of {num_gpus:,} GPUs less than a sample; "
    return (Note(Sentence(few, named("batch", num_gpus * accumulate), " would give each one")),)


def note_repeated_work(plan: Plan, where: str = "") -> tuple[Note, ...]:
    """Return a message if GPUs of a plan do the same work, since the samples of a step cannot be dealt out to them. `where`: "in ... ",
    which plan that is, for a reader to whom the note is not shown as the plan's own."""
    mesh, batch, alone = plan.mesh, plan.workload.batch, replicated_gpus(plan)
    if alone == 1 or batch % mesh.num_devices == 0:
        return ()
    more = -(-batch // mesh.num_devices) * mesh.num_devices
    sentence = Sentence(
        f"{where}groups of {alone:,} GPUs do the same work, since {batch:,} samples cannot be dealt out to them: ",
        named("batch", more),
        f" would use all {mesh.num_devices:,} GPUs",
    )
    return (Note(sentence, NoteKind.REPEATED_WORK),)


def replicated_gpus(plan: Plan) -> int:
    """Count the GPUs of a group that do the same work."""
    return math.prod(
        n
        for axis, (role, n) in enumerate(zip(axis_roles(plan), plan.mesh.axis_sizes, strict=True))
        if role == IDLE or (role in (DATA, SHARD) and not _shares_work(plan, axis))
    )


def _shares_work(plan: Plan, axis: int) -> bool:
    """Return whether most operators work on a part of their inputs on an axis.

    Example: 17 samples on 2 x 8 GPUs. No axis has samples of its own, but all layers except for attention share the tokens on both.
    """
    if axis in plan.data_axes:
        return True
    shared = calls = 0
    for block in plan.blocks.values():
        for site in block.sites.values():
            calls += len(block.prefixes)
            shared += len(block.prefixes) * any(isinstance(e.dst.forward[axis], Shard) for e in site.inputs)
    return 2 * shared > calls


def note_idle_gpus(plan: Plan, graph: Graph) -> tuple[Note, ...]:
    """Return a note about a plan most of whose GPUs hold the same weights."""
    idle = idle_axes(plan, graph)
    if not idle:
        return ()
    gpus, sizes = plan.mesh.num_devices, " x ".join(f"{plan.mesh.axis_sizes[a]:,}" for a in idle)
    # Most sizes of models divide by powers of two: of 96 GPUs 64 would share the weights.
    even = 2 ** int(math.log2(gpus))
    better = f"; {even:,} GPUs would" if even != gpus else ""
    sentence = (
        f"most of the {gpus:,} GPUs hold the same weights: batch {plan.workload.batch:,} and the sizes of this model do not divide "
        f"by {sizes}{better}"
    )
    return (Note(sentence, NoteKind.IDLE_GPUS),)


def idle_axes(plan: Plan, graph: Graph) -> list[int]:
    """Return the mesh axes of more than one device on which most of the weights are not sharded."""
    total, split = 0, [0] * len(plan.mesh.axis_sizes)
    for label, plans in plan.blocks.items():
        for value in block_of(graph, label).values:
            if value.kind == "parameter" and value.name in plans.params:
                elements = math.prod(value.meta.shape) * len(plans.prefixes)
                total += elements
                for axis, placement in enumerate(plans.params[value.name].stored):
                    split[axis] += elements * isinstance(placement, Shard)
    return [a for a, n in enumerate(plan.mesh.axis_sizes) if n > 1 and split[a] < MOSTLY * total]


def note_whole_batch(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Return a sentence about a model without a loss of its own whose plan gives an operator the samples of all ranks.

    A loss is one number, whoever computes it. Any other result would be that of all samples, where the caller brought a rank's own, so a
    run refuses such a call (`runtime.bound_call`). Example: an embedding that is split by its width looks up the tokens of all ranks.
    """
    if graph.loss != STANDIN_LOSS or plan.pipeline is not None:
        return ()
    axes = [a for a in plan.data_axes if plan.mesh.axis_sizes[a] > 1]
    samples = {v for v, x in enumerate(graph.top.values) if _has_samples(x, graph)}
    sites = plan.blocks[""].sites
    whole = [
        op.name
        for op in graph.top.ops
        for v, edge in zip(op.inputs, sites[op.name].inputs, strict=True)
        if v in samples and any(edge.dst.forward[a] != Shard(0) for a in axes)
    ]
    if not whole:
        return ()
    return (
        f"{whole[0]} takes the samples of all ranks, and the model returns no loss: call it with the whole batch on every rank "
        "(global_batch=True), or let forward compute the loss",
    )


def _has_samples(value: Value, graph: Graph) -> bool:
    """Return whether a value is an input, with the samples of the planned batch in its first dim. Only inputs are constants with a name."""
    return value.kind == "constant" and bool(value.name) and value.meta.shape[:1] == (graph.workload["batch"],)


def note_uneven_vocabulary(layout: str | None, graph: Graph) -> tuple[str, ...]:
    """Return a sentence about a vocabulary that the tensor-parallel ranks of the stated layout do not share evenly: tools pad it."""
    words, tp = graph.config.get(VOCABULARY), 1 if layout is None else parse_layout(layout).tp
    if not isinstance(words, int) or words % tp == 0:
        return ()
    note = Sentence(
        f"the vocabulary of {words} words does not divide over tp={tp}, so no plan here splits it; tools pad it to ",
        f"{-(-words // tp) * tp}, as price ",
        named("layout", layout),
        " does, and as ",
        named("vocab_multiple", tp),
        " does here",
    )
    return (note,)
