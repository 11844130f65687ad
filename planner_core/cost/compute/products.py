"""The time of a matrix product by its shape, as published kernel timings show it.

    time = hypot(work, bytes / (0.9 of memory's bandwidth)) + fixed

`work` on a GPU whose products run in waves (A100): the best of five tiles and of splitting k 1 to 16 times, where every
tile takes its m n k at the full rate and `ramp_k` of k more to start and end, and units that the last wave leaves idle are
lost. Else (Hopper): the FLOPs at the rate of large products, and ramp_k / k more. Fitted to the tables of
`assets/measurements`: medians of 2.7 % and 3.2 % for isolated products (`tests/cost/test_measured.py`). In a training
run the GPU is hot all the time: its rate is `flops_efficiency`, fitted to whole runs.
"""

from __future__ import annotations

import math
from functools import lru_cache

from planner_core.core import ITEM_BYTES, Gpu
from planner_core.ops import Gemm, GroupedGemm

TILES = ((128, 256, False), (256, 128, False), (128, 128, True), (128, 64, True), (64, 128, True))
"""Tiles of cuBLAS and CUTLASS, rows and columns, and whether a multiply-add is slower in them than in the largest. Below
128 x 128 it is slower once more."""
LARGE = 128 * 128
SPLITS = (1, 2, 4, 8, 16)
"""Into how many parts k may be split; the parts are summed in float32 through memory."""
MEMORY_SHARE = 0.9
"""Share of memory's bandwidth that a product's operands and result reach."""


@lru_cache(maxsize=100_000)
def product_seconds(kernel: Gemm | GroupedGemm, dtype: str, gpu: Gpu) -> float:
    """Seconds of one product kernel on shapes that one GPU holds."""
    m, n, k, batch = _shape(kernel)
    if min(m, n, k, batch) < 1:
        return 0.0
    moved = ITEM_BYTES[dtype] * batch * (m * n + n * k + m * k) / (MEMORY_SHARE * gpu.memory_bytes_per_s)
    return math.hypot(work_seconds(kernel, dtype, gpu), moved) + gpu.products.fixed_s


def work_seconds(kernel: Gemm | GroupedGemm, dtype: str, gpu: Gpu) -> float:
    """Seconds of a product's multiply-adds alone."""
    m, n, k, batch = _shape(kernel)
    if gpu.products.waves:
        return min(_waves(m, n, k, batch, tile, split, dtype, gpu) for tile in TILES for split in SPLITS)
    return 2 * m * n * k * batch / gpu.flops_per_s(dtype) * (1 + gpu.products.ramp_k / k)


def _shape(kernel: Gemm | GroupedGemm) -> tuple[float, float, float, int]:
    """m, n, k and the number of such products; rows dealt to groups are taken to be balanced."""
    if isinstance(kernel, Gemm):
        return kernel.m, kernel.n, kernel.k, kernel.batch
    rows = kernel.rows / kernel.groups
    return (kernel.k, kernel.n, rows, kernel.groups) if kernel.sums_rows else (rows, kernel.n, kernel.k, kernel.groups)


def _waves(
    m: float, n: float, k: float, batch: int, tile: tuple[int, int, bool], split: int, dtype: str, gpu: Gpu
) -> float:  # fmt: skip
    """Seconds of whole waves of one tile over the GPU's units."""
    rows, columns, small = tile
    form, rate = gpu.products, gpu.flops_per_s(dtype)
    waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * batch * split / form.units)
    each = 2 * rows * columns * (k / split + form.ramp_k) / (rate / form.units)
    slower = form.small_tile ** (small + (rows * columns < LARGE))
    summed = 4 * 2 * m * n * batch * split / gpu.memory_bytes_per_s / gpu.flops_efficiency if split > 1 else 0.0
    return waves * each * slower + summed
