"""The graph of the Fold page, alone or with a second one beside it: another plan, or another model."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer import components
from explorer.address import pins, settings
from explorer.components import frame
from explorer.figures.palette import DEVICES
from explorer.graph import diff as graph_diff
from explorer.graph import loads, overlay
from explorer.graph import scene as graph_view
from explorer.graph import scene_json as graph_json
from explorer.session import state, stated
from explorer.text import words
from planner_core.core import Plan
from planner_core.planning import Request, Result

DIFFERENCES_SHOWN = 60
NEAREST = {
    "llama-3-8b": "mixtral-8x7b", "gpt2-xl": "bert-large", "bert-large": "gpt2-xl", "t5-large": "bert-large", "vit-large": "bert-large",
}  # fmt: skip
"""Which model of the zoo is set beside one at first: like it but for a part."""


def canvas(result: Result, plan_id: str, plan: Plan, edit: tuple[str, ...], way: str = "") -> dict[str, Any]:
    """What the component draws: the same object for every rerun that changes neither model nor plan; `edit` as in
    `state.edit_of`, `way` as in `overlay.variant`."""
    home = stated.home(plan_id, result)
    return _canvas(result.request, home.request, plan_id, edit, state.value("least"), way, plan, home)


@st.cache_resource(max_entries=64, show_spinner=False)
def _canvas(
    request: Request, home: Request, plan_id: str, edit: tuple[str, ...], least: int, way: str, _plan: Plan, _home: Result
) -> dict[str, Any]:  # fmt: skip
    """`request` is drawn, `home` is what the plan answers; `least` as in `graph_view.scene`."""
    plan, result, drawing = _plan, _home, state.drawing(request)
    return {
        "key": f"{hash((request, home, edit, least, way))}:{plan_id}",
        "scene": graph_json.to_json(drawing),
        "devices": DEVICES,
        "overlay": {
            "placement": overlay.placements(plan, drawing, way),
            **loads.to_json(loads.loads(plan, drawing, result.graph, way)),
            "messages": overlay.communication(plan, drawing, result.graph, result.cluster, result.workload, way),
            "words": overlay.legends(plan),
        },
        "bare": overlay.without_rule(drawing, result.unknown_ops),
    }


def default_open(drawing: graph_view.Scene) -> list[str]:
    """At first the block with the most copies is open."""
    runs = sorted(range(len(drawing.runs)), key=lambda k: -len(drawing.runs[k].calls))
    return [f"run:{k}" for k in runs[:1]]


def viewed(key: str = "graph", names: Mapping[str, str] | None = None) -> None:
    """Callback: a node was clicked, blocks were opened, or another overlay was chosen. `names` gives the page's name of a
    node of the second graph; one that the first has not is left unselected."""
    view = st.session_state[key].get("view") or {}
    node = str(view.get("selected") or "")
    node = node if names is None else names.get(node, "")
    if view.get("open") is not None:
        state.change(open=tuple(map(str, view["open"])))
    state.change(node=node, show=str(view.get("show", "graph")))


def draw(
    result: Result, plan_id: str, plan: Plan, marks: Mapping[str, str] | None = None, other: str = "",
    height: int = components.HEIGHT,
) -> None:  # fmt: skip
    """The graph; `marks` are nodes that lie otherwise in the `other` one beside it."""
    drawing = state.drawing(result.request)
    frame.absent(
        "block to open", state.value("open") or (), [f"run:{k}" for k in range(len(drawing.runs))], "It is left out"
    )
    components.graph(
        {
            **canvas(result, plan_id, plan, state.edit_of(plan_id), state.value("way")),
            "selected": state.value("node"),
            **_shared(drawing),
            "marks": dict(marks or {}),
            "other": other,
        },
        key="graph",
        on_view=viewed,
        height=height,
    )


def holders(result: Result, plan_id: str, plan: Plan, held: loads.Loads, kind: str) -> None:
    """The graph whose nodes are as dark as what they hold of one kind of memory (`held`, bytes)."""
    data = canvas(result, plan_id, plan, state.edit_of(plan_id), state.value("way"))
    drawn = {**data["overlay"], "memory": loads.to_json(held)["memory"]}
    components.graph(
        {
            **data, "key": f"{data['key']}:{kind}", "overlay": drawn, "selected": state.value("node"), "asked": state.asked(),
            "open": default_open(state.drawing(result.request)), "show": "memory",
        },
        key="holders", on_view=lambda: state.change(node=str((st.session_state["holders"].get("view") or {}).get("selected") or "")),
    )  # fmt: skip


def _shared(drawing: graph_view.Scene) -> dict[str, Any]:
    """The state that two graphs beside each other share."""
    opened = state.value("open")
    return {
        "asked": state.asked(), "open": default_open(drawing) if opened is None else list(opened), "show": state.value("show"),
    }  # fmt: skip


def beside(
    result: Result, plans: dict[str, Plan], name: str, plan: Plan
) -> tuple[graph_diff.Matched, tuple[str, str]] | None:
    """Two graphs beside each other with what differs marked; returns what `differences` lists, None where none is asked for."""
    asked = state.value("beside")
    kind, _, model = asked.partition(":")
    if not asked or asked == name:
        return None
    if pins.MARK in kind:
        pinned = state.beside_plan(asked)
        if pinned is None:
            return None
        request, edit, there_id, other = pinned
        scene, titles = state.drawing(request), (words.title(plan), words.title(other))
        matched = graph_diff.of_plans(state.drawing(result.request), plan, other, state.value("way"))
        second = canvas(state.plan(request), there_id, other, edit)
    elif kind == "model":
        there = state.beside_model(model)
        if there is None:
            return None
        matched = graph_diff.of_models(state.drawing(result.request), state.drawing(there.request))
        other, titles = there.best, (_model_name(result), _model_name(there))
        second = canvas(there, next(iter(state.plan_ids(there.plans))), there.best, ())
        scene = state.drawing(there.request)
    elif kind in plans:
        other, scene, titles = plans[kind], state.drawing(result.request), (words.title(plan), words.title(plans[kind]))
        matched = graph_diff.of_plans(scene, plan, other, state.value("way"))
        second = canvas(result, kind, other, state.edit_of(kind))
    else:
        st.warning(
            f"There is no plan “{frame.text(kind[:40])}” to set beside this one; plans here: {', '.join(plans)}."
        )
        return None
    marks = matched.marks()
    left, right = st.columns(2, gap="small")
    with left:
        st.markdown(f"**{frame.text(titles[0])}**, {words.mesh_words(plan.mesh)}")
        draw(result, name, plan, marks[0], titles[1])
    with right:
        st.markdown(f"**{frame.text(titles[1])}**, {words.mesh_words(other.mesh)}")
        data = {
            **second,
            "selected": matched.right.get(state.value("node"), ""),
            **_shared(scene),
            "marks": marks[1],
            "other": titles[0],
        }
        components.graph(data, key="graph2", on_view=lambda: viewed("graph2", matched.left))
    return matched, titles


def _model_name(result: Result) -> str:
    return settings.MODELS.get(result.request.model, result.graph.name)


def differences(matched: graph_diff.Matched, titles: tuple[str, str]) -> None:
    """What differs, in words."""
    found = matched.differences
    if not found:
        st.markdown("**Nothing differs**: every node is alike in both.")
        return
    with st.expander(f"{len(found)} node{'s differ' if len(found) > 1 else ' differs'}", expanded=True):
        rows = [[html.escape(d.name), html.escape(d.here), html.escape(d.there)] for d in found[:DIFFERENCES_SHOWN]]
        frame.table(["node", *titles], rows, "nodes that differ")
        if len(found) > DIFFERENCES_SHOWN:
            st.caption(f"and {len(found) - DIFFERENCES_SHOWN} more")


def choose_beside(plans: dict[str, Plan], name: str) -> None:
    """The control: nothing, the other method's plan, any plan, or another model beside the one that is drawn."""
    methods = {
        pins.pin("best", {**state.values(), "method": m}): m for m in settings.METHODS if m != state.value("method")
    }
    rival = (
        next(iter(methods)) if state.value("method") != "exact" else next(t for t, m in methods.items() if m == "tap")
    )
    held = [t for t in state.value("compare") if pins.MARK in t and t not in methods]
    others = {
        "plan": [n for n in plans if n != name] + [t for t in methods if t != rival] + held,
        "model": [f"model:{m}" for m in settings.MODELS if m != state.value("model")],
    }
    first = {
        "": "",
        "rival": rival,
        "plan": others["plan"][0],
        "model": f"model:{NEAREST.get(state.value('model'), 'llama-3-8b')}",
    }
    current = state.value("beside")
    kind = "" if not current else "rival" if current == rival else "model" if current.startswith("model:") else "plan"
    titles = {
        "": "One graph",
        "rival": words.METHOD_TITLES[methods[rival]],
        "plan": "Another plan",
        "model": "Another model",
    }
    widget = f"w_beside_kind:{kind}"  # of each kind its own, as in `frame.follower`

    def choose() -> None:
        chosen = st.session_state[widget] or ""
        plain = (
            chosen in ("rival", "plan") and state.value("show") == "graph"
        )  # where plans differ is in the placements
        state.change(beside=first[chosen], **({"show": "placement"} if plain else {}))

    st.segmented_control(
        "Beside it", list(titles), format_func=lambda k: titles[k], default=kind, required=True, key=widget, wrap=True,
        help="A second graph beside this one, with what differs marked in both", on_change=choose,
    )  # fmt: skip
    if kind in others:
        called = {n: frame.option(plans[n]) for n in plans} | {f"model:{m}": t for m, t in settings.MODELS.items()}
        called |= {t: f"{words.METHOD_TITLES[m]} for these settings" for t, m in methods.items()}
        called |= {t: f"Pinned: {t.replace(pins.MARK, ' ')}" for t in held}
        frame.follower("Which", others[kind], "beside", current, lambda o: called.get(o, o), width=260)
