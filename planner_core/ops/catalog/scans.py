"""State-space scans and linear attention (see `models/adapters/scans.py`), and recurrent layers and cells. Samples may be sharded; of the
former also channels or heads, which are independent."""

from __future__ import annotations

import math

from planner_core.core import Op
from planner_core.ops.operators import Kind, Operator
from planner_core.ops.rules import DimOf, Rule, RuleFn, Shapes, Split, int_attr, split, unknown
from planner_core.ops.work import Gemm, Part, Scan, Sizes, WorkFn, fused_part, product_part

CHUNK = 64
"""Tokens of a chunk if the call does not say it."""


def _operand_names(op: Op, count: int) -> tuple[str, ...]:
    names = op.attrs.get("arg_names")
    return tuple(str(n) for n in names) if isinstance(names, tuple) and len(names) == count else ()


def _split_at(op: Op, name: str, where: dict[str, int], count: int, out: int, *divides: int) -> Split:
    dims: list[DimOf] = [where.get(n) for n in _operand_names(op, count)]
    return split(name, dims, [out], *divides)


def _selective_scan(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples and channels may be sharded. Every channel has states of its own; all channels share B and C."""
    if not _operand_names(op, len(ins)):
        return unknown(op, ins, outs)
    batch = dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 0)
    channels = {"hidden_states": 1, "dt": 1, "A": 0, "D": 0, "z": 1, "delta_bias": 0}
    b, d, _ = outs[0]
    return Rule((_split_at(op, "batch", batch, len(ins), 0, b), _split_at(op, "channels", channels, len(ins), 1, d)))


def _chunk_scan(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Samples and heads may be sharded. Every head has states of its own. The heads of a group share B and C, so the number of parts
    must divide the groups, unless there is one group."""
    names = _operand_names(op, len(ins))
    if not names:
        return unknown(op, ins, outs)
    b, _, heads, _ = outs[0]
    groups = ins[names.index("B")][2]
    batch = dict.fromkeys(("hidden_states", "dt", "B", "C"), 0)
    by_head = {"hidden_states": 2, "dt": 2, "A": 0, "D": 0, "dt_bias": 0, **({"B": 2, "C": 2} if groups > 1 else {})}
    # Example: 8 heads in 2 groups may be split in 2 and not in 4, since two ranks would then need the B and C of one group.
    extents = (heads, groups) if groups > 1 else (heads,)
    return Rule((_split_at(op, "batch", batch, len(ins), 0, b), _split_at(op, "heads", by_head, len(ins), 2, *extents)))


def _delta_rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of operands [b, s, h, ...]. Samples may be sharded, and heads if queries and values have equally many."""
    names = _operand_names(op, len(ins))
    splits = [split("batch", [0] * len(ins), [0], outs[0][0])]
    if names and len({shape[2] for shape in ins}) == 1:
        splits.append(split("heads", [2] * len(ins), [2], outs[0][2]))
    return Rule(tuple(splits))


def _wkv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """RWKV: samples and channels may be sharded; channels are independent."""
    return Rule((split("batch", [None, None, 0, 0], [0], outs[0][0]), split("channels", [0, 0, 2, 2], [2], outs[0][2])))


def _mlstm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """xLSTM: every operand is [b, h, s, ...]. Samples and heads may be sharded."""
    same = [0] * len(ins)
    return Rule((split("batch", same, [0], outs[0][0]), split("heads", [1] * len(ins), [1], outs[0][1])))


def _linear_scan(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Griffin's recurrence: samples and channels may be sharded; each channel of each sample is independent."""
    return Rule((split("batch", [0, 0], [0], outs[0][0]), split("channels", [2, 2], [2], outs[0][2])))


# --- recurrent layers: a hidden state is multiplied with whole weights in each step ---


def _recurrent_rule(ins: Shapes, samples: list[int], states: int, dims: list[DimOf], size: int) -> Rule:
    """Return the one split: `samples` are the dims of the samples in the first operand and in the states that follow it."""
    weights: list[DimOf] = [None] * (len(ins) - 1 - states)
    return Rule((split("batch", [*samples, *weights], dims, size),) if size > 1 else ())


def _recurrent_layers(states: int) -> RuleFn:
    """Return the rule of layers that take `states` tensors [layers, samples, width] beside their input, and return as many."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        first = op.attrs.get("arg8")  # whether samples come first; a packed sequence has no such argument
        if not isinstance(first, bool) or len(ins[0]) != 3:
            return unknown(op, ins, outs)
        at = 0 if first else 1
        return _recurrent_rule(ins, [at, *[1] * states], states, [at, *[1] * states], ins[0][at])

    return rule


def _recurrent_cell(states: int) -> RuleFn:
    """Return the rule of one step of one layer: every tensor but the weights is [samples, width]."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        if len(ins[0]) != 2:
            return Rule(())
        return _recurrent_rule(ins, [0] * (1 + states), states, [0] * len(outs), ins[0][0])

    return rule


# --- work --------------------------------------------------------------------------------------------


def _scan_parts(flops: int, sizes: Sizes) -> tuple[Part, ...]:
    """Return a scan of `flops` FLOPs. Its backward takes twice as many."""
    return (fused_part(Scan(flops), Scan(2 * flops), range(len(sizes.ins))),)


def _selective_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """9 FLOPs for each state (the count of its authors)."""
    return _scan_parts(9 * math.prod(sizes.outs[0]) * sizes.ins[2][1], sizes)


def _wkv_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """Two sums, each multiplied, added to and read: 12 FLOPs for each channel of each token."""
    return _scan_parts(12 * math.prod(sizes.outs[0]), sizes)


def _linear_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """Return a product and a sum for each channel of each token."""
    return _scan_parts(2 * math.prod(sizes.outs[0]), sizes)


def _chunk_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    return _chunked_scan_parts(op, sizes, states=sizes.ins[3][3], with_state=2)


def _delta_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    return _chunked_scan_parts(op, sizes, states=sizes.ins[0][3], with_state=3)


def _mlstm_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    return _chunked_scan_parts(op, sizes, states=sizes.ins[0][3], with_state=2)


def _chunked_scan_parts(op: Op, sizes: Sizes, states: int, with_state: int) -> tuple[Part, ...]:
    """Two products inside chunks of tokens (scores, values), and `with_state` products with the state between chunks.

    A chunk adds to the state, and its tokens read the state (Mamba-2, section 6): two products. The delta rule also reads what it
    replaces: a third one.
    """
    chunk, width = int_attr(op, "chunk_size", CHUNK), sizes.outs[0][3]
    rows = math.prod(sizes.outs[0][:3])
    # Example for one token of one head, chunk 64, 128 states, width 64, two products with the state:
    # 2 * (64 * 192 + 2 * 128 * 64) = 2 * (12288 + 16384) = 57344 FLOPs.
    return _scan_parts(2 * rows * (chunk * (states + width) + with_state * states * width), sizes)


def _layers_work(states: int) -> WorkFn:
    """Of each layer and direction one product with all tokens, and in each step one with its hidden state.

    A layer's weights are [gates * width, input], [gates * width, hidden], and with a projection [projected, width].
    """

    def work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
        tokens = sizes.ins[0][0] * sizes.ins[0][1]
        samples = sizes.ins[1][1]
        weights = {i: w for i, w in enumerate(sizes.ins) if i > states and len(w) == 2}
        hidden = sizes.ins[1][2]
        parts = []
        for i, (out, inner) in weights.items():
            in_steps = i - 1 in weights and inner == hidden  # it stands behind the weight of the layer's input
            steps = tokens // samples if in_steps else 1
            parts.append(product_part(Gemm(tokens // steps, out, inner, steps), range(i), (i,)))
        return tuple(parts)

    return work


def _cell_work(states: int) -> WorkFn:
    """Return a product with the input and one with the hidden state."""

    def work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
        parts = []
        for operand, weight in ((0, 1 + states), (1, 2 + states)):
            (rows, inner), out = sizes.ins[operand], sizes.ins[weight][0]
            parts.append(product_part(Gemm(rows, out, inner), (operand,), (weight,)))
        return tuple(parts)

    return work


OPERATORS = (
    Operator(name="selective_scan", kind=Kind.SCAN, rule=_selective_scan, work=_selective_work),
    Operator(name="chunk_scan", kind=Kind.SCAN, rule=_chunk_scan, work=_chunk_work),
    Operator(name="delta_rule", kind=Kind.SCAN, rule=_delta_rule, work=_delta_work),
    Operator(name="wkv", kind=Kind.SCAN, rule=_wkv, work=_wkv_work),
    Operator(name="linear_scan", kind=Kind.SCAN, rule=_linear_scan, work=_linear_work),
    Operator(name="mlstm", kind=Kind.SCAN, rule=_mlstm, work=_mlstm_work),
    Operator(name="lstm", kind=Kind.SCAN, rule=_recurrent_layers(2), work=_layers_work(2)),
    *(
        Operator(name=n, kind=Kind.SCAN, rule=_recurrent_layers(1), work=_layers_work(1))
        for n in ("gru", "rnn_tanh", "rnn_relu")
    ),
    Operator(name="lstm_cell", kind=Kind.SCAN, rule=_recurrent_cell(2), work=_cell_work(2)),
    *(
        Operator(name=n, kind=Kind.SCAN, rule=_recurrent_cell(1), work=_cell_work(1))
        for n in ("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
    ),
)
