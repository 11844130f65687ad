"""25. Pipeline stages: bubbles by hand, the schedules, the learner's model cut and simulated, and when that beats FSDP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from explorer.figures.palette import COMPUTE, DEVICES, GREY
from explorer.figures.svg_tensors import Drawing, at, number, text
from explorer.jobs.result_cache import remember
from explorer.learn import links
from explorer.learn.learner import Learner, with_model
from explorer.learn.lesson import Values
from explorer.learn.lessons.times.stated import MAX_SAMPLE_TOKENS, PricedLayout, price_batch, with_samples
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import WIDTH, timeline
from explorer.learn.pictures.film import Cell, Film, Flight
from explorer.text import units
from planner_core.core import Cluster, Pipeline, Plan, StageCost
from planner_core.cost import (
    Pass,
    PipelineTime,
    Span,
    cost_model_of,
    in_flight,
    ops_at_the_ends,
    price_pipeline,
    price_units,
    rank_orders,
    simulated_pipeline,
    step_seconds,
)
from planner_core.planning import doubt_between
from planner_core.planning.methods import Layout

RANKS = 4
"""Ranks of the pipeline that is done by hand."""
FORWARD, BACKWARD, WEIGHTS = 1.0, 2.0, 1.0
"""Turns of a whole rank's pass by hand: forward, backward, and the part of backward that makes gradients of weights."""
MAX_STOPS = 24
FALLBACK_CLUSTER = "2x8-h100"
"""The cluster that stands in where ranks cannot share the learner's GPUs."""
STAGED_CASE = "stages"
PASS_COLOURS = {Pass.FORWARD: COMPUTE, Pass.BACKWARD: DEVICES[2], Pass.INPUT: DEVICES[2], Pass.WEIGHT: DEVICES[3]}
NAMES_WIDTH, ROW = 84.0, 40.0
"""Pixels of the names of ranks, and of a rank's row."""
NAME_SIZE, LABEL_SIZE = 21, 15
"""Of letters: a phone shows the whole motion at 0.6 of its size."""


def hand_pipeline(order: str) -> tuple[Pipeline, tuple[StageCost, ...]]:
    """Return four equal ranks; in `interleaved` of two stages each, which take half as long."""
    each = 2 if order == "interleaved" else 1
    one = StageCost(FORWARD / each, BACKWARD / each, WEIGHTS / each if order == "zb" else 0.0, 0, 0, 0, 0, 0, 0)
    return Pipeline(RANKS, order, (1,) * (RANKS * each)), (one,) * (RANKS * each)


@remember(64)
def simulate_by_hand(order: str, micro_batches: int) -> PipelineTime:
    """Return the simulated step of four equal ranks."""
    pipeline, costs = hand_pipeline(order)
    return simulated_pipeline(pipeline, costs, micro_batches)


def passes_in_flight(pipeline: Pipeline, micro_batches: int) -> list[int]:
    """Return by rank the most micro-batches of its stages that are on their way at once."""
    return [sum(in_flight(order).values()) for order in rank_orders(pipeline, micro_batches)]


def bubble_share(ranks: int, micro_batches: int, each: int) -> float:
    """Return the bubble's share of a step in which all passes take equally long."""
    return (ranks - 1) / (each * micro_batches + ranks - 1)


# --- the learner's model -----------------------------------------------------------------------------


def stageable_learner(learner: Learner, ranks: int) -> tuple[Learner, str]:
    """Return the learner with a model of enough layers on enough GPUs, and a sentence where another stands in."""
    learner, _, note = with_samples(learner, MAX_SAMPLE_TOKENS)
    if learner.cluster.num_gpus % ranks:
        learner = Learner(replace(learner.request, cluster=FALLBACK_CLUSTER), learner.load)
        note = f"{note} {ranks} ranks cannot share your GPUs evenly, so two nodes of eight H100 are shown.".strip()
    if sum(learner.graph.num_repeats.values()) < 2 * ranks:
        learner = with_model(learner)
        note = f"{note} {learner.name} is shown: your model has too few layers.".strip()
    return learner, note


def plan_stages(learner: Learner, order: str, micro_batches: int, ranks: int) -> PricedLayout:
    """Return the learner's model in stages, with a sample a micro-batch and data-parallel rank."""
    data = learner.cluster.num_gpus // ranks
    layout = Layout(dp=data, pp=ranks, vp=2 if order == "interleaved" else 1, schedule=order, zero=1 if data > 1 else 0)
    case = price_batch(learner, layout, data, micro_batches)
    assert case, "stages split layers only"
    return case


def plan_fsdp(learner: Learner, micro_batches: int, batch: int) -> PricedLayout:
    """Plan FSDP over all GPUs for the same samples."""
    case = price_batch(learner, Layout(fsdp=learner.cluster.num_gpus), batch // micro_batches, micro_batches)
    assert case, "FSDP splits samples only"
    return case


def with_link_speed(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Return the cluster whose outermost links give each GPU so much."""
    level = cluster.levels[-1]
    each = level.unit_bytes_per_s / (cluster.num_gpus // level.size)
    return cluster.with_bandwidth(bytes_per_s / each, len(cluster.levels) - 1)


def step_seconds_on(case: PricedLayout, cluster: Cluster) -> float:
    """Return a plan's step on another cluster of as many GPUs."""
    plan, planner = case.plan, case.planner
    model = cost_model_of(plan, cluster)
    if plan.pipeline:
        ends = ops_at_the_ends(planner.coarse)
        return price_pipeline(plan.blocks, planner.graph, plan.pipeline, model, ends).step_time_s
    return step_seconds(price_units(plan.blocks, planner.graph, model, planner.coarse), model)


# --- the scene -----------------------------------------------------------------------------------------


def live(learner: Learner, values: Values) -> Live:
    """Return bubbles by hand, the formula, the learner's model simulated, what a rank holds, and when stages pay."""
    order, m, ranks = str(values["order"]), int(values["m"]), int(values["stages"])
    hand, alone = simulate_by_hand(order, m), simulate_by_hand("gpipe", 1)
    staged, note = stageable_learner(learner, ranks)
    case = plan_stages(staged, order, m, ranks)
    plan = case.plan
    cut, cost = plan.pipeline, plan.cost.pipeline
    assert cut and cost
    rates = with_link_speed(staged.cluster, float(values["speed"]) * 1e9)
    took, cases = _layout_times(case, staged, m, ranks, rates)
    best = min((name for name in took if name != STAGED_CASE), key=lambda name: (not cases[name].plan.fits, took[name]))
    near = doubt_between(plan, cases[best].plan, rates)
    ahead = took[best] / took[STAGED_CASE] - 1
    numbers = {
        "alone_bubble": alone.bubble_s / alone.step_s,
        "alone_step": alone.step_s,
        "hand_step": hand.step_s,
        "hand_bubble": hand.bubble_s / hand.step_s,
        "hand_work": m * (FORWARD + BACKWARD),
        "step_s": plan.cost.step_time_s,
        "bubble": cost.bubble_s / plan.cost.step_time_s,
        "formula": bubble_share(ranks, m, cut.virtual),
        "handed": max(s.send_bytes for s in cost.stages),
        "peak": plan.cost.memory_bytes["peak"],
        "stages_s": took[STAGED_CASE],
        "fsdp_s": took[best],
        "held": passes_in_flight(hand_pipeline(order)[0], m)[0] / (2 if order == "interleaved" else 1),
        "batch": plan.workload.batch,
    }
    facts = {
        "held": number(numbers["held"]),
        "layers": sum(cut.copies),
        "copies": cut.copies,
        "pays": "unfit" if not plan.fits else "stages" if ahead > near else "fsdp" if -ahead > near else "tie",
        "shares": [(k, [bubble_share(ranks, int(k), each) for each in (1, 2, 4)]) for k in LESSON.controls[1].options],
        "ranks": _list_ranks(plan),
        "took": {name: (seconds, cases[name].plan.fits) for name, seconds in took.items()},
    }
    pictures: dict[str, Picture] = {
        "alone": pipeline_film(alone, flights=True),
        "hand": pipeline_film(hand),
        "simulated": _simulated_chart(plan),
    }
    return Live(facts, pictures, numbers, staged, note)


def _list_ranks(plan: Plan) -> list[tuple[int, int, int]]:
    """Return by rank how many layers it has, its most passes in flight, and bytes of its fullest moment."""
    cut, cost = plan.pipeline, plan.cost.pipeline
    assert cut and cost
    most = passes_in_flight(cut, plan.workload.accumulate)
    mine = [cut.stages_of(rank) for rank in range(cut.ranks)]
    return [
        (sum(cut.copies[s] for s in stages), passes, max(cost.stages[s].peak_bytes for s in stages))
        for stages, passes in zip(mine, most, strict=True)
    ]


def _layout_times(
    staged_case: PricedLayout, learner: Learner, m: int, ranks: int, rates: Cluster
) -> tuple[dict[str, float], dict[str, PricedLayout]]:
    """Return the seconds of a step with stages and with FSDP, in one micro-batch and in as many as give a GPU one sample at a time."""
    batch = staged_case.plan.workload.batch
    parts = sorted({1, max(1, m // ranks)})
    cases = {STAGED_CASE: staged_case} | {
        f"FSDP, {k} micro-batch{'es' * (k > 1)}": plan_fsdp(learner, k, batch) for k in parts
    }
    return {name: step_seconds_on(case, rates) for name, case in cases.items()}, cases


def pipeline_film(time: PipelineTime, *, flights: bool = False) -> Film:
    """Return the work of every rank as it begins, stop by stop; where each rank stands, in words. `flights`: what a stage hands on
    moves."""
    ranks = 1 + max(s.rank for s in time.spans)
    wide = (WIDTH - NAMES_WIDTH) / time.step_s
    every = max(1.0, math.ceil(time.step_s / MAX_STOPS))
    stops = [every * k for k in range(math.ceil(time.step_s / every) + 1)]
    cells, moves = [], []
    for span in time.spans:
        body = _draw_pass(span, wide)
        first = next(k for k, stop in enumerate(stops) if stop >= span.end_s - 1e-9)
        place = (NAMES_WIDTH + span.start_s * wide, span.rank * ROW)
        cells.append(Cell(*place, tuple(body if k >= first else None for k in range(len(stops)))))
        to = span.rank + (1 if span.work.what is Pass.FORWARD else -1)
        if flights and 0 <= to < ranks and first < len(stops) - 1:
            there = (NAMES_WIDTH + span.end_s * wide, to * ROW)
            moves.append(Flight(first, place, there, _draw_pass(span, wide)))
    names = "".join(at(0, r * ROW + 3, text(f"rank {r}", NAME_SIZE, 600)) for r in range(ranks))
    lines = "".join(
        f'<path d="M{NAMES_WIDTH} {r * ROW + 30:.0f}H{WIDTH:.0f}" stroke="{GREY}" stroke-opacity="0.4"/>'
        for r in range(ranks)
    )
    # what is to come, so that gaps are seen at once
    ghost = "".join(at(c.x, c.y, _draw_pass(s, wide, named=False)) for c, s in zip(cells, time.spans, strict=True))
    still = Drawing(0, 0, f'{names}{lines}<g opacity="0.16">{ghost}</g>')
    return Film(
        WIDTH, ranks * ROW, tuple(_describe_stop(time, stop) for stop in stops), still, tuple(cells), tuple(moves)
    )


def _draw_pass(span: Span, wide: float, *, named: bool = True) -> Drawing:
    """Draw one pass: its colour and, `named`, the number of its micro-batch, the second stage of a rank paler."""
    width, what = (span.end_s - span.start_s) * wide, span.work.what
    late = ' fill-opacity="0.62"' if span.work.stage >= RANKS else ""
    body = f'<rect width="{max(1.0, width - 1.5):.1f}" height="28" rx="2" fill="{PASS_COLOURS[what]}"{late}/>'
    label = f"{what.value}{span.work.micro_batch + 1}"
    if named and width > 10 * len(label):
        body += f'<text x="{width / 2:.1f}" y="19.5" font-size="{LABEL_SIZE}" text-anchor="middle" fill="{PASS_INK[what]}">{label}</text>'
    return Drawing(width, 28, body)


PASS_INK = {Pass.FORWARD: "#ffffff", Pass.BACKWARD: "#000000", Pass.INPUT: "#000000", Pass.WEIGHT: "#000000"}


def _describe_stop(time: PipelineTime, now: float) -> str:
    """Say who has worked how long by now, in a sentence."""
    ranks = 1 + max(s.rank for s in time.spans)
    busy = [
        sum(min(s.end_s, now) - s.start_s for s in time.spans if s.rank == r and s.start_s < now) for r in range(ranks)
    ]
    if now <= 0:
        return "Before the step. F is forward, B backward (I and W its two parts); the number is the micro-batch."
    idle = 1 - sum(busy) / (ranks * min(now, time.step_s))
    works = [str(s.rank) for s in time.spans if s.start_s < now <= s.end_s + 1e-9]
    at_work = f"rank{'s' * (len(works) > 1)} {', '.join(sorted(works))} at work" if works else "nobody at work"
    return f"Turn {units.significant(min(now, time.step_s))}: {at_work}; {units.percent(idle)} of all time so far was waiting."


def _simulated_chart(plan: Plan) -> Drawing:
    cut, cost = plan.pipeline, plan.cost.pipeline
    assert cut and cost
    time = simulated_pipeline(cut, cost.stages, plan.workload.accumulate)
    tracks = []
    for rank in range(cut.ranks):
        mine = [s for s in time.spans if s.rank == rank]
        spans = [
            (s.start_s, s.end_s, f"{s.work.what.value}{s.work.micro_batch + 1}", PASS_COLOURS[s.work.what])
            for s in mine
        ]
        once = max(cost.stages[s].step_s for s in cut.stages_of(rank))
        spans.append((mine[-1].end_s, mine[-1].end_s + once, "update", "#8c8c8c"))
        tracks.append((f"rank {rank}", _drop_long_words(spans, time.step_s)))
    return timeline(tracks, units.seconds, time.step_s)


def _drop_long_words(
    spans: Sequence[tuple[float, float, str, str]], step_s: float
) -> list[tuple[float, float, str, str]]:
    """Drop the words that have no room in their span; they would stand next to it and hide the bubble."""
    return [
        (a, b, words if (b - a) / step_s * (WIDTH - 150) > 8.0 * len(words) + 6 else "", colour)
        for a, b, words, colour in spans
    ]


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """Return the same stages as the setup that is run now, beside the planner's choice."""
    order, m, ranks = str(values["order"]), int(values["m"]), int(values["stages"])
    staged, _ = stageable_learner(learner, ranks)
    plan = plan_stages(staged, order, m, ranks).plan
    words = [str(plan.name), f"accumulate={m}"]
    sizes = {"batch": str(plan.workload.batch), "seq": str(plan.workload.seq)}
    return {**links.model_setting(learner, staged), **sizes, "setup": ",".join(words), "plan": "our-current-setup"}


LESSON = read_lesson("25-pipeline", live, focus=focus)
