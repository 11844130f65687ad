"""24. How planners think: a copy becomes a table, copies multiply, memory gets a price, and a bound is a proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE, GREY
from explorer.figures.scale import Scale
from explorer.figures.svg_tensors import Drawing
from explorer.jobs.result_cache import remember
from explorer.learn.blocks import placing
from explorer.learn.blocks.arranged import with_llama_block
from explorer.learn.learner import Learner, with_model
from explorer.learn.lesson import Values
from explorer.learn.lessons.planners.l13_choose import score_choices
from explorer.learn.markdown import Live, read_lesson
from explorer.learn.pictures.charts import label
from explorer.learn.pictures.cloud import circle, cloud_scales, draw_cloud, line_through
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost import Floats
from planner_core.search import Answer, RunTable, run_tables, search_within_budget
from planner_core.search.algebra import lower_hull, slope
from planner_core.search.network import Problem


@dataclass(frozen=True)
class ModelSearch:
    """What the search of the learner's model on some neighbours rests on: the table of a copy, and the answer."""

    run: RunTable
    answer: Answer
    budget: float


def foldable_learner(learner: Learner) -> tuple[Learner, str]:
    """Return a learner whose model has equal copies one after the other, and a sentence if it is another model."""
    layered, note = learner.transformer()
    if _run_table(layered, 2) is not None:
        return layered, note
    return with_model(
        learner
    ), f"The layers of {layered.name} pass on more than one tensor, so this lesson shows Llama-3-8B on your cluster."


@remember(32)
def _run_table(learner: Learner, devices: int) -> RunTable | None:
    return max(run_tables(make_problem(learner, devices)[0]), key=lambda r: r.copies, default=None)


@remember(32)
def search_model(learner: Learner, devices: int) -> ModelSearch:
    """Return the table and the answer; call it on what `foldable_learner` gives."""
    run, (problem, budget) = _run_table(learner, devices), make_problem(learner, devices)
    assert run is not None
    return ModelSearch(run, search_within_budget(problem, budget=budget), budget)


def make_problem(learner: Learner, devices: int) -> tuple[Problem, float]:
    """Return what is searched, the learner's model on some neighbours, and the memory allowed on each."""
    planner = placing.on_neighbours(learner, devices)
    # one stage, FSDP's if the learner leaves it open: tables of all stages are larger, and their proof takes longer than a page may
    zero = 3 if learner.request.zero is None else None
    return planner.problem(planner.cost_model(DeviceMesh(("gpus",), (devices,)), zero=zero)), planner.budget


def then(a: Floats, b: Floats) -> Floats:
    """Return [entry, exit] of one table after the other, by the least over every state between."""
    least: Floats = (a[:, :, None] + b[None, :, :]).min(axis=1)
    return least


def num_products(copies: int) -> int:
    """Count the products of tables for so many copies: squarings, and one for each further binary digit."""
    return copies.bit_length() - 1 + copies.bit_count() - 1


def table_powers(run: RunTable) -> list[tuple[int, Floats]]:
    """Return (copies, their table) at 1, 2, 4, ... copies, and at all of them."""
    powers = [(1, run.copy_seconds)]
    while 2 * powers[-1][0] <= run.copies:
        n, last = powers[-1]
        powers.append((2 * n, then(last, last)))
    if powers[-1][0] < run.copies:
        # 37 copies are 32 + 4 + 1: the tables of these digits, one after the other.
        powers.append((run.copies, reduce(then, [t for n, t in powers if run.copies & n])))
    return powers


def block_choices(learner: Learner, devices: int, share: int) -> tuple[Floats, Floats, float]:
    """Return communication in ms and memory in GiB of all choices of lesson 13, and the memory allowed: so many percent of the way from
    the least to what the quickest choice needs."""
    learner, block, _ = with_llama_block(learner)
    candidates = score_choices(learner, block, devices)
    can = np.isfinite(candidates.comm_s)
    ms, gib = candidates.comm_s[can] * 1e3, candidates.memory_bytes[can] / units.GIB
    quickest = float(gib[ms == ms.min()].min())
    return ms, gib, float(gib.min() + share / 100 * (quickest - gib.min()))


@dataclass(frozen=True)
class MemoryPrice:
    """The choices of one block with memory at a price, in ms per GiB: the best price's bound, the best choice that fits (its time and
    memory), and how many choices lie below the line through both."""

    price: float
    bound_ms: float
    best_ms: float
    best_gib: float
    left: int
    room_gib: float


def price_memory(ms: Floats, gib: Floats, room: float) -> MemoryPrice:
    """Return the price at which the bound `min(ms + price * gib) - price * room` is highest: the slope of the lower hull at `room`."""
    corners = lower_hull(zip(ms.tolist(), (gib * units.GIB).tolist(), strict=True))
    prices = (0.0, *(slope(a, b) * units.GIB for a, b in pairwise(corners)))
    bounds = {p: float((ms + p * gib).min() - p * room) for p in prices}
    price = max(bounds, key=lambda p: bounds[p])
    at = int(np.where(gib <= room, ms, np.inf).argmin())
    best = float(ms[at])
    below = int(((ms + price * gib) < best + price * room - 1e-9).sum())
    return MemoryPrice(price, bounds[price], best, float(gib[at]), below, room)


def round_to_microseconds(run: RunTable) -> RunTable:
    """Return the same with the table of a copy in whole microseconds and that of all copies made from it: what is shown adds up as
    shown."""
    run = replace(run, copy_seconds=run.copy_seconds.round(6))
    return replace(run, run_seconds=table_powers(run)[-1][1])


def live(learner: Learner, values: Values) -> Live:
    """Return ways, a table, two copies, all copies, the price of memory, the proof."""
    learner, note = foldable_learner(learner)
    devices = int(values["t"])
    t = search_model(learner, devices)
    ms, gib, room = block_choices(learner, devices, int(values["room"]))
    p = price_memory(ms, gib, room)
    run = round_to_microseconds(t.run)
    numbers = {
        "ways": run.log10_states,
        "all_ways": run.log10_states * run.copies,
        "copies": run.copies,
        "products": num_products(run.copies),
        "one_ms": float(run.copy_seconds.min()) * 1e3,
        "all_ms": float(run.run_seconds.min()) * 1e3,
        "price": p.price,
        "bound_ms": p.bound_ms,
        "best_ms": p.best_ms,
        "left": p.left,
        "room_gib": p.room_gib,
        "solves": t.answer.solves,
        "proven": float(t.answer.optimal),
    }
    if math.isfinite(t.answer.bound):  # where no plan fits there is no bound
        numbers["bound_s"] = t.answer.bound
    facts = {
        "ways_of_one": _power_of_ten(run.log10_states),
        "ways_of_all": _power_of_ten(run.log10_states * run.copies),
        "squarings": run.copies.bit_length() - 1,
        "choices": len(ms),
        "states": run.states,
        "one": _find_least_copy(run),
        "two": _find_least_pair(run),
        "all": _find_least_run(run, t.run),
        "allowed": t.budget,
        "answer": t.answer,
    }
    return Live(facts, {"cloud": _price_chart(p, ms, gib)}, numbers, learner, note)


def _power_of_ten(exponent: float) -> str:
    return f"10^{exponent:,.0f}".replace(",", "\u202f")


def _entry_states(run: RunTable) -> list[int]:
    """Return the states that a copy can begin in."""
    return [i for i in range(len(run.states)) if np.isfinite(run.copy_seconds[i]).any()]


def _format_ms(value: float) -> str:
    return f"{value * 1e3:,.3f}".replace(",", "\u202f") if math.isfinite(value) else "cannot"


def _find_least_copy(run: RunTable) -> dict[str, Any]:
    """Return the table of one copy, and its least entry."""
    shown = _entry_states(run)
    i, j = np.unravel_index(int(run.copy_seconds.argmin()), run.copy_seconds.shape)
    return {
        "rows": [(run.states[i], [_format_ms(s) for s in run.copy_seconds[i]]) for i in shown],
        "never": [s for k, s in enumerate(run.states) if k not in shown],
        "least": _format_ms(float(run.copy_seconds.min())),
        "from": run.states[i],
        "to": run.states[j],
    }


def _best_ends(run: RunTable) -> tuple[int, int]:
    """Return from where to where two copies are spelled out: the best way of all of them."""
    i, j = np.unravel_index(int(run.run_seconds.argmin()), run.run_seconds.shape)
    return int(i), int(j)


def _find_least_pair(run: RunTable) -> dict[str, Any]:
    """Return two copies by the state between them, and the least."""
    i, j = _best_ends(run)
    sums = run.copy_seconds[i] + run.copy_seconds[:, j]
    middle = [k for k in range(len(run.states)) if np.isfinite(sums[k])]
    rows = [
        (run.states[k], *map(_format_ms, (run.copy_seconds[i, k], run.copy_seconds[k, j], sums[k]))) for k in middle
    ]
    best = int(sums.argmin())
    return {
        "rows": rows,
        "from": run.states[i],
        "to": run.states[j],
        "least": _format_ms(float(sums[best])),
        "through": run.states[best],
    }


def _find_least_run(run: RunTable, exact: RunTable) -> dict[str, Any]:
    """Return the least by the number of copies, from the rounded table and from the planner's."""
    i, j = _best_ends(run)
    rows = [
        (n, num_products(n), _format_ms(float(t[i, j])), _format_ms(n * float(run.copy_seconds.min())))
        for n, t in table_powers(run)
    ]
    return {
        "rows": rows,
        "from": run.states[i],
        "to": run.states[j],
        "rounded": _format_ms(float(run.run_seconds[i, j])),
        "exact": _format_ms(float(exact.run_seconds[i, j])),
    }


def _price_chart(p: MemoryPrice, ms: Floats, gib: Floats) -> Drawing:
    low, high, most = float(gib.min()) * 0.9, float(gib.max()) * 1.03, min(float(ms.max()), 4 * p.best_ms) * 1.05 or 1.0
    x, y = cloud_scales((low, high), most)
    below = (ms + p.price * gib) < p.best_ms + p.price * p.room_gib - 1e-9
    spots = {
        (c, round(x(a)), round(y(b)))
        for a, b, c in zip(gib.tolist(), ms.tolist(), below.tolist(), strict=True)
        if b <= most
    }
    grey, orange = f'fill="{GREY}" fill-opacity="0.4"', f'fill="{COMMUNICATION}" fill-opacity="0.9"'
    parts = [circle(a, b, 3.4 if c else 2.4, orange if c else grey) for c, a, b in sorted(spots)]
    ends = [(v, p.bound_ms + p.price * (p.room_gib - v)) for v in (low, high)]
    clipped = [(v, min(max(w, 0.0), most)) if p.price == 0 else _clip(p, v, w, most) for v, w in ends]
    parts.append(line_through(x, y, clipped, f'stroke="{COMPUTE}" stroke-width="2"'))
    allowed = [(p.room_gib, most), (p.room_gib, 0.0)]
    parts.append(line_through(x, y, allowed, 'stroke="currentColor" stroke-dasharray="5 4"'))
    parts += _marks(p, x, y)
    names = "memory per layer and GPU, GiB", "communication of a layer, ms"
    return draw_cloud(x, y, names, parts, "Each dot is a choice; an orange one lies below the line through the best.")


def _marks(p: MemoryPrice, x: Scale, y: Scale) -> list[str]:
    """Draw rings around the best choice and the bound, each with a line to its words, which stand apart however near the two are."""
    best, bound = ((x(a), y(b)) for a, b in ((p.best_gib, p.best_ms), (p.room_gib, p.bound_ms)))
    limit = bound[0]
    beside, toward = (limit + 22, -3) if limit + 175 < x.end else (limit - 175, 75)
    above, under = min(best[1], bound[1]) - 28, min(max(best[1], bound[1]) + 30, y.start - 8)
    parts = []
    for (at_x, at_y), height, word, colour in (
        (best, above, f"best that fits: {units.significant(p.best_ms)} ms", COMMUNICATION),
        (bound, under, f"bound: {units.significant(p.bound_ms)} ms", COMPUTE),
    ):
        line = f"M{at_x:.1f} {at_y:.1f}L{beside + toward:.1f} {height - 4:.1f}"
        parts.append(f'<path d="{line}" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(circle(at_x, at_y, 5, f'fill="none" stroke="{colour}" stroke-width="2.5"'))
        parts.append(label(beside, height, word, halo=5, bold=True))
    allowed = f"memory allowed: {units.significant(p.room_gib)} GiB"
    return [*parts, label(min(limit - 4, x.end - 170), y.end - 7, allowed, halo=5, bold=True)]


def _clip(p: MemoryPrice, x: float, y: float, most: float) -> tuple[float, float]:
    """Return the end of the line, moved along it into the picture."""
    inside = min(max(y, 0.0), most)
    return x + (y - inside) / p.price, inside


LESSON = read_lesson("24-planners", live)
