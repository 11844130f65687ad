"""The report to send to a colleague: one HTML file that needs nothing else and prints well. Pure: values in, HTML out.

The template and its style are static/html/report.html and static/css/report.css. Everything that comes from outside is escaped here.
The file is well-formed XML too, so that a program can read it.
"""

from __future__ import annotations

import html
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import metadata

import numpy as np

import planner_core
from explorer.address.settings import STAGE_NAMES
from explorer.analysis import differences
from explorer.analysis.step_parts import fastest_other, memory_limit_bytes
from explorer.analysis.streams import build_streams, describe_stages
from explorer.figures import print_figures, topology
from explorer.figures.palette import LIGHT, WORK
from explorer.static import filled, style
from explorer.text import commands, recipe, spending, units, words
from planner_core.core import PHASES, PLAN_SCHEMA, Graph, Plan, Traffic, timing
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import USABLE_MEMORY, Result
from planner_core.planning.analysis import step_work, unknown_ops
from planner_core.planning.pricing import FITS, Budget, count_model_flops, load_published_runs, measure_speed

LEFT_OUT_GROUP = FITS[1]
COST_MODEL = (
    "Times are estimates: rates of products, kernels and links are fitted to published measurements. Plans that the scatter of such "
    "estimates does not tell apart are ties.",
    "The next operation waits for what it reads. Traffic of a weight runs beside its block’s compute and slows it by "
    f"{timing().contention:.2f} s a second; the longer of the two counts.",
    "The gradient clip and the optimizer’s update are part of the step.",
    f"A plan may fill {USABLE_MEMORY:.0%} of the GPU unless told otherwise: fragmentation and workspaces are not counted.",
)
"""What the cost model assumes, in short (docs/COST_MODEL.md)."""


def describe_accuracy() -> str:
    """Say how far predictions of published runs are off, with constants that have not seen the run's group."""
    runs = load_published_runs()
    half, nine = np.quantile([abs(r.error(LEFT_OUT_GROUP)) for r in runs], (0.5, 0.9)).tolist()
    return (
        f"Of {len(runs)} published runs half are predicted within {units.percent(half)} and nine in ten within {units.percent(nine)} "
        "of what their sources measured. The page “Measured” of the explorer and docs/PUBLISHED.md list them."
    )


def build_report(
    shown: Mapping[str, Plan],
    result: Result,
    now: datetime,
    graphs: Mapping[str, Graph] | None = None,
    limits: Mapping[str, int] | None = None,
    budget: Budget | None = None,
) -> str:
    """Write the file for the first plan, which belongs to `result`, and for those shown with it.

    `now` is the date it carries. `graphs` and `limits` (bytes that a plan may take) are by plan, where plans were made for different
    batches or GPUs. `budget`: the tokens to train on.
    """
    plans, (first, *others) = dict(shown), shown.values()
    against = shown[fastest_other(shown, next(iter(shown)))] if others else first
    graphs = graphs or dict.fromkeys(shown, result.graph)
    model = str(first.model["name"])
    fill = {
        "title": html.escape(f"{model} on {words.cluster_words(result.cluster)}"),
        "headline": html.escape(words.compare_steps(first, against) if others else f"{words.describe_axes(first)}."),
        "workload": html.escape(_workload(first)),
        "name": html.escape(words.plan_title(first)),
        "plans": _plans(plans.values()) + _speeds(plans, graphs, budget),
        "described": "".join(
            f"<p><b>{html.escape(words.plan_title(p))}</b>: {html.escape(words.describe_axes(p))}.</p>"
            for p in plans.values()
        ),
        "timeline": _timeline(plans, graphs),
        "ranks": " ".join(describe_stages(p) for p in plans.values() if p.pipeline)
        or f"All {first.num_gpus} GPUs do the same; the lane “compute” adds up to the step.",
        "memory": print_figures.memory_svg(plans, limits or dict.fromkeys(plans, memory_limit_bytes(result))),
        "traffic": _traffic(first),
        "topology": topology.cluster_svg(first, PHASES, LIGHT, per_row=2),
        "links": html.escape(_links(first)),
        "placements": _placements(plans, graphs),
        "notes": "".join(f"<li>{html.escape(n)}</li>" for n in collect_notes(plans.values(), result)),
        "facts": _facts(first, result),
        "command": html.escape(commands.plan_command(result.request, f"{model}.json".replace("/", "-"))),
        "made": html.escape(f"{now:%Y-%m-%d %H:%M} · {describe_versions()}"),
        "css": style("report"),
    }
    return filled("report", fill)


def file_name(shown: Mapping[str, Plan]) -> str:
    """Name the file: `llama-3-8b-best-megatron-lm.html`."""
    model = next(iter(shown.values())).model["name"]
    return re.sub(r"[^a-z0-9.]+", "-", f"{model}-{'-'.join(shown)}".lower()) + ".html"


def describe_versions() -> str:
    """Say what made the report."""
    return f"Shardscope {planner_core.__version__}, {PLAN_SCHEMA}, Python {platform.python_version()}, numpy {metadata.version('numpy')}"


def collect_notes(plans: Iterable[Plan], result: Result) -> list[str]:
    """Return what was assumed of the model and of the cost, and what each plan says of itself."""
    plan_notes = [
        f"{words.plan_title(p)}: {note}." if not note.endswith(".") else f"{words.plan_title(p)}: {note}"
        for p in plans
        for note in p.notes
    ]
    missing = list(filter(None, [unknown_ops(result)]))
    level = [f"{x.name} reaches {units.significant(x.bytes_per_s / 1e9)} GB/s per unit." for x in result.cluster.levels]
    return list(
        dict.fromkeys(
            [*plan_notes, *result.notes, *result.graph.assumptions, *missing, *level, *COST_MODEL, describe_accuracy()]
        )
    )


def _timeline(plans: Mapping[str, Plan], graphs: Mapping[str, Graph]) -> str:
    """Draw the steps in time, as the page does."""
    titled = {words.plan_title(p): p for p in plans.values()}
    steps = {words.plan_title(p): step_work(p, graphs[n]) for n, p in plans.items() if not p.pipeline}
    return print_figures.timeline_svg(build_streams(steps, titled, WORK))


# --- parts --------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; each cell is text, and is escaped."""
    top = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _workload(plan: Plan) -> str:
    w = plan.workload
    numbers = words.describe_precision(w["dtype"], w["dtype"], w.get("precision", "pure"))
    return f"Batch {units.whole(w['batch'])} × {units.whole(w['seq'])} tokens, {numbers}, {w['optimizer']}, {recipe.describe_work(plan)}"


def _plans(plans: Iterable[Plan]) -> str:
    head = [
        "plan",
        "mesh",
        "step",
        "compute",
        "waits",
        "communication",
        "sent per GPU",
        "memory per GPU",
        "fits",
        "best of its kind",
    ]
    rows = []
    for p in plans:
        c = p.cost
        rows.append(
            [
                words.plan_title(p),
                words.full_mesh_words(p),
                units.seconds(c.step_time_s),
                units.seconds(c.compute_time_s),
                units.seconds(c.exposed_comm_time_s),
                units.seconds(c.comm_time_s),
                units.traffic(sent_per_gpu(p)),
                units.memory(c.memory_bytes["peak"]),
                "yes" if p.fits else "no",
                "yes" if p.is_step_proven else "no",
            ]
        )
    return _table(head, rows)


def _speeds(plans: Mapping[str, Plan], graphs: Mapping[str, Graph], budget: Budget | None) -> str:
    head = ["plan", "nine in ten runs", "tokens/s per GPU", "model FLOPs utilisation", *spending.budget_columns(budget)]
    rows = []
    for name, p in plans.items():
        cluster = topology.cluster_of(p)
        s = measure_speed(p, count_model_flops(graphs[name]), cluster)
        rows.append(
            [
                words.plan_title(p),
                " to ".join(filter(None, s.between(units.seconds))),
                units.whole(s.tokens_per_s_per_gpu),
                units.percent(s.mfu),
                *spending.budget_cells(budget, s, cluster.num_gpus),
            ]
        )
    return _table(head, rows)


def _traffic(plan: Plan) -> str:
    def row(t: Traffic) -> list[str]:
        return [
            t.phase,
            t.kind,
            plan.mesh.axis_names[t.axis],
            t.algorithm,
            units.whole(t.count),
            units.traffic(t.num_bytes),
            units.traffic(t.wire_bytes),
            units.seconds(t.time_s),
        ]

    sent = [t for t in plan.cost.traffic if t.wire_bytes]
    if not sent:
        return "<p>Nothing is sent.</p>"
    total = [
        "sum",
        "",
        "",
        "",
        units.whole(sum(t.count for t in sent)),
        "",
        units.traffic(sum(t.wire_bytes for t in sent)),
        units.seconds(plan.cost.comm_time_s),
    ]
    return _table(
        ["phase", "collective", "axis", "mostly by", "calls", "tensors", "sent", "time"], [*map(row, sent), total]
    )


def _links(plan: Plan) -> str:
    by_level: dict[int, tuple[float, float]] = {}
    for x in topology.link_loads(plan):
        size, time = by_level.get(x.level, (0.0, 0.0))
        by_level[x.level] = size + x.num_bytes, time + x.time_s
    levels = topology.cluster_of(plan).levels
    sentences = [
        f"{levels[i].name}: {units.traffic(s)} out of one unit, {units.seconds(t)} on the wire"
        for i, (s, t) in sorted(by_level.items())
    ]
    return "; ".join(sentences) + "." if sentences else "Nothing is sent."


def _placements(plans: Mapping[str, Plan], graphs: Mapping[str, Graph]) -> str:
    rows = []
    for r in differences.compare_weights(plans, graphs)[:-1]:
        times = f" ×{r.copies}" if r.copies > 1 else ""
        rows.append([r.weight + times, *(_letters(r.placements[n]) for n in plans)])
    return _table(["weight", *(words.plan_title(p) for p in plans.values())], rows)


def _letters(cell: str) -> str:
    return "R" if cell == words.WHOLE else cell.replace(words.GATHERED, " gathered")


def _facts(plan: Plan, result: Result) -> str:
    gpu, graph = result.cluster.gpu, result.graph
    rate = gpu.flops_per_s(str(plan.workload["dtype"])) / 1e12
    blocks = ", ".join(f"{name} ×{n}" for name, n in graph.num_repeats.items()) or "none"
    rows = [
        [
            "model",
            f"{graph.name}, {units.count(graph.num_params)} parameters, {units.whole(graph.num_ops)} ops, from {graph.source}",
        ],
        ["repeated blocks", blocks],
        ["loss", graph.loss],
        ["cluster", result.cluster.description or result.cluster.name],
        ["GPU", f"{gpu.name}, {units.memory(gpu.memory_bytes)}, {rate:.0f} TFLOP/s reachable"],
        ["training", _workload(plan)],
        ["ZeRO", STAGE_NAMES[plan.workload["zero"]]],
    ]
    return _table(["", ""], rows).replace('<thead><tr><th scope="col"></th><th scope="col"></th></tr></thead>', "")
