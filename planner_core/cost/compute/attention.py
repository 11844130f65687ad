"""The time of fused attention, which depends on head dim, sequence, mask and kernel."""

from __future__ import annotations

from functools import lru_cache

from planner_core.core import Gpu
from planner_core.ops import Attention

HEAD_DIM = 128
"""The head dim for which the shares of the peak are stated, and the number of queries of one tile."""


@lru_cache(maxsize=20_000)
def attention_seconds(kernel: Attention, name: str, dtype: str, gpu: Gpu) -> float:
    """Seconds of one run of an attention kernel `name` (flash1, flash2, cudnn, flash3).

        seconds = FLOPs under the mask / (peak · the kernel's share) · (1 + ramp_keys / keys) · (1 + units / tiles)

    The share is smaller for head dims below 128. The last two factors say that short sequences and few tiles of queries do not
    fill the GPU. The shares are from the papers of FlashAttention-2 and -3. That of flash1 is fitted to runs that used it.
    """
    form = gpu.attention
    narrow = float(min(1.0, kernel.head_dim / HEAD_DIM) ** form.head_power)
    rate = gpu.attention_flops_per_s(dtype, name, kernel.backward) * narrow
    tiles = kernel.batch * kernel.heads * max(1.0, kernel.q_len / HEAD_DIM)
    fill = (1 + form.ramp_keys / kernel.kv_len) * (1 + gpu.products.units / tiles if form.rates else 1.0)
    return kernel.flops / kernel.times / rate * fill
