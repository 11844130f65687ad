"""The time of fused attention by head dim, sequence, mask and kernel."""

from __future__ import annotations

from functools import lru_cache

from planner_core.core import Gpu
from planner_core.ops import Attention

HEAD_DIM = 128
"""Head dim at which the shares of the peak are stated, and queries of one tile."""


@lru_cache(maxsize=20_000)
def attention_seconds(kernel: Attention, name: str, dtype: str, gpu: Gpu) -> float:
    """Seconds of one attention kernel `name` (flash1, flash2, cudnn, flash3).

    FLOPs under the mask at the kernel's share of the peak, less for head dims below 128; short sequences and few tiles of
    queries fill the GPU less: times (1 + ramp_keys / keys)(1 + units / tiles). Shares: FlashAttention-2 and -3 papers;
    flash1 fitted to runs that pinned it.
    """
    form = gpu.attention
    narrow = float(min(1.0, kernel.head_dim / HEAD_DIM) ** form.head_power)
    rate = gpu.attention_flops_per_s(dtype, name, kernel.backward) * narrow
    tiles = kernel.batch * kernel.heads * max(1.0, kernel.q_len / HEAD_DIM)
    fill = (1 + form.ramp_keys / kernel.kv_len) * (1 + gpu.products.units / tiles if form.rates else 1.0)
    return kernel.flops / rate * fill
