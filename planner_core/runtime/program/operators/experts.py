"""A layer of experts of which each rank holds a part. Its tokens are whole (`own_experts`) or sharded too
(`dispatched_experts`).

If tokens are sharded, a rank sends k copies of each of its tokens to the ranks of the chosen experts, and gets their results
back. The router decides how many copies go where. So all ranks gather its choices first, and the host reads the counts: it
waits for the GPU once in forward. Tensors on meta have no values, so there every rank gets the same number of copies.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.collectives.ranks import Axes, num_shards, shard_index

ExpertLayer = Callable[..., torch.Tensor]


def own_experts(
    layer: ExpertLayer, hidden: torch.Tensor, index: torch.Tensor, *rest: Any, experts: Axes = (), **options: Any
) -> torch.Tensor:
    """Run the experts of this rank, which the axes `experts` shard, on all tokens. On meta the routing counts as balanced."""
    first_expert = shard_index(experts) * rest[1].shape[0]
    if hidden.is_meta:
        index = index[: max(1, len(index) // num_shards(experts))]
    return layer(hidden, index, *rest, **options, first_expert=first_expert)


def dispatched_experts(
    layer: ExpertLayer,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *experts: torch.Tensor | None,
    dispatch: Axis,
    **options: Any,
) -> torch.Tensor:
    """Run experts whose tokens the axis `dispatch` shards too: hidden [t, h], index and weights [t, k] of this rank's tokens ->
    [t, h].

    `layer` gets the copies that were sent to this rank, each for one of its `experts`.
    """
    assert experts[0] is not None
    num_local, k = len(experts[0]), index.shape[1]
    order, sent, received, ids = _route_tokens(index, num_local, dispatch)
    # `index` is flattened row by row, so with k = 2 the copies 0 1 are of token 0 and 2 3 of token 1.
    token = order // k

    def compute_local_experts(copies: torch.Tensor) -> torch.Tensor:
        return layer(copies, ids[:, None], None, *experts, **options, first_expert=dispatch.rank * num_local)

    # nested calls: what has been sent, received or computed is freed as soon as the next step is done
    results = _Exchange.apply(
        compute_local_experts(_Exchange.apply(hidden.index_select(0, token), sent, received, dispatch, False)),
        received,
        sent,
        dispatch,
        True,
    )
    out: torch.Tensor = _CombineResults.apply(results, weights.reshape(-1).index_select(0, order), token, len(hidden))
    return out


def _route_tokens(
    index: torch.Tensor, num_local: int, axis: Axis
) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
    """Return the order in which this rank sends its copies [t k], the numbers that it sends to and gets from each rank, and the
    experts of what it gets.

    Ids beyond the experts (a model's mark for "none") go to the last rank, which makes zeros of them.
    """
    n, rank = axis.size, axis.rank
    every = axis.all_gather(index, 0).reshape(n, -1)
    if index.is_meta:
        rows = index.numel()
        counts = [rows // n + (r < rows % n) for r in range(n)]
        return every[0].argsort(), counts, counts, index.new_empty(rows)
    # Example: 2 ranks with 2 experts each; rank 0 chose 0 3 1, rank 1 chose 2 2 0. Sorted: 0 1 3 and 0 2 2, owners 0 0 1 and 0 1 1.
    # The table is [[2, 1], [1, 2]]: rank 0 keeps 2 copies, sends 1 to rank 1, and receives 1 from it.
    chosen, order = every.sort(dim=1, stable=True)
    owner = (chosen // num_local).clamp(0, n - 1)
    table: list[list[int]] = torch.stack([row.bincount(minlength=n) for row in owner]).tolist()  # the host waits here
    received = [row[rank] for row in table]
    # Every rank has sorted the choices of all, so the experts of the copies that it receives need no message of their own.
    return order[rank], table[rank], received, chosen[owner == rank]


class _Exchange(torch.autograd.Function):
    """The copies of tokens that come from all ranks, for those that this rank sends; `back` if they return to where they came from."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, copies: torch.Tensor, sent: list[int], received: list[int], axis: Axis, back: bool
    ) -> torch.Tensor:
        ctx.where = sent, received, axis, back
        return axis.exchange(copies, sent, received, back=back)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, received, axis, back = ctx.where
        return axis.exchange(gradient, received, sent, back=not back), None, None, None, None


class _CombineResults(torch.autograd.Function):
    """The weighted sum of each token's results: results [t k, h], weights [t k], their tokens [t k] -> [t, h]."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, results: torch.Tensor, weights: torch.Tensor, token: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(results, weights, token)
        total = results.new_zeros((tokens, results.shape[1]))
        return total.index_add_(0, token, (results * weights[:, None]).to(results.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        results, weights, token = ctx.saved_tensors
        # A sum hands its gradient to every term, so each copy gets that of its token.
        each = gradient.index_select(0, token)
        shares = (each * results).sum(1).to(weights.dtype)
        return (each * weights[:, None]).to(results.dtype), shares, None, None
