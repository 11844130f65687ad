"""Cut a model into stages, given ways to run each copy: the best cut, and its plan with its price."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import BlockPlan, Graph, Pipeline, Plan
from planner_core.cost import (
    cost_model,
    even_copies,
    in_flight,
    named_mesh,
    ops_at_the_ends,
    price_pipeline,
    rank_orders,
    with_parts,
)
from planner_core.planning.fitting.model_identity import model_identity
from planner_core.planning.methods import EXACT
from planner_core.planning.session import Planner, recomputation
from planner_core.planning.stages.degrees import Degrees
from planner_core.planning.stages.pieces import Range, Ranges, Way
from planner_core.search.algebra import StageOption, best_partition

STAGES = "stages"
"""The name of the best plan with pipeline stages."""


def priced_cut(
    d: Degrees, planner: Planner, ways: list[Way], copies: tuple[int, ...], chosen: tuple[Range, ...]
) -> Plan:
    """The plan of a cut, priced by its simulated step and the walk of its memory."""
    pipeline = with_parts(Pipeline(d.ranks, d.schedule, copies), graph := planner.graph)
    blocks = mixed(graph, ways, pipeline, chosen)
    model = cost_model(planner.cluster, d.mesh, planner.workload, d.ranks)
    cost = price_pipeline(blocks, graph, pipeline, model, ops_at_the_ends(planner.coarse))
    return Plan(
        name=STAGES,
        method=EXACT.name,
        objective="time",
        optimal=False,
        model=model_identity(graph),
        workload=replace(planner.workload, recompute=recomputation(blocks)).to_json(),
        cluster=planner.cluster.to_json(),
        mesh=named_mesh(d.mesh, blocks),
        blocks=blocks,
        cost=cost,
        fits=cost.memory_bytes["peak"] <= planner.budget,
        pipeline=pipeline,
    )


def best_cut(d: Degrees, ranges: Ranges, limit: float) -> tuple[tuple[int, ...], tuple[Range, ...]] | None:
    """The best of all cuts, one stage a rank."""

    def options(stage: int, first: int, last: int) -> list[StageOption]:
        found = ranges.best(first, last, min(d.micro_batches, d.ranks - stage))
        return [StageOption(*found)] if found else []

    cut = best_partition(len(ranges.kinds), d.ranks, options, limit)
    return (cut.copies, tuple(c for c in cut.choices if isinstance(c, Range))) if cut else None


def even_cut(d: Degrees, ranges: Ranges, limit: float) -> tuple[tuple[int, ...], tuple[Range, ...]] | None:
    """Equally many copies a stage, several stages a rank: all stages in the quickest way in which the fullest rank fits. None if even the
    quickest is not below a limit."""
    pipeline = Pipeline(d.ranks, d.schedule, even_copies(len(ranges.kinds), d.ranks * d.virtual))
    each = [float(ranges.sums[0].seconds(*pipeline.calls(s))[0]) for s in range(len(pipeline.copies))]
    # A rank waits for the first micro-batch, and after its last one for the ranks before it: their stages run once beside its own work.
    busy = (d.micro_batches * sum(each[s] for s in pipeline.stages_of(r)) + sum(each[:r]) for r in range(d.ranks))
    if max(busy) >= limit:
        return None
    held = [in_flight(order) for order in rank_orders(pipeline, d.micro_batches)]
    for number in range(len(ranges.ways)):
        if all(
            ranges.fit([(*pipeline.calls(s), held[r][s]) for s in pipeline.stages_of(r)], number)
            for r in range(d.ranks)
        ):
            return pipeline.copies, (Range(number, number),) * len(pipeline.copies)
    return None


def mixed(graph: Graph, ways: list[Way], pipeline: Pipeline, chosen: tuple[Range, ...]) -> dict[str, BlockPlan]:
    """The plan's blocks, each copy in the way that its stage chose for it."""
    way_of_call: list[int] = []
    for stage, choice in enumerate(chosen):
        count = pipeline.copies[stage]
        way_of_call += [choice.fast] * (count - choice.of_slow) + [choice.slow] * choice.of_slow
    labels = {p: label for label, block in ways[0].blocks.items() for p in block.prefixes}
    found = {"": ways[0].blocks[""]}
    prefixes: dict[tuple[str, int], list[str]] = {}
    for call, number in zip(graph.calls(), way_of_call, strict=True):
        prefixes.setdefault((labels[call.prefix], number), []).append(call.prefix)
    seen: dict[str, int] = {}
    for (label, number), own in prefixes.items():
        name = label.partition("#")[0]
        variant = seen.get(name, 0)
        seen[name] = variant + 1
        found[f"{name}#{variant}" if variant else name] = replace(ways[number].blocks[label], prefixes=tuple(own))
    return found
