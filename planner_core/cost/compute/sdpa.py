"""The kernel that `scaled_dot_product_attention` takes: it depends on the GPU, the dtype, the mask, its gradient, and the head dim.

PyTorch asks its kernels in the GPU's order, and takes the first that can run (`sdp_utils.cpp`, read at 2.6, 2.9 and 2.13):

    cudnn       16 bits, head dims of at most 128 that are multiples of 8; no mask that gets a gradient
    flash2      16 bits, no mask, equal head dims of at most 256, causal only if there are as many queries as keys
    efficient   head dims that are multiples of 8 (4 in float32); a mask whose last dim lies together in memory
    math        all else: products and a softmax of their own, in float32, which keep the scores for backward

cuDNN comes first on Hopper and on Blackwell's data center parts since PyTorch 2.10 with CUDA 13 (cuDNN 9.15.1): "sdpa" is of such a
release, and a run states another one ("sdpa:2.9", "sdpa:2.11.0+cu128"). A bias that is looked up
and gets a gradient, as T5's, lies with its heads innermost, so neither cuDNN nor the efficient kernel takes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner_core.core import TORCH_ATTENTION, TORCH_RELEASE, Block, Gpu, Op, Value

CUDNN, FLASH, EFFICIENT, SOFTMAX, MATH = "cudnn", "flash2", "efficient", "softmax", "math"
CUDNN_SINCE, CUDNN_CUDA = (2, 10), 130
"""The release of PyTorch, and of the CUDA that it was built with, from which on cuDNN comes first."""
HALF = ("bfloat16", "float16")
CUDNN_HEAD, FLASH_HEAD = 128, 256
ALIGNED = {True: 8, False: 4}
"""The number that head dims must be a multiple of, for 16 bits and for 32."""


def attention_kernel(op: Op, values: Sequence[Value], stated: str, gpu: Gpu) -> str:
    """Return the kernel of an attention. `stated`: that of the run's software, or "sdpa", with or without a release of torch."""
    if not stated.startswith(TORCH_ATTENTION):
        return stated
    first = gpu.attention.torch if gpu.attention.torch != CUDNN or asks_cudnn_first(stated) else FLASH
    q, k, v = (values[i].meta for i in op.inputs[:3])
    mask = values[op.inputs[3]] if len(op.inputs) > 3 else None
    half, heads = q.dtype in HALF, (q.shape[-1], v.shape[-1])
    if len(q.shape) != 4 or (mask is not None and mask.grad):
        return MATH
    aligned = all(n % ALIGNED[half] == 0 for n in heads)
    if half and first == CUDNN and aligned and max(heads) <= CUDNN_HEAD:
        return CUDNN
    square = not op.attrs.get("is_causal") or q.shape[-2] == k.shape[-2]
    flashes = half and first in (CUDNN, FLASH)
    if flashes and mask is None and square and heads[0] == heads[1] <= FLASH_HEAD:
        return FLASH
    return EFFICIENT if aligned else MATH


def asks_cudnn_first(stated: str) -> bool:
    """Tell whether this torch asks cuDNN first on a GPU where new releases do. A release without its CUDA is taken to have 13."""
    release = TORCH_RELEASE.fullmatch(stated)
    if release is None:
        return True
    major, minor, cuda = (int(n) if n else None for n in release.groups())
    return (major, minor) >= CUDNN_SINCE and (cuda is None or cuda >= CUDNN_CUDA)


def why_math(op: Op, block: Block) -> str:
    """Return why an attention takes the math kernel, and what would do; a part of a sentence."""
    mask = block.values[op.inputs[3]] if len(op.inputs) > 3 else None
    if mask is not None and mask.grad:
        return "its bias gets a gradient, and its heads lie innermost: .contiguous() on the bias lets the efficient kernel run"
    return "no other kernel takes its head dim; one that is a multiple of 8 would do"
