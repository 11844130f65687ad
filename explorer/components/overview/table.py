"""Plans as a table: a row each, and in a sentence why the chosen one is as fast as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import streamlit as st

from explorer.address import settings, setups
from explorer.analysis import step_parts
from explorer.analysis.shortlist import ListedPlan, add_chosen, choose_opponent, shortlist
from explorer.components import frame
from explorer.jobs.result_cache import ResultCache
from explorer.session import current_setup, shared_plans, state
from explorer.text import glossary, recipe, units, words
from explorer.text.option_words import page_wording
from planner_core.core import NoteKind, Plan
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import Request, Result
from planner_core.planning.analysis import list_notes
from planner_core.planning.methods import EXACT
from planner_core.planning.planner import STATED_METHOD
from planner_core.planning.pricing import ReservedMemory, Speed, count_model_flops, measure_speed, predict_reserved

MAX_BAR_RATIO = 3.0
"""A bar this many times as long as the shortest fills its place; longer ones are cut there, and drawn as cut."""

Parts = Mapping[str, float]
"""Seconds of a step by what they go to."""


# Not Streamlit's caches: they hash a request field by field, 3 ms for each of the nineteen of a visit. It has a hash of its own.
_PARTS_OF_STEP: ResultCache[shared_plans.PlanKey, dict[str, float]] = ResultCache(256)
_FLOPS: ResultCache[Request, int] = ResultCache(64)


def step_parts_of(plan_id: str, plan: Plan, result: Result) -> dict[str, float]:
    """Return the seconds of a plan's step by what they go to."""
    home = current_setup.result_of(plan_id, result)
    key = shared_plans.plan_key(home.request, plan_id, plan)
    return _PARTS_OF_STEP.get(key, lambda: step_parts.split_step(plan, home.graph, home.coarse))


def speed_of(plan: Plan, home: Result) -> Speed:
    """Return how fast a plan of the result `home` trains, with the range of its step."""
    flops = _FLOPS.get(home.request, partial(count_model_flops, home.graph))
    return measure_speed(plan, flops, home.cluster)


def list_plans(result: Result, plans: Mapping[str, Plan], chosen: str) -> list[ListedPlan]:
    """Return the rows of the first page: a few plans of the settings, and the chosen one, which alone may be a pin or a method's plan."""
    # Not by their names: the plan of a method is the best one of its own answer, and has that name.
    of_result = {id(p) for p in result.plans}
    own = {n: p for n, p in plans.items() if id(p) in of_result or p.method == STATED_METHOD}
    tool = state.value("tool") if state.value("method") == EXACT.name else ""
    return add_chosen(shortlist(own, result.choice, settings.TOOLS[tool] if tool else ""), plans, chosen)


def show_table(result: Result, plans: Mapping[str, Plan], listed: Sequence[ListedPlan], chosen: str) -> None:
    """Draw the table, its legend, what its words mean, and the sentence about the chosen plan."""
    names = recipe.distinct_names({one.name: plans[one.name] for one in listed})
    parts = draw_plans(result, plans, listed, names, chosen, links=True)
    if chosen in parts and any(plan.fits for plan in plans.values()):  # else the remedies below say what is missing
        st.markdown(frame.escape(explain_choice(plans, listed, names, chosen, parts)))


def draw_plans(
    result: Result,
    plans: Mapping[str, Plan],
    listed: Sequence[ListedPlan],
    names: Mapping[str, str],
    chosen: str,
    *,
    links: bool = False,
) -> Mapping[str, Parts]:
    """Draw a row for each listed plan, which a click chooses, and the legend; return the parts of each step.

    `links`: whether the legend opens what the words of the names mean, with their lessons.
    """
    homes = {one.name: current_setup.result_of(one.name, result) for one in listed}
    parts = {one.name: step_parts_of(one.name, plans[one.name], result) for one in listed}
    steps = [sum(of_plan.values()) for of_plan in parts.values()]
    # One slow plan must not make all other bars specks.
    longest = min(max(steps), MAX_BAR_RATIO * min(steps))
    rows = []
    for one in listed:
        plan, home = plans[one.name], homes[one.name]
        cells = [_step_cell(plan, speed_of(plan, home), parts[one.name], longest), _traffic_cell(plan, parts[one.name])]
        cells.append(_memory_cell(plan, home))
        what = "; ".join(filter(None, (one.what, recipe.describe_extra_work(plan, names[one.name]))))
        rows.append({"id": one.name, "name": names[one.name], "what": what, "fits": plan.fits, "cells": cells})

    def choose(plan_id: str) -> None:
        if plan_id in plans:
            state.change(plan=plan_id)

    head = ["plan", _name_column(rows, 0, "step"), _name_column(rows, 1, "communication", "exposed")]
    capacities = {units.significant(home.cluster.gpu.memory_bytes / units.GIB) for home in homes.values()}
    limit = f" of {capacities.pop()}" if len(capacities) == 1 else ""
    head.append(_name_column(rows, 2, f"memory; reserved{limit}"))
    labels = ["step", "sent, exposed", "memory, reserved"]
    terms = glossary.ROW_WORDS
    for note in list_notes(result):
        if note.kind is NoteKind.KERNELS:
            terms = {**terms, "Megatron-LM": page_wording(note)}
    frame.choose_row("plans_table", "Plans", head, rows, choose, chosen=chosen, terms=terms, labels=labels)
    _show_legend(parts, names.values() if links else ())
    return parts


def _name_column(rows: Sequence[dict[str, Any]], column: int, figure: str, below: str = "") -> str:
    """Return the head of a column: what its figures are, and what stands below them, each with the unit that all share. The texts of the
    cells then leave it out, and have it beside them."""
    titles = []
    for key, unit_key, title in (("figure", "unit", figure), ("below", "belowUnit", below)):
        if title:
            cells = [row["cells"][column] for row in rows]
            texts, unit = units.share_unit([cell[key] for cell in cells])
            for cell, text in zip(cells, texts, strict=True):
                cell |= {key: text, unit_key: unit}
            titles.append(f"{title}, {unit}" if unit else title)
    return "; ".join(titles)


def _show_legend(parts: Mapping[str, Parts], names: Iterable[str]) -> None:
    """Draw the legend of the bars, and behind a button what each word in `names` means, with a link to its lesson."""
    legend = [p for p in step_parts.ALL_PARTS if any(of_plan[p] for of_plan in parts.values())]
    keys = "".join(
        f"<span title='{step_parts.MEANINGS[p]}'><i class='{frame.part_class(p)}'></i>{p}</span>" for p in legend
    )
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="meanings"):
        st.html(f"<p class='bar-keys'>{keys}</p>", width="content")
        if terms := glossary.layout_terms(names):
            with st.popover("Terms", type="tertiary", key="layout_terms"), st.container(key="term_list"):
                for word in terms:
                    meaning, lesson = glossary.LAYOUT_TERMS[word]
                    query = {**settings.to_query(state.values()), "lesson": lesson}
                    st.page_link("explorer/pages/learn.py", label=word, query_params=query)
                    st.caption(meaning)


def _step_cell(plan: Plan, speed: Speed, parts: Parts, longest: float) -> dict[str, Any]:
    pieces, is_cut = scale_bar(parts, longest)
    figure = units.seconds(speed.step_time_s)
    # the range has the unit of the figure above it
    between = units.span(*speed.between(units.seconds)).removesuffix(f" {figure.rpartition(' ')[2]}")
    return {
        "figure": figure,
        "below": between if plan.fits else "",
        "order": speed.step_time_s,
        "bar": pieces,
        "cut": is_cut,
    }


def _traffic_cell(plan: Plan, parts: Parts) -> dict[str, Any]:
    exposed = units.seconds(parts[step_parts.WAITS] + parts[step_parts.WEIGHTS])
    sent = sent_per_gpu(plan)
    return {
        "figure": units.traffic(sent),
        "below": exposed,
        "order": sent,
    }


def _memory_cell(plan: Plan, home: Result) -> dict[str, Any]:
    peak, capacity = plan.cost.memory_bytes["peak"], home.cluster.gpu.memory_bytes
    limit = step_parts.memory_limit_bytes(home)
    reserved = predict_reserved(plan, home.cluster, home.request.memory_gb)
    fullest = f"Rank {plan.fullest_rank} of the pipeline is the fullest. " if plan.pipeline else ""
    likely = max(peak / capacity, min(1.0, reserved.high_bytes / capacity)) if plan.fits else 1.0
    return {
        "figure": units.memory(peak),
        "below": reserved_range(plan, reserved),
        "hover": f"{fullest}The tensors of a plan may take {units.memory(limit)}, {units.percent(limit / capacity)} of the GPU. "
        f"{describe_reserved(plan.fits and reserved.short, capacity)}{describe_mark(reserved) if plan.fits else ''}",
        "order": peak,
        "memory": [min(1.0, peak / capacity), likely, not plan.fits or reserved.short],
    }


def reserved_range(plan: Plan, reserved: ReservedMemory, unit: str = "") -> str:
    """Write what the allocator reserves under a plan, in GiB: `58.1–66.4`, `74.1–79.6, tight`, `13.7–21.5, above` or `short`; empty if it
    does not fit.

    `unit`: what stands behind the range, where no head says it.
    """
    if not plan.fits:
        return ""
    peak = plan.cost.memory_bytes["peak"]
    # The allocator never reserves less than the tensors take.
    low, high = (units.significant(max(peak, n) / units.GIB) for n in (reserved.low_bytes, reserved.high_bytes))
    mark = ", tight" if reserved.tight else ", above" if reserved.above_stated else ""
    return "short" if reserved.short else f"{units.span(low, high)}{unit}{mark}"


def describe_reserved(short: bool, capacity: float) -> str:
    """Say what the words below a plan's memory mean; `short`: its tensors fit, and the blocks that the allocator keeps do not."""
    if short:
        return (
            f"Short: PyTorch’s allocator, which keeps freed blocks too, would reserve more than the GPU’s {units.memory(capacity)}: it "
            "must free blocks and allocate them anew, which takes time that is not in the step."
        )
    return f"PyTorch’s allocator reserves this range for them in nine in ten published runs; it may take {units.memory(capacity)}."


def describe_mark(reserved: ReservedMemory) -> str:
    """Say what the word behind a range means: `tight`, the GPU may not have so much free, or `above`, it is more than was stated; else
    empty."""
    if reserved.short:
        return ""
    if reserved.tight:
        return " Tight: with CUDA’s context and NCCL’s buffers this may be more than the GPU has."
    return " Above: the allocator knows of no stated memory, and may reserve more than that." * reserved.above_stated


def scale_bar(parts: Parts, longest: float) -> tuple[list[list[Any]], bool]:
    """Return the parts of a step as [part, share of the place of `longest` seconds, words], and whether the bar is cut there.

    All bars of a table have this scale: parts beyond the place are left out.
    """
    pieces: list[list[Any]] = []
    room = longest
    for part in step_parts.ALL_PARTS:
        if parts[part] and room > 0:
            pieces.append([part, min(parts[part], room) / longest, f"{part}: {units.seconds(parts[part])}"])
            room -= parts[part]
    # A bar of just this length is not cut, though its parts summed in another order differ in the last digit.
    return pieces, sum(parts.values()) > longest * (1 + 1e-9)


def explain_choice(
    plans: Mapping[str, Plan],
    listed: Sequence[ListedPlan],
    names: Mapping[str, str],
    chosen: str,
    parts: Mapping[str, Parts],
) -> str:
    """Explain why the chosen plan takes more or less time than the one that it is measured against."""
    plan, name = plans[chosen], names[chosen]
    if not plan.fits:
        return f"{name} does not fit: a GPU would need {units.memory(plan.cost.memory_bytes['peak'])}."
    other = choose_opponent(plans, listed, chosen)
    if other is None:
        return f"{name} is the only plan here that fits."
    against = "our current setup" if other == setups.PLAN_ID else names[other]
    if not plans[other].fits:
        against += ", which does not fit"
    rounded = step_parts.round_steps({n: parts[n] for n in (chosen, other)}, chosen)
    causes = step_parts.explain_difference(rounded, chosen, other)
    if not causes:
        return f"{name} takes as long as {against}, and {words.compare_sizes(plan, plans[other])}."
    gap = sum(rounded.subtract(chosen, other).values())
    # Not of the rounded steps: the row of the best plan says the same share, of 43.2 ms in 515.2 and not of 43 in 515.
    own_s, other_s = (sum(parts[n].values()) for n in (chosen, other))
    share = units.percent(abs(own_s / other_s - 1))
    time = f"{share} {'less' if gap > 0 else 'more'} than" if gap else "as long as"
    # What cannot run is no tie of a plan, however long its step would be.
    tie = ", within the doubt" if plans[other].fits and words.is_tie(plan, plans[other]) else ""
    last_figure, _, unit = causes.rpartition(" ")  # which no line begins with
    return f"{name} takes {time} {against}{tie}: {last_figure}\N{NO-BREAK SPACE}{unit}."
