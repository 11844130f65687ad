"""The time of a matrix product [m, k] @ [k, n], which depends on its shape, fitted to published kernel timings.

    time = hypot(work, bytes / (0.9 of memory's bandwidth)) + fixed

On a GPU whose products run in waves (A100), the result is cut into tiles, and one wave computes one tile on each of the GPU's
units. `work` is the time of whole waves: units that are idle in the last wave are lost. A tile takes its multiply-adds at the
full rate, and as long as `ramp_k` more of k to start and end. The best of five tiles and of five ways to split k counts.

On other GPUs (Hopper), `work` is the FLOPs at the rate of large products, times (1 + ramp_k / k).

Both are fitted to the tables of `assets/measurements`, with median errors of 2.7 % and 3.2 % for isolated products
(`tests/cost/test_measured.py`). In a training run the GPU is hot all the time. Its rate is then `flops_efficiency`, which is
fitted to whole runs.

Example: an A100 has 108 units. A result of 2048 x 2048 has 128 tiles of 128 x 256, so it takes two waves. The second one uses
20 of the 108 units, and 41 % of the units' time are lost.
"""

from __future__ import annotations

import math
from functools import lru_cache

from planner_core.core import ITEM_BYTES, Gpu
from planner_core.ops import Gemm, GroupedGemm

TILES = ((128, 256, False), (256, 128, False), (128, 128, True), (128, 64, True), (64, 128, True))
"""Tiles of cuBLAS and CUTLASS: rows, columns, and whether a multiply-add is slower than in the largest tiles. In tiles below
128 x 128 it is slower once more."""
LARGE = 128 * 128
SPLITS = (1, 2, 4, 8, 16)
"""The numbers of parts into which k may be split. The parts are summed in float32 through memory."""
MEMORY_SHARE = 0.9
"""The share of memory's bandwidth that a product reaches for its operands and result."""


@lru_cache(maxsize=100_000)
def product_seconds(kernel: Gemm | GroupedGemm, dtype: str, gpu: Gpu) -> float:
    """Return the seconds of one product kernel with the shapes that one GPU holds."""
    m, n, k, batch = _shape_of(kernel)
    if min(m, n, k, batch) < 1:
        return 0.0
    moved = ITEM_BYTES[dtype] * batch * (m * n + n * k + m * k) / (MEMORY_SHARE * gpu.memory_bytes_per_s)
    return math.hypot(work_seconds(kernel, dtype, gpu), moved) + gpu.products.fixed_s


def work_seconds(kernel: Gemm | GroupedGemm, dtype: str, gpu: Gpu) -> float:
    """Return the seconds of the multiply-adds of a product, without its memory traffic."""
    m, n, k, batch = _shape_of(kernel)
    if gpu.products.waves:
        return min(_wave_seconds(m, n, k, batch, tile, split, dtype, gpu) for tile in TILES for split in SPLITS)
    return 2 * m * n * k * batch / gpu.flops_per_s(dtype) * (1 + gpu.products.ramp_k / k)


def _shape_of(kernel: Gemm | GroupedGemm) -> tuple[float, float, float, int]:
    """m, n, k and the number of such products. In a grouped product every group is taken to have equally many rows."""
    if isinstance(kernel, Gemm):
        return kernel.m, kernel.n, kernel.k, kernel.batch
    rows = kernel.rows / kernel.groups
    return (kernel.k, kernel.n, rows, kernel.groups) if kernel.sums_rows else (rows, kernel.n, kernel.k, kernel.groups)


def _wave_seconds(
    m: float, n: float, k: float, batch: int, tile: tuple[int, int, bool], split: int, dtype: str, gpu: Gpu
) -> float:
    """Return the seconds of whole waves of one `tile` over the GPU's units, with k split into `split` parts."""
    rows, columns, small = tile
    form, rate = gpu.products, gpu.flops_per_s(dtype)
    # The units begin a wave together, so a last wave with one tile takes as long as a full one.
    waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * batch * split / form.units)
    each = 2 * rows * columns * (k / split + form.ramp_k) / (rate / form.units)
    # Two steps of one factor: none for 128 x 256, one for 128 x 128, two for 128 x 64.
    slower = form.small_tile ** (small + (rows * columns < LARGE))
    # Each part of k is written and read once, in float32.
    summed = 4 * 2 * m * n * batch * split / gpu.memory_bytes_per_s / gpu.flops_efficiency if split > 1 else 0.0
    return waves * each * slower + summed
