"""Operators on single elements. Any dim may be sharded. A linear operator passes Partial through."""

from __future__ import annotations

from typing import Any

from planner_core.core import Op
from planner_core.ops.operators import (
    CallDescription,
    Kind,
    LocalBytes,
    LocalExecution,
    Operator,
    operand_bytes,
    operators,
)
from planner_core.ops.rules import Rule, RuleFn, Shapes, broadcast_splits, split


def linear_unary(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Any dim may be sharded, and Partial passes."""
    return Rule(tuple(broadcast_splits(ins, outs[0])), linear=(0,))


def elementwise(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Any dim may be sharded."""
    return Rule(tuple(broadcast_splits(ins, outs[0])))


def _broadcast_alike(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Any dim may be sharded. Every result has the shape to which all operands are broadcast."""
    splits = broadcast_splits(ins, outs[0])
    return Rule(tuple(split(s.name, s.inputs, [*s.outputs] * len(outs), *s.divides) for s in splits))


def _cast(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Any dim may be sharded. Partial passes, except in a cast to integers, which rounds."""
    floating = str(op.attrs.get("dtype", "float")).startswith(("float", "bfloat", "complex", "double", "half"))
    return Rule(tuple(broadcast_splits(ins, outs[0])), linear=(0,) if floating else ())


def _sum(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Linear in all operands together. If one operand is a literal, Partial may not pass, since every rank would add the literal."""
    linear = tuple(range(len(ins))) if len(ins) > 1 else ()
    return Rule(tuple(broadcast_splits(ins, outs[0])), linear=linear)


def _scale(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """x * w and x / w are linear in x if the other factor is Replicate. Rounded division is not linear."""
    linear = () if "rounding_mode" in op.attrs else (0,)
    return Rule(tuple(broadcast_splits(ins, outs[0])), linear=linear)


def _broadcast_factor_bytes(local: LocalBytes) -> int:
    """Return the bytes of the gradient of a factor that was broadcast, before it is summed: as many as the result has."""
    spread = any(n < local.outs[0] and grad for n, grad in zip(local.ins, local.grads, strict=True))
    return local.outs[0] if spread else 0


def _quotient_bytes(local: LocalBytes) -> int:
    """Return the bytes of a quotient's backward: the divisor's gradient -g · ((x / y) / y) has four tensors of the result's size."""
    if len(local.ins) < 2 or not local.grads[1]:
        return _broadcast_factor_bytes(local)
    gradient_bytes = sum(n for n, grad in zip(local.ins, local.grads, strict=True) if grad)
    return max(0, 4 * local.outs[0] - gradient_bytes)


UNARY = (
    "gelu relu silu sigmoid tanh exp log rsqrt sqrt abs erf sin cos softplus leaky_relu elu hardtanh relu6 hardswish "
    "hardsigmoid mish square reciprocal clamp_min clamp_max log_sigmoid selu celu log1p expm1 sign floor ceil round isnan isinf "
    "logical_not bitwise_not nan_to_num log2 exp2 softsign threshold acos acosh asin asinh atan atanh sinh cosh tan sinc log10 deg2rad "
    "rad2deg frac trunc sgn angle i0 digamma lgamma erfc erfinv logit tanhshrink softshrink hardshrink special_i0e special_i1 special_i1e "
    "special_ndtr special_ndtri special_log_ndtr special_entr special_erfcx"
)
_BACKWARD_TENSORS = {
    1: "sqrt abs sin log1p expm1 log2 exp2 sinh cosh log10 i0 digamma lgamma tanhshrink",
    2: "rsqrt cos square reciprocal atan tan",
    3: "softsign acosh asinh atanh special_entr special_erfcx",
    4: "erf asin erfc erfinv special_i0e special_ndtri",
    5: "acos special_ndtr",
    6: "special_log_ndtr",
    7: "sinc",
}
"""Tensors of the operand's size that torch's formula of a gradient makes beside the gradient. All others have a kernel of their own."""
COMPLEX = "conj conj_physical resolve_conj resolve_neg"
BINARY = (
    "maximum minimum eq ne lt le gt ge fmod remainder floor_divide rfloordiv logical_and logical_or logical_xor addcmul addcdiv "
    "bitwise_and bitwise_or bitwise_xor lerp float_power atan2 copysign fmax fmin ldexp logaddexp logaddexp2 hypot xlogy special_xlog1py "
    "complex polar bitwise_left_shift bitwise_right_shift"
)
_SPELLINGS = {
    "neg": ("negative",),
    "log_sigmoid": ("logsigmoid",),
    "bitwise_not": ("invert",),
    "remainder": ("mod",),
    "floor_divide": ("floordiv",),
    "threshold": ("_threshold",),
    "bitwise_and": ("and",),
    "bitwise_or": ("or",),
    "bitwise_xor": ("xor",),
    "bitwise_left_shift": ("lshift",),
    "bitwise_right_shift": ("rshift",),
}
_CASTS = "float half bfloat16 double type type_as cpu cuda int long bool short _to_copy cfloat cdouble chalf"


def _elementwise_operators(names: str, rule: RuleFn, **common: Any) -> tuple[Operator, ...]:
    return tuple(
        Operator(name=n, kind=Kind.ELEMENTWISE, rule=rule, spellings=_SPELLINGS.get(n, ()), **common)
        for n in names.split()
    )


def _arithmetic(name: str, rule: RuleFn, *spellings: str, **fields: Any) -> Operator:
    return Operator(
        name=name,
        kind=Kind.ELEMENTWISE,
        rule=rule,
        spellings=spellings,
        described_by=CallDescription.BY_SCALAR,
        **fields,
    )


OPERATORS = (
    *_elementwise_operators("neg", linear_unary),
    *_elementwise_operators("positive", linear_unary, passes_gradient_through=True),
    *_elementwise_operators(
        " ".join(n for n in UNARY.split() if n not in (*" ".join(_BACKWARD_TENSORS.values()).split(), "gelu")),
        elementwise,
    ),
    *(
        op
        for count, names in _BACKWARD_TENSORS.items()
        for op in _elementwise_operators(names, elementwise, backward_workspace_bytes=operand_bytes(count))
    ),
    *_elementwise_operators("gelu", elementwise, arguments="input"),
    *_elementwise_operators(BINARY, elementwise),
    *_elementwise_operators(COMPLEX, elementwise),
    *_elementwise_operators("polygamma mvlgamma fill", elementwise),
    Operator(name="broadcast_tensors", kind=Kind.MOVE, rule=_broadcast_alike),
    Operator(name="clamp", kind=Kind.ELEMENTWISE, rule=elementwise, spellings=("clip",), arguments="input min max"),
    Operator(name="where", kind=Kind.ELEMENTWISE, rule=elementwise, arguments="condition input other"),
    Operator(name="masked_fill", kind=Kind.ELEMENTWISE, rule=elementwise, arguments="input mask value"),
    # functions that models define themselves
    *_elementwise_operators("GeLUFunction SqrtBoundDerivative", elementwise),
    _arithmetic("add", _sum, "radd", arguments="input other", passes_gradient_through=True),
    _arithmetic("sub", _sum, "subtract", arguments="input other"),
    _arithmetic("rsub", _sum),
    _arithmetic(
        "mul",
        _scale,
        "multiply",
        "rmul",
        arguments="input other",
        backward_workspace_bytes=_broadcast_factor_bytes,
        title="multiply",
    ),
    _arithmetic(
        "div",
        _scale,
        "divide",
        "true_divide",
        "truediv",
        arguments="input other",
        backward_workspace_bytes=_quotient_bytes,
    ),
    _arithmetic("rdiv", elementwise, "rtruediv", backward_workspace_bytes=operand_bytes(3)),
    _arithmetic("pow", elementwise, arguments="input exponent", backward_workspace_bytes=operand_bytes(2)),
    _arithmetic("rpow", elementwise),
    Operator(
        name="to", kind=Kind.CAST, rule=_cast, spellings=tuple(_CASTS.split()), local_execution=LocalExecution.MEMORY
    ),
    # it is the identity on every rank, since capture and the runtime switch it off (p = 0)
    *operators(
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout",
        kind=Kind.RANDOM,
        rule=linear_unary,
        arguments="input p training",
    ),
)
