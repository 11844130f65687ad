"""Kernels of a step, by kind: from their names, which torch, cuBLAS and cuDNN give."""

from __future__ import annotations

import re
from collections.abc import Mapping

KERNEL_KINDS = (
    ("attention", r"sdpa|flash|fmha|attention"),
    ("products", r"gemm|nvjet|cutlass|sgemm|xmma|wgrad|dgrad|convolve|conv"),
    ("optimizer", r"multi_tensor|FusedAdam|fused_adam|lpnorm|LpNorm"),
    ("gathers' and scatters' copies", r"chunk_cat|split_with_sizes_copy|CatArrayBatchedCopy"),
    ("collectives", r"nccl"),
    ("memory copies", r"Memcpy|Memset"),
    ("softmax and loss", r"softmax|nll_loss|cross_entropy"),
    ("norms", r"layer_norm|batch_norm|LayerNorm|bn_"),
    ("sums", r"reduce_kernel"),
    ("indices", r"index|gather|scatter|sort|topk|embedding|histogram"),
    ("compiled", r"triton"),
    ("casts and copies", r"copy_kernel|copy_device|direct_copy|bfloat16_copy"),
    ("elementwise", r"elementwise|vectorized|unrolled"),
)
"""The first kind whose pattern a kernel's name has."""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, pattern in KERNEL_KINDS if re.search(pattern, kernel)), "other")


def sum_by_kind(kernels: Mapping[str, tuple[float, int]]) -> dict[str, list[float]]:
    """Microseconds and launches of each kind, the longest first."""
    sums: dict[str, list[float]] = {}
    for name, (us, count) in kernels.items():
        row = sums.setdefault(kind_of(name), [0.0, 0])
        row[0] += us
        row[1] += count
    return {kind: [round(us, 1), count] for kind, (us, count) in sorted(sums.items(), key=lambda item: -item[1][0])}
