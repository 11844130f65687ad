"""Compare two graphs op by op, e.g. a folded capture with a flat one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner_core.core import VARIES, Attr, Graph, unfold_graph


def graph_difference(a: Graph, b: Graph) -> str | None:
    """Describe the first difference between two unfolded graphs; None if they are equal.

    Compared are, for every op (by its name, since a folded graph may compute constants earlier): function, attributes, source module,
    operands, results and saved tensors; for every value: shape, dtype, kind, gradient, name, producer and shared memory; and all
    parameters. Operands are identified by their producers, constants by the order of use. A literal that a block says varies equals
    any float.
    """
    rows_a, rows_b = _ops_by_name(a), _ops_by_name(b)
    for name in dict.fromkeys((*rows_a, *rows_b)):
        if name not in rows_a or name not in rows_b:
            return f"{name} is in one and not in the other"
        for field, x in rows_a[name].items():
            if x != rows_b[name][field] and not (field == "attrs" and _differ_in_floats(x, rows_b[name][field])):
                return f"{name}: {field} is {x!r} in one and {rows_b[name][field]!r} in the other"
    if a.parameters() != b.parameters():
        names = sorted(set(a.parameters()) ^ set(b.parameters()))
        return f"parameters differ: {names[:3]}"
    return None


def _differ_in_floats(a: Mapping[str, Attr], b: Mapping[str, Attr]) -> bool:
    """Return whether attributes are equal but for floats, of which one side says that they vary."""
    pairs = [(a[name], b[name]) for name in a if name in b]
    return len(pairs) == len(a) == len(b) and all(
        x == y or (VARIES in (x, y) and isinstance(x if y == VARIES else y, float)) for x, y in pairs
    )


def _ops_by_name(graph: Graph) -> dict[str, dict[str, Any]]:
    top = unfold_graph(graph).top
    ops = top.ops
    makers = {v: (op.name, i) for op in ops for i, v in enumerate(op.outputs)}
    # A folded graph may make a constant earlier, so constants are numbered as ops use them, in the order of the ops' names.
    constants: dict[int, int] = {}

    def root(vid: int) -> int:
        while top.values[vid].storage not in (-1, vid):
            vid = top.values[vid].storage
        return vid

    def who(vid: int) -> Any:
        if vid in makers:
            return makers[vid]
        value = top.values[vid]
        return value.name if value.kind == "parameter" else constants.setdefault(vid, len(constants))

    def ref(vid: int) -> Any:
        value = top.values[vid]
        return (who(vid), value.meta, value.kind, value.grad, who(root(vid)) if value.kind == "activation" else None)

    rows = {}
    for op in sorted(ops, key=lambda op: op.name):
        assert op.name not in rows, f"two ops are named {op.name}"
        rows[op.name] = {
            "fn": op.fn,
            "attrs": dict(op.attrs),
            "module": op.module,
            "saved_extra": op.saved_extra,
            "inputs": [ref(v) for v in op.inputs],
            "outputs": [ref(v) for v in op.outputs],
            "saved": [ref(v) for v in op.saved],
        }
    return rows
