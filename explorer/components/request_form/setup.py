"""What the visitor runs now, as one line of text or the tool's own file; plans are measured against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from explorer.address import settings, setups
from explorer.components.request_form.fields import Form
from explorer.session import shared_plans, state
from explorer.text.commands import is_uploaded_model
from explorer.text.option_words import page_wording
from planner_core.core import Cluster
from planner_core.planning.methods import check_layout

FILES = ["toml", "json", "yaml", "yml", "sh", "txt"]
LINE_HELP = (
    "Degrees (DP, FSDP, ZeRO-1, TP, SP, CP, EP, PP), the samples of a micro-batch (mbs), how stages run (1f1b, interleaved 2, zb), and "
    "recomputation (none, selective, full); DP beside FSDP is HSDP"
)
FILE_HELP = "torchtitan’s TOML, Megatron-LM’s arguments, DeepSpeed’s JSON, accelerate’s YAML, or a tp_plan of transformers; read as data"


def show_setup_chip(v: dict[str, Any], cluster: Cluster) -> None:
    """Draw the chip that says what is run now, and opens the field that sets it."""
    batch, _ = settings.batch_and_tokens(v)
    stated = setups.parse_setup(v["setup"]) if v["setup"] else None
    now, brief = (stated.line(), replace(stated, options=()).line()) if stated else ("", "add our setup")
    if now:
        st.markdown("instead of", width="content")
    with st.popover(brief, type="tertiary", key=f"chip_setup~{state.version()}"):

        def take(text: str) -> dict[str, Any]:
            if not text.strip():
                return {"setup": ()}
            setup = setups.parse_line(text)
            check_layout(setup.layout, cluster)
            setup.count_micro_batches(batch)
            return {"setup": setup.write()}

        with Form("setup") as form:
            form.line(
                f"Our current setup on these {cluster.num_gpus} GPUs",
                "setup",
                now,
                take,
                empty="FSDP 8 x TP 8, mbs 1, selective",
                help=LINE_HELP,
            )
            form.file(
                "Or your tool’s own file",
                "own_setup_file",
                FILES,
                lambda name, content: _read_setup_file(name, content, v, cluster, form.notes),
                help=FILE_HELP,
            )


def _read_setup_file(
    name: str, content: bytes, v: dict[str, Any], cluster: Cluster, notes: list[str]
) -> dict[str, Any]:
    """Return the setup that the file states with its work of a step, and add what was read to `notes`; raises InputError."""
    known = shared_plans.known_result(state.current_request())
    stated, work, said = setups.parse_file(name, content, cluster.num_gpus, known.graph.config if known else {})
    check_layout(stated.layout, cluster)
    if is_uploaded_model(v["model"]):
        work = {k: value for k, value in work.items() if k != "seq"}
    stated, left_out = stated.for_model(v["model"])
    description = ", ".join(f"{k} {value}" for k, value in {**work, **dict(stated.options)}.items())
    notes += [f"Read from {name}: {description}.", *map(page_wording, (*said, *[left_out] * bool(left_out)))]
    return {"setup": stated.write(), **work}
