"""Choosing a plan: filters, the two scatters, the tables below them, and pins."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer import choosing, glossary, pins, scatter, settings, state, units, words
from explorer.choosing import LETTERS
from explorer.components import frame
from planner_core.candidates import Candidates
from planner_core.pipeline import Result
from planner_core.plan import Plan

CHOOSING = {**frame.CHART, "modeBarButtonsToRemove": ["autoScale2d"], "displayModeBar": True}
AXES = {"communication": "communication", "exposed": "exposed communication", "step": "step time"}
ROWS_SHOWN = 500
METHOD_NAMES = {
    **{k: v.removesuffix("’s plan") for k, v in words.METHOD_TITLES.items()},
    "exact": "exact search", "data-parallel": "data parallel", "fsdp": "FSDP", "megatron": "Megatron-LM",
    "megatron-sp": "Megatron-LM + sequence parallel", "hf-expert": "the model's own", "edited": "by hand",
}  # fmt: skip

Plans = dict[str, Plan]


def current() -> choosing.Filter:
    """The filter in the address."""
    v = state.values()
    return choosing.Filter(v["fits"] == "only", v["meshes"], v["methods"], v["differs"])


def _many(label: str, key: str, options: list[str], names: Any, placeholder: str, help: str | None = None) -> None:
    what = {"meshes": "mesh", "methods": "method"}.get(key, "weight")
    frame.absent(what, state.value(key), options, "“Show all” takes it out of the filter")
    widget = state.seed(f"w_{key}", [x for x in state.value(key) if x in options])
    st.multiselect(
        label, options, format_func=names, key=widget, placeholder=placeholder, help=help,
        on_change=lambda: state.change(**{key: tuple(st.session_state[widget])}),
    )  # fmt: skip


def filters(plans: Plans, shown: Plans) -> None:
    """The controls: only what fits, meshes, methods, weights placed otherwise than by Megatron-LM."""
    other = sorted(set().union(*choosing.differing(plans).values()))
    on = current()
    with st.expander(f"Filter: {len(shown)} of {len(plans)} plans" if on else "Filter", expanded=bool(on)):
        widget = state.seed("w_fits", state.value("fits") == "only")
        st.checkbox(
            "Only what fits the memory", key=widget,
            on_change=lambda: state.change(fits="only" if st.session_state[widget] else "all"),
        )  # fmt: skip
        left, middle, right = st.columns(3)
        with left:
            meshes = {choosing.mesh_text(p): words.mesh_words(p.mesh) for p in plans.values()}
            _many("Mesh", "meshes", list(meshes), lambda m: meshes.get(m, m), "any")
        with middle:
            methods = list(dict.fromkeys(p.method for p in plans.values()))
            _many("Method", "methods", methods, lambda m: METHOD_NAMES.get(m, m), "any")
        with right:
            told = "Plans, and candidates of a block, that place all of these weights otherwise than Megatron-LM"
            named = {w: w.partition(":")[2] for w in other}
            _many("Differs from Megatron-LM in", "differs", other, lambda w: named[w], "any weight", told)
        if not other:
            st.caption("Megatron-LM's plan suits no mesh here, so there is nothing to differ from.")
        if on:
            st.button("Show all", on_click=_clear, key="clear_filters")


def _clear() -> None:
    state.change(fits="all", meshes=(), methods=(), differs=())


# --- whole-model plans ----------------------------------------------------------------------------------


def plans_chart(result: Result, plans: Plans, shown: Plans, chosen: str) -> None:
    """Whole-model plans; a click chooses one, a lasso or box keeps several in the table."""
    widget = state.seed("w_axis", state.value("axis"))
    with st.container(horizontal=True, vertical_alignment="center", height=56, border=False):
        st.markdown("**Plans for the whole model** by", width="content")
        st.selectbox(
            "Across", list(AXES), format_func=lambda a: AXES[a], key=widget, width=230,
            on_change=state.from_widget, args=("axis", widget), label_visibility="collapsed",
        )  # fmt: skip
    capacity = result.cluster.gpu.memory_bytes
    figure = scatter.plans_scatter(
        shown, chosen, choosing.baselines(plans), capacity, frame.theme(), state.value("axis"), plans
    )
    key = f"plans_chart{_generation()}"

    def pick() -> None:
        selection = st.session_state[key]["selection"]
        names = [n for n in dict.fromkeys(_data(p) for p in selection["points"]) if n in plans]
        if selection.get("lasso") or selection.get("box"):
            state.change(among=tuple(names))
        elif names:
            state.change(plan=names[0])

    st.plotly_chart(
        figure, theme=None, key=key, on_select=pick, selection_mode=("points", "box", "lasso"), config=CHOOSING,
        alt=f"Plans by {AXES[state.value('axis')]} per step and memory per GPU",
    )  # fmt: skip


def _data(point: Any) -> Any:
    data = point.get("customdata")
    return data[0] if isinstance(data, list) else data


def _generation() -> int:
    """Part of the charts' keys, so that the browser forgets what was marked in them when the page does."""
    return int(st.session_state.get("marked_generation", 0))


def _unmark(**changes: Any) -> None:
    st.session_state["marked_generation"] = _generation() + 1
    state.change(**changes)


def plans_table(plans: Plans, shown: Plans, chosen: str) -> None:
    """Every plan a row, its figures before the long words, which a narrow window cuts off; a click chooses."""
    frame.absent("plan", state.value("among"), list(plans), "It is left out of what is marked")
    among = [n for n in state.value("among") if n in shown]
    listed = {n: shown[n] for n in among} if among else shown
    if among:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"{len(among)} plans marked in the chart", width="content")
            st.button("Show all plans", on_click=_unmark, kwargs={"among": ()}, key="unmark_plans", type="tertiary")
    if not listed:
        st.info("No plan passes the filter.")
        return
    tied = choosing.ties(plans)
    rows = [
        {
            "plan": words.title(p),
            "step, ms": figure(p.cost.step_time_s * 1e3),
            "tie": "ties" if n in tied else "",
            "communication, ms": figure(p.cost.comm_time_s * 1e3),
            "of it exposed, ms": figure(p.cost.exposed_comm_time_s * 1e3),
            "memory, GiB": figure(p.cost.memory_bytes["peak"] / units.GIB),
            "fits": "yes" if p.fits else "no",
            "mesh": words.mesh_words(p.mesh),
            "what it does": words.describe(p),
            "proof": "optimal" if p.optimal else "best found",
        }
        for n, p in listed.items()
    ]
    key = f"plans_table_{chosen}_{'-'.join(listed)}"

    def pick() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        if selected:
            state.change(plan=list(listed)[selected[0]])

    st.dataframe(
        rows, hide_index=True, on_select=pick, selection_mode="single-row", key=key, row_height=34,
        selection_default={"selection": {"rows": [list(listed).index(chosen)] if chosen in listed else []}},
        column_config=_columns(), alt="The plans as a table",
    )  # fmt: skip
    st.caption("A row chooses its plan, as a click on its point does; so does “Chosen plan” below, which keys reach.")


def _columns() -> dict[str, Any]:
    text, number = st.column_config.TextColumn, st.column_config.NumberColumn
    within = units.percent(words.MODEL_ERROR)
    return {
        "plan": text(width=225, help=glossary.PLAN_WORDS),
        "what it does": text(width=290),
        "fits": text(width=50),
        "communication, ms": number(help="Time of all collectives of a step, hidden or not"),
        "memory, GiB": number(help="The most that one GPU holds at once"),
        "mesh": text(help=glossary.GLOSSARY["mesh"]),
        "tie": text(width=50, help=f"Within {within} of the fastest plan that fits: the estimate cannot tell them apart"),
        "of it exposed, ms": number(help=glossary.GLOSSARY["exposed"]),
        "proof": text(
            help="optimal: proven the best of its kind under the stated cost model; best found: a small gap is left"
        ),
    }


def figure(value: float) -> float:
    """Three significant figures, still a number so that the column sorts."""
    return float(f"{value:.3g}")


def ties(plans: Plans) -> None:
    """Plans within the model's error of the fastest that fits are told as ties."""
    best, *near = choosing.ties(plans) or [""]
    if near:
        st.caption(
            frame.text(
                f"Within {units.percent(words.MODEL_ERROR)} of {words.title(plans[best])} in step time, which is the "
                f"error of such estimates: {', '.join(words.title(plans[n]) for n in near)}. Choose among these by memory."
            )
        )


# --- pins ------------------------------------------------------------------------------------------------


def pinned(plans: Plans, chosen: str) -> None:
    """Up to four plans to compare, kept while settings of this model change."""
    held = list(state.value("compare"))
    everything = state.with_pinned(plans)
    mine = pins.pin(chosen, state.values())
    is_held = mine in held or chosen in held
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if is_held:
            st.button("Unpin this plan", icon=":material/keep_off:", on_click=_hold, key="pin",
                      args=([p for p in held if p not in (mine, chosen)],))  # fmt: skip
        else:
            st.button(
                "Pin this plan", icon=":material/keep:", on_click=_hold, args=([*held, mine],), key="pin",
                disabled=len(held) >= settings.MAX_COMPARED,
                help=f"Keep it beside others on Compare, up to {settings.MAX_COMPARED}, also when you change the settings",
            )  # fmt: skip
        for k, text in enumerate(held):
            if text in everything:
                label = frame.text(words.title(everything[text]))
                st.button(
                    f"{label} ✕", key=f"unpin_{k}", type="tertiary", help="Unpin",
                    on_click=_hold, args=([p for p in held if p != text],),
                )  # fmt: skip
        if len(held) > 1:
            st.page_link("explorer/pages/compare.py", label="Compare them", icon=":material/compare_arrows:")


def _hold(held: list[str]) -> None:
    state.change(compare=tuple(held))


# --- candidates of a block ------------------------------------------------------------------------------


def candidates(result: Result, plan: Plan, reference: Plan | None) -> None:
    """Every assignment of one unique block."""
    one = chosen_block(result)
    if one is None:
        st.caption(
            "No block of this model repeats, so there is no block to enumerate; the search covers the whole graph."
        )
        return
    names = [c.block for c in result.candidates]
    frame.absent("block", [b for b in (state.value("block"),) if b], names, f"Showing {frame.text(one.block)}")
    titles = state.drawing(result.request).titles
    widget = state.seed("w_block", one.block)
    with st.container(horizontal=True, vertical_alignment="center", height=56, border=False):
        st.markdown("**Every candidate of** " + frame.text("" if len(names) > 1 else titles.get(one.block, one.block)), width="content")
        if len(names) > 1:
            st.selectbox(
                "Block", names, key=widget, format_func=lambda n: titles.get(n, n), width=230,
                on_change=lambda: _unmark(block=st.session_state[widget], candidate=None, lasso=()),
                label_visibility="collapsed",
            )  # fmt: skip
    capacity = result.cluster.gpu.memory_bytes
    keep = current().candidates(one, capacity, reference)
    index = picked(one)
    if index is None and state.value("candidate") is not None:
        st.warning(f"There is no candidate {state.value('candidate')} of this block, which has {units.whole(one.space)}; none is chosen.")
    key = f"candidates_{one.block}_{_generation()}"

    def pick() -> None:
        selection = st.session_state[key]["selection"]
        region = choosing.corners(selection)
        if region:
            state.change(lasso=region, block=one.block)
        elif selection["points"]:
            state.change(candidate=int(_data(selection["points"][0])), block=one.block)

    st.plotly_chart(
        scatter.candidates_scatter(
            one, index, capacity, frame.theme(), keep=keep, region=state.value("lasso"), same=choosing.of_plan(one, plan)
        ),
        theme=None, key=key, on_select=pick, selection_mode=("points", "box", "lasso"), config=CHOOSING,
        alt=f"All candidates of {one.block} by communication and memory",
    )  # fmt: skip
    front_choice(one, keep, index)
    candidate_words(one, index, index is None or bool(keep[index]))
    candidates_table(one, keep, index, capacity)


def chosen_block(result: Result) -> Candidates | None:
    """The block in the address, else the first."""
    found = {c.block: c for c in result.candidates}
    return found.get(state.value("block")) or next(iter(found.values()), None)


def picked(found: Candidates) -> int | None:
    """The candidate in the address."""
    index = state.value("candidate")
    return index if index is not None and index < found.space else None


def front_choice(found: Candidates, keep: choosing.Bools, index: int | None) -> None:
    """The candidates of the front in a list, for those who use no mouse."""
    front = sorted((found.on_front & keep).nonzero()[0].tolist(), key=lambda i: float(found.model_comm_s[i]))
    options = [*front, *([index] if index is not None and index not in front else [])]
    if not options:
        return
    widget = f"w_candidate:{found.block}:{index}"  # of each choice its own, as in `frame.follower`
    st.selectbox(
        "Candidate", options, index=options.index(index) if index is not None else None, key=widget, label_visibility="collapsed",
        placeholder="Click a point, or choose one of the front here",
        format_func=lambda i: f"{units.seconds(float(found.model_comm_s[i]))}, {units.memory(float(found.model_memory_bytes[i]))}"
        + ("" if i in front else ", off the front"),
        on_change=lambda: state.change(candidate=st.session_state[widget], block=found.block),
    )  # fmt: skip


def candidate_words(found: Candidates, index: int | None, shown: bool) -> None:
    """Which point was clicked, and whether the filter leaves it `shown`; or what the points are."""
    if index is None:
        st.caption(
            f"Each point puts every one of {len(found.weights)} weight matrices whole (R), split by rows S(0) or "
            "by columns S(1) over "
            f"{found.axis_size} GPUs, in all {found.repeats} copies; the other GPUs split the batch, weights are kept, "
            "and the rest of the model is chosen best. Choose one for its placements, or mark several with the lasso."
        )
        return
    chips = zip(found.weights, found.choice[index], strict=True)
    st.html(" ".join(f"{frame.escape(choosing.short(w))} {frame.chip(LETTERS[int(c)])}" for w, c in chips))
    alike = len(choosing.alike(found, index))
    st.caption(
        f"{units.seconds(float(found.model_comm_s[index]))} of communication = {found.repeats} × "
        f"{units.seconds(float(found.comm_s[index]))} in the copies + {units.seconds(found.rest_comm_s)} in the rest; "
        f"{units.memory(float(found.model_memory_bytes[index]))} = {found.repeats} × "
        f"{units.memory(float(found.memory_bytes[index]))} + {units.memory(found.rest_memory_bytes)}, at the end of forward."
        + (f" {units.whole(alike)} candidates cost the same." if alike > 1 else "")
        + ("" if shown else " The filter leaves it out of the chart.")
    )
    st.button("Let go of this candidate", on_click=_unmark, kwargs={"candidate": None}, key="unpick", type="tertiary")


def candidates_table(found: Candidates, keep: choosing.Bools, index: int | None, capacity: int) -> None:
    """What the lasso marked, or what costs the same as the chosen candidate; a row chooses."""
    region = state.value("lasso")
    if region:
        marked = choosing.inside(region, found.model_comm_s * 1e3, found.model_memory_bytes / units.GIB) & keep
        rows = marked.nonzero()[0]
    elif index is not None:
        rows = choosing.alike(found, index)
    else:
        return
    if len(rows) < 2 and not region:
        return
    rows = rows[found.model_comm_s[rows].argsort(kind="stable")]
    with st.container(horizontal=True, vertical_alignment="center"):
        more = f", the first {ROWS_SHOWN} listed" if len(rows) > ROWS_SHOWN else ""
        what = "marked" if region else "of equal cost"
        st.caption(f"{units.whole(len(rows))} candidate{'s' * (len(rows) != 1)} {what}{more}", width="content")
        if region:
            st.button("Clear the mark", on_click=_unmark, kwargs={"lasso": ()}, key="unmark", type="tertiary")
    rows = rows[:ROWS_SHOWN]
    if not len(rows):
        return
    table = {
        "communication, ms": [figure(float(v) * 1e3) for v in found.model_comm_s[rows]],
        "memory, GiB": [figure(float(v) / units.GIB) for v in found.model_memory_bytes[rows]],
        "fits": ["yes" if v <= capacity else "no" for v in found.model_memory_bytes[rows]],
        **{choosing.short(w): [LETTERS[int(c)] for c in found.choice[rows, k]] for k, w in enumerate(found.weights)},
    }
    key = f"candidate_rows_{found.block}_{hash(region)}_{'' if region else index}"

    def pick() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        if selected:
            state.change(candidate=int(rows[selected[0]]), block=found.block)

    st.dataframe(
        table, hide_index=True, on_select=pick, selection_mode="single-row", key=key, height=220,
        alt="The marked candidates: costs and the placement of every weight",
    )  # fmt: skip


def dropped(result: Result) -> None:
    """How many candidates there were, and why most are not shown as choices."""
    space = sum(c.space for c in result.candidates)
    d = result.dropped
    why = [
        f"{units.whole(d[k])} {text}"
        for k, text in (
            ("uneven", "would split unevenly"),
            ("memory", "take too much memory"),
            ("dominated", "are beaten in both"),
        )
        if d.get(k)
    ]
    if space:
        st.caption(f"{units.whole(space)} candidates; of them {', '.join(why) or 'none were dropped'}.")
