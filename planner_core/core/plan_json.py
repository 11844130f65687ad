"""Plans as JSON. A file is checked against the published schema before it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from planner_core.core.cluster.cluster import Cluster
from planner_core.core.errors import InputError
from planner_core.core.files import write_file
from planner_core.core.forms import MAX_MESSAGE_END, first_schema_fault, read_json, shorten_value
from planner_core.core.mesh import DeviceMesh
from planner_core.core.placement import (
    CollectiveKind,
    Placements,
    Step,
    format_placements,
    parse_placement,
    parse_placements,
    parse_state,
)
from planner_core.core.plan.blocks import BlockLabel, BlockPlan, Edge, ParamPlan, SitePlan
from planner_core.core.plan.cost import Cost, Phase, PipelineCost, StageCost, Traffic
from planner_core.core.plan.model import PlannedModel
from planner_core.core.plan.notes import Note
from planner_core.core.plan.pipeline import ONE_EACH, V_SHAPED, VIRTUAL_OF_V, Pipeline
from planner_core.core.plan.plan import Plan
from planner_core.core.workload.workload import Workload

PLAN_SCHEMA = "shardscope.plan/3"
OLDER_SCHEMAS = ("shardscope.plan/2",)
"""Forms that are read as well: /2 has no stages."""

LARGEST_FILE_BYTES = 50_000_000


REMAKE_HINT = "make it again with `plan MODEL -o FILE`"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Plain data; `from_json(plan_to_json(plan)) == plan`."""
    return {
        "schema": PLAN_SCHEMA,
        "name": plan.name,
        "method": plan.method,
        "objective": plan.objective,
        "optimal": plan.optimal,
        "fits": plan.fits,
        "notes": [note.sentence for note in plan.notes],
        "model": plan.model.to_json(),
        "workload": plan.workload.to_json(),
        "cluster": plan.cluster.to_json(),
        "assumptions": dict(plan.assumptions),
        "mesh": {"axes": list(plan.mesh.axis_names), "sizes": list(plan.mesh.axis_sizes)},
        "blocks": {
            label: {
                "prefixes": list(b.prefixes),
                "params": {n: _param_json(p) for n, p in b.params.items()},
                "sites": {
                    n: [[_edge_json(e) for e in s.inputs], [_edge_json(e) for e in s.outputs]]
                    for n, s in b.sites.items()
                },
                "recompute": b.recompute,
                **({"kept": list(b.kept)} if b.kept else {}),
            }
            for label, b in plan.blocks.items()
        },
        "cost": {
            "step_time_s": plan.cost.step_time_s,
            "compute_time_s": plan.cost.compute_time_s,
            "comm_time_s": plan.cost.comm_time_s,
            "exposed_comm_time_s": plan.cost.exposed_comm_time_s,
            "optimizer_time_s": plan.cost.optimizer_time_s,
            **{n: s for n in ("outside_time_s", "host_wait_s") if (s := getattr(plan.cost, n))},
            "memory_bytes": dict(plan.cost.memory_bytes),
            "traffic": [
                [t.phase, t.kind, axes_to_json(t.axes), t.count, t.num_bytes, t.wire_bytes, t.time_s, t.algorithm]
                for t in plan.cost.traffic
            ],
            **({} if plan.cost.pipeline is None else {"pipeline": _pipeline_cost_to_json(plan.cost.pipeline)}),
        },
        **({} if plan.pipeline is None else {"pipeline": _pipeline_json(plan.pipeline)}),
    }


def is_plan_json(data: Any) -> bool:
    """Return whether data is a plan, by the schema that it names."""
    return isinstance(data, dict) and data.get("schema") in (PLAN_SCHEMA, *OLDER_SCHEMAS)


def plan_from_json(data: Any) -> Plan:
    """Read and validate a plan; raises InputError with the first thing that is wrong."""
    if not is_plan_json(data):
        schema = str(data.get("schema"))[:MAX_MESSAGE_END] if isinstance(data, dict) else type(data).__name__
        raise InputError(
            f"not a plan: schema is {schema!r}, wanted {PLAN_SCHEMA!r}; make one with `plan MODEL -o FILE`"
        )
    wrong = first_schema_fault(data, "plan", "broken plan file", strict=True)
    if wrong:
        raise InputError(f"{wrong}; {REMAKE_HINT}")
    workload = Workload.from_json(data["workload"])
    try:
        workload.check()
        cluster = Cluster.from_json(data["cluster"])
    except InputError as error:
        raise InputError(f"broken plan file: {error}; {REMAKE_HINT}") from None
    cost = data["cost"]
    plan = Plan(
        name=data["name"],
        method=data["method"],
        objective=data["objective"],
        optimal=data["optimal"],
        fits=data["fits"],
        notes=tuple(map(Note, data["notes"])),
        model=PlannedModel.from_json(data["model"]),
        workload=workload,
        cluster=cluster,
        mesh=DeviceMesh(tuple(data["mesh"]["axes"]), tuple(data["mesh"]["sizes"])),
        blocks={k: _block_from_json(b) for k, b in data["blocks"].items()},
        cost=Cost(
            step_time_s=float(cost["step_time_s"]),
            compute_time_s=float(cost["compute_time_s"]),
            comm_time_s=float(cost["comm_time_s"]),
            exposed_comm_time_s=float(cost["exposed_comm_time_s"]),
            traffic=tuple(_traffic_from_json(*row) for row in cost["traffic"]),
            memory_bytes=dict(cost["memory_bytes"]),
            optimizer_time_s=float(cost["optimizer_time_s"]),
            outside_time_s=float(cost.get("outside_time_s", 0.0)),
            host_wait_s=float(cost.get("host_wait_s", 0.0)),
            pipeline=_pipeline_cost_from_json(cost.get("pipeline")),
        ),
        assumptions=dict(data.get("assumptions", {})),
        pipeline=_pipeline_from_json(data.get("pipeline")),
    )
    wrong = next(_plan_faults(plan), None)
    if wrong:
        raise InputError(f"broken plan file: {wrong}; {REMAKE_HINT}")
    return plan


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Args:
        path: A file that `save_plan`, or `plan MODEL -o FILE` on the command line, wrote.

    Returns:
        The plan. It was checked against `assets/plan.schema.json`, and its placements against its mesh.

    Raises:
        InputError: The file cannot be read or is not a plan. The message names the first fault.

    Example:
        >>> shardscope.load_plan("plan.json").mesh.axis_sizes
        (8,)
    """
    where = f"plan file {shorten_value(Path(path).name)}"
    return plan_from_json(read_json(path, where, LARGEST_FILE_BYTES, "make a plan with `plan MODEL -o FILE`"))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file. If writing fails, an old file stays as it was.

    Args:
        plan: The plan.
        path: Where to write. An existing file is replaced.

    Raises:
        InputError: The file cannot be written.

    Example:
        >>> shardscope.save_plan(shardscope.plan("gpt2-xl", cluster="1x8-h100").best, "plan.json")
    """
    write_file(Path(path), json.dumps(plan_to_json(plan)))


def _plan_faults(plan: Plan) -> Iterator[str]:
    """Yield the faults that a schema cannot express: all placements must be of the plan's mesh."""
    axes, costs = len(plan.mesh.axis_sizes), plan.cost
    if len(plan.mesh.axis_names) != axes or len(set(plan.mesh.axis_names)) != axes:
        yield f"mesh axes {list(plan.mesh.axis_names)} do not name {axes} axes of sizes {list(plan.mesh.axis_sizes)}"
    if any(axis >= axes for t in costs.traffic for axis in t.axes):
        yield "traffic runs on a mesh axis that does not exist"
    yield from _stage_faults(plan)
    # The prefix of a copy says which weights it has: twice the same, and one of the two plans would be ignored.
    prefixes = [p for block in plan.blocks.values() for p in block.prefixes]
    if len(set(prefixes)) != len(prefixes) or plan.blocks[""].prefixes != ("",):
        yield "two blocks are for the same part of the model, or the top block is not for the whole of it"
    for label, block in plan.blocks.items():
        yield from _block_faults(label, block, axes)


def axes_to_json(axes: tuple[int, ...]) -> int | list[int]:
    """Return the number of an axis; of several over which one collective goes, their numbers."""
    return axes[0] if len(axes) == 1 else list(axes)


def axes_from_json(axes: int | list[int]) -> tuple[int, ...]:
    """Return the axes that `axes_to_json` wrote."""
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _traffic_from_json(phase: Phase, kind: CollectiveKind, axes: int | list[int], *rest: Any) -> Traffic:
    return Traffic(phase, kind, axes_from_json(axes), *rest)


def _pipeline_json(cut: Pipeline) -> dict[str, Any]:
    parts = {"parts": [list(part) for part in cut.parts]} if cut.parts else {}
    # Left out where it is usual, so that files of plans from before it are equal to those of today.
    outer = {"outer": cut.outer} if cut.outer else {}
    return {"ranks": cut.ranks, "schedule": cut.schedule, "copies": list(cut.copies), **outer, **parts}


def _pipeline_from_json(data: Mapping[str, Any] | None) -> Pipeline | None:
    if data is None:
        return None
    parts = tuple(tuple(part) for part in data.get("parts", ()))
    return Pipeline(data["ranks"], data["schedule"], tuple(data["copies"]), parts, data.get("outer", 0))


def _pipeline_cost_to_json(cost: PipelineCost) -> dict[str, Any]:
    # A stage whose host seconds are not known has none in its file, as in plans from before they were priced.
    stages = [{k: v for k, v in asdict(s).items() if v or not k.startswith("host_")} for s in cost.stages]
    return {"stages": stages, "bubble_s": cost.bubble_s, "bound_s": cost.bound_s}


def _pipeline_cost_from_json(data: Mapping[str, Any] | None) -> PipelineCost | None:
    if data is None:
        return None
    return PipelineCost(tuple(StageCost(**s) for s in data["stages"]), float(data["bubble_s"]), float(data["bound_s"]))


def _stage_faults(plan: Plan) -> Iterator[str]:
    """Yield the faults of a plan's stages that a schema cannot express."""
    cut, cost = plan.pipeline, plan.cost.pipeline
    if (cut is None) != (cost is None):
        yield "it has stages without their cost, or a cost of stages that it does not have"
    if cut is None or cost is None:
        return
    if len(cut.copies) % cut.ranks or len(cut.copies) != len(cost.stages):
        yield f"{len(cut.copies)} stages on {cut.ranks} ranks, with the cost of {len(cost.stages)}"
    # "" is the top block, which runs once and in no stage alone.
    calls = sum(len(block.prefixes) for label, block in plan.blocks.items() if label)
    if sum(cut.copies) != calls:
        yield f"its stages run {sum(cut.copies)} copies of blocks, and it has {calls}"
    if cut.outer > len(plan.mesh.axis_sizes):
        yield f"{cut.outer} axes of its mesh lie outside of the pipeline's, and it has {len(plan.mesh.axis_sizes)}"
    if cut.parts and len(cut.parts) != len(cut.copies):
        yield f"{len(cut.copies)} stages, and parts of {len(cut.parts)}"
    if (cut.schedule == V_SHAPED and cut.virtual != VIRTUAL_OF_V) or (cut.schedule in ONE_EACH and cut.virtual != 1):
        yield f"a rank has {cut.virtual} stages, which {cut.schedule} does not run"


def _block_faults(label: str, block: BlockPlan, axes: int) -> Iterator[str]:
    if str(BlockLabel.parse(label)) != label:
        yield f"{label!r} is not the name of a block, or that of a variant as Block#1"
    for name, param in block.params.items():
        yield from _param_faults(f"{label}.{name}", param, axes)
    if strange := next((name for name in block.kept if name not in block.sites or block.recompute == "none"), None):
        yield f"{label} keeps the result of {strange}, which does not run again there"
    for name, site in block.sites.items():
        for edge in (*site.inputs, *site.outputs):
            if {len(p) for state in (edge.src, edge.dst) for p in (state.forward, state.gradient)} != {axes}:
                yield f"{label}.{name} does not place its tensors on {axes} mesh axes"
            if any(s.axis >= axes for s in (*edge.forward, *edge.backward)):
                yield f"{label}.{name} moves a tensor along a mesh axis that does not exist"


def _param_faults(name: str, param: ParamPlan, axes: int) -> Iterator[str]:
    if {len(param.stored), len(param.working), len(param.gradient)} != {axes}:
        yield f"{name} is not placed on {axes} mesh axes"
    if any(a >= axes for a in param.gathered):
        yield f"{name} is gathered over a mesh axis that does not exist"
    for steps, src, dst in ((param.refresh, param.stored, param.working), (param.reduce, param.gradient, param.stored)):
        if steps is not None and _apply_steps(steps, src) != dst:
            yield f"{name} does not come to {format_placements(dst)} by the steps that it takes once a step"


def _apply_steps(steps: tuple[Step, ...], start: Placements) -> Placements | None:
    """Where the steps lead from `start`; None where one does not begin where the one before ended."""
    # A plan is outside input. Steps that do not join would run, and leave weights in other placements than the plan shows.
    placements = list(start)
    for step in steps:
        if step.axis >= len(placements) or placements[step.axis] != step.src:
            return None
        placements[step.axis] = step.dst
    return tuple(placements)


def _param_json(p: ParamPlan) -> list[Any]:
    # Lists without keys keep the file small: a plan of a large model has thousands of such rows.
    three = map(format_placements, (p.stored, p.working, p.gradient))
    once = (
        []
        if p.refresh is None and p.reduce is None
        else [_steps_to_text(p.refresh_steps()), _steps_to_text(p.reduce_steps())]
    )
    rest = once if p.trained else [False]  # nothing is reduced to a weight that is not trained
    return [*three, list(p.gathered), _segments_json(p.segments), *rest]


def _param_from_json(row: list[Any]) -> ParamPlan:
    stored, working, gradient, gathered, segments, *rest = row
    three = (parse_placements(stored), parse_placements(working), parse_placements(gradient))
    # After the fixed fields a row has nothing (the shortest steps), two texts of steps, or the one word False (not trained).
    trained = False not in rest
    param = ParamPlan(*three, tuple(gathered), _segments_from_json(segments), trained=trained)
    if not rest or not trained:
        return param
    refresh, reduce = map(_steps_from_text, rest)
    return replace(param, refresh=refresh, reduce=reduce)


def _segments_json(segments: Mapping[int, tuple[int, ...]]) -> dict[str, list[int]]:
    return {str(d): list(sizes) for d, sizes in segments.items()}


def _segments_from_json(data: Mapping[str, list[int]]) -> dict[int, tuple[int, ...]]:
    return {int(d): tuple(map(int, sizes)) for d, sizes in data.items()}


def _edge_json(e: Edge) -> list[Any]:
    chunks = [e.chunks] if e.chunks > 1 else []
    return [
        str(e.src),
        str(e.dst),
        _steps_to_text(e.forward),
        _steps_to_text(e.backward),
        _segments_json(e.segments),
        *chunks,
    ]


def _edge_from_json(row: list[Any]) -> Edge:
    src, dst, forward, backward, segments, *chunks = row
    return Edge(
        parse_state(src),
        parse_state(dst),
        _steps_from_text(forward),
        _steps_from_text(backward),
        _segments_from_json(segments),
        *chunks,
    )


def _steps_to_text(steps: tuple[Step, ...]) -> str:
    return " ".join(map(str, steps))


def _steps_from_text(text: str) -> tuple[Step, ...]:
    steps = []
    for part in text.split():
        axis, _, move = part.partition(":")
        src, _, dst = move.partition(">")
        steps.append(Step(int(axis), parse_placement(src), parse_placement(dst)))
    return tuple(steps)


def _block_from_json(data: Mapping[str, Any]) -> BlockPlan:
    params = {n: _param_from_json(row) for n, row in data["params"].items()}
    sites = {
        n: SitePlan(tuple(map(_edge_from_json, ins)), tuple(map(_edge_from_json, outs)))
        for n, (ins, outs) in data["sites"].items()
    }
    return BlockPlan(tuple(data["prefixes"]), params, sites, data["recompute"], tuple(data.get("kept", ())))
