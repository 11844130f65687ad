"""Rules of ops that compute: elementwise, reductions, products, attention, losses (see `rules`)."""

from __future__ import annotations

import math
import string

from planner_core.core import Op
from planner_core.ops.catalog.scans import SCANS, scan_flops
from planner_core.ops.registry import (
    WHOLE,
    DimOf,
    Internal,
    Rule,
    Shapes,
    Split,
    aligned,
    batch_splits,
    dims_attr,
    rule,
    split,
)

LINEAR_UNARY = (
    "neg",
    "to",
    "clone",
    "dropout",
    "contiguous",
    "real",
    "imag",
    "positive",
    "detach",
    "alias",
    "identity",
)
UNARY = (
    "gelu", "relu", "silu", "sigmoid", "tanh", "exp", "log", "rsqrt", "sqrt", "pow", "abs", "erf", "sin", "cos", "softplus",
    "leaky_relu", "elu", "hardtanh", "relu6", "hardswish", "hardsigmoid", "mish", "square", "reciprocal", "clamp", "clip", "clamp_min",
    "clamp_max", "logsigmoid", "selu", "celu", "log1p", "expm1", "sign", "floor", "ceil", "round", "isnan", "isinf",
    "logical_not", "bitwise_not", "nan_to_num", "log2", "exp2", "softsign", "threshold", "rpow", "invert",
)  # fmt: skip
BINARY = (
    "mul", "div", "where", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "rdiv", "rtruediv", "fmod", "remainder",
    "floor_divide", "logical_and", "logical_or", "logical_xor", "masked_fill", "addcmul", "addcdiv", "bitwise_and", "bitwise_or",
    "and", "or", "xor", "lerp", "float_power", "atan2", "floordiv", "rfloordiv", "mod",
)  # fmt: skip


def _elementwise(ins: Shapes, out: tuple[int, ...]) -> list[Split]:
    rank = len(out)
    return [split(f"d{d}", [aligned(s, rank, d) for s in ins], [d], out[d]) for d in range(rank) if out[d] > 1]


@rule(*LINEAR_UNARY)
def _linear_unary(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rounds = op.fn == "to" and not str(op.attrs.get("dtype", "float")).startswith(
        ("float", "bfloat", "complex", "double", "half")
    )
    return Rule(tuple(_elementwise(ins, outs[0])), linear=() if rounds else (0,))


@rule(*UNARY)
def _unary(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    return Rule(tuple(_elementwise(ins, outs[0])))


@rule("add", "sub", "rsub", "radd")
def _add(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Linear in all operands at once; a literal would be added on every rank, so then Partial may not pass."""
    linear = tuple(range(len(ins))) if len(ins) > 1 else ()
    return Rule(tuple(_elementwise(ins, outs[0])), linear=linear)


@rule(*BINARY)
def _binary(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    linear: tuple[int, ...] = ()
    if op.fn.rstrip("_") in ("mul", "div") and "rounding_mode" not in op.attrs:
        linear = (0,)  # x * w and x / w are linear in x; the factor is whole
    return Rule(tuple(_elementwise(ins, outs[0])), linear=linear)


@rule(
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "sort",
    "argsort",
    "topk",
    "glu",
    "normalize",
    "softmin",
)
def _along_dim(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Works along one dim; any other may be split."""
    rank = len(ins[0])
    raw = op.attrs.get("dim", op.attrs.get("dims"))
    if "arg1" in op.attrs:  # an argument that capture could not name: it may be the dim
        return Rule((), known=False)
    along = dims_attr(op, "dim", rank) if raw is not None else (1 if op.fn == "normalize" else rank - 1,)
    same = [d for d in range(rank) if d not in along and ins[0][d] > 1]
    return Rule(tuple(split(f"d{d}", [d], [d] * len(outs), ins[0][d]) for d in same))


@rule("sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "argmax", "argmin", "logsumexp", "any", "all", "prod",
      "vector_norm", "linalg_vector_norm", "var_mean")  # fmt: skip
def _reduce(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rank = len(ins[0])
    raw = op.attrs.get("dim", op.attrs.get("dims"))
    along = set(dims_attr(op, "dim", rank)) if raw not in (None, ()) else set(range(rank))
    keep = bool(op.attrs.get("keepdim", False))
    found, j = [], 0
    rest: list[DimOf] = [None] * (len(ins) - 1)
    for d in range(rank):
        if d in along:
            if op.fn in ("sum", "mean") and ins[0][d] > 1:
                found.append(split(f"d{d}", [d, *rest], [None], ins[0][d]))
            j += keep
            continue
        if ins[0][d] > 1:
            found.append(split(f"d{d}", [d, *rest], [j] * len(outs), ins[0][d]))
        j += 1
    return Rule(tuple(found), linear=(0,) if op.fn in ("sum", "mean") else ())


@rule("layer_norm", "rms_norm")
def _norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    shape = op.attrs.get("normalized_shape")
    inner = len(shape) if isinstance(shape, tuple) else 1
    rest: list[DimOf] = [None] * (len(ins) - 1)
    kept = range(len(ins[0]) - inner)
    return Rule(tuple(split(f"d{d}", [d, *rest], [d], ins[0][d]) for d in kept if ins[0][d] > 1))


@rule("group_norm", "instance_norm")
def _group_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    return Rule((split("d0", [0] + [None] * (len(ins) - 1), [0], ins[0][0]),))


@rule("batch_norm")
def _batch_norm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Channels are independent; a split batch sums its statistics (2C numbers forward, 2C backward)."""
    channels = ins[0][1]
    sync = tuple(Internal(phase, "all_reduce", 2 * channels * 4, ("d1",)) for phase in ("forward", "backward"))
    rest = [0] * (len(ins) - 1)
    batch = Split(
        "d0", (0, *[None] * len(rest)), (0,), (ins[0][0],), internal=sync if op.attrs.get("training", True) else ()
    )
    return Rule((batch, split("d1", [1, *rest], [1], channels)))


@rule("linear")
def _linear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`...i,oi->...o`; the bias of a split contraction is added once."""
    x, w = ins[0], ins[1]
    has_bias = len(ins) > 2
    none: list[DimOf] = [None] * has_bias
    found = [split(f"d{d}", [d, None, *none], [d], x[d]) for d in range(len(x) - 1) if x[d] > 1]
    found.append(split("out", [None, 0, *([0] * has_bias)], [len(x) - 1], w[0]))
    found.append(split("in", [len(x) - 1, 1, *none], [None], w[1], bias=(2,) if has_bias else ()))
    return Rule(tuple(found))


@rule("addmm", "baddbmm")
def _addmm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`bias + a @ b` (transformers' Conv1D stores b as [in, out])."""
    bias, a, b = ins
    rank = len(a)
    lead = [split(f"b{d}", [aligned(bias, rank, d), d, d], [d], a[d]) for d in range(rank - 2)]
    rows_ = split("rows", [aligned(bias, rank, rank - 2), rank - 2, None], [rank - 2], a[-2])
    cols = split("out", [aligned(bias, rank, rank - 1), None, rank - 1], [rank - 1], b[-1])
    inner = split("in", [None, rank - 1, rank - 2], [None], a[-1], bias=(0,))
    return Rule((*lead, rows_, cols, inner))


@rule("matmul", "bmm", "mm")
def _matmul(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    a, b = ins
    if len(a) < 2 or len(b) < 2:
        return Rule((), linear=(0,))
    out, rank = outs[0], len(outs[0])
    found = batch_splits([a, b], out, rank - 2, "b")
    if a[-2] > 1:
        found.append(split("rows", [len(a) - 2, None], [rank - 2], a[-2]))
    if b[-1] > 1:
        found.append(split("out", [None, len(b) - 1], [rank - 1], b[-1]))
    found.append(split("in", [len(a) - 1, len(b) - 2], [None], a[-1]))
    return Rule(tuple(found), linear=(0,))


@rule("einsum")
def _einsum(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """A letter that stands for the same extent wherever it is may be split."""
    *operands, result = einsum_letters(op, ins)
    if any(len(set(t)) != len(t) for t in operands):
        return Rule((), known=False)
    extents: dict[str, set[int]] = {}
    for t, shape in zip(operands, ins, strict=True):
        for c, n in zip(t, shape, strict=True):
            extents.setdefault(c, set()).add(n)
    found = [
        split(c, [t.index(c) if c in t else None for t in operands], [result.index(c) if c in result else None], *n)
        for c, n in sorted(extents.items()) if n != {1} and len(n) == 1
    ]  # fmt: skip
    return Rule(tuple(found), linear=(0,))


def einsum_letters(op: Op, ins: Shapes) -> list[str]:
    """The letters of each operand and of the result; capitals in place of `...`, aligned at the last."""
    terms, _, result = str(op.attrs["equation"]).replace(" ", "").partition("->")
    operands = terms.split(",")
    ranks = [len(shape) - len(t) + 3 for t, shape in zip(operands, ins, strict=True) if "..." in t]
    wild = string.ascii_uppercase[: max(ranks, default=0)]
    own = [t.replace("...", wild[len(wild) + len(t) - 3 - len(s) :]) for t, s in zip(operands, ins, strict=True)]
    return [*own, result.replace("...", wild)]


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
def _conv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch, output channels, input channels (Partial); a depthwise convolution splits both channels together."""
    x, w = ins[0], ins[1]
    has_bias = len(ins) > 2
    none: list[DimOf] = [None] * has_bias
    found = [split("d0", [0, None, *none], [0], x[0])] if len(x) == len(w) and x[0] > 1 else []
    groups = int(op.attrs.get("groups", 1) or 1)  # type: ignore[arg-type]
    if "transpose" in op.fn or len(x) != len(w):
        return Rule(tuple(found))
    if groups == 1:
        found.append(split("out", [None, 0, *([0] * has_bias)], [1], w[0]))
        if x[1] > 1:
            found.append(split("in", [1, 1, *none], [None], x[1], bias=(2,) if has_bias else ()))
    elif groups == x[1] == w[0]:
        found.append(split("channel", [1, 0, *([0] * has_bias)], [1], w[0]))
    return Rule(tuple(found))


@rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d",
      "interpolate", "pixel_shuffle", "upsample")  # fmt: skip
def _pool(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    spatial = int(op.fn[-2]) if op.fn.endswith("d") else len(ins[0]) - 2
    kept = [d for d in range(len(ins[0]) - spatial) if ins[0][d] == outs[0][d] > 1]
    return Rule(tuple(split(f"d{d}", [d], [d] * len(outs), ins[0][d]) for d in kept))


@rule("scaled_dot_product_attention")
def _attention(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Batch and heads; query length only without a causal mask. Key and value heads bound the heads split."""
    q, k = ins[0], ins[1]
    mask = ins[3] if len(ins) > 3 else None

    def at(dim: int, key: DimOf, value: DimOf) -> list[DimOf]:
        return [dim, key, value] + ([aligned(mask, len(q), dim)] if mask is not None else [])

    if len(q) != 4:
        return Rule((split("batch", at(0, 0, 0), [0], q[0]),) if len(q) > 2 else ())
    found = [split("batch", at(0, 0, 0), [0], q[0])] if q[0] > 1 else []
    if q[1] > 1 and k[1] > 1:
        found.append(split("heads", at(1, 1, 1), [1], q[1], k[1]))
    if not op.attrs.get("is_causal") and q[2] > 1:
        found.append(split("queries", at(2, None, None), [2], q[2]))
    return Rule(tuple(found))


@rule("cross_entropy")
def _cross_entropy(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens: a sum over the valid targets of every rank; classes: max, sum of exponentials and target logit are exchanged."""
    logits, targets = ins[0], ins[1]
    if (
        len(logits) != 2
        or op.attrs.get("reduction", "mean") not in ("mean", "sum")
        or len(targets) != 1
        or len(ins) > 2
    ):
        return Rule((), known=len(ins) == 2)
    if op.attrs.get("label_smoothing"):
        return Rule(())
    count = (Internal("forward", "all_reduce", 4),) if op.attrs.get("reduction", "mean") == "mean" else ()
    tokens = Split("tokens", (0, 0), (None,), (logits[0],), internal=count)
    exchange = Internal("forward", "all_reduce", 4 * logits[0], ("tokens",), count=3)
    classes = Split("classes", (1, None), (WHOLE,), (logits[1],), internal=(exchange,))
    return Rule((tokens, classes))


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits")
def _mean_loss(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    if op.attrs.get("reduction", "mean") not in ("mean", "sum"):
        return Rule(tuple(_elementwise(ins, outs[0])))
    same = [d for d, n in enumerate(ins[0]) if n > 1 and all(len(s) == len(ins[0]) and s[d] == n for s in ins)]
    return Rule(tuple(split(f"d{d}", [d] * len(ins), [None], ins[0][d]) for d in same))


@rule("moe_experts")
def _moe_experts(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens; the experts' inner width (gate and up are fused, so dealt part by part); the experts themselves.

    Operands: hidden, index, weights, up, down[, up bias][, down bias].
    """
    (t, _), up, down = ins[0], ins[3], ins[4]
    turned, gated = bool(op.attrs.get("transposed")), bool(op.attrs.get("gated", True))
    inner = down[1 if turned else 2]
    none: list[DimOf] = [None] * (len(ins) - 5)
    biases: list[DimOf] = [
        1 if shape[-1] == up[2 if turned else 1] and k == 0 else None for k, shape in enumerate(ins[5:])
    ]
    tokens = split("tokens", [0, 0, 0, None, None, *none], [0], t)
    fused: dict[int, tuple[int, ...]] = {}
    if gated:
        fused = dict.fromkeys((3, *(5 + k for k, d in enumerate(biases) if d is not None)), (inner, inner))
    added = tuple(5 + k for k, d in enumerate(biases) if d is None)
    width = Split(
        "inner", (None, None, None, *((2, 1) if turned else (1, 2)), *biases), (None,), (inner,), bias=added, segments=fused
    )  # fmt: skip
    experts = split("experts", [None, None, None, 0, 0, *[0] * len(none)], [None], up[0])
    return Rule((tokens, width, experts))


@rule("expert_linear")
def _expert_linear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Rows; features out; features in, whose products are summed. Operands: hidden [t, i], index [t], weight [E, o, i]."""
    (t, i), _, (_, o, _) = ins
    return Rule(
        (
            split("tokens", [0, 0, None], [0], t),
            split("out", [None, None, 1], [1], o),
            split("in", [1, None, 2], [None], i),
        )
    )


# --- what autograd keeps -----------------------------------------------------------------------------


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


# --- work --------------------------------------------------------------------------------------------


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
