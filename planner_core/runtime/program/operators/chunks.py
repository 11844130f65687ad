"""A product in chunks: the sum over ranks of one chunk overlaps with the product of the next (ATP, section 3.4).

Chunks are features of the result. Example: y = x @ w^T with x [tokens, k] and w [4096, k] in 4 chunks is x @ w[i]^T with w[i]
[1024, k]. The first result is sent while the second is computed, and so on. At the end all results are joined.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.runtime.program.collectives import AxisMove, Finish, apply_moves, split_by_rank

Product = Callable[..., torch.Tensor]


def chunked(forward: Sequence[AxisMove], backward: Sequence[AxisMove], chunks: int) -> Product:
    """Return a function like F.linear whose result takes the one move of `forward`, a sum over ranks, and its gradient the
    moves `backward`.

    Autograd saves the operands before anything is computed or sent. So torch's checkpoint, which stops as soon as all saved
    tensors are there, does not repeat the product if nothing after it is needed, as with F.linear.
    """
    (move,), backward_moves = forward, tuple(backward)

    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, operands: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            biases = [None] * chunks if bias is None else bias.chunk(chunks)
            pending: list[Finish] = []
            for weight_chunk, bias_chunk in zip(weight.chunk(chunks), biases, strict=True):
                # Nothing waits inside the loop: the sum of one chunk is under way while the next product runs.
                pending.append(_start_sum(move, F.linear(x, weight_chunk, bias_chunk)))
            return torch.cat([finish() for finish in pending], -1)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
            return apply_moves(gradient, backward_moves), None, None, None

    def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        operands = _Operands.apply(input, weight, bias)
        out: torch.Tensor = Sums.apply(
            operands, input.detach(), weight.detach(), None if bias is None else bias.detach()
        )
        return out

    return product


class _Operands(torch.autograd.Function):
    """Saves the operands of a product, and computes their gradients. The result has the product's shape and no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # One element with strides of 0: autograd wants a tensor of this shape between the two functions, and nobody reads its values.
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            (gradient @ weight) if of_x else None,
            rows.t() @ x.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _start_sum(move: AxisMove, x: torch.Tensor) -> Finish:
    """Issue the sum of one chunk over the ranks of an axis."""
    if move.kind == "all_reduce":
        return move.axis.start_all_reduce(x, owned=True)
    assert move.dst is not None
    return move.axis.start_reduce_scatter(torch.cat(split_by_rank(x, move.dst, move.axis.size, {})) if move.dst else x)
