"""The plan: plain data. The search, the baselines and edits by hand write it; explorer, export and verification read it.

For every operator call of the model (its *call site*) a plan says with which placements each operand is taken and each result is
delivered. For every parameter it says how it is stored. To apply a plan decides nothing.

    operand:  delivered state --edge--> state in which the op takes it     (slice, pad, divide; rarely a gather)
    result:   state in which the op makes it --edge--> delivered state     (all_reduce, all_gather, ...)
    weight:   stored state --edge--> state in which the op takes it        (ZeRO-3 gathers and scatters here)

An edge has steps in both directions, each on one mesh axis. Forward steps act on the tensor, backward steps on its gradient, in the
order in which they are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from planner_core.core.cluster import load_timing
from planner_core.core.errors import InputError, Term
from planner_core.core.graph import join_name
from planner_core.core.mesh import ONE_RANK, DeviceMesh, PipelineAxis
from planner_core.core.placement import Partial, Placements, Shard, State, Step, shortest_steps

PHASES = ("forward", "backward", "optimizer")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv")
"""The orders in which stages run their micro-batches (`cost.schedule.pipeline`)."""
V_SHAPED, VIRTUAL_OF_V = "zbv", 2
"""The order whose stages go there and back over the ranks, and how many stages each rank then has."""
ONE_EACH = ("gpipe", "1f1b")
"""The orders in which a rank has one stage."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The redistribution of one tensor from state `src` to state `dst`. `forward` and `backward` are its steps, in order.

    `segments` maps a tensor dim to the sizes of its fused parts (q, k, v in one projection). A shard of that dim holds an equal part
    of each of them. `chunks`: the number of parts of its last dim in which a product makes the tensor. The collective of one part runs
    while the next part is computed (ATP, section 3.4).
    """

    src: State
    dst: State
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    segments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class SitePlan:
    """How one op runs: an edge for each tensor operand and each result, in order of the call."""

    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """The placements of one parameter's three forms, one of each per mesh axis.

    `stored`: the parameter as the optimizer, a checkpoint and the user see it (master weights and moments). `working`: the copy in
    compute dtype that is kept between uses. `gradient`: the gradient that accumulates over micro-batches. If it is Partial, each
    device keeps its term, and the terms are reduced to `stored` once a step. On an axis on which every device uses the whole weight:

        data parallel   stored R, working R, gradient P       ZeRO-2   stored S, working R, gradient S
        ZeRO-1          stored S, working R, gradient P       ZeRO-3   stored S, working S, gradient S

    `gathered`: the axes on which the working copy is sharded but used whole. It is gathered at use, freed, and gathered again for
    backward.
    `refresh`: the steps from `stored` to `working`, and `reduce`: those from `gradient` to `stored`. Both are taken once a step. None:
    the steps of `shortest_steps`.
    `trained`: whether the loss sends it a gradient. If not, it is kept in compute dtype.
    """

    stored: Placements
    working: Placements
    gradient: Placements
    gathered: tuple[int, ...] = ()
    segments: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    refresh: tuple[Step, ...] | None = None
    reduce: tuple[Step, ...] | None = None
    trained: bool = True

    def refresh_steps(self) -> tuple[Step, ...]:
        """Steps that make the working copy, once a step."""
        return shortest_steps(self.stored, self.working) if self.refresh is None else self.refresh

    def reduce_steps(self) -> tuple[Step, ...]:
        """Steps that bring the accumulated gradient to the stored parameter, once a step."""
        return shortest_steps(self.gradient, self.stored) if self.reduce is None else self.reduce

    @property
    def once_gathered_axes(self) -> tuple[int, ...]:
        """Mesh axes on which the working copy is whole though the parameter is stored in parts (ZeRO-1, ZeRO-2)."""
        parts = enumerate(zip(self.stored, self.working, strict=True))
        return tuple(a for a, (s, w) in parts if isinstance(s, Shard) and not isinstance(w, Shard))

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        """The mesh axes over which the gradient's terms are reduced once a step."""
        return tuple(a for a, p in enumerate(self.gradient) if p == Partial())


class BlockLabel(NamedTuple):
    """The key of a block in a plan: the block's name in the graph, and the number of the variant that some of its copies run as.

    A plan file holds it as text: `Block`, `Block#1`, `Block#2`; "" is the top block. Text is parsed and written here alone.
    """

    block: str
    variant: int = 0

    @classmethod
    def parse(cls, text: str) -> BlockLabel:
        """Return the label of a text, as `Block#1`. No text fails; one that is not a label does not come back from `str`."""
        block, _, variant = text.partition("#")
        return cls(block, int(variant) if variant.isdecimal() else 0)

    def __str__(self) -> str:
        return f"{self.block}#{self.variant}" if self.variant else self.block


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One way to run a block, and the copies that run so, by the prefixes of their parameter names. The top block has the prefix "".

    `recompute` says what is recomputed in backward: "none", "full", or a policy that keeps the results of the ops in `kept`.
    """

    prefixes: tuple[str, ...]
    params: Mapping[str, ParamPlan]
    sites: Mapping[str, SitePlan]
    recompute: str = "none"
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one rank in one phase, of one kind, over one mesh axis or over several as one group. `num_bytes`: bytes of the
    tensors that are whole along the axes. `wire_bytes`: bytes that the rank sends."""

    phase: str
    kind: str
    axes: tuple[int, ...]
    count: int
    num_bytes: int
    wire_bytes: int
    time_s: float
    algorithm: str = "ring"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a model is cut into stages, and in which order the stages run their micro-batches.

    `ranks`: the number of groups of GPUs between which the stages are dealt; each group is a mesh of the form `Plan.mesh`. `outer` axes of
    that mesh lie outside of the pipeline's (`PipelineAxis`); if none does, the groups lie one behind the other. `copies`: how many calls
    of repeated blocks each stage runs, in order. What stands before the first call belongs to the first stage, what stands behind a call
    to the stage of that call.

    `parts`: of each stage the prefixes of its calls, in order, and the names of the weights outside of them that it reads. A run needs
    them before it has seen a forward pass. Empty while stages are only priced.
    """

    ranks: int
    schedule: str
    copies: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    outer: int = 0

    @property
    def axis(self) -> PipelineAxis:
        """The axis of the groups in the mesh of all GPUs."""
        return PipelineAxis(self.ranks, self.outer)

    @property
    def virtual(self) -> int:
        """Stages of one rank."""
        return len(self.copies) // self.ranks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are apart, which is priced and does not run."""
        return self.schedule in ("zb", "zbv")

    def rank_of(self, stage: int) -> int:
        """Return the group that runs a stage: stages go round, but in `zbv` there and back (a V)."""
        turn, at = divmod(stage, self.ranks)
        # Example: 3 ranks and 6 stages. Round: 0 1 2 0 1 2. In a V: 0 1 2 2 1 0.
        return self.ranks - 1 - at if self.schedule == V_SHAPED and turn % 2 else at

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a group runs, in order of the model."""
        return tuple(s for s in range(len(self.copies)) if self.rank_of(s) == rank)

    def call_range(self, stage: int) -> tuple[int, int]:
        """Return the first call of a stage, and the first one behind it."""
        before = sum(self.copies[:stage])
        return before, before + self.copies[stage]

    def reads(self, stage: int, weight: str) -> bool:
        """Return whether a stage reads a weight, by its name in the whole model."""
        return any(weight == part or weight.startswith(f"{part}.") for part in self.parts[stage])

    def stages_that_read(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the stages that read a weight which has these names (tied weights have several)."""
        return tuple(s for s in range(len(self.parts)) if any(self.reads(s, name) for name in names))


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage on one of its GPUs.

    `forward_s` and `backward_s`: of one micro-batch; `weight_s`: the part of backward that makes the gradients of weights. `first_s` and
    `last_s`: what the first forward and the last backward of a step take more, since working copies are gathered and gradients summed
    beside them. `step_s`: once a step, when all micro-batches are done. `send_s`: from the end of a forward until its results are with
    the next stage, which gradients take as long to come back; `send_bytes` are those that one GPU sends. `peak_bytes`: of the fullest
    moment of a GPU of the stage's rank, with the rank's other stages. `host_*_s`: in which the host issues the kernels of these passes.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    first_s: float
    last_s: float
    step_s: float
    send_s: float
    send_bytes: int
    peak_bytes: int
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0
    host_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """What the stages of a plan take, and how they fit together: `bubble_s` is the time of a step in which the rank that works longest
    waits for other stages because of the schedule, without what hosts add (`Cost.host_wait_s`). `bound_s`: seconds that the step of this
    schedule is not below (`cost.schedule.pipeline.timing`)."""

    stages: tuple[StageCost, ...]
    bubble_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of a plan, per step and GPU. `memory_bytes` has params, grads, optimizer, activations, buffers and peak.
    `optimizer_time_s` is the update of the weights. In `outside_time_s` the GPU has no work (`Stack.outside_s`). `host_wait_s`: seconds of
    `compute_time_s` in which the GPU waits for the host to issue its kernels (`cost.schedule.host`). `pipeline`: of a plan with stages;
    the other figures are then those of a GPU of the rank that works longest, and memory that of the fullest rank."""

    step_time_s: float
    compute_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float
    traffic: tuple[Traffic, ...]
    memory_bytes: Mapping[str, int]
    optimizer_time_s: float = 0.0
    outside_time_s: float = 0.0
    host_wait_s: float = 0.0
    pipeline: PipelineCost | None = None

    @property
    def gpu_time_s(self) -> float:
        """Seconds of the step without waits for the host: the form that the search minimises."""
        return self.step_time_s - self.host_wait_s

    @property
    def gpu_compute_s(self) -> float:
        """Seconds in which the GPU computes: those of `compute_time_s` in which it does not wait for the host."""
        return self.compute_time_s - self.host_wait_s

    def seconds(self, objective: str) -> float:
        """Return the seconds that a search for an objective minimises: the GPU's part of the step, or the communication alone."""
        return self.comm_time_s if objective == "communication" else self.gpu_time_s

    def collectives(self) -> dict[str, dict[str, dict[str, int]]]:
        """phase -> kind -> count, bytes, wire_bytes (the form of docs/CONTRACT.md)."""
        table: dict[str, dict[str, dict[str, int]]] = {phase: {} for phase in PHASES}
        for t in self.traffic:
            row = table[t.phase].setdefault(t.kind, {"count": 0, "bytes": 0, "wire_bytes": 0})
            row["count"] += t.count
            row["bytes"] += t.num_bytes
            row["wire_bytes"] += t.wire_bytes
        return table


class NoteKind(Enum):
    """What a note is about, where a reader treats such notes in another way than the rest."""

    GAP = "gap"
    """By how much the plan may be above the best there is."""
    SCOPE = "scope"
    """Which plans the search left out, so that nothing is proven."""
    TIE = "tie"
    """The plan leads since it is simpler than the fastest one, which stands behind it, and ties with it."""
    SHORTAGE = "shortage"
    """No plan fits: how many bytes are missing."""
    IDLE_GPUS = "idle GPUs"
    """No plan fits, since most GPUs hold the same weights."""
    REPEATED_WORK = "repeated work"
    """GPUs do the same work, since they cannot share the samples."""
    UNEVEN_BATCH = "uneven batch"
    """The samples do not divide over the GPUs."""
    DEFAULT_BATCH = "default batch"
    """The samples of a step or the tokens of a sample that a request left open: pages have them in their first line."""
    METHOD = "method"
    """What the plan's method admits; the sentence begins with the method's title, which is the plan's name."""
    EDIT = "edit"
    """Which weights were placed by hand, and from which plan the rest comes."""
    REMARK = "remark"
    """Any other note, and every note of a plan file."""


UNPROVEN = (NoteKind.SCOPE, NoteKind.GAP)
"""The notes that say why a plan is not proven."""


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence about a plan, for people. What a program asks of it is its `kind`."""

    sentence: str
    # A plan file holds the sentences alone, so a plan that comes back from its file has the same notes by them.
    kind: NoteKind = field(default=NoteKind.REMARK, compare=False)

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete layout of one model on one mesh at one workload.

    `model`: name, source, params, loss, config and, of padded parameters, `own_shapes`. `workload`: batch, seq, dtype, optimizer, zero,
    recompute and so on. `cluster`: the whole description of the cluster. `assumptions`: the constants of the cost model, by name, with
    the values that they had when the plan was made (see assets/timing.json). `pipeline`: the stages; `mesh` is then that of one rank's
    group of GPUs. None: one stage has the whole model.
    """

    name: str
    method: str
    objective: str
    optimal: bool
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    cluster: Mapping[str, Any]
    mesh: DeviceMesh
    blocks: Mapping[str, BlockPlan]
    cost: Cost
    fits: bool = True
    notes: tuple[Note, ...] = ()
    assumptions: Mapping[str, float] = field(default_factory=lambda: asdict(load_timing()))
    pipeline: Pipeline | None = None
    bound: float | None = field(default=None, compare=False)
    """A value of the objective that no plan of the request is below: of all numbers of micro-batches, ways to recompute and meshes of up
    to two axes, and of the larger meshes that were searched; of one with stages, of the degrees looked at. None: not known."""

    @property
    def preference(self) -> tuple[bool, float]:
        """What orders plans of one workload: first those that fit, by their steps; then those that do not, by their memory."""
        return not self.fits, self.cost.step_time_s if self.fits else self.cost.memory_bytes["peak"]

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return int(self.workload.get("accumulate", 1))

    @property
    def graph_batch(self) -> int:
        """Samples of one global micro-batch, which is the batch of the plan's graph."""
        return int(self.workload["batch"]) // self.accumulate

    @property
    def is_step_proven(self) -> bool:
        """Whether no plan of the request is better. A search for time minimises the work of GPUs: where they wait for their host, a plan
        with more of it may take a shorter step, so that only the work is proven."""
        return self.optimal and not (self.objective == "time" and self.cost.host_wait_s)

    @property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's own shapes of the parameters that the plan pads (a vocabulary), by name. Checkpoints have these."""
        return {name: tuple(shape) for name, shape in self.model.get("own_shapes", {}).items()}

    @property
    def num_gpus(self) -> int:
        """The GPUs that the plan runs on."""
        return self.mesh.num_devices * self.pipeline_axis.ranks

    @property
    def pipeline_axis(self) -> PipelineAxis:
        """The axis of its pipeline's ranks in the mesh of all GPUs."""
        return self.pipeline.axis if self.pipeline else ONE_RANK

    @property
    def fullest_rank(self) -> int | None:
        """The pipeline rank whose memory is the plan's; None without stages."""
        if self.pipeline is None or self.cost.pipeline is None:
            return None
        peaks = [stage.peak_bytes for stage in self.cost.pipeline.stages]
        return self.pipeline.rank_of(peaks.index(max(peaks)))

    @property
    def chunks(self) -> int:
        """The largest number of parts in which an operator makes a result that is sent part by part; 1 if all are made at once."""
        return max((e.chunks for b in self.blocks.values() for s in b.sites.values() for e in s.outputs), default=1)

    def site_plans(self) -> dict[str, SitePlan]:
        """Return how every operator of the unfolded model runs, by its call site."""
        return {join_name(p, n): s for b in self.blocks.values() for p in b.prefixes for n, s in b.sites.items()}

    def param_plans(self) -> dict[str, ParamPlan]:
        """Return the plan of every parameter of the unfolded model, by its name."""
        return {join_name(p, n): s for b in self.blocks.values() for p in b.prefixes for n, s in b.params.items()}

    def kept_sites(self) -> frozenset[str]:
        """Return the call sites of the unfolded model whose results are kept although their block is recomputed."""
        return frozenset(join_name(p, n) for b in self.blocks.values() for p in b.prefixes for n in b.kept)

    @property
    def data_axes(self) -> tuple[int, ...]:
        """The mesh axes that shard the batch: of the operations whose first result is sharded there, most shard dim 0. Others say
        nothing: a loss is put together from many numbers, which have no dims."""
        # The first result: the others, as attention's log-sum-exp, may lack the dims that tell samples from features.
        results = [s.outputs[0].src.forward for b in self.blocks.values() for s in b.sites.values() if s.outputs]
        return data_axes_of(
            [[p.dim if isinstance(p, Shard) else None for p in one] for one in results], self.mesh.axis_sizes
        )


def data_axes_of(results: Sequence[Sequence[int | None]], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes on which dim 0 is the most common sharded dim. `results`: for each result the dim that each axis shards, or None.

    Only results that an axis shards vote on it, and the majority decides.
    """
    sharded = [[dims[axis] for dims in results if dims[axis] is not None] for axis in range(len(sizes))]
    return tuple(axis for axis, dims in enumerate(sharded) if 2 * dims.count(0) > len(dims))


def refuse_stages(plan: Plan, who: str | Term, remedy: str) -> None:
    """Raise InputError for a plan with pipeline stages. `who` is the program that cannot take one, `remedy` a clause with what would do."""
    if plan.pipeline:
        stages = len(plan.pipeline.copies)
        raise InputError(who, f" takes no plan with pipeline stages, and this one has {stages}; ", remedy)


def glob_name(prefixes: tuple[str, ...]) -> str:
    """One pattern for several prefixes. Components that differ become `*` (`layers.*`)."""
    rows = [p.split(".") for p in prefixes]
    # A `*` stands for one component. Copies at different depths of the module tree share no such pattern, so they are listed.
    if len({len(r) for r in rows}) != 1:
        return "{" + ",".join(prefixes) + "}"
    columns = zip(*rows, strict=True)
    return ".".join(c[0] if len(set(c)) == 1 else "*" for c in columns)


def block_patterns(plan: Plan) -> dict[str, str]:
    """Return a pattern for the copies of each block variant, by label: `layers.*`. No two patterns are equal. Two variants of one block
    differ in their numbers (`layers.*[1]`). Variants of two blocks whose copies have the same names differ in their labels
    (`layers.*[Narrow#1]`)."""
    labels: dict[str, list[str]] = {}
    for label, block in plan.blocks.items():
        labels.setdefault(glob_name(block.prefixes), []).append(label)
    by_label = {}
    for pattern, sharing in labels.items():
        one_block = len({BlockLabel.parse(label).block for label in sharing}) == 1
        for label in sharing:
            suffix = BlockLabel.parse(label).variant if one_block else label
            by_label[label] = pattern if len(sharing) == 1 else f"{pattern}[{suffix}]"
    return by_label


def params_by_pattern(plan: Plan) -> dict[str, ParamPlan]:
    """Return the plan of every parameter, by name pattern."""
    # Two variants of a block have the same parameter names, so the pattern of the block tells them apart.
    patterns = block_patterns(plan)
    return {
        ".".join(filter(None, (patterns[label], name))): param
        for label, block in plan.blocks.items()
        for name, param in block.params.items()
    }


def placements_by_pattern(plan: Plan) -> dict[str, list[str]]:
    """Return the placements in which every parameter waits for its uses, by name pattern: a list with one entry per mesh axis.

    With ZeRO-1 and ZeRO-2 this copy is whole, and only the part that the optimizer keeps is sharded (`states_by_pattern`).
    """
    return {name: [str(p) for p in param.working] for name, param in params_by_pattern(plan).items()}


def states_by_pattern(plan: Plan) -> dict[str, list[str]]:
    """Return the placements of the optimizer's part of each parameter, by name pattern, if they differ from `placements_by_pattern`."""
    params = params_by_pattern(plan)
    return {name: [str(p) for p in param.stored] for name, param in params.items() if param.stored != param.working}
