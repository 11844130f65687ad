"""Rules: the dims of an operator that one mesh axis may shard, and the placements of operands and results that follow.

An op is an equation over named dims (`bsh,oh->bso`). On one mesh axis it runs Replicate, or with one of its dims split. Then

- an operand that has the dim is Shard;
- an operand that lacks the dim is Replicate, and its gradient is Partial;
- a result that lacks the dim is Partial.

An op that is linear in an operand also passes Partial through. Mesh axes are independent, so a rule is about one axis. `strategy`
takes the product over the ops of a group, and the search takes the product over the axes.

A rule is a function of an op and its global shapes. It returns a `Rule`, and `expand_rule` makes `Row`s of it. The head of the package
shows both for a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from planner_core.core import ITEM_BYTES, CollectiveKind, Op, P, Phase, Placement, R, Shard, Value

DimOf: TypeAlias = int | None
WHOLE = -1
"""In `Split.outputs`: every device has the whole result at the end."""
Pair: TypeAlias = tuple[Placement, Placement]
"""The placements of a tensor and of its gradient on one axis."""
Shapes: TypeAlias = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Internal:
    """A collective inside a row (parallel cross-entropy). `num_bytes` is its global size. Splits of the dims `shrinks` on other axes
    make it smaller. On an axis of n ranks it runs `count` + `each_rank` · n times.

    If it sends the values number `sends` of the op (operands, then results), or their gradients, a rule gives the number of elements.
    `expand_rule` makes bytes of it, in `least_item` bytes an element or more. In backward it leaves it out if none of them has a gradient.
    `share`: it is issued before the kernel of one of n blocks and waited for behind it, and this share of the kernel hides it."""

    phase: Phase
    kind: CollectiveKind
    num_bytes: int
    shrinks: tuple[str, ...] = ()
    count: int = 1
    sends: tuple[int, ...] = ()
    each_rank: int = 0
    least_item: int = 1
    share: float = 0.0

    def sized(self, ends: Sequence[Value]) -> tuple[Internal, ...]:
        """Return the same collective with its size in bytes, or none. `ends` are the op's operands and results."""
        if not self.sends:
            return (self,)
        sent = [ends[i] for i in self.sends]
        if self.phase != "forward" and not any(v.grad for v in sent):
            return ()
        # At least: sums of gradients of 2 bytes may travel in 4 (`least_item`), whatever the operands have.
        item = max(self.least_item, ITEM_BYTES[sent[0].meta.dtype])
        return (replace(self, num_bytes=self.num_bytes * item, sends=()),)

    def runs(self, n: int) -> int:
        """Return how often it runs on an axis of n ranks."""
        return self.count + self.each_rank * n


@dataclass(frozen=True, slots=True)
class Split:
    """One dim `name` of the op's equation that may be split: its position in each operand and result (None: not there).

    `divides`: extents that the number of parts must divide. `bias`: operands that are added once to a Partial result. `segments`
    maps the position of an operand to the sizes of the fused parts along its split dim. `exchanged`: inside the op these
    operands and its results are exchanged, so what it keeps of them for backward are tensors of its own. `excludes`: names of splits
    that no other mesh axis may take beside this one. `routed`: values decide how much of the work a GPU gets, so the fullest has
    `Workload.expert_imbalance` times the mean. `within`: the name of a split, and the number of parts into which the mesh axes
    before must split it.
    """

    name: str
    inputs: tuple[DimOf, ...]
    outputs: tuple[DimOf, ...]
    divides: tuple[int, ...]
    bias: tuple[int, ...] = ()
    segments: dict[int, tuple[int, ...]] = field(default_factory=dict)
    internal: tuple[Internal, ...] = ()
    exchanged: tuple[int, ...] = ()
    excludes: tuple[str, ...] = ()
    routed: bool = False
    within: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """The splits of an op, and the operands in which it is linear together: Partial passes if all of these are Partial."""

    splits: tuple[Split, ...]
    linear: tuple[int, ...] = ()
    is_known: bool = True


RuleFn: TypeAlias = Callable[[Op, Shapes, Shapes], Rule]
"""The rule of an operator: a function of the op and of the global shapes of its operands and results."""


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy of an op along one mesh axis: (placement, placement of the gradient) of each operand and result.

    `name` is the name of the split dim, or "R" (Replicate), "P" (the work is not split, and Partial passes through) or "G" (the work
    is not split, and a Partial gradient passes through).
    """

    name: str
    inputs: tuple[Pair, ...]
    outputs: tuple[Pair, ...]
    divides: tuple[int, ...] = ()
    internal: tuple[Internal, ...] = ()
    segments: dict[int, tuple[int, ...]] = field(default_factory=dict)
    exchanged: tuple[int, ...] = ()
    excludes: tuple[str, ...] = ()
    routed: bool = False
    within: tuple[str, int] | None = None

    @property
    def splits_work(self) -> bool:
        """Whether each device does only its part of the work."""
        return self.name not in ("R", "P", "G")


def can_run_together(axis_rows: Sequence[Row], sizes: Sequence[int]) -> bool:
    """Return whether an operator can run these rows at once, one for each axis of these sizes (see `Split.excludes` and `Split.within`)."""
    # Example: tokens are dealt to experts over one axis (`dispatch`). A second axis must not deal the same experts again.
    for i, row in enumerate(axis_rows):
        if any(other.name in row.excludes for k, other in enumerate(axis_rows) if i != k):
            return False
        if row.within:
            name, parts = row.within
            if math.prod(n for other, n in zip(axis_rows[:i], sizes[:i], strict=True) if other.name == name) != parts:
                return False
    return True


def unknown(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of an op that the catalogue lacks: it runs Replicate, and `is_known` is False."""
    return Rule((), is_known=False)


def expand_rule(rule: Rule, op: Op, values: Sequence[Value], summed_later: bool) -> tuple[Row, ...]:
    """Return the rows of a rule. The first one is always Replicate.

    `summed_later`: the op may also run with a gradient that stays Partial (row "G").
    """
    kinds = [values[i] for i in op.inputs]
    # Without a gradient of its results, a Replicate weight's gradient is no sum, and must not be priced as an all_reduce.
    if not any(values[o].grad for o in op.outputs):  # no gradient comes from here, so none needs to be summed
        kinds = [replace(k, grad=False) if k.kind == "parameter" else k for k in kinds]
    expanded = [Row("R", tuple((R, R) for _ in kinds), tuple((R, R) for _ in op.outputs))]
    expanded += [_split_row(op, s, kinds, values) for s in rule.splits]
    if rule.linear and any(kinds[i].kind == "activation" for i in rule.linear):
        expanded.append(_partial_row(op, rule.linear, kinds))
    if summed_later and rule.is_known and rule.splits and all(values[o].grad for o in op.outputs):
        expanded.append(_late_sum_row(op, kinds))
    return tuple(expanded)


def _split_row(op: Op, s: Split, kinds: list[Value], values: Sequence[Value]) -> Row:
    def operand(i: int, dim: DimOf) -> Pair:
        if dim is not None:
            return Shard(dim), Shard(dim) if kinds[i].grad else R
        # n devices add their terms: a whole bias on each would be added n times, so one holds it and others zeros.
        if i in s.bias:
            return P, R
        return R, P if kinds[i].grad else R

    def result(i: int, dim: DimOf) -> Pair:
        if dim is None or dim == WHOLE:
            # The gradient of a sum goes to each of its terms whole, so that of a Partial result is Replicate.
            return (P if dim is None else R), R
        return Shard(dim), Shard(dim) if values[op.outputs[i]].grad else R

    # A collective in backward is left out if no gradient comes back: the operator has no backward then.
    ends = [*kinds, *(values[o] for o in op.outputs)]
    phases = {"forward", "backward"} if any(values[o].grad for o in op.outputs) else {"forward"}
    internal = tuple(sized for c in s.internal if c.phase in phases for sized in c.sized(ends))
    return Row(
        s.name,
        tuple(operand(i, d) for i, d in enumerate(s.inputs)),
        tuple(result(i, d) for i, d in enumerate(s.outputs)),
        s.divides,
        internal,
        s.segments,
        s.exchanged,
        s.excludes,
        s.routed,
        s.within,
    )


def _partial_row(op: Op, linear: tuple[int, ...], kinds: list[Value]) -> Row:
    # the product rule: a factor beside a Partial operand gets a Partial gradient
    # Example: y = a * b with a = a1 + a2 on two ranks. The gradient of a is dy * b on both; that of b is dy * a1 + dy * a2, two terms.
    inputs = tuple((P, R) if i in linear else (R, P if k.grad else R) for i, k in enumerate(kinds))
    return Row("P", inputs, tuple((P, R) for _ in op.outputs))


def _late_sum_row(op: Op, kinds: list[Value]) -> Row:
    """Return the row "G": the work is not split, and the gradient stays Partial, since every backward is linear in it.

    With it, the gradient of a table of positions is summed in the shape of the table, and not in that of a larger tensor that was
    made from the table.
    """
    return Row("G", tuple((R, P if k.grad else R) for k in kinds), tuple((R, P) for _ in op.outputs))


# --- pieces of rules ---------------------------------------------------------------------------------


def split(name: str, ins: Sequence[DimOf], outs: Sequence[DimOf], *divides: int, bias: tuple[int, ...] = ()) -> Split:
    """Return a split without fused parts or collectives of its own."""
    return Split(name, tuple(ins), tuple(outs), divides, bias)


def operand_dim(shape: tuple[int, ...], rank: int, dim: int) -> DimOf:
    """Return the dim of an operand that is dim `dim` of the broadcast result, or None if the operand is repeated along it."""
    # Broadcasting aligns the last dims. Example: dim 2 of a result [2, 3, 4] is dim 0 of an operand [4], and no dim of [1].
    dim_of_operand = dim - (rank - len(shape))
    return dim_of_operand if dim_of_operand >= 0 and shape[dim_of_operand] > 1 else None


def broadcast_splits(ins: Shapes, out: tuple[int, ...], num_dims: int | None = None, prefix: str = "d") -> list[Split]:
    """Splits of the first `num_dims` dims of a result (default: all) to which the operands are broadcast."""
    rank = len(out)
    return [
        split(f"{prefix}{d}", [operand_dim(s, rank, d) for s in ins], [d], out[d])
        for d in range(rank if num_dims is None else num_dims)
        if out[d] > 1
    ]


def dims_attr(op: Op, name: str, rank: int) -> tuple[int, ...]:
    """Return a dim argument as non-negative ints. If it is missing or None, it means every dim."""
    value = op.attrs.get(name, op.attrs.get("dims"))
    if value is None:
        return tuple(range(rank))
    items = value if isinstance(value, tuple) else (value,)
    return tuple(int(d) % max(rank, 1) for d in items if isinstance(d, int) and not isinstance(d, bool))


def dim_attr(op: Op, rank: int) -> int:
    """Return the dim argument of a function whose default is the first."""
    return dims_attr(op, "dim", rank)[0] if op.attrs.get("dim") is not None else 0


def changed_dim(op: Op, before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the dim that is cut or joined: the one whose size changes; if none does, the dim argument."""
    return next((d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), dim_attr(op, len(before)))


def operand_position(op: Op, name: str, default: int | None) -> int | None:
    """Position of a named tensor operand."""
    names = op.attrs.get("arg_names")
    if isinstance(names, tuple) and name in names:
        return names.index(name)
    return default


def int_attr(op: Op, name: str, default: int) -> int:
    """Return a number argument."""
    value = op.attrs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def ints(value: object) -> tuple[int, ...]:
    """Return the numbers of an argument that is a tuple of them."""
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()
