"""Check that a plan computes what one process computes: the loss, every gradient, every parameter after a step of AdamW, and the loss
of a second batch, which finds values of the first batch that a program keeps."""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from planner_core.core import Graph, Plan, VerificationFailed, axes_from_json
from planner_core.cost import Event, schedule_events
from planner_core.runtime import (
    HostStates,
    Parallel,
    PlanMismatch,
    Trace,
    all_to_all_wire_bytes,
    collective_table,
    map_sample_leaves,
    rows_to_json,
    seed_generators,
    unit_seed,
)
from planner_core.runtime.training import with_planned_loss
from planner_core.verification.build_models import (
    SEED,
    Float64Casts,
    WithoutDropout,
    build_whole_model,
    call_as_in_a_loop,
    extract_loss,
    make_example_inputs,
    single_process_loss,
)
from planner_core.verification.processes import run_ranks
from planner_core.verification.schedule import first_difference

T = TypeVar("T")
TOLERANCE = 1e-5
RELATIVE_FLOOR = 1e-3
"""Errors of gradients far below the largest one (key biases, which softmax ignores) are relative to this share of the largest one."""
NUDGE = 1e-13
"""A relative change of weights. A gradient that it moves by `TOLERANCE` / 10 = 1e-6 magnifies it 1e-6 / 1e-13 = ten million times."""
MAX_UNSTEADY_SHARE = 0.1
"""The largest share of weights that may be left out since their gradients are rounding errors."""
LEARNING_RATE = 1e-3
"""Of the step that is compared. It is about the most that AdamW changes a weight, so errors of smaller weights are judged by it."""
ADAM_EPS = 1e-2  # large, so that the rounding of a gradient that is nearly zero does not decide its step


def verify_numbers(plan: Plan, *, graph: Graph | None = None, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run a plan (of few ranks and a small model) on gloo, and return the report of docs/CONTRACT.md without memory.

    With `graph`, that of the plan's model, the order of the collectives is compared with the schedule. Raises
    VerificationFailed if a rank fails or hangs.
    """
    return verify_all([plan], graphs=[graph], timeout_s=timeout_s)[0]


def verify_all(
    plans: list[Plan], *, graphs: Sequence[Graph | None] | None = None, timeout_s: float = 300.0
) -> list[dict[str, Any]]:
    """Run several plans for the same number of ranks in the same processes, and return their reports."""
    ranks = plans[0].mesh.num_devices
    comparisons = run_ranks(_run_all, ranks, (plans,), timeout_s=timeout_s)
    joined = [
        average_over_ranks(rows, p.mesh.axis_sizes)
        for rows, p in zip(zip(*comparisons, strict=True), plans, strict=True)
    ]
    return [make_report(p, rows, g) for p, rows, g in zip(plans, joined, graphs or [None] * len(plans), strict=True)]


def average_over_ranks(comparisons: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the results of the first rank, with the bytes of each all_to_all averaged over all ranks, which are those of a mesh.

    The router decides what one rank sends to experts; the sum over ranks does not depend on it.
    """
    first = comparisons[0]
    rows = {(phase, kind, axes_from_json(at)): list(amounts) for phase, kind, at, *amounts in first["by_axis"]}
    calls = [
        sorted(f["exchanges"], key=lambda call: call[:2]) for f in comparisons
    ]  # the ranks of an axis issue them in one order
    if any([c[:2] for c in calls_of_rank] != [c[:2] for c in calls[0]] for calls_of_rank in calls):
        raise VerificationFailed("the ranks issued different all_to_alls")
    for same in zip(*calls, strict=True):
        phase, axes, of_rank_0 = same[0]
        n = math.prod(sizes[axis] for axis in axes)
        mean = sum(c[2] for c in same) // len(same)
        row = rows[phase, "all_to_all", tuple(axes)]
        row[1] += mean - of_rank_0
        row[2] += all_to_all_wire_bytes(mean, n) - all_to_all_wire_bytes(of_rank_0, n)
    return {**first, "collectives": collective_table(rows), "by_axis": rows_to_json(rows)}


def make_report(plan: Plan, comparison: Mapping[str, Any], graph: Graph | None = None) -> dict[str, Any]:
    """Compare what was measured with the plan's prediction and with one process."""
    predicted, measured = plan.cost.collectives(), comparison["collectives"]
    numbers, equal = report_numbers(comparison), same_traffic(predicted, measured)
    order = None if graph is None else check_order(plan, graph, comparison["events"])
    return {
        **numbers,
        "ok": bool(numbers["numbers_ok"] and equal and (order is None or order["ok"])),
        "ranks": plan.mesh.num_devices,
        "collectives_ok": equal,
        "collectives": {"predicted": predicted, "measured": measured},
        "by_axis": comparison["by_axis"],
        "order": order,
    }


def report_numbers(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a report that compares numbers with one process, for plans with and without stages."""
    single, parallel = comparison["loss"]
    return {
        "backend": "gloo",
        "loss": {"single": single, "parallel": parallel, "abs_error": abs(single - parallel)},
        "next_loss": dict(zip(("single", "parallel"), comparison["next_loss"], strict=True)),
        "grad": {"max_rel_error": comparison["grad"][0], "worst": comparison["grad"][1]},
        "param": {"max_rel_error": comparison["param"][0], "worst": comparison["param"][1]},
        "dtype": comparison["dtype"],
        "numbers_ok": is_within_tolerance(comparison),
        "memory_bytes": None,
        "unsteady": comparison.get("unsteady", []),
        "dropout": "left out" if comparison["dropout"] else "none",
    }


def check_order(plan: Plan, graph: Graph, recorded: Iterable[Sequence[Any]], micro_batches: int = 1) -> dict[str, Any]:
    """Report whether a run issued and awaited its collectives as scheduled, and the first difference."""
    events = [Event(*row) for row in recorded]
    difference = first_difference(
        schedule_events(plan, graph, micro_batches=micro_batches), events, (c.prefix for c in graph.calls())
    )
    return {"ok": not difference, "events": len(events), "difference": difference}


def same_traffic(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> bool:
    """Return whether kinds, counts and bytes are equal in every phase."""
    phases = {*predicted, *measured}
    return all(_nonzero_rows(predicted.get(p, {})) == _nonzero_rows(measured.get(p, {})) for p in phases)


def _nonzero_rows(kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: dict(row) for kind, row in kinds.items() if row["count"]}


def _run_all(plans: list[Plan]) -> list[dict[str, Any]]:
    return [compare_with_fallback(plan) for plan in plans]


def compare_with_fallback(plan: Plan) -> dict[str, Any]:
    """Compare in float32; if rounding may explain the difference (batch norms amplify it), let float64 decide.

    Weights whose gradients are rounding errors even in float64 are left out, if they are few, and named in the report.
    """
    comparison = compare_step(plan, "float32")
    if is_within_tolerance(comparison):
        return comparison

    def compare_exactly() -> dict[str, Any]:
        exact = compare_step(plan, "float64")
        unsteady = frozenset[str]() if is_within_tolerance(exact) else _find_unsteady(plan)
        return {**compare_step(plan, "float64", unsteady), "unsteady": sorted(unsteady)} if unsteady else exact

    exact = run_in_float64(compare_exactly)
    if exact is None:
        return comparison
    # What was sent is that of the plan's own dtype.
    sent = {key: comparison[key] for key in ("collectives", "by_axis", "exchanges", "events")}
    return {**exact, **sent, "float32": comparison}


def run_in_float64(compare: Callable[[], T]) -> T | None:
    """Return what `compare` finds where every float is a float64; None if the model's code takes another path there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # for tensors that forward makes
    try:
        with Float64Casts():
            return compare()
    except PlanMismatch:
        return None
    finally:
        torch.set_default_dtype(before)


def is_within_tolerance(comparison: Mapping[str, Any]) -> bool:
    """Return whether losses, gradients and parameters are equal up to `TOLERANCE`."""
    single, parallel = comparison["loss"]
    alike = are_close(single, parallel) and are_close(*comparison["next_loss"])
    return bool(alike and comparison["grad"][0] <= TOLERANCE and comparison["param"][0] <= TOLERANCE)


def are_close(single: float, parallel: float) -> bool:
    """Return whether two losses are equal up to `TOLERANCE`."""
    return abs(single - parallel) <= TOLERANCE * max(1.0, abs(single))


def _run_single_process(plan: Plan, dtype: str, nudge: float = 0.0) -> tuple[nn.Module, torch.Tensor, WithoutDropout]:
    """Run a step in one process: the model with its gradients, the loss, and a record of dropout.

    Each weight is first changed by a random share of the order of `nudge`.
    """
    model, parsed = build_whole_model(plan.model.config, dtype, SEED)
    if nudge:
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + nudge * torch.randn(param.shape, generator=generator))
    inputs = make_example_inputs(model, parsed, replace(plan.workload, dtype=dtype), SEED)
    chance = WithoutDropout()
    # a model that draws numbers draws those of the plan's first step
    with seed_generators(unit_seed(0, 0), torch.device("cpu")), chance:
        loss = single_process_loss(model, inputs)
        loss.backward()
    return model, loss, chance


def _find_unsteady(plan: Plan) -> frozenset[str]:
    """Find weights whose gradients are rounding errors even in float64: a change of all weights by `NUDGE` moves them.

    Returns an empty set if they are more than `MAX_UNSTEADY_SHARE`.
    """
    grads, moved = (
        {n: p.grad for n, p in _run_single_process(plan, "float64", nudge)[0].named_parameters() if p.grad is not None}
        for nudge in (0.0, NUDGE)
    )
    floor = RELATIVE_FLOOR * max(map(max_abs, grads.values()))
    unsteady = [n for n in grads if n in moved and max_error({n: moved[n]}, {n: grads[n]}, floor)[0] > TOLERANCE / 10]
    return frozenset(unsteady if len(unsteady) <= MAX_UNSTEADY_SHARE * len(grads) else ())


def compare_step(plan: Plan, dtype: str, unsteady: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return this rank's errors between a step under the plan and one in a single process, without those of `unsteady` weights."""
    mesh = init_device_mesh("cpu", plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    workload, config = replace(plan.workload, dtype=dtype), plan.model.config
    whole, single, chance = _run_single_process(plan, dtype)
    model, parsed = build_whole_model(config, dtype, SEED)
    # Made a second time, since the forward of one process may have written into the first ones.
    inputs = make_example_inputs(model, parsed, workload, SEED)
    turned = reverse_samples(inputs)
    plan = replace(plan, workload=workload)
    model.__dict__["forward"] = chance.wrap(model.forward)
    parallel = Parallel(with_planned_loss(model, plan.model), plan, mesh)
    model.__dict__["forward"] = parallel.forward
    trace = Trace()
    parallel.engine.trace(trace)
    with parallel.engine.count_collectives(mesh) as counted:
        loss = _parallel_loss(parallel, inputs)
        counted.phase = "backward"
        loss.backward()
        measured = {n: p.grad for n, p in model.named_parameters()}
        counted.phase = "optimizer"
        adamw_step(model, workload.offload)
    parallel.engine.trace(None)
    weights = parallel.engine.weights
    grads = {n: parallel.full(w, measured[n]) for n, w in weights.items() if measured[n] is not None}
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    grads, wanted = _leave_out(grads, unsteady), _leave_out(wanted, unsteady)
    top = max(map(max_abs, wanted.values()))
    # gradients of zero would be equal whatever the plan does: float64 has smaller ones
    gradient = max_error(grads, wanted, RELATIVE_FLOOR * top) if top else (float("inf"), "every gradient is zero")
    adamw_step(whole)
    parallel.gather_buffers()  # running statistics are judged with the parameters
    after = {n: parallel.full(w) for n, w in weights.items()} | float_buffers(model)
    single_after = {n: p.detach() for n, p in whole.named_parameters()} | float_buffers(whole)
    param = max_error(_leave_out(after, unsteady), _leave_out(single_after, unsteady), LEARNING_RATE)
    return {
        "dtype": dtype,
        "loss": (float(single.detach()), float(loss.detach())),
        "grad": gradient,
        "param": param,
        "next_loss": _next_losses(whole, parallel, turned, chance),
        "collectives": counted.table(),
        "by_axis": rows_to_json(counted.rows),
        "exchanges": counted.exchanges,
        "dropout": chance.dropped,
        "events": trace.rows(),
    }


def reverse_samples(inputs: Any) -> Any:
    """Copy a batch with its samples in reverse order."""
    return map_sample_leaves(pytree.tree_map_only(torch.Tensor, torch.clone, inputs), lambda x: x.flip(0))


def _parallel_loss(parallel: Parallel, inputs: Any) -> torch.Tensor:
    """Compute the loss of one forward pass, called as a training loop does: with this rank's samples, returning all outputs."""
    return extract_loss(call_as_in_a_loop(parallel, inputs, dist.get_rank()))


def _next_losses(whole: nn.Module, parallel: Parallel, inputs: Any, chance: WithoutDropout) -> tuple[float, float]:
    """Return the losses of a second batch in one process and under the plan; zeros if the plan does not cover it, which a run reports."""
    inputs_of_plan = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
    try:
        loss = _parallel_loss(parallel, inputs_of_plan)
    except PlanMismatch:
        return 0.0, 0.0
    with seed_generators(unit_seed(0, 1), torch.device("cpu")), chance:
        return float(single_process_loss(whole, inputs).detach()), float(loss.detach())


def _leave_out(tensors: Mapping[str, torch.Tensor], left_out: frozenset[str]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n not in left_out}


def float_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers of a model."""
    return {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def adamw_step(model: nn.Module, offload: bool = False) -> None:
    """Make one step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS, foreach=True)
    (HostStates(optimizer) if offload else optimizer).step()


def max_abs(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor (a table of zero register tokens)."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def max_error(
    values: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float
) -> tuple[float, str]:
    """Return the largest error, relative to each tensor's largest entry or to `floor`, and the tensor's name.

    A missing tensor is an infinite error.
    """
    worst = (0.0, "")
    for name in {*values, *wanted}:
        if name not in values or name not in wanted:
            return float("inf"), name
        error = max_abs(values[name] - wanted[name]) / max(max_abs(wanted[name]), floor)
        if not error <= worst[0]:  # NaN too
            worst = (error, name)
    return worst
