"""Which dims of an op may be split along one mesh axis, and what that makes of its operands and results.

An op is an equation over named dims (`bsh,oh->bso`). Along one mesh axis it runs whole, or with one of
those dims split: an operand that has the dim is `Shard`, one that lacks it is whole and its gradient is
`Partial`; a result that lacks it is `Partial`. Ops linear in an operand also pass `Partial` through.
Mesh axes are independent, so a rule speaks of one axis only; `strategy` takes the product.

A rule returns `Split`s; `rows(op, values)` turns them into `Row`s. An op without a rule runs replicated
and is *named* in the result: it never costs zero in silence.
"""

from __future__ import annotations

import math
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


def view_groups(src: tuple[int, ...], dst: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims of `src` and `dst` that hold the same elements (row-major reshape)."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(src) or j < len(dst):
        a, b = ([i] if i < len(src) else []), ([j] if j < len(dst) else [])
        x, y = math.prod(src[k] for k in a), math.prod(dst[k] for k in b)
        i, j = i + len(a), j + len(b)
        while x != y:
            if x < y and i < len(src):
                a, x, i = [*a, i], x * src[i], i + 1
            elif j < len(dst):
                b, y, j = [*b, j], y * dst[j], j + 1
            else:
                break
        groups.append((a, b))
    return groups


def _major(dims: list[int], shape: tuple[int, ...]) -> DimOf:
    return next((d for d in dims if shape[d] > 1), None)


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel")
def _view(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Only the outermost dim of a run of merged dims can be split without moving elements."""
    found = []
    rest: list[DimOf] = [None] * (len(ins) - 1)
    for a, b in view_groups(ins[0], outs[0]):
        i, j = _major(a, ins[0]), _major(b, outs[0])
        if i is not None and j is not None:
            found.append(split(f"d{i}", [i, *rest], [j], ins[0][i], outs[0][j]))
    return Rule(tuple(found), linear=(0,))


@rule("transpose", "permute", "t", "swapaxes", "movedim", "T", "mT", "swapdims")
def _permute(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    order = op.attrs.get("dims")
    if not isinstance(order, tuple):
        return Rule((), known=False)
    return Rule(
        tuple(split(f"d{i}", [int(i)], [j], outs[0][j]) for j, i in enumerate(order) if isinstance(i, int) and outs[0][j] > 1),
        linear=(0,),
    )  # fmt: skip


@rule("expand", "expand_as", "broadcast_to")
def _expand(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rank = len(outs[0])
    rest: list[DimOf] = [None] * (len(ins) - 1)
    return Rule(
        tuple(
            split(f"d{d}", [aligned(ins[0], rank, d), *rest], [d], outs[0][d]) for d in range(rank) if outs[0][d] > 1
        ),
        linear=(0,),
    )


@rule("repeat", "repeat_interleave", "tile")
def _repeat(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    shift = len(outs[0]) - len(ins[0])
    rest: list[DimOf] = [None] * (len(ins) - 1)
    same = [d for d in range(len(ins[0])) if ins[0][d] == outs[0][d + shift] > 1]
    return Rule(tuple(split(f"d{d}", [d, *rest], [d + shift], ins[0][d]) for d in same), linear=(0,))


@rule("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
def _split(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    cut = changed_dim(op, ins[0], outs[0])
    found = [split(f"d{d}", [d], [d] * len(outs), n) for d, n in enumerate(ins[0]) if d != cut and n > 1]
    sizes = tuple(o[cut] for o in outs)
    # fused projections: every part is split, so the dim is dealt part by part
    found.append(Split(f"d{cut}", (cut,), (cut,) * len(outs), sizes, segments={0: sizes}))
    return Rule(tuple(found), linear=(0,))


@rule("cat", "concat", "stack", "concatenate", "hstack")
def _cat(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rank, stacked = len(outs[0]), len(outs[0]) > max(len(s) for s in ins)
    full = next((s for s in ins if len(s) == rank), ins[0])  # torch lets an empty vector join anything
    cut = _dim_attr(op, rank) if stacked else changed_dim(op, full, outs[0])
    found = []
    for d in range(rank):
        if d == cut or outs[0][d] == 1:
            continue
        own = d - (stacked and d > cut)
        dims = [own if stacked or len(s) == rank else None for s in ins]
        found.append(split(f"d{d}", dims, [d], outs[0][d]))
    return Rule(tuple(found), linear=tuple(range(len(ins))))


@rule("unbind")
def _unbind(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    cut = _dim_attr(op, len(ins[0]))
    found = [split(f"d{d}", [d], [d - (d > cut)] * len(outs), n) for d, n in enumerate(ins[0]) if d != cut and n > 1]
    return Rule(tuple(found), linear=(0,))


@rule("getitem", "select", "narrow")
def _getitem(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims taken whole may be split; a dim that is cut, picked from or indexed may not."""
    if op.fn != "getitem":
        cut = dims_attr(op, "dim", len(ins[0]))[0]
        index: list[object] = [("slice", None, None, None)] * len(ins[0])
        index[cut] = ("int", 0) if op.fn == "select" else ("slice", 0, outs[0][cut], 1)
    else:
        raw = op.attrs.get("index", ())
        index = list(raw) if isinstance(raw, tuple) else []
    if len(ins) > 1 or any(isinstance(i, tuple) and i and i[0] in ("tensor", "other") for i in index):
        return Rule(())
    found, i, j = [], 0, 0
    for item in index:
        kind = item[0] if isinstance(item, tuple) and item else "slice"
        if kind == "none":
            j += 1
            continue
        if kind == "slice" and ins[0][i] == outs[0][j] > 1:
            found.append(split(f"d{i}", [i], [j], ins[0][i]))
        i, j = i + 1, j + (kind == "slice")
    found += [
        split(f"d{a}", [a], [b], ins[0][a])
        for a, b in zip(range(i, len(ins[0])), range(j, len(outs[0])), strict=False)
        if ins[0][a] > 1
    ]
    return Rule(tuple(found), linear=(0,))


@rule("pad", "roll", "flip", "tril", "triu", "constant_pad_nd")
def _keeps_equal_dims(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    touched = set(dims_attr(op, "dims", len(ins[0]))) if op.fn in ("roll", "flip") else set()
    if op.fn in ("tril", "triu"):
        touched = {len(ins[0]) - 1, len(ins[0]) - 2}
    same = [d for d, n in enumerate(ins[0]) if n == outs[0][d] > 1 and d not in touched]
    zero = op.attrs.get("value") in (None, 0, 0.0) and op.attrs.get("mode", "constant") in ("constant", None)
    return Rule(tuple(split(f"d{d}", [d], [d], ins[0][d]) for d in same), linear=(0,) if zero else ())


HEAVY = frozenset((
    "linear", "addmm", "baddbmm", "matmul", "bmm", "mm", "rmatmul", "einsum", "embedding", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
    "moe_experts", "batch_norm", "layer_norm", "rms_norm", "group_norm", "selective_scan", "chunk_scan",
    "delta_rule", "wkv", "mlstm", "expert_linear",
))  # fmt: skip


def is_heavy(op: Op) -> bool:
    """Whether the op leads a group of its own: a product, a lookup, a norm, attention or a loss."""
    return op.fn in HEAVY
