"""Time this machine's collectives, matrix products and memory; rank 0 writes what `calibrate --measured` reads.

Stands alone (it needs torch and nothing of this project), so it can be copied to a cluster:

    torchrun --nproc-per-node 8 measure.py measured.json      # and --nnodes ... as for a training run

nccl where every rank has a GPU, else gloo on the CPU.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = tuple(2**k for k in range(10, 25, 2))
SHAPES = ((256, 1024, 1024), (1024, 1024, 1024), (2048, 1024, 256), (1024, 2048, 2048))
GPU_SIZES = tuple(2**k for k in range(10, 30, 2))
GPU_SHAPES = tuple((m, n, k) for m in (1024, 8192) for n in (1024, 4096, 14336) for k in (1024, 4096))
COPIED_BYTES = 2**27
MIN_TIMED_S, MAX_RUNS, REPLAYS = 0.05, 50, 3
"""Seconds that one measurement should last, the most runs in it, and the replays of which the median counts."""


def main(path: str) -> None:
    """Measure in the group that torchrun describes, and let rank 0 write the file."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    measured = measure(dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(measured), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(nodes: int = 1) -> dict[str, Any]:
    """Time everything on every rank of the default group; products and memory on rank 0 only."""
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    ranks = dist.get_world_size()
    measured: dict[str, Any] = {
        "schema": "shardscope.measured/1",
        "backend": dist.get_backend(),
        "ranks": ranks,
        "nodes": nodes,
        "device": _device_name(gpu),
        "collectives": list(_time_collectives(device, ranks, GPU_SIZES if gpu else SIZES)),
    }
    return measured | (_time_one_rank(device, GPU_SHAPES if gpu else SHAPES) if dist.get_rank() == 0 else {})


def _device_name(gpu: bool) -> str:
    return torch.cuda.get_device_name() if gpu else "CPU"


def _time_collectives(device: torch.device, ranks: int, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for num_bytes in sizes if ranks > 1 else ():
        # Of float32, cut to a multiple of the ranks: all_gather and reduce_scatter deal out equal parts.
        whole = torch.zeros(num_bytes // 4 // ranks * ranks, device=device)
        part = torch.zeros(whole.numel() // ranks, device=device)
        runs: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
        }
        for kind, run in runs.items():
            yield {"kind": kind, "num_bytes": 4 * whole.numel(), "seconds": _collective_seconds(run, device)}


def _time_one_rank(device: torch.device, shapes: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    """Time products and a copy on one rank, the host's time to issue one, and read the size of the memory."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = GpuClock() if device.type == "cuda" else CpuClock()
    products = []
    for m, n, k in shapes:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        run = partial(torch.mm, a, b, out=torch.empty(m, n, device=device, dtype=dtype))
        products.append(
            {"m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch."), "seconds": kernel_seconds(run, clock)}
        )
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = kernel_seconds(partial(target.copy_, source), clock)
    small = torch.zeros(16, device=device)
    return {
        "products": products,
        # A copy reads and writes each byte.
        "memory_bytes_per_s": 2 * COPIED_BYTES / copied,
        "memory_bytes": _memory_bytes(device),
        "launch_s": clock.issued(partial(small.add_, 1.0), MAX_RUNS),
    }


class CpuClock:
    """Time calls on a CPU, which are finished when they return."""

    def kernels(self, run: Callable[[], Any], times: int) -> float:
        """Return seconds of one run on the device, of `times` runs without a gap."""
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times

    def issued(self, run: Callable[[], Any], times: int) -> float:
        """Return seconds of the host for one call, without a wait for its kernel."""
        run()
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times


class GpuClock(CpuClock):
    """Time kernels by events around the replay of a CUDA graph: the host launches it once, so kernel times contain no launches."""

    def kernels(self, run: Callable[[], Any], times: int) -> float:
        """Return seconds of one run on the device, of `times` runs without a gap."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # a first call makes workspaces, which a graph cannot
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                run()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times

    def issued(self, run: Callable[[], Any], times: int) -> float:
        """Return seconds of the host for one call, without a wait for its kernel."""
        # With a full queue the host would wait for the GPU, and its time would be the kernel's.
        torch.cuda.synchronize()
        seconds = super().issued(run, times)
        torch.cuda.synchronize()
        return seconds


def kernel_seconds(run: Callable[[], Any], clock: CpuClock) -> float:
    """Return seconds of one run on the device: the median of several replays, each of as many runs as fit into MIN_TIMED_S."""
    times = _num_runs(clock.kernels(run, 2))
    return sorted(clock.kernels(run, times) for _ in range(REPLAYS))[REPLAYS // 2]


def _num_runs(once_s: float) -> int:
    """Return how many runs fit into MIN_TIMED_S if one takes `once_s`: at least 3, at most MAX_RUNS."""
    return max(3, min(MAX_RUNS, int(MIN_TIMED_S / max(once_s, 1e-9))))


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _collective_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return seconds of one collective from its call to its end, as a step that waits for it sees it: the median of several calls.

    All ranks call it equally often.
    """
    run()
    # Each rank has timed another `once`. A rank that called more often than the others would wait for them forever.
    agreed = torch.tensor([_num_runs(_time_once(run, device))], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    times = int(agreed)
    return sorted(_time_once(run, device) for _ in range(times))[times // 2]


def _time_once(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1])
