"""A product in chunks: the sum over ranks of one chunk of its result runs beside the product of the next chunk (ATP, section 3.4).

The chunks are features of the result. Of y = x @ w^T with x [tokens, k] and w [4096, k] each of 4 chunks is x @ w[i]^T with w[i] [1024, k].
The first is sent, then the second is made, and so on. At the end all are waited for and joined.
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
    """A function like F.linear whose result, a sum over ranks, takes the one step of `forward`, and its gradient the steps `backward`.

    Autograd keeps the operands before anything is computed or sent. So torch's checkpoint, which stops as soon as it has them again, does
    not repeat the product where nothing behind it is needed, as with F.linear.
    """
    (step,), back = forward, tuple(backward)

    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, operands: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            biases = [None] * chunks if bias is None else bias.chunk(chunks)
            coming: list[Finish] = []
            for part, added in zip(weight.chunk(chunks), biases, strict=True):
                coming.append(_start_sum(step, F.linear(x, part, added)))
            return torch.cat([finish() for finish in coming], -1)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
            return apply_moves(gradient, back), None, None, None

    def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        operands = _Operands.apply(input, weight, bias)
        out: torch.Tensor = Sums.apply(
            operands, input.detach(), weight.detach(), None if bias is None else bias.detach()
        )
        return out

    return product


class _Operands(torch.autograd.Function):
    """Keeps the operands of a product, and makes their gradients. The result only has the shape of the product, and no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
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


def _start_sum(step: AxisMove, x: torch.Tensor) -> Finish:
    """Issue the sum of one chunk over the ranks of an axis."""
    if step.kind == "all_reduce":
        return step.axis.start_all_reduce(x, owned=True)
    assert step.dst is not None
    return step.axis.start_reduce_scatter(torch.cat(split_by_rank(x, step.dst, step.axis.size, {})) if step.dst else x)
