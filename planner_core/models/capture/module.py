"""Capture: run a model's own forward on fake tensors and write down what it does, repeated parts once.

capture_module(module, {"x": tensor}, name="mine")         # any nn.Module whose parameters are on meta
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner_core.core import Block, CaptureError, Graph, check, with_result
from planner_core.models.capture.graph_builder import Builder
from planner_core.models.capture.loss import OWN_LOSS, STANDIN_LOSS, own_loss, standin_loss
from planner_core.models.capture.recorder import Recorder


def capture_module(
    module: nn.Module, inputs: Mapping[str, Any], *, args: tuple[Any, ...] = (), name: str = "model", source: str = "module",
    config: Mapping[str, Any] | None = None, batch: int = 1, seq: int = 1, flat: bool = False, notes: tuple[str, ...] = (),
    replay: bool = True,
) -> Graph:  # fmt: skip
    """The graph of one forward pass of `module`, which is moved to meta, with its loss (or a stand-in, named in the graph).

    `notes` are added to the graph's assumptions. `replay=False` runs repeated calls again, and folds them afterwards.
    """
    to_meta(module)
    recorder = Recorder(module, replay=replay and not flat)
    loss = OWN_LOSS

    def finish(out: Any) -> torch.Tensor:
        nonlocal loss
        own = own_loss(out)
        if own is not None:
            return own
        loss = STANDIN_LOSS
        return standin_loss(out, lambda t: id(t) in recorder.tracked)

    final = recorder.run(dict(inputs), finish, args)
    if id(final) not in recorder.tracked:
        raise CaptureError(
            f"{type(module).__name__} returns nothing that depends on its parameters; there is nothing to train"
        )
    top, blocks = Builder(recorder.recording, fold=not flat).build(recorder.ids[id(final)])
    workload = {"batch": batch, "seq": seq}
    graph = Graph(name, source, top, blocks, workload, loss, dict(config or {}), (*notes, *unused_parameters(top)))
    check(graph)
    return with_result(graph)


def to_meta(module: nn.Module) -> None:
    """Move parameters and buffers to meta in place; what was one tensor stays one (`module.to` would part tied weights)."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
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


def unused_parameters(top: Block) -> tuple[str, ...]:
    """What to say about weights that this training step does not touch (the vision half of a model fed with text)."""
    used = {v for item in top.items for v in item.inputs}
    idle = [v for i, v in enumerate(top.values) if v.kind == "parameter" and i not in used]
    if not idle:
        return ()
    size = sum(math.prod(v.meta.shape) for v in idle)
    return (f"{len(idle)} parameters ({size:,} elements, first {idle[0].name}) are not used by this training step",)
