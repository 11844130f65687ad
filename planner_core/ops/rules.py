"""What a rule is: the dims of an operator that one mesh axis may shard, and what that makes of operands and results.

An op is an equation over named dims (`bsh,oh->bso`). Along one mesh axis it runs whole, or with one of those dims
split. An operand that has the dim is `Shard`; an operand that lacks it is whole, and its gradient is `Partial`. A
result that lacks the dim is `Partial`. An op that is linear in an operand also passes `Partial` through. Mesh axes are
independent, so a rule speaks of one axis only; `strategy` takes the product over the ops of a group, and the search
takes it over the axes.

A rule is a function of an op and its global shapes that returns a `Rule`; `expand` turns that into `Row`s. The head of
the package shows both for a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from planner_core.core import Op, P, Placement, R, Shard, Value

DimOf: TypeAlias = int | None
WHOLE = -1
"""In `Split.outputs`: every device ends with the whole result."""
Pair: TypeAlias = tuple[Placement, Placement]
"""Placement of a tensor and of its gradient along one axis."""
Shapes: TypeAlias = list[tuple[int, ...]]


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
class Rule:
    """The splits of an op, and the operands in which it is linear (through which Partial may pass together)."""

    splits: tuple[Split, ...]
    linear: tuple[int, ...] = ()
    known: bool = True


RuleFn: TypeAlias = Callable[[Op, Shapes, Shapes], Rule]
"""The rule of an operator: the op and the global shapes of its operands and results."""


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy of an op along one mesh axis: (placement, gradient placement) of each operand and result.

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


def unknown(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The rule of an op that nobody described: it runs whole, and `known` is False."""
    return Rule((), known=False)


def expand(rule: Rule, op: Op, values: Sequence[Value], summed_later: bool) -> tuple[Row, ...]:
    """The rows of a rule; the first is always the replicated one.

    `summed_later`: the op may run whole under a gradient that stays Partial ("G").
    """
    kinds = [values[i] for i in op.inputs]
    if not any(values[o].grad for o in op.outputs):  # no gradient of a weight comes from here, so none is summed
        kinds = [replace(k, grad=False) if k.kind == "parameter" else k for k in kinds]
    found = [Row("R", tuple((R, R) for _ in kinds), tuple((R, R) for _ in op.outputs))]
    found += [_split_row(op, s, kinds, values) for s in rule.splits]
    if rule.linear and any(kinds[i].kind == "activation" for i in rule.linear):
        found.append(_partial_row(op, rule.linear, kinds))
    if summed_later and rule.known and rule.splits and all(values[o].grad for o in op.outputs):
        found.append(_summed_later(op, kinds))
    return tuple(found)


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


def _partial_row(op: Op, linear: tuple[int, ...], kinds: list[Value]) -> Row:
    # the product rule: a factor beside a Partial operand gets a Partial gradient
    inputs = tuple((P, R) if i in linear else (R, P if k.grad else R) for i, k in enumerate(kinds))
    return Row("P", inputs, tuple((P, R) for _ in op.outputs))


def _summed_later(op: Op, kinds: list[Value]) -> Row:
    """Whole, with a gradient that stays Partial, since every backward is linear in it.

    So the gradient of a table of positions is summed in the table's shape, and not in that of what was made from it.
    """
    return Row("G", tuple((R, P if k.grad else R) for k in kinds), tuple((R, P) for _ in op.outputs))


# --- pieces of rules ---------------------------------------------------------------------------------


def split(label: str, ins: Sequence[DimOf], outs: Sequence[DimOf], *divides: int, bias: tuple[int, ...] = ()) -> Split:
    """A split without fused parts or collectives of its own."""
    return Split(label, tuple(ins), tuple(outs), divides, bias)


def aligned(shape: tuple[int, ...], rank: int, dim: int) -> DimOf:
    """Where result dim `dim` of a broadcast stands in an operand, or None where the operand is repeated."""
    own = dim - (rank - len(shape))
    return own if own >= 0 and shape[own] > 1 else None


def broadcast_splits(ins: Shapes, out: tuple[int, ...], num_dims: int | None = None, prefix: str = "d") -> list[Split]:
    """Splits of the first `num_dims` dims of a result (default: all) to which the operands are broadcast."""
    rank = len(out)
    return [
        split(f"{prefix}{d}", [aligned(s, rank, d) for s in ins], [d], out[d])
        for d in range(rank if num_dims is None else num_dims)
        if out[d] > 1
    ]


def dims_attr(op: Op, name: str, rank: int) -> tuple[int, ...]:
    """A dim argument as non-negative ints; missing or None means every dim."""
    value = op.attrs.get(name, op.attrs.get("dims"))
    if value is None:
        return tuple(range(rank))
    items = value if isinstance(value, tuple) else (value,)
    return tuple(int(d) % max(rank, 1) for d in items if isinstance(d, int) and not isinstance(d, bool))


def dim_attr(op: Op, rank: int) -> int:
    """The dim argument of a function whose default is the first."""
    return dims_attr(op, "dim", rank)[0] if op.attrs.get("dim") is not None else 0


def changed_dim(op: Op, before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """The dim that is cut or joined: the one whose size changes, whatever way the call spelled it; else the argument."""
    return next((d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), dim_attr(op, len(before)))


def arg(op: Op, name: str, default: int | None = None) -> int | None:
    """Position of a named tensor operand."""
    names = op.attrs.get("arg_names")
    if isinstance(names, tuple) and name in names:
        return names.index(name)
    return default


def int_attr(op: Op, name: str, default: int) -> int:
    """A number argument."""
    value = op.attrs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def ints(value: object) -> tuple[int, ...]:
    """The numbers of an argument that is a tuple of them."""
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()
