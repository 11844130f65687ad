"""The time of fused attention, which depends on head dim, sequence, mask and kernel."""

from __future__ import annotations

from functools import lru_cache

from planner_core.core import ITEM_BYTES, Gpu
from planner_core.cost.compute.sdpa import MATH, SOFTMAX
from planner_core.ops import Attention

HEAD_DIM = 128
"""The head dim for which the shares of the peak are stated, and the number of queries of one tile."""


FORWARD_PASSES, BACKWARD_PASSES = 8, 5
"""Passes of the math kernel over the scores. Forward: the mask is added (2), rows without a key are looked for (1.5), softmax (2), such
rows are made zero (2.5). Backward: softmax (3), the zeros (1), the mask's gradient (1)."""
MATH_ITEM = 4
SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 4, 6
"""Passes over the scores with one kernel for scale, mask and softmax. Forward: the first product writes them, the kernel reads and writes,
the second product reads. Backward: the gradient is written, read with the result, written, and read by two products."""


@lru_cache(maxsize=20_000)
def attention_seconds(kernel: Attention, name: str, dtype: str, gpu: Gpu) -> float:
    """Return the seconds of one run of an attention kernel `name` (one of `ATTENTION` in core/workload/options.py).

        seconds = FLOPs under the mask / (peak · the kernel's share) · (1 + ramp_keys / keys) · (1 + units / tiles)

    The share is smaller for head dims below 128. The last two factors say that short sequences and few tiles of queries do not
    fill the GPU. The shares are from the papers of FlashAttention-2 and -3. That of flash1 is fitted to runs that used it.
    """
    if name == MATH:
        return _math_seconds(kernel, gpu)
    if name == SOFTMAX:
        return _softmax_seconds(kernel, dtype, gpu)
    form = gpu.attention
    narrow = float(min(1.0, kernel.head_dim / HEAD_DIM) ** form.head_power)
    rate = gpu.attention_flops_per_s(dtype, name, kernel.backward) * narrow
    tiles = kernel.batch * kernel.heads * max(1.0, kernel.q_len / HEAD_DIM)
    fill = (1 + form.ramp_keys / kernel.kv_len) * (1 + gpu.products.units / tiles if form.rates else 1.0)
    return kernel.flops / kernel.times / rate * fill


def _math_seconds(kernel: Attention, gpu: Gpu) -> float:
    """Return the seconds of attention as products and a softmax in float32: two products forward and four backward, of all pairs, and
    passes over the scores."""
    scores = kernel.batch * kernel.heads * kernel.q_len * kernel.kv_len
    products = (2 if kernel.backward else 1) * 2 * scores * (kernel.head_dim + kernel.value_dim)
    passes = BACKWARD_PASSES if kernel.backward else FORWARD_PASSES
    return products / gpu.flops_per_s("float32") + passes * MATH_ITEM * scores / gpu.bytes_per_s


def _softmax_seconds(kernel: Attention, dtype: str, gpu: Gpu) -> float:
    """Return the seconds of attention as products of all pairs in the dtype that computes, with one softmax kernel between them."""
    scores = kernel.batch * kernel.heads * kernel.q_len * kernel.kv_len
    products = (2 if kernel.backward else 1) * 2 * scores * (kernel.head_dim + kernel.value_dim)
    passes = SOFTMAX_BACKWARD if kernel.backward else SOFTMAX_FORWARD
    return products / gpu.flops_per_s(dtype) + passes * ITEM_BYTES[dtype] * scores / gpu.bytes_per_s
