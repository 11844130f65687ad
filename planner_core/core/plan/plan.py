"""A whole plan, and its parameters by name patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from planner_core.core.cluster.cluster import Cluster
from planner_core.core.cluster.constants import load_timing
from planner_core.core.errors import InputError, Term
from planner_core.core.graph import join_name
from planner_core.core.mesh import ONE_RANK, DeviceMesh, PipelineAxis
from planner_core.core.placement import Shard
from planner_core.core.plan.blocks import BlockLabel, BlockPlan, ParamPlan, SitePlan
from planner_core.core.plan.cost import Cost
from planner_core.core.plan.model import PlannedModel
from planner_core.core.plan.notes import Note, PlanRole
from planner_core.core.plan.pipeline import Pipeline
from planner_core.core.workload.workload import Workload


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A complete layout of one model on one mesh at one workload.

    `assumptions`: the constants of the cost model, by name, with the values that they had when the plan was made (see
    assets/timing.json). `pipeline`: the stages; `mesh` is then that of one rank's
    group of GPUs. None: one stage has the whole model. `bound`: a value of what the plan's search made least that no plan of the request
    is below: seconds of `objective`, but of the method `tap`, which counts bytes, the GB (1e9 bytes) that a GPU sends. It is of all numbers
    of micro-batches, ways to recompute and meshes of up to two axes, and of the larger meshes that were searched; of a plan with stages,
    of the degrees looked at. None: not known. `optimal`: no plan of its method's space is below it in its `objective`, of which time
    leaves out waits for the host.
    """

    name: str
    method: str
    objective: str
    optimal: bool
    model: PlannedModel
    workload: Workload
    cluster: Cluster
    mesh: DeviceMesh
    blocks: Mapping[str, BlockPlan]
    cost: Cost
    fits: bool = True
    notes: tuple[Note, ...] = ()
    assumptions: Mapping[str, float] = field(default_factory=lambda: asdict(load_timing()))
    pipeline: Pipeline | None = None
    # A plan file does not hold it, as the kinds of notes.
    role: PlanRole = field(default=PlanRole.OTHER, compare=False)
    bound: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Name the plan, its mesh, step and memory; its fields fill pages."""
        stages = f"{self.pipeline_axis.ranks} pipeline ranks of " if self.pipeline else ""
        step_ms, gib = 1e3 * self.cost.step_time_s, self.cost.memory_bytes["peak"] / 2**30
        fits = "fits" if self.fits else "does not fit"
        step = f"{step_ms:.4g} ms a step, {gib:.1f} GiB a GPU, {fits}"
        return f"<Plan {self.name!r}: {stages}{self.mesh}, {step}; see .cost, .blocks, .notes>"

    @property
    def preference(self) -> tuple[bool, float]:
        """What orders plans of one workload: first those that fit, by their steps; then those that do not, by their memory."""
        return not self.fits, self.cost.step_time_s if self.fits else self.cost.memory_bytes["peak"]

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return self.workload.accumulate

    @property
    def graph_batch(self) -> int:
        """Samples of one global micro-batch, which is the batch of the plan's graph."""
        return self.workload.graph_batch

    @property
    def is_step_proven(self) -> bool:
        """Whether no plan of its method's space is better in its `objective`, which reports call `optimal`. A search for time minimises
        the work of GPUs: where they wait for their host, a plan with more of it may take a shorter step: only the work is proven."""
        return self.optimal and not (self.objective == "time" and self.cost.host_wait_s)

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
