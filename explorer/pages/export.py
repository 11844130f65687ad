"""Export: how do I train with it? The plan as data and in the forms of other programs, and its verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer import components
from explorer.address import pins, settings, setups
from explorer.components import frame, graphs, opened, report
from explorer.components.answers import money
from explorer.graph import code_lines
from explorer.jobs import code as coding
from explorer.jobs import export as exporting
from explorer.session import state, stated
from explorer.text import commands, spending, units, words
from planner_core.core import Cluster, Graph, Plan, PlannerError
from planner_core.exporters import Target
from planner_core.planning import Request, Result
from planner_core.planning.pricing import model_flops, speed_of
from planner_core.verification import check_rules

PREVIEW_LINES = 60


@st.cache_data(max_entries=64, show_spinner=False)
def exported(
    request: Request, plan_id: str, edit: tuple[str, ...], target: str, suffix: str, _plan: Plan, near: bool = False
) -> exporting.ExportedFile:  # fmt: skip
    """One export, kept so that switching tabs is free; `request` is what the plan answers, `edit` as in `state.edit_of`."""
    return exporting.export(_plan, target, suffix, near=near)


@st.cache_data(max_entries=16, show_spinner=False)
def generated(request: Request, plan_id: str, edit: tuple[str, ...], _plan: Plan) -> coding.Code:
    """The generated code of a plan, kept; arguments as in `exported`."""
    return coding.code(_plan)


def summary(plan: Plan, home: Result) -> None:
    """What the plan is, what its step takes and how fast it trains; `home`: what it is one of."""
    c, cluster = plan.cost, home.cluster
    speed = speed_of(plan, model_flops(home.graph), cluster)
    st.markdown(f"{frame.text(words.describe(plan))}.")
    st.markdown(
        f"Predicted: {units.seconds(c.step_time_s)} a step, {units.traffic(sum(t.wire_bytes for t in c.traffic))} "
        "sent per GPU, "
        f"{units.memory(c.memory_bytes['peak'])} of memory per GPU"
        + ("." if plan.fits else ", which does not fit: this plan would run out of memory.")
        + f" {units.whole(speed.tokens_per_s_per_gpu)} tokens/s on each GPU, utilisation {units.percent(speed.mfu)}. "
        + spending.sentence(money.budget(), speed, cluster.num_gpus)
    )


def command(cluster: Cluster, script: str) -> str:
    """How to start the script on every node."""
    per_node = cluster.levels[0].size
    nodes = cluster.num_gpus // per_node
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {per_node} {script}"
    return (
        f"# on each of the {nodes} nodes, HEAD being the name of the first\n"
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 {script}"
    )


def plan_file(result: Result, name: str, plan: Plan) -> None:
    """The plan as data; `result` is what it is one of."""
    text = exporting.plan_text(plan)
    file = f"{result.graph.name}-{name}.json".replace("/", "-")
    st.download_button(
        "Download plan JSON",
        text,
        file_name=file,
        mime="application/json",
        on_click="ignore",
        key="download_plan",
        icon=":material/download:",
    )
    unverified(name)
    size = f"{units.whole(len(text.encode()) / 1000)} kB, versioned and checked when it is read."
    if name == pins.EDITED:
        st.caption(f"{size} A plan that was changed by hand has no command: keep the file.")
        return
    st.caption(f"{size} Make the same file on the command line:")
    request = result.request if name == setups.NAME else state.request()
    pick = plan.name if name == setups.NAME or plan is not result.best else ""
    st.code(commands.plan(request, file, pick), language="bash", wrap_lines=True)


def target_tab(result: Result, name: str, plan: Plan, target: Target) -> None:
    """One form: preview, remarks, command, download."""
    st.markdown(f"**{target.title}**  \n{target.words}")
    with st.spinner(f"Writing the {target.title}"):
        made = exported(result.request, name, state.edit_of(name), target.name, target.suffix, plan)
    if made.problem:
        st.info(f"This plan cannot leave in this form: {frame.text(made.problem)}")
        if "--nearest" not in made.problem or not st.toggle(
            "Export the nearest plan instead", key=f"near_{target.name}"
        ):
            return
        with st.spinner("Writing the nearest plan"):
            made = exported(result.request, name, state.edit_of(name), target.name, target.suffix, plan, near=True)
    for remark in made.remarks:
        if not (made.nearest and remark.startswith("in this form:")):  # the table says it
            st.caption(frame.text(remark))
    if made.nearest:
        st.markdown(beside(made.nearest))
    file = f"{'train' if target.name == 'torchrun' else target.name}{target.suffix}"
    st.download_button(
        f"Download {file}",
        made.content,
        file_name=file,
        on_click="ignore",
        key=f"download_{target.name}",
        icon=":material/download:",
        type="primary" if target.name == "torchrun" else "secondary",
    )
    unverified(name)
    if target.name == "torchrun":
        st.code(command(result.cluster, file), language="bash", wrap_lines=True)
    lines = made.content.splitlines()
    language = {".py": "python", ".json": "json", ".toml": "toml"}.get(target.suffix, "text")
    st.code("\n".join(lines[:PREVIEW_LINES]), language=language, height=320)
    if len(lines) > PREVIEW_LINES:
        st.caption(f"the first {PREVIEW_LINES} of {units.whole(len(lines))} lines")


def beside(priced: Mapping[str, Any]) -> str:
    """What this form does, beside the plan, as a table."""
    rows = (
        ("step", units.seconds, "step_time_s"),
        ("sent per GPU", units.traffic, "wire_bytes"),
        ("memory per GPU", units.memory, "peak_bytes"),
    )
    lines = ["| figure | in this form | the plan | difference |\n|---|---:|---:|---:|"]
    for title, show, key in rows:
        here, there = priced[key], priced[f"plan_{key}"]
        change = "the same" if abs(here - there) < 0.0005 * there else units.change(here / there - 1) if there else ""
        lines.append(f"| {title} | {show(here)} | {show(there)} | {change} |")
    return "\n".join(lines) + ("" if priced["fits"] else "\n\nIn this form the model does not fit.")


def code_beside_graph(result: Result, name: str, plan: Plan) -> None:
    """What a rank runs: the generated code of each block beside the graph, line and node linked by the pointer."""
    st.markdown(
        "**Blocks as code**", help="What a rank runs: a function for each unique block, its collectives in place."
    )
    if not st.toggle("Show the code beside the graph", key="show_code", help="Takes a few seconds, once for each plan"):
        return
    with st.spinner("Writing the code of the blocks"):
        code = generated(stated.home(name, result).request, name, state.edit_of(name), plan)
    if code.problem:
        st.info(f"There is no generated code to show: {frame.text(code.problem)}")
        return
    st.caption(
        "Point at a line, and its node is outlined in the graph; point at a node, and its lines are marked. Lines with a bar "
        "hold an operator."
    )
    left, right = st.columns(2, gap="small")
    with left:
        graphs.draw(result, name, plan, height=code_lines.HEIGHT)
    with right:
        components.code(code_lines.linked(code, state.drawing(result.request)), key="code")


# the depths of verification: key, title, options on the command line, and how
DEPTHS = (
    (
        "rules",
        "Keeps the rules",
        (),
        "names, ties, even splits, and that every op runs in one of its ways; at once, without a run",
    ),
    (
        "numbers",
        "Same numbers as one GPU",
        ("--ranks", "4"),
        "loss, every gradient and a step of AdamW, a small model of the same architecture on 4 real processes",
    ),
    (
        "traffic",
        "Same traffic and memory as predicted",
        ("--fake",),
        "the whole model on a fake process group of the plan’s own size",
    ),
)


def outcomes(name: str) -> dict[str, dict[str, Any]]:
    """What verification found about this plan in this session, by depth."""
    found: dict[tuple[Request, str], dict[str, dict[str, Any]]] = st.session_state.setdefault("verified", {})
    return found.setdefault((state.request(), f"{name} {state.edit_of(name)} {state.value('setup')}"), {})


def unverified(name: str) -> None:
    """Said beside every download until all three depths have confirmed the plan."""
    left = [title for key, title, _, _ in DEPTHS if not outcomes(name).get(key, {}).get("ok")]
    if left:
        st.caption(
            ":material/warning: Not verified yet. Left to confirm with the buttons under Verification: "
            f"{'; '.join(t[0].lower() + t[1:] for t in left)}."
        )


def verify(plan: Plan, name: str, graph: Graph) -> None:
    """The verification state of this plan, with the buttons that run it."""
    st.markdown("**Verification**", help="Nothing is taken on trust: run the plan and compare it with its prediction.")
    found = outcomes(name)
    for key, title, options, how in DEPTHS:
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.markdown(f"{title}: {_verdict(found.get(key))}  \n:gray[{how}]")
        stop = "Takes a moment" if key == "rules" else "Runs in a process of its own; Stop at the top right ends it"
        if right.button("Run", key=f"verify_{key}", help=stop):
            found[key] = _run(plan, list(options)) if options else _rules(plan, graph)
            st.rerun()


def _rules(plan: Plan, graph: Graph) -> dict[str, Any]:
    findings = check_rules(plan, graph)
    return {"ok": not findings, "findings": findings}


def _run(plan: Plan, options: list[str]) -> dict[str, Any]:
    place = st.empty()

    def tick(waited: float) -> None:
        place.caption(f"running, {waited:.0f} s")

    try:
        return exporting.outcome(plan, *options, tick=tick)
    except PlannerError as error:
        return {"ok": False, "problem": str(error)}


def _verdict(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "not run yet"
    if "problem" in outcome:
        return f"could not run: {frame.text(str(outcome['problem']))}"
    if "findings" in outcome:
        told = outcome["findings"]
        more = f" and {len(told) - 1} more" if len(told) > 1 else ""
        return f"**broken**: {frame.text(told[0])}{more}" if told else "**confirmed**"
    parts = ["**confirmed**" if outcome.get("ok") else "**differs**"]
    if outcome.get("loss"):
        parts.append(f"loss differs by {outcome['loss']['abs_error']:.2g}")
    if outcome.get("grad"):
        parts.append(f"largest relative gradient error {outcome['grad']['max_rel_error']:.2g}")
    if outcome.get("memory_bytes"):
        off = abs(outcome["memory_bytes"]["rel_error"])
        parts.append("the same collectives and bytes")
        parts.append("the same memory" if off < 0.0005 else f"memory off by {units.percent(off)}")
    return ", ".join(parts)


def page() -> None:
    """The page."""
    result = frame.open_page("export")
    plans = stated.plans(result)
    name, plan = frame.plan_choice(plans, "Plan to export")
    home = stated.home(name, result)
    summary(plan, home)
    opened.elsewhere({name: plan}, {name: home})
    frame.how_sure()
    with st.container(key="wide"):
        left, right = st.columns([3, 2], gap="large")
    with left:
        titles = {t.name: t for t in exporting.FORMS}
        asked = state.value("target")
        if asked and asked not in titles:
            st.warning(f"There is no form “{frame.text(asked[:40])}”; forms here: {', '.join(titles)}.")
        current = asked if asked in titles else next(iter(titles))
        widget = state.seed("w_target", current)
        if len(titles) > 1:
            st.segmented_control(
                "Form",
                list(titles),
                format_func=lambda n: titles[n].title,
                key=widget,
                required=True,
                wrap=True,
                on_change=state.from_widget,
                args=("target", widget),
            )
        target_tab(home, name, plan, titles[current])
    with right:
        st.markdown(f"**Plan file** for {words.mesh_words(plan.mesh)}")
        plan_file(home, name, plan)
        others = {n: plans[n] for n in state.value("compare") if n in plans and n != name}
        shown = {name: plan, **dict(list(others.items())[: settings.MAX_COMPARED - 1])}
        report.download(shown, {n: stated.home(n, result) for n in shown})
        verify(plan, name, home.graph)
    with st.container(key="wide_code"):
        code_beside_graph(result, name, plan)


page()
