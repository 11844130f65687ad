"""The parts of the first page: the recommendation, its figures, why it wins, and how sure that is."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer.address.settings import TOOLS
from explorer.analysis import answer
from explorer.components import frame
from explorer.components.answers import money
from explorer.components.asking.sentence import cluster_words_of, model_name
from explorer.session import state
from explorer.text import recipe, units, words
from planner_core.core import Graph, Plan
from planner_core.cost import simulated
from planner_core.planning import TIE, Request, Result, leads
from planner_core.planning.analysis import Choice
from planner_core.planning.methods import BASELINES
from planner_core.planning.pricing import Speed, model_flops, reserved_of, speed_of

PURPOSE, RECIPE, CARD = 26, 68, 50
"""Pixels that these parts take in a wide window. Markup comes a moment after the boxes that it stands in, and with it the style sheet,
which gives them the height that they need: with their room kept, what stands below does not jump."""
COMPARE, PLANS, EXPORT = (f"explorer/pages/{name}.py" for name in ("compare", "plans", "export"))
RESERVED = (
    "Tensors at the fullest moment, of what a plan may take; and what PyTorch’s allocator will then have reserved"
)
PREDICTED = "**Predicted, not measured.**"


def purpose() -> None:
    """A line above the sentence that says what the page is."""
    with st.container(key="room_purpose", height=PURPOSE, border=False):
        st.html(
            "<p class='purpose'><b>Shardscope</b> finds how to train a model on many GPUs: how to split it, how long a step then "
            "takes, and what it costs. Change any underlined part:</p>"
        )


@st.cache_resource(max_entries=64, show_spinner=False)
def _flops(request: Request) -> int:
    return model_flops(state.plan(request).graph)


@st.cache_resource(max_entries=64, show_spinner=False)
def _simulated_s(request: Request, plan_id: str, edit: tuple[str, ...], _plan: Plan, _graph: Graph) -> float:
    return simulated(_plan, _graph)


def in_order(plan_id: str, plan: Plan, result: Result) -> str:
    """The step simulated in the order in which a run issues its work, beside the plan's own: `544 ms (+0.3 %)`."""
    return words.simulated(plan, _simulated_s(result.request, plan_id, state.edit_of(plan_id), plan, result.graph))


def speed(plan: Plan, result: Result) -> Speed:
    """Tokens per second, utilisation and band of a plan of these settings."""
    return speed_of(plan, _flops(result.request), result.cluster)


# --- the recommendation ------------------------------------------------------------------------------


def recommendation(plans: Mapping[str, Plan], run: str, fastest: str) -> None:
    """The plan to run, in one line, and the way to run it."""
    v, plan = state.values(), plans[run]
    with st.container(key="recommendation", height=RECIPE, border=False):
        left, right = st.columns([6, 1], vertical_alignment="bottom")
    with left:
        proven = "The fastest plan" if run == fastest else "The simplest of the fastest plans"
        if plan.objective != "time":
            proven = "The plan of least communication"
        proven += f" that {TOOLS[v['tool']]} runs," if v["tool"] else ""
        st.html(
            f"<p class='kicker'>{proven} for {html.escape(model_name(v['model']))} on {html.escape(cluster_words_of(v))}</p>"
            f"<h2 class='recipe'>{_unbroken(html.escape(_sentence_case(recipe.recipe(plan))))}</h2>"
        )
    with right:
        turn("Export", EXPORT, "answer_export", kind="primary", icon=":material/download:", plan=address(plans, run))


def address(plans: Mapping[str, Plan], run: str) -> str:
    """The plan to run as the address of a page has it; the first plan is not named there."""
    return "" if run == next(iter(plans)) else run


def _unbroken(markup: str) -> str:
    """No line ends inside a number of micro-batches."""
    return re.sub(r"\d+ micro-batch(es)?", r"<span class='together'>\g<0></span>", markup)


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def turn(
    label: str,
    page: str,
    key: str,
    *,
    kind: str = "tertiary",
    icon: str | None = None,
    opened: str = "",
    **changes: object,
) -> None:
    """A button to another page, with settings that it takes along and the part of it that is opened there."""

    def go() -> None:
        state.change(**changes)
        if opened:
            st.session_state[f"opened_{opened}"] = True
        st.session_state["turn_to"] = page

    st.button(label, key=key, type=kind, icon=icon, on_click=go)  # type: ignore[arg-type]


# --- figures -----------------------------------------------------------------------------------------


def figures(result: Result, plans: Mapping[str, Plan], run: str) -> None:
    """Time, speed, utilisation, memory and money, each with a way to what explains it."""
    plan, rival = plans[run], answer.strongest(plans, run)
    s, at = speed(plan, result), address(plans, run)
    both: dict[str, Any] = {"compare": (run, rival)} if rival else {}
    with st.container(key="figures"):
        one, two, three, four, five = st.columns(5, gap="small", border=True)
    with one:
        _card("One training step", units.seconds(s.step_time_s), f"nine in ten runs: {_range(s)}")
        turn("Where the time goes", COMPARE, "answer_step", plan=at, **both)
    with two:
        total = s.tokens_per_s_per_gpu * result.cluster.num_gpus
        _card("Tokens per second", units.count(total), f"{units.significant(s.tokens_per_s_per_gpu)} on each GPU")
        turn("All plans by speed", PLANS, "answer_speed", plan=at)
    with three:
        _card(
            "Utilisation", units.percent(s.mfu), f"of the GPUs’ peak; {_percents(s)}", "Model FLOPs utilisation (MFU)"
        )
        turn("Operation by operation", PLANS, "answer_mfu", opened="step", plan=at)
    with four:
        peak, limit = plan.cost.memory_bytes["peak"], answer.limit_bytes(result)
        told = f"of {units.memory(limit)}{_reserved(plan, result)}"
        _card("Memory per GPU", units.memory(peak), told, RESERVED, bar=peak / limit)
        turn("What fills it", PLANS, "answer_memory", opened="memory", plan=at)
    with five:
        _money(result, s)


def _reserved(plan: Plan, result: Result) -> str:
    """What a tool that asks the allocator will show, where that is less than all of the GPU."""
    found = reserved_of(plan, result.cluster)
    return f"; reserved: {units.memory(found.likely_bytes)}" if plan.fits and not found.short else ""


def _range(s: Speed) -> str:
    return f"{units.seconds(s.low_s)} to {units.seconds(s.high_s)}"


def _percents(s: Speed) -> str:
    low, high = s.mfu * s.step_time_s / s.high_s, s.mfu * s.step_time_s / s.low_s
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def _card(name: str, value: str, aside: str, title: str = "", bar: float | None = None) -> None:
    """A figure with its name above and what bounds it below."""
    filled = "" if bar is None else f"<i class='filled'><i style='width:{min(1.0, bar):.1%}'></i></i>"
    with st.container(height=CARD, border=False):
        st.html(
            f"<div class='figure' title='{html.escape(title)}'><span>{html.escape(name)}</span><b>{html.escape(value)}</b>"
            f"{filled}<small>{html.escape(aside)}</small></div>"
        )


def _money(result: Result, s: Speed) -> None:
    """Days and money for all tokens, and the control that sets them."""
    asked = money.budget()
    if asked is None:
        _card("Days and money", "–", "say how many tokens to train on")
    else:
        run = asked.to_json(s, result.cluster.num_gpus)
        days, cost = run["days"], run["cost"]
        assert days is not None
        low, high = days * s.low_s / s.step_time_s, days * s.high_s / s.step_time_s
        told = f"{units.significant(low)} to {units.significant(high)} days for {units.count(asked.tokens)} tokens"
        _card(
            "Days and money",
            f"{units.significant(days)} days",
            told if cost is None else f"costs {units.count(cost)}; {told}",
        )
    money.control()


# --- how sure ----------------------------------------------------------------------------------------


def sure(result: Result, plans: Mapping[str, Plan], run: str, found: Choice) -> None:
    """Proof, band and ties."""
    plan, fastest = plans[run], next(p for p in plans.values() if p.name == found.fastest)
    s = speed(plan, result)
    st.markdown("**How sure**")
    lines = [
        _proof(plan, result.request.tool) if leads(plan) else _proof(fastest, result.request.tool, run=plan),
        _band(s),
        f"**Simulated** in the order in which a run issues its work: {in_order(run, plan, result)}.",
    ]
    if found.ties:
        lines.append(f"**Ties.** {frame.text(_ties(found, plans))}")
    lines.append(f"**In full.** {frame.text(words.describe(plan))}.")
    for line in lines:
        st.markdown(line.replace(" %", "\u00a0%"))
        if line.startswith(PREDICTED):
            frame.how_sure("The runs behind it", of_kind=(frame.slug(s.band.kind),))
    for note in dict.fromkeys((*result.notes, *result.graph.assumptions)):
        st.caption(f"Note: {frame.text(state.in_words(note))}")


def _ties(found: Choice, plans: Mapping[str, Plan]) -> str:
    """The plans that the prediction's doubt does not tell apart, and why one of them is to be run."""
    title = {p.name: words.title(p) for p in plans.values()}
    fastest = title[found.fastest]
    names = {t.name: f"{title[t.name]} (+{100 * t.slower:.1f} %)" for t in found.ties}
    told = f"As far as the prediction can tell, as fast as the {fastest[:1].lower()}{fastest[1:]}: {', '.join(names.values())}."
    simple = next((t for t in found.ties if t.name == found.recommended), None)
    if simple is None:
        plain = next(p for p in plans.values() if p.name == found.fastest).method in BASELINES
        return f"{told} {'This plan is the simplest of them.' if plain else 'Choose by memory.'}"
    if found.one_axis:
        return f"{told} {title[simple.name]} needs one mesh axis, and is not slower by the simulation."
    gain = f"{100 * simple.slower:.1f}"
    more = "" if gain == "0.0" else f" The {fastest[:1].lower()}{fastest[1:]} may gain {gain} %."
    return f"{told} {title[simple.name]} is the simplest: stock tools run its layout.{more}"


def _proof(best: Plan, tool: str | None, run: Plan | None = None) -> str:
    """What is proven of the best plan; where another is to be `run`, also how far that one is from it."""
    space = "" if best.method == "exact" else f" in the space that {words.title(best).removesuffix('’s plan')} searches"
    space += f" that {TOOLS[tool]} can be told and" if tool else ""
    least = "takes less time" if best.objective == "time" else "communicates less"
    if best.optimal and run is not None and run.name != best.name:
        share = units.percent(run.cost.step_time_s / best.cost.step_time_s - 1)
        return (
            f"**Proven to within {share}.** The {words.title(best).lower()} takes that much less time. No plan{space} that fits takes "
            "less than that one, under the costs as stated."
        )
    if best.optimal:
        return f"**Proven.** No plan{space} that fits {least}, under the costs as stated."
    if leads(best):
        return f"**A tie.** {frame.text(_sentence_case(best.notes[0].removeprefix(TIE)))}."
    return f"**Not proven.** {frame.text(_sentence_case('; '.join(best.notes) or 'best found'))}."


def _band(s: Speed) -> str:
    if s.band.host_s:
        return (
            f"{PREDICTED} A step may take between {units.seconds(s.low_s)} and {units.seconds(s.high_s)}: the GPU has so little to do in "
            "each operator that the host, which launches them, may set the pace. At the upper end each call of an operator takes the "
            "least time that an eager published run took. Larger micro-batches or torch.compile help."
        )
    share = f"between {100 * (1 - s.low_s / s.step_time_s):.0f} % faster and {100 * (s.high_s / s.step_time_s - 1):.0f} % slower"
    gpu = "" if s.band.measured_gpu else ", and none of them on this GPU, so the range is wide"
    return (
        f"{PREDICTED} By {s.band.runs} published runs ({frame.text(s.band.kind)}{gpu}), nine in ten steps lie "
        f"{share} than predicted."
    )
