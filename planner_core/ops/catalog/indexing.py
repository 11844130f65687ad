"""Operators that look up, pick, write or create elements."""

from __future__ import annotations

from planner_core.core import Op
from planner_core.ops.operators import CallDescription, Kind, LocalExecution, Operator, operators
from planner_core.ops.rules import WHOLE, DimOf, Rule, Shapes, dims_attr, operand_dim, operand_position, split, unknown


def _embedding(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The dims of the ids may be sharded, as in the result. So may the vocabulary: each GPU looks up its own rows, and has zeros for
    all other ids, so the result is Partial."""
    ids, table = operand_position(op, "input", 0) or 0, operand_position(op, "weight", 1)
    assert table is not None

    def at(**dims: DimOf) -> list[DimOf]:
        return [dims["ids"] if i == ids else dims["table"] for i in range(len(ins))]

    splits = [split(f"d{d}", at(ids=d, table=None), [d], n) for d, n in enumerate(ins[ids]) if n > 1]
    # A split of the vocabulary leaves the ids whole, since each rank has to look which of them are its own.
    splits.append(split("vocab", at(ids=None, table=0), [None], ins[table][0]))
    splits.append(split("width", at(ids=None, table=1), [len(outs[0]) - 1], ins[table][1]))
    return Rule(tuple(splits))


def _embedding_bag(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of bags of ids [bags, length]: bags or width may be sharded. Bags that are given by offsets stay whole."""
    if len(ins) != 2 or len(outs) != 1 or len(ins[0]) != 2:
        return Rule(())
    return Rule((split("d0", [0, None], [0], ins[0][0]), split("width", [None, 1], [1], ins[1][1])))


def _gather(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that the result has in full may be sharded, except the one that is picked from; an index of size 1 is the same for all parts.
    It is linear in the picked tensor."""
    source, index = operand_position(op, "input", 0), operand_position(op, "indices", operand_position(op, "index", 1))
    if len(ins) != 2 or source is None or index is None or len({len(ins[0]), len(ins[1]), len(outs[0])}) > 1:
        return Rule((), is_known=len(ins) == 1)
    along = dims_attr(op, "dim", len(ins[0]))
    other = [d for d, n in enumerate(ins[0]) if d not in along and n == outs[0][d] > 1]
    parts = tuple(split(f"d{d}", [d, d if ins[1][d] > 1 else None], [d], ins[0][d]) for d in other)
    return Rule(parts, linear=(source,) if source == 0 else ())


def _scatter(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that every operand has in full may be sharded, except the one that is written along."""
    if "dim" not in op.attrs or any(len(s) != len(outs[0]) for s in ins):
        return unknown(op, ins, outs)
    along = dims_attr(op, "dim", len(outs[0]))
    same = [d for d, n in enumerate(outs[0]) if d not in along and n > 1 and all(s[d] == n for s in ins)]
    return Rule(tuple(split(f"d{d}", [d] * len(ins), [d], outs[0][d]) for d in same))


def _index_add(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims may be sharded, except the one that is added along; all parts use the same index. It is linear in target and addend."""
    if "dim" not in op.attrs or len(ins) != 3 or len(ins[2]) != len(outs[0]):
        return unknown(op, ins, outs)
    along = dims_attr(op, "dim", len(outs[0]))
    same = [d for d, n in enumerate(outs[0]) if d not in along and n > 1]
    return Rule(tuple(split(f"d{d}", [d, None, d], [d], outs[0][d]) for d in same), linear=(0, 2))


def _index_select(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims may be sharded, except the one that is picked from; all parts use the same index."""
    along = dims_attr(op, "dim", len(ins[0]))
    same = [d for d, n in enumerate(ins[0]) if d not in along and n > 1]
    return Rule(tuple(split(f"d{d}", [d, *[None] * (len(ins) - 1)], [d], ins[0][d]) for d in same), linear=(0,))


def _masked_scatter(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Nothing may be sharded, since the source of each element depends on the whole mask."""
    return Rule(())


def _setitem(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that are written in full may be sharded. The written value may be broadcast."""
    index = op.attrs.get("index")
    if not isinstance(index, tuple):
        return unknown(op, ins, outs)
    kinds = [i[0] if isinstance(i, tuple) else "other" for i in index]
    picked = kinds.count("tensor")  # if there is one index of one dim, the result has it in the place of that dim
    is_scattered = picked and (len(ins[1]) != 1 or "int" in kinds)
    if (
        len(ins) > 2 + picked
        or picked > 1
        or is_scattered
        or any(k not in ("slice", "int", "none", "tensor") for k in kinds)
    ):
        return unknown(op, ins, outs)
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
    splits = []
    for d, place in at:
        if ins[0][d] > 1 and place is not None:
            value = [operand_dim(ins[1 + picked], len(part), place)] if len(ins) > 1 + picked else []
            splits.append(split(f"d{d}", [d, *[None] * picked, *value], [d], ins[0][d]))
    return Rule(tuple(splits))


def _new_tensor(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Each dim of the result may be sharded, since it is filled with one number. Only the dtype of the operand matters: it may be sharded
    by the dim of the same place and size (the samples of a state), or by any while the result is Replicate."""
    (source, *rest), (result,) = ins, outs
    numbers: list[DimOf] = [None] * len(rest)
    at_once = [d if source[d : d + 1] == (n,) else None for d, n in enumerate(result)]
    return Rule(
        (
            *(split(f"made d{d}", [at_once[d], *numbers], [d], n) for d, n in enumerate(result) if n > 1),
            *(split(f"d{d}", [d, *numbers], [WHOLE], n) for d, n in enumerate(source) if n > 1),
        )
    )


def _fill_like(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The dims of the operand may be sharded, as in the result. Classes are a new last dim, which stays whole."""
    return Rule(tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(ins[0]) if n > 1))


def _histc(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of a histogram: a GPU counts its own elements, so counts are Partial. Bins without given ends span all elements."""
    low, high = (op.attrs.get(end, 0) for end in ("min", "max"))
    if len(ins) != 1 or low == high:
        return Rule(())
    return Rule(tuple(split(f"d{d}", [d], [None], n) for d, n in enumerate(ins[0]) if n > 1))


OPERATORS = (
    *operators(
        "embedding_bag", kind=Kind.LOOKUP, rule=_embedding_bag, arguments="input weight offsets", leads_group=False
    ),
    Operator(
        name="embedding",
        kind=Kind.LOOKUP,
        # rows read and written; backward zeroes, sorts and adds (torch's embedding backward)
        memory_passes=(2.0, 6.0, 2.0, 6.0),
        rule=_embedding,
        arguments="input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
        lookup_argument="weight",
        local_execution=LocalExecution.PART,
    ),
    Operator(name="gather", kind=Kind.INDEX, rule=_gather, arguments="input dim index"),
    Operator(name="take_along_dim", kind=Kind.INDEX, rule=_gather, arguments="input indices dim"),
    Operator(name="scatter", kind=Kind.INDEX, rule=_scatter, arguments="input dim index src"),
    Operator(name="scatter_add", kind=Kind.INDEX, rule=_scatter, arguments="input dim index src"),
    Operator(name="scatter_reduce", kind=Kind.INDEX, rule=_scatter),
    Operator(name="index_add", kind=Kind.INDEX, rule=_index_add, arguments="input dim index source"),
    Operator(name="index_select", kind=Kind.INDEX, rule=_index_select, arguments="input dim index"),
    Operator(name="masked_scatter", kind=Kind.INDEX, rule=_masked_scatter),
    Operator(
        name="setitem", kind=Kind.INDEX, rule=_setitem, spellings=("index_put",), described_by=CallDescription.BY_INDEX
    ),
    Operator(
        name="histc",
        kind=Kind.INDEX,
        rule=_histc,
        arguments="input bins min max",
        local_execution=LocalExecution.MEMORY,
    ),
    Operator(name="one_hot", kind=Kind.INDEX, rule=_fill_like, arguments="input num_classes"),
    *operators("zeros_like ones_like full_like empty_like", kind=Kind.CREATE, rule=_fill_like),
    *operators(
        "new_zeros new_ones new_empty",
        kind=Kind.CREATE,
        rule=_new_tensor,
        described_by=CallDescription.BY_SHAPES,
        local_execution=LocalExecution.SIZES,
    ),
    *operators("new_full", kind=Kind.CREATE, rule=_new_tensor, local_execution=LocalExecution.SIZES),
)
