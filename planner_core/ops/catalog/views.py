"""Views and moves: dims are merged, cut, transposed or joined. A sharded dim is mapped to its dim of the result; a split that would
not be even is refused."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from planner_core.core import Op
from planner_core.ops.catalog.elementwise import linear_unary
from planner_core.ops.operators import CallDescription, Kind, LocalExecution, Operator, operators
from planner_core.ops.rules import (
    DimOf,
    Rule,
    RuleFn,
    Shapes,
    Split,
    broadcast_splits,
    changed_dim,
    dim_attr,
    dims_attr,
    int_attr,
    ints,
    operand_dim,
    split,
    unknown,
)


def view_groups(src: tuple[int, ...], dst: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims of `src` and `dst` that hold the same elements (row-major reshape).

    Example: [2, 6, 4] to [12, 4] gives the runs ([0, 1], [0]) and ([2], [1]).
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(src) or j < len(dst):
        a, b = ([i] if i < len(src) else []), ([j] if j < len(dst) else [])
        x, y = math.prod(src[k] for k in a), math.prod(dst[k] for k in b)
        i, j = i + len(a), j + len(b)
        while x != y:
            if x < y and i < len(src):
                # Example: [2, 6, 4] to [12, 4]. 2 is less than 12, so the run takes the 6 too: 2 * 6 = 12 closes it.
                a, x, i = [*a, i], x * src[i], i + 1
            elif j < len(dst):
                b, y, j = [*b, j], y * dst[j], j + 1
            else:
                break
        groups.append((a, b))
    return groups


def _view(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """The outermost dim of a run of merged dims may be sharded. To shard another one would move elements.

    The next dim may be sharded where the mesh axes before shard the outermost one into single elements: then nothing moves.
    Example: two samples of 8 tokens, [2, 8] to [16]. On a mesh of 2 x 4 each GPU has two tokens of one sample, [1, 2] to [2].
    """
    splits = []
    rest: list[DimOf] = [None] * (len(ins) - 1)
    for a, b in view_groups(ins[0], outs[0]):
        merged, cut = ([d for d in dims if shape[d] > 1] for dims, shape in ((a, ins[0]), (b, outs[0])))
        if not merged or not cut:
            continue
        (i, *inner), (j, *under) = merged, cut
        # Both extents have to divide. Example: [2, 6] to [12] in 4 parts: 12 / 4 is 3, but 2 samples cannot be cut in 4.
        splits.append(split(f"d{i}", [i, *rest], [j], ins[0][i], outs[0][j]))
        if inner and not under:
            splits.append(_inner_split(f"d{inner[0]}", (inner[0], *rest), j, ins[0][inner[0]], (f"d{i}", ins[0][i])))
        elif under and not inner:
            splits.append(
                _inner_split(f"d{i}.{under[0]}", (i, *rest), under[0], outs[0][under[0]], (f"d{i}", outs[0][j]))
            )
    return Rule(tuple(splits), linear=(0,))


def _inner_split(name: str, ins: tuple[DimOf, ...], out: int, extent: int, outer: tuple[str, int]) -> Split:
    return Split(name, ins, (out,), (extent,), within=outer)


def _permute(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    order = op.attrs.get("dims")
    if not isinstance(order, tuple):
        return unknown(op, ins, outs)
    moved = [(i, j) for j, i in enumerate(ints(order)) if outs[0][j] > 1]
    return Rule(tuple(split(f"d{i}", [i], [j], outs[0][j]) for i, j in moved), linear=(0,))


def _expand(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rank = len(outs[0])
    rest: list[DimOf] = [None] * (len(ins) - 1)
    dims = [d for d in range(rank) if outs[0][d] > 1]
    return Rule(
        tuple(split(f"d{d}", [operand_dim(ins[0], rank, d), *rest], [d], outs[0][d]) for d in dims), linear=(0,)
    )


def _repeat(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    shift = len(outs[0]) - len(ins[0])
    rest: list[DimOf] = [None] * (len(ins) - 1)
    if shift < 0:  # flattened first
        return Rule(())
    same = [d for d in range(len(ins[0])) if ins[0][d] == outs[0][d + shift] > 1]
    return Rule(tuple(split(f"d{d}", [d, *rest], [d + shift], ins[0][d]) for d in same), linear=(0,))


def _split(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    if len(ins) != 1:  # places of the cuts that a tensor holds
        return Rule(())
    cut = changed_dim(op, ins[0], outs[0])
    splits = [split(f"d{d}", [d], [d] * len(outs), n) for d, n in enumerate(ins[0]) if d != cut and n > 1]
    sizes = tuple(o[cut] for o in outs)
    # fused projections: the dim is sharded part by part, so that every device holds a piece of every part
    splits.append(Split(f"d{cut}", (cut,), (cut,) * len(outs), sizes, segments={0: sizes}))
    return Rule(tuple(splits), linear=(0,))


def _cat(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    rank, stacked = len(outs[0]), len(outs[0]) > max(len(s) for s in ins)
    full = next((s for s in ins if len(s) == rank), ins[0])  # torch lets an empty vector join anything
    cut = dim_attr(op, rank) if stacked else changed_dim(op, full, outs[0])
    splits = []
    for d in range(rank):
        if d == cut or outs[0][d] == 1:
            continue
        # `stack` makes a new dim at `cut`, so behind it the operands' dims are one place earlier.
        dim_of_operand = d - (stacked and d > cut)
        dims = [dim_of_operand if stacked or len(s) == rank else None for s in ins]
        splits.append(split(f"d{d}", dims, [d], outs[0][d]))
    return Rule(tuple(splits), linear=tuple(range(len(ins))))


def _unbind(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    cut = dim_attr(op, len(ins[0]))
    splits = [split(f"d{d}", [d], [d - (d > cut)] * len(outs), n) for d, n in enumerate(ins[0]) if d != cut and n > 1]
    return Rule(tuple(splits), linear=(0,))


def _getitem(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of an index: dims that are taken whole may be sharded, and those of tensors of indices, but none that is cut or
    picked from."""
    index = op.attrs.get("index", ())
    return _index_rule(list(index) if isinstance(index, tuple) else [], ins, outs)


def _select(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """One index of a dim, which vanishes. All other dims may be sharded."""
    cut = dims_attr(op, "dim", len(ins[0]))[0]
    return _index_rule([("int", 0) if d == cut else _FULL for d in range(len(ins[0]))], ins, outs)


def _narrow(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of a piece of a dim, which stays whole. All other dims may be sharded."""
    cut = dims_attr(op, "dim", len(ins[0]))[0]
    return _index_rule([("slice", 0, outs[0][cut], 1) if d == cut else _FULL for d in range(len(ins[0]))], ins, outs)


_FULL = ("slice", None, None, None)


def _index_rule(index: list[object], ins: Shapes, outs: Shapes) -> Rule:
    """Dims that are taken whole, and those of tensors of indices. These stand, broadcast, in place of the dims that they index."""
    kinds = [item[0] if isinstance(item, tuple) and item else "slice" for item in index]
    picks = [k for k, kind in enumerate(kinds) if kind in _PICKS]
    if picks and not _are_indices_adjacent(index, kinds, picks, len(ins)):
        return Rule(())
    rest: list[DimOf] = [None] * (len(ins) - 1)
    splits, i, j = [], 0, 0
    for k, kind in enumerate(kinds):
        if kind in _PICKS:
            if k == picks[0]:
                splits += _picked_splits(ins, outs, j)
                j += max((len(shape) for shape in ins[1:]), default=1)
            i += 1
            continue
        if kind == "slice" and ins[0][i] == outs[0][j] > 1:
            splits.append(split(f"d{i}", [i, *rest], [j], ins[0][i]))
        i, j = i + (kind != "none"), j + (kind != "int")
    splits += [
        split(f"d{a}", [a, *rest], [b], ins[0][a])
        for a, b in zip(range(i, len(ins[0])), range(j, len(outs[0])), strict=False)
        if ins[0][a] > 1
    ]
    return Rule(tuple(splits), linear=(0,))


_PICKS = ("tensor", "other")
"""Kinds of items of an index that pick from a dim."""


def _are_indices_adjacent(index: list[object], kinds: list[object], picks: list[int], num_operands: int) -> bool:
    """Return whether all that picks are tensors of indices without a gap, or one list of numbers. A mask picks as many as its values
    say."""
    if "int" in kinds or ("tensor", "mask") in index or picks != list(range(picks[0], picks[-1] + 1)):
        return False
    if "other" not in kinds:
        return len(picks) == num_operands - 1
    numbers = index[picks[0]][1]  # type: ignore[index]
    return len(picks) == 1 and isinstance(numbers, tuple) and all(type(n) is int for n in numbers)


def _picked_splits(ins: Shapes, outs: Shapes, first: int) -> list[Split]:
    """Return the splits of the dims of indices: what is picked from is whole."""
    rank = max((len(shape) for shape in ins[1:]), default=0)
    splits = []
    for j in range(first, first + rank):
        at = [operand_dim(shape, rank, j - first) for shape in ins[1:]]
        if outs[0][j] > 1 and any(dim is not None for dim in at):
            splits.append(split(f"i{j - first}", [None, *at], [j], outs[0][j]))
    return splits


def _pad(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that are not padded may be sharded: `(1, -1)` shifts a dim and keeps its size. Partial passes if the padding is zero."""
    pad, rank = op.attrs.get("pad"), len(ins[0])
    sizes = ints(pad)
    known = isinstance(pad, tuple) and len(sizes) == len(pad)
    touched = {rank - 1 - i // 2 for i, n in enumerate(sizes) if n} if known else range(rank)
    zero = op.attrs.get("value") in (None, 0, 0.0) and op.attrs.get("mode", "constant") in ("constant", None)
    return _rule_of_other_dims(touched, ins, outs, linear=zero)


def _roll(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that are not rolled or flipped may be sharded. Without `dims` all dims are rolled or flipped."""
    return _rule_of_other_dims(dims_attr(op, "dims", len(ins[0])), ins, outs)


def _triangular(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """All dims except the last two may be sharded."""
    return _rule_of_other_dims((len(ins[0]) - 1, len(ins[0]) - 2), ins, outs)


def _rule_of_other_dims(touched: Collection[int], ins: Shapes, outs: Shapes, linear: bool = True) -> Rule:
    same = [d for d, (n, size) in enumerate(zip(ins[0], outs[0], strict=False)) if n == size > 1 and d not in touched]
    return Rule(tuple(split(f"d{d}", [d], [d], ins[0][d]) for d in same), linear=(0,) if linear else ())


def _unfold(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Windows along one dim (`Tensor.unfold`), or patches of images [n, c, h, w] -> [n, c * patch, places] (`F.unfold`)."""
    x, out = ins[0], outs[0]
    if "kernel_size" in op.attrs:
        dims = range(len(x) - 2)  # a sample may come without a batch
        return Rule(tuple(split(f"d{d}", [d], [d], x[d]) for d in dims if x[d] > 1), linear=(0,))
    (along,) = dims_attr(op, "dimension", len(x))
    return Rule(
        tuple(split(f"d{d}", [d], [d], n) for d, n in enumerate(x) if d != along and n == out[d] > 1), linear=(0,)
    )


def _as_strided(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Overlapping chunks of every sample. The first dim may be sharded if the operand is contiguous and no sample reads another."""
    x, out = ins[0], outs[0]
    sizes, strides, laid = (ints(op.attrs.get(n)) for n in ("size", "stride", "input_stride"))
    row = math.prod(x[1:])
    if laid != contiguous_strides(x) or sizes != out or len(strides) != len(out) or op.attrs.get("storage_offset"):
        return unknown(op, ins, outs)
    # The farthest element that the chunks of a sample read lies before the next sample begins.
    is_disjoint = sum((n - 1) * s for n, s in zip(sizes[1:], strides[1:], strict=True)) < row
    if strides[0] != row or not is_disjoint or not x[0] == out[0] > 1:
        return unknown(op, ins, outs)
    rest: list[DimOf] = [None] * (len(ins) - 1)  # sizes that are tensors
    return Rule((split("d0", [0, *rest], [0], x[0]),), linear=(0,))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _diagonal(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of a diagonal: its two dims become the last one, whole."""
    rank = len(ins[0])
    pair = {int_attr(op, "dim1", 0) % rank, int_attr(op, "dim2", 1) % rank}
    rest = [d for d in range(rank) if d not in pair]
    return Rule(tuple(split(f"d{d}", [d], [j], ins[0][d]) for j, d in enumerate(rest) if ins[0][d] > 1), linear=(0,))


def _complex_parts(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of a last dim of size two that becomes the parts of a complex number, or the reverse. Other dims may be sharded."""
    return _rule_of_other_dims((), ins, outs)


def _copy(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Any dim may be sharded. The written value may be broadcast, and the old values do not matter."""
    return Rule(tuple(broadcast_splits(ins, outs[0])))


def _has_tensor_index(op: Op) -> bool:
    """Return whether an index holds a tensor or a list: then the result is a copy."""
    index = op.attrs.get("index")
    items = index if isinstance(index, tuple) else ()
    return any(isinstance(i, tuple) and i[:1] in (("tensor",), ("other",)) for i in items)


def _view_operators(names: str, rule: RuleFn, **common: Any) -> tuple[Operator, ...]:
    return operators(names, kind=Kind.VIEW, rule=rule, **common)


def _move_operators(names: str, rule: RuleFn, **common: Any) -> tuple[Operator, ...]:
    return operators(names, kind=Kind.MOVE, rule=rule, **common)


_SHAPED = {"described_by": CallDescription.BY_SHAPES, "local_execution": LocalExecution.SIZES}
_CUT = {"described_by": CallDescription.BY_SIZES, "local_execution": LocalExecution.SIZES}

OPERATORS = (
    *_view_operators("view", _view, **_SHAPED, spellings=("_unsafe_view", "_reshape_alias")),
    *_view_operators("view_as flatten unflatten", _view, **_SHAPED),
    *_move_operators("reshape reshape_as ravel", _view, **_SHAPED),
    *_view_operators("squeeze", _view, arguments="input dim", local_execution=LocalExecution.SIZES),
    *_view_operators("unsqueeze", _view, arguments="input dim", described_by=CallDescription.BY_NEW_DIM),
    *_view_operators("transpose", _permute, described_by=CallDescription.BY_ORDER, spellings=("swapaxes", "swapdims")),
    *_view_operators("movedim", _permute, described_by=CallDescription.BY_ORDER, spellings=("moveaxis",)),
    *_view_operators("T", _permute, described_by=CallDescription.BY_ORDER, spellings=("numpy_T",)),
    *_view_operators("H", _permute, described_by=CallDescription.BY_ORDER, spellings=("matrix_H",)),
    *_view_operators("permute t mT mH adjoint", _permute, described_by=CallDescription.BY_ORDER),
    *_view_operators("expand expand_as broadcast_to", _expand, **_SHAPED),
    *_view_operators(
        "split", _split, arguments="input split_size dim", default_dim=0, spellings=("split_with_sizes",), **_CUT
    ),
    *_view_operators("chunk", _split, arguments="input chunks dim", default_dim=0, **_CUT),
    *_view_operators("tensor_split unsafe_chunk unsafe_split", _split, **_CUT),
    *_view_operators("unbind", _unbind, arguments="input dim", default_dim=0, described_by=CallDescription.BY_DIM),
    *_view_operators("select", _select, arguments="input dim index"),
    *_view_operators("narrow", _narrow, arguments="input dim start length"),
    *_view_operators(
        "getitem",
        _getitem,
        described_by=CallDescription.BY_INDEX,
        copies_when=_has_tensor_index,
        title="index",
        spellings=("slice", "index"),
    ),
    *_view_operators("detach", linear_unary, passes_gradient_through=True),
    *_view_operators("alias", linear_unary, passes_gradient_through=True, spellings=("lift_fresh", "lift_fresh_copy")),
    *_view_operators("identity", linear_unary, passes_gradient_through=True),
    *_view_operators("data real imag", linear_unary),
    *_view_operators("view_as_complex view_as_real", _complex_parts),
    *_view_operators("diagonal", _diagonal, arguments="input offset dim1 dim2"),
    *_view_operators(
        "as_strided", _as_strided, arguments="input size stride storage_offset", local_execution=LocalExecution.SIZES
    ),
    # the method cuts windows along a dim, as a view; the function makes patches of images
    *_view_operators(
        "unfold", _unfold, arguments="input dimension size step", copies_when=lambda op: "kernel_size" in op.attrs
    ),
    *_move_operators("clone", linear_unary),
    *_move_operators("contiguous", linear_unary, passes_gradient_through=True),
    *_move_operators("copy_", _copy),
    *_move_operators("repeat", _repeat, described_by=CallDescription.BY_SHAPES),
    *_move_operators("repeat_interleave", _repeat, arguments="input repeats dim"),
    *_move_operators("tile", _repeat),
    *_move_operators("cat", _cat, arguments="tensors dim", default_dim=0, spellings=("concat", "concatenate")),
    *_move_operators("stack", _cat, arguments="tensors dim", default_dim=0, described_by=CallDescription.BY_NEW_DIM),
    *_move_operators("hstack", _cat),
    *_move_operators("pad", _pad, arguments="input pad mode value"),
    *_move_operators("constant_pad_nd", _pad, arguments="input pad value"),
    *_move_operators("roll", _roll, arguments="input shifts dims"),
    *_move_operators("flip", _roll, arguments="input dims"),
    *_move_operators("tril triu", _triangular, arguments="input diagonal"),
)
