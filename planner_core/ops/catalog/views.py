"""Views map split dims through and refuse an uneven split."""

from __future__ import annotations

import math
from typing import Any

from planner_core.core import Op
from planner_core.ops.registry import (
    DimOf,
    Rule,
    Shapes,
    Split,
    _dim_attr,
    aligned,
    changed_dim,
    dims_attr,
    rule,
    split,
)


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


@rule("unfold")
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


@rule("as_strided")
def _as_strided(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Overlapping chunks of every sample: the first dim may be split where the operand is contiguous and no sample reads another."""
    x, out = ins[0], outs[0]
    sizes, strides, laid = (_ints(op.attrs.get(n)) for n in ("size", "stride", "input_stride"))
    row = math.prod(x[1:])
    if laid != contiguous_strides(x) or sizes != out or len(strides) != len(out) or op.attrs.get("storage_offset"):
        return Rule((), known=False)
    apart = sum((n - 1) * s for n, s in zip(sizes[1:], strides[1:], strict=True)) < row
    if strides[0] != row or not apart or not x[0] == out[0] > 1:
        return Rule((), known=False)
    rest: list[DimOf] = [None] * (len(ins) - 1)  # sizes that are tensors
    return Rule((split("d0", [0, *rest], [0], x[0]),), linear=(0,))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next, of each dim of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()
