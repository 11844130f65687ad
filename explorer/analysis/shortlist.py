"""The few plans that the first page shows, and what each of them is. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from explorer.text import recipe, units, words
from planner_core.core import Plan, PlanRole
from planner_core.cost.communication import sent_per_gpu
from planner_core.planning import Choice, runs_on_stock_tools
from planner_core.planning.methods import BASELINES, EXACT, OF_MEGATRON
from planner_core.planning.planner import STATED_METHOD

MAX_LISTED = 5
MAX_EQUAL_DIFFERENCE = 0.02
"""Steps, and memory, that differ by less than this share are nearly the same."""
MIN_GAIN = 0.001
"""The best plan is not listed beside the recommended one if it gains a smaller share by a layout of the same name."""
MIN_SAVING = 0.05
"""A trade-off that saves a smaller share of memory is not listed."""


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """A plan by its id in the address, and what it is in a few words."""

    name: str
    what: str


def shortlist(plans: Mapping[str, Plan], choice: Choice, tool: str) -> list[ListedPlan]:
    """Choose at most five plans: recommended, fastest, run now, Megatron-LM's tensor parallelism, FSDP, then trade-offs.

    A plan that is nearly equal to a listed one is left out, unless the visitor asked for it.
    """
    # The order of `descriptions` is that of the rows, and decides which of two nearly equal plans is listed: the first.
    names = {p.name: n for n, p in plans.items()}
    roles = {p.role: n for n, p in plans.items()}
    recommended, fastest, staged = names[choice.recommended], names[choice.fastest], roles.get(PlanRole.STAGES)
    if not choice.fits:
        # Rows of other tools may need less, and fit.
        among = f" of those for {tool}" if tool and any(p.fits for p in plans.values()) else ""
        smaller = roles.get(PlanRole.SMALLEST_STAGES)
        kind = " of one stage" if smaller else ""
        descriptions = {recommended: f"needs the least memory{among or kind}"}
        descriptions |= {smaller: "pipeline stages need less"} if smaller else {}
    elif tool:
        descriptions = {recommended: f"recommended: {tool} runs it"}
    else:
        is_stock = runs_on_stock_tools(plans[recommended])
        descriptions = {recommended: f"recommended{': stock tools run it' * is_stock}"}
    of_one_stage = roles.get(PlanRole.FASTEST, next(iter(plans)))
    with_gap = {fastest if staged is None else of_one_stage}
    best, best_of_one = (
        f"the best plan{kind}, {recipe.describe_gap(plans[n])}" if plans[n].fits else f"the smallest plan{kind}"
        for n, kind in ((fastest, ""), (of_one_stage, " of one stage"))
    )
    if staged is not None:
        gain_words = _describe_stages(plans[staged], plans[of_one_stage])
        descriptions[staged] = f"recommended: {gain_words}" if choice.fits and recommended == staged else gain_words
        descriptions.setdefault(of_one_stage, best_of_one)
    elif choice.aim is not None:
        descriptions[recommended] = f"as asked: {choice.aim}"
        descriptions.setdefault(fastest, "the fastest of these plans")
        with_gap = set()
    elif fastest != recommended:
        gain = plans[recommended].cost.step_time_s / plans[fastest].cost.step_time_s - 1
        if gain >= MIN_GAIN or recipe.layout_name(plans[recommended]) != recipe.layout_name(plans[fastest]):
            descriptions[fastest] = best
        else:
            descriptions[recommended] += f"; as fast as {best}"
            with_gap = {recommended}
    elif choice.fits:
        descriptions[recommended] += f"; {best}"
    _add_usual_layouts(plans, descriptions)
    others = [n for n, p in plans.items() if p.method == "exact" and p.fits and n not in (*descriptions, fastest)]
    descriptions |= dict.fromkeys(_order_trade_offs(plans, others, [*descriptions], plans[fastest]), "trade-off")
    _add_proofs(plans, descriptions, with_gap, recommended)
    return _list_described(plans, descriptions, (recommended, fastest, staged))


def _add_usual_layouts(plans: Mapping[str, Plan], descriptions: dict[str, str]) -> None:
    """Add what is run now, Megatron-LM's tensor parallelism, FSDP and data parallelism."""
    descriptions.update({n: "our current setup" for n, p in plans.items() if p.method == STATED_METHOD})
    megatron = [n for n, p in plans.items() if p.method in OF_MEGATRON]
    if megatron:
        descriptions.setdefault(
            # With or without sequence parallelism, the better of the two: a reader knows both by this name.
            min(megatron, key=lambda n: (not plans[n].fits, plans[n].cost.step_time_s)),
            "Megatron-LM",
        )
    descriptions.update(
        {
            n: BASELINES[p.method].title
            for n, p in plans.items()
            if p.method in ("fsdp", "data-parallel") and n not in descriptions
        }
    )


def _add_proofs(
    plans: Mapping[str, Plan], descriptions: dict[str, str], with_gap: Collection[str], recommended: str
) -> None:
    """Add to the descriptions, but those `with_gap`, that a plan is proven the best of its kind."""
    for name in descriptions.keys() - with_gap:
        plan = plans[name]
        if recipe.has_proven_step(plan):
            # What is proven is not that a plan is the one to take: its kind is named.
            is_kind_open = name == recommended and plan.method in BASELINES
            descriptions[name] += f"; {BASELINES[plan.method].title}, proven" if is_kind_open else ", proven"


def _order_trade_offs(
    plans: Mapping[str, Plan], names: Sequence[str], listed: Sequence[str], fastest: Plan
) -> list[str]:
    """Return the trade-offs that save so much memory that a reader would trade for it, those first that need less than all listed plans."""
    by_time = sorted(names, key=lambda n: plans[n].cost.step_time_s)
    peaks = {n: p.cost.memory_bytes["peak"] for n, p in plans.items() if p.fits}
    least = min((peaks[n] for n in listed if n in peaks), default=math.inf)
    smallest = []
    for name in by_time:
        if peaks[name] <= (1 - MIN_SAVING) * least:
            smallest.append(name)
            least = peaks[name]
    enough = (1 - MIN_SAVING) * fastest.cost.memory_bytes["peak"]
    return list(dict.fromkeys((*smallest, *(n for n in by_time if peaks[n] <= enough))))


def _list_described(
    plans: Mapping[str, Plan], descriptions: Mapping[str, str], always: Sequence[str | None]
) -> list[ListedPlan]:
    """List at most five; what is run now is named in the row of an equal plan, a baseline in that of a nearly equal one."""
    listed: dict[str, str] = {}
    for name, what in descriptions.items():
        # What a visitor runs now is only left out where it is the same plan: nearly the same is not what they run.
        twin = next((k for k in listed if nearly_equal(plans[name], plans[k])), None)
        is_stated = plans[name].method == STATED_METHOD
        if twin and name not in always and (not is_stated or are_equal(plans[name], plans[twin])):
            if is_stated:
                listed[twin] += f", the same plan as {what}"
            elif plans[name].method in BASELINES:
                listed[twin] += f"; also {BASELINES[plans[name].method].title}"
        elif len(listed) < MAX_LISTED:
            listed[name] = what
    return [ListedPlan(n, _with_shortage(plans[n], what)) for n, what in listed.items()]


def add_chosen(listed: Sequence[ListedPlan], plans: Mapping[str, Plan], chosen: str) -> list[ListedPlan]:
    """Add the chosen plan below the others, unless it or an equal plan is among them: a reader must see the plan that is exported."""
    if any(one.name == chosen or are_equal(plans[one.name], plans[chosen]) for one in listed):
        return list(listed)
    plan = plans[chosen]
    return [*listed, ListedPlan(chosen, _with_shortage(plan, words.title_in_sentence(plan)))]


def choose_opponent(plans: Mapping[str, Plan], listed: Sequence[ListedPlan], chosen: str) -> str | None:
    """Choose the listed plan that a chosen one is measured against, the same on every page: what is run now, else the recommended plan.

    The recommended plan is measured against the fastest, for a reader asks first what it costs not to take that; the fastest plan against
    the fastest of the others. None where no other plan fits.
    """
    recommended = listed[0].name
    others = [n for n in (one.name for one in listed) if n != chosen and not are_equal(plans[n], plans[chosen])]
    stated = next((n for n in others if plans[n].method == STATED_METHOD), None)
    if stated or recommended in others:
        return stated or recommended
    fitting = [n for n in others if plans[n].fits]
    best = min(fitting, key=lambda n: plans[n].cost.step_time_s, default=None)
    if best is None or plans[best].cost.step_time_s < plans[chosen].cost.step_time_s or plans[chosen].pipeline:
        return best
    # Against a usual layout rather than another plan of the same search, whose difference tells little.
    usual = [n for n in fitting if plans[n].method != EXACT.name]
    return min(usual, key=lambda n: plans[n].cost.step_time_s, default=best)


def merge_equal(plans: Mapping[str, Plan], chosen: str) -> list[ListedPlan]:
    """Return a row for each plan that differs from those before: its titles, what its step does, and what its search minimised.

    Of equal plans the chosen one is the row, else the first.
    """
    groups: list[list[str]] = []
    for name, plan in plans.items():
        for group in groups:
            if are_equal(plan, plans[group[0]]):
                group.append(name)
                break
        else:
            groups.append([name])
    rows = []
    for group in groups:
        name = chosen if chosen in group else group[0]
        aims = dict.fromkeys(recipe.describe_aim(plans[n]) for n in group)
        title, *others = dict.fromkeys(words.plan_title(plans[n]) for n in group)
        title += ", proven" * recipe.has_proven_step(plans[group[0]])
        titles = title + (f", the same plan as {words.join_words(others)}" if others else "")
        rows.append(ListedPlan(name, _with_shortage(plans[name], "; ".join((titles, *filter(None, aims))))))
    return rows


def are_equal(one: Plan, other: Plan) -> bool:
    """Tell whether two plans place and recompute all alike, at the same figures.

    Names and rounded figures do not tell: TAP's and TAPS's plans of Llama-3-8B on 2 x 8 H100 share both, and send 32.550 and 32.619 GB.
    """
    # Not the edges of every operator: two searches may take edges that cost the same, and a reader would see one plan in two rows.
    layouts = [
        (p.mesh.axis_sizes, p.pipeline, p.workload.accumulate, p.param_plans(), _recomputation_by_copy(p))
        for p in (one, other)
    ]
    figures = [
        (p.cost.step_time_s, p.cost.comm_time_s, sent_per_gpu(p), p.cost.memory_bytes["peak"]) for p in (one, other)
    ]
    # Sums of the same terms in another order differ in the last digits.
    return layouts[0] == layouts[1] and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(*figures, strict=True))


def _recomputation_by_copy(plan: Plan) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return what each copy of a block recomputes, and which results it keeps."""
    return {prefix: (b.recompute, b.kept) for b in plan.blocks.values() for prefix in b.prefixes}


def _with_shortage(plan: Plan, what: str) -> str:
    """Add to what a plan is whether it does not fit."""
    return what if plan.fits else f"{what}, does not fit"


def _describe_stages(plan: Plan, best: Plan) -> str:
    """Say what a plan with pipeline stages gains over the best without."""
    gain = 1 - plan.cost.step_time_s / best.cost.step_time_s
    if best.fits:
        return f"with pipeline stages: {units.percent(gain)} less time"
    return "with pipeline stages it fits" if plan.fits else "with pipeline stages"


def nearly_equal(one: Plan, other: Plan) -> bool:
    """Tell whether two plans are alike to a reader who chooses: layouts of one name, and nearly the same step and memory."""
    equal = all(
        abs(a - b) <= MAX_EQUAL_DIFFERENCE * max(a, b)
        for a, b in (
            (one.cost.step_time_s, other.cost.step_time_s),
            (one.cost.memory_bytes["peak"], other.cost.memory_bytes["peak"]),
        )
    )
    return equal and recipe.degrees_name(one) == recipe.degrees_name(other)
