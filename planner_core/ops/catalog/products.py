"""Matrix products and experts. Rows and output features may be sharded, and input features, whose products are summed (Partial)."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from planner_core.core import Op
from planner_core.ops.operators import Kind, LocalBytes, LocalExecution, Operator, operators
from planner_core.ops.rules import DimOf, Internal, Rule, Shapes, Split, broadcast_splits, operand_dim, split, unknown
from planner_core.ops.work import Gemm, GroupedGemm, Merge, Part, Sizes, grouped_product_part, product_part

# --- linear and its relatives ------------------------------------------------------------------------


def _linear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`...i,oi->...o`. If i is sharded, the bias is added on one rank."""
    x, w = ins[0], ins[1]
    has_bias = len(ins) > 2
    none: list[DimOf] = [None] * has_bias
    splits = [split(f"d{d}", [d, None, *none], [d], x[d]) for d in range(len(x) - 1) if x[d] > 1]
    splits.append(split("out", [None, 0, *([0] * has_bias)], [len(x) - 1], w[0]))
    # Each rank has a term of the sum over i. The bias is no such term, so all ranks together add it once.
    splits.append(split("in", [len(x) - 1, 1, *none], [None], w[1], bias=(2,) if has_bias else ()))
    return Rule(tuple(splits))


def _linear_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    x, (n, k) = sizes.ins[0], sizes.ins[1]
    return (product_part(Gemm(math.prod(x[:-1]), n, k), (0,), (1,)),)


def _linear_nf4(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Rows of x alone: a rank makes the whole weight from its 4 bits, so no feature is split."""
    x = ins[0]
    return Rule(tuple(split(f"d{d}", [d, *[None] * (len(ins) - 1)], [d], x[d]) for d in range(len(x) - 1) if x[d] > 1))


def _linear_nf4_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """Return the product, and before it the weight in the dtype that computes, which forward and backward each make: an element is written
    in 2 bytes, and read in half a byte."""
    x, n = sizes.ins[0], sizes.outs[0][-1]
    unpacked = Merge(n * x[-1] * 5 // 2, 1)
    part = product_part(Gemm(math.prod(x[:-1]), n, x[-1]), (0,), ())
    return (part, Part(unpacked, ((frozenset((0,)), unpacked),)))


def _unpacked_weight_bytes(local: LocalBytes) -> int:
    """Return the bytes of the weight in the dtype that computes, which are there while the kernels run."""
    numbers_per_element = 2 * local.item_bytes[1]  # of 4 bits, so two in a byte
    return math.prod(local.shapes[1]) * numbers_per_element * local.item_bytes[0]


def _addmm(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`bias + a @ b` (transformers' Conv1D stores b as [in, out])."""
    bias, a, b = ins
    rank = len(a)
    lead = [split(f"b{d}", [operand_dim(bias, rank, d), d, d], [d], a[d]) for d in range(rank - 2)]
    rows = split("rows", [operand_dim(bias, rank, rank - 2), rank - 2, None], [rank - 2], a[-2])
    cols = split("out", [operand_dim(bias, rank, rank - 1), None, rank - 1], [rank - 1], b[-1])
    inner = split("in", [None, rank - 1, rank - 2], [None], a[-1], bias=(0,))
    return Rule((*lead, rows, cols, inner))


def _addmm_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    _, a, b = sizes.ins
    return (product_part(Gemm(a[-2], b[-1], a[-1], math.prod(a[:-2])), (1,), (2,)),)


def _bilinear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`...i,oij,...j->...o`. If i or j is sharded, the bias is added on one rank."""
    x, w = ins[0], ins[2]
    has_bias = len(ins) > 3
    last = len(x) - 1
    none: list[DimOf] = [None] * has_bias
    splits = [split(f"d{d}", [d, d, None, *none], [d], x[d]) for d in range(last) if x[d] > 1]
    bias = (3,) if has_bias else ()
    splits.append(split("out", [None, None, 0, *([0] * has_bias)], [last], w[0]))
    splits.append(split("in1", [last, None, 1, *none], [None], w[1], bias=bias))
    splits.append(split("in2", [None, last, 2, *none], [None], w[2], bias=bias))
    return Rule(tuple(splits))


def _bilinear_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """First x with the weight, [rows, i] @ [i, o j]. Then the result with y, one [o, j] @ [j, 1] for each row."""
    x, (out, i, j) = sizes.ins[0], sizes.ins[2]
    rows = math.prod(x[:-1])
    return (product_part(Gemm(rows, out * j, i), (0,), (2,)), product_part(Gemm(out, 1, j, rows), (0, 2), (1,)))


# --- matmul ------------------------------------------------------------------------------------------


def _matmul(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`...mk,...kn->...mn`, batch dims broadcast; linear in the first factor."""
    a, b = ins
    if len(a) < 2 or len(b) < 2:
        return Rule((), linear=(0,))
    out, rank = outs[0], len(outs[0])
    splits = broadcast_splits([a, b], out, rank - 2, "b")
    if a[-2] > 1:
        splits.append(split("rows", [len(a) - 2, None], [rank - 2], a[-2]))
    if b[-1] > 1:
        splits.append(split("out", [None, len(b) - 1], [rank - 1], b[-1]))
    splits.append(split("in", [len(a) - 1, len(b) - 2], [None], a[-1]))
    return Rule(tuple(splits), linear=(0,))


def _matmul_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    a, b = sizes.ins
    return (_matmul_part(a, b, (0,), (1,)),)


def _matmul_part(a: Sequence[int], b: Sequence[int], left: tuple[int, ...], right: tuple[int, ...]) -> Part:
    """Return the kernel of a matmul. If the whole batch shares the right matrix, the batch is joined to the rows, as torch does."""
    m, k = (a[-2] if len(a) > 1 else 1), a[-1]
    n = b[-1] if len(b) > 1 else 1
    lead = _broadcast(a[:-2], b[:-2])
    if math.prod(b[:-2]) == 1:
        return product_part(Gemm(lead * m, n, k), left, right)
    return product_part(Gemm(m, n, k, lead), left, right)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of elements of the batch dims of both, broadcast."""
    rank = max(len(a), len(b))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in (a, b)]
    return math.prod(max(pair) for pair in zip(*padded, strict=True))


def _repeated_factor_bytes(local: LocalBytes) -> int:
    """Return the bytes of the copies that a matmul makes of factors which it repeats along a batch dim. Autograd keeps the copy of a factor
    if the other one gets a gradient; then it is counted with what is kept."""
    if len(local.shapes) != 2 or min(map(len, local.shapes)) < 3:
        return 0  # one matrix for the whole batch is not repeated
    lead = [shape[:-2] for shape in local.shapes]
    copies, both = 0, _broadcast(*lead)
    # Reversed: the gradient of one factor is a product with the other one, so it decides whether that copy is kept.
    for batch, num_bytes, is_saved in zip(lead, local.ins, reversed(local.grads), strict=True):
        if math.prod(batch) not in (1, both) and not is_saved:
            copies += num_bytes // math.prod(batch) * both
    return copies


def _rmatmul(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`x.__rmatmul__(y)` is y @ x."""
    rule = _matmul(op, [ins[1], ins[0]], outs)
    return Rule(tuple(split(s.name, s.inputs[::-1], s.outputs, *s.divides) for s in rule.splits), linear=(1,))


def _rmatmul_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    x, y = sizes.ins
    return (_matmul_part(y, x, (1,), (0,)),)


# --- einsum ------------------------------------------------------------------------------------------


def _einsum(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of an equation: a letter may be sharded if it has the same extent in all operands."""
    *operands, result = einsum_letters(op, ins)
    if any(len(set(t)) != len(t) for t in operands):
        return unknown(op, ins, outs)
    extents: dict[str, set[int]] = {}
    for t, shape in zip(operands, ins, strict=True):
        for c, n in zip(t, shape, strict=True):
            extents.setdefault(c, set()).add(n)
    splits = [
        split(c, [t.index(c) if c in t else None for t in operands], [result.index(c) if c in result else None], *n)
        for c, n in sorted(extents.items())
        if n != {1} and len(n) == 1
    ]
    return Rule(tuple(splits), linear=(0,))


def _einsum_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """Return the products of an equation whose operands are multiplied from the left, as torch does without opt_einsum.

    In `ij,jk,kl->il` the first two make a matrix [i, k]; this and the third make the result. If only one of two operands has a
    letter, and no later operand and not the result have it, the letter is summed first. Two operands without a letter to sum are
    multiplied element by element, which is not a matrix product.
    """
    *terms, result = einsum_letters(op, sizes.ins)
    extent: dict[str, int] = {}
    for term, shape in zip(terms, sizes.ins, strict=True):
        extent.update({c: max(n, extent.get(c, 1)) for c, n in zip(term, shape, strict=True)})
    letters_of = [{c for c, n in zip(t, s, strict=True) if n > 1} for t, s in zip(terms, sizes.ins, strict=True)]
    product, parts = letters_of[0], []

    def size(letters: set[str]) -> int:
        return math.prod(extent[c] for c in letters)

    for i, letters in enumerate(letters_of[1:], 1):
        later = set(result).union(*letters_of[i + 1 :])
        both = product & letters
        if both - later:
            rows, columns = (product - letters) & later, (letters - product) & later
            gemm = Gemm(size(rows), size(columns), size(both - later), size(both & later))
            parts.append(product_part(gemm, range(i), (i,)))
        product = (product | letters) & later
    return tuple(parts)


def einsum_letters(op: Op, ins: Shapes) -> list[str]:
    """Return the letters of each operand and of the result. `...` becomes letters that the equation does not use, aligned at the last dim.
    Without `->` the result has the letters that occur once, in alphabetical order."""
    equation = str(op.attrs["equation"]).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    ranks = [len(shape) - len(t) + 3 for t, shape in zip(operands, ins, strict=True) if "..." in t]
    free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in equation]
    wild = "".join(free[: max(ranks, default=0)])
    expanded = [t.replace("...", wild[len(wild) + len(t) - 3 - len(s) :]) for t, s in zip(operands, ins, strict=True)]
    if not arrow:
        once = sorted(c for c in set(terms) if c.isalpha() and terms.count(c) == 1)
        return [*expanded, wild + "".join(once)]
    return [*expanded, result.replace("...", wild)]


# --- experts -----------------------------------------------------------------------------------------


DISPATCH = "dispatch"
"""The name of a split of tokens and experts at once."""


def _moe_experts(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Tokens may be sharded; the experts' inner width, part by part, since gate and up are fused; the experts themselves; and tokens
    and experts at once, with an all_to_all before and behind the experts (`_dispatch_split`).

    Operands: hidden, index, weights, up, down[, up bias][, down bias].
    """
    (t, _), up, down = ins[0], ins[3], ins[4]
    turned, gated = bool(op.attrs.get("transposed")), bool(op.attrs.get("gated", True))
    inner = down[1 if turned else 2]
    none: list[DimOf] = [None] * (len(ins) - 5)
    biases: list[DimOf] = [
        1 if shape[-1] == up[2 if turned else 1] and k == 0 else None for k, shape in enumerate(ins[5:])
    ]
    tokens = split("tokens", [0, 0, 0, None, None, *none], [0], t)
    fused: dict[int, tuple[int, ...]] = {}
    if gated:
        fused = dict.fromkeys((3, *(5 + k for k, d in enumerate(biases) if d is not None)), (inner, inner))
    added = tuple(5 + k for k, d in enumerate(biases) if d is None)
    width = Split(
        "inner",
        (None, None, None, *((2, 1) if turned else (1, 2)), *biases),
        (None,),
        (inner,),
        bias=added,
        segments=fused,
    )
    experts = Split("experts", (None, None, None, 0, 0, *[0] * len(none)), (None,), (up[0],), routed=True)
    return Rule((tokens, width, experts, _dispatch_split(ins)))


def _dispatch_split(ins: Shapes) -> Split:
    """Return the split in which every GPU has 1/n of the tokens and 1/n of the experts.

    It sends k copies of each of its tokens, each to the GPU that holds the chosen expert, and gets as many results back, which it
    weights and sums. Backward sends the results' gradients and gets those of the copies. Both have `copies` elements over all GPUs,
    however the router chooses. The choices are gathered first, so that every GPU knows how much comes from where.

    Example: 16 tokens of width 8, 2 experts each, on 4 GPUs: one holds 4 tokens, sends 8 copies, and if routing is balanced gets 8.
    """
    (tokens, width), (_, k) = ins[0], ins[1]
    copies = tokens * k * width
    gathered = Internal("forward", "all_gather", tokens * k, ("tokens",), sends=(1,))
    sent = [
        Internal(phase, "all_to_all", copies, ("tokens",), sends=(end,))
        for phase in ("forward", "backward")
        for end in (0, len(ins))
    ]
    return Split(
        DISPATCH,
        (0,) * len(ins),
        (0,),
        (tokens, ins[3][0]),
        internal=(gathered, *sent),
        # Experts are dealt to ranks once: a second axis would divide them again, and the all_to_all knows one owner of each.
        excludes=(DISPATCH, "experts"),
        routed=True,
    )


def _moe_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    """Two grouped products. Routing is taken to be balanced: a GPU with 1/n of the experts gets 1/n of the rows."""
    index, up, down = sizes.ins[1], sizes.ins[3], sizes.ins[4]
    # Example: 4 GPUs deal 16 tokens with 2 choices to 8 experts. One has 4 tokens and 2 experts: 4 * 2 * 2 * 4 // 8 = 8 rows.
    rows = math.prod(index) * up[0] * sizes.parts.get(DISPATCH, 1) // sizes.whole[3][0]
    turned = bool(op.attrs.get("transposed"))
    (k, n), (inner, out) = (up[1:], down[1:]) if turned else (up[:0:-1], down[:0:-1])
    return (
        grouped_product_part(GroupedGemm(rows, n, k, up[0]), (0, 1, 2), (3,)),
        grouped_product_part(GroupedGemm(rows, out, inner, up[0]), (0, 1, 2, 3), (4,)),
    )


def _token_copy_bytes(local: LocalBytes) -> tuple[int, int]:
    """Return the bytes of the copies that a GPU sends to experts, and of these times their weights, which may be of a wider dtype; then
    that is cast."""
    k, (item, _, weight, *_) = local.whole[1][1], local.item_bytes
    copies = local.ins[0] * k
    return copies, copies if weight <= item else copies * weight // item + copies


def _dispatch_forward_bytes(local: LocalBytes) -> int:
    """If tokens are sent to experts: their weighted results, before they are summed. Else 0: only what is kept."""
    return _token_copy_bytes(local)[1] if DISPATCH in local.splits else 0


def _dispatch_backward_bytes(local: LocalBytes) -> int:
    """If tokens are sent to experts: the gradients of the results and of the copies, beyond the gradients of operands and results.

    They are there before the gradients of the experts are made, or while these are; then the results are freed already. The fullest GPU
    has `load` times as many copies as it has sent.
    """
    if DISPATCH not in local.splits:
        return 0
    copies, weighted = _token_copy_bytes(local)
    experts = sum(n for n, grad in zip(local.ins[3:], local.grads[3:], strict=True) if grad)
    counted = local.ins[0] + local.ins[2] + local.outs[0] + experts
    received = int(local.load * copies)
    return max(0, local.outs[0] + received + max(received, weighted) - counted, received + experts - counted)


def _inner_splits_saved(name: str, saved_shape: tuple[int, ...], ins: Shapes) -> bool:
    """Return whether the split also shards a kept tensor: if the inner width is sharded, the permuted tokens are kept whole."""
    return name != "inner" or (len(saved_shape) > 1 and saved_shape[-1] != ins[0][-1])


def _expert_linear(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Rows, output features or input features (Partial) may be sharded. Operands: hidden [t, i], index [t], weight [E, o, i]."""
    (t, i), _, (_, o, _) = ins
    return Rule(
        (
            split("tokens", [0, 0, None], [0], t),
            split("out", [None, None, 1], [1], o),
            split("in", [1, None, 2], [None], i),
        )
    )


def _expert_linear_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    rows, (experts, n, k) = sizes.ins[0][0], sizes.ins[2]
    return (grouped_product_part(GroupedGemm(rows, n, k, experts), (0,), (2,)),)


OPERATORS = (
    Operator(
        name="linear", kind=Kind.PRODUCT, rule=_linear, work=_linear_work, arguments="input weight bias", chunkable=True
    ),
    Operator(
        name="LinearNF4",
        kind=Kind.PRODUCT,
        rule=_linear_nf4,
        work=_linear_nf4_work,
        forward_workspace_bytes=_unpacked_weight_bytes,
        backward_workspace_bytes=_unpacked_weight_bytes,
        title="linear in 4 bits",
    ),
    Operator(name="addmm", kind=Kind.PRODUCT, rule=_addmm, work=_addmm_work, arguments="input mat1 mat2"),
    Operator(name="baddbmm", kind=Kind.PRODUCT, rule=_addmm, work=_addmm_work, arguments="input batch1 batch2"),
    Operator(
        name="matmul",
        kind=Kind.PRODUCT,
        rule=_matmul,
        work=_matmul_work,
        arguments="input other",
        forward_workspace_bytes=_repeated_factor_bytes,
    ),
    *operators("bmm mm", kind=Kind.PRODUCT, rule=_matmul, work=_matmul_work, arguments="input mat2"),
    Operator(name="rmatmul", kind=Kind.PRODUCT, rule=_rmatmul, work=_rmatmul_work),
    Operator(name="einsum", kind=Kind.PRODUCT, rule=_einsum, work=_einsum_work, arguments="equation operands"),
    Operator(
        name="bilinear", kind=Kind.PRODUCT, rule=_bilinear, work=_bilinear_work, arguments="input1 input2 weight bias"
    ),
    Operator(
        name="moe_experts",
        kind=Kind.EXPERTS,
        rule=_moe_experts,
        work=_moe_work,
        splits_saved=_inner_splits_saved,
        forward_workspace_bytes=_dispatch_forward_bytes,
        backward_workspace_bytes=_dispatch_backward_bytes,
        local_execution=LocalExecution.EXCHANGE,
        title="experts",
    ),
    Operator(name="expert_linear", kind=Kind.EXPERTS, rule=_expert_linear, work=_expert_linear_work),
)
