"""Element by element: any dim may be split; linear ones pass Partial through."""

from __future__ import annotations

from planner_core.core import Op
from planner_core.ops.registry import (
    DimOf,
    Rule,
    Shapes,
    Split,
    aligned,
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
