"""Rules of ops that pick, place and make elements: gather, scatter, writes in place, lookups, tensors made like another (see `rules`)."""

from __future__ import annotations

from planner_core.core import Op
from planner_core.ops.registry import WHOLE, DimOf, Rule, Shapes, aligned, arg, dims_attr, rule, split


@rule("embedding")
def _embedding(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Ids split like the result; a split vocabulary looks up its own rows, zero elsewhere, so the result is Partial."""
    ids, table = arg(op, "input", 0) or 0, arg(op, "weight", 1)
    assert table is not None

    def at(**dims: DimOf) -> list[DimOf]:
        return [dims["ids"] if i == ids else dims["table"] for i in range(len(ins))]

    found = [split(f"d{d}", at(ids=d, table=None), [d], n) for d, n in enumerate(ins[ids]) if n > 1]
    found.append(split("vocab", at(ids=None, table=0), [None], ins[table][0]))
    found.append(split("width", at(ids=None, table=1), [len(outs[0]) - 1], ins[table][1]))
    return Rule(tuple(found))


@rule("gather", "take_along_dim")
def _gather(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that both hold in full, other than the one picked from; linear in what is picked from."""
    source, index = arg(op, "input", 0), arg(op, "index", 1)
    if len(ins) != 2 or source is None or index is None or len(ins[0]) != len(ins[1]):
        return Rule((), known=len(ins) == 1)
    along = dims_attr(op, "dim", len(ins[0]))
    same = [d for d in range(len(ins[0])) if d not in along and ins[0][d] == ins[1][d] > 1]
    return Rule(tuple(split(f"d{d}", [d, d], [d], ins[0][d]) for d in same), linear=(source,) if source == 0 else ())


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that every operand holds in full, other than the one written along."""
    if "dim" not in op.attrs or any(len(s) != len(outs[0]) for s in ins):
        return Rule((), known=False)
    along = dims_attr(op, "dim", len(outs[0]))
    same = [d for d, n in enumerate(outs[0]) if d not in along and n > 1 and all(s[d] == n for s in ins)]
    return Rule(tuple(split(f"d{d}", [d] * len(ins), [d], outs[0][d]) for d in same))


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def _like(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """As its operand is split, so is the result; the values of the operand do not matter."""
    return Rule(tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(outs[0]) if n > 1))


@rule("log_sigmoid", "GeLUFunction", "SqrtBoundDerivative")
def _own_activation(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Elementwise functions that models bring along."""
    return _like(op, ins, outs)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Only the type of the operand matters: however it is split, the result is whole."""
    rest: list[DimOf] = [None] * (len(ins) - 1)
    return Rule(tuple(split(f"d{d}", [d, *rest], [WHOLE], n) for d, n in enumerate(ins[0]) if n > 1))


@rule("data")
def _data(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The tensor itself, without its gradient."""
    return Rule(tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(ins[0]) if n > 1), linear=(0,))


@rule("one_hot")
def _one_hot(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The classes are a dim of their own, last and whole."""
    return Rule(tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(ins[0]) if n > 1))


@rule("copy_")
def _copy(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rank = len(outs[0])
    return Rule(
        tuple(split(f"d{d}", [aligned(s, rank, d) for s in ins], [d], n) for d, n in enumerate(outs[0]) if n > 1)
    )


@rule("setitem")
def _setitem(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that are written in full; the value written may be broadcast."""
    index = op.attrs.get("index")
    if not isinstance(index, tuple):
        return Rule((), known=False)
    kinds = [i[0] if isinstance(i, tuple) else "other" for i in index]
    picked = kinds.count("tensor")  # one index of one dim stands in the place of its dim
    apart = picked and (len(ins[1]) != 1 or "int" in kinds)
    if len(ins) > 2 + picked or picked > 1 or apart or any(k not in ("slice", "int", "none", "tensor") for k in kinds):
        return Rule((), known=False)
    at: list[tuple[int, DimOf]] = []  # dim of the target, and whether it is whole in the part written
    part: list[DimOf] = []  # for each dim of the part written, the target's dim if it is whole
    dim = 0
    for item in index:
        assert isinstance(item, tuple)
        if item[0] == "none":
            part.append(None)
            continue
        whole = item[0] == "slice" and tuple(item[1:]) == (0, ins[0][dim], 1)
        if item[0] in ("slice", "tensor"):
            part.append(dim if whole else None)
        if whole:
            at.append((dim, len(part) - 1))
        dim += 1
    found = []
    for d, place in at:
        if ins[0][d] > 1 and place is not None:
            value = [aligned(ins[1 + picked], len(part), place)] if len(ins) > 1 + picked else []
            found.append(split(f"d{d}", [d, *[None] * picked, *value], [d], ins[0][d]))
    return Rule(tuple(found))


@rule("view_as_complex")
def _to_complex(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    return Rule(tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(outs[0]) if n > 1), linear=(0,))


@rule("view_as_real")
def _to_real(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    return Rule(tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(ins[0]) if n > 1), linear=(0,))


@rule("masked_scatter")
def _masked_scatter(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Where each element comes from depends on the whole mask: whole, and known to be so."""
    return Rule(())


@rule("index_select")
def _index_select(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The dim picked from is whole; the index is shared."""
    along = dims_attr(op, "dim", len(ins[0]))
    same = [d for d, n in enumerate(ins[0]) if d not in along and n > 1]
    return Rule(tuple(split(f"d{d}", [d, *[None] * (len(ins) - 1)], [d], ins[0][d]) for d in same), linear=(0,))
