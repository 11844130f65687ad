"""Why no plan fits: there is too little memory, or the number of GPUs does not divide the model's sizes; and what memory is not planned.

The memory of a plan holds what is computed from weights. Inputs, masks and positions are small beside it in most models. Some make
more of them: BROS makes a sinusoid of 192 numbers for each pair of tokens. `note_uncounted_memory` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner_core.core import (
    ITEM_BYTES,
    STANDIN_LOSS,
    DeviceMesh,
    Graph,
    NoPlanFits,
    Note,
    NoteKind,
    Op,
    Plan,
    Sentence,
    Shard,
    Term,
    Value,
    local_shape,
    memory_amount,
    named,
    root,
    time_amount,
)
from planner_core.cost import DATA, IDLE, SHARD, axis_roles, block_of, cost_model_of
from planner_core.cost.memory import PeakTensor, tensors_at_peak, weight_bytes
from planner_core.models import VOCABULARY
from planner_core.ops import operator
from planner_core.planning.methods.layout import parse_layout
from planner_core.planning.methods.registry import EXACT, METHODS
from planner_core.planning.planner import Planner, candidate_meshes
from planner_core.search import Answer, memory_bytes
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

MOSTLY = 0.5
"""An axis is called idle if less than this share of the weights' elements is sharded on it."""
BUFFERS, NEARLY = 0.02, 1.1
"""If the peak of the plan of least memory is above its sum by more than the share BUFFERS, and its sum is at most NEARLY of the budget,
plans without gathered weights are looked at."""
MIN_SHARE, MIN_BYTES = 0.02, 2**24
"""Tensors that are not in the planned memory are named from this share of a plan's peak on, and from so many bytes on."""


def least_state_bytes(planner: Planner) -> int:
    """Weights, gradients and states of a GPU if all GPUs share them evenly: no plan holds less, whatever its mesh and micro-batches."""
    graph, total = planner.graph, 0
    repeated = [(graph.blocks[name], times) for name, times in graph.num_repeats.items()]
    for block, times in ((graph.top, 1), *repeated):
        for i, v in enumerate(block.values):
            # A weight among a block's inputs is the caller's, where it counts once for all copies that share it.
            if v.kind == "parameter" and i not in block.inputs:
                item = weight_bytes(ITEM_BYTES[v.meta.dtype], v.grad, planner.workload)
                total += times * math.prod(v.meta.shape) * (item.stored + item.moments + item.updated)
    return total // planner.cluster.num_gpus


def states_can_fit(planner: Planner) -> bool:
    """Return whether weights, gradients and states fit if all GPUs share them evenly. If not, no plan fits."""
    return least_state_bytes(planner) <= planner.budget


def note_oversized_states(planner: Planner) -> tuple[str, ...]:
    """Return a sentence about baselines if not even evenly shared states fit: then none is planned."""
    if states_can_fit(planner):
        return ()
    amounts = needed_and_available(least_state_bytes(planner), planner.budget)
    why = "no baseline is planned, since none can fit: evenly shared weights, gradients and states alone take "
    return (Sentence(why, amounts),)


def note_shortage(least: Plan, planner: Planner, at_least: float) -> tuple[Note, ...]:
    """Return the notes of a plan of least memory, `least`, that needs more than the planner's budget. `at_least`: the network's sum for
    that plan, below which no plan is. If it is far below the plan's peak, another plan may have a lower peak."""
    peak = least.cost.memory_bytes["peak"]
    most = "" if peak <= at_least * (1 + BUFFERS) else "at most "
    amounts = needed_and_available(peak, planner.budget)
    needs = Sentence("the least memory that ", searched_plans(planner), f" needs is {most}", amounts)
    return Note(needs, NoteKind.SHORTAGE), *(_note_idle_gpus(least, planner.graph) or note_repeated_work(least))


def _note_idle_gpus(plan: Plan, graph: Graph) -> tuple[Note, ...]:
    """Return a note about a plan most of whose GPUs hold the same weights."""
    idle = idle_axes(plan, graph)
    if not idle:
        return ()
    gpus, sizes = plan.mesh.num_devices, " x ".join(f"{plan.mesh.axis_sizes[a]:,}" for a in idle)
    # Most sizes of models divide by powers of two: of 96 GPUs 64 would share the weights.
    even = 2 ** int(math.log2(gpus))
    better = f"; {even:,} GPUs would" if even != gpus else ""
    sentence = (
        f"most of the {gpus:,} GPUs hold the same weights: batch {plan.workload['batch']:,} and the sizes of this model do not divide "
        f"by {sizes}{better}"
    )
    return (Note(sentence, NoteKind.IDLE_GPUS),)


def searched_plans(planner: Planner) -> Sentence:
    """Return the plans among which a planner looked for the one of least memory, as the subject of a sentence.

    Example: "any plan of one stage", or "any plan of one stage with TAP, in one micro-batch, recompute=none". Nobody looks at stages where
    a plan of one stage does not fit a stated budget, so that the sentence must not speak of all plans.
    """
    request, method = planner.request, METHODS[planner.request.method]
    bounds: list[str | Term] = [] if method is METHODS[EXACT.name] else [f"with {method.title}"]
    bounds += [Sentence("on ", named("mesh", request.mesh))] if request.mesh else []
    if not planner.counts_open:
        count = planner.workload.accumulate
        bounds.append("in one micro-batch" if count == 1 else f"in {count:,} micro-batches")
    bounds += [named("recompute", request.recompute)] if request.recompute != "auto" else []
    return Sentence("any plan of one stage", " " * bool(bounds), Sentence.from_list(", ", bounds))


MOST_FILLERS = 3
FILLERS = {
    "params": "the weights",
    "optimizer": "the optimizer's states",
    "grads": "the gradients of weights",
    "activations": "what the layers keep for backward",
    "buffers": "gathered weights, and tensors of the operators at work",
}
"""What a kind of tensors at the peak is called in a sentence."""


def describe_memory(plan: Plan, graph: Graph, budget: float) -> str:
    """Return the largest parts of the fullest GPU's memory, in words. Example: "of 76.0 GiB, 62.0 are the logits of 10,240 tokens x 152,064
    words, 9.1 the weights and 3.2 the optimizer's states; a GPU may hold 73.3 GiB"."""
    staged = plan.cost.pipeline is not None
    # The fullest stage is not one graph whose tensors have names, so the logits are among what its last stage keeps.
    sizes = _bytes_of_kinds(plan) if staged else _bytes_of_tensors(plan, graph)
    most = sorted(sizes.items(), key=lambda part: -part[1])[:MOST_FILLERS]
    parts = [f"{_gib(size)} {'are ' if k == 0 else ''}{name}" for k, (name, size) in enumerate(most) if size]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    where = " of the fullest stage" if staged else ""
    return f"of {_gib(plan.cost.memory_bytes['peak'])} GiB{where}, {listed}; a GPU may hold {_gib(budget)} GiB"


def _gib(num_bytes: float) -> str:
    """Write bytes in GiB with one place, from a hundred on with none."""
    return f"{num_bytes / 2**30:.{0 if num_bytes >= 100 * 2**30 else 1}f}"


def _bytes_of_kinds(plan: Plan) -> dict[str, int]:
    return {words: plan.cost.memory_bytes[kind] for kind, words in FILLERS.items() if kind in plan.cost.memory_bytes}


def _bytes_of_tensors(plan: Plan, graph: Graph) -> dict[str, int]:
    """Return the bytes at the peak, by what fills them; the logits are a part of their own."""
    sizes: dict[str, int] = {}
    shapes, losses = _logit_shapes(graph), {op.name for op in graph.top.ops if operator(op.fn).is_logits_loss}
    rows = tensors_at_peak(plan.blocks, graph, cost_model_of(plan))
    whole = next((h for h in rows if not h.block and h.shape in shapes), None)
    logits = f"the logits of {_tokens_of_logits(whole):,} tokens x {whole.shape[-1]:,} words" if whole else "the logits"
    for tensor in rows:
        of_logits = not tensor.block and (tensor.shape in shapes or tensor.op in losses)
        name = logits if of_logits else FILLERS[tensor.kind]
        sizes[name] = sizes.get(name, 0) + tensor.total_bytes
    return sizes


def note_memory(plan: Plan, planner: Planner) -> tuple[Note, ...]:
    """Return a note about what fills the memory of a plan that does not fit."""
    filled = "" if plan.fits else describe_memory(plan, planner.graph, planner.budget)
    return (Note(filled),) if filled else ()


def _logit_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Return the shapes of the logits of a loss, as they are made and as the loss takes them."""
    logits = {op.inputs[0] for op in graph.top.ops if operator(op.fn).is_logits_loss}
    roots = {root(graph.top, v) for v in logits}
    casts = {op.inputs[0] for op in graph.top.ops if roots & {root(graph.top, v) for v in op.outputs}}
    every = [v for i, v in enumerate(graph.top.values) if i in logits | roots or i in casts]
    words = {v.meta.shape[-1] for i, v in enumerate(graph.top.values) if i in logits}
    return {v.meta.shape for v in every if len(v.meta.shape) > 1 and v.meta.shape[-1] in words}


def _tokens_of_logits(logits: PeakTensor) -> int:
    """Tokens whose logits one GPU holds in one tensor."""
    return max(1, logits.num_bytes // (ITEM_BYTES[logits.dtype] * logits.shape[-1]))


def needed_and_available(needed: float, budget: float) -> Sentence:
    """Return how many bytes a GPU needs and has, with as many digits as tell them apart."""
    first = 1 if budget > 2**30 else 4
    digits = next((d for d in range(first, 9) if f"{needed / 2**30:.{d}f}" != f"{budget / 2**30:.{d}f}"), 9)
    needs, has = (memory_amount(n, f"{n / 2**30:.{digits}f} GiB") for n in (needed, budget))
    return Sentence(needs, " per GPU, but there are ", has)


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


def note_repeated_work(plan: Plan) -> tuple[Note, ...]:
    """Return a message if GPUs of a plan do the same work, since the samples of a step cannot be dealt out to them."""
    mesh, batch, alone = plan.mesh, int(plan.workload["batch"]), replicated_gpus(plan)
    if alone == 1 or batch % mesh.num_devices == 0:
        return ()
    more = -(-batch // mesh.num_devices) * mesh.num_devices
    sentence = Sentence(
        f"groups of {alone:,} GPUs do the same work, since {batch:,} samples cannot be dealt out to them: ",
        named("batch", more),
        f" would use all {mesh.num_devices:,} GPUs",
    )
    return (Note(sentence, NoteKind.REPEATED_WORK),)


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


def needs_buffers(answer: Answer, budget: float) -> bool:
    """Return whether the network's sum of the least memory nearly fits, and its peak is well above the sum. Buffers for gathered weights
    may be why: the sum does not hold them."""
    sum_bytes = memory_bytes(answer.smallest) if answer.smallest else float("inf")
    return sum_bytes <= budget * NEARLY and answer.least_memory > sum_bytes * (1 + BUFFERS)


def note_meshes_left_out(plan: Plan, wide: TooWide | None) -> Plan:
    """Return the best plan of the meshes that were searched. `wide`: the error of a mesh that was not, which may have a better one."""
    if wide is None:
        return plan
    sentence = f"not proven: a mesh was left out, since its search needs a table of {wide.entries:.2g} numbers"
    # The gap of the meshes that were searched says nothing about the one that was not.
    rest = (note for note in plan.notes if note.kind is not NoteKind.GAP)
    return replace(plan, optimal=False, bound=None, notes=(Note(sentence, NoteKind.SCOPE), *rest))


def refuse_or_least_memory(
    planner: Planner,
    options: Sequence[DeviceMesh],
    below: float,
    least: tuple[Answer, Problem] | None,
    wide: TooWide | None,
    bound: float,
) -> Plan:
    """Return what `choose_mesh` gives or raises if no plan fits on the meshes. `least`: the answer of least memory, and its problem."""
    # A search below a known value does not look for the least memory, so it has none to tell.
    if below < float("inf"):
        raise NoPlanFits(f"no plan that fits is better than {below:.4g}", bound=min(below, bound))
    if least is None and wide is not None:
        raise wide
    if least is None:
        raise NoPlanFits(
            "no plan of this model can run on these meshes; try another ", named("mesh"), " or ", named("batch")
        )
    every = {mesh.axis_sizes for mesh in candidate_meshes(planner.request, planner.cluster)}
    # Of meshes that were not looked at no more is known than what evenly shared states take.
    all_meshes = every <= {mesh.axis_sizes for mesh in options}
    sum_bytes = memory_bytes(least[0].smallest) if all_meshes and least[0].smallest else least_state_bytes(planner)
    return _plan_of_least_memory(planner, *least, bound, sum_bytes)


def _plan_of_least_memory(planner: Planner, answer: Answer, problem: Problem, bound: float, at_least: float) -> Plan:
    """Return the plan of least memory, which does not fit. Raises NoPlanFits if the user gave a budget. `at_least`: bytes that no plan is
    below.

    `bound`: a value that no plan which fits is below. A search without a proof may have missed one. Infinite if none fits, which a plan
    says by no bound.
    """
    assert answer.smallest is not None
    smallest = Answer(answer.smallest, 0.0, 0.0, answer.least_memory)
    objective = planner.objective()
    plan = planner.plan(problem, smallest, "least memory", planner.request.method, objective)
    first, *rest = note_shortage(plan, planner, at_least)
    if planner.request.memory_gb is not None:
        peak = plan.cost.memory_bytes["peak"]
        helps: list[str | Term] = ["more GPUs", Sentence("a smaller ", named("batch"))]
        if not planner.counts_open and planner.workload.graph_batch > 1:
            helps.append(Sentence("a larger ", named("accumulate")))
        helps += [] if planner.workload.recompute in ("auto", "full") else [named("recompute", "full")]
        short = Sentence.from_list("; ", (note.sentence for note in (first, *rest)))
        enough = math.ceil(peak / 1e9)
        last: str | Term
        if enough * 1e9 <= planner.cluster.gpu.memory_bytes:
            *helps, last = *helps, named("memory_gb", enough)
        else:  # no budget that the GPU can hold is enough
            *helps, last = helps
        filled = partial(describe_memory, plan, planner.graph, planner.budget)
        message = ("no plan fits: ", short, "; use ", Sentence.from_list(", ", helps), " or ", last)
        raise NoPlanFits(*message, needed_bytes=peak, bound=bound, describe_memory=filled)
    shortage = replace(first, sentence=Sentence("does not fit: ", first.sentence))
    known = bound if bound < float("inf") else None
    return replace(plan, fits=False, optimal=False, bound=known, notes=(shortage, *rest))


def note_whole_batch(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Return a sentence about a model without a loss of its own whose plan gives an operator the samples of all ranks.

    A loss is one number, whoever computes it. Any other result would be that of all samples, where the caller brought a rank's own, so a
    run refuses such a call (`runtime.bound_call`). Example: an embedding that is split by its width looks up the tokens of all ranks.
    """
    if graph.loss != STANDIN_LOSS or plan.pipeline is not None:
        return ()
    axes = [a for a in plan.data_axes if plan.mesh.axis_sizes[a] > 1]
    samples = {v for v, x in enumerate(graph.top.values) if x.kind == "constant" and x.name and _has_samples(x, graph)}
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
    """Return whether an input has the samples of the planned batch in its first dim. A buffer of the same length is not an input."""
    return value.meta.shape[:1] == (graph.workload["batch"],) and not value.is_buffer


def note_uncounted_memory(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Return a note about the operator that takes most bytes of constants that are not in the planned memory, if these are many of the
    peak's."""
    num_bytes, op, largest = max(
        _uncounted_by_op(plan, graph), key=lambda uncounted: uncounted[0], default=(0, None, None)
    )
    if op is None or largest is None or num_bytes < max(MIN_BYTES, MIN_SHARE * plan.cost.memory_bytes["peak"]):
        return ()
    shape = " x ".join(f"{n:,}" for n in largest.meta.shape)
    return (
        f"a constant that the model computes is not in the planned memory: {num_bytes / 2**30:.2f} GiB per GPU at {op.name} alone "
        f"({largest.meta.dtype}, {shape} on all GPUs together)",
    )


def _uncounted_by_op(plan: Plan, graph: Graph) -> Iterator[tuple[int, Op, Value]]:
    """For each operator that takes such tensors: their bytes on one GPU, and the largest of them."""
    for label, plan_of_block in plan.blocks.items():
        block = block_of(graph, label)
        for op in block.ops:
            constants: dict[int, tuple[int, Value]] = {}
            for value, edge in zip(op.inputs, plan_of_block.sites[op.name].inputs, strict=True):
                operand = block.values[value]
                # The memory walk counts what the top block computes (`cost.memory.storages`).
                counted = not label and block.values[root(block, value)].computed
                if operand.kind == "constant" and not counted:
                    part = math.prod(local_shape(operand.meta.shape, edge.dst.forward, plan.mesh.axis_sizes))
                    constants[root(block, value)] = (part * ITEM_BYTES[operand.meta.dtype], operand)
            if constants:
                yield sum(n for n, _ in constants.values()), op, max(constants.values(), key=lambda f: f[0])[1]


def note_host_wait(plan: Plan) -> tuple[str, ...]:
    """Return a sentence about the wait for the host in the step of a chosen plan: the search does not minimise it, so it is bounded here.

    It names the plan, since one with stages may be recommended behind it, of which none of this holds."""
    waits, bound = plan.cost.host_wait_s, plan.bound
    if not waits or plan.objective != "time":
        return ()
    of_one_stage = plan.pipeline is None
    whose = "the best plan of one pipeline stage" if of_one_stage else plan.name
    least = Sentence(", and no such plan's step is shorter than ", time_amount(bound)) if bound and of_one_stage else ""
    note = Sentence(
        "in ",
        time_amount(waits),
        f" of the step of {whose} the GPU waits for its host, which issues kernels more slowly than they run; the search ",
        "minimises the GPU's own part, ",
        time_amount(plan.cost.gpu_time_s),
        least,
        "; larger micro-batches or ",
        named("compiled"),
        " wait less",
    )
    return (note,)


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
