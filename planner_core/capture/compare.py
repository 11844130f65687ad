"""Whether two graphs describe the same run, op for op: how a folded capture is judged by a flat one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner_core.graph import Graph, Op, unfold


def difference(a: Graph, b: Graph) -> str | None:
    """The first difference between two graphs written out in full, in words; None if they are equal.

    Compared: ops in order by name, function, attributes, source module, operands, results, saved tensors; of every
    value its shape, dtype, kind, gradient, name and what it shares memory with; and all parameters.
    """
    rows_a, rows_b = list(_rows(a)), list(_rows(b))
    for x, y in zip(rows_a, rows_b, strict=False):
        if x != y:
            field = next(k for k in x if x[k] != y[k])
            return f"{x['name']}: {field} is {x[field]!r} in one and {y[field]!r} in the other ({y['name']})"
    if len(rows_a) != len(rows_b):
        return f"{len(rows_a)} ops in one and {len(rows_b)} in the other"
    if a.parameters() != b.parameters():
        names = sorted(set(a.parameters()) ^ set(b.parameters()))
        return f"parameters differ: {names[:3]}"
    return None


def _rows(graph: Graph) -> Iterator[dict[str, Any]]:
    top = unfold(graph).top
    names: dict[int, int] = {}

    def root(vid: int) -> int:
        while top.values[vid].storage not in (-1, vid):
            vid = top.values[vid].storage
        return vid

    def ref(vid: int) -> Any:
        value = top.values[vid]
        known = vid in names
        number = names.setdefault(vid, len(names))
        if known:
            return number
        shared = names.get(root(vid)) if value.kind != "constant" else None
        return (number, value.meta, value.kind, value.name if value.kind == "parameter" else "", value.grad, shared)

    for op in top.items:
        assert isinstance(op, Op)
        yield {
            "name": op.name, "fn": op.fn, "attrs": dict(op.attrs), "module": op.module,
            "inputs": [ref(v) for v in op.inputs], "outputs": [ref(v) for v in op.outputs],
            "saved": [ref(v) for v in op.saved], "saved_extra": op.saved_extra,
        }  # fmt: skip
