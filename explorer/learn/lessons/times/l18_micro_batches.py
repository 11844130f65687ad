"""18. Micro-batches: why the gradients add up, what each way to shard repeats in every one, and what they buy."""

from __future__ import annotations

from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing, column, matrix, replicated, row, sign
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.times.l14_pays import fastest_with_ties
from explorer.learn.lessons.times.l17_memory_walk import MICRO_BATCHES, TOKENS
from explorer.learn.lessons.times.stated import (
    PricedLayout,
    price_usual,
    token_settings,
    unit_components,
    with_samples,
)
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import timeline
from explorer.text import units
from planner_core.cost import Component

SAMPLES = 8
MAX_SHOWN = 4
"""Micro-batches that the step in time shows, at most."""


@remember(8)
def micro_batch_gradients(micro_batches: int) -> dict[str, Any]:
    """Return the gradient of a mean over eight samples, from all at once and summed over micro-batches."""
    import torch

    gen = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (SAMPLES, 2), generator=gen).double()
    w = torch.randint(-2, 3, (2, 3), generator=gen).double()

    def gradient(part: Any) -> Any:  # of the sum of squares of part · w, over all samples
        return 2 * part.T @ part @ w / SAMPLES

    parts = [gradient(part) for part in x.chunk(micro_batches)]
    whole = gradient(x)
    return {"parts": parts, "whole": whole, "error": float((sum(parts) - whole).abs().max())}


def layer_seconds(case: PricedLayout) -> dict[str, float]:
    """Return the seconds of all repeated layers in one micro-batch: compute, forward and backward, and the weight traffic beside each,
    split into what comes in every micro-batch and what comes once a step."""
    names_ = ("forward", "backward", "forward_again", "backward_again", "forward_once", "backward_once")
    seconds, c = dict.fromkeys(names_, 0.0), Component
    places = (c.FORWARD, c.BACKWARD, c.FORWARD_TRAFFIC, c.BACKWARD_TRAFFIC, c.FORWARD_ONCE, c.BACKWARD_ONCE)
    for unit in (u for u in case.units if u.label):
        sizes = unit_components(case, unit)
        for name, at in zip(names_, places, strict=True):
            seconds[name] += unit.copies * sizes[at]
    return seconds


def split_sent_bytes(learner: Learner, layout: str) -> tuple[float, float]:
    """Return the bytes that one GPU sends once a step, and again in each micro-batch, from the planner's plans with one and with two."""
    # A step of m micro-batches sends once + m · again: two steps give both.
    one, two = (price_usual(learner, layout, TOKENS // m, m).sent_bytes for m in (1, 2))
    return float(2 * one - two), float(two - one)


def live(learner: Learner, values: Values) -> Live:
    """Return the same gradient, a step in time, what repeats, what it costs in bytes, and what it buys."""
    layout, m = str(values["way"]), int(values["m"])
    shown_learner, _, note = with_samples(learner, TOKENS)
    case, c = price_usual(learner, layout, TOKENS // m, m), micro_batch_gradients(m)
    once, repeated = split_sent_bytes(learner, layout)
    fsdp, time, cost = split_sent_bytes(learner, "FSDP (ZeRO-3)"), layer_seconds(case), case.plan.cost
    numbers = {
        "error": c["error"],
        "sent": case.sent_bytes,
        "once": once,
        "again": repeated,
        "step_s": cost.step_time_s,
        "peak": cost.memory_bytes["peak"],
        "params": shown_learner.graph.num_params,
        "gpus": shown_learner.cluster.num_gpus,
        **{f"{k}_s": v for k, v in time.items()},
    }
    layers_s, picture = _time_chart(case, time, layout, m)
    priced = {(w, k): price_usual(learner, w, TOKENS // k, k) for w in _layout_names() for k in MICRO_BATCHES}
    named = {f"{_layout_names()[w]} with {k} micro-batch{'es' * (k > 1)}": x for (w, k), x in priced.items()}
    fits = {at: x.plan.cost.step_time_s for at, x in priced.items() if x.plan.fits}
    facts = {
        "name": _layout_names()[layout],
        "samples": SAMPLES,
        "shown": min(m, MAX_SHOWN),
        "layers_s": layers_s,
        "fsdp": {"once": fsdp[0], "again": fsdp[1]},
        "zero1": sum(split_sent_bytes(learner, "ZeRO-1")),
        "tokens": TOKENS,
        "any_fits": bool(fits),
        "quickest": fastest_with_ties(named, learner.cluster) if fits else "",
        "best": min(fits, key=lambda at: fits[at])[0] if fits else "",
        "fits": fits,
        "ways": {w: (name, *split_sent_bytes(learner, w)) for w, name in _layout_names().items()},
        "counts": MICRO_BATCHES,
        "bought": [(k, priced[layout, k].plan, priced[layout, k].sent_bytes) for k in MICRO_BATCHES],
    }
    pictures: dict[str, Picture] = {
        "same": _draw_gradients(c),
        "time": picture,
    }
    return Live(facts, pictures, numbers, shown_learner, note)


def _layout_names() -> dict[str, str]:
    """Return the ways to shard, and their names."""
    control = LESSON.controls[0]
    return {str(layout): control.name(layout) for layout in control.options}


def _draw_gradients(c: dict[str, Any]) -> Drawing:
    shown = [matrix(p, replicated, f"micro-batch {i + 1}", cell=52) for i, p in enumerate(c["parts"])]
    parts = [x for i, p in enumerate(shown) for x in ((sign("+"), p) if i else (p,))]
    rows = [row(*parts[i : i + 6], gap=8) for i in range(0, len(parts), 6)]
    return column(*rows, row(sign("="), matrix(c["whole"], replicated, "the whole batch", cell=52), gap=8), gap=10)


def _time_chart(case: PricedLayout, time: dict[str, float], layout: str, m: int) -> tuple[float, Drawing]:
    """Return the seconds of the layers in the micro-batches that are shown, and these on their streams."""
    computing, weights, sums = [], [], []
    shown = min(m, MAX_SHOWN)
    k, now = case.model.contention, 0.0
    for i in range(shown):
        last = i == shown - 1
        for phase, letter in (("forward", "F"), ("backward", "B")):
            repeated = time[f"{phase}_again"]
            once = time[f"{phase}_once"] if (last if phase == "backward" else i == 0) else 0.0
            # The form of the step's time: compute slowed by traffic, or the traffic itself where that is longer.
            length = max(time[phase] + k * (repeated + once), repeated + once)
            colour = COMPUTE if phase == "forward" else DEVICES[4]
            computing.append((now, now + time[phase], f"{letter}{i + 1}", colour))
            # FSDP gathers in each pass; the others gather their working copies in the first forward of a step alone.
            gather = time["forward_again"] if layout == "FSDP (ZeRO-3)" else once if phase == "forward" else 0.0
            if gather:
                weights.append((now, now + gather, "gather", DEVICES[3]))
            if (rest := repeated + once - gather) > 1e-9:
                sums.append((now + gather, now + gather + rest, "sum", COMMUNICATION))
            now += length
    tracks = [("compute", computing), ("gathers", weights), ("gradient sums", sums)]
    return now, timeline([track for track in tracks if track[1]], units.seconds, now)


LESSON = read_lesson(
    "18-micro-batches", live, focus=lambda learner, v: token_settings(learner, TOKENS // int(v["m"]), int(v["m"]))
)
