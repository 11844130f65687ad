"""Rules of state-space scans and linear attention (see `scans`): samples, and channels or heads, which are independent."""

from __future__ import annotations

import math

from planner_core.core import Op
from planner_core.ops.registry import DimOf, Rule, Shapes, Split, rule, split

CHUNK = 64
"""Tokens of a chunk where the call names none."""
SCANS = ("selective_scan", "chunk_scan", "delta_rule", "wkv", "mlstm")


def _names(op: Op, count: int) -> tuple[str, ...]:
    names = op.attrs.get("arg_names")
    return tuple(str(n) for n in names) if isinstance(names, tuple) and len(names) == count else ()


def _split_at(op: Op, label: str, where: dict[str, int], count: int, out: int, *divides: int) -> Split:
    dims: list[DimOf] = [where.get(n) for n in _names(op, count)]
    return split(label, dims, [out], *divides)


@rule("selective_scan")
def _selective_scan(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Every channel has states of its own; B and C are shared by all channels."""
    if not _names(op, len(ins)):
        return Rule((), known=False)
    batch = dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 0)
    channels = {"hidden_states": 1, "dt": 1, "A": 0, "D": 0, "z": 1, "delta_bias": 0}
    b, d, _ = outs[0]
    return Rule((_split_at(op, "batch", batch, len(ins), 0, b), _split_at(op, "channels", channels, len(ins), 1, d)))


@rule("chunk_scan")
def _chunk_scan(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Heads have states of their own; B and C are shared by the heads of a group, so groups bound the split unless there is one."""
    names = _names(op, len(ins))
    if not names:
        return Rule((), known=False)
    b, _, heads, _ = outs[0]
    groups = ins[names.index("B")][2]
    batch = dict.fromkeys(("hidden_states", "dt", "B", "C"), 0)
    by_head = {"hidden_states": 2, "dt": 2, "A": 0, "D": 0, "dt_bias": 0, **({"B": 2, "C": 2} if groups > 1 else {})}
    extents = (heads, groups) if groups > 1 else (heads,)
    return Rule((_split_at(op, "batch", batch, len(ins), 0, b), _split_at(op, "heads", by_head, len(ins), 2, *extents)))


@rule("delta_rule")
def _delta_rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Every operand is [b, s, h, ...]; heads are independent, where queries and values have equally many."""
    names = _names(op, len(ins))
    found = [split("batch", [0] * len(ins), [0], outs[0][0])]
    if names and len({shape[2] for shape in ins}) == 1:
        found.append(split("heads", [2] * len(ins), [2], outs[0][2]))
    return Rule(tuple(found))


@rule("wkv")
def _wkv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """RWKV: channels are independent."""
    return Rule((split("batch", [None, None, 0, 0], [0], outs[0][0]), split("channels", [0, 0, 2, 2], [2], outs[0][2])))


@rule("mlstm")
def _mlstm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """xLSTM: every operand is [b, h, s, ...], and heads are independent."""
    same = [0] * len(ins)
    return Rule((split("batch", same, [0], outs[0][0]), split("heads", [1] * len(ins), [1], outs[0][1])))


def scan_flops(op: Op, ins: Shapes, outs: Shapes) -> int:
    """Forward work. Selective scan: 9 per state (the count of its authors); chunked: products inside chunks and with states."""
    out = math.prod(outs[0])
    if op.fn == "wkv":
        return 12 * out
    if op.fn == "selective_scan":
        return 9 * out * ins[2][1]
    size = op.attrs.get("chunk_size")
    chunk = size if isinstance(size, int) and not isinstance(size, bool) else CHUNK
    states = ins[3][3] if op.fn == "chunk_scan" else ins[0][3]
    rows = math.prod(outs[0][:3])
    return 2 * rows * (chunk * (states + outs[0][3]) + 3 * states * outs[0][3])
