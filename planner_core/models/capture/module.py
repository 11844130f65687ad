"""Capture: run a model's own forward on fake tensors, and record what it does, with repeated parts once.

capture_module(module, {"x": tensor}, name="mine")         # any nn.Module whose parameters are on meta
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from planner_core.core import (
    STANDIN_LOSS,
    Block,
    CaptureError,
    Graph,
    GraphSizes,
    Sentence,
    TensorMeta,
    check_graph,
    join_name,
    named,
    with_result_as_output,
)
from planner_core.models.capture.build.gradients import keep_reached_gradients
from planner_core.models.capture.build.graph_builder import GraphBuilder
from planner_core.models.capture.checks.policy import ForwardPass, run_checked
from planner_core.models.capture.checks.refusals import check_buffers, check_module, check_result
from planner_core.models.capture.loss import OWN_LOSS, named_loss, standin_loss
from planner_core.models.capture.record.recorder import ForeignTensors, Recorder
from planner_core.models.capture.recording import Recording, count_checkpoints, paused_garbage_collection
from planner_core.models.hooks.forms import makes_kv_cache
from planner_core.models.hooks.model_parts import buffer_bytes, list_buffers, list_modules, list_parameters

MIN_NOTED_BYTES = 1 << 22
"""Constants of fewer bytes a sample get no note."""


@paused_garbage_collection()
def capture_module(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    args: tuple[Any, ...] = (),
    name: str = "model",
    source: str = "module",
    config: Mapping[str, Any] | None = None,
    batch: int = 1,
    seq: int = 1,
    flat: bool = False,
    notes: tuple[str, ...] = (),
    replay: bool = True,
    originals: Mapping[int, str] | None = None,
    library: bool = False,
) -> Graph:
    """Capture the graph of one forward pass of `module`, with its loss or a stand-in that the graph names. Moves `module` to meta.

    Args:
        inputs, args: Named and positional arguments of forward.
        flat: Whether to trace every module call and fold nothing.
        notes: Further assumptions of the graph.
        replay: Whether to replay repeated module calls; if not, they are traced and folded afterwards.
        originals: Names of the user's tensors by storage, if `module` is a copy (`ModelSource.originals`).
        library: Whether the code is that of transformers.

    Raises CaptureError for what docs/SUPPORT.md does not allow.
    """
    check_module(module)
    to_meta(module)
    if "use_cache" not in inputs and makes_kv_cache(module, module.forward):
        inputs = {**inputs, "use_cache": False}
    trained = {n for n, p in list_parameters(module) if p.requires_grad}
    run = partial(_record_forward, module, inputs, args, flat, replay, originals or {})
    forward, outliving_name = run_checked(module, run, library=library)
    workload: GraphSizes = {"batch": batch, "seq": seq}
    graph = keep_reached_gradients(
        with_result_as_output(
            Graph(name, source, forward.top, forward.blocks, workload, forward.loss, dict(config or {}))
        )
    )
    check_graph(graph)
    large = _constant_notes(forward.constant_bytes / batch)
    assumptions = (
        *notes,
        *forward.notes,
        *large,
        *_outliving_tensor_notes(outliving_name),
        *idle_parameter_notes(graph, trained),
    )
    return replace(graph, assumptions=assumptions, buffer_bytes=buffer_bytes(module))


def _record_forward(
    module: nn.Module,
    inputs: Mapping[str, Any],
    args: tuple[Any, ...],
    flat: bool,
    replay: bool,
    originals: Mapping[int, str],
    leftovers: Mapping[int, str],
) -> ForwardPass:
    foreign = ForeignTensors(originals, leftovers)
    return _record_once(Recorder(module, replay=replay and not flat, foreign=foreign), module, inputs, args, flat)


def _record_once(
    recorder: Recorder, module: nn.Module, inputs: Mapping[str, Any], args: tuple[Any, ...], flat: bool
) -> ForwardPass:
    loss = OWN_LOSS

    def finish(out: Any) -> torch.Tensor:
        nonlocal loss
        check_result(out)
        name, returned = named_loss(out)
        if returned is not None:
            loss = name
            return returned
        loss = STANDIN_LOSS
        return standin_loss(out, recorder.values.is_tracked)

    buffers = dict(list_buffers(module))
    final = recorder.run(dict(inputs), finish, args)
    values, facts = recorder.values, recorder.facts
    check_buffers(module, buffers, values.tracked)
    if not values.is_tracked(final):
        raise CaptureError(
            f"{type(module).__name__} returns nothing that depends on its parameters; there is nothing to train"
        )
    top, blocks = GraphBuilder(recorder.recording, fold=not flat).build(values.number(final))
    notes = (
        *_checkpoint_notes(recorder.recording, (top, *blocks.values())),
        *_finite_notes(facts.finite_questions),
        *_mask_notes(recorder.sizes.picked_by_line),
    )

    def is_computed(tensor: torch.Tensor) -> bool:
        return values.is_tracked(tensor) or values.from_inputs.include(tensor)

    return ForwardPass(
        top, blocks, loss, notes, facts.drew_outside, tuple(facts.transcript), is_computed, facts.constant_bytes
    )


def _checkpoint_notes(recording: Recording, blocks: Sequence[Block]) -> tuple[str, ...]:
    """Say what becomes of checkpoints in the model's code: parts that backward recomputes, or plain calls."""
    every = count_checkpoints(recording.root)
    if not every:
        return ()
    name = "torch.utils.checkpoint"
    parts = recording.checkpoint_parts if any(block.recomputed for block in blocks) else []
    notes: list[str] = (
        [f"the model's own {name} is run as its code says, in {_count_recomputed_parts(len(parts))}"] if parts else []
    )
    if every > sum(map(count_checkpoints, parts)):
        where = " around repeated modules" * bool(parts)
        plain = f"the model's own {name}{where} is run as a plain call: "
        notes.append(Sentence(plain, named("recompute"), " says what is computed again"))
    norms = any(op.fn == "batch_norm" for block in blocks for op in block.ops)
    twice = "; running statistics in it count a step once, where torch counts it twice" * norms
    return (Sentence(Sentence.from_list("; ", notes), twice),)


def _count_recomputed_parts(parts: int) -> str:
    return "1 part that backward computes again" if parts == 1 else f"{parts} parts that backward computes again"


def _finite_notes(lines: Sequence[str]) -> tuple[str, ...]:
    if not lines:
        return ()
    return (
        f"the model asks whether its numbers are finite{lines[0]}: they are taken to be, so what it does else is left out",
    )


def _outliving_tensor_notes(name: str) -> tuple[str, ...]:
    return (
        (f"forward keeps a computed tensor in {name}: under a plan it is not there; return it instead",) if name else ()
    )


def _mask_notes(lines: Mapping[str, str]) -> tuple[str, ...]:
    """Write a note for each number of elements that masks of the inputs pick, with the first line that picks it."""
    first: dict[str, str] = {}
    for line, number in lines.items():
        first.setdefault(number, line)
    return tuple(
        f"a mask picks {number}{line}: a mask that picks another number is refused, or recorded once more, when it runs"
        for number, line in first.items()
    )


def _constant_notes(bytes_per_sample: float) -> tuple[str, ...]:
    """Say how much memory forward needs before its first operator, if it is much: a video autoencoder normalizes its frames, for example.
    The prediction counts what operators take of it, and not what is freed before them."""
    if bytes_per_sample < MIN_NOTED_BYTES:
        return ()
    return (
        f"forward computes {bytes_per_sample / 2**20:.0f} MiB a sample from its inputs alone: before the first operator a rank may hold as "
        "much of the micro-batch, which the predicted memory does not count where no operator takes it",
    )


def to_meta(module: nn.Module) -> None:
    """Move parameters and buffers to meta in place. Tied weights stay tied, where `module.to` would untie them."""
    moved: dict[int, torch.Tensor] = {}
    for _, part in list_modules(module):
        tables: tuple[Any, ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    fake = tensor.detach().to("meta")
                    moved[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                    )
                table[name] = moved[id(tensor)]


def idle_parameter_notes(graph: Graph, trained: Collection[str]) -> tuple[str, ...]:
    """Write notes about weights among `trained` that the step does not train.

    No op uses them (the vision part of a model that gets text), or the loss does not depend on them.
    """
    unused: dict[str, TensorMeta] = {}
    unreached: dict[str, TensorMeta] = {}
    for prefix, block in (("", graph.top), *((c.prefix, graph.blocks[c.block]) for c in graph.calls())):
        used = {*block.inputs, *(v for item in block.items for v in item.inputs)}
        for i, v in block.own_parameters.items():
            name = join_name(prefix, v.name)
            if not v.grad and name in trained:
                (unreached if i in used else unused)[name] = v.meta
    return (
        *_idle_note(unused, "are not used by this training step"),
        *_idle_note(unreached, "are used, but the loss does not depend on them: they are not trained"),
    )


def _idle_note(idle: Mapping[str, TensorMeta], what: str) -> tuple[str, ...]:
    if not idle:
        return ()
    size = sum(math.prod(meta.shape) for meta in idle.values())
    return (f"{len(idle)} parameters ({size:,} elements, first {next(iter(idle))}) {what}",)
