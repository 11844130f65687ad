"""Run one training step of the rewritten program on meta tensors, and measure what a rank issues and holds.

Weights that are gathered before their block runs, gradients in buckets after it, and the block's operands while it runs count as
`IN_FLIGHT`, whatever else they are to the plan (`cost.memory.in_flight`).
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner_core.core import Plan
from planner_core.models.capture import FlashAttention
from planner_core.models.hooks import RECURRENT, TorchDispatchMode
from planner_core.runtime import Parallel, Trace, initializer, optimizer_for, rows_to_json
from planner_core.runtime.program import IN_FLIGHT as SENT
from planner_core.runtime.program import UnitCall, supports_meta
from planner_core.runtime.training import host_states, with_planned_loss
from planner_core.verification.build_models import (
    SEED,
    build_model,
    call_as_in_a_loop,
    extract_loss,
    make_example_inputs,
)
from planner_core.verification.fake.memory_tracker import IN_FLIGHT, MemoryTracker

_COMPARES_DEVICES = frozenset({*RECURRENT, "quantile", "nanquantile", "take_along_dim", "stft", "istft"})


def run_program_step(plan: Plan, mesh: DeviceMesh) -> dict[str, Any]:
    """Run the second step of rank 0, when optimizer states exist: collectives, memory at its peak, and the order of events."""
    load = plan.workload
    model, parsed = build_model(plan.model.config, load.dtype)
    initializer(model)  # buffers only
    inputs = make_example_inputs(
        model, parsed, replace(load, batch=load.graph_batch, accumulate=1), SEED, meta_signals=True
    )
    with_planned_loss(model, plan.model)
    parallel = Parallel(model, plan, mesh)
    model.__dict__["forward"] = parallel.forward
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_for(plan, trained, 1e-4)
    counted, memory, trace = parallel.engine.count_collectives(mesh), MemoryTracker(), Trace()

    def step() -> None:
        for left in reversed(range(load.accumulate)):
            with parallel.no_sync() if left else contextlib.nullcontext():
                counted.phase, memory.kind = "forward", "activations"
                out = call_as_in_a_loop(parallel, inputs, 0)
                loss = extract_loss(out)
                with memory.releasing_results():
                    del out
                counted.phase, memory.kind = "backward", "buffers"
                loss.backward()
                del loss
                # Backward has ended, until which a loop that keeps the results would hold them.
                memory.released_bytes = 0
        counted.phase, memory.kind = "optimizer", "buffers"
        optimizer.step()

    with running_on_meta(memory):
        step()  # writes the program
        optimizer.zero_grad()
        memory.add_inputs(pytree.tree_leaves(inputs))
        parallel.engine.trace(trace)
        with counting_memory(memory, parallel, trained, {} if load.offload else optimizer.state), counted:
            step()
    return {
        "collectives": counted.table(),
        "by_axis": rows_to_json(counted.rows),
        **memory.report_peaks(),
        "peak_of_saved_results": memory.peak_of_saved_results,
        "inputs": counted.inputs,
        "events": trace.rows(),
    }


@contextlib.contextmanager
def running_on_meta(memory: MemoryTracker) -> Iterator[None]:
    """Let a step run on tensors without values while entered."""
    with ValuesOnMeta(), _MixedOnMeta(), _ignoring_host_states(memory):
        yield


def _mark_constants(memory: MemoryTracker, parallel: Parallel) -> None:
    """Let the programs of a model say when they make their constants: generated code calls that function by its global name."""
    for program in parallel.programs.values():
        names = program.bound.names
        if "constants" in names:
            names["constants"] = memory.in_constants(names["constants"])


@contextlib.contextmanager
def counting_memory(
    memory: MemoryTracker,
    parallel: Parallel,
    trained: list[torch.nn.Parameter],
    states: Mapping[Any, Mapping[str, Any]],
) -> Iterator[None]:
    """Count memory while entered, with what stays between two steps. `states`: those of the optimizer on the GPU.

    A step has run before, which has written the programs.
    """
    _mark_constants(memory, parallel)
    _count_standing_memory(memory, parallel, trained, states)
    with flash_kernels(), memory, memory.following_resizes(), _counting_in_flight(memory):
        yield


def _count_standing_memory(
    memory: MemoryTracker,
    parallel: Parallel,
    trained: list[torch.nn.Parameter],
    states: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Count what stays between two steps. `states`: those of the optimizer on the GPU, by parameter."""
    engine = parallel.engine
    memory.add_all((w.parameter for w in engine.weights.values()), "params")
    memory.add_all((w.materialized for w in engine.weights.values() if w.materialized is not None), "params")
    memory.add_buffers(parallel.model)
    memory.add_all((s for state in states.values() for s in state.values() if isinstance(s, torch.Tensor)), "optimizer")
    memory.add_all((g.flat for u in engine.units.values() for g in u.gathers), IN_FLIGHT)
    for param in trained:
        param.register_post_accumulate_grad_hook(lambda p: memory.add(p.grad, "grads"))
    memory.peak, memory.peak_of_saved_results, memory.peak_of_constants = dict(memory.live), 0, 0


@contextlib.contextmanager
def _ignoring_host_states(memory: MemoryTracker) -> Iterator[None]:
    """Leave optimizer states on the host out of the count while entered, until they move to the GPU."""

    def move_to_host(state: torch.Tensor) -> torch.Tensor:
        before, memory.ignored = memory.ignored, True
        try:
            return torch.empty_like(state)
        finally:
            memory.ignored = before

    def move_to_device(state: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_like(state)

    with mock.patch.multiple(host_states, to_host=move_to_host, to_device=move_to_device):
        yield


@contextlib.contextmanager
def _counting_in_flight(memory: MemoryTracker) -> Iterator[None]:
    """Count gathered weights, gradients in buckets, and the operands of a running block as `IN_FLIGHT` while entered."""

    def in_flight(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, memory.kind = memory.kind, IN_FLIGHT
            try:
                return method(*args, **kwargs)
            finally:
                memory.kind = before

        return call

    def with_operands_in_flight(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(unit: Any, *args: Any) -> Any:
            with memory.counted_as(args, IN_FLIGHT, "activations"):
                return run(unit, *args)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(UnitCall, "__call__", with_operands_in_flight(UnitCall.__call__)))
        for owner, name in SENT:
            stack.enter_context(mock.patch.object(owner, name, in_flight(getattr(owner, name))))
        yield


class _MixedOnMeta(TorchFunctionMode):
    """Move operands to meta for functions that compare devices before they dispatch to `ValuesOnMeta`: recurrent layers, `quantile`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _COMPARES_DEVICES:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if len({t.is_meta for t in given}) > 1:
                args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)


class ValuesOnMeta(TorchDispatchMode):
    """Move a constant with values to meta beside a tensor on meta, and let collectives of a fake group run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if len({t.is_meta for t in given}) > 1 and all(t is torch.Tensor or t is torch.nn.Parameter for t in types):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        if func.namespace == "c10d" and not supports_meta(func) and any(t.is_meta for t in given):
            args = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(0), args)  # the fake group reads no operand
        return func(*args, **kwargs)


def _without_values(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_meta else torch.empty_like(t, device="meta")


def flash_kernels() -> contextlib.AbstractContextManager[Any]:
    """Let attention take the memory of a flash kernel, as on a GPU, while entered.

    A patch and not a mode: when a block is recomputed in backward, modes of torch functions are not active.
    """
    return mock.patch.object(F, "scaled_dot_product_attention", _flash_attention)


_plain_attention = F.scaled_dot_product_attention


def _flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
    if not query.is_meta:
        return _plain_attention(query, key, value, *rest, **options)
    return FlashAttention.apply(query, key, value, rest[0] if rest else options.get("attn_mask"))
