"""One job of `bench.gpu`: rank 0 of a plan on this GPU."""

from __future__ import annotations

import datetime
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

import planner_core as shardscope
from bench.gpu.cases import Case
from bench.gpu.kernels import sum_by_kind
from bench.gpu.setups import Setup, make_setup
from planner_core.core import Plan
from planner_core.runtime import training
from planner_core.verification import scaled

MAX_SHOWN_KERNELS, NAME = 40, 110
DRY_RANKS = 4


def send_row(case: Case, way: str, steps: int, compiled: bool, dry: bool, log: Path, target: Connection) -> None:
    """Run the job in this process, and send its row. What it prints, also of an error, goes to the file `log`."""
    with log.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    warnings.simplefilter("ignore")
    target.send(measure_row(case, way, steps, compiled, dry))


def measure_row(case: Case, way: str, steps: int, compiled: bool, dry: bool) -> dict[str, Any]:
    """Return what was measured, in the fields of docs/HARDWARE.md's rows."""
    plan = shardscope.load_plan(str(case.plan))
    plan = scale_down(plan) if dry else plan
    join_group(plan.mesh.num_devices)
    device = training.device()
    # a dry run compiles no kernels, which takes a CPU minutes
    setup = make_setup(plan, way, ("aot_eager" if dry else "inductor") if compiled else "", device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds, host, loss = time_steps(setup, steps, torch.cuda.synchronize if gpu else lambda: None)
    load = plan.workload
    row = {
        "plan": case.plan.name,
        "way": way,
        "compiled": compiled,
        "ranks": plan.mesh.num_devices,
        "batch": load.batch,
        "accumulate": load.accumulate,
        "seq": load.seq,
        "step_s": statistics.median(seconds[1:] or seconds),
        "all_steps_s": seconds,
        "host_s": statistics.median(host[1:] or host),
        "loss": round(loss, 6) if math.isfinite(loss) else None,
    }
    if gpu:
        row |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    kernels = profile_step(setup, gpu)
    row |= {"kernels_us": dict(list(kernels.items())[:MAX_SHOWN_KERNELS]), "kinds_us": sum_by_kind(kernels)}
    row |= {"date": datetime.date.today().isoformat(), **describe_machine(), "note": case.note, "dry": dry}
    return {name: value for name, value in row.items() if value not in ("", False) or name == "compiled"}


def scale_down(plan: Plan) -> Plan:
    """Return the same plan on a small model and few ranks, for a dry run."""
    return scaled(plan, min(DRY_RANKS, plan.mesh.num_devices))


def join_group(ranks: int) -> None:
    """A fake group of `ranks`, of which this process is the first; a real one of one rank."""
    if ranks == 1:
        training.connect()
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def describe_machine() -> dict[str, str]:
    """Of the machine and its libraries."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"gpu": name, "torch": torch.__version__, "transformers": transformers.__version__}


def time_steps(setup: Setup, steps: int, wait: Callable[[], Any]) -> tuple[list[float], list[float], float]:
    """Return the seconds of each step, seconds until the host had issued it, and the last loss."""
    seconds, host, loss = [], [], torch.zeros(())
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        loss = setup.step()
        issued = time.perf_counter()
        wait()
        seconds.append(round(time.perf_counter() - start, 5))
        host.append(round(issued - start, 5))
    return seconds, host, float(loss.detach())


def profile_step(setup: Setup, gpu: bool) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kernel of one step, the longest first; on a CPU of each operator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]) as recorded:
        setup.step()
        if gpu:
            torch.cuda.synchronize()
    kernels: dict[str, tuple[float, int]] = {}
    for event in recorded.key_averages():
        us = float(event.self_device_time_total if gpu else event.self_cpu_time_total)
        if us > 0 and (not gpu or event.device_type == torch.autograd.DeviceType.CUDA):
            before, count = kernels.get(event.key[:NAME], (0.0, 0))
            kernels[event.key[:NAME]] = (round(before + us, 1), count + event.count)
    return dict(sorted(kernels.items(), key=lambda item: -item[1][0]))
