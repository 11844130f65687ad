"""A planning result as the JSON of docs/CONTRACT.md, and as tables to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from planner_core.core import Plan, placements_by_pattern
from planner_core.ops import CoarseGraph
from planner_core.planning.pipeline import FrontPoint, Result
from planner_core.search.candidates import matrices

SCHEMA = "shardscope.report/1"


def report(result: Result) -> dict[str, Any]:
    """The `plan --json` object of docs/CONTRACT.md."""
    return {
        "schema": SCHEMA,
        "model": {"name": result.graph.name, "params": result.graph.num_params, "source": result.graph.source, "loss": result.graph.loss},
        "graph": graph_summary(result.coarse),
        "workload": result.workload.to_json(),
        "cluster": {
            "name": result.cluster.name, "num_gpus": result.cluster.num_gpus, "gpu": result.cluster.gpu.name,
            "memory_bytes": result.cluster.gpu.memory_bytes,
        },
        "candidates": {
            "space": sum(b["candidates"] for b in graph_summary(result.coarse)["unique_blocks"]),
            "scored": sum(c.scored for c in result.candidates), "dropped": dict(result.dropped),
        },
        "unknown_ops": list(result.unknown_ops), "notes": list(result.notes), "timings_s": dict(result.timings_s),
        "plans": [plan_summary(p) for p in result.plans],
    }  # fmt: skip


def graph_summary(coarse: CoarseGraph) -> dict[str, Any]:
    """Sizes of the graph and its unique blocks."""
    graph = coarse.graph
    repeats = graph.num_repeats
    blocks = [
        {
            "name": name, "repeats": repeats[name], "nodes": len(b.groups), "weights": len(matrices(b.block)),
            "candidates": 3 ** len(matrices(b.block)),
        }
        for name, b in coarse.blocks.items()
    ]  # fmt: skip
    return {"ops": graph.num_ops, "nodes": coarse.num_nodes, "unique_blocks": blocks}


def plan_summary(plan: Plan) -> dict[str, Any]:
    """PLAN_SUMMARY of docs/CONTRACT.md."""
    c = plan.cost
    return {
        "name": plan.name, "method": plan.method,
        "mesh": {"axes": list(plan.mesh.axis_names), "sizes": list(plan.mesh.axis_sizes)}, "fits": plan.fits,
        "step_time_s": c.step_time_s, "compute_time_s": c.compute_time_s, "comm_time_s": c.comm_time_s,
        "exposed_comm_time_s": c.exposed_comm_time_s, "collectives": c.collectives(), "memory_bytes": dict(c.memory_bytes),
        "placements": placements_by_pattern(plan), "objective": plan.objective, "optimal": plan.optimal, "notes": list(plan.notes),
    }  # fmt: skip


def table(rows: list[list[str]], right: frozenset[int] = frozenset()) -> str:
    """Rows as aligned columns; the first row is the head."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def seconds(value: float) -> str:
    """`345 ms`, `1.2 s`: three significant figures."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def plans_table(plans: tuple[Plan, ...]) -> str:
    """One line per plan."""
    head = ["plan", "mesh", "step", "compute", "exposed comm", "all comm", "memory GiB", "fits", "proven optimal"]
    rows = [head]
    for p in plans:
        c = p.cost
        rows.append([
            p.name, str(p.mesh), seconds(c.step_time_s), seconds(c.compute_time_s), seconds(c.exposed_comm_time_s), seconds(c.comm_time_s),
            f"{c.memory_bytes['peak'] / 2**30:.1f}", "yes" if p.fits else "no", "yes" if p.optimal else "no",
        ])  # fmt: skip
    return table(rows, frozenset({2, 3, 4, 5, 6}))


def text(result: Result) -> str:
    """The report to read."""
    g = graph_summary(result.coarse)
    w = result.workload
    head = (
        f"{result.graph.name}: {result.graph.num_params / 1e9:.3g} B parameters, {g['ops']} ops in {g['nodes']} groups; "
        + ", ".join(f"{b['name']} x{b['repeats']}" for b in g["unique_blocks"])
    )
    c = result.cluster
    where = f"{c.name}: {c.num_gpus} x {c.gpu.name}; batch {w.batch} x {w.seq} tokens, {w.dtype}, {w.optimizer}"
    own = [] if result.graph.source.startswith("zoo:") else [f"trained on {result.graph.loss}"]
    best = result.best
    placed = [["weight", *best.mesh.axis_names]] + [[n, *p] for n, p in placements_by_pattern(best).items()]
    unknown = [unknown_ops(result)] if result.unknown_ops else []
    total = seconds(result.timings_s["total"])
    scored = f"{sum(x.scored for x in result.candidates)} candidates scored, total {total}; times are estimates"
    notes = [f"{p.name}: {note}" for p in result.plans for note in p.notes if note not in result.notes]
    parts = [
        head,
        *own,
        where,
        scored,
        *result.notes,
        *unknown,
        "",
        plans_table(result.plans),
        *notes,
        "",
        table(placed),
    ]
    return "\n".join(parts)


def unknown_ops(result: Result) -> str:
    """Which ops have no rule, how often each runs in a step, and where it stands first; empty if all have one."""
    runs: Counter[str] = Counter()
    first: dict[str, str] = {}
    for name in result.unknown_ops:
        block, _, site = name.rpartition(":")
        fn = site.rpartition("/")[2].partition(".")[0]
        runs[fn] += result.graph.num_repeats.get(block, 1)
        first.setdefault(fn, " of ".join(filter(None, (site, block))))
    if not runs:
        return ""
    told = ", ".join(f"{fn} ×{count} (first at {first[fn]})" for fn, count in runs.most_common())
    many = "1 op has no rule and runs" if runs.total() == 1 else f"{runs.total()} ops have no rule and run"
    return f"{many} whole on every GPU, which may cost more than needed: {told}."


def front_report(points: Sequence[FrontPoint], exact: bool, objective: str) -> dict[str, Any]:
    """The front of `plan --front --json`: points by rising seconds, and whether they are all there are."""
    return {
        "objective": objective, "exact": exact,
        "points": [{"mesh": list(p.mesh.axis_sizes), "seconds": p.cost_s, "memory_bytes": int(p.memory_bytes)} for p in points],
    }  # fmt: skip


def front_text(points: Sequence[FrontPoint], exact: bool, objective: str) -> str:
    """The front as a table."""
    told = "all of them" if exact else "some lie closer together than could be looked through"
    head = f"{len(points)} plans, all copies of a block alike, that no other beats in {objective} and memory ({told}):"
    rows = [["mesh", objective, "memory GiB at the end of forward"]]
    rows += [[str(p.mesh), seconds(p.cost_s), f"{p.memory_bytes / 2**30:.2f}"] for p in points]
    return f"{head}\n\n{table(rows, frozenset({1, 2}))}"
