"""Check that a plan with stages computes what one process computes over the same micro-batches, and that each rank does what was
predicted: the passes of its stages in order, their collectives, and the messages between stages."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import Graph, Plan
from planner_core.cost import Event, RankWork, schedule_ranks
from planner_core.cost.communication import gpus_of_ranks
from planner_core.runtime import (
    CountCollectives,
    StagedParallel,
    Trace,
    collective_table,
    map_marked_leaves,
    mesh_of,
    rows_to_json,
    seed_generators,
    unit_seed,
)
from planner_core.runtime.training import join_arguments, position_along, split_arguments, with_planned_loss
from planner_core.verification.build_models import (
    SEED,
    Arguments,
    WithoutDropout,
    build_whole_model,
    loop_arguments,
    make_example_inputs,
    rank_call,
    single_process_loss,
)
from planner_core.verification.numerics import (
    LEARNING_RATE,
    RELATIVE_FLOOR,
    adamw_step,
    average_over_ranks,
    float_buffers,
    is_within_tolerance,
    max_abs,
    max_error,
    report_numbers,
    reverse_samples,
    run_in_float64,
    same_traffic,
)
from planner_core.verification.processes import run_ranks
from planner_core.verification.schedule import first_difference

HANDSHAKE_BYTES = 4
"""torch's stages exchange messages of one number before their first step. They are not counted."""


@dataclass
class StageRecord:
    """What one rank did in a step. `passes`: (forward, stage, micro-batch, number of events before it)."""

    trace: Trace = field(default_factory=Trace)
    passes: list[tuple[bool, int, int, int]] = field(default_factory=list)

    def data(self, counted: CountCollectives) -> dict[str, Any]:
        """Return the record and the counts as plain data."""
        # A collective between stages is along none of the axes of a stage's mesh.
        inside = {key: row for key, row in counted.rows.items() if key[2]}
        return {
            "collectives": collective_table(inside),
            "by_axis": rows_to_json(inside),
            "exchanges": [call for call in counted.exchanges if call[1]],
            "summed": [row[1] for key, row in counted.rows.items() if not key[2]],
            "sent": counted.sent,
            "received": counted.received,
            "passes": self.passes,
            "events": self.trace.rows(),
        }


@contextmanager
def record_step(parallel: StagedParallel, counted: CountCollectives) -> Iterator[StageRecord]:
    """Record what a rank does while entered."""
    record = StageRecord()

    def begins(forward: bool, stage: int, micro_batch: int) -> None:
        counted.phase = "forward" if forward else "backward"
        record.passes.append((forward, stage, micro_batch, len(record.trace.events)))

    before = parallel.on_pass
    parallel.on_pass = begins  # type: ignore[method-assign]
    parallel.engine.trace(record.trace)
    try:
        with counted:
            yield record
    finally:
        parallel.engine.trace(None)
        parallel.on_pass = before  # type: ignore[method-assign]


# --- what was predicted -------------------------------------------------------------------------------


def compare_ranks(plan: Plan, graph: Graph, measurements: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare predictions and records of one GPU of each rank of the pipeline. `measurements`: the records of these GPUs, in order."""
    every = schedule_ranks(plan, graph)
    arriving = [[p.sends for w in every for p in w.passes if p.to == rank] for rank in range(len(every))]
    rows = []
    for rank, (work, record) in enumerate(zip(every, measurements, strict=True)):
        measured = record["collectives"]
        predicted_messages = {
            "sent": [[p.to, size] for p in work.passes for size in p.sends],
            "received": sum(size for sizes in arriving[rank] for size in sizes),
            "summed": sorted(work.summed),
        }
        sent, received = ([m for m in record[key] if m[1] != HANDSHAKE_BYTES] for key in ("sent", "received"))
        measured_messages = {
            "sent": [list(m) for m in sent],
            "received": sum(size for _, size in received),
            "summed": sorted(record["summed"]),
        }
        order = _first_difference(work, record)
        same = same_traffic(work.collectives, measured)
        rows.append(
            {
                "rank": rank,
                "ok": same and not order and predicted_messages == measured_messages,
                "collectives": {"predicted": work.collectives, "measured": measured},
                "messages": {
                    "predicted": _sum_messages(predicted_messages),
                    "measured": _sum_messages(measured_messages),
                },
                "order": {"ok": not order, "events": len(record["events"]), "difference": order},
            }
        )
    return rows


def _sum_messages(messages: Mapping[str, Any]) -> dict[str, int]:
    """Sum the messages of a rank: those sent, their bytes, received bytes, and bytes of gradients summed between stages."""
    sizes = [size for _, size in messages["sent"]]
    return {
        "sent": len(sizes),
        "sent_bytes": sum(sizes),
        "received_bytes": messages["received"],
        "summed_bytes": sum(messages["summed"]),
    }


def _first_difference(work: RankWork, record: Mapping[str, Any]) -> str:
    """Describe the first difference between a rank's step and the prediction; empty if both are equal."""
    wanted = [p.key for p in work.passes]
    passes = [tuple(p[:3]) for p in record["passes"]]
    if wanted != passes:
        at = next(
            (i for i, (a, b) in enumerate(zip(wanted, passes, strict=False)) if a != b), min(len(wanted), len(passes))
        )
        return f"pass {at} is {_name_pass(passes[at : at + 1])}, and {_name_pass(wanted[at : at + 1])} was scheduled"
    starts = [p[3] for p in record["passes"]]
    for scheduled, begin, end in zip(work.passes, starts, [*starts[1:], None], strict=True):
        events = [Event(*row) for row in record["events"][begin:end]]
        if difference := first_difference(scheduled.events, events, work.copies):
            return f"{_name_pass([scheduled.key])}: {difference}"
    return ""


def _name_pass(passes: Sequence[Any]) -> str:
    return next((f"{'forward' if f else 'backward'} of micro-batch {k} in stage {s}" for f, s, k in passes), "nothing")


# --- numbers ------------------------------------------------------------------------------------------


def verify_stages(plan: Plan, graph: Graph, *, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run a plan with stages (of few ranks and a small model) on gloo, and return the report of docs/CONTRACT.md without memory."""
    comparisons = run_ranks(_compare_with_fallback, plan.num_gpus, (plan,), timeout_s=timeout_s)
    records = [[comparisons[int(gpu)]["record"] for gpu in gpus] for gpus in gpus_of_ranks(plan)]
    per_rank = compare_ranks(plan, graph, [average_over_ranks(r, plan.mesh.axis_sizes) for r in records])
    numbers = report_numbers(comparisons[0])
    return {
        **numbers,
        "ok": bool(numbers["numbers_ok"] and all(row["ok"] for row in per_rank)),
        "ranks": plan.num_gpus,
        **summarize_ranks(plan, per_rank),
        "stages": per_rank,
    }


def summarize_ranks(plan: Plan, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize all ranks: the collectives of the busiest one, which are the plan's, and whether all keep the order."""
    predicted = plan.cost.collectives()
    busiest = next((r for r in per_rank if r["collectives"]["predicted"] == predicted), per_rank[0])
    wrong = next((f"rank {r['rank']}: {r['order']['difference']}" for r in per_rank if not r["order"]["ok"]), "")
    return {
        "collectives": busiest["collectives"],
        "collectives_ok": all(_is_same(r) for r in per_rank),
        "order": {"ok": not wrong, "events": sum(r["order"]["events"] for r in per_rank), "difference": wrong},
    }


def _is_same(row: Mapping[str, Any]) -> bool:
    messages = row["messages"]
    return same_traffic(row["collectives"]["predicted"], row["collectives"]["measured"]) and (
        messages["predicted"] == messages["measured"]
    )


def _compare_with_fallback(plan: Plan) -> dict[str, Any]:
    """Compare in float32; if rounding may explain the difference, let float64 decide. All ranks get the same errors."""
    comparison = compare_step(plan, "float32")
    if is_within_tolerance(comparison):
        return comparison
    exact = run_in_float64(lambda: compare_step(plan, "float64"))
    return comparison if exact is None else {**exact, "record": comparison["record"]}


def compare_step(plan: Plan, dtype: str) -> dict[str, Any]:
    """Return the errors, over all ranks, between a step under the plan and the same micro-batches in one process."""
    config, chance = plan.model.config, WithoutDropout()
    model, parsed = build_whole_model(config, dtype, SEED)
    plan = replace(plan, workload=replace(plan.workload, dtype=dtype))
    model.__dict__["forward"] = chance.wrap(model.forward)
    parallel = StagedParallel(with_planned_loss(model, plan.model), plan, mesh_of(plan, "cpu"))
    inputs = _repeat_for_step(parallel, make_example_inputs(model, parsed, plan.workload, SEED))
    turned = reverse_samples(inputs)
    counted = parallel.engine.count_collectives(parallel.mesh)
    with record_step(parallel, counted) as record:
        args, kwargs, batches = _step_and_micro_batches(parallel, inputs)
        loss = parallel.step(*args, **kwargs)
    weights = parallel.engine.weights
    grads = {n: parallel.full(w, w.parameter.grad) for n, w in weights.items() if w.parameter.grad is not None}
    adamw_step(model)
    parallel.gather_buffers()
    after = {n: parallel.full(w) for n, w in weights.items()} | _stage_statistics(parallel)
    # The second step must not add to these gradients, which `grads` holds by now.
    for trained in model.parameters():
        trained.grad = None
    args, kwargs, next_batches = _step_and_micro_batches(parallel, turned)
    next_loss = parallel.step(*args, **kwargs)
    # By the same seed, so that it begins with the weights with which the stages began.
    global_batch = build_whole_model(config, dtype, SEED)[0]
    single = _single_process_loss(global_batch, batches, chance)
    wanted = {n: p.grad for n, p in global_batch.named_parameters() if p.grad is not None}
    top = max(map(max_abs, wanted.values()))
    gradient = (
        _max_error_over_ranks(grads, wanted, RELATIVE_FLOOR * top) if top else (float("inf"), "every gradient is zero")
    )
    adamw_step(global_batch)
    single_after = {n: p.detach() for n, p in global_batch.named_parameters()} | float_buffers(global_batch)
    global_batch.zero_grad()
    param = _max_error_over_ranks(after, single_after, LEARNING_RATE, float_buffers(global_batch))
    losses = _gather_objects((None if loss is None else float(loss), None if next_loss is None else float(next_loss)))
    seen, seen_next = (next(one[i] for one in losses if one[i] is not None) for i in range(2))
    return {
        "dtype": dtype,
        "loss": (single, seen),
        "next_loss": (_single_process_loss(global_batch, next_batches, chance), seen_next),
        "grad": gradient,
        "param": param,
        "dropout": chance.dropped,
        "record": record.data(counted),
    }


def _single_process_loss(global_batch: nn.Module, batches: Sequence[Any], chance: WithoutDropout) -> float:
    """Compute the loss of one process that accumulates gradients over micro-batches."""
    total = 0.0
    for batch in batches:
        with seed_generators(unit_seed(0, 0), torch.device("cpu")), chance:
            loss = single_process_loss(global_batch, batch) / len(batches)
            loss.backward()
        total += float(loss.detach())
    return total


def _gather_objects(of_this_rank: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, of_this_rank)
    return every


def _max_error_over_ranks(
    values: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float, free: Mapping[str, Any] = {}
) -> tuple[float, str]:
    """Return the largest error over all ranks, each of which holds some tensors. One that no rank holds is missing, except `free` ones."""
    # A weight of another stage is missing here, and no error. So each rank judges what it holds, and all of them see that nothing is left.
    error = max_error(values, {n: t for n, t in wanted.items() if n in values}, floor)
    every = _gather_objects((error, list(values)))
    names = {n for _, of_rank in every for n in of_rank}
    if missing := next((n for n in wanted if n not in names and n not in free), ""):
        return float("inf"), missing
    return max((tuple(one) for one, _ in every), key=lambda one: one[0])


def _stage_statistics(parallel: StagedParallel) -> dict[str, torch.Tensor]:
    """Return the running statistics that this rank's stages write."""
    used = {b.buffer for ready in parallel.programs.values() for unit in ready.program.units for b in unit.buffers}
    # copies, since the next step writes the buffers before they are compared
    return {n: b.clone() for n, b in float_buffers(parallel.model).items() if n in used}


# --- samples ------------------------------------------------------------------------------------------


def _repeat_for_step(parallel: StagedParallel, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Repeat example inputs for a whole step: a user's code returns those of one micro-batch."""
    if "callable" not in parallel.plan.model.config:
        return inputs
    return _map_samples(parallel, inputs, lambda x: torch.cat([x] * parallel.micro_batches))


def _map_samples(parallel: StagedParallel, inputs: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Apply a change to the samples of inputs."""
    args, kwargs = split_arguments(inputs)
    sample_leaves = parallel.planned.sample_leaves(args, kwargs, global_batch=True)
    return join_arguments(*map_marked_leaves((args, kwargs), sample_leaves, change))


def _step_and_micro_batches(
    parallel: StagedParallel, inputs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Return the arguments of a step on this rank, and the same micro-batches for one process."""
    num, rank = parallel.micro_batches, _rank_in_mesh(parallel)
    places = (
        position_along(parallel.mesh.shape, parallel.data_axes, rank)[1] if rank_call(parallel, inputs, rank) else 1
    )

    # A rank's samples lie together, and it cuts its part into micro-batches. Of 8 samples, 2 ranks and 2 micro-batches the first
    # one has 0, 1 of the first rank and 4, 5 of the second.
    def take_micro_batch(number: int) -> Any:
        return lambda x: torch.cat([part.chunk(num)[number] for part in x.chunk(places)])

    batches = [
        pytree.tree_map_only(torch.Tensor, torch.clone, _map_samples(parallel, inputs, take_micro_batch(k)))
        for k in range(num)
    ]
    return (*step_call(parallel, inputs), batches)


def step_call(parallel: StagedParallel, inputs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a step on this rank."""
    return loop_arguments(parallel, inputs, _rank_in_mesh(parallel))


def _rank_in_mesh(parallel: StagedParallel) -> int:
    return parallel.plan.pipeline_axis.rank_in_mesh(parallel.plan.mesh, dist.get_rank())
