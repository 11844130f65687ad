"""The kernels of an op on one GPU, forward and backward, with their shapes.

The speed of a product depends on its shape and not only on its FLOPs. So an operator describes its products as kernels, and the
FLOPs follow from these. Shapes are those that one GPU holds. `linear` of x [16, 128, 4096] with a weight [1024, 4096] has

    forward               Gemm(m=2048, n=1024, k=4096)      17.2 GFLOPs
    gradient of x         Gemm(m=2048, n=4096, k=1024)      the same: dx [2048, 4096] = dy [2048, 1024] @ w
    gradient of weight    Gemm(m=4096, n=1024, k=2048)      the same: dw^T [4096, 1024] = x^T [4096, 2048] @ dy

If the weight is sharded in two by its output features, the extent 1024 becomes 512 in all three. A multiply-add counts as two
FLOPs. An op without kernels is bound by memory, or it is free if it is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from planner_core.core import Op
from planner_core.ops.rules import Shapes


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes of an op's operands and results on one GPU, and the global shapes of its operands. `parts`: into how many parts each
    dim is split, by the name of the split."""

    ins: Shapes
    outs: Shapes
    whole: Shapes
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` products of an [m, k] and a [k, n] matrix."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """2 m n k for each product."""
        return 2 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """A matrix [rows, k] whose rows are divided among `groups` matrices [k, n], as tokens are among experts.

    With `sums_rows` the kernel makes one matrix [k, n] for each group, summed over the group's rows: the gradient of the groups'
    matrices.
    """

    rows: int
    n: int
    k: int
    groups: int
    sums_rows: bool = False

    @property
    def flops(self) -> int:
        """2 n k for each row, in any group."""
        return 2 * self.rows * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """One fused attention kernel. `head_dim` is that of queries and keys, `value_dim` that of values.

    `causal`: query i sees the keys 0 to i, as in torch. `window`: the numbers of keys (before, behind) its own position that a query
    sees; None: all. `first` is the position of the first query, if the kernel has only some of the queries. The backward kernel
    computes the scores again. `times`: how often the kernel runs.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    backward: bool = False
    first: int = 0
    times: int = 1

    @property
    def pairs(self) -> float:
        """Number of pairs of a query and a key that the mask keeps, as the area under the mask.

        A causal square keeps half of its pairs, as in published FLOP counts (FlashAttention, section 4.1). To be exact, the pairs on
        and below the diagonal are (n + 1) / 2n of all. Example: causal 8 x 8 keeps 32; with a window of 2 keys before, 14. The
        last 2 of the 8 queries (`first` = 6) keep 14 of the 32.
        """
        before, behind = self.window
        # With a causal mask no query sees a key behind it, so a window that reaches behind is cut to 0.
        behind = 0 if self.causal and (behind is None or behind > 0) else behind
        upper = self.q_len * self.kv_len if behind is None else self._area(behind)
        return upper - (0 if before is None else self._area(-before))

    def _area(self, shift: int) -> float:
        """Return the integral over x from 0 to q_len of min(max(x + first + shift, 0), kv_len)."""
        shift += self.first

        def below(y: int) -> float:
            inside = min(max(y, 0), self.kv_len)
            return inside**2 / 2 + self.kv_len * max(y - self.kv_len, 0)

        # Example: a causal 8 x 8 has the shift 0: below(8) = 64 / 2 = 32 and below(0) = 0. Its last 2 queries: 32 - 36 / 2 = 14.
        return below(self.q_len + shift) - below(shift)

    @property
    def flops(self) -> int:
        """Two products forward (scores, values). Five backward: the scores again, and the gradients of both products' factors."""
        widths = 3 * self.head_dim + 2 * self.value_dim if self.backward else self.head_dim + self.value_dim
        return self._count(widths)

    @property
    def repeated_flops(self) -> int:
        """The scores that backward computes again."""
        return self._count(self.head_dim) if self.backward else 0

    def _count(self, widths: int) -> int:
        return int(2 * self.batch * self.heads * self.pairs * widths) * self.times


@dataclass(frozen=True, slots=True)
class Scan:
    """A fused kernel along the sequence (state-space scan, linear attention), described by its FLOPs alone."""

    flops: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Kernels that join the results of others: `num_bytes` that each reads and writes, and how many there are."""

    num_bytes: int
    times: int

    @property
    def flops(self) -> int:
        """They are bound by memory."""
        return 0


Kernel: TypeAlias = Gemm | GroupedGemm | Attention | Scan | Merge


@dataclass(frozen=True, slots=True)
class Part:
    """A kernel of the forward pass, and its backward kernels, each of which runs if one of its operands needs a gradient."""

    forward: Kernel
    backward: tuple[tuple[frozenset[int], Kernel], ...]


WorkFn: TypeAlias = Callable[[Op, Sizes], tuple[Part, ...]]
"""Gives the kernels of an operator, for an op and its shapes on one GPU."""


def product_part(gemm: Gemm, left: Collection[int], right: Collection[int]) -> Part:
    """Return a matrix product. `left` and `right` are the operands from which its two factors come."""
    # c [m, n] = a [m, k] @ b [k, n]. Backward: da [m, k] = dc [m, n] @ b.T sums over n; db [k, n] = a.T @ dc [m, n] sums over m.
    m, n, k = gemm.m, gemm.n, gemm.k
    of_left, of_right = replace(gemm, n=k, k=n), replace(gemm, m=k, n=n, k=m)
    return Part(gemm, ((frozenset(left), of_left), (frozenset(right), of_right)))


def grouped_product_part(gemm: GroupedGemm, left: Collection[int], right: Collection[int]) -> Part:
    """Return a product of rows with the matrices of their groups."""
    # The gradient of the rows is a product with the matrices transposed; that of each matrix sums over the rows of its group.
    of_left, of_right = replace(gemm, n=gemm.k, k=gemm.n), replace(gemm, sums_rows=True)
    return Part(gemm, ((frozenset(left), of_left), (frozenset(right), of_right)))


def fused_part(forward: Kernel, backward: Kernel, operands: Collection[int]) -> Part:
    """Return a kernel whose backward is one kernel, which makes the gradients of all `operands` at once."""
    return Part(forward, ((frozenset(operands), backward),))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one op on one GPU. Without kernels it is bound by memory, or it takes 0 s if it is `free` (a view)."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    free: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of the forward kernels."""
        return sum(k.flops for k in self.forward)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward kernels."""
        return sum(k.flops for k in self.backward)

    @property
    def model_flops(self) -> int:
        """FLOPs of forward and backward without what a kernel computes again, as model FLOPs utilization counts them (PaLM, appendix B)."""
        repeated = sum(k.repeated_flops for k in self.backward if isinstance(k, Attention))
        return self.flops + self.backward_flops - repeated


def work_of_parts(parts: tuple[Part, ...], wanted: Collection[int]) -> Work:
    """Return the kernels that run if the operands `wanted` get gradients."""
    wants = frozenset(wanted)
    backward = tuple(kernel for part in parts for operands, kernel in part.backward if operands & wants)
    return Work(tuple(part.forward for part in parts), backward)
