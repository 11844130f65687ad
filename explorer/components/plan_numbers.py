"""The numbers of a plan, each opened to its formula and parts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import streamlit as st

from explorer.analysis import breakdown
from explorer.components import frame
from explorer.figures.palette import MEMORY_KINDS, MEMORY_NAMES
from explorer.text import units, words
from planner_core.core import Plan
from planner_core.cost import cost_model_of
from planner_core.cost.communication import sent_per_gpu
from planner_core.cost.memory import tensors_at_peak
from planner_core.planning import Result
from planner_core.planning.pricing import GROWING_SEGMENTS, ReservedMemory, predict_reserved

MEMORY_FORMULAS = {
    "params": "the weights that this GPU stores, and the copies of them to compute with that it keeps, added up",
    "grads": "of the weights stored here, as far as they are there at the peak; as large as the weight",
    "optimizer": "states of the weights stored here: of AdamW two, in the number format in which the weight is stored",
    "activations": "what autograd keeps for backward at the peak, each storage once",
    "buffers": "tensors in flight at the peak: operands, results, gathered weights, gradients on their way",
}


def show_numbers(plans: Mapping[str, Plan], homes: Mapping[str, Result]) -> None:
    """Draw an expander with the numbers of one of `plans`: step, communication and memory. It is computed when it is opened."""
    # With `on_change` the page knows whether the box is open; of a closed one no table is computed.
    box = st.expander("Open the numbers", key="opened_numbers", on_change="rerun")
    if not box.open:
        return
    with box:
        name = next(iter(plans))
        if len(plans) > 1:
            name = st.segmented_control(
                "Numbers of",
                list(plans),
                format_func=lambda n: words.plan_title(plans[n]),
                default=name,
                required=True,
                key=f"opened_plan_{'-'.join(plans)}",
                wrap=True,
            )
        plan, result = plans[name], homes[name]
        titles = (
            f"Step time {units.seconds(plan.cost.step_time_s)}",
            f"Communication {units.traffic(sent_per_gpu(plan))} sent per GPU",
            f"Memory {units.memory(plan.cost.memory_bytes['peak'])} per GPU at its peak",
        )
        for tab, show in zip(st.tabs(titles), (_show_step, _show_traffic, _show_memory), strict=True):
            with tab:
                show(plan, result)


def _show_stages(plan: Plan) -> None:
    """Draw a row for each pipeline stage, and how they add up."""
    cut, cost = plan.pipeline, plan.cost.pipeline
    assert cut is not None and cost is not None
    times = plan.workload.accumulate
    st.markdown(
        f"The step is simulated pass by pass: {times} micro-batches through {len(cost.stages)} stages. The rank that "
        f"works longest waits {units.seconds(cost.bubble_s)} for others; no order of this "
        f"schedule takes less than {units.seconds(cost.bound_s)}."
    )
    rows = []
    for k, s in enumerate(cost.stages):
        times_s = [units.seconds(t) for t in (s.forward_s, s.backward_s, s.step_s)]
        sent = f"{units.traffic(s.send_bytes)}, {units.seconds(s.send_s)}" if s.send_bytes else ""
        rows.append([str(k), str(cut.rank_of(k)), str(cut.copies[k]), *times_s, sent, units.memory(s.peak_bytes)])
    head = ["stage", "rank", "copies", "forward", "backward", "once a step", "handed on", "memory of its rank"]
    frame.show_table(head, rows, "stages, a micro-batch each")


def _show_step(plan: Plan, result: Result) -> None:
    if plan.pipeline:
        _show_stages(plan)
        return
    c = plan.cost
    outside = f" + {units.seconds(c.outside_time_s)} without work for the GPU" if c.outside_time_s else ""
    host = f" (for {units.seconds(c.host_wait_s)} of it the GPU waits for the host)" if c.host_wait_s else ""
    st.markdown(
        f"Compute {units.seconds(c.compute_time_s)}{host} + exposed communication {units.seconds(c.exposed_comm_time_s)} + optimizer "
        f"{units.seconds(c.optimizer_time_s)}{outside} = step {units.seconds(c.step_time_s)}. All communication takes "
        f"{units.seconds(c.comm_time_s)}; weight gathers and gradient sums run beside the compute of a neighbouring block, "
        "as far as it lasts; what an operation waits for is not hidden. "
        "Compute is, for each operation, the greatest of work ÷ reachable FLOP/s, bytes ÷ reachable memory "
        "bandwidth, and the time to launch a kernel."
    )
    st.markdown("**Every operation**, compute on one GPU, longest first")
    frame.show_records(
        [
            {
                "operation": t.op,
                "block": t.block,
                "copies": t.copies,
                "forward, ms": t.forward_s * 1e3,
                "backward, ms": t.backward_s * 1e3,
                "padding and copies, ms": t.pads_s * 1e3,
                "all copies, ms": t.total_s * 1e3,
            }
            for t in sorted(breakdown.op_times(plan, result.graph), key=lambda t: -t.total_s)
        ],
        "Compute of every operation",
        height=220,
        column_config=_ms_columns("forward", "backward", "padding", "all copies"),
    )
    waits = breakdown.exposed_waits(plan, result.graph)
    if waits:
        st.markdown("**What the step waits for**, all copies, longest first")
        frame.show_records(
            [{"where": w.where, "block": w.block, "what": w.why, "waited, ms": w.seconds * 1e3} for w in waits],
            "Communication that the step waits for",
            height=220,
            column_config=_ms_columns("waited"),
        )


def _ms_columns(*names: str) -> dict[str, Any]:
    return {f"{n}, ms": st.column_config.NumberColumn(format="%.3g") for n in names}


def _show_traffic(plan: Plan, result: Result) -> None:
    """Draw the traffic, down to every collective and the line (fixed part and rate) that its time lies on."""
    rows = [
        [
            t.phase,
            html.escape(t.kind),
            plan.mesh.name_of(t.axes),
            units.whole(t.count),
            units.traffic(t.num_bytes),
            units.traffic(t.wire_bytes),
            units.seconds(t.time_s),
            html.escape(t.algorithm),
        ]
        for t in plan.cost.traffic
    ]
    head = ["phase", "collective", "axis", "calls", "whole tensors", "sent per GPU", "time", "algorithm"]
    frame.show_table(head, rows, "traffic")
    if plan.pipeline:
        st.caption("Of the rank that works longest; what a stage hands to the next stands under its step time.")
        return
    st.caption(
        "A ring of n sends 2 (n – 1) / n of the bytes for all_reduce, (n – 1) / n for all_gather and "
        "reduce_scatter, (n – 1) / n² for all_to_all. One collective takes fixed + bytes ÷ rate: the line of the cheapest "
        "algorithm on the links that the axis crosses; launches and latency are in the fixed part."
    )
    st.markdown("**Every collective**, those of equal layers together")
    frame.show_records(
        [
            {
                "where": c.message.site,
                "what": c.message.what,
                "phase": c.message.phase,
                "collective": c.message.kind,
                "axis": plan.mesh.name_of(c.message.axes),
                "algorithm": c.algorithm,
                "bytes": c.message.num_bytes,
                "fixed, ms": c.fixed_s * 1e3,
                "rate, GB/s": 1e-9 / c.s_per_byte if c.s_per_byte else None,
                "each, ms": c.each_s * 1e3,
                "calls": c.message.count,
                "all, ms": c.message.count * c.each_s * 1e3,
            }
            for c in breakdown.collective_times(plan, result.graph)
        ],
        "Every collective with its time",
        height=260,
        column_config={
            **_ms_columns("fixed", "each", "all"),
            "rate, GB/s": st.column_config.NumberColumn(format="%.4g"),
            "bytes": st.column_config.NumberColumn(help="of the whole tensor along the axis"),
        },
    )


def _describe_reserved(reserved: ReservedMemory) -> str:
    """Say what a tool that asks the allocator or the driver will show."""
    if reserved.short:
        return (
            "PyTorch’s allocator keeps blocks that were freed. Here it would **reserve more than the GPU has**: it must free blocks and "
            f"allocate them anew, which takes time that is not in the step. `{GROWING_SEGMENTS}` helps."
        )
    return (
        f"PyTorch’s allocator keeps blocks that were freed: it will have about **{units.memory(reserved.likely_bytes)} reserved**. Nine in "
        f"ten of {reserved.runs} published runs of this kind ({reserved.kind}) say {units.memory(reserved.low_bytes)} to "
        f"{units.memory(reserved.high_bytes)}. `nvidia-smi` shows CUDA’s context and NCCL’s buffers too"
        f"{': with them it may be **more than the GPU has**' * reserved.tight}."
    )


def _show_memory(plan: Plan, result: Result) -> None:
    memory = plan.cost.memory_bytes
    rows = [[MEMORY_NAMES[k], units.memory(memory.get(k, 0)), MEMORY_FORMULAS[k]] for k in MEMORY_KINDS]
    rows.append(["peak", units.memory(memory["peak"]), "their sum at that moment"])
    frame.show_table(["kind", "size", "what it is"], rows, "memory by kind")
    where = f" on rank {plan.fullest_rank}, the fullest of the pipeline" if plan.pipeline else ""
    st.caption(f"The peak is the most that is held at once{where}, found by walking forward and backward, op by op.")
    if plan.fits:
        st.markdown(_describe_reserved(predict_reserved(plan, result.cluster)))
    if plan.pipeline:  # the walk below is that of a whole model, and a rank holds some stages of it
        return
    st.markdown("**Every tensor at the peak**, largest first; those of equal copies of a block together")
    frame.show_records(
        [
            {
                "kind": MEMORY_NAMES[t.kind],
                "tensor": t.what,
                "block": t.block,
                "whole shape": units.shape(t.shape) if t.dtype else "",
                "dtype": t.dtype,
                "placement": t.placement,
                "bytes on one GPU": t.num_bytes,
                "copies": t.copies,
                "all copies, MiB": t.total_bytes / 2**20,
            }
            for t in tensors_at_peak(plan.blocks, result.graph, cost_model_of(plan))
        ],
        "Every tensor that one GPU holds at the peak",
        height=300,
        column_config={
            "tensor": st.column_config.TextColumn(width=320),
            "placement": st.column_config.TextColumn(
                help=f"One letter per mesh axis: {', '.join(plan.mesh.axis_names)}"
            ),
            "all copies, MiB": st.column_config.NumberColumn(format="%.4g"),
        },
    )
