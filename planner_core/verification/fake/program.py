"""Run one training step of the rewritten program on meta tensors, and measure what a rank issues and holds.

The weights of a block that come ahead of it, its gradients that leave in buckets behind it, and its operands while it runs are
of the kind `IN_FLIGHT`, whatever they are to the plan (`cost.memory.in_flight`).
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner_core.core import Plan
from planner_core.models.capture import FlashAttention
from planner_core.models.hooks import RECURRENT
from planner_core.runtime import Parallel, Trace, initializer, make_optimizer
from planner_core.runtime.program import IN_FLIGHT as SENT
from planner_core.runtime.program import UnitCall
from planner_core.runtime.program.collectives import supports_meta
from planner_core.runtime.training import host_states, with_planned_loss
from planner_core.verification.build_models import build_model, called_as_in_a_loop, example_inputs, loss_of
from planner_core.verification.fake.memory_tracker import IN_FLIGHT, TrackMemory

_COMPARING = frozenset({*RECURRENT, "quantile", "nanquantile", "take_along_dim", "stft", "istft"})


def program_step(plan: Plan, mesh: DeviceMesh) -> dict[str, Any]:
    """The second step of rank 0, when optimizer states are there: collectives, memory at its peak, and the order of events."""
    load = plan.workload
    model, parsed = build_model(plan.model["config"], load["dtype"])
    initializer(model)  # buffers only
    inputs = example_inputs(model, parsed, {**load, "batch": load["batch"] // load["accumulate"]}, 0, meta_signals=True)
    with_planned_loss(model, plan.model)
    parallel = Parallel(model, plan, mesh)
    model.__dict__["forward"] = parallel.forward
    trained = [p for p in model.parameters() if p.requires_grad]
    name, offload = str(load["optimizer"]).removesuffix("-fp32"), bool(load.get("offload"))
    optimizer = make_optimizer(name, trained, lr=1e-4, offload=offload)
    counted, memory, trace = parallel.engine.count_collectives(mesh), TrackMemory(), Trace()

    def step() -> None:
        for left in reversed(range(load["accumulate"])):
            with parallel.no_sync() if left else contextlib.nullcontext():
                counted.phase, memory.kind = "forward", "activations"
                out = called_as_in_a_loop(parallel, inputs, 0)
                loss = loss_of(out)
                with memory.letting_go():
                    del out
                counted.phase, memory.kind = "backward", "buffers"
                loss.backward()
                del loss
                memory.let_go = 0
        counted.phase, memory.kind = "optimizer", "buffers"
        optimizer.step()

    with on_meta(memory):
        step()  # writes the program
        optimizer.zero_grad()
        parallel.engine.trace(trace)
        with counting_memory(memory, parallel, trained, {} if offload else optimizer.state), counted:
            step()
    return {
        "collectives": counted.table(),
        "by_axis": [[*key, *row] for key, row in sorted(counted.rows.items())],
        "memory": {**memory.peak, "peak": sum(memory.peak.values())},
        "peak_of_kept_results": memory.peak_of_kept_results,
        "inputs": counted.inputs,
        "events": [[e.what, e.kind, e.axis, e.num_bytes, e.packed] for e in trace.events],
    }


@contextlib.contextmanager
def on_meta(memory: TrackMemory) -> Iterator[None]:
    """Inside, a step runs on tensors without values."""
    with ValuesOnMeta(), _MixedOnMeta(), _host_apart(memory):
        yield


@contextlib.contextmanager
def counting_memory(
    memory: TrackMemory, parallel: Parallel, trained: list[torch.nn.Parameter], states: Mapping[Any, Mapping[str, Any]]
) -> Iterator[None]:
    """Inside, memory is counted, with what is held between two steps. `states`: those of the optimizer that are on the GPU."""
    _held(memory, parallel, trained, states)
    with flash_kernels(), memory, memory.resizing(), _sent_as_in_flight(memory):
        yield


def _held(
    memory: TrackMemory, parallel: Parallel, trained: list[torch.nn.Parameter], states: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Count what is held between two steps. `states`: those of the optimizer that are on the GPU, by parameter."""
    engine = parallel.engine
    memory.add_all((w.parameter for w in engine.weights.values()), "params")
    memory.add_all((w.materialized for w in engine.weights.values() if w.materialized is not None), "params")
    memory.add_buffers(parallel.model)
    memory.add_all((s for state in states.values() for s in state.values() if isinstance(s, torch.Tensor)), "optimizer")
    memory.add_all((g.flat for u in engine.units.values() for g in u.gathers), IN_FLIGHT)
    for param in trained:
        param.register_post_accumulate_grad_hook(lambda p: memory.add(p.grad, "grads"))
    memory.peak, memory.peak_of_kept_results = dict(memory.live), 0


@contextlib.contextmanager
def _host_apart(memory: TrackMemory) -> Iterator[None]:
    """Inside, states that the host keeps do not count, and count again when they come to the GPU."""

    def away(state: torch.Tensor) -> torch.Tensor:
        counts, memory.ignored = memory.ignored, lambda: True
        try:
            return torch.empty_like(state)
        finally:
            memory.ignored = counts

    def back(state: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_like(state)

    with mock.patch.multiple(host_states, to_host=away, to_device=back):
        yield


@contextlib.contextmanager
def _sent_as_in_flight(memory: TrackMemory) -> Iterator[None]:
    """Inside, what is allocated for gathered weights and for gradients in buckets has a kind of its own. So have the operands that the
    caller of a running block holds."""

    def apart(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, memory.kind = memory.kind, IN_FLIGHT
            try:
                return method(*args, **kwargs)
            finally:
                memory.kind = before

        return call

    def holding(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(unit: Any, *args: Any) -> Any:
            with memory.meanwhile(args, IN_FLIGHT, "activations"):
                return run(unit, *args)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(UnitCall, "__call__", holding(UnitCall.__call__)))
        for owner, name in SENT:
            stack.enter_context(mock.patch.object(owner, name, apart(getattr(owner, name))))
        yield


class _MixedOnMeta(TorchFunctionMode):
    """Some functions compare the devices of their operands before `ValuesOnMeta` sees them: recurrent layers, `quantile` and others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _COMPARING:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if len({t.is_meta for t in given}) > 1:
                args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)


class ValuesOnMeta(TorchDispatchMode):
    """If a constant with values is used with a tensor on meta, it is replaced by its form on meta. Collectives of a fake group run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if len({t.is_meta for t in given}) > 1 and all(t is torch.Tensor or t is torch.nn.Parameter for t in types):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        if func.namespace == "c10d" and not supports_meta(func) and any(t.is_meta for t in given):
            args = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(0), args)  # the fake group looks at none
        return func(*args, **kwargs)


def _without_values(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_meta else torch.empty_like(t, device="meta")


def flash_kernels() -> contextlib.AbstractContextManager[Any]:
    """Inside, attention of a generated program takes the memory of a flash kernel, as on a GPU. This holds also when a block is
    recomputed in backward, where modes of torch functions are not active."""
    return mock.patch.object(F, "scaled_dot_product_attention", _flash)


_plain_attention = F.scaled_dot_product_attention


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
    if not query.is_meta:
        return _plain_attention(query, key, value, *rest, **options)
    return FlashAttention.apply(query, key, value, rest[0] if rest else options.get("attn_mask"))
