"""Measure traffic and memory at full size: one rank of a fake process group of the plan's own world size, on meta tensors.

There are no weights, no values and no other processes. So it takes seconds to see the collectives and allocations of a step with
70 billion parameters. Constants (token ids, masks, positions) have values, on the CPU, since the model's code reads them.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner_core.core import Graph, InputError, Plan
from planner_core.cost import cost_model_of, keeps_other_tensors, price
from planner_core.verification.fake.memory_tracker import IN_FLIGHT
from planner_core.verification.fake.program import program_step
from planner_core.verification.numerics import order_of, same_traffic
from planner_core.verification.processes import run_ranks

MEMORY_TOLERANCE = 0.02
"""Allowed error, as a share of the measured peak."""
SMALL_BYTES = 1 << 16
"""Allowed error in bytes, if this is more. Optimizers and kernels allocate small tensors that the simulation does not count."""
MOST_RANKS = 100_000
"""The largest number of ranks, which is that of a cluster. Its groups are made in half a minute."""


def verify_fake(plan: Plan, *, graph: Graph | None = None, timeout_s: float = 600.0) -> dict[str, Any]:
    """The report of docs/CONTRACT.md without numerics. The step runs in a process of its own, so nothing in this one changes.

    `graph`: the graph of the plan's model; with it the order of the collectives is compared with the schedule.
    """
    return verify_fake_all([plan], graphs=[graph], timeout_s=timeout_s)[0]


def verify_fake_all(
    plans: list[Plan], *, graphs: Sequence[Graph | None] | None = None, timeout_s: float = 600.0
) -> list[dict[str, Any]]:
    """Reports of several plans, run one after the other by the same process."""
    for plan in plans:
        if plan.mesh.num_devices > MOST_RANKS:
            raise InputError(
                f"the plan's mesh has {plan.mesh.num_devices:,} devices, but a fake process group is made for at most {MOST_RANKS:,}; "
                "plan for fewer GPUs, or check it with --rules"
            )
    (found,) = run_ranks(_fake_steps, 1, (plans,), timeout_s=timeout_s, backend=None)
    graphs = graphs or [None] * len(plans)
    return [_report(plan, rows, graph) for plan, rows, graph in zip(plans, found, graphs, strict=True)]


def _fake_steps(plans: list[Plan]) -> list[dict[str, Any]]:
    return [fake_step(plan) for plan in plans]


def _report(plan: Plan, found: Mapping[str, Any], graph: Graph | None = None) -> dict[str, Any]:
    """Compare what was measured with the plan."""
    predicted, measured = plan.cost.collectives(), found["collectives"]
    wanted = _as_captured(plan, graph).get("peak", 0)
    peak, ahead = found["memory"]["peak"], found["memory"][IN_FLIGHT]
    apart = abs(wanted - peak)
    equal = same_traffic(predicted, measured)
    order = None
    if graph is not None:
        order = order_of(plan, graph, found["events"], micro_batches=int(plan.workload["accumulate"]))
    fits = apart <= max(MEMORY_TOLERANCE * peak, SMALL_BYTES)
    return {
        "ok": equal and fits and (order is None or order["ok"]),
        "ranks": plan.mesh.num_devices,
        "backend": "fake",
        "loss": None,
        "grad": None,
        "collectives_ok": equal,
        "collectives": {"predicted": predicted, "measured": measured},
        "by_axis": found["by_axis"],
        "memory_bytes": {
            "predicted": wanted,
            "measured": peak,
            "rel_error": apart / peak,
            "in_flight": ahead,
            "by_kind": found["memory"],
            "results_kept": found.get("peak_of_kept_results", peak),
        },
        "inputs": found.get("inputs"),
        "seconds": found["seconds"],
        "order": order,
    }


def _as_captured(plan: Plan, graph: Graph | None) -> Mapping[str, int]:
    """The memory of a plan whose operators keep what they kept when they were recorded. A run on meta tensors is not compiled, and takes
    the loss and the attention kernel of the model's own code; the plan may count others."""
    model = cost_model_of(plan)
    if graph is None or not keeps_other_tensors(graph, model.cluster.gpu, model.workload):
        return plan.cost.memory_bytes
    return price(plan.blocks, graph, model).memory_bytes


def fake_step(plan: Plan) -> dict[str, Any]:
    """One training step of rank 0, after the first: collectives by phase, kind and axis, and memory at its peak."""
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.mesh.num_devices)
    try:
        mesh = init_device_mesh("cpu", plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
        # torch's own checks of values: on meta there is nothing to check
        with mock.patch.object(torch, "_check_tensor_all_with", lambda *args: None):
            found = program_step(plan, mesh)
        return {**found, "seconds": round(time.perf_counter() - start, 2)}
    finally:
        dist.destroy_process_group()
