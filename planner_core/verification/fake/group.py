"""Measure traffic and memory at full size: one rank of a fake process group of the plan's own world size, on meta tensors.

There are no weights, no values and no other processes. So it takes seconds to see the collectives and allocations of a step with
70 billion parameters. Constants (token ids, masks, positions) have values, on the CPU, since the model's code reads them.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from planner_core.core import USUAL_STACK, Graph, InputError, Plan, named_check
from planner_core.cost import CostModel, cost_model_of, keeps_other_tensors, price
from planner_core.runtime.program import fake_store
from planner_core.verification.fake.memory_tracker import IN_FLIGHT
from planner_core.verification.fake.program import run_program_step
from planner_core.verification.numerics import check_order, same_traffic
from planner_core.verification.processes import run_ranks

MEMORY_TOLERANCE = 0.02
"""Allowed error, as a share of the measured peak."""
SMALL_BYTES = 1 << 16
"""Allowed error in bytes if the share is less: optimizers and kernels allocate small tensors that the prediction does not count."""
MAX_FAKE_RANKS = 100_000
"""The largest number of ranks, as of a cluster. Its groups take half a minute to make."""


def verify_fake(plan: Plan, *, graph: Graph | None = None, timeout_s: float = 600.0) -> dict[str, Any]:
    """Run one step on a fake group, and return the report of docs/CONTRACT.md without numerics.

    The step runs in a process of its own, since it patches torch. With `graph`, that of the plan's model, the order of the collectives
    is compared with the schedule.
    """
    return verify_fake_all([plan], graphs=[graph], timeout_s=timeout_s)[0]


def verify_fake_all(
    plans: list[Plan], *, graphs: Sequence[Graph | None] | None = None, timeout_s: float = 600.0
) -> list[dict[str, Any]]:
    """Run several plans one after the other in one process, and return their reports."""
    for plan in plans:
        if plan.mesh.num_devices > MAX_FAKE_RANKS:
            raise InputError(
                f"the plan's mesh has {plan.mesh.num_devices:,} devices, but a fake process group is made for at most {MAX_FAKE_RANKS:,}; ",
                "plan for fewer GPUs, or check it with ",
                named_check("rules"),
            )
    (measurements,) = run_ranks(_run_fake_steps, 1, (plans,), timeout_s=timeout_s, backend=None)
    graphs = graphs or [None] * len(plans)
    return [
        _compare_with_plan(plan, rows, graph) for plan, rows, graph in zip(plans, measurements, graphs, strict=True)
    ]


def _run_fake_steps(plans: list[Plan]) -> list[dict[str, Any]]:
    return [run_fake_step(plan) for plan in plans]


def _compare_with_plan(plan: Plan, measurement: Mapping[str, Any], graph: Graph | None = None) -> dict[str, Any]:
    """Compare what was measured with the plan's prediction."""
    predicted, measured = plan.cost.collectives(), measurement["collectives"]
    memory, fits = report_memory(_memory_as_captured(plan, graph).get("peak", 0), measurement)
    equal = same_traffic(predicted, measured)
    order = None
    if graph is not None:
        order = check_order(plan, graph, measurement["events"], micro_batches=plan.accumulate)
    return {
        "ok": equal and fits and (order is None or order["ok"]),
        "ranks": plan.mesh.num_devices,
        "backend": "fake",
        "loss": None,
        "grad": None,
        "collectives_ok": equal,
        "collectives": {"predicted": predicted, "measured": measured},
        "by_axis": measurement["by_axis"],
        "memory_bytes": {**memory, "results_kept": measurement.get("peak_of_saved_results", memory["measured"])},
        "inputs": measurement.get("inputs"),
        "seconds": measurement["seconds"],
        "order": order,
    }


def report_memory(predicted: int, measurement: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the part of a report that compares the peak of one GPU, and whether it is near enough to the prediction."""
    peak = measurement["memory"]["peak"]
    difference = abs(predicted - peak)
    report = {
        "predicted": predicted,
        "measured": peak,
        "rel_error": difference / peak,
        "in_flight": measurement["memory"][IN_FLIGHT],
        "by_kind": measurement["memory"],
        "constants": measurement["peak_of_constants"],
    }
    return report, difference <= max(MEMORY_TOLERANCE * peak, SMALL_BYTES)


def model_as_run(plan: Plan) -> CostModel:
    """Return the prices of a plan on PyTorch's own stack, on which it is run here, whatever buffers its tool keeps.

    Example: DeepSpeed keeps gradients in 16 bits until the update, and here each is cast to the 32 bits of its weight.
    """
    return cost_model_of(replace(plan, workload=replace(plan.workload, stack=USUAL_STACK)))


def _memory_as_captured(plan: Plan, graph: Graph | None) -> Mapping[str, int]:
    """Return the memory of a plan whose operators save what they saved when they were captured.

    A run on meta is not compiled, and uses the loss and the attention kernel of the model's code, where the plan may count others.
    """
    model = model_as_run(plan)
    is_as_planned = plan.workload.stack in (None, USUAL_STACK)
    if graph is None or (is_as_planned and not keeps_other_tensors(graph, model.cluster.gpu, model.workload)):
        return plan.cost.memory_bytes
    return price(plan.blocks, graph, model).memory_bytes


def run_fake_step(plan: Plan) -> dict[str, Any]:
    """Run the second training step of rank 0: collectives by phase, kind and axis, and memory at its peak."""
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=plan.mesh.num_devices)
    try:
        mesh = init_device_mesh("cpu", plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
        # torch checks values of some operands, which meta does not have.
        with mock.patch.object(torch, "_check_tensor_all_with", lambda *args: None):
            measured = run_program_step(plan, mesh)
        return {**measured, "seconds": round(time.perf_counter() - start, 2)}
    finally:
        dist.destroy_process_group()
