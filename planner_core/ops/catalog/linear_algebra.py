"""Linear algebra on the last two dims, products with vectors, distances. Leading dims are a batch, which may be sharded."""

from __future__ import annotations

import math

from planner_core.core import Op
from planner_core.ops.operators import Kind, Operator, operators
from planner_core.ops.rules import DimOf, Rule, Shapes, operand_dim, split
from planner_core.ops.work import Gemm, Part, Sizes, product_part

BATCHED = (
    "linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse cholesky_solve linalg_inv linalg_inv_ex inverse linalg_det "
    "linalg_slogdet slogdet logdet linalg_eigh linalg_eigvalsh linalg_svdvals linalg_svd linalg_qr linalg_lu linalg_lu_factor "
    "linalg_lu_factor_ex linalg_lu_solve matrix_exp linalg_matrix_power linalg_pinv pinverse linalg_solve linalg_solve_ex "
    "linalg_solve_triangular linalg_eig linalg_eigvals linalg_householder_product linalg_cond linalg_matrix_norm svd qr"
)
"""Functions of matrices: each result needs a whole matrix."""


def _batched(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Leading dims that every operand and result has may be sharded."""
    # The last two dims are the matrix, and every element of a result depends on all of it.
    lead = min(len(s) for s in ins) - 2
    every = (*ins, *outs)
    shared = [d for d in range(max(lead, 0)) if ins[0][d] > 1 and all(s[d : d + 1] == ins[0][d : d + 1] for s in every)]
    if any(len(s) != len(ins[0]) for s in ins):
        return Rule(())
    return Rule(tuple(split(f"d{d}", [d] * len(ins), [d] * len(outs), ins[0][d]) for d in shared))


def _mv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`mk,k->m`."""
    rows, inner = ins[0]
    return Rule((split("rows", [0, None], [0], rows), split("in", [1, 0], [None], inner)), linear=(0,))


def _mv_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    rows, inner = sizes.ins[0]
    return (product_part(Gemm(rows, 1, inner), (0,), (1,)),)


def _dot(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`k,k->`."""
    return Rule((split("in", [0, 0], [None], ins[0][0]),), linear=(0,))


def _dot_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    return (product_part(Gemm(1, 1, sizes.ins[0][0]), (0,), (1,)),)


def _outer(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`m,n->mn`."""
    return Rule((split("rows", [0, None], [0], ins[0][0]), split("out", [None, 0], [1], ins[1][0])), linear=(0,))


def _outer_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    return (product_part(Gemm(sizes.ins[0][0], sizes.ins[1][0], 1), (0,), (1,)),)


def _addmv(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """`bias + mk,k->m`. If k is sharded, the bias is added on one rank."""
    rows, inner = ins[1]
    splits = (
        split("rows", [operand_dim(ins[0], 1, 0), 0, None], [0], rows),
        split("in", [None, 1, 0], [None], inner, bias=(0,)),
    )
    return Rule(splits if "beta" not in op.attrs else ())


def _addmv_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    rows, inner = sizes.ins[1]
    return (product_part(Gemm(rows, 1, inner), (1,), (2,)),)


def _vecdot(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Dims that both operands have may be sharded. If it is the last dim, the result is Partial."""
    if ins[0] != ins[1] or "dim" in op.attrs:
        return Rule(())
    last = len(ins[0]) - 1
    splits = [split(f"d{d}", [d, d], [d], n) for d, n in enumerate(ins[0][:last]) if n > 1]
    return Rule((*splits, split("in", [last, last], [None], ins[0][last])), linear=(0,))


def _vecdot_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    shape = sizes.ins[0]
    return (product_part(Gemm(1, 1, shape[-1], math.prod(shape[:-1])), (0,), (1,)),)


def _cdist(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Distances of all pairs, `...pm,...rm->...pr`. The rows of either operand may be sharded, and the batch that both have."""
    a, b, rank = ins[0], ins[1], len(outs[0])
    lead: list[tuple[int, DimOf, DimOf]] = [
        (d, operand_dim(a[:-2], rank - 2, d), operand_dim(b[:-2], rank - 2, d))
        for d in range(rank - 2)
        if outs[0][d] > 1
    ]
    splits = [split(f"b{d}", [i, j], [d], outs[0][d]) for d, i, j in lead]
    splits.append(split("rows", [len(a) - 2, None], [rank - 2], a[-2]))
    splits.append(split("out", [None, len(b) - 2], [rank - 1], b[-2]))
    return Rule(tuple(s for s in splits if s.divides != (1,)))


def _cdist_work(op: Op, sizes: Sizes) -> tuple[Part, ...]:
    a, b, out = sizes.ins[0], sizes.ins[1], sizes.outs[0]
    return (product_part(Gemm(a[-2], b[-2], a[-1], math.prod(out[:-2])), (0,), (1,)),)


OPERATORS = (
    *operators(BATCHED, kind=Kind.ALONG, rule=_batched),
    *operators("mv", kind=Kind.PRODUCT, rule=_mv, work=_mv_work, arguments="input vec"),
    *operators("dot vdot", kind=Kind.PRODUCT, rule=_dot, work=_dot_work, leads_group=False),
    Operator(name="outer", kind=Kind.PRODUCT, rule=_outer, work=_outer_work, spellings=("ger",), leads_group=False),
    *operators("addmv", kind=Kind.PRODUCT, rule=_addmv, work=_addmv_work, arguments="input mat vec"),
    *operators("linalg_vecdot", kind=Kind.PRODUCT, rule=_vecdot, work=_vecdot_work, leads_group=False),
    *operators("cdist", kind=Kind.PRODUCT, rule=_cdist, work=_cdist_work, arguments="x1 x2 p"),
)
