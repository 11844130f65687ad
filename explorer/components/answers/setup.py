"""What the visitor runs now: a form of its degrees, or the tool's own file; it becomes the first plan that others are measured against."""

from __future__ import annotations

from typing import Any

import streamlit as st

from explorer.address import settings, setups
from explorer.components import frame
from explorer.session import state
from planner_core.core import RECOMPUTE, ZERO, InputError
from planner_core.planning import Result
from planner_core.planning.methods import Layout, check_layout, may_state

FILES = ["toml", "json", "yaml", "yml", "sh", "txt"]
DEGREES = (
    ("dp", "Ranks that keep whole weights", "Data parallel, DDP; with FSDP beside it: replicas (HSDP)"),
    ("fsdp", "Ranks that the weights are sharded over", "FSDP, ZeRO-3"),
    ("tp", "Tensor parallel ranks", "Megatron-LM’s, innermost: inside a node first"),
    ("cp", "Context parallel ranks", "They share the tokens of every sample, through attention too"),
    ("ep", "Ranks that experts are dealt out over", "Some of the ranks that weights are sharded over, else of those that keep them"),
)  # fmt: skip
SOMETIMES = ("cp", "ep")
"""Degrees that not every model can have."""
ATTENTION = {
    "ring": "pass keys and values round (ring, p2p)", "ulysses": "exchange heads for tokens (Ulysses, a2a)",
    "gather": "gather keys and values (all_gather)",
}  # fmt: skip


def control(result: Result) -> None:
    """The button that opens the form."""
    label = "Change our current setup" if state.value("setup") else "Set our current setup"
    with st.popover(label, type="tertiary", key="own_setup", help="Measure the plan against what you run now"):
        st.caption(f"What you run now on these {result.cluster.num_gpus} GPUs, at the batch of the sentence above.")
        _form(result)
        _file(result)
        if state.value("setup"):
            st.button("Forget it", key="forget_setup", on_click=state.change, kwargs={"setup": ()}, type="tertiary")
        for note in st.session_state.get("setup_notes", ()):
            st.caption(frame.text(note))
        if problem := st.session_state.pop("setup_problem", ""):
            st.warning(problem)


def _form(result: Result) -> None:
    now = (
        setups.read(state.value("setup"))
        if state.value("setup")
        else setups.Stated(Layout(fsdp=result.cluster.num_gpus))
    )
    with st.form("own_setup_form", border=False):
        may = may_state(result.graph)
        for name, label, help in (d for d in DEGREES if d[0] not in SOMETIMES or d[0] in may):
            st.number_input(
                label, 1, 100_000, step=1, help=help, key=state.seed(f"w_own_{name}", getattr(now.layout, name))
            )
        if "cp" in may:
            st.selectbox(
                "Attention over the context ranks", list(ATTENTION), format_func=ATTENTION.__getitem__,
                key=state.seed("w_own_cp_type", now.layout.cp_type),
            )  # fmt: skip
        st.checkbox("Sequence parallel too", key=state.seed("w_own_sp", now.layout.sp))
        st.selectbox(
            "ZeRO stage of the ranks that keep whole weights",
            ZERO if "cp" in may else ZERO[:-1],
            key=state.seed("w_own_zero", now.layout.zero),
        )
        st.number_input(
            "Micro-batches of a step", 1, setups.MOST_PARTS, value=None, step=1, key=state.seed("w_own_accumulate", now.accumulate),
            placeholder="as many as the plan has",
        )  # fmt: skip
        st.selectbox(
            "Recomputation", [r for r in RECOMPUTE if r != "auto"], key=state.seed("w_own_recompute", now.recompute),
            format_func=lambda r: settings.RECOMPUTE_NAMES[r],
        )  # fmt: skip
        st.form_submit_button("Measure against it", on_click=_take_form, args=(result,))


def _take_form(result: Result) -> None:
    """Callback: the setup is what the form says."""
    given: dict[str, Any] = {
        k: st.session_state[f"w_own_{k}"] for k in ("dp", "fsdp", "tp", "sp", "zero", "accumulate", "recompute")
    }
    given |= {k: st.session_state[f"w_own_{k}"] for k in may_state(result.graph)}
    if given.get("cp", 1) > 1:
        given["cp_type"] = st.session_state["w_own_cp_type"]
    times, again = given.pop("accumulate"), given.pop("recompute")
    given["sp"] = given["sp"] and given["tp"] > 1
    _take(setups.Stated(Layout(**given), times, again), result)


def _take(stated: setups.Stated, result: Result, **more: Any) -> bool:
    """Keep a setup that this cluster has the GPUs for; tell what is wrong with another one."""
    st.session_state["setup_notes"] = ()
    try:
        check_layout(stated.layout, result.cluster)
    except InputError as error:
        st.session_state["setup_problem"] = state.in_words(str(error))
        return False
    state.change(setup=stated.write(), **more)
    return True


def _file(result: Result) -> None:
    file = st.file_uploader(
        "Or your tool’s own file", type=FILES, key="own_setup_file",
        help="torchtitan’s TOML, Megatron-LM’s arguments, DeepSpeed’s JSON, accelerate’s YAML, or a tp_plan of transformers; read as data",
    )  # fmt: skip
    if file is not None:
        st.button(
            "Measure against this file",
            key="take_setup_file",
            on_click=_take_file,
            args=(file.name, file.getvalue(), result),
        )


def _take_file(name: str, content: bytes, result: Result) -> None:
    """Callback: the setup is what the file says, and so is the work of a step in the sentence."""
    try:
        stated, work, notes = setups.of_file(name, content, result.cluster.num_gpus)
    except InputError as error:
        st.session_state["setup_problem"] = state.in_words(str(error))
        return
    if result.request.model.startswith("own-"):
        work = {k: v for k, v in work.items() if k not in ("seq",)}
    if _take(stated, result, **work):
        told = ", ".join(f"{k} {v}" for k, v in work.items())
        st.session_state["setup_notes"] = (
            f"Of {name}: {', '.join(stated.write())}; the sentence above now has {told}.",
            *notes,
        )
