"""Check that a plan with stages computes what one process computes over the same micro-batches, and that each rank issues what was
predicted: the passes of its stages in order, the collectives of each, and the messages between stages."""

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

from planner_core.core import Graph, Plan, plan_from_json, plan_to_json
from planner_core.cost import Event, RankWork, ranks_work
from planner_core.runtime import (
    CountCollectives,
    PlanMismatch,
    StagedParallel,
    Trace,
    collective_table,
    map_marked_leaves,
    mesh_of,
    seed_generators,
    unit_seed,
)
from planner_core.runtime.training import position_along, with_planned_loss
from planner_core.verification.build_models import (
    ARGS,
    DropNothing,
    Widened,
    example_inputs,
    own_call,
    single_loss,
    whole_model,
)
from planner_core.verification.numerics import (
    FLOOR,
    LEARNING_RATE,
    adamw_step,
    default_dtype,
    largest,
    same_traffic,
    statistics_of,
    turned_samples,
    within,
    worst,
)
from planner_core.verification.processes import run_ranks
from planner_core.verification.schedule import difference

GREETING_BYTES = 4
"""torch's stages agree on how to begin by messages of one number, in the first step alone."""
OUTSIDE = -1
"""The number of the axis of a collective that runs between stages."""


@dataclass
class Record:
    """What one rank did in a step. `passes`: (forward, stage, micro-batch, number of events before it)."""

    trace: Trace = field(default_factory=Trace)
    passes: list[tuple[bool, int, int, int]] = field(default_factory=list)

    def data(self, counted: CountCollectives) -> dict[str, Any]:
        """Plain data."""
        inside = {key: row for key, row in counted.rows.items() if key[2] != OUTSIDE}
        events = [[e.what, e.kind, e.axis, e.num_bytes, e.packed] for e in self.trace.events]
        return {
            "collectives": collective_table(inside),
            "by_axis": [[*key, *row] for key, row in sorted(inside.items())],
            "summed": [row[1] for key, row in counted.rows.items() if key[2] == OUTSIDE],
            "sent": counted.sent,
            "received": counted.received,
            "passes": self.passes,
            "events": events,
        }


@contextmanager
def recorded(parallel: StagedParallel, counted: CountCollectives) -> Iterator[Record]:
    """Inside, what a rank does is noted."""
    record = Record()

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


def rank_reports(plan: Plan, graph: Graph, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was predicted and measured of one GPU of each rank of the pipeline. `found`: the records of these GPUs, in order."""
    every = ranks_work(plan, graph)
    arriving = [[p.sends for w in every for p in w.passes if p.to == rank] for rank in range(len(every))]
    rows = []
    for rank, (work, record) in enumerate(zip(every, found, strict=True)):
        measured = record["collectives"]
        predicted_messages = {
            "sent": [[p.to, size] for p in work.passes for size in p.sends],
            "received": sum(size for sizes in arriving[rank] for size in sizes),
            "summed": sorted(work.summed),
        }
        sent, received = ([m for m in record[key] if m[1] != GREETING_BYTES] for key in ("sent", "received"))
        measured_messages = {
            "sent": [list(m) for m in sent],
            "received": sum(size for _, size in received),
            "summed": sorted(record["summed"]),
        }
        order = _difference(work, record)
        same = same_traffic(work.collectives, measured)
        rows.append(
            {
                "rank": rank,
                "ok": same and not order and predicted_messages == measured_messages,
                "collectives": {"predicted": work.collectives, "measured": measured},
                "messages": {"predicted": _sums(predicted_messages), "measured": _sums(measured_messages)},
                "order": {"ok": not order, "events": len(record["events"]), "difference": order},
            }
        )
    return rows


def _sums(messages: Mapping[str, Any]) -> dict[str, int]:
    """Messages to other stages, their bytes, bytes from them, and bytes of gradients that are summed with theirs."""
    sizes = [size for _, size in messages["sent"]]
    return {
        "sent": len(sizes),
        "sent_bytes": sum(sizes),
        "received_bytes": messages["received"],
        "summed_bytes": sum(messages["summed"]),
    }


def _difference(work: RankWork, record: Mapping[str, Any]) -> str:
    """The first difference between a rank's step and what was predicted; empty if there is none."""
    wanted = [p.key for p in work.passes]
    passes = [tuple(p[:3]) for p in record["passes"]]
    if wanted != passes:
        at = next(
            (i for i, (a, b) in enumerate(zip(wanted, passes, strict=False)) if a != b), min(len(wanted), len(passes))
        )
        return f"pass {at} is {_named(passes[at : at + 1])}, and {_named(wanted[at : at + 1])} was scheduled"
    starts = [p[3] for p in record["passes"]]
    for scheduled, begin, end in zip(work.passes, starts, [*starts[1:], None], strict=True):
        events = [Event(*row) for row in record["events"][begin:end]]
        if found := difference(scheduled.events, events, work.copies):
            return f"{_named([scheduled.key])}: {found}"
    return ""


def _named(passes: Sequence[Any]) -> str:
    return next((f"{'forward' if f else 'backward'} of micro-batch {k} in stage {s}" for f, s, k in passes), "nothing")


# --- numbers ------------------------------------------------------------------------------------------


def verify_stages(plan: Plan, graph: Graph, *, timeout_s: float = 300.0, seed: int = 0) -> dict[str, Any]:
    """Run a plan with stages (of few ranks and a small model) on gloo; the report of docs/CONTRACT.md, all but memory."""
    found = run_ranks(_judge, plan.num_gpus, (plan_to_json(plan), seed), timeout_s=timeout_s)
    first = found[0]
    per_rank = rank_reports(plan, graph, [found[r]["record"] for r in range(0, plan.num_gpus, plan.mesh.num_devices)])
    single, parallel = first["loss"]
    good = within(first)
    return {
        "ok": bool(good and all(row["ok"] for row in per_rank)),
        "ranks": plan.num_gpus,
        "backend": "gloo",
        "loss": {"single": single, "parallel": parallel, "abs_error": abs(single - parallel)},
        "next_loss": dict(zip(("single", "parallel"), first["next_loss"], strict=True)),
        "grad": {"max_rel_error": first["grad"][0], "worst": first["grad"][1]},
        "param": {"max_rel_error": first["param"][0], "worst": first["param"][1]},
        "dtype": first["dtype"],
        "numbers_ok": good,
        **summary(plan, per_rank),
        "memory_bytes": None,
        "unsteady": [],
        "dropout": "left out" if first["dropout"] else "none",
        "stages": per_rank,
    }


def summary(plan: Plan, per_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a report says of all ranks: the collectives of the one that works longest, which are the plan's, and whether all keep the
    order."""
    predicted = plan.cost.collectives()
    busiest = next((r for r in per_rank if r["collectives"]["predicted"] == predicted), per_rank[0])
    wrong = next((f"rank {r['rank']}: {r['order']['difference']}" for r in per_rank if not r["order"]["ok"]), "")
    return {
        "collectives": busiest["collectives"],
        "collectives_ok": all(_same(r) for r in per_rank),
        "order": {"ok": not wrong, "events": sum(r["order"]["events"] for r in per_rank), "difference": wrong},
    }


def _same(row: Mapping[str, Any]) -> bool:
    messages = row["messages"]
    return same_traffic(row["collectives"]["predicted"], row["collectives"]["measured"]) and (
        messages["predicted"] == messages["measured"]
    )


def _judge(plan: dict[str, Any], seed: int) -> dict[str, Any]:
    """`compare` in float32; if rounding alone may be the difference, float64 decides. All ranks find the same."""
    found = compare(plan_from_json(plan), seed, "float32")
    if within(found):
        return found
    try:
        with default_dtype(torch.float64), Widened():
            exact = compare(plan_from_json(plan), seed, "float64")
    except PlanMismatch:  # the model's code takes another way in float64
        return found
    return {**exact, "record": found["record"]}


def compare(plan: Plan, seed: int, dtype: str) -> dict[str, Any]:
    """The errors between one step under the plan and the same micro-batches in one process, over all ranks."""
    config, chance = plan.model["config"], DropNothing()
    model, parsed = whole_model(config, dtype, seed)
    plan = replace(plan, workload={**plan.workload, "dtype": dtype, "gradient_dtype": dtype})
    model.__dict__["forward"] = chance.around(model.forward)
    parallel = StagedParallel(with_planned_loss(model, plan.model), plan, mesh_of(plan, "cpu"))
    inputs = _of_a_step(parallel, example_inputs(model, parsed, dict(plan.workload), seed))
    turned = turned_samples(inputs)
    counted = parallel.engine.count_collectives(parallel.mesh)
    with recorded(parallel, counted) as record:
        args, kwargs, batches = _calls(parallel, inputs)
        loss = parallel.step(*args, **kwargs)
    weights = parallel.engine.weights
    grads = {n: parallel.full(w, w.parameter.grad) for n, w in weights.items() if w.parameter.grad is not None}
    adamw_step(model)
    parallel.gather_buffers()
    after = {n: parallel.full(w) for n, w in weights.items()} | _own_statistics(parallel)
    for trained in model.parameters():
        trained.grad = None
    args, kwargs, next_batches = _calls(parallel, turned)
    next_loss = parallel.step(*args, **kwargs)
    global_batch = whole_model(config, dtype, seed)[0]
    single = _alone(global_batch, batches, chance)
    wanted = {n: p.grad for n, p in global_batch.named_parameters() if p.grad is not None}
    top = max(map(largest, wanted.values()))
    gradient = _worst_of_all(grads, wanted, FLOOR * top) if top else (float("inf"), "every gradient is zero")
    adamw_step(global_batch)
    single_after = {n: p.detach() for n, p in global_batch.named_parameters()} | statistics_of(global_batch)
    global_batch.zero_grad()
    param = _worst_of_all(after, single_after, LEARNING_RATE, statistics_of(global_batch))
    losses = _gathered((None if loss is None else float(loss), None if next_loss is None else float(next_loss)))
    seen, seen_next = (next(one[i] for one in losses if one[i] is not None) for i in range(2))
    return {
        "dtype": dtype,
        "loss": (single, seen),
        "next_loss": (_alone(global_batch, next_batches, chance), seen_next),
        "grad": gradient,
        "param": param,
        "dropout": chance.seen,
        "record": record.data(counted),
    }


def _alone(global_batch: nn.Module, batches: Sequence[Any], chance: DropNothing) -> float:
    """The loss of one process that accumulates gradients over micro-batches."""
    total = 0.0
    for batch in batches:
        with seed_generators(unit_seed(0, 0), torch.device("cpu")), chance:
            loss = single_loss(global_batch, batch) / len(batches)
            loss.backward()
        total += float(loss.detach())
    return total


def _gathered(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _worst_of_all(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float, free: Mapping[str, Any] = {}
) -> tuple[float, str]:
    """The largest error over all ranks, each of which has some of the tensors. One that no rank has is missing, but for `free` ones."""
    mine = worst(found, {n: t for n, t in wanted.items() if n in found}, floor)
    every = _gathered((mine, list(found)))
    names = {n for _, own in every for n in own}
    if missing := next((n for n in wanted if n not in names and n not in free), ""):
        return float("inf"), missing
    return max((tuple(one) for one, _ in every), key=lambda one: one[0])


def _own_statistics(parallel: StagedParallel) -> dict[str, torch.Tensor]:
    """The running statistics that this rank's stages write."""
    used = {b.buffer for ready in parallel.programs.values() for unit in ready.program.units for b in unit.buffers}
    return {n: b for n, b in statistics_of(parallel.model).items() if n in used}


# --- samples ------------------------------------------------------------------------------------------


def _of_a_step(parallel: StagedParallel, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Example inputs as those of a whole step: a user's own code gives those of one micro-batch."""
    if "callable" not in (parallel.plan.model["config"] or {}):
        return inputs
    return _each(parallel, inputs, lambda x: torch.cat([x] * parallel.micro_batches))


def _each(parallel: StagedParallel, inputs: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """The same inputs with other samples."""
    args, kwargs = tuple(inputs.get(ARGS, ())), {k: v for k, v in inputs.items() if k != ARGS}
    held = parallel.planned.sample_leaves(args, kwargs, global_batch=True)
    args, kwargs = map_marked_leaves((args, kwargs), held, change)
    return {ARGS: args, **kwargs} if args else kwargs


def _calls(parallel: StagedParallel, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """A step's call on this rank, with its own samples if that can be; and the same micro-batches for one process."""
    num, own = parallel.micro_batches, own_call(parallel, inputs, dist.get_rank()) is not None
    places = position_along(parallel.mesh.shape, parallel.data_axes, dist.get_rank())[1] if own else 1

    def part(number: int) -> Any:
        return lambda x: torch.cat([mine.chunk(num)[number] for mine in x.chunk(places)])

    batches = [pytree.tree_map_only(torch.Tensor, torch.clone, _each(parallel, inputs, part(k))) for k in range(num)]
    return (*step_call(parallel, inputs), batches)


def step_call(parallel: StagedParallel, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step's call on this rank: with its own samples, or with all where a loop has to give them."""
    own = own_call(parallel, inputs, dist.get_rank())
    if own:
        return own
    args, kwargs = tuple(inputs.get(ARGS, ())), {k: v for k, v in inputs.items() if k != ARGS}
    return args, {**kwargs, "global_batch": True}
