"""The numbers of a plan, each opened to its formula and parts."""

from __future__ import annotations

import html
from typing import Any

import streamlit as st

from explorer import overlay, state, units
from explorer import parts as parts_of
from explorer.components import frame
from explorer.palette import MEMORY_KINDS, MEMORY_NAMES
from planner_core.pipeline import Result
from planner_core.plan import Plan
from planner_core.planner import Request
from planner_core.price import Message

MEMORY_FORMULAS = {
    "params": "the weights that this GPU stores: the last column of the table below, added up",
    "grads": "of the weights stored here, as far as they are there at the peak; as large as the weight",
    "optimizer": "states of the weights stored here: of AdamW two in the weight's number format, or 12 bytes a weight in 32 bit",
    "activations": "what autograd keeps for backward at the peak, each storage once",
    "buffers": "tensors in flight at the peak: operands, results, gathered weights, gradients on their way",
}


@st.cache_data(max_entries=64, show_spinner=False)
def parts(request: Request, name: str, edit: tuple[str, ...]) -> list[Message]:
    """Every collective of one plan; `edit` as in `state.edit_of`."""
    result = state.with_edit(state.plan(request), edit)
    plan = state.plan_ids(result.plans)[name]
    return list(overlay.itemised(plan, result.graph, result.cluster, result.workload))


def opened(result: Result, name: str, plan: Plan) -> None:
    """The numbers of the chosen plan, each with its parts and formula."""
    c = plan.cost
    with st.expander(f"Step time {units.seconds(c.step_time_s)}: how it adds up"):
        st.markdown(
            f"compute {units.seconds(c.compute_time_s)} + exposed communication "
            f"{units.seconds(c.exposed_comm_time_s)}. All communication takes "
            f"{units.seconds(c.comm_time_s)}; gradient sums and weight gathers hide behind up to 80 % of compute, "
            "what an operation waits for does not hide. "
            "Compute is, for each operation, the greatest of work ÷ reachable FLOP/s, bytes ÷ reachable memory "
            "bandwidth, and the time to launch a kernel."
        )
        _time_parts(result, plan)
    sent(result, name, plan)
    memory = c.memory_bytes
    with st.expander(f"Memory {units.memory(memory['peak'])} per GPU at its peak: by kind"):
        rows = [
            [MEMORY_NAMES[k], units.memory(memory.get(k, 0)), units.whole(memory.get(k, 0)), MEMORY_FORMULAS[k]]
            for k in MEMORY_KINDS
        ]
        rows.append(["peak", units.memory(memory["peak"]), units.whole(memory["peak"]), "their sum at that moment"])
        frame.table(["kind", "size", "bytes", "what it is"], rows, "memory by kind")
        st.caption("The peak is the most that is held at once, found by walking forward and backward, op by op.")


def _time_parts(result: Result, plan: Plan) -> None:
    st.markdown("**Every operation**, compute on one GPU, longest first")
    work = sorted(parts_of.work(plan, result.graph), key=lambda w: -w.total_s)
    st.dataframe(
        [
            {
                "operation": w.op, "block": w.block, "copies": w.copies, "forward, ms": w.forward_s * 1e3,
                "backward, ms": w.backward_s * 1e3, "padding, ms": w.pads_s * 1e3, "all copies, ms": w.total_s * 1e3,
            }
            for w in work
        ],
        hide_index=True, height=220, alt="Compute of every operation", column_config=_ms("forward", "backward", "padding", "all copies"),
    )  # fmt: skip
    waits = parts_of.waits(plan, result.graph)
    if waits:
        st.markdown("**What the step waits for**, all copies, longest first")
        st.dataframe(
            [{"where": w.where, "block": w.block, "what": w.why, "waited, ms": w.seconds * 1e3} for w in waits],
            hide_index=True, height=220, alt="Communication that the step waits for", column_config=_ms("waited"),
        )  # fmt: skip


def _ms(*names: str) -> dict[str, Any]:
    return {f"{n}, ms": st.column_config.NumberColumn(format="%.4g") for n in names}


def sent(result: Result, name: str, plan: Plan) -> None:
    """Traffic of the chosen plan, down to every collective."""
    c = plan.cost
    with st.expander(
        f"Communication {units.traffic(sum(t.wire_bytes for t in c.traffic))} sent per GPU: by phase, collective and axis"
    ):
        rows = [
            [
                t.phase,
                html.escape(t.kind),
                plan.mesh.axis_names[t.axis],
                units.whole(t.count),
                units.traffic(t.num_bytes),
                units.traffic(t.wire_bytes),
                units.seconds(t.time_s),
                html.escape(t.algorithm),
            ]
            for t in c.traffic
        ]
        frame.table(
            ["phase", "collective", "axis", "calls", "whole tensors", "sent per GPU", "time", "algorithm"],
            rows,
            "traffic",
        )
        st.caption(
            "A ring of n sends 2 (n – 1) / n of the bytes for all_reduce, (n – 1) / n for all_gather and "
            "reduce_scatter, (n – 1) / n² for all_to_all."
        )
        st.markdown("**Every collective**, those of equal layers together")
        st.dataframe(
            [
                {
                    "where": m.site,
                    "what": m.what,
                    "phase": m.phase,
                    "collective": m.kind,
                    "axis": plan.mesh.axis_names[m.axis],
                    "calls": m.count,
                    "bytes each": m.num_bytes,
                }
                for m in parts(result.request, name, state.edit_of(name))
            ],
            hide_index=True,
            height=260,
        )
