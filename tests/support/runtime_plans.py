"""Random plans: every op of a graph runs by a random row, every tensor is delivered whole with a partial gradient.

That state can be read by every row, so any combination of rows is a plan, and all of them must compute the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from planner_core.core import BlockPlan, Cost, Edge, ParamPlan, Plan, SitePlan, Workload, load_cluster
from planner_core.core.errors import ShardingError
from planner_core.core.graph import ITEM_BYTES, Graph, Op, Value, unfold_graph
from planner_core.core.mesh import DeviceMesh, axis_names
from planner_core.core.placement import P, Placements, R, Shard, State, Step, local_shape
from planner_core.cost.communication.links import AxisLink
from planner_core.cost.communication.redistribution import all_redistributions
from planner_core.models import identify_model
from planner_core.ops.registry import rows
from planner_core.ops.rules import Row, can_run_together

Choose = Callable[[Op, tuple[Row, ...], int], Row]
"""Which row an op runs by on a mesh axis."""


def random_choice(seed: int) -> Choose:
    """Any row, each with the same chance."""
    dice = random.Random(seed)
    return lambda op, op_rows, axis: dice.choice(op_rows)


def fits(op: Op, values: tuple[Value, ...], picked: list[Row], sizes: tuple[int, ...]) -> bool:
    """Return whether the rows split everything evenly, fused parts too, alone and together."""
    for ids, which in ((op.inputs, "inputs"), (op.outputs, "outputs")):
        for i, v in enumerate(ids):
            placements = tuple(getattr(r, which)[i][0] for r in picked)
            try:
                local_shape(values[v].meta.shape, placements, sizes)
            except ShardingError:
                return False
    return all(e % n == 0 for r, n in zip(picked, sizes, strict=True) for e in r.divides) and _joint(picked, sizes)


def _joint(picked: list[Row], sizes: tuple[int, ...]) -> bool:
    same: dict[str, int] = {}
    for r, n in zip(picked, sizes, strict=True):
        same[r.name] = same.get(r.name, 1) * n
    return can_run_together(picked, sizes) and all(
        e % same[r.name] == 0 for r in picked if r.splits_work for e in r.divides
    )


def make_plan(
    graph: Graph, sizes: tuple[int, ...], choose: Choose, *, shard_storage: bool = False, seed: int = 0
) -> Plan:
    """Return a plan of the unfolded graph in which `choose` picks the rows; storage is whole, or sharded at random (gathered at use)."""
    top = unfold_graph(graph).top
    dice = random.Random(seed)
    stored = {v: _stored(top.values[v], sizes, dice if shard_storage else None) for v in range(len(top.values))}
    links = tuple(AxisLink(n) for n in sizes)
    sites = {}
    for op in top.ops:
        op_rows = rows(op, top.values)
        picked = _pick(op, top.values, op_rows, sizes, choose)
        sites[op.name] = _site(op, top.values, picked, sizes, links, stored)
    params = {}
    for v, value in enumerate(top.values):
        if value.kind == "parameter":
            state = stored[v]
            gathered = tuple(a for a, p in enumerate(state.forward) if p != R)
            params[value.name] = ParamPlan(state.forward, state.forward, state.gradient, gathered)
    mesh = DeviceMesh(axis_names(len(sizes)), sizes)
    cost = Cost(0.0, 0.0, 0.0, 0.0, (), {})
    load = Workload(graph.workload["batch"], graph.workload["seq"], "float32", zero=0)
    model, machine = identify_model(graph), load_cluster("1x8-h100")
    return Plan(
        "random", "random", "none", False, model, load, machine, mesh, {"": BlockPlan(("",), params, sites)}, cost
    )


def _stored(value: Value, sizes: tuple[int, ...], dice: random.Random | None) -> State:
    forward: list[object] = []
    for _ in sizes:
        options = [Shard(d) for d in range(len(value.meta.shape))] if dice and value.kind == "parameter" else []
        options = [s for s in options if _even(value, (*forward, s), sizes)]
        forward.append(dice.choice([R, *options]) if dice else R)
    placements: Placements = tuple(forward)  # type: ignore[arg-type]
    return State(placements, tuple(p if p != R else (P if value.grad else R) for p in placements))


def _even(value: Value, placements: tuple[object, ...], sizes: tuple[int, ...]) -> bool:
    try:
        local_shape(value.meta.shape, placements, sizes[: len(placements)])  # type: ignore[arg-type]
    except ShardingError:
        return False
    return True


def _pick(
    op: Op, values: tuple[Value, ...], op_rows: tuple[Row, ...], sizes: tuple[int, ...], choose: Choose
) -> list[Row]:
    for _ in range(20):
        picked = [choose(op, op_rows, axis) for axis in range(len(sizes))]
        if fits(op, values, picked, sizes):
            return picked
    return [op_rows[0]] * len(sizes)


def _site(
    op: Op,
    values: tuple[Value, ...],
    picked: list[Row],
    sizes: tuple[int, ...],
    links: tuple[AxisLink, ...],
    stored: dict[int, State],
) -> SitePlan:
    whole = State((R,) * len(sizes), (R,) * len(sizes))
    inputs, outputs = [], []
    for i, v in enumerate(op.inputs):
        value = values[v]
        taken = State(tuple(r.inputs[i][0] for r in picked), tuple(r.inputs[i][1] for r in picked))
        src = whole if value.kind == "constant" else stored[v]
        segments = {r.inputs[i][0].dim: r.segments[i] for r in picked if i in r.segments}  # type: ignore[union-attr]
        table = all_redistributions(
            value.meta.shape, ITEM_BYTES[value.meta.dtype], sizes, links, tuple(segments.items())
        )
        held = tuple(R if t == P else t for t in taken.forward)
        divide = tuple(Step(a, R, P) for a, t in enumerate(taken.forward) if t == P)
        forward = () if value.kind == "constant" else (*table.steps(src.forward, held), *divide)
        back = table.steps(taken.gradient, src.gradient) if value.grad else ()
        inputs.append(Edge(src, taken, forward, back, segments))
    for i, v in enumerate(op.outputs):
        made = State(tuple(r.outputs[i][0] for r in picked), tuple(r.outputs[i][1] for r in picked))
        value = values[v]
        last = not value.meta.shape and op.name.endswith(("cross_entropy", "nll_loss", "loss/mean"))
        to = State(whole.forward, whole.gradient) if last else stored[v]
        table = all_redistributions(value.meta.shape, ITEM_BYTES[value.meta.dtype], sizes, links)
        back = table.steps(to.gradient, made.gradient) if value.grad else ()
        outputs.append(Edge(made, to, table.steps(made.forward, to.forward), back))
    return SitePlan(tuple(inputs), tuple(outputs))


def forced(fn: str, label: str, sizes: tuple[int, ...]) -> list[Choose]:
    """Choices that run every `fn` by the row `label` on one axis of the mesh, all else whole."""

    def on(axis: int) -> Choose:
        def choose(op: Op, op_rows: tuple[Row, ...], at: int) -> Row:
            return next((r for r in op_rows if at == axis and op.fn == fn and r.name == label), op_rows[0])

        return choose

    return [on(axis) for axis in range(len(sizes))]
