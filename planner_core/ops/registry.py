"""Which dims of an op may be split along one mesh axis, and what that makes of its operands and results.

An op is an equation over named dims (`bsh,oh->bso`). Along one mesh axis it runs whole, or with one of
those dims split: an operand that has the dim is `Shard`, one that lacks it is whole and its gradient is
`Partial`; a result that lacks it is `Partial`. Ops linear in an operand also pass `Partial` through.
Mesh axes are independent, so a rule speaks of one axis only; `strategy` takes the product.

A rule returns `Split`s; `rows(op, values)` turns them into `Row`s. An op without a rule runs replicated
and is *named* in the result: it never costs zero in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from planner_core.core import Op, P, Placement, R, Shard, Value

DimOf: TypeAlias = int | None
WHOLE = -1
"""In `Split.outputs`: every device ends with the whole result."""
Pair: TypeAlias = tuple[Placement, Placement]
"""Placement of a tensor and of its gradient along one axis."""


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside a row (parallel cross-entropy): `num_bytes` whole, shrunk by splits of `shrinks` on other axes."""

    phase: str
    kind: str
    num_bytes: int
    shrinks: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """One dim of the op's equation: where it stands in each operand and result (None: not there).

    `divides` are the extents that the number of parts must divide. `bias` are operands added once to a
    Partial result. `segments` maps an operand position to the sizes of the fused parts along its split dim.
    """

    label: str
    inputs: tuple[DimOf, ...]
    outputs: tuple[DimOf, ...]
    divides: tuple[int, ...]
    bias: tuple[int, ...] = ()
    segments: dict[int, tuple[int, ...]] = field(default_factory=dict)
    internal: tuple[Internal, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run an op along one mesh axis: (placement, gradient placement) of each operand and result.

    `label` is "R" (whole), "P" (whole, Partial passes through), "G" (whole, a Partial gradient passes) or the split dim's name.
    """

    label: str
    inputs: tuple[Pair, ...]
    outputs: tuple[Pair, ...]
    divides: tuple[int, ...] = ()
    internal: tuple[Internal, ...] = ()
    segments: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def splits_work(self) -> bool:
        """Whether each device does only its share."""
        return self.label not in ("R", "P", "G")


@dataclass(frozen=True, slots=True)
class Rule:
    """The splits of an op, and the operands in which it is linear (through which Partial may pass together)."""

    splits: tuple[Split, ...]
    linear: tuple[int, ...] = ()
    known: bool = True


Shapes: TypeAlias = list[tuple[int, ...]]
RuleFn: TypeAlias = Callable[[Op, Shapes, Shapes], Rule]
_RULES: dict[str, RuleFn] = {}


def rows(op: Op, values: Sequence[Value]) -> tuple[Row, ...]:
    """All rows of `op`; the first is always the replicated one."""
    rule = rule_of(op, values)
    kinds = [values[i] for i in op.inputs]
    found = [_whole(op, kinds)]
    found += [_split_row(op, s, kinds, values) for s in rule.splits]
    if rule.linear and any(kinds[i].kind == "activation" for i in rule.linear):
        found.append(_partial_row(op, rule.linear, kinds, values))
    if op.fn == "embedding" or not is_heavy(op):
        found += _summed_later(op, rule, kinds, values)
    return tuple(found)


def rule_of(op: Op, values: Sequence[Value]) -> Rule:
    """The op's rule on its global shapes; `known` is False where there is none."""
    make = _RULES.get(op.fn) or _RULES.get(op.fn.rstrip("_"))
    if make is None:
        return Rule((), known=False)
    return make(op, [values[i].meta.shape for i in op.inputs], [values[i].meta.shape for i in op.outputs])


def _whole(op: Op, kinds: list[Value]) -> Row:
    return Row("R", tuple((R, R) for _ in kinds), tuple((R, R) for _ in op.outputs))


def _split_row(op: Op, s: Split, kinds: list[Value], values: Sequence[Value]) -> Row:
    def operand(i: int, dim: DimOf) -> Pair:
        if dim is not None:
            return Shard(dim), Shard(dim) if kinds[i].grad else R
        if i in s.bias:
            return P, R
        return R, P if kinds[i].grad else R

    def result(i: int, dim: DimOf) -> Pair:
        if dim is None or dim == WHOLE:
            return (P if dim is None else R), R
        return Shard(dim), Shard(dim) if values[op.outputs[i]].grad else R

    return Row(
        s.label, tuple(operand(i, d) for i, d in enumerate(s.inputs)),
        tuple(result(i, d) for i, d in enumerate(s.outputs)), s.divides, s.internal, s.segments,
    )  # fmt: skip


def _partial_row(op: Op, linear: tuple[int, ...], kinds: list[Value], values: Sequence[Value]) -> Row:
    # the product rule: a factor beside a Partial operand gets a Partial gradient
    inputs = tuple((P, R) if i in linear else (R, P if k.grad else R) for i, k in enumerate(kinds))
    return Row("P", inputs, tuple((P, R) for _ in op.outputs))


def _summed_later(op: Op, rule: Rule, kinds: list[Value], values: Sequence[Value]) -> list[Row]:
    """Whole, with a gradient that stays Partial: every backward is linear in it. So the gradient of a table of positions is
    summed in the table's shape and not in that of what was made from it."""
    if not rule.known or not rule.splits or not all(values[o].grad for o in op.outputs):
        return []
    return [Row("G", tuple((R, P if k.grad else R) for k in kinds), tuple((R, P) for _ in op.outputs))]


def rule(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Register a rule for torch functions by canonical name."""

    def add(make: RuleFn) -> RuleFn:
        for name in names:
            _RULES[name] = make
        return make

    return add


def known_functions() -> frozenset[str]:
    """Names of the torch functions that have a rule."""
    return frozenset(_RULES)


# --- pieces ------------------------------------------------------------------------------------------


def dims_attr(op: Op, name: str, rank: int) -> tuple[int, ...]:
    """A dim argument as non-negative ints; missing or None means every dim."""
    value = op.attrs.get(name, op.attrs.get("dims"))
    if value is None:
        return tuple(range(rank))
    items = value if isinstance(value, tuple) else (value,)
    return tuple(int(d) % rank for d in items if isinstance(d, int) and not isinstance(d, bool))


def split(label: str, ins: Sequence[DimOf], outs: Sequence[DimOf], *divides: int, bias: tuple[int, ...] = ()) -> Split:
    """A split without fused parts or collectives of its own."""
    return Split(label, tuple(ins), tuple(outs), divides, bias)


def aligned(shape: tuple[int, ...], rank: int, dim: int) -> DimOf:
    """Where result dim `dim` of a broadcast stands in an operand, or None where the operand is repeated."""
    own = dim - (rank - len(shape))
    return own if own >= 0 and shape[own] > 1 else None


def _dim_attr(op: Op, rank: int) -> int:
    """The dim argument of a function whose default is the first."""
    return dims_attr(op, "dim", rank)[0] if op.attrs.get("dim") is not None else 0


def changed_dim(op: Op, before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """The dim that is cut or joined: the one whose size changes, whatever way the call spelled it; else the argument."""
    return next((d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), _dim_attr(op, len(before)))


def arg(op: Op, name: str, default: int | None = None) -> int | None:
    """Position of a named tensor operand."""
    names = op.attrs.get("arg_names")
    if isinstance(names, tuple) and name in names:
        return names.index(name)
    return default


def batch_splits(ins: Shapes, out: tuple[int, ...], num_batch: int, prefix: str = "d") -> list[Split]:
    """Splits of the leading `num_batch` result dims, broadcast over the operands."""
    rank = len(out)
    return [
        split(f"{prefix}{d}", [aligned(s, rank, d) for s in ins], [d], out[d]) for d in range(num_batch) if out[d] > 1
    ]


# --- views -------------------------------------------------------------------------------------------


HEAVY = frozenset((
    "linear", "addmm", "baddbmm", "matmul", "bmm", "mm", "rmatmul", "einsum", "embedding", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
    "moe_experts", "batch_norm", "layer_norm", "rms_norm", "group_norm", "selective_scan", "chunk_scan",
    "delta_rule", "wkv", "mlstm", "expert_linear",
))  # fmt: skip


def is_heavy(op: Op) -> bool:
    """Whether the op leads a group of its own: a product, a lookup, a norm, attention or a loss."""
    return op.fn in HEAVY
