"""Check that a plan computes what one process computes: the loss, every gradient, every parameter after a step of AdamW, and then the
loss of another batch, since values of the first may have been kept."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from planner_core.core import Graph, Plan, VerificationFailed
from planner_core.cost import Event, scheduled
from planner_core.runtime import (
    HostStates,
    Parallel,
    PlanMismatch,
    Trace,
    all_to_all_wire_bytes,
    collective_table,
    map_sample_leaves,
    seed_generators,
    unit_seed,
)
from planner_core.runtime.training import with_planned_loss
from planner_core.verification.build_models import (
    DropNothing,
    Widened,
    called_as_in_a_loop,
    example_inputs,
    loss_of,
    single_loss,
    whole_model,
)
from planner_core.verification.processes import run_ranks
from planner_core.verification.schedule import difference

TOLERANCE = 1e-5
FLOOR = 1e-3
"""The errors of gradients that are far below the largest gradient (key biases, which softmax ignores) are taken relative to this
share of the largest one."""
NUDGE = 1e-13
"""A change of weights, as a share of each. A gradient that moves by a tenth of `TOLERANCE` then magnifies it ten million times."""
MOST_UNSTEADY = 0.1
"""At most this share of all weights is left out, since their gradients are rounding alone."""
LEARNING_RATE = 1e-3
ADAM_EPS = 1e-2  # large, so that the rounding of a gradient that is nearly zero does not decide its step


def verify_numbers(
    plan: Plan, *, graph: Graph | None = None, timeout_s: float = 300.0, seed: int = 0
) -> dict[str, Any]:
    """Run a plan (of few ranks and a small model) on gloo; the report of docs/CONTRACT.md, all but memory.

    `graph` is that of the plan's model; with it the order of the collectives is held against the schedule. Raises
    VerificationFailed if a rank fails or hangs.
    """
    return verify_all([plan], graphs=[graph], timeout_s=timeout_s, seed=seed)[0]


def verify_all(
    plans: list[Plan], *, graphs: Sequence[Graph | None] | None = None, timeout_s: float = 300.0, seed: int = 0
) -> list[dict[str, Any]]:
    """Reports of several plans for the same number of ranks, run by the same processes."""
    ranks = plans[0].mesh.num_devices
    found = run_ranks(_run_all, ranks, (plans, seed), timeout_s=timeout_s)
    joined = [over_ranks(rows, p.mesh.axis_sizes) for rows, p in zip(zip(*found, strict=True), plans, strict=True)]
    return [report(p, rows, g) for p, rows, g in zip(plans, joined, graphs or [None] * len(plans), strict=True)]


def over_ranks(found: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """The results of rank 0, with the mean over all ranks of the bytes that each all_to_all sent.

    How much one rank sends to experts depends on the router, and what all ranks send together does not.
    """
    first = found[0]
    rows = {(phase, kind, axis): list(amounts) for phase, kind, axis, *amounts in first["by_axis"]}
    calls = [
        sorted(f["exchanges"], key=lambda call: call[:2]) for f in found
    ]  # the ranks of an axis issue them in one order
    if any([c[:2] for c in own] != [c[:2] for c in calls[0]] for own in calls):
        raise VerificationFailed("the ranks issued different all_to_alls")
    for same in zip(*calls, strict=True):
        (phase, axis, mine), n = same[0], sizes[same[0][1]]
        mean = sum(c[2] for c in same) // len(same)
        row = rows[phase, "all_to_all", axis]
        row[1] += mean - mine
        row[2] += all_to_all_wire_bytes(mean, n) - all_to_all_wire_bytes(mine, n)
    return {**first, "collectives": collective_table(rows), "by_axis": [[*key, *row] for key, row in rows.items()]}


def report(plan: Plan, found: Mapping[str, Any], graph: Graph | None = None) -> dict[str, Any]:
    """Compare what was measured with the plan and with one process."""
    predicted, measured = plan.cost.collectives(), found["collectives"]
    single, parallel = found["loss"]
    good = within(found)
    order = None if graph is None else order_of(plan, graph, found["events"])
    return {
        "ok": bool(good and same_traffic(predicted, measured) and (order is None or order["ok"])),
        "ranks": plan.mesh.num_devices,
        "backend": "gloo",
        "loss": {"single": single, "parallel": parallel, "abs_error": abs(single - parallel)},
        "next_loss": dict(zip(("single", "parallel"), found["next_loss"], strict=True)),
        "grad": {"max_rel_error": found["grad"][0], "worst": found["grad"][1]},
        "param": {"max_rel_error": found["param"][0], "worst": found["param"][1]},
        "dtype": found["dtype"],
        "numbers_ok": good,
        "collectives_ok": same_traffic(predicted, measured),
        "collectives": {"predicted": predicted, "measured": measured},
        "by_axis": found["by_axis"],
        "memory_bytes": None,
        "unsteady": found.get("unsteady", []),
        "dropout": "left out" if found["dropout"] else "none",
        "order": order,
    }


def order_of(plan: Plan, graph: Graph, recorded: Iterable[Sequence[Any]], micro_batches: int = 1) -> dict[str, Any]:
    """Whether the run issued its collectives, and waited for them, as the schedule says; and the first place where it did not."""
    events = [Event(*row) for row in recorded]
    found = difference(scheduled(plan, graph, micro_batches=micro_batches), events, (c.prefix for c in graph.calls()))
    return {"ok": not found, "events": len(events), "difference": found}


def same_traffic(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> bool:
    """Kinds, counts and bytes are equal in every phase."""
    phases = {*predicted, *measured}
    return all(_used(predicted.get(p, {})) == _used(measured.get(p, {})) for p in phases)


def _used(kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: dict(row) for kind, row in kinds.items() if row["count"]}


def _run_all(plans: list[Plan], seed: int) -> list[dict[str, Any]]:
    return [judge(plan, seed) for plan in plans]


def judge(plan: Plan, seed: int = 0) -> dict[str, Any]:
    """`compare` in float32. If rounding alone may be the difference (batch norms amplify it), float64 decides. Weights whose gradients
    are rounding even there are left out, if they are few, and named."""
    found = compare(plan, seed, "float32")
    if within(found):
        return found
    try:
        with default_dtype(torch.float64), Widened():  # the former of tensors that forward makes
            exact = compare(plan, seed, "float64")
            unsteady = frozenset[str]() if within(exact) else _unsteady(plan, seed)
            if unsteady:
                exact = {**compare(plan, seed, "float64", unsteady), "unsteady": sorted(unsteady)}
    except PlanMismatch:  # the model's code takes another way in float64
        return found
    return {
        **exact,
        "collectives": found["collectives"],
        "by_axis": found["by_axis"],
        "exchanges": found["exchanges"],
        "events": found["events"],
        "float32": found,
    }


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors that are made have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def within(found: Mapping[str, Any]) -> bool:
    """Whether loss, gradients and parameters are equal up to `TOLERANCE`."""
    single, parallel = found["loss"]
    alike = close(single, parallel) and close(*found["next_loss"])
    return bool(alike and found["grad"][0] <= TOLERANCE and found["param"][0] <= TOLERANCE)


def close(single: float, parallel: float) -> bool:
    """Whether two losses are equal up to `TOLERANCE`."""
    return abs(single - parallel) <= TOLERANCE * max(1.0, abs(single))


def _alone(plan: Plan, seed: int, dtype: str, nudge: float = 0.0) -> tuple[nn.Module, torch.Tensor, DropNothing]:
    """A step in one process: the model with its gradients, the loss, and whether it would drop. Weights are changed by `nudge` of their
    size, up or down."""
    model, parsed = whole_model(plan.model["config"], dtype, seed)
    if nudge:
        made = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + nudge * torch.randn(param.shape, generator=made))
    inputs = example_inputs(model, parsed, {**plan.workload, "dtype": dtype}, seed)
    chance = DropNothing()
    # a model that draws numbers draws those of the plan's first step
    with seed_generators(unit_seed(0, 0), torch.device("cpu")), chance:
        loss = single_loss(model, inputs)
        loss.backward()
    return model, loss, chance


def _unsteady(plan: Plan, seed: int) -> frozenset[str]:
    """The weights whose gradients are rounding even in float64, since a change of all weights by `NUDGE` moves them. None if they are
    many."""
    grads, moved = (
        {n: p.grad for n, p in _alone(plan, seed, "float64", nudge)[0].named_parameters() if p.grad is not None}
        for nudge in (0.0, NUDGE)
    )
    floor = FLOOR * max(map(largest, grads.values()))
    found = [n for n in grads if n in moved and worst({n: moved[n]}, {n: grads[n]}, floor)[0] > TOLERANCE / 10]
    return frozenset(found if len(found) <= MOST_UNSTEADY * len(grads) else ())


def compare(plan: Plan, seed: int, dtype: str, unsteady: frozenset[str] = frozenset()) -> dict[str, Any]:
    """On this rank: the errors between one step under the plan and one step in a single process; those of `unsteady` weights do not
    count."""
    mesh = init_device_mesh("cpu", plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    workload, config = plan.workload, plan.model["config"]
    whole, single, chance = _alone(plan, seed, dtype)
    model, parsed = whole_model(config, dtype, seed)
    inputs = example_inputs(model, parsed, {**workload, "dtype": dtype}, seed)  # forward may have written into them
    turned = turned_samples(inputs)
    plan = replace(plan, workload={**workload, "dtype": dtype, "gradient_dtype": dtype})
    model.__dict__["forward"] = chance.around(model.forward)
    parallel = Parallel(with_planned_loss(model, plan.model), plan, mesh)
    model.__dict__["forward"] = parallel.forward
    trace = Trace()
    parallel.engine.trace(trace)
    with parallel.engine.count_collectives(mesh) as counted:
        loss = _loss(parallel, inputs)
        counted.phase = "backward"
        loss.backward()
        measured = {n: p.grad for n, p in model.named_parameters()}
        counted.phase = "optimizer"
        adamw_step(model, bool(workload.get("offload")))
    parallel.engine.trace(None)
    weights = parallel.engine.weights
    grads = {n: parallel.full(w, measured[n]) for n, w in weights.items() if measured[n] is not None}
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    grads, wanted = _but(grads, unsteady), _but(wanted, unsteady)
    top = max(map(largest, wanted.values()))
    # gradients of zero would be equal whatever the plan does: float64 has smaller ones
    gradient = worst(grads, wanted, FLOOR * top) if top else (float("inf"), "every gradient is zero")
    adamw_step(whole)
    parallel.gather_buffers()  # running statistics are judged with the parameters
    after = {n: parallel.full(w) for n, w in weights.items()} | statistics_of(model)
    single_after = {n: p.detach() for n, p in whole.named_parameters()} | statistics_of(whole)
    param = worst(_but(after, unsteady), _but(single_after, unsteady), LEARNING_RATE)
    return {
        "dtype": dtype,
        "loss": (float(single.detach()), float(loss.detach())),
        "grad": gradient,
        "param": param,
        "next_loss": _next_loss(whole, parallel, turned, chance),
        "collectives": counted.table(),
        "by_axis": [[*key, *row] for key, row in sorted(counted.rows.items())],
        "exchanges": counted.exchanges,
        "dropout": chance.seen,
        "events": [[e.what, e.kind, e.axis, e.num_bytes, e.packed] for e in trace.events],
    }


def turned_samples(inputs: Any) -> Any:
    """A copy of the same samples, the last one first."""
    return map_sample_leaves(pytree.tree_map_only(torch.Tensor, torch.clone, inputs), lambda x: x.flip(0))


def _loss(parallel: Parallel, inputs: Any) -> torch.Tensor:
    """The loss of one forward pass, called as a training loop calls it: with this rank's own samples, and with all that the model
    returns."""
    return loss_of(called_as_in_a_loop(parallel, inputs, dist.get_rank()))


def _next_loss(whole: nn.Module, parallel: Parallel, inputs: Any, chance: DropNothing) -> tuple[float, float]:
    """The losses of another batch, in one process and under the plan; zeros if it needs another plan, which a run says."""
    own = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
    try:
        loss = _loss(parallel, own)
    except PlanMismatch:
        return 0.0, 0.0
    with seed_generators(unit_seed(0, 1), torch.device("cpu")), chance:
        return float(single_loss(whole, inputs).detach()), float(loss.detach())


def _but(tensors: Mapping[str, torch.Tensor], left_out: frozenset[str]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n not in left_out}


def statistics_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of real numbers."""
    return {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def adamw_step(model: nn.Module, offload: bool = False) -> None:
    """One step of AdamW."""
    made = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)
    (HostStates(made) if offload else made).step()


def largest(tensor: torch.Tensor) -> float:
    """The largest size of an entry; 0 of a tensor that has none (a table of no register tokens)."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def worst(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float) -> tuple[float, str]:
    """The largest error, relative to each tensor's largest entry (or to `floor`), and the tensor's name. If a tensor is missing, the
    error is infinite."""
    worst = (0.0, "")
    for name in {*found, *wanted}:
        if name not in found or name not in wanted:
            return float("inf"), name
        error = largest(found[name] - wanted[name]) / max(largest(wanted[name]), floor)
        if not error <= worst[0]:  # NaN too
            worst = (error, name)
    return worst
