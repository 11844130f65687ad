"""Capture: run a model's own forward on fake tensors and write down what it does, repeated parts once.

capture_graph("llama-3-8b", batch=16, seq=4096)            # zoo name, config dict, or path of a config.json
capture_module(module, {"x": tensor}, name="mine")         # any nn.Module whose parameters are on meta
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner_core.core.errors import CaptureError, InputError
from planner_core.core.graph import Block, Graph, check, with_result
from planner_core.models.capture.graph_builder import Builder
from planner_core.models.capture.recorder import Recorder

__all__ = ["capture_graph", "capture_module", "standin_loss"]
OWN_LOSS = "the model's own loss"
STANDIN_LOSS = "stand-in: mean of the squared output in float32"
DTYPES = ("bfloat16", "float16", "float32")


def capture_graph(
    source: str | Mapping[str, Any],
    *,
    batch: int,
    seq: int,
    dtype: str = "bfloat16",
    layers: int | None = None,
    flat: bool = False,
) -> Graph:
    """The graph of a MODEL argument (CONTRACT.md) or of a config dict, at one workload.

    `layers` overrides the depth; `flat` traces every module call and folds nothing (it judges the folding).
    Raises InputError or CaptureError, each with one sentence.
    """
    from planner_core.models.sandbox.child import capture_apart
    from planner_core.models.sandbox.memory_limit import limited_memory
    from planner_core.models.sources import resolve

    if batch < 1 or seq < 1:
        raise InputError(f"batch {batch} and sequence length {seq} must both be at least 1")
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if isinstance(source, str) and (".py:" in source or source.endswith(".pt2")):
        if layers is not None:
            way = "export" if source.endswith(".pt2") else "let your callable build"
            raise InputError(f"--layers {layers} cannot be applied to {source}; {way} the depth you want")
        return capture_apart(source, batch=batch, seq=seq, flat=flat)
    named = source if isinstance(source, str) else str(source.get("model_type", "the model"))
    with limited_memory(named, batch=batch, seq=seq):
        model = resolve(source, batch=batch, seq=seq, dtype=dtype, layers=layers)
        return capture_module(
            model.module, model.inputs, args=model.args, name=model.name, source=model.source, config=model.config,
            batch=batch, seq=seq, flat=flat,
        )  # fmt: skip


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


def own_loss(out: Any) -> torch.Tensor | None:
    """The loss that a model's output holds: its `loss`, or itself if it is a scalar."""
    found = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if found is None and isinstance(out, torch.Tensor):
        found = out
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 and found.is_floating_point() else None


def standin_loss(out: Any, tracked: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.Tensor:
    """Mean of the squared first output in float32, for models that return no loss."""
    for tensor in _outputs(out):
        if tracked(tensor) and tensor.is_floating_point():
            return tensor.float().pow(2).mean()
    raise CaptureError(f"the model returns {type(out).__name__}, in which no computed tensor was found to train on")


def _outputs(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, Mapping):
        return [t for v in out.values() for t in _outputs(v)]
    if isinstance(out, (tuple, list)):
        return [t for v in out for t in _outputs(v)]
    return [t for v in vars(out).values() for t in _outputs(v)] if hasattr(out, "__dict__") else []
