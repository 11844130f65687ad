"""Find an operator by name; and for an op of a graph, its rows, its work and what it keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from planner_core.core import ITEM_BYTES, Op, Value, local_shape
from planner_core.ops.catalog import OPERATORS
from planner_core.ops.operators import (
    AS_RUN,
    WHOLE_LOGITS,
    BytesFn,
    Kind,
    LocalBytes,
    Operator,
    operand_bytes,
    unknown_operator,
)
from planner_core.ops.rules import Row, Rule, Shapes, expand_rule, operand_position
from planner_core.ops.work import Sizes, Work, work_of_parts


def operators_by_name(operators: Iterable[Operator]) -> Mapping[str, Operator]:
    """Return the operators by each of their spellings. Raises ValueError if two operators have the same spelling."""
    by_name: dict[str, Operator] = {}
    for one in operators:
        for name in (one.name, *one.spellings):
            if name in by_name:
                raise ValueError(
                    f"{name!r} is claimed by {by_name[name].name} and by {one.name}; a name has one meaning"
                )
            by_name[name] = one
    return by_name


_BY_NAME = operators_by_name(OPERATORS)


def operator(fn: str) -> Operator:
    """Return the operator of a torch function, by any of its spellings. Its `known` is False if the catalogue lacks it.

    A name that ends in `_` is the in-place form.
    """
    return _BY_NAME.get(fn) or _BY_NAME.get(fn.rstrip("_")) or unknown_operator(fn)


def canonical_function(fn: str) -> str:
    """Return the name of a function's operator, in place if `fn` is; `fn` itself if the catalogue lacks it."""
    if fn in _BY_NAME:
        return _BY_NAME[fn].name
    base = fn.rstrip("_")
    return f"{_BY_NAME[base].name}_" if base in _BY_NAME else fn


def known_functions() -> frozenset[str]:
    """Return the canonical names of all operators."""
    return frozenset(one.name for one in OPERATORS)


def is_heavy(op: Op) -> bool:
    """Return whether the op leads a group of its own: a product, a lookup, a norm, attention, a scan or a loss."""
    return operator(op.fn).is_heavy


def rule_of(op: Op, values: Sequence[Value]) -> Rule:
    """Return the op's rule for its global shapes. Its `is_known` is False if the catalogue has no rule."""
    return operator(op.fn).rule(op, _shapes(op.inputs, values), _shapes(op.outputs, values))


_CACHED_ROWS: OrderedDict[tuple[int, int], tuple[Op, tuple[Value, ...], tuple[Row, ...]]] = OrderedDict()
"""The rows of the last ops. An op that is held here keeps its id, and so do its values."""
MAX_CACHED_ROWS = 4096


def rows(op: Op, values: Sequence[Value]) -> tuple[Row, ...]:
    """Return all rows of `op`. The first one is always Replicate."""
    known = _CACHED_ROWS.get((id(op), id(values)))
    if known is not None:
        return known[2]
    expanded = _expand_rows(op, values)
    # By identity, since hashing thousands of values costs more than the rows. The cache holds both, so an id is not given out again.
    if isinstance(values, tuple):  # a list may change
        _CACHED_ROWS[id(op), id(values)] = op, values, expanded
        if len(_CACHED_ROWS) > MAX_CACHED_ROWS:
            _CACHED_ROWS.popitem(last=False)
    return expanded


def _expand_rows(op: Op, values: Sequence[Value]) -> tuple[Row, ...]:
    one = operator(op.fn)
    # the backward of a product costs as much as the product, so its gradient is summed first
    summed_later = one.kind is Kind.LOOKUP or not one.is_heavy
    expanded = expand_rule(rule_of(op, values), op, values, summed_later)
    return expanded[:1] if op.attrs.get("kept") else expanded  # the buffer that it writes is Replicate


def is_free(op: Op) -> bool:
    """Return whether the op moves no data: it is a view."""
    one = operator(op.fn)
    if one.kind is Kind.CAST:
        return AS_RUN in op.attrs  # what would be cast is read in its own dtype
    return one.kind is Kind.VIEW and not (one.copies_when is not None and one.copies_when(op))


def work_of(op: Op, values: Sequence[Value], axis_rows: Sequence[Row] = (), axis_sizes: Sequence[int] = ()) -> Work:
    """Return the kernels that one GPU runs for `op`, forward and backward.

    Args:
        op: The op.
        values: The values of its block.
        axis_rows: The row of the op on each mesh axis; without rows it runs on the global tensors.
        axis_sizes: The number of GPUs along each mesh axis.

    Returns:
        The kernels, with the shapes that one GPU holds. Backward makes gradients for the operands that have one.

    Raises:
        ShardingError: A dim does not divide.
    """
    one = operator(op.fn)
    whole = _shapes(op.inputs, values)
    ins = [local_shape(s, tuple(r.inputs[i][0] for r in axis_rows), tuple(axis_sizes)) for i, s in enumerate(whole)]
    outs = [
        local_shape(s, tuple(r.outputs[i][0] for r in axis_rows), tuple(axis_sizes))
        for i, s in enumerate(_shapes(op.outputs, values))
    ]
    if one.work is None:
        return Work(free=is_free(op))
    # Nothing runs backward where no result has a gradient, whatever the operands could have.
    wanted = [i for i, v in enumerate(op.inputs) if values[v].grad] if any(values[o].grad for o in op.outputs) else []
    parts: dict[str, int] = {}
    for row, size in zip(axis_rows, axis_sizes, strict=False):
        # Two axes may split one dim: tokens over 2 x 4 GPUs are in 8 parts.
        parts[row.name] = parts.get(row.name, 1) * size
    return work_of_parts(one.work(op, Sizes(ins, outs, whole, parts)), wanted)


def lookup_table_operand(op: Op) -> int | None:
    """Return the operand of which the op reads only the rows that it looks up; None: it reads every operand in full."""
    one = operator(op.fn)
    return (
        operand_position(op, one.lookup_argument, one.arguments.split().index(one.lookup_argument))
        if one.lookup_argument
        else None
    )


def global_bytes(op: Op, values: Sequence[Value], splits: frozenset[str]) -> LocalBytes:
    """Return the bytes of the op's global operands and results. `splits` are the names of the dims that count as split."""
    ins, outs = ([values[i].meta for i in ids] for ids in (op.inputs, op.outputs))
    return LocalBytes(
        tuple(m.num_bytes for m in ins),
        tuple(m.num_bytes for m in outs),
        tuple(ITEM_BYTES[m.dtype] for m in ins),
        splits,
        tuple(values[i].grad for i in op.inputs),
        tuple(m.shape for m in ins),
        tuple(m.shape for m in ins),
    )


IN_PLACE = ("fused", "whole", "chunked")
"""How a loss runs if the gradient of its logits takes their place."""


def extra_saved_bytes(op: Op) -> BytesFn | None:
    """Return the function of the bytes that an op keeps instead of what capture saw; None: what capture saw."""
    return None if AS_RUN in op.attrs or WHOLE_LOGITS in op.attrs else operator(op.fn).extra_saved_bytes


def backward_workspace_bytes(op: Op) -> BytesFn | None:
    """Return the function of the bytes that an op's backward uses for a moment. A gradient that takes the place of an operand saves as
    many."""
    how = op.attrs.get(AS_RUN)
    if how is None or not operator(op.fn).is_logits_loss:
        return operator(op.fn).backward_workspace_bytes
    return operand_bytes(-1) if how in IN_PLACE else None


def extra_bytes(op: Op, local: LocalBytes) -> int:
    """Return the bytes that the op keeps (instead of what capture saw), plus those that its backward uses for a moment."""
    return sum(
        count_bytes(local)
        for count_bytes in (extra_saved_bytes(op), backward_workspace_bytes(op))
        if count_bytes is not None
    )


def splits_saved_tensor(op: Op, name: str, saved_shape: tuple[int, ...], ins: Shapes) -> bool:
    """Return whether the split `name` also splits a tensor of shape `saved_shape` that the op keeps for backward."""
    test = operator(op.fn).splits_saved
    return test is None or test(name, saved_shape, ins)


def _shapes(ids: Sequence[int], values: Sequence[Value]) -> Shapes:
    return [values[i].meta.shape for i in ids]
