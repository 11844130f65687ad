"""The data of the pages' drawings, as rows of plain numbers for other programs. Names carry their units. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from explorer.analysis import step_parts
from explorer.analysis.candidate_marks import PLACEMENTS
from explorer.text import recipe
from explorer.text.tables import Row
from planner_core import __version__
from planner_core.core import UNPROVEN_KINDS, USUAL_STACK, Plan
from planner_core.cost import attentions_by_kernel, zero_stage
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import METHODS, Result, stage_trace
from planner_core.planning.analysis import AblationStep, TraceWork, describe_recomputation, step_proof
from planner_core.planning.methods import BASELINES, Method
from planner_core.planning.pricing import count_model_flops, measure_speed, predict_reserved
from planner_core.search.candidates import Candidates


def plan_rows(shown: Mapping[str, Plan], homes: Mapping[str, Result]) -> list[Row]:
    """Return all figures of whole-model plans; `homes` are the results that they belong to."""
    return [_plan_columns(name, p) | _columns_on_cluster(p, homes[name]) for name, p in shown.items()]


def _plan_columns(name: str, plan: Plan) -> dict[str, object]:
    c = plan.cost
    return {
        "plan": name,
        "method": plan.method,
        "mesh": "x".join(map(str, plan.mesh.axis_sizes)),
        "mesh_axes": "x".join(plan.mesh.axis_names),
        "recipe": recipe.describe_plan(plan),
        "fits": plan.fits,
        "proven": step_proof(plan),
        **_bound_columns(plan),
        "optimizer": plan.workload.optimizer,
        "zero": zero_stage(plan),
        "micro_batches": plan.workload.accumulate,
        "recomputation": describe_recomputation(plan),
        "step_time_s": c.step_time_s,
        "gpu_time_s": c.gpu_time_s,
        "gpu_compute_s": c.gpu_compute_s,
        "communication_s": c.comm_time_s,
        "exposed_communication_s": c.exposed_comm_time_s,
        "optimizer_time_s": c.optimizer_time_s,
        "host_wait_s": c.host_wait_s,
        "outside_time_s": c.outside_time_s,
        "sent_bytes": sent_per_gpu(plan),
        **{f"{kind}_bytes": n for kind, n in c.memory_bytes.items()},
    }


def _bound_columns(plan: Plan) -> dict[str, object]:
    """Return the bound, the column of the same row that it bounds, in whose unit it is, and the share by which that may be above it.

    A search for the least step bounds the GPU's part of it, and one for the least traffic no step at all: under one name, bounds of
    three units stood below each other, and a gap was that of a figure with no column.
    """
    bound = recipe.bound_of(plan)
    return {"bound_of": bound.column, "bound_value": bound.least, "gap": bound.gap}


def _columns_on_cluster(plan: Plan, result: Result) -> dict[str, object]:
    s = measure_speed(plan, count_model_flops(result.of_plan(plan).graph), result.cluster)
    load = plan.workload
    kernels = attentions_by_kernel(result.of_plan(plan).graph, result.cluster.gpu, load)
    peak, reserved = plan.cost.memory_bytes["peak"], predict_reserved(plan, result.cluster)
    return {
        "precision": result.request.precision,
        "stack": load.stack or USUAL_STACK,
        "attention_kernel": ", ".join(kernels),
        "optimizer_kernels": load.resolved().optimizer_kernels,
        "compiled": load.compiled,
        "version": __version__,
        "memory_limit_bytes": step_parts.memory_limit_bytes(result),
        "gpu_memory_bytes": result.cluster.gpu.memory_bytes,
        # The allocator never reserves less than the tensors take.
        "reserved_low_bytes": max(peak, reserved.low_bytes),
        "reserved_high_bytes": max(peak, reserved.high_bytes),
        "step_time_low_s": s.low_s,
        "step_time_high_s": s.high_s,
        "tokens_per_s_per_gpu": s.tokens_per_s_per_gpu,
        "mfu": s.mfu,
    }


def candidate_rows(block: Candidates) -> list[Row]:
    """Return every candidate that can run: its price as a plan of the whole model, and the placement of every weight."""
    return [
        {
            "candidate": i,
            "communication_s": float(block.model_comm_s[i]),
            "memory_bytes": int(block.model_memory_bytes[i]),
            "on_front": bool(block.on_front[i]),
            **{w: PLACEMENTS[int(c)] for w, c in zip(block.weights, block.choice[i], strict=True)},
        }
        for i in range(block.space)
        if block.comm_s[i] < float("inf") and block.memory_bytes[i] < float("inf")
    ]


def work_rows(steps: Mapping[str, Sequence[TraceWork]], plans: Mapping[str, Plan]) -> list[Row]:
    """Return the work of every plan's step: of a GPU, or of each rank of a pipeline."""
    rows: list[Row] = []
    for name, plan in plans.items():
        if plan.pipeline:
            events = [e for e in stage_trace(plan)["traceEvents"] if e["ph"] == "X"]
            rows += [
                {
                    "plan": name,
                    "rank": e["tid"],
                    "kind": e["cat"],
                    **e["args"],
                    "start_s": e["ts"] / 1e6,
                    "seconds": e["dur"] / 1e6,
                }
                for e in events
            ]
        else:
            rows += [{"plan": name, **asdict(w)} for w in steps[name]]
    return rows


def restriction_rows(steps: Sequence[AblationStep]) -> list[Row]:
    """Return the cost of each restriction of a method."""
    return [
        {
            "rung": step.name,
            "says": step.says,
            **({} if step.plan is None else _plan_columns(step.plan.name, step.plan)),
        }
        for step in steps
    ]


# --- every method beside the exact search ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """A method's best plan; None if it has none, and `why`.

    `minimises`: "time", "communication" or "volume". `search_s`: seconds of its search alone; None for baselines, which are
    searched together. `size`: log10 of the number of plans of its space on the mesh of its plan, at most.
    """

    method: Method
    minimises: str
    plan: Plan | None
    search_s: float | None
    why: str = ""
    size: float | None = None

    def above(self, exact: Plan | None) -> float | None:
        """Return the share by which its step is longer than the best plan's; None if one of the two does not exist."""
        return self.plan.cost.step_time_s / exact.cost.step_time_s - 1 if self.plan and exact else None

    @property
    def why_unproven(self) -> str:
        """Why its plan is not proven the best of its space; empty where it is."""
        if self.plan is None or self.plan.optimal:
            return ""
        return ", ".join(note.sentence for note in self.plan.notes if note.kind in UNPROVEN_KINDS)


def compare_methods(results: Mapping[str, Result | str], sizes: Mapping[str, float]) -> list[ComparedMethod]:
    """Return a row per method (`results` holds a sentence where it has no plan), then the baselines, all with plans of one stage.

    `sizes`: log10 of the size of each method's space.
    """
    compared = [_compare_method(METHODS[name], result) for name, result in results.items()]
    exact = results.get("exact")
    plans = exact.plans if isinstance(exact, Result) else ()
    baselines = {p.method: p for p in plans if p.method in BASELINES and p.pipeline is None}
    compared += [ComparedMethod(b, "time", baselines[name], None) for name, b in BASELINES.items() if name in baselines]
    return [replace(c, size=sizes.get(c.method.name)) for c in compared]


def _compare_method(method: Method, result: Result | str) -> ComparedMethod:
    if isinstance(result, str):
        return ComparedMethod(method, _objective_name(method, "time"), None, None, result)
    plan = result.searched
    return ComparedMethod(method, _objective_name(method, plan.objective), plan, result.timings_s.get("search"))


def _objective_name(method: Method, objective: str) -> str:
    return "volume" if method.by_volume else method.objective or objective


def method_rows(compared: Sequence[ComparedMethod]) -> list[Row]:
    """Return the table for other programs. The first row is what the others are compared with."""
    exact = compared[0].plan
    return [
        {
            "title": c.method.title,
            "minimises": c.minimises,
            "space": c.method.words,
            "space_on_mesh_log10": c.size,
            "step_above_exact": c.above(exact),
            "why_unproven": c.why_unproven,
            "search_s": c.search_s,
            **_method_columns(c),
        }
        for c in compared
    ]


def _method_columns(c: ComparedMethod) -> Row:
    return _plan_columns(c.plan.name, c.plan) if c.plan else {"method": c.method.name, "why": c.why}
