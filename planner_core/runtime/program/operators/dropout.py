"""Dropout whose masks follow the plan: ranks with the same part of a tensor draw the same mask, other ranks draw others.

A mask depends on the seed, the step, the call site, the copy of the block and this rank's shard, and on nothing else. So a
recomputed block draws it again, and one process can draw the masks of all ranks.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.collectives.ranks import shard_index
from planner_core.runtime.program.operators.attention import causal_attention

MASK_DIMS = {"dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "feature_dropout": 2}
"""Kinds that drop whole channels: the mask spans this many dims."""


def unit_seed(seed: int, forwards: int, unit: str = "") -> int:
    """Return the seed of a unit in a forward pass. `seed`: that of the run; `forwards`: number of earlier forward passes."""
    text = f"{seed}/{forwards}/{unit}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big")


@contextlib.contextmanager
def seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators start from `seed`. On exit they are as before.

    A model draws by torch alone (docs/SUPPORT.md), so the generators of Python and numpy stay as they are.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def shard_seed(seed: int, axes: Sequence[Axis]) -> int:
    """Return the seed of this rank's part of a tensor that `axes` shard."""
    # 1 + index: part 0 of a sharded tensor must not draw the mask of a tensor that is whole.
    return seed + 0x9E3779B97F4A7C15 * (1 + shard_index(axes)) % (1 << 62) if axes else seed


class _Dropout(torch.autograd.Function):
    """The tensor times a mask. Backward draws the mask again, so that it need not be saved."""

    _shardscope = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, seed: int, dims: int) -> torch.Tensor:
        ctx.mask = (p, seed, dims)
        return x * make_mask(x, p, seed, dims)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * make_mask(gradient, *ctx.mask), None, None, None


def make_mask(like: torch.Tensor, p: float, seed: int, dims: int = 0) -> torch.Tensor:
    """Return a mask: 0 with probability `p`, otherwise 1 / (1 - p). It has one number per element, or with `dims` one per index
    of these leading dims."""
    shape = like.shape if not dims else (*like.shape[:dims], *(1 for _ in like.shape[dims:]))
    drawn = torch.empty(shape, dtype=like.dtype, device=like.device)
    if like.is_meta:
        return drawn
    # A generator of its own: the default one stays where the model's other draws expect it.
    generator = torch.Generator(like.device).manual_seed(seed)
    return drawn.bernoulli_(1 - p, generator=generator).div_(1 - p) if p < 1 else drawn.zero_()


def dropout(x: torch.Tensor, p: float, seed: int, *, kind: str = "dropout", split: Sequence[Axis] = ()) -> torch.Tensor:
    """Drop elements of a tensor that the axes `split` shard. On other axes it may be Partial, since dropout is linear."""
    out: torch.Tensor = _Dropout.apply(x, p, shard_seed(seed, split), MASK_DIMS.get(kind, 0))
    return out


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    dropout_p: float,
    seed: int,
    split: Sequence[Axis] = (),
    queries: Sequence[Axis] = (),
    **options: Any,
) -> torch.Tensor:
    """Attention with dropout of its weights. The kernel draws from the default generator, which is seeded for this call only.

    `queries`: the axes that shard causal queries.
    """
    options["dropout_p"] = dropout_p
    with contextlib.ExitStack() as stack:
        if not query.is_meta:
            stack.enter_context(seed_generators(shard_seed(seed, split), query.device))
        if queries:
            return causal_attention(query, key, value, queries=queries, **options)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def masked(seed: int, split: Sequence[Axis], device: torch.device, function: Callable[[], Any]) -> Any:
    """Call a function that draws masks from the default generator, for a tensor that the axes `split` shard."""
    with seed_generators(shard_seed(seed, split), device):
        return function()
