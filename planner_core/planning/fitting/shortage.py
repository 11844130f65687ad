"""Why no plan fits: there is too little memory, or the number of GPUs does not divide the model's sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from planner_core.core import Graph, NoPlanFits, Plan, Shard
from planner_core.cost import DATA, IDLE, SHARD, axis_roles, block_of
from planner_core.planning.session import Planner
from planner_core.search import Answer, memory_of
from planner_core.search.algebra import TooWide
from planner_core.search.network import Problem

MOSTLY = 0.5
"""An axis is called idle if less than this share of the weights' elements is sharded on it."""
BUFFERS, NEARLY = 0.02, 1.1
"""If the peak of the plan of least memory is above its sum by more than the share BUFFERS, and its sum is at most NEARLY of the budget,
plans without gathered weights are looked at."""


def shortage(least: Plan, graph: Graph, budget: float, at_least: float) -> str:
    """The message for a model whose plan of least memory, `least`, needs more than `budget` bytes per GPU. `at_least`: the network's
    sum for that plan, below which no plan is. If it is far below the plan's peak, another plan may have a lower peak."""
    peak = least.cost.memory_bytes["peak"]
    most = "" if peak <= at_least * (1 + BUFFERS) else "at most "
    needs = f"the least memory that any plan needs is {most}{than_there_is(peak, budget)}"
    idle = idle_axes(least, graph)
    if not idle:
        return "; ".join((needs, *same_work(least)))
    gpus, sizes = least.mesh.num_devices, " x ".join(f"{least.mesh.axis_sizes[a]:,}" for a in idle)
    even = 2 ** int(math.log2(gpus))
    better = f"; {even:,} GPUs would" if even != gpus else ""
    return (
        f"{needs}. Most of the {gpus:,} GPUs hold the same weights: batch {least.workload['batch']:,} and the sizes of this model "
        f"do not divide by {sizes}{better}"
    )


def than_there_is(needed: float, budget: float) -> str:
    """How many bytes a GPU needs and has, with as many digits as tell them apart."""
    first = 1 if budget > 1e9 else 4
    digits = next((d for d in range(first, 9) if f"{needed / 1e9:.{d}f}" != f"{budget / 1e9:.{d}f}"), 9)
    return f"{needed / 1e9:.{digits}f} GB per GPU, but there are {budget / 1e9:.{digits}f} GB"


def copies(plan: Plan) -> int:
    """How many GPUs do the same work."""
    return math.prod(
        n for axis, (role, n) in enumerate(zip(axis_roles(plan), plan.mesh.axis_sizes, strict=True))
        if role == IDLE or (role in (DATA, SHARD) and axis not in plan.data_axes)
    )  # fmt: skip


def same_work(plan: Plan) -> tuple[str, ...]:
    """A message if GPUs of a plan do the same work, since the samples of a step cannot be dealt out to them."""
    mesh, batch, alone = plan.mesh, int(plan.workload["batch"]), copies(plan)
    if alone == 1 or batch % mesh.num_devices == 0:
        return ()
    more = -(-batch // mesh.num_devices) * mesh.num_devices
    return (
        f"groups of {alone:,} GPUs do the same work, since {batch:,} samples cannot be dealt out to them: --batch {more} would "
        f"use all {mesh.num_devices:,} GPUs",
    )


def idle_axes(plan: Plan, graph: Graph) -> list[int]:
    """The mesh axes of more than one device on which most of the weights are not sharded."""
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
    """Whether the network's sum of the least memory nearly fits, and its peak is well above the sum. Buffers for gathered weights may
    be why: the sum does not hold them."""
    held = memory_of(answer.smallest) if answer.smallest else float("inf")
    return held <= budget * NEARLY and answer.least_memory > held * (1 + BUFFERS)


def left_out(plan: Plan, wide: TooWide | None) -> Plan:
    """The best plan of the meshes that were searched. `wide`: the error of a mesh that was not, which may have a better one."""
    if wide is None:
        return plan
    told = f"best found: a mesh was left out, since its search needs a table of {wide.entries:.2g} numbers"
    return replace(plan, optimal=False, notes=(told, *plan.notes))


def refused(planner: Planner, below: float, least: tuple[Answer, Problem] | None, wide: TooWide | None) -> Plan:
    """What `choose` gives or raises if no plan fits. `least`: what was found of least memory."""
    if below < float("inf"):
        raise NoPlanFits(f"no plan that fits is better than {below:.4g}")
    if least is None and wide is not None:
        raise wide
    if least is None:
        raise NoPlanFits("no plan of this model can run on these meshes; try another --mesh or --batch")
    return _of_least_memory(planner, *least)


def _of_least_memory(planner: Planner, answer: Answer, problem: Problem) -> Plan:
    """The plan of least memory, which does not fit. Raises NoPlanFits if the user gave a budget."""
    assert answer.smallest is not None
    smallest = Answer(answer.smallest, 0.0, 0.0, answer.least_memory)
    objective = planner.objective()
    plan = planner.plan(problem, smallest, "least memory", planner.request.method, objective)
    short = shortage(plan, planner.graph, planner.budget, memory_of(answer.smallest))
    if planner.request.memory_gb is not None:
        peak = plan.cost.memory_bytes["peak"]
        again = "" if planner.workload.recompute in ("auto", "full") else ", --recompute full"
        raise NoPlanFits(
            f"no plan fits: {short}; use more GPUs, a smaller --batch{again} or --memory-gb {math.ceil(peak / 1e9)}",
            peak,
        )
    return replace(plan, fits=False, notes=(f"does not fit: {short}",))
