"""Cut a model into stages, given policies for its copies: find the best cut, and price its plan."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from planner_core.core import BlockLabel, BlockPlan, Graph, Pipeline, Plan, PlanRole, StageCost
from planner_core.cost import (
    CostModel,
    bound_s,
    cost_model,
    even_copies,
    named_mesh,
    ops_at_the_ends,
    price_simulated,
    price_stages,
    stage_plans,
    with_parts,
)
from planner_core.cost.schedule.pipeline import StagePlan
from planner_core.models import identify_model
from planner_core.planning.methods import EXACT
from planner_core.planning.planner import Planner, recomputation_of
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.interleaved import Cut, find_interleaved_cut, list_interleaved_cuts
from planner_core.planning.stages.pieces import CopyPolicy, PolicyMix, RangeCosts, policy_from_plan
from planner_core.search import Problem, find_least_memory, make_block_plans
from planner_core.search.algebra import StageOption, best_partition

STAGES_PLAN_NAME = "stages"
"""The name of the best plan with pipeline stages."""
LEAST_MEMORY_NAME = "least memory with stages"
"""The name of a plan with stages that does not fit, where no plan does."""
MAX_REPAIRS = 4
"""Searches of one cut, each with less memory than the one before."""
MAX_EXCESS_OVER_WALK = 0.01
"""While no plan fits, the first search may take this share of memory above the budget: a cut whose sum over pieces is above it may still
fit, since its simulated memory can be lower."""


@dataclass(frozen=True)
class PricedCut:
    """A cut with the price of its stages: all of its price but the simulated step. `memory_bytes`: of the fullest rank, by kind."""

    planner: Planner
    degrees: PipelineDegrees
    pipeline: Pipeline
    blocks: dict[str, BlockPlan]
    model: CostModel
    stages: tuple[StagePlan, ...]
    costs: tuple[StageCost, ...]
    memory_bytes: dict[str, int]

    @functools.cached_property
    def bound_s(self) -> float:
        """Seconds that the simulated step is not below."""
        return bound_s(self.pipeline, self.costs, self.degrees.micro_batches)

    def plan(self) -> Plan:
        """Return the plan of the cut, with the price of its simulated step."""
        planner, graph = self.planner, self.planner.graph
        ends = ops_at_the_ends(planner.coarse)
        cost = price_simulated(
            self.stages, self.costs, self.memory_bytes, self.pipeline, self.model, ends, self.bound_s
        )
        return Plan(
            name=STAGES_PLAN_NAME,
            role=PlanRole.STAGES,
            method=EXACT.name,
            objective="time",
            optimal=False,
            model=identify_model(graph),
            workload=replace(planner.workload, recompute=recomputation_of(self.blocks)),
            cluster=planner.cluster,
            mesh=named_mesh(self.degrees.mesh, self.blocks),
            blocks=self.blocks,
            cost=cost,
            fits=cost.memory_bytes["peak"] <= planner.budget,
            pipeline=with_parts(self.pipeline, graph),
        )


def plan_of_cut(
    degrees: PipelineDegrees, planner: Planner, policies: list[CopyPolicy], limit: float, even: bool
) -> Plan | None:
    """Return the plan of the best cut under these policies; None if it does not fit, or takes `limit` seconds. `even`: as `find_cut`."""
    # Each search that only finds a cut for the next one to repair takes as long, so where a plan is known they begin with what fits.
    budget = planner.budget * (1 + MAX_EXCESS_OVER_WALK if limit == math.inf else 1)
    for _ in range(MAX_REPAIRS):
        cut = find_cut(degrees, RangeCosts(policies, degrees.micro_batches, budget), limit, even)
        if cut is None:
            return None
        # A step of thousands of passes takes seconds to simulate, so only cuts that may win are simulated.
        priced = price_cut(degrees, planner, policies, cut)
        if priced.bound_s >= limit:
            return None
        peak_bytes = priced.memory_bytes["peak"]
        if peak_bytes <= planner.budget:
            plan = priced.plan()
            return plan if plan.cost.step_time_s < limit else None
        # The cut sums pieces; the walk of its memory counts what pieces cannot, so the excess moves the budget.
        budget -= 1.01 * (peak_bytes - planner.budget)
    return None


def plan_of_least_memory(degrees: PipelineDegrees, planner: Planner, problem: Problem) -> Plan | None:
    """Return the plan of equal stages whose copies take the least memory of a network; None if it has no plan."""
    if (smallest := find_least_memory(problem)) is None:
        return None
    blocks, ends = make_block_plans(problem, smallest), ops_at_the_ends(planner.coarse)
    policy = policy_from_plan("least memory", blocks, problem.coarse.graph, problem.model, ends, degrees.pipe)
    cut = find_even_cut(degrees, RangeCosts([policy], degrees.micro_batches, math.inf), math.inf)
    return price_cut(degrees, planner, [policy], cut).plan() if cut else None


def price_cut(degrees: PipelineDegrees, planner: Planner, policies: list[CopyPolicy], cut: Cut) -> PricedCut:
    """Price the stages of a cut."""
    pipeline = Pipeline(degrees.ranks, degrees.schedule, cut[0], outer=degrees.outer)
    blocks = combine_blocks(planner.graph, policies, pipeline, cut[1])
    model = cost_model(planner.cluster, degrees.mesh, planner.workload, degrees.pipe)
    stages = stage_plans(blocks, planner.graph, pipeline)
    costs, memory_bytes = price_stages(stages, pipeline, model, ops_at_the_ends(planner.coarse))
    return PricedCut(planner, degrees, pipeline, blocks, model, stages, costs, memory_bytes)


def find_cut(degrees: PipelineDegrees, costs: RangeCosts, limit: float, even: bool) -> Cut | None:
    """Return the best cut; None if none is below `limit` seconds. `even`: stages of equally many copies alone."""
    if even:
        return find_even_cut(degrees, costs, limit)
    return (find_interleaved_cut if degrees.virtual > 1 else find_best_cut)(degrees, costs, limit)


def find_best_cut(degrees: PipelineDegrees, costs: RangeCosts, limit: float) -> Cut | None:
    """Return the best of all cuts with one stage a rank; None if none is below `limit` seconds."""

    def options(stage: int, first: int, last: int) -> list[StageOption]:
        # 1F1B: a stage holds one micro-batch for each stage from itself to the last.
        in_flight = min(degrees.micro_batches, degrees.ranks - stage)
        best = costs.best(first, last, in_flight)
        return [StageOption(*best)] if best else []

    cut = best_partition(len(costs.kinds), degrees.ranks, options, limit)
    return (cut.copies, tuple(c for c in cut.choices if isinstance(c, PolicyMix))) if cut else None


def find_even_cut(degrees: PipelineDegrees, costs: RangeCosts, limit: float) -> Cut | None:
    """Return the cut into stages of as many copies, or one more, all under one policy; None if it does not fit or takes `limit` seconds."""
    copies = even_copies(len(costs.kinds), degrees.ranks * degrees.virtual)
    if degrees.virtual > 1:
        return next((cut for cut, _ in list_interleaved_cuts(degrees, costs, limit) if cut[0] == copies), None)
    delay_s, longest_s, mixes, first = 0.0, 0.0, [], 0
    for stage, count in enumerate(copies):
        best = costs.best(first, first + count, min(degrees.micro_batches, degrees.ranks - stage))
        if best is None:
            return None
        longest_s, delay_s, first = max(longest_s, delay_s + best[0]), delay_s + best[1], first + count
        mixes.append(best[2])
    return (copies, tuple(mixes)) if longest_s < limit else None


def combine_blocks(
    graph: Graph, policies: list[CopyPolicy], pipeline: Pipeline, mixes: tuple[PolicyMix, ...]
) -> dict[str, BlockPlan]:
    """Return the plan's blocks: each copy under the policy that its stage gives it. Copies of one block under one policy are one
    variant."""
    policy_of_call: list[int] = []
    for count, mix in zip(pipeline.copies, mixes, strict=True):
        # As in `RangeCosts`: the last pieces of a stage use the slow policy.
        policy_of_call += [mix.fast] * (count - mix.num_slow) + [mix.slow] * mix.num_slow
    labels = {p: label for label, block in policies[0].blocks.items() for p in block.prefixes}
    # Copies of one plan are one variant however they lie, so the walks and prices of alike copies are shared.
    prefixes: dict[tuple[str, int], list[str]] = {}
    for call, number in zip(graph.calls(), policy_of_call, strict=True):
        prefixes.setdefault((labels[call.prefix], number), []).append(call.prefix)
    # The top block has one plan for all stages: that of the quickest policy, which is the first.
    blocks = {"": policies[0].blocks[""]}
    num_variants: dict[str, int] = {}
    for (label, number), copies in prefixes.items():
        name = BlockLabel.parse(label).block
        variant = num_variants.get(name, 0)
        num_variants[name] = variant + 1
        block = replace(policies[number].blocks[label], prefixes=tuple(copies))
        blocks[str(BlockLabel(name, variant))] = block
    return blocks
