"""Plans whose weights are stored at a ZeRO stage along an axis over which each is used whole."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import BlockLabel, Graph, Plan
from planner_core.core.graph import Block
from planner_core.core.placement import P, Placement, Placements, R, Shard, State, Step
from planner_core.core.plan import BlockPlan, Edge, ParamPlan, SitePlan


def at_stage(plan: Plan, graph: Graph, stage: int, axis: int) -> Plan:
    """The plan with every weight that is summed over `axis` stored there at ZeRO stage 1, 2 or 3.

    A weight that no free dim splits evenly stays as it is.
    """
    blocks = {}
    for label, block in plan.blocks.items():
        body = graph.blocks[BlockLabel.parse(label).block] if label else graph.top
        homes = _homes(block, body, plan.mesh.axis_sizes[axis], axis)
        params = {k: _param(p, homes[k], stage, axis) if k in homes else p for k, p in block.params.items()}
        names = {op.name: [body.values[v].name for v in op.inputs] for op in body.ops}
        sites = {k: _site(s, names[k], homes, stage, axis) for k, s in block.sites.items()}
        blocks[label] = replace(block, params=params, sites=sites)
    return replace(plan, name=f"stage {stage}", blocks=blocks)


def _homes(block: BlockPlan, body: Block, n: int, axis: int) -> dict[str, Shard]:
    """For each weight that is whole on the axis and summed over it the first free dim that can be split."""
    shapes = {v.name: v.meta.shape for v in body.values if v.kind == "parameter"}
    homes = {}
    for name, param in block.params.items():
        if param.stored[axis] == R and param.gradient[axis] == P:
            taken = {p.dim for p in param.stored if isinstance(p, Shard)}
            free = [Shard(d) for d, size in enumerate(shapes[name]) if d not in taken and size % n == 0]
            if free:
                homes[name] = free[0]
    return homes


def _with(placements: Placements, axis: int, new: Placement) -> Placements:
    return (*placements[:axis], new, *placements[axis + 1 :])


def _param(param: ParamPlan, home: Shard, stage: int, axis: int) -> ParamPlan:
    return replace(
        param,
        stored=_with(param.stored, axis, home),
        working=_with(param.working, axis, home) if stage == 3 else param.working,
        gradient=_with(param.gradient, axis, home) if stage >= 2 else param.gradient,
        gathered=(*param.gathered, axis) if stage == 3 else param.gathered,
    )


def _site(site: SitePlan, names: list[str], homes: dict[str, Shard], stage: int, axis: int) -> SitePlan:
    """Weights are gathered at use at stage 3, their gradients scattered at stages 2 and 3."""
    edges = [_edge(e, homes[n], stage, axis) if n in homes else e for e, n in zip(site.inputs, names, strict=True)]
    return replace(site, inputs=tuple(edges))


def _edge(old: Edge, home: Shard, stage: int, axis: int) -> Edge:
    src = State(
        _with(old.src.forward, axis, home) if stage == 3 else old.src.forward,
        _with(old.src.gradient, axis, home) if stage >= 2 else old.src.gradient,
    )
    ahead = (Step(axis, home, R), *old.forward) if stage == 3 else old.forward
    back = (*old.backward, Step(axis, P, home)) if stage >= 2 else old.backward
    return replace(old, src=src, forward=ahead, backward=back)
