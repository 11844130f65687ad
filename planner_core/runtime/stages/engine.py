"""Stages as `torch.distributed.pipelining` runs them: its stages, its schedules, and modules that call generated programs.

torch decides when a stage runs which micro-batch, and sends the tensors between stages. A stage's module is called with what
was received; every rank has the model's own inputs of all micro-batches. Each stage takes its micro-batches in order, so the
number of a call is that of its micro-batch.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner_core.core import InputError, Pipeline

TORCH_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""torch's names of the schedules that run. Those with the gradients of weights apart (`zb`, `zbv`) would take them apart by torch's own
walk through autograd's graph, which does not know the weights of generated programs."""


def check_schedule(cut: Pipeline) -> None:
    """Raise InputError for stages that are priced but do not run."""
    if cut.schedule not in TORCH_NAMES:
        raise InputError(
            f"schedule {cut.schedule} takes the gradients of weights apart, which generated programs do not; plan with schedule="
            f"{'interleaved' if cut.virtual > 1 else '1f1b'}, or export the plan to another tool"
        )
    if not cut.parts:
        raise InputError("the plan does not say which weights each of its stages reads; plan the model again")


class StageModule(nn.Module):
    """One stage of a step. `run(number, received)` returns the outputs for a micro-batch. `begins(number)` is called when
    backward of a micro-batch begins."""

    def __init__(
        self,
        run: Callable[[int, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        begins: Callable[[int], None],
        num: int,
        *,
        last: bool,
    ) -> None:
        super().__init__()
        self.run, self.begins, self.num, self.last = run, begins, num, last
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.forwards = self.backwards = 0
        self.losses: list[torch.Tensor] = []

    def forward(self, *received: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one micro-batch. Returns what passes to the next stage; the last stage returns the micro-batch's share of the
        loss."""
        number, self.forwards = self.forwards, self.forwards + 1
        out = self.run(number, received)
        if not self.last:
            # Backward of a stage begins at its outputs, so the hook there runs before any gradient of a weight arrives.
            return _StageOutputs.apply(self._begin_backward, *(x.contiguous() for x in out))  # type: ignore[no-any-return]
        # Not a view: torch lets the graph of a loss go when its backward is over.
        loss = (out[0] / self.num).reshape(1).clone()
        self.losses.append(loss.detach())
        loss_with_hook: tuple[torch.Tensor] = _StageOutputs.apply(self._begin_backward, loss)
        return loss_with_hook[0]

    def _begin_backward(self) -> None:
        number, self.backwards = self.backwards, self.backwards + 1
        self.begins(number)


class _StageOutputs(torch.autograd.Function):
    """The outputs of a stage. Its backward runs first in the stage's backward pass."""

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.begin = begin
        ctx.mark_non_differentiable(*(t for t in tensors if not t.requires_grad))
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.begin()
        return None, *gradients


class ScheduleRun:
    """The schedule of one rank's stages."""

    def __init__(
        self,
        cut: Pipeline,
        modules: Sequence[tuple[int, StageModule]],
        metas: Sequence[tuple[Sequence[torch.Tensor], ...]],
        micro_batches: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        backward: bool,
    ) -> None:
        """`modules`: the rank's stages by number. `metas`: what each takes and returns, on meta."""
        # Here, since torch's schedules import its compiler, which takes as long as torch itself: only who runs stages waits for that.
        from torch.distributed.pipelining.schedules import get_schedule_class

        from planner_core.runtime.stages.torch_stage import BufferFreeingStage

        self.modules = [module for _, module in modules]
        self.stages = [
            BufferFreeingStage(
                module, number, len(cut.copies), device, input_args=tuple(takes), output_args=tuple(gives), group=group
            )
            for (number, module), (takes, gives) in zip(modules, metas, strict=True)
        ]
        schedule_class: Any = get_schedule_class(TORCH_NAMES[cut.schedule])
        options: dict[str, Any] = {"loss_fn": _pass_loss} if backward else {}
        if "scale_grads" in inspect.signature(schedule_class.__init__).parameters:
            options["scale_grads"] = False  # the losses are scaled
        stages = self.stages if cut.virtual > 1 or cut.schedule == "interleaved" else self.stages[0]
        self.schedule = schedule_class(stages, micro_batches, **options)
        # torch gives `loss_fn` a target for each micro-batch. The last stage's output is the loss already (`_pass_loss`).
        self.target = torch.zeros(micro_batches) if self.modules[-1].last else None

    def run(self) -> torch.Tensor | None:
        """Run one step. Returns the mean loss on a rank of the last stage, None elsewhere."""
        for module in self.modules:
            module.start()
        self.schedule.step(**({} if self.target is None else {"target": self.target}))
        for stage in self.stages:
            stage.release()
        losses = self.modules[-1].losses
        return torch.cat(losses).sum() if self.modules[-1].last else None


def _pass_loss(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage has computed."""
    return loss
