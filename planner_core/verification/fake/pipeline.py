"""Measure a plan with stages at full size: one GPU of each rank of the pipeline, one after the other, on a fake process group of all ranks.

torch's own schedule runs, and what it sends goes nowhere. So the passes, the messages and the memory of a GPU are those of a run.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.utils import _pytree as pytree

from planner_core.core import Graph, Plan
from planner_core.cost import ops_at_the_ends, price_pipeline
from planner_core.cost.communication import gpus_of_ranks
from planner_core.ops import coarsen
from planner_core.runtime import StagedParallel, initializer, mesh_of, optimizer_for
from planner_core.runtime.program import fake_store
from planner_core.runtime.training import with_planned_loss
from planner_core.verification.build_models import SEED, build_model, make_example_inputs
from planner_core.verification.fake.group import model_as_run, report_memory
from planner_core.verification.fake.memory_tracker import MemoryTracker
from planner_core.verification.fake.program import counting_memory, running_on_meta
from planner_core.verification.processes import run_ranks
from planner_core.verification.stages import compare_ranks, record_step, step_call, summarize_ranks


def verify_fake_stages(
    plan: Plan, graph: Graph, *, timeout_s: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run one step of each rank of a plan with stages, and return the report of docs/CONTRACT.md without numerics.

    `progress` gets a sentence before each rank."""
    (measurements,) = run_ranks(_run_all_ranks, 1, (plan,), timeout_s=timeout_s, backend=None, progress=progress)
    cut = plan.pipeline
    assert cut is not None
    per_rank = compare_ranks(plan, graph, measurements)
    model = model_as_run(plan)
    # Operators save what they saved when they were captured, as in `group._memory_as_captured`.
    priced = price_pipeline(plan.blocks, graph, cut, model, ops_at_the_ends(coarsen(graph))).pipeline
    assert priced is not None
    for row, record in zip(per_rank, measurements, strict=True):
        predicted = priced.stages[cut.stages_of(row["rank"])[0]].peak_bytes
        row["memory_bytes"], fits = report_memory(predicted, record)
        row["ok"] = row["ok"] and fits
    worst = max(per_rank, key=lambda row: float(row["memory_bytes"]["rel_error"]))
    return {
        "ok": all(row["ok"] for row in per_rank),
        "ranks": plan.num_gpus,
        "backend": "fake",
        "loss": None,
        "grad": None,
        **summarize_ranks(plan, per_rank),
        "memory_bytes": worst["memory_bytes"],
        "stages": per_rank,
        "seconds": round(sum(record["seconds"] for record in measurements), 2),
    }


def _run_all_ranks(plan: Plan, report_progress: Callable[[str], object] = lambda text: None) -> list[dict[str, Any]]:
    assert plan.pipeline is not None
    recordings, measurements = SharedRecordings(), []
    for rank in range(plan.pipeline.ranks):
        report_progress(f"one step of a GPU of rank {rank} of 0 to {plan.pipeline.ranks - 1}")
        measurements.append(_run_rank(plan, rank, recordings))
    return measurements


class SharedRecordings:
    """Record each kind of call once for all ranks of a pipeline.

    All ranks build the same model and call it with equal samples, so their recordings are equal. Writers cut the stages of a rank
    from a recording and do not change it.
    """

    def __init__(self) -> None:
        self.tapes: dict[Any, Any] = {}

    def share(self, planned: Any) -> None:
        """Let a rank's forward pass take recordings of earlier ranks. The first one records."""
        record = planned.record

        def record_once(frozen: Any, args: Any, kwargs: Any) -> Any:
            # Not by values: all ranks make their inputs and weights from one seed, so a form and its values belong together.
            leaves, spec = pytree.tree_flatten((args, kwargs))
            forms = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
            key = str(spec), forms, torch.is_grad_enabled()
            if key not in self.tapes:
                self.tapes[key] = record(frozen, args, kwargs)
            return self.tapes[key]

        planned.record = record_once


def _run_rank(plan: Plan, rank: int, recordings: SharedRecordings) -> dict[str, Any]:
    """Run the second training step of the first GPU of a rank."""
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    place = int(gpus_of_ranks(plan)[rank, 0])
    dist.init_process_group("fake", store=fake_store(), rank=place, world_size=plan.num_gpus)
    try:
        with mock.patch.object(torch, "_check_tensor_all_with", lambda *args: None), _sending_on_meta():
            measured = _run_step(plan, recordings)
        return {**measured, "seconds": round(time.perf_counter() - start, 2)}
    finally:
        dist.destroy_process_group()
        gc.collect()


def _run_step(plan: Plan, recordings: SharedRecordings) -> dict[str, Any]:
    load = plan.workload
    model, parsed = build_model(plan.model.config, load.dtype)
    initializer(model)  # buffers only
    inputs = make_example_inputs(model, parsed, load, SEED, meta_signals=True)
    with_planned_loss(model, plan.model)
    parallel = StagedParallel(model, plan, mesh_of(plan, "cpu"))
    parallel.on_meta = True
    recordings.share(parallel.planned)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_for(plan, trained, 1e-4)
    counted, memory = parallel.engine.count_collectives(parallel.mesh), MemoryTracker()
    args, kwargs = step_call(parallel, inputs)

    def step() -> None:
        parallel.step(*args, **kwargs)
        counted.phase, memory.kind = "optimizer", "buffers"
        optimizer.step()

    with running_on_meta(memory):
        step()  # writes the programs
        optimizer.zero_grad()
        memory.add_inputs(pytree.tree_leaves((args, kwargs)))
        with (
            counting_memory(memory, parallel, trained, {} if load.offload else optimizer.state),
            record_step(parallel, counted) as record,
        ):
            begins = parallel.on_pass

            def set_kind(forward: bool, stage: int, micro_batch: int) -> None:
                memory.kind = "activations" if forward else "buffers"
                begins(forward, stage, micro_batch)

            parallel.on_pass = set_kind  # type: ignore[method-assign]
            step()
    return {
        **record.data(counted),
        **memory.report_peaks(),
    }


@contextlib.contextmanager
def _sending_on_meta() -> Iterator[None]:
    """Let torch send tensors on meta while entered: it asks neither for a backend of meta nor for the values of handshakes."""

    def one_by_one(ops: list[dist.P2POp]) -> list[Any]:
        return [
            op.op(
                op.tensor,
                group=op.group,
                tag=op.tag,
                **{"group_dst" if op.op is dist.isend else "group_src": op.group_peer},
            )
            for op in ops
        ]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", one_by_one))
        if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
            stack.enter_context(mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", _skip_inference))
        yield


def _skip_inference(schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
    """Replace the inference of shapes between stages: the stages state them."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
