"""A GPU: the vendor's figures, the share of each that kernels reach, and the file in which they are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner_core.core.cluster.kernels import (
    Attentions,
    Collectives,
    HostLink,
    Products,
    kernels_from_json,
    kernels_json,
)
from planner_core.core.errors import InputError
from planner_core.core.files import ASSETS
from planner_core.core.forms import shorten_value, suggest_names

ANY_PRODUCTS = Products()
ANY_ATTENTION = Attentions()
HALF_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: the vendor's peaks, the share of each that kernels reach in a training run, and the constants of their times.

    `peak_flops` has pairs (dtype, FLOP/s of a dense matmul). `flops_efficiency` is the share that large products reach in a
    training run, which draws power all the time. `launch_s` is the least time between two dependent kernels. `host` is None if the link
    to the host's memory is not known.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    flops_efficiency: float
    memory_bytes: int
    memory_bytes_per_s: float
    memory_efficiency: float
    launch_s: float
    products: Products = ANY_PRODUCTS
    attention: Attentions = ANY_ATTENTION
    collectives: Collectives | None = None
    host: HostLink | None = None

    def flops_per_s(self, dtype: str) -> float:
        """Reachable FLOP/s in `dtype`. A dtype that the file does not list runs at the slowest listed rate."""
        # The slowest listed rate is a guess on the safe side: a dtype that a file leaves out is one that the GPU has no units for.
        peaks = dict(self.peak_flops)
        return self.flops_efficiency * peaks.get(dtype, min(peaks.values()))

    def attention_flops_per_s(self, dtype: str, kernel: str, backward: bool) -> float:
        """Reachable FLOP/s of an attention kernel. PyTorch's memory-efficient kernel runs as FlashAttention 1 (FlashAttention-2, figures 4
        and 5). A kernel that is not listed runs as fast as products."""
        kernel = "flash1" if kernel == "efficient" else kernel
        # Shares are of the vendor's peak, while `flops_per_s` has the efficiency of products in it: that factor is divided out.
        for rate in self.attention.rates:
            if rate.kernel == kernel:
                share = rate.backward if backward else rate.forward
                return share * self.flops_per_s(dtype) / self.flops_efficiency
        return self.flops_per_s(dtype)

    @property
    def bytes_per_s(self) -> float:
        """Reachable bytes per second of device memory."""
        return self.memory_efficiency * self.memory_bytes_per_s

    @property
    def training_dtype(self) -> str:
        """The 16-bit dtype in which this GPU is fast: bfloat16, or float16 if only that has tensor cores."""
        # V100 has tensor cores for float16 alone. Where both are as fast, bfloat16: it needs no scaling of the loss.
        return "bfloat16" if self.flops_per_s("bfloat16") >= self.flops_per_s("float16") else "float16"

    def to_json(self) -> dict[str, Any]:
        """Return the content of a GPU's file."""
        return {
            "name": self.name,
            "peak_flops": dict(self.peak_flops),
            "flops_efficiency": self.flops_efficiency,
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "memory_efficiency": self.memory_efficiency,
            "launch_s": self.launch_s,
            **kernels_json(self.products, self.attention, self.collectives, self.host),
        }


@cache
def gpu_names() -> tuple[str, ...]:
    """Return the GPUs that come with the project."""
    return tuple(sorted(path.stem for path in (ASSETS / "hardware").glob("*.json")))


def load_gpu(name: str) -> Gpu:
    """Read a GPU that comes with the project.

    Args:
        name: The name of a file in `assets/hardware`, such as `"h100-sxm"`.

    Returns:
        Its peaks (FLOP/s by dtype, bytes per second), the fraction of each that is reached, and its memory in bytes.

    Raises:
        InputError: The GPU does not exist. The message suggests a similar name.

    Example:
        >>> shardscope.load_gpu("h100-sxm").memory_bytes
        85520809984
    """
    if name not in gpu_names():
        raise InputError(f"no GPU is called {shorten_value(name)}; {suggest_names(name, gpu_names())}")
    # A test checks the form of every file there, so it is not checked again.
    return gpu_from_json(json.loads((ASSETS / "hardware" / f"{name}.json").read_text(encoding="utf-8")), f"GPU {name}")


def gpu_from_json(data: Any, where: str) -> Gpu:
    """Return a GPU by its name, or from data whose form was checked. Raises InputError for a name that does not exist."""
    if isinstance(data, str):
        try:
            return load_gpu(data)
        except InputError as error:
            raise InputError(f"{where}: {error}, or write the GPU's figures there") from None
    return Gpu(
        # An efficiency that a file leaves out is 1: prices are then a lower bound by the vendor's peaks.
        name=data.get("name", "my-gpu"),
        peak_flops=tuple((dtype, float(peak)) for dtype, peak in data["peak_flops"].items()),
        flops_efficiency=float(data.get("flops_efficiency", 1.0)),
        memory_bytes=int(data["memory_bytes"]),
        memory_bytes_per_s=float(data["memory_bytes_per_s"]),
        memory_efficiency=float(data.get("memory_efficiency", 1.0)),
        launch_s=float(data.get("launch_s", 4e-6)),
        **kernels_from_json(data),
    )


def slow_dtype_notes(gpu: Gpu, dtype: str) -> tuple[str, ...]:
    """Return a sentence if products in a 16-bit `dtype` are slower on `gpu` than in the other one; none if they are not."""
    better = gpu.training_dtype
    if dtype not in HALF_DTYPES or gpu.flops_per_s(dtype) >= gpu.flops_per_s(better):
        return ()
    peaks = dict(gpu.peak_flops)
    slow, fast = (peaks.get(name, min(peaks.values())) / 1e12 for name in (dtype, better))
    return (
        f"{gpu.name} has no tensor cores for {dtype}: its products are priced at a peak of {slow:g} TFLOP/s; in {better} it is {fast:g}",
    )
