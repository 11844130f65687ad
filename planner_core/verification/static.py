"""Check a plan without running it. Every finding is a sentence; an empty list means that the plan is right.

It finds names and ties that match nothing; dims that are not sharded evenly; operators that run by no known rule (a column-sharded
layer whose result is called Replicate, or sharded query heads with Replicate keys); and edges whose steps do not lead to their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from planner_core.core import (
    Block,
    BlockPlan,
    Call,
    Edge,
    Graph,
    Op,
    ParamPlan,
    Placements,
    Plan,
    Replicate,
    Shard,
    ShardingError,
    SitePlan,
    State,
    Step,
    TensorMeta,
    format_placements,
    local_shape,
    needs_uneven_split,
)
from planner_core.cost import can_run_in_chunks
from planner_core.models import load_plan_graph
from planner_core.ops import Pair, Row, can_run_together, rows


def check_rules(plan: Plan, graph: Graph) -> list[str]:
    """Return the findings about `plan` as a plan of `graph`, each once, in the order of the model."""
    if plan.blocks[""].prefixes != ("",):
        return [f"the top block has prefixes {list(plan.blocks[''].prefixes)}, which is for the whole model alone"]
    variants = {prefix: variant for variant, bp in plan.blocks.items() for prefix in bp.prefixes}
    blocks = {"": graph.top, **{c.prefix: graph.blocks[c.block] for c in graph.calls()}}
    problems = [f"block {p!r} matches no part of {graph.name}" for p in variants if p not in blocks]
    problems += [f"{p!r} of {graph.name} has no plan" for p in blocks if p not in variants]
    for variant, bp in plan.blocks.items():
        for name in dict.fromkeys(blocks[p].name for p in bp.prefixes if p in blocks):
            block = next(b for b in blocks.values() if b.name == name)
            problems += _check_names(variant or "top", block, bp)
            problems += _check_operators(variant or "top", block, bp, plan.mesh.axis_sizes)
    problems += _check_block("", graph.top, plan, {}, variants, graph)
    return list(dict.fromkeys(problems))


def verify_rules(plan: Plan) -> dict[str, Any]:
    """Report the findings about a plan of its own model, without a run. Raises InputError."""
    problems = check_rules(plan, load_plan_graph(plan))
    nothing = dict.fromkeys(("loss", "grad", "collectives", "memory_bytes"))
    return {"ok": not problems, "ranks": plan.mesh.num_devices, "backend": "rules", **nothing, "findings": problems}


def _check_names(where: str, block: Block, bp: BlockPlan) -> Iterator[str]:
    """Yield findings about names that match nothing, and about parameters and ops without a plan."""
    here = {v.name for v in block.own_parameters.values()}
    ops = {o.name for o in block.ops}
    yield from (f"{where}: parameter {n!r} matches nothing" for n in bp.params if n not in here)
    yield from (f"{where}: parameter {n!r} has no plan" for n in here if n not in bp.params)
    yield from (f"{where}: op {n!r} matches nothing" for n in bp.sites if n not in ops)
    yield from (f"{where}: op {n!r} has no plan" for n in ops if n not in bp.sites)


def _check_operators(where: str, block: Block, bp: BlockPlan, sizes: tuple[int, ...]) -> Iterator[str]:
    """Yield findings about operators: on every mesh axis operands and results must be those of one of its rows, and shard evenly."""
    for op in block.ops:
        site = bp.sites.get(op.name)
        if site is None or not _has_matching_arity(op, site):
            continue
        known = rows(op, block.values)
        axis_rows: list[Row] = []
        for axis, size in enumerate(sizes):
            taken = tuple((e.dst.forward[axis], e.dst.gradient[axis]) for e in site.inputs)
            delivered = tuple((e.src.forward[axis], e.src.gradient[axis]) for e in site.outputs)
            same = [row for row in known if (row.inputs, row.outputs) == (taken, delivered)]
            # On an axis of one device all rows compute the same, so none excludes another.
            axis_rows += same[:1] if size > 1 else []
            uneven = [[d for d in row.divides if d % size] for row in same]
            if not same:
                yield (
                    f"{where}: {op.name} takes {_format_pairs(taken)} and makes {_format_pairs(delivered)} on mesh axis {axis} "
                    f"(tensor|gradient), which is not one of the {len(known)} ways that it can run"
                )
            elif all(uneven):
                yield f"{where}: {op.name} cannot split {uneven[0][0]} evenly over the {size} devices of mesh axis {axis}"
        if not can_run_together(axis_rows, [n for n in sizes if n > 1]):
            yield f"{where}: {op.name} splits {' and '.join(r.name for r in axis_rows)}, which do not go together on these mesh axes"


def _format_pairs(pairs: Iterable[Pair]) -> str:
    return ", ".join(f"{p}|{g}" for p, g in pairs) or "nothing"


def _has_matching_arity(op: Op, site: SitePlan) -> bool:
    return (len(site.inputs), len(site.outputs)) == (len(op.inputs), len(op.outputs))


def _check_block(
    variant: str, block: Block, plan: Plan, delivered: dict[int, State], variants: Mapping[str, str], graph: Graph
) -> Iterator[str]:
    bp, where = plan.blocks[variant], variant or "top"
    for i, value in enumerate(block.values):
        param = bp.params.get(value.name) if value.kind == "parameter" and i not in block.inputs else None
        if param is not None:
            delivered[i] = State(param.working, param.gradient)
            yield from _check_even(
                f"{where}: {value.name}", value.meta.shape, _even_placements(value.meta, param, plan), plan
            )
    for item in block.items:
        if isinstance(item, Call):
            yield from _check_call(item, plan, delivered, variants, graph)
        elif item.name in bp.sites:
            yield from _check_site(where, block, item, bp, plan, delivered)


def _check_call(
    call: Call, plan: Plan, outer: dict[int, State], variants: Mapping[str, str], graph: Graph
) -> Iterator[str]:
    if call.prefix not in variants:
        return
    block = graph.blocks[call.block]
    inner = {i: outer[o] for i, o in zip(block.inputs, call.inputs, strict=True) if o in outer}
    yield from _check_block(variants[call.prefix], block, plan, inner, variants, graph)
    outer.update({o: inner[i] for i, o in zip(block.outputs, call.outputs, strict=True) if i in inner})


def _check_site(
    where: str, block: Block, op: Op, bp: BlockPlan, plan: Plan, delivered: dict[int, State]
) -> Iterator[str]:
    site, name = bp.sites[op.name], f"{where}: {op.name}"
    if not _has_matching_arity(op, site):
        have, want = (len(op.inputs), len(op.outputs)), (len(site.inputs), len(site.outputs))
        yield f"{name} has {have[0]} operands and {have[1]} results, the plan {want[0]} and {want[1]}"
        return
    for v, edge in zip(op.inputs, site.inputs, strict=True):
        value = block.values[v]
        if value.kind != "constant":
            if v in delivered and delivered[v].forward != edge.src.forward:
                yield f"{name} expects operand {v} as {edge.src}, but it is delivered as {delivered[v]}"
            if value.grad and v in delivered and delivered[v].gradient != edge.src.gradient:
                yield f"{name} returns the gradient of operand {v} as {edge.src}, but {delivered[v]} is summed"
            yield from _check_edge(f"{name} operand {v}", edge, value.grad)
        yield from _check_even(f"{name} operand {v}", value.meta.shape, edge.dst.forward, plan, edge)
    for v, edge in zip(op.outputs, site.outputs, strict=True):
        # Later operators take the result as its moves leave it.
        delivered[v] = edge.dst
        yield from _check_edge(f"{name} result {v}", edge, block.values[v].grad)
        if edge.chunks > 1 and (
            op.name in bp.kept or not can_run_in_chunks(block, op, edge, plan.mesh.axis_sizes, edge.chunks)
        ):
            yield f"{name} cannot make its result in {edge.chunks} parts and send each by itself"
        yield from _check_even(f"{name} result {v}", block.values[v].meta.shape, edge.src.forward, plan, edge)
        yield from _check_even(f"{name} result {v}", block.values[v].meta.shape, edge.dst.forward, plan, edge)


def _check_edge(name: str, edge: Edge, grad: bool) -> Iterator[str]:
    """Yield findings about an edge whose steps do not lead from its source to its destination."""
    yield from _check_steps(f"{name}: forward", edge.forward, edge.src.forward, edge.dst.forward)
    if grad:
        yield from _check_steps(f"{name}: backward", edge.backward, edge.dst.gradient, edge.src.gradient)


def _check_steps(name: str, steps: Iterable[Step], src: Placements, dst: Placements) -> Iterator[str]:
    here = list(src)
    for step in steps:
        if here[step.axis] != step.src:
            yield f"{name} step {step} starts from {format_placements(here)}"
            return
        # Axes that split one dim nest, the first outermost. A gather of the outer one would join pieces that do not lie together.
        inner = here[step.axis + 1 :]
        if any(isinstance(p, Shard) and p in inner for p in (step.src, step.dst)):
            yield f"{name} step {step} moves the outer of two axes that split one dim"
        here[step.axis] = step.dst
    if tuple(here) != dst:
        yield f"{name} steps lead from {format_placements(src)} to {format_placements(here)}, not to {format_placements(dst)}"


def _check_even(
    name: str, shape: tuple[int, ...], placements: Placements, plan: Plan, edge: Edge | None = None
) -> Iterator[str]:
    parts = edge.segments if edge else {}
    try:
        local_shape(shape, placements, plan.mesh.axis_sizes)
        for dim, sizes in parts.items():
            for size in sizes:
                along = tuple(Shard(0) if p == Shard(dim) else Replicate() for p in placements)
                local_shape((size,), along, plan.mesh.axis_sizes)
    except ShardingError as error:
        yield f"{name}: {error}"


def _even_placements(meta: TensorMeta, param: ParamPlan, plan: Plan) -> Placements:
    """Return the placements of a stored weight without shards that may leave a shorter last part."""
    fused = {d: s for d, s in param.segments.items() if len(s) > 1}
    alone = [p for p in param.stored if isinstance(p, Shard) and param.stored.count(p) == 1]
    # Only a gather before its use makes a shorter last part whole again. An operator would compute with the parts as they are.
    at_use = [Replicate() if a in param.gathered else p for a, p in enumerate(param.working)]
    return tuple(
        Replicate() if used != p and p in alone and needs_uneven_split(meta.shape, fused, p.dim, n) else p
        for p, used, n in zip(param.stored, at_use, plan.mesh.axis_sizes, strict=True)
    )
