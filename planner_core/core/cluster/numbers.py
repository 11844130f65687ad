"""Which 16-bit numbers a GPU is slow in."""

from __future__ import annotations

from planner_core.core.cluster.gpu import Gpu

HALF_DTYPES = ("bfloat16", "float16")


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
