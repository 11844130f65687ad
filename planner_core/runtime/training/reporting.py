"""The report of a run: loss, tokens per second, utilisation and memory every few steps, and on request a trace."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner_core.core import InputError, Plan
from planner_core.runtime.library import applied

TRACE_STEPS = (2, 2)
"""Number of steps before a trace, to warm up, and number of steps in the trace."""


class Report:
    """Rank 0 prints one line after every `every` steps. The host waits for the device then, and at no other time.

    `flops` are those of one step on all ranks: products and attention, forward and backward. Utilisation is FLOPs per second
    divided by the peak of the GPU's data sheet. It is not printed on a CPU, or if the FLOPs are not known (0).
    """

    def __init__(self, plan: Plan, flops: float, *, every: int = 10, file: Path | None = None) -> None:
        self.every, self.file, self.flops = max(1, every), file, flops
        self.tokens = plan.workload.batch * plan.workload.seq
        # A dtype that the data sheet lacks counts as its slowest.
        peaks = dict(plan.cluster.gpu.peak_flops)
        self.peak = peaks.get(plan.workload.dtype, min(peaks.values())) * plan.num_gpus
        self.since, self.steps = time.perf_counter(), 0

    def step(self, step: int, loss: torch.Tensor, norm: torch.Tensor, rate: float) -> None:
        """Report the end of a step; `step` counts from 1."""
        self.steps += 1
        if step % self.every:
            return
        values = {"step": step, "loss": float(loss), "norm": float(norm), "rate": rate}
        seconds = (time.perf_counter() - self.since) / self.steps
        self.since, self.steps = time.perf_counter(), 0
        values |= {"tokens_per_s": self.tokens / seconds, "memory_gib": memory_gib()}
        if torch.cuda.is_available() and self.flops:
            values["utilisation"] = self.flops / seconds / self.peak
        self._write(values)
        # Not in each step: to read a loss the host waits for the device.
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(f"the loss of step {step} is {values['loss']}")

    def evaluation(self, step: int, loss: torch.Tensor) -> None:
        """Report a loss on held-out data. Its time does not count as training."""
        before = time.perf_counter()
        self._write({"step": step, "evaluation_loss": float(loss)})
        self.since += time.perf_counter() - before

    def _write(self, values: dict[str, Any]) -> None:
        if dist.get_rank():
            return
        if "evaluation_loss" in values:
            print(f"evaluation after step {values['step']}  loss {values['evaluation_loss']:.7f}", flush=True)
        else:
            utilisation = f"{100 * values['utilisation']:.1f} % of peak  " if "utilisation" in values else ""
            print(
                f"step {values['step']}  loss {values['loss']:.7f}  norm {values['norm']:.4f}  rate {values['rate']:.3g}  "
                f"{values['tokens_per_s']:.0f} tokens/s  {utilisation}{values['memory_gib']:.2f} GiB",
                flush=True,
            )
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(values) + "\n")


def memory_gib() -> float:
    """Return the peak memory of this process so far, in GiB: of the GPU, or of the machine if it uses none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[Any]:
    """Profile two steps. Call `step()` of the profiler after each step.

    It writes `rank0.json` and so on, which https://ui.perfetto.dev and chrome://tracing show. Without a folder it does nothing.
    """
    if folder is None:
        yield SimpleNamespace(step=lambda: None)
        return
    folder.mkdir(parents=True, exist_ok=True)

    def write(profile: Any) -> None:
        profile.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json"))

    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    warmup, active = TRACE_STEPS
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1)
    with torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=write) as profile:
        yield profile


def counted(
    plan: Plan, model: nn.Module, batches: Sequence[Any], loss_of: Callable[[Any], torch.Tensor]
) -> dict[str, Any]:
    """Count the collectives of forward and backward of one step with the micro-batches `batches`, next to those that the plan
    predicts.

    The gradients are dropped.
    """
    parallel = applied(model)
    if plan.pipeline:
        raise InputError(
            "--count counts a plan of one stage; `verify --fake` counts what every rank of a pipeline sends"
        )
    with parallel.engine.count_collectives(parallel.mesh) as counter:
        for number, batch in enumerate(batches):
            counter.phase = "forward"
            with parallel.no_sync() if number < len(batches) - 1 else contextlib.nullcontext():
                loss = loss_of(batch) / len(batches)
                counter.phase = "backward"
                loss.backward()
    for param in model.parameters():
        param.grad = None
    return {"measured": counter.table(), "predicted": plan.cost.collectives(), "inputs": counter.inputs}
