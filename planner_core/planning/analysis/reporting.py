"""A planning result as the JSON of docs/CONTRACT.md, and as tables to read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from planner_core.core import (
    BlockLabel,
    Note,
    NoteKind,
    Plan,
    Term,
    Workload,
    glob_name,
    load_cluster,
    placements_by_pattern,
    states_by_pattern,
)
from planner_core.cost import axis_roles, micro_batch, simulate_step, zero_stage
from planner_core.cost.communication import VOLUME_RATE, sent_per_gpu
from planner_core.ops import CoarseGraph
from planner_core.planning.analysis.legend import (
    describe_axes,
    describe_bands,
    describe_fits,
    describe_open_gap,
    describe_parts,
    describe_stages,
    describe_waits,
    fits_mark,
    proven_mark,
    row_title,
    simulation_text,
    step_parts,
    word_notes,
)
from planner_core.planning.fitting.front import FrontPoint, describe_measures
from planner_core.planning.fitting.host_waits import describe_gap_with_waits
from planner_core.planning.methods import EXACT, METHODS, describe_tool_space
from planner_core.planning.planner import usable_bytes
from planner_core.planning.pricing import (
    GROWING_SEGMENTS,
    Budget,
    ReservedMemory,
    Speed,
    count_model_flops,
    describe_software,
    measure_speed,
    name_throughput,
    predict_reserved,
)
from planner_core.planning.request import Request
from planner_core.planning.result import Choice, Result
from planner_core.planning.stages import may_use_stages
from planner_core.search import describe_gap
from planner_core.search.candidates import weight_matrices

SCHEMA = "shardscope.report/1"


def simulate_steps(result: Result) -> list[float]:
    """Return the simulated step of each plan, in seconds."""
    return [simulate_step(p, result.of_plan(p).graph) for p in result.plans]


def plan_report(
    result: Result,
    budget: Budget | None = None,
    times: Sequence[float] | None = None,
    word: Callable[[Term], str] = str,
) -> dict[str, Any]:
    """Return the object of `plan --json` (docs/CONTRACT.md). With `budget` each plan has the days and the money that all tokens take.
    `times`: `simulate_steps`, if it is known. `word` names an option where the reader gives it."""
    num_gpus, plans = result.cluster.num_gpus, list[dict[str, Any]]()
    for p, simulated_step_s in zip(result.plans, times or simulate_steps(result), strict=True):
        speed = measure_speed(p, _micro_batch_flops(p, result), result.cluster)
        run = {} if budget is None else {"run": budget.to_json(speed, num_gpus)}
        summary = plan_summary(p, speed, predict_reserved(p, result.cluster, result.request.memory_gb))
        plans.append(summary | {"simulated_step_s": simulated_step_s} | run)
    return {
        "schema": SCHEMA,
        "model": {
            "name": result.graph.name,
            "params": result.graph.num_params,
            "source": result.graph.source,
            "loss": result.graph.loss,
        },
        "graph": graph_summary(result.coarse),
        "workload": result.workload.to_json(),
        "cluster": {
            "name": result.cluster.name,
            "num_gpus": result.cluster.num_gpus,
            "gpu": result.cluster.gpu.name,
            "memory_bytes": result.cluster.gpu.memory_bytes,
        },
        "candidates": {
            "space": sum(b["candidates"] for b in graph_summary(result.coarse)["unique_blocks"]),
            "scored": sum(c.scored for c in result.candidates),
            "dropped": dict(result.dropped),
        },
        "choice": choice_summary(result.choice),
        "unknown_ops": [f"{block}:{op.name}" if block else op.name for block, op in result.unknown_ops],
        "notes": word_notes(result, word),
        "uneven_batch": None if result.uneven_batch is None else asdict(result.uneven_batch),
        "reasons": dict(result.reasons),
        "timings_s": dict(result.timings_s),
        "plans": plans,
    }


def _micro_batch_flops(plan: Plan, result: Result) -> int:
    """Return the FLOPs of one of the plan's micro-batches. With stages its size may differ from that of the graph's micro-batch."""
    graph = result.of_plan(plan).graph
    return count_model_flops(graph) * plan.graph_batch // graph.workload["batch"]


def describe_arrangement(plan: Plan) -> str:
    """Name the mesh of a plan and a ZeRO stage that its axes do not say: `16 data, ZeRO-2`.

    Stages of a pipeline come between: `8 x (2 data×4 tensor), 16 stages, interleaved`.
    """
    cut, zero = plan.pipeline, zero_stage(plan)
    mesh = str(plan.mesh) if cut is None else f"{cut.ranks} x ({plan.mesh}), {len(cut.copies)} stages, {cut.schedule}"
    # An axis over which weights are stored in parts is called shard, which is ZeRO-3.
    return f"{mesh}, ZeRO-{zero}" if zero in (1, 2) else mesh


def graph_summary(coarse: CoarseGraph) -> dict[str, Any]:
    """Sizes of the graph and its unique blocks."""
    graph = coarse.graph
    repeats = graph.num_repeats
    blocks = [
        {
            "name": name,
            "repeats": repeats[name],
            "nodes": len(b.groups),
            "weights": len(weight_matrices(b.block)),
            "candidates": 3 ** len(weight_matrices(b.block)),
        }
        for name, b in coarse.blocks.items()
    ]
    return {"ops": graph.num_ops, "nodes": coarse.num_nodes, "unique_blocks": blocks}


def plan_summary(plan: Plan, speed: Speed | None = None, reserved: ReservedMemory | None = None) -> dict[str, Any]:
    """PLAN_SUMMARY of docs/CONTRACT.md."""
    c = plan.cost
    return {
        "name": plan.name,
        "method": plan.method,
        "mesh": {
            "axes": list(plan.mesh.axis_names),
            "sizes": list(plan.mesh.axis_sizes),
            "roles": list(axis_roles(plan)),
        },
        **_pipeline_summary(plan),
        "fits": plan.fits,
        "step_time_s": c.step_time_s,
        **({} if speed is None else speed_summary(speed)),
        "compute_time_s": c.compute_time_s,
        "comm_time_s": c.comm_time_s,
        "exposed_comm_time_s": c.exposed_comm_time_s,
        "optimizer_time_s": c.optimizer_time_s,
        "outside_time_s": c.outside_time_s,
        "host_wait_s": c.host_wait_s,
        "micro_batch": micro_batch(plan),
        "accumulate": plan.accumulate,
        "zero": zero_stage(plan),
        "recompute": recomputation(plan),
        "collectives": c.collectives(),
        "memory_bytes": dict(c.memory_bytes),
        **({} if reserved is None else {"memory_reserved": reserved.to_json()}),
        "placements": placements_by_pattern(plan),
        "states": states_by_pattern(plan),
        "optimal": plan.is_step_proven,
        **_aim_summary(plan),
        "notes": [note.sentence for note in plan.notes],
    }


def _aim_summary(plan: Plan) -> dict[str, Any]:
    """Return what the plan's search minimised, and the bound of it in its own unit."""
    if not METHODS.get(plan.method, EXACT).by_volume:
        return {"objective": plan.objective, "bound_s": plan.bound}
    # A search by volume counts the bytes that a GPU sends as seconds of a `volume_link`.
    # Rounded down, and at most what the plan itself sends: a bound above it would be none.
    num_bytes = None if plan.bound is None else min(sent_per_gpu(plan), math.floor(VOLUME_RATE * plan.bound))
    return {"objective": "volume", "bound_s": None, "bound_bytes": num_bytes}


def _pipeline_summary(plan: Plan) -> dict[str, Any]:
    """Return the stages of a plan, how long a rank stands idle in a step, and the closed form below the simulated step."""
    cut, cost = plan.pipeline, plan.cost.pipeline
    if cut is None or cost is None:
        return {}
    stages = [
        {"rank": cut.rank_of(k), "copies": n, **asdict(stage)}
        for k, (n, stage) in enumerate(zip(cut.copies, cost.stages, strict=True))
    ]
    return {
        "pipeline": {
            "ranks": cut.ranks,
            "virtual": cut.virtual,
            "schedule": cut.schedule,
            "bubble_s": cost.bubble_s,
            "bubble": cost.bubble_s / plan.cost.step_time_s,
            "bound_s": cost.bound_s,
            "fullest_rank": plan.fullest_rank,
            "stages": stages,
        }
    }


def speed_summary(speed: Speed) -> dict[str, Any]:
    """Return the figures beside a step's time: its band, tokens per second, utilisation."""
    return {
        "step_time_low_s": speed.low_s,
        "step_time_high_s": speed.high_s,
        "band": speed.band.to_json(),
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "mfu": speed.mfu,
    }


def choice_summary(chosen: Choice) -> dict[str, Any]:
    """Return the plans that cannot be told apart, and the one of them that is recommended."""
    ties = [{"name": t.name, "slower": t.slower, "doubt": t.doubt} for t in chosen.ties]
    return {"fastest": chosen.fastest, "ties": ties, "recommended": chosen.recommended, "why": chosen.sentence}


def recomputation(plan: Plan) -> dict[str, str]:
    """Return what is recomputed in backward, by pattern of the repeated blocks."""
    by_pattern: dict[str, str] = {}
    for label, block in plan.blocks.items():
        pattern = glob_name(block.prefixes)
        same = by_pattern.get(pattern, block.recompute) == block.recompute
        if label:  # two variants of one block share a pattern: if they differ, name the copies of each
            by_pattern[pattern if same else f"{pattern}[{BlockLabel.parse(label).variant}]"] = block.recompute
    return by_pattern


def format_table(rows: list[list[str]], right: frozenset[int] = frozenset()) -> str:
    """Rows as aligned columns; the first row is the head."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def format_seconds(value: float) -> str:
    """`345 ms`, `1.2 s`: three significant figures."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def first_plan_text(plan: Plan, request: Request) -> str:
    """One line on the plan that is known before the other passes run, and which passes those are: its step, memory and bound."""
    if not plan.fits:
        return f"no plan fits so far: the smallest takes {format_peak_gib(plan)} GiB a GPU"
    passes = {
        "the proof": request.prove,
        "layouts whose GPU waits less": bool(plan.cost.host_wait_s) and request.bounding_tool is None,
        "baselines": True,
        "trade-offs": request.bounding_tool is None,
        "stages": may_use_stages(request, load_cluster(request.cluster)),
    }
    *first, last = (name for name, runs in passes.items() if runs)
    following = f"{', '.join(first)} and {last} follow" if first else f"{last} follow"
    step = f"{format_seconds(plan.cost.step_time_s)} a step, {format_peak_gib(plan)} GiB a GPU, {_describe_proof(plan, request)}"
    if plan.pipeline is not None:  # its first note compares its step with that of one stage
        step = f"{format_peak_gib(plan)} GiB a GPU, {plan.notes[0]}"
    return f"first plan: {describe_arrangement(plan)}, {step}; {following}"


def describe_proof_scope(request: Request) -> str:
    """Name what the chosen plan is proven among: a method's space, or `plans of one pipeline stage` as the request narrows them."""
    if (method := METHODS[request.method]).objective:
        return f"{method.title}'s space"
    of_one_stage = "plans of one pipeline stage"
    if request.bounding_tool is not None:
        return f"{of_one_stage} {describe_tool_space(request.bounding_tool)}"
    if request.zero is None:
        return of_one_stage
    return f"{of_one_stage} and ZeRO-0 or {request.zero}" if request.zero else f"{of_one_stage} and ZeRO-0"


def proof_text(request: Request) -> str:
    """Return what the column of proofs covers."""
    scope = describe_proof_scope(request)
    if aim := METHODS[request.method].describe_aim(request.objective):
        return f"proven, of best: the {aim} within {scope}, which says nothing of its step; other rows among their own"
    others = "a trade-off among those that hold no more at the end of forward and recompute alike, baselines and methods among their own"
    return f"proven: none is better among {scope}; {others}, so that a plan in two rows may be proven in one of them"


def _describe_proof(plan: Plan, request: Request) -> str:
    scope = describe_proof_scope(request)
    if aim := METHODS[request.method].describe_aim(request.objective):  # its bound is none of the step
        return f"the {aim}{' found' * (not plan.optimal)} within {scope}, {'proven' if plan.optimal else 'not proven so far'}"
    if plan.is_step_proven:
        return f"proven the best among {scope}"
    if not plan.bound:
        return "without a bound"
    if plan.cost.host_wait_s and plan.objective == "time":
        return describe_gap_with_waits(plan, plan.bound)
    return describe_gap(plan.cost.seconds(plan.objective), plan.bound)


def reserved_text(reserved: ReservedMemory) -> str:
    """Return a sentence on what a tool that asks the allocator will show."""
    low, likely, high = (f"{b / 2**30:.1f}" for b in (reserved.low_bytes, reserved.likely_bytes, reserved.high_bytes))
    if reserved.short:
        return (
            "its tensors fit, but PyTorch's allocator, which keeps freed blocks too, would reserve more than the GPU has: it will free "
            f"blocks and allocate them anew, which takes time that is not in the step. {GROWING_SEGMENTS} helps"
        )
    range_ = f"{low} to {high} in nine in ten measured runs, {reserved.kind}"
    more = (
        f", which may be all that CUDA's context and NCCL's buffers leave of the GPU; {GROWING_SEGMENTS} leaves it more room"
        if reserved.tight
        else ""
    )
    return f"PyTorch's allocator will have about {likely} GiB reserved ({range_}){more}"


def format_peak_gib(plan: Plan) -> str:
    """Return the peak memory in GiB."""
    return f"{plan.cost.memory_bytes['peak'] / 2**30:.1f}"


def plans_table(result: Result, speeds: Sequence[Speed], budget: Budget | None) -> str:
    """One line per plan, whose parts add up to its step. Parts that no plan has are left out."""
    plans = result.plans
    parts = [step_parts(p) for p in plans]
    shown = [name for name in parts[0] if any(row[name] for row in parts) or name in ("compute", "exposed comm")]
    rows = [
        ["plan", "mesh", "micro-batch", "recompute", "step", "from", "to", f"{name_throughput(plans[0])}/GPU", "MFU %"]
    ]
    rows[0] += [*shown, "all comm", "memory GiB", "fits", "proven", *(() if budget is None else ("days", "cost"))]
    for p, speed, row in zip(plans, speeds, parts, strict=True):
        rows.append(
            [
                row_title(p, plans),
                describe_arrangement(p),
                describe_micro_batches(p),
                describe_recomputation(p),
                format_seconds(p.cost.step_time_s),
                *speed.between(format_seconds),
                f"{speed.tokens_per_s_per_gpu:,.0f}",
                f"{100 * speed.mfu:.1f}",
                *(format_seconds(row[name]) for name in shown),
                format_seconds(p.cost.comm_time_s),
                format_peak_gib(p),
                fits_mark(p, result.cluster, result.request.memory_gb),
                proven_mark(p),
                *([] if budget is None else budget.cells(speed, p.num_gpus)),
            ]
        )
    numbers = {k for k, name in enumerate(rows[0]) if name not in LEFT_COLUMNS}
    return format_table(rows, frozenset(numbers))


LEFT_COLUMNS = ("plan", "mesh", "micro-batch", "recompute", "fits", "proven")


def describe_micro_batches(plan: Plan) -> str:
    """Samples of a data-parallel rank at once, and the micro-batches of a step: `2 x 8`."""
    return f"{micro_batch(plan):g} x {plan.accumulate}"


def describe_recomputation(plan: Plan) -> str:
    """Return what is recomputed in the repeated blocks: `none`, or the policies of copies that differ."""
    return ", ".join(dict.fromkeys(recomputation(plan).values())) or plan.workload.recompute


def _describe_precision(w: Workload) -> str:
    """Return what a step computes in, and whether it keeps more than that: `bfloat16 mixed precision`."""
    if w.dtype == "float32":
        return w.dtype
    return f"{w.dtype} mixed precision" if w.precision == "mixed" else f"pure {w.dtype}"


def text(
    result: Result,
    budget: Budget | None = None,
    times: Sequence[float] | None = None,
    word: Callable[[Term], str] = str,
) -> str:
    """Return the report to read. `budget` and `times` are those of `plan_report`; `word` names an option where the reader gives it."""
    speeds = [measure_speed(p, _micro_batch_flops(p, result), result.cluster) for p in result.plans]
    g = graph_summary(result.coarse)
    w = result.workload
    head = (
        f"{result.graph.name}: {result.graph.num_params / 1e9:.3g} B parameters, {g['ops']} ops in {g['nodes']} groups; "
        + ", ".join(f"{b['name']} x{b['repeats']}" for b in g["unique_blocks"])
    )
    c = result.cluster
    # A graph without token ids has seq 1: 32 samples of 128 x 256 numbers were called "32 x 1 tokens".
    size = f"batch {w.batch}{f' x {w.seq} tokens' if w.seq > 1 else ''}"
    where = f"{c.name}: {c.num_gpus} x {c.gpu.name}; {size}, {_describe_precision(w)}, {w.optimizer}"
    about = describe_software(result.graph, c, w, usable_bytes(c.gpu.memory_bytes, result.request))
    loss = [] if result.graph.source.startswith("zoo:") else [f"trained on {result.graph.loss}"]
    recommended = result.recommended
    reserved = [f"{recommended.name}: {reserved_text(predict_reserved(recommended, c))}"] if recommended.fits else []
    unknown = [unknown_ops(result)] if result.unknown_ops else []
    total, count = format_seconds(result.timings_s["total"]), sum(x.scored for x in result.candidates)
    # Where nothing fits every candidate is dropped before it is scored, which says nothing of the search.
    scored = f"{f'{count:,} candidates scored, ' if count else ''}total {total}; times are estimates"
    # A note of the whole answer stands above the table already.
    notes = [_name_row(p, note) for p in result.plans for note in p.notes if note not in result.notes]
    parts = [
        head,
        *loss,
        where,
        *about,
        scored,
        *word_notes(result, word),
        *unknown,
        "",
        plans_table(result, speeds, budget),
        proof_text(result.asked) + describe_open_gap(result).worded(word),
        describe_bands(zip((p.name for p in result.plans), speeds, strict=True)),
        *describe_waits(result.plans),
        *describe_axes(result.plans),
        *describe_fits(result.plans, c, result.request.memory_gb),
        describe_parts(result.plans),
        simulation_text(result.plans, times or simulate_steps(result)),
        f"how sure the order is: {result.choice.sentence}",
        *reserved,
        *notes,
        *describe_stages(result),
        "",
        # the plan that -o writes
        f"how {recommended.name}{', the recommended plan,' if result.choice.fits else ''} keeps the weights on each mesh axis:",
        format_table(_weight_rows(recommended)),
    ]
    return "\n".join(parts)


def _name_row(plan: Plan, note: Note) -> str:
    """Return a note with the name of its plan, unless it begins with that."""
    return note.sentence if note.kind is NoteKind.METHOD else f"{plan.name}: {note}"


def _weight_rows(plan: Plan) -> list[list[str]]:
    """Return a row for each weight: how it is kept for its uses on each mesh axis, and what the optimizer keeps of it where that
    differs."""
    states = states_by_pattern(plan)
    return [
        ["weight", *plan.mesh.axis_names, *(["optimizer keeps"] if states else [])],
        *(
            [name, *placements, *([", ".join(states.get(name, []))] if states else [])]
            for name, placements in placements_by_pattern(plan).items()
        ),
    ]


def unknown_ops(result: Result) -> str:
    """Return a sentence about the operators without a rule: how often each runs in a step, and where it is first. Empty if all have one."""
    runs: Counter[str] = Counter()
    first: dict[str, str] = {}
    for block, op in result.unknown_ops:
        runs[op.fn] += result.graph.num_repeats.get(block, 1)
        first.setdefault(op.fn, " of ".join(filter(None, (op.name, block))))
    if not runs:
        return ""
    counts = ", ".join(f"{fn} ×{count} (first at {first[fn]})" for fn, count in runs.most_common())
    many = "1 op has no rule and runs" if runs.total() == 1 else f"{runs.total()} ops have no rule and run"
    return f"{many} whole on every GPU, which may cost more than needed: {counts}."


def front_report(points: Sequence[FrontPoint], exact: bool, objective: str) -> dict[str, Any]:
    """Return the object of `plan --front --json`: the points by rising seconds, and whether these are all points."""
    return {
        "objective": objective,
        "exact": exact,
        "points": [
            {"mesh": list(p.mesh.axis_sizes), "seconds": p.cost_s, "memory_bytes": int(p.memory_bytes)} for p in points
        ],
    }


def front_text(points: Sequence[FrontPoint], exact: bool, objective: str, of: str, best: Plan) -> str:
    """Return the front as a table. `of`: the plans that were looked at. `best`: the best plan of one stage."""
    seconds = "GPU time" if objective == "time" else objective
    completeness = "all of them" if exact else "not proven to be all: some may lie too close together to look through"
    many = "one plan" if len(points) == 1 else f"{len(points)} plans"
    head = f"{many} that no other{'' if exact else ' found'} beats in {seconds} and memory ({completeness}), of these: {of}."
    rows = [["mesh", seconds, "memory GiB at the end of forward"]]
    rows += [[str(p.mesh), format_seconds(p.cost_s), f"{p.memory_bytes / 2**30:.2f}"] for p in points]
    return f"{head}\n{describe_measures(objective, best)}\n\n{format_table(rows, frozenset({1, 2}))}"
