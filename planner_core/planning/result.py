"""What a request returns: its plans, how sure their order is, and which of them is the plan to run.

    plans        best, "fastest", trade-offs, baselines, stages: in this order, and all but the first only where they exist
    best         the best plan of one stage, or a simpler one that ties with it
    searched     what the search found, with its bound and proof: `best`, or the plan "fastest" behind it if a simpler one leads
    staged       the best plan with pipeline stages, if it is quicker than every plan of one stage
    recommended  *the* plan: the fastest of all, or of those that tie with it the simplest (`choice` says why)

Everybody acts on `recommended`: the command line writes it with `-o`, and the page opens with it.

Two plans on one machine share the errors of its GPU and of its software. What remains is the scatter of their kinds of layout
(`sigma` of assets/bands.json). One plan is predicted faster with 95 % confidence if

    ln(slower / faster) > 1.645 hypot(sigma of one, sigma of the other)

If two plans differ by more than MAX_DOUBT, the faster one is called faster in any case. Other plans are ties. Among ties, a plan that
a stock tool runs without changes is preferred.

Example: two plans are of the kind "FSDP, one node", with a sigma of 2.9 %. Their steps take 500 and 530 ms. ln(530 / 500) is
5.8 %, which is less than 1.645 x 4.1 % = 6.7 %: a tie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np

from planner_core.core import (
    STAGED_ROLES,
    Cluster,
    DeviceMesh,
    Graph,
    Note,
    NoteKind,
    Op,
    Plan,
    PlanRole,
    Sentence,
    Workload,
    axis_names,
)
from planner_core.cost import Component
from planner_core.ops import CoarseGraph
from planner_core.planning.fitting.for_tool import BestWithoutTool, ToolPrice, compare_without_tool, runs_on_stock_tools
from planner_core.planning.fitting.front import leave_out_beaten, note_beaten_corners
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.fitting.shortage import UnevenBatch, find_uneven_batch
from planner_core.planning.fitting.simpler import without_simpler
from planner_core.planning.methods import BASELINES, METHODS, DataAxis, bounding_tool
from planner_core.planning.planner import Planner
from planner_core.planning.pricing import Z_NINE_IN_TEN, time_band, time_sigma
from planner_core.planning.request import Request
from planner_core.planning.stages import STAGES_PLAN_NAME, may_use_stages
from planner_core.search import make_objective, solve_folded, total_of_copies
from planner_core.search.candidates import Candidates, score_candidates

MAX_DOUBT = 0.10
"""A plan that is slower by more than this share is called slower, whatever the scatter of its kind."""
STAGES_PASS = "stages"
"""The pass that searches stages to the end, in `Result.reasons`."""
RUN_IN_4_BITS = ("data-parallel", "fsdp")
"""The methods whose layouts peft with bitsandbytes runs with frozen weights in 4 bits."""


class Simplicity(Enum):
    """Why a plan is the simplest of those that tie."""

    STOCK = "stock tools run it as it is"
    ONE_AXIS = "it needs one mesh axis, and is not slower by the simulation"
    ONE_STAGE = "it needs no pipeline stages"


@dataclass(frozen=True, slots=True)
class Tie:
    """A plan that is predicted slower than the fastest one by the share `slower`, which is less than the `doubt` about the two."""

    name: str
    method: str
    slower: float
    doubt: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that is predicted fastest, its ties by rising time, and which of all these is recommended: the simplest, or the one for
    the request's `tool`. `simplicity`: why it is the simplest, if it is another than the fastest. `fits`: some plan fits; where none
    does, the chosen one takes the least memory and is not the fastest. `no_evidence`: by row, of the fastest plan and its ties or the
    next one, why no measured run tells its doubt; empty where some do. `aim`: what the request makes least, if that is not the step's
    time, or what its plan must be: that plan is recommended, as asked for, and takes `slower` longer than the fastest (1: twice as
    long)."""

    fastest: str
    ties: tuple[Tie, ...]
    recommended: str
    tool: str | None = None
    simplicity: Simplicity | None = None
    fits: bool = True
    no_evidence: Mapping[str, str] = field(default_factory=dict)
    aim: str | None = None
    slower: float = 0.0
    one_stage: str = "best"
    """The row of the plan of one stage, which has another name where it does not fit."""
    leaves_stages: bool = False
    """Where no plan fits: plans with stages are in the request's space, and one that is not shown may take less memory."""
    same: tuple[str, ...] = ()
    """Rows with the fastest plan under another name."""

    @property
    def sentence(self) -> str:
        """A sentence that says why the plan is recommended, and what is given up."""
        if not self.fits:
            limit = f" that {self.tool} can be told" if bounding_tool(self.tool) is not None else ""
            nearest = f"{self.fastest} comes nearest{', of one pipeline stage' if self.leaves_stages else ''}"
            return f"no plan{limit} fits, so none is recommended; {nearest}"
        if self.aim is not None:
            longer = (
                f"{1 + self.slower:.1f} times as long as"
                if self.slower >= 1
                else f"{100 * self.slower:.1f} % longer than"
            )
            time = f"; its step takes {longer} that of {self.fastest}" if self.recommended != self.fastest else ""
            return f"{self.recommended} is the plan asked for, of {self.aim}{time}"
        if bounding_tool(self.tool) is not None:
            others = f"of the other rows only {self.one_stage}" if self.fastest == STAGES_PLAN_NAME else "no other row"
            return f"{self.fastest} is the fastest plan found of those that {self.tool} can be told; {others} comes from that search"
        doubt = "the prediction's doubt"
        unknown = self._say_what_is_unknown()
        if not self.ties and self.fastest in self.no_evidence:
            return f"{self._fastest_rows} predicted faster than every other plan that fits; the doubt {unknown}"
        if not self.ties:
            beside = f", which {unknown}" if unknown else ""
            return f"{self._fastest_rows} faster than every other plan that fits, by more than {doubt}{beside}"
        if unknown:
            doubt = f"the doubt of kinds of run that were measured; that {unknown}"
        names = ", ".join(f"{t.name} (+{100 * t.slower:.1f} %)" for t in self.ties)
        tie = f"a tie of {self.fastest} with {names}: they differ by less than {doubt}"
        if self.simplicity is None:
            why = f"what {self.tool} can be told" if self.tool else "the fastest, and none of them is simpler"
            return f"{tie}. {self.fastest} is {why}"
        gain = next(t.slower for t in self.ties if t.name == self.recommended)
        return f"{tie}. Run {self.recommended}, the simplest: {self.simplicity.value}. {self.fastest} may gain {100 * gain:.1f} %"

    @property
    def _fastest_rows(self) -> str:
        """The fastest plan by all its names, with its verb. Example: "best is" or "best and data parallel are one plan, which is"."""
        rows = (self.fastest, *self.same)
        return f"{', '.join(rows[:-1])} and {rows[-1]} are one plan, which is" if self.same else f"{self.fastest} is"

    def _say_what_is_unknown(self) -> str:
        """Return of which rows the doubt is not known, and why. Example: "of stages is not known: no published run ..."."""
        rows: dict[str, list[str]] = {}
        for name, why in self.no_evidence.items():
            rows.setdefault(why, []).append(name)
        return "; ".join(f"of {' and '.join(names)} is not known: {why}" for why, names in rows.items())


@dataclass(frozen=True, repr=False)
class Result:
    """All that a report or a page shows, the same for the command line, the library and the page.

    `plans` stand in the order that the head of this module says. `planner` has the number of micro-batches of `best`; `asked` is the
    request as it was given, and `source` where its graphs come from (see `derived.after_answer`). What most readers do not ask for
    (`candidates`, `choice`) is worked out when it is read."""

    planner: Planner
    asked: Request
    source: GraphSource
    plans: tuple[Plan, ...]
    timings_s: Mapping[str, float]
    notes: tuple[Note, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By pass: why it chose as it did."""
    planners: Mapping[int, Planner] = field(default_factory=dict)
    """By the samples of a global micro-batch: the planner of each plan with another number of micro-batches than the chosen one."""
    best_without_tool: BestWithoutTool | None = None
    """The best plan that no tool bounds, if the request names one that does."""

    def __repr__(self) -> str:
        """Name the recommended plan, and where the others are; its fields fill pages."""
        of = f"{len(self.plans)} plans of {self.graph.name} on {self.cluster.name}"
        return f"<Result of {of}; recommended: {self.recommended!r}; see .recommended, .plans, .choice, .notes>"

    def of_plan(self, plan: Plan) -> Result:
        """Return the same result with the request, the graph and the groups of a plan's own number of micro-batches.

        A baseline stands at the number at which it is best. With one sample of a micro-batch the graph has other rows than with two,
        so that neither its price nor its simulation can be read from the chosen plan's graph."""
        planner = self.planners.get(plan.graph_batch)
        return self if planner is None else replace(self, planner=planner)

    @property
    def request(self) -> Request:
        """The request with the number of micro-batches of `best`."""
        return self.planner.request

    @property
    def graph(self) -> Graph:
        """The graph of one micro-batch."""
        return self.planner.graph

    @property
    def coarse(self) -> CoarseGraph:
        """The groups of its operators."""
        return self.planner.coarse

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self.planner.cluster

    @property
    def workload(self) -> Workload:
        """The workload of a step."""
        return self.planner.workload

    @property
    def uneven_batch(self) -> UnevenBatch | None:
        """The nearest numbers of samples that all GPUs can share evenly, if the request's is not one."""
        return find_uneven_batch(self.planner)

    @property
    def best(self) -> Plan:
        """The best plan of one stage, or a simpler one that ties with it: what the search chose first."""
        return self.plans[0]

    @property
    def searched(self) -> Plan:
        """The plan of one stage that the search found, with its proof: `best`, unless that is a simpler one that ties with it."""
        return without_simpler(self.plans)[0]

    @property
    def staged(self) -> Plan | None:
        """The best plan with pipeline stages; None where they are not quicker, or were not searched (`reasons["stages"]`)."""
        return next((p for p in self.plans if p.role is PlanRole.STAGES), None)

    @cached_property
    def choice(self) -> Choice:
        """How sure the order of the plans is, and which of them is recommended."""
        choice = _choose_among_ties(self)
        if not choice.fits:
            return choice
        fastest = next(p for p in self.plans if p.name == choice.fastest)
        same = tuple(p.name for p in self.plans if p is not fastest and p.fits and _is_same_plan(p, fastest))
        choice = replace(choice, same=same)
        return replace(choice, no_evidence=_find_missing_evidence(choice, self))

    @property
    def recommended(self) -> Plan:
        """The plan to run: the simplest of those that tie with the fastest. Where none fits, the one that comes nearest."""
        return next(p for p in self.plans if p.name == self.choice.recommended)

    @property
    def tool_price(self) -> ToolPrice | None:
        """What the request's tool costs: the recommended plan beside the best that no tool bounds; None until stages are searched for
        both."""
        best = self.best_without_tool
        if best is None or (not best.has_stages and may_use_stages(best.request, self.cluster, self.source)):
            return None
        return compare_without_tool(self.request, self.recommended, best)

    @cached_property
    def candidates(self) -> tuple[Candidates, ...]:
        """The candidates of every repeated block, on the tensor axis of the fastest plan; none where no plan fits."""
        return tuple(block_candidates(self.planner.separate(), self.searched)) if self.searched.fits else ()

    @property
    def dropped(self) -> dict[str, int]:
        """Number of candidates that were dropped, by reason."""
        return _dropped_by_reason(self.candidates, self.planner.budget)

    @property
    def unknown_ops(self) -> tuple[tuple[str, Op], ...]:
        """The operators without a rule, each with the name of its block."""
        return tuple((name, op) for name, block in self.planner.strategies.items() for op in block.unknown)


def append_staged(result: Result, staged: Iterable[tuple[Plan, Planner]]) -> Result:
    """Return the result with these plans with stages at the end, in place of earlier ones. Their planners are those of their numbers of
    micro-batches."""
    added = tuple(staged)
    plans = [plan for plan in result.plans if plan.role not in STAGED_ROLES]
    if result.staged is None and any(plan.fits for plan, _ in added):
        # "at most 15 % above the best there is" would be untrue beside a plan of a quarter of its step.
        # Nor does "does not fit" hold of an answer that fits: it stands with the plan of one stage, whose note it is.
        unfit_notes = result.searched.notes if not result.searched.fits else ()
        result = replace(result, notes=tuple(note for note in result.notes if note not in unfit_notes))
        plans = [_limit_gap_to_one_stage(plan) for plan in plans]
    if STAGES_PASS in result.reasons:
        # The corners that are left keep their numbers: somebody may look at one already, and the page's command picks it by its name.
        corners = [plan for plan in plans if plan.role is PlanRole.TRADE_OFF]
        unbeaten = leave_out_beaten(corners, [plan for plan, _ in added])
        gone = [plan.name for plan in corners if plan not in unbeaten]
        result = replace(result, notes=(*result.notes, *note_beaten_corners(gone)))
        plans = [plan for plan in plans if plan not in corners or plan in unbeaten]
    result = replace(result, plans=tuple(plans))
    for plan, planner in added:
        samples = plan.graph_batch
        sizes = {result.planner.workload.graph_batch, *result.planners}
        planners = result.planners if samples in sizes else {**result.planners, samples: planner.changed()}
        result = replace(result, plans=(*result.plans, plan), planners=planners)
    return result


def _limit_gap_to_one_stage(plan: Plan) -> Plan:
    """Return the plan with the note on its gap saying that the gap is among plans of one pipeline stage, if it has no stages itself."""
    if plan.pipeline is not None:
        return plan
    notes = (
        replace(n, sentence=Sentence(n.sentence, ", of one pipeline stage")) if n.kind is NoteKind.GAP else n
        for n in plan.notes
    )
    return replace(plan, notes=tuple(notes))


def plan_ids(plans: Iterable[Plan]) -> dict[str, Plan]:
    """Return every plan by its id in an address of the page: its name, numbered where two share it."""
    by_id: dict[str, Plan] = {}
    for plan in plans:
        plan_id = base = re.sub(r"[^a-z0-9]+", "-", plan.name.lower()).strip("-") or "plan"
        k = 2
        while plan_id in by_id:
            plan_id, k = f"{base}-{k}", k + 1
        by_id[plan_id] = plan
    return by_id


def _choose_among_ties(result: Result) -> Choice:
    """Return the ties of the fastest plan among the plans that fit. Under another objective than time none is looked for. A plan
    for a tool is recommended as it is: the tool runs it, and may not run the others."""
    tool, staged = result.request.tool, result.staged
    if staged is None and not result.best.fits:
        return Choice(
            result.best.name, (), result.best.name, tool, fits=False, leaves_stages=not result.cluster.is_one_node
        )
    if aim := METHODS[result.request.method].describe_aim(result.request.objective):
        return _choose_asked(result, result.best, aim)
    # A tool may not run what the other rows say, so none of them is a tie.
    if result.request.bounding_tool is not None:
        name = (staged or result.best).name
        return Choice(name, (), name, tool, one_stage=result.best.name)
    # A split of context with ZeRO-2 was recommended for weights in 4 bits, which neither peft nor an exported script runs.
    runs = [p for p in result.plans if p.fits and p.method in RUN_IN_4_BITS] if result.request.nf4 else []
    if runs:
        quickest = min(runs, key=lambda p: p.cost.step_time_s)
        return _choose_asked(result, quickest, "a layout that peft with bitsandbytes runs")
    # `best` and `searched` by the names under which they stand in the report
    of_one_stage = result.plans[: 2 if result.best.role is PlanRole.SIMPLER else 1]
    fastest = staged or of_one_stage[-1]
    ties = _ties_of(fastest, result)
    # A baseline with a mixture of recomputation needs the exported script, as the fastest plan does: it is no simpler.
    order = list(BASELINES)
    stock = {p.name: order.index(p.method) for p in result.plans if runs_on_stock_tools(p)}
    simple = min((t for t in ties if t.name in stock), key=lambda t: stock[t.name], default=None)
    is_simplest = tool is not None or (
        fastest.name in stock and (simple is None or stock[fastest.name] <= stock[simple.name])
    )
    if simple is not None and not is_simplest:
        return Choice(fastest.name, ties, simple.name, tool, Simplicity.STOCK)
    if staged:
        tied = {t.name for t in ties}
        one_stage = next((p.name for p in of_one_stage if p.name in tied), None)
        return Choice(fastest.name, ties, one_stage or staged.name, tool, Simplicity.ONE_STAGE if one_stage else None)
    # A plan that leads by its one axis is not in doubt: `fitting.simpler` compared the two by the simulation.
    leads = result.best is not fastest
    return Choice(fastest.name, ties, result.best.name, tool, Simplicity.ONE_AXIS if leads else None)


def _choose_asked(result: Result, asked: Plan, aim: str) -> Choice:
    """Recommend the plan that was `asked` for, whatever it takes beside the fastest one."""
    quick = min((p for p in result.plans if p.fits), key=lambda p: p.cost.step_time_s)
    slower = asked.cost.step_time_s / quick.cost.step_time_s - 1
    return Choice(quick.name, (), asked.name, result.request.tool, aim=aim, slower=slower)


def _find_missing_evidence(choice: Choice, result: Result) -> dict[str, str]:
    """Return, of the fastest plan and its ties, or without ties and the next one, the rows whose doubt no measured run tells, and why."""
    names = {choice.fastest, *(t.name for t in choice.ties)}
    compared = [p for p in result.plans if p.name in names]
    if not choice.ties:
        others = (p for p in result.plans if p.fits and p.name not in (*names, *choice.same))
        compared += sorted(others, key=lambda p: p.cost.step_time_s)[:1]
    if len(compared) == 1:
        return {}
    return {p.name: why for p in compared if (why := time_band(p, result.cluster).why)}


def _ties_of(fastest: Plan, result: Result) -> tuple[Tie, ...]:
    """Return the plans that are predicted slower than the fastest one by less than the doubt about the two, by rising time."""
    ties = []
    for plan in result.plans:
        doubt = doubt_between(fastest, plan, result.cluster)
        slower = plan.cost.step_time_s / fastest.cost.step_time_s - 1
        # Another row may hold the same plan under another name. Whatever a plan was searched for, its step may tie.
        if plan.fits and 0 <= slower <= doubt and not _is_same_plan(plan, fastest):
            ties.append(Tie(plan.name, plan.method, slower, doubt))
    return tuple(sorted(ties, key=lambda t: t.slower))


def _is_same_plan(one: Plan, other: Plan) -> bool:
    """Return whether two rows hold one plan: the same layout of the same micro-batches, whatever found it."""
    names = ("mesh", "blocks", "pipeline", "accumulate")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def doubt_between(one: Plan, other: Plan, cluster: Cluster) -> float:
    """Return the share by which the predicted steps of two plans may differ and still be a tie."""
    both = math.hypot(time_sigma(one, cluster), time_sigma(other, cluster))
    # expm1 turns the difference of logarithms into a share: 6.7 % of ln are 6.9 %.
    return min(math.expm1(Z_NINE_IN_TEN * both), MAX_DOUBT)


def block_candidates(planner: Planner, chosen: Plan) -> list[Candidates]:
    """Return the candidates of every repeated block on the tensor axis, which is the last axis of the chosen mesh, or all GPUs of a node.
    The other GPUs shard the batch."""
    n, size = planner.cluster.num_gpus, planner.cluster.near_gpus
    if len(chosen.mesh.axis_sizes) > 1:
        size = chosen.mesh.axis_sizes[-1]
    mesh = DeviceMesh(axis_names(2), (n // size, size)) if size < n else DeviceMesh(axis_names(1), (n,))
    restrict = DataAxis(planner.graph) if size < n else None
    problem = planner.problem(planner.cost_model(mesh, zero=0), restrict)
    whole = solve_folded(problem, make_objective(problem, "communication"))
    by_block = []
    for name, repeats in planner.graph.num_repeats.items():
        one = score_candidates(planner.coarse.blocks[name], planner.strategies[name], problem.model, repeats, restrict)
        if one is not None and whole is not None:
            rest = whole.totals - total_of_copies(problem, whole, name)
            one = replace(
                one,
                rest_comm_s=float(rest[Component.COMMUNICATION]),
                rest_memory_bytes=float(rest[Component.AFTER_FORWARD]),
            )
        if one is not None:
            by_block.append(one)
    return by_block


def _dropped_by_reason(candidates: Iterable[Candidates], budget: float) -> dict[str, int]:
    """Number of candidates that were dropped, by reason: they do not shard evenly, the model does not fit, or they are dominated."""
    counts = {"uneven": 0, "memory": 0, "dominated": 0}
    for c in candidates:
        runs = np.isfinite(c.comm_s)
        fits = c.model_memory_bytes <= budget
        beaten = c.possible - c.scored  # these were never formed (see `generate`)
        counts["uneven"] += c.space - c.possible
        counts["memory"] += int((runs & ~fits).sum())
        counts["dominated"] += int((runs & fits & ~c.on_front).sum()) + beaten
    return counts
