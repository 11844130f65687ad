"""Searches of the whole model on the mesh of a rank: the bounds that they give on every cut, and the policies of copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from planner_core.core import BlockPlan, Graph, InputError, Sentence
from planner_core.cost import Component, ops_at_the_ends, without_copies_of_inputs
from planner_core.planning.methods import TOOLS, ToolStages
from planner_core.planning.methods.legality import unsearchable_faults
from planner_core.planning.planner import Networks, Planner, prepare_planner, with_recompute, with_zero
from planner_core.planning.request import Progress, Request
from planner_core.planning.stages.degrees import ModelKey, PipelineDegrees
from planner_core.planning.stages.pieces import CopyPolicy, policy_from_plan
from planner_core.planning.stages.rank_bound import RankBound, rank_bound
from planner_core.planning.stages.tool_forms import layout_of_tool
from planner_core.search import SearchLimits, make_block_plans, search_roughly, search_within_budget
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

MEMORY_SHARES, POLICY_MEMORY_SHARE = (1.0, 0.35), 0.6
"""The shares of the ranks' memory in which a copy policy is searched: with recomputation chosen for each block, and with one
recomputation for all."""
STRONG_RECOMPUTATIONS = ("selective", "keep-attention", "full")


class WholeModels:
    """The searches of one request, each of which runs once.

    Attributes:
        first: The planner of the request.
        form: What the request's tool can be told; None if every plan may be chosen.
        planners: Planners by number of micro-batches and ZeRO stage; None where the model has no such batch.
        policies: The copy policies with the bounds of their searches, by `whole_model`, recomputation and share of memory; None where
            nothing fits, or the bound ended the search.
        uniform: The last network in which all copies are alike, by `whole_model` and recomputation.
        model_s: The bound S by `PipelineDegrees.whole_model`.
        prices: The prices of memory that gave this bound, by the same key.
        without_copies: What the planners of bounds share, by number of micro-batches, where they are others (`bounding_planner`).
        bounding: The networks of bounds by `whole_model`.
        rank_bounds: The least costs of a copy by `whole_model`; None where the model has no plan.
    """

    def __init__(
        self,
        first: Planner,
        report_progress: Progress,
        load_graph: Callable[[Request], Graph] | None,
        form: ToolStages | None,
    ) -> None:
        self.first, self.report_progress, self.load_graph, self.form = first, report_progress, load_graph, form
        self.planners: dict[tuple[int, int], Planner | None] = {}
        self.policies: dict[tuple[ModelKey, str, float], tuple[CopyPolicy | None, float]] = {}
        self.uniform: tuple[tuple[ModelKey, str], Problem | None] | None = None
        self.model_s: dict[ModelKey, float] = {}
        self.prices: dict[ModelKey, tuple[float, float]] = {}
        self.without_copies: dict[int, Networks] = {}
        self.bounding: dict[ModelKey, Problem | None] = {}
        self.rank_bounds: dict[ModelKey, RankBound | None] = {}

    @property
    def bounded(self) -> Set[ModelKey]:
        """The whole models of which a bound is known."""
        return self.model_s.keys() | self.rank_bounds.keys()

    @property
    def copies(self) -> int:
        """The copies of all repeated blocks."""
        return sum(self.first.graph.num_repeats.values())

    def find_rank_bound(self, d: PipelineDegrees) -> RankBound | None:
        """Return the least costs of a copy on the mesh of a rank; None if the model has no plan on these degrees."""
        if (key := d.whole_model) not in self.rank_bounds:
            problem = self.bounding_problem(d)
            self.rank_bounds[key] = (
                rank_bound(problem, self.first.budget, d.ranks, self.copies) if problem is not None else None
            )
        return self.rank_bounds[key]

    def planner(self, d: PipelineDegrees) -> Planner | None:
        """Return the planner of a number of micro-batches and a ZeRO stage; None if the model has no such batch."""
        if (key := (d.micro_batches, d.zero)) not in self.planners:
            # The graph depends on the size of a micro-batch alone, so planners of other ZeRO stages share it.
            other = next((p for (number, _), p in self.planners.items() if number == d.micro_batches), self.first)
            if other is self.first:
                request = replace(self.first.request, batch=self.first.workload.batch, accumulate=d.micro_batches)
                try:
                    graph = self.load_graph(request) if self.load_graph else None
                    other = prepare_planner(request, graph, earlier_planner=self.first)
                except InputError:
                    other = None
            self.planners[key] = other and with_zero(other, d.zero)
        return self.planners[key]

    def problem(self, d: PipelineDegrees, recompute: str, *, uniform: bool, at_least: bool = False) -> Problem | None:
        """Return the network of the whole model on the mesh of a rank; None if it has no plan, or its cost is not a sum over its parts.
        `at_least`: its sums of memory are of no plan above what a GPU holds, as a bound needs."""
        planner = self.planner(d)
        if planner is None:
            return None
        planner = with_recompute(self.bounding_planner(planner) if at_least else planner, recompute)
        layout = layout_of_tool(self.form, d) if self.form else None
        try:
            if layout is None:
                problem = planner.problem(planner.cost_model(d.mesh, pipe=d.pipe), uniform=uniform, at_least=at_least)
            elif unsearchable_faults(planner.graph, layout):
                return None
            else:
                problem = planner.of_space(layout.space(), uniform, at_least)
        except TooWide:
            return None
        # A restricted problem bounds only its own smaller space, and every bound here must hold for the whole one.
        return None if problem.is_infeasible or problem.unrestricted is not None else problem

    def bounding_planner(self, planner: Planner) -> Planner:
        """Return the planner whose blocks make no copies of what a stage may receive, so that no stage keeps less."""
        if (graph := without_copies_of_inputs(planner.graph)) is planner.graph:
            return planner
        blocks = {name: replace(block, block=graph.blocks[name]) for name, block in planner.coarse.blocks.items()}
        coarse = replace(planner.coarse, graph=graph, blocks=blocks)
        own = Networks(coarse, planner.strategies, planner.networks.max_points)
        # Those of other ZeRO stages and meshes share what is the same for them.
        networks = self.without_copies.setdefault(planner.workload.accumulate, own)
        return replace(planner, networks=networks.for_other_workload())

    def bounding_problem(self, d: PipelineDegrees) -> Problem | None:
        """Return the network of the bounds on all cuts of some degrees."""
        if (key := d.whole_model) not in self.bounding:
            self.bounding[key] = self.problem(d, self.first.request.recompute, uniform=False, at_least=True)
        return self.bounding[key]

    def unconstrained(self, d: PipelineDegrees) -> tuple[float, float] | None:
        """Return the seconds and activation bytes of a micro-batch of the whole model on the mesh of a rank, without recomputation or a
        budget."""
        problem = self.problem(d, "none", uniform=False)
        with self.first.clock("search"):
            solution = search_roughly(problem, "time") if problem else None
        if solution is None:
            return None
        activations = solution.totals[Component.AFTER_FORWARD] - solution.totals[Component.AFTER_BACKWARD]
        return solution.seconds / d.micro_batches, max(0.0, float(activations))

    def search_model_s(self, d: PipelineDegrees, limit: float) -> float:
        """Return the bound S: least seconds of the whole model on the mesh of a rank, for all micro-batches, in the memory of all ranks.

        The search stops early once every cut would take the `limit` if no work were once a step (`lower_bound_s`); the result is then
        a smaller bound."""
        key = d.whole_model
        if key not in self.model_s:
            self.report_progress(Sentence(f"the whole model on {d.ranks} x ", d.mesh.term, f", ZeRO {d.zero}"))
            problem = self.bounding_problem(d)
            with self.first.clock("search"):
                max_s = limit / d.lower_bound_s(1.0)  # the bound is linear in S
                self.model_s[key] = math.inf
                if problem:
                    limits = SearchLimits(abandon_above=max_s, prove=False, bound_only=True)
                    result = search_within_budget(problem, budget=self.model_budget(d), limits=limits)
                    self.prices[key] = result.prices
                    # No plan and a low bound: the whole model does not fit into all ranks' memory, so S stays infinite: no cut fits either.
                    if result.assignment or result.bound > max_s:
                        self.model_s[key] = result.bound
        return self.model_s[key]

    def model_budget(self, d: PipelineDegrees, share: float = 1.0) -> float:
        """Return the bytes for the whole model on the mesh of a rank, if each rank gives a share of its budget."""
        return share * d.ranks * self.first.budget

    def find_policies(self, d: PipelineDegrees, limit: float) -> Iterator[CopyPolicy]:
        """Yield the copy policies on the mesh of a rank: the best plans in shares of the ranks' memory, then the best plan under each
        recomputation that saves much memory, since the first ranks hold many micro-batches."""
        # Several stages a rank all run under one policy, so a policy that is too slow for equal stages needs no search to the end. One
        # stage a rank mixes policies: a slow one may serve the few copies for which memory lacks.
        max_s = d.micro_batches * limit / d.optimistic_s(1.0) if d.virtual > 1 else math.inf
        seen: list[Mapping[str, BlockPlan]] = []
        for recompute, shares in self.recomputations:
            for share in shares:
                policy = self.search_policy(d, recompute, share, max_s)
                # The shares fall, so the plans of those that follow are slower still, or do not fit either.
                if policy is None:
                    break
                # Where memory is plenty, several shares and recomputations have the same best plan.
                if policy.blocks not in seen:
                    seen.append(policy.blocks)
                    yield policy

    @property
    def recomputations(self) -> Sequence[tuple[str, Sequence[float]]]:
        """The recomputations under which copy policies are searched, each with its shares of memory."""
        requested = self.first.request.recompute
        if self.form:  # a layout leaves no choice that trades time for memory
            switches = TOOLS[str(self.first.request.tool)].recomputations if requested == "auto" else (requested,)
            return [(one, (1.0,)) for one in switches]
        others = STRONG_RECOMPUTATIONS if requested == "auto" else ()
        return [(requested, MEMORY_SHARES), *((other, (POLICY_MEMORY_SHARE,)) for other in others)]

    def search_policy(self, d: PipelineDegrees, recompute: str, share: float, max_s: float) -> CopyPolicy | None:
        """Return the copy policy of the best plan in a share of the ranks' memory; None if nothing fits, or a micro-batch of all ranks
        takes more than `max_s` for sure."""
        key = d.whole_model, recompute, share
        # Ranks with one stage and with several have the same policies, so only a search that was given up too early is begun again.
        policy, bound = self.policies.get(key, (None, -math.inf))
        if policy is None and bound <= max_s:
            policy, bound = self.policies[key] = self.search_new_policy(d, recompute, share, max_s)
        return policy if bound <= max_s else None

    def search_new_policy(
        self, d: PipelineDegrees, recompute: str, share: float, max_s: float
    ) -> tuple[CopyPolicy | None, float]:
        """Search as `search_policy` does. Returns the policy with its bound; the bound is infinite if nothing fits."""
        # The shares of one recomputation follow each other, and the second begins with the solutions of the first.
        if self.uniform is None or self.uniform[0] != (d.whole_model, recompute):
            self.uniform = (d.whole_model, recompute), self.problem(d, recompute, uniform=True)
        problem = self.uniform[1]
        if problem is None:
            return None, math.inf
        with self.first.clock("search"):
            prices = self.prices.get(d.whole_model, (0.0, 0.0))
            limits = SearchLimits(abandon_above=max_s, prove=False, prices=prices)
            whole, budget = self.model_budget(d), self.model_budget(d, share)
            result = search_within_budget(problem, budget=budget, limits=limits)
            # Where the states take most of the memory, no plan is within the share, but one within all of it may be too large for a rank.
            if result.smallest is not None and result.least_memory < whole:
                budget = result.least_memory + share * (whole - result.least_memory)
                result = search_within_budget(problem, budget=budget, limits=limits)
        if result.assignment is None or result.bound > max_s:
            return None, result.bound if result.bound > max_s else math.inf
        blocks, ends = make_block_plans(problem, result.assignment), ops_at_the_ends(self.first.coarse)
        name = f"{recompute} {share:g}"
        return policy_from_plan(name, blocks, problem.coarse.graph, problem.model, ends, d.pipe), result.bound
