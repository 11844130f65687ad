"""What operators cost: FLOPs, what backward takes and keeps, and which are only views."""

from __future__ import annotations

import math

from planner_core.core import Op
from planner_core.ops.catalog.matmul import einsum_letters
from planner_core.ops.catalog.scans import SCANS, scan_flops
from planner_core.ops.registry import (
    Shapes,
)


def shrinks_kept(op: Op, label: str, kept: tuple[int, ...], ins: Shapes) -> bool:
    """Whether splitting dim `label` also splits a tensor of shape `kept` that the op keeps for its backward pass.

    An expert layer split by inner width keeps its permuted tokens whole; batch statistics have no batch dim.
    """
    if op.fn == "moe_experts" and label == "inner":
        return len(kept) > 1 and kept[-1] != ins[0][-1]
    return not (op.fn == "batch_norm" and label == "d0" and len(kept) == 1)


def loss_bytes(op: Op, logits: tuple[int, ...], item_bytes: int, split_classes: bool) -> tuple[int, int]:
    """Bytes of a whole cross-entropy: kept for backward (the log-softmax), and used in backward beside the gradient of
    the logits. Split by class it works in 32-bit (see runtime.local_ops)."""
    whole = math.prod(logits)
    if split_classes:  # its 32-bit work becomes the gradient; a shorter one is a copy
        return 4 * whole, 4 * whole if item_bytes < 4 else 0
    return item_bytes * whole, item_bytes * whole


def forward_flops(op: Op, ins: Shapes, outs: Shapes) -> int:
    """Multiply-adds counted as two, of the whole op; 0 for ops bound by memory. Causal attention counts its half."""
    fn = op.fn.rstrip("_")
    out = math.prod(outs[0]) if outs else 0
    if fn == "linear":
        return 2 * out * ins[1][1]
    if fn in ("addmm", "baddbmm"):
        return 2 * out * ins[1][-1]
    if fn in ("matmul", "bmm", "mm", "rmatmul"):
        return 2 * out * ins[0][-1]
    if fn == "einsum":
        letters = [
            (c, n) for t, s in zip(einsum_letters(op, ins)[:-1], ins, strict=True) for c, n in zip(t, s, strict=True)
        ]
        return 2 * math.prod(dict(sorted(letters)).values())  # of each letter its largest extent
    if fn.startswith("conv"):
        return 2 * out * math.prod(ins[1][1:])
    if fn == "scaled_dot_product_attention":
        q, k, v = ins[:3]
        full = 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
        return full // 2 if op.attrs.get("is_causal") else full
    if fn in SCANS:
        return scan_flops(op, ins, outs)
    if fn == "moe_experts":
        return 2 * ins[0][0] * ins[1][1] * (math.prod(ins[3][1:]) + math.prod(ins[4][1:]))
    if fn == "expert_linear":
        return 2 * out * ins[0][1]
    return 0


def backward_factor(op: Op) -> float:
    """Backward work over forward work: both gradients of a product cost one forward each; attention recomputes its scores."""
    return 2.5 if op.fn == "scaled_dot_product_attention" else 2.0


VIEWS = frozenset((
    "view", "transpose", "permute", "t", "swapaxes", "movedim", "T", "mT", "expand", "expand_as", "broadcast_to",
    "split", "chunk", "unbind", "squeeze", "unsqueeze", "select", "narrow", "detach", "alias", "view_as",
    "unflatten", "flatten", "getitem", "tensor_split", "split_with_sizes", "real", "imag", "diagonal", "swapdims",
    "identity",
))  # fmt: skip


def is_view(op: Op) -> bool:
    """Whether the op moves no data."""
    return op.fn in VIEWS
