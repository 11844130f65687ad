"""Why the recommended plan wins: against what is run now, against the strongest usual layout, and the parts of every step."""

from __future__ import annotations

import html
from collections.abc import Mapping

import streamlit as st

from explorer.address import setups
from explorer.analysis import answer
from explorer.components import frame
from explorer.components.answers.answer import COMPARE, turn
from explorer.session import state, stated
from explorer.text import recipe, units, words
from planner_core.core import Plan
from planner_core.planning import Request, Result, leads
from planner_core.planning.methods import BASELINES

PART_WORDS = {
    answer.COMPUTE: "The GPU computes",
    answer.AGAIN: "The GPU computes again, in backward, what it did not keep",
    answer.WAITS: "The next operation needs data of other GPUs",
    answer.WEIGHTS: "Weights and gradients on their way slow the GPU down or hold it up",
    answer.OPTIMIZER: "Gradients are clipped and weights updated; with what every step takes",
}
NO_DIFFERENCE = 0.0005
"""A share of the step that is not told as a percentage: it would read 0 %."""
SHOWN = 3
"""Plans that stand beside the one to run."""


def why(result: Result, plans: Mapping[str, Plan], run: str, fastest: str) -> None:
    """What is run now, the strongest rival, the fastest plan where a simpler one is to be `run`, the cause of each difference, and the
    parts of every step."""
    with_own = stated.beside(plans, result)
    others = answer.rivals(with_own, run)
    rival = answer.strongest(plans, run)
    names = list(dict.fromkeys((run, fastest, *others)))[: 1 + SHOWN]
    found = answer.shown({n: _parts_of(n, result) for n in names}, run)
    st.markdown("**Why this one**")
    if setups.NAME in with_own:
        st.markdown(frame.text(against_own(found, with_own, run)))
    st.markdown(frame.text(reason(found, plans, run, rival)))
    if fastest != run:
        st.markdown(frame.text(against_fastest(found, plans, run, fastest)))
    st.html(steps(found, with_own, names, setups.NAME if setups.NAME in others else rival, {run: "This plan"}))
    with st.container(horizontal=True):
        turn("Compare them in full", COMPARE, "answer_compare", compare=tuple(names))


@st.cache_resource(max_entries=256, show_spinner=False)
def _parts(request: Request, name: str) -> dict[str, float]:
    found = state.plan(request)
    return answer.step_parts(state.plan_ids(found.plans)[name], found.graph, found.coarse)


def _parts_of(name: str, result: Result) -> dict[str, float]:
    """The parts of a plan's step; what is run now stands on a graph of its own."""
    if name != setups.NAME:
        return _parts(result.request, name)
    home = stated.home(name, result)
    return answer.step_parts(home.best, home.graph, home.coarse)


def against_own(found: answer.Shown, plans: Mapping[str, Plan], best: str) -> str:
    """A sentence: the step against that of what is run now."""
    mine, theirs = plans[best], plans[setups.NAME]
    own = f"Your current setup ({recipe.recipe(theirs)})"
    if not theirs.fits:
        return f"{own} does not fit: it needs {units.memory(theirs.cost.memory_bytes['peak'])} on each GPU."
    difference = found.total(setups.NAME) - found.total(best)
    times = f"{found.text(found.total(setups.NAME))}, this plan {found.text(found.total(best))}"
    if abs(difference) < NO_DIFFERENCE * found.total(setups.NAME):
        return f"{own} is as fast: it takes {times}."
    ratio = units.percent(abs(theirs.cost.step_time_s - mine.cost.step_time_s) / theirs.cost.step_time_s)
    unsure = " By the prediction alone that is a tie." if words.tied(mine, theirs) else ""
    return (
        f"{own} takes {times}, {ratio} {'less' if difference > 0 else 'more'}: it "
        f"{answer.causes(found, best, setups.NAME)}.{unsure}"
    )


def against_fastest(found: answer.Shown, plans: Mapping[str, Plan], run: str, fastest: str) -> str:
    """A sentence: what the fastest plan would gain on one that is simpler."""
    gain = found.total(run) - found.total(fastest)
    name = f"The {words.title(plans[fastest]).lower()} ({recipe.layout(plans[fastest])})"
    simple = "needs one mesh axis" if leads(plans[run]) else "has a layout that stock tools run"
    if gain == 0:
        return f"{name} takes as long, and this one {simple}."
    return (
        f"{name} is faster by {found.text(gain)}: it {answer.causes(found, fastest, run)}. That is less than the prediction’s doubt, "
        f"and this one {simple}."
    )


def reason(found: answer.Shown, plans: Mapping[str, Plan], best: str, rival: str | None) -> str:
    """One or two sentences: the time against the strongest rival's, and what it comes from."""
    if rival is None:
        return _no_rival(plans, best)
    mine, theirs = plans[best], plans[rival]
    name = words.inside(theirs)
    usual = f"the fastest {'other ' if mine.method in BASELINES else ''}usual layout that fits"
    difference = found.total(rival) - found.total(best)
    if mine.blocks == theirs.blocks and mine.mesh == theirs.mesh:
        return f"It is {name}’s own layout: no other is faster here."
    if difference == 0:
        return f"It takes as long as {name}, {usual}, and {words.sizes(mine, theirs)}."
    ratio = abs(theirs.cost.step_time_s - mine.cost.step_time_s) / theirs.cost.step_time_s
    told = f"{units.percent(ratio)} {'less' if difference > 0 else 'more'} time than"
    if difference < 0 and ratio >= 1:
        told = f"{units.significant(1 + ratio)} times as long as"
    if ratio < NO_DIFFERENCE:
        told = "about as long as"
    tie = " That is a tie." if words.tied(mine, theirs) else ""
    return (
        f"It takes {told} {name}, {usual} ({found.text(found.total(best))} against "
        f"{found.text(found.total(rival))}): it {answer.causes(found, best, rival)}.{tie} It {words.sizes(mine, theirs)}."
    )


def _no_rival(plans: Mapping[str, Plan], best: str) -> str:
    """Why no usual layout stands beside the plan: some do not fit, some cannot run this work on these GPUs."""
    there = [words.inside(plans[n]) for n in answer.rivals(plans, best) if plans[n].method != answer.OWN]
    if not there:
        return (
            "No usual layout runs this work on these GPUs: neither data parallel, FSDP nor Megatron-LM. This plan does."
        )
    names = words.join(there)
    many = f"neither {' nor '.join(names.rsplit(' and ', 1))} does" if len(there) > 1 else f"{names} does not"
    return f"No usual layout fits the memory here: {many}. This plan does."


def steps(
    found: answer.Shown, plans: Mapping[str, Plan], names: list[str], rival: str | None, called: Mapping[str, str]
) -> str:
    """Every step as a bar and in numbers, under the plans' titles or as `called`; below them how the rival's differs from the first
    one's, part by part."""
    parts = [p for p in answer.PARTS if any(found.parts[n][p] for n in names)]
    longest = max(found.total(n) for n in names)
    head = "".join(
        f"<th scope='col' title='{PART_WORDS[p]}'><i class='key p{answer.PARTS.index(p)}'></i>{p}</th>" for p in parts
    )
    rows = [_step_row(found, plans[n], n, parts, longest, called.get(n)) for n in names]
    if rival is not None:
        first = called[names[0]].lower() if names[0] in called else words.title(plans[names[0]])
        title = html.escape(f"{words.title(plans[rival])} against {first}")
        differences = [found.parts[rival][p] - found.parts[names[0]][p] for p in parts]
        told = "".join(
            f"<td>{found.text(d, sign=True)}</td>" for d in (*differences, found.total(rival) - found.total(names[0]))
        )
        rows.append(f"<tr class='difference'><th scope='row' colspan='2'>{title}</th>{told}<td></td></tr>")
    return (
        "<table class='steps' aria-label='The step of each plan by what its time goes to'><thead><tr><th scope='col'>plan</th>"
        f"<th scope='col' class='wide'>step</th>{head}<th scope='col'>step</th><th scope='col'>memory</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _step_row(found: answer.Shown, plan: Plan, name: str, parts: list[str], longest: int, called: str | None) -> str:
    title = html.escape(called or words.title(plan))
    bars = "".join(
        f"<i class='p{answer.PARTS.index(p)}' style='width:{found.parts[name][p] / longest:.2%}' "
        f"title='{p}: {found.text(found.parts[name][p])}'></i>"
        for p in parts
    )
    cells = "".join(f"<td>{found.text(found.parts[name][p])}</td>" for p in parts)
    held = units.memory(plan.cost.memory_bytes["peak"]) + ("" if plan.fits else "<small>does not fit</small>")
    kind = "" if plan.fits else "unfit"
    aside = "" if called else f"<small>{html.escape(recipe.layout(plan))}</small>"
    return (
        f"<tr class='{kind}'><th scope='row'>{title}{aside}</th><td class='wide'><span class='bar'>{bars}</span></td>{cells}"
        f"<td><b>{found.text(found.total(name))}</b></td><td>{held}</td></tr>"
    )
