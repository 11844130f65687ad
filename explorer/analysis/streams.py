"""The steps of plans as lanes of work, in the form that the browser draws. Pure.

A plan of one stage has a lane for each stream of its GPUs; one with stages has a lane for each rank of its pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorer.text import recipe, units
from planner_core.core import Plan
from planner_core.planning import stage_trace
from planner_core.planning.analysis import STREAMS, TraceWork

LANE_NAMES = {"parts": "model", "compute": "compute", "collectives": "collectives", "weights": "weights"}
"""What the page calls the streams."""
MAX_RANKS = 16
"""Ranks of a pipeline that are drawn: of more, evenly spaced ones, the first and the last among them."""
ONCE = "once"
Look = Mapping[str, Any]
"""How one kind of work is drawn: see `explorer.figures.palette.WORK`."""


class _StringTable:
    """Numbers for texts and kinds: the browser gets each text once."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self.kinds = {str(k["kind"]): i for i, k in enumerate(looks)}
        self.words: dict[str, int] = {"": 0}
        self.used: set[str] = set()

    def kind(self, name: str) -> int:
        self.used.add(name)
        return self.kinds[name]

    def text(self, text: str) -> int:
        return self.words.setdefault(text, len(self.words))


def build_streams(
    steps: Mapping[str, Sequence[TraceWork]],
    plans: Mapping[str, Plan],
    styles: Sequence[Look],
) -> dict[str, Any]:
    """Return the data of `streams.js`: the work of each plan by name, its texts and kinds by number.

    A plan with stages needs no `steps`.
    """
    texts = _StringTable(styles)
    drawn, descriptions = [], []
    for name, plan in plans.items():
        step = steps.get(name, ())
        lanes, works = (
            _rank_lanes(plan, texts)
            if plan.pipeline
            else ([LANE_NAMES[s] for s in STREAMS], [_lane_item(w, texts) for w in step])
        )
        step_s = sum(w.seconds for w in step if w.stream == "compute") if step else plan.cost.step_time_s
        head = {"name": name, "told": _describe_step(step_s, plan), "step_s": step_s}
        drawn.append({**head, "lanes": lanes, "staged": plan.pipeline is not None, "works": works})
        descriptions.append(f"{name}: {recipe.describe_bubble(plan) if plan.pipeline else _describe_compute(step)}")
    return {
        "plans": drawn,
        "kinds": _name_in_legend(styles, texts.used),
        "words": list(texts.words),
        "alt": f"One step in time. {'; '.join(descriptions)}",
    }


def _name_in_legend(styles: Sequence[Look], used: set[str]) -> list[dict[str, Any]]:
    """Return the kinds for the browser, without words where nothing is of a kind: kinds that look alike share the entry of the first."""
    names: dict[tuple[str, bool], list[str]] = {}
    for kind in styles:
        if kind["kind"] in used and kind["words"]:
            names.setdefault((kind["colour"], kind["pale"]), []).append(kind["words"])
    entries = {words[0]: ", ".join(words) for words in names.values()}
    return [
        {**{k: v for k, v in kind.items() if k != "kind"}, "words": entries.get(kind["words"], "")} for kind in styles
    ]


def _describe_step(step_s: float, plan: Plan) -> str:
    """Write the simulated step, and the price if it is written otherwise."""
    drawn, priced = units.seconds(step_s), units.seconds(plan.cost.step_time_s)
    return drawn if drawn == priced else f"{drawn} in the order of a run, priced at {priced}"


def _lane_item(w: TraceWork, texts: _StringTable) -> list[float]:
    part = f"{w.part} {w.copy} of {w.copies}" if w.copies > 1 else w.part
    batch = f", micro-batch {w.micro_batch}" if w.micro_batch else ""
    kind = "sends now" if w.stream == "collectives" else w.kind
    where = f"{part}, {w.phase}{batch}"
    words = [texts.text(text) for text in (where, w.name, w.note)]
    # A step of many micro-batches is some hundred thousand numbers, which are half as long to a tenth of a nanosecond.
    place = [STREAMS.index(w.stream), texts.kind(kind), words[0], round(w.start_s, 10), round(w.seconds, 10)]
    return [*place, words[1], words[2], w.copy % 2, w.micro_batch]


def _describe_compute(step: Sequence[TraceWork]) -> str:
    """Write the seconds of the compute stream by kind."""
    sums: dict[str, float] = {}
    for w in step:
        if w.stream == "compute":
            sums[w.kind] = sums.get(w.kind, 0.0) + w.seconds
    return ", ".join(f"{kind} {units.seconds(seconds)}" for kind, seconds in sums.items())


# --- pipeline stages ---------------------------------------------------------------------------------


def drawn_ranks(plan: Plan) -> list[int]:
    """Return the ranks of a pipeline that have a lane."""
    n = plan.pipeline.ranks if plan.pipeline else 0
    if n <= MAX_RANKS:
        return list(range(n))
    # 64 ranks: 0, 4, 8, 13, ... 63. The first fills the pipeline and the last empties it, so both are always there.
    return sorted({round(k * (n - 1) / (MAX_RANKS - 1)) for k in range(MAX_RANKS)})


def _rank_lanes(plan: Plan, texts: _StringTable) -> tuple[list[str], list[list[float]]]:
    """Return the lanes of a plan with stages, and the simulated work of each, with its bubbles."""
    cut, ranks = plan.pipeline, drawn_ranks(plan)
    assert cut is not None
    lanes = [f"rank {r}" if cut.virtual > 1 else f"stage {r}" for r in ranks]
    works: list[list[float]] = []
    for event in stage_trace(plan)["traceEvents"]:
        if event["ph"] != "X" or event["tid"] not in ranks:
            continue
        args, kind = event["args"], event["cat"]
        number = args["micro-batch"] + 1 if args else 0
        copies = f"stage {args['stage']}, {cut.copies[args['stage']]} copies" if args else ""
        name = str(number) if number else {ONCE: "updates weights"}.get(kind, "")
        note = f"micro-batch {number} of {plan.workload.accumulate}" if number else ""
        words = [texts.text(text) for text in (copies, name, note)]
        place = [texts.kind("optimizer" if kind == ONCE else kind), words[0], event["ts"] / 1e6, event["dur"] / 1e6]
        works.append([ranks.index(event["tid"]), *place, words[1], words[2], args.get("stage", 0) % 2, number])
    return lanes, works


def describe_stages(plan: Plan) -> str:
    """Say how the model is cut into stages."""
    cut = plan.pipeline
    assert cut is not None
    counts = sorted(set(cut.copies))
    copies = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    partial = f" {len(drawn_ranks(plan))} of {cut.ranks} ranks are drawn." if len(drawn_ranks(plan)) < cut.ranks else ""
    return f"{len(cut.copies)} stages of {copies} copies, {', '.join(recipe.schedule_name(plan))}; {recipe.describe_bubble(plan)}.{partial}"
