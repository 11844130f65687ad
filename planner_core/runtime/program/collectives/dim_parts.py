"""The parts of a dim that belong to ranks, and how they are put together again.

A dim with segments (q, k, v in one projection) is sharded segment by segment: every rank holds a part of each segment. A dim of a
weight with one segment has parts of different length, cut as `torch.chunk` does: the segment is its whole length. Messages carry the
shorter part padded to the length of the others.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from planner_core.runtime.mismatch import PlanMismatch

Segments = Mapping[int, tuple[int, ...]]
NO_SEGMENTS: Segments = {}


def split_segments(x: torch.Tensor, dim: int, segments: Segments) -> Sequence[torch.Tensor]:
    """The segments of a dim, as views; the whole dim if it has none."""
    sizes = segments.get(dim, (1,))
    if len(sizes) < 2:
        return (x,)
    cut: Sequence[torch.Tensor] = x.split([size * x.size(dim) // sum(sizes) for size in sizes], dim)
    return cut


def uneven_length(segments: Segments, dim: int) -> int | None:
    """The whole length of a dim whose parts differ in length; None for any other dim."""
    sizes = segments.get(dim, ())
    return sizes[0] if len(sizes) == 1 else None


def longest_part(whole: int, size: int) -> int:
    """The length of the longest of `size` parts."""
    return -(-whole // size)


def shard_length(whole: int, size: int, rank: int) -> int:
    """The length of the part of `rank`."""
    part = longest_part(whole, size)
    return max(0, min(part, whole - rank * part))


def split_unevenly(x: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    """The part of every rank of a dim whose parts differ in length, as views. The last ones may be empty."""
    whole = x.size(dim)
    lengths = [shard_length(whole, size, rank) for rank in range(size)]
    return list(x.split(lengths, dim))


def pad_dim(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`x`, with zeros behind its end along `dim`."""
    missing = length - x.size(dim)
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def describe_uneven_split(dim: int, shape: Sequence[int], size: int) -> str:
    """Why a dim has no parts of one length."""
    return (
        f"dim {dim} of a tensor of shape {tuple(shape)} cannot be split evenly over {size} ranks; batches of other sizes than the planned "
        "ones run where these divide, so pad them to it"
    )


def local_shard(x: torch.Tensor, dim: int, size: int, rank: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """The part of `dim` that belongs to `rank`. It is a view unless the dim has fused segments."""
    if x.size(dim) % size and uneven_length(segments, dim) is None:
        raise PlanMismatch(describe_uneven_split(dim, x.shape, size))
    if uneven_length(segments, dim) is not None:
        return split_unevenly(x, dim, size)[rank]
    own = [part.chunk(size, dim)[rank] for part in split_segments(x, dim, segments)]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def place_in_zeros(x: torch.Tensor, dim: int, size: int, rank: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """A tensor of the whole size: `rank`'s part in its place, and zeros elsewhere."""
    whole = x.new_zeros((*x.shape[:dim], size * x.size(dim), *x.shape[dim + 1 :]))
    for part, piece in zip(split_segments(whole, dim, segments), split_segments(x, dim, segments), strict=True):
        part.chunk(size, dim)[rank].copy_(piece)
    return whole


def split_by_rank(x: torch.Tensor, dim: int, size: int, segments: Segments = NO_SEGMENTS) -> list[torch.Tensor]:
    """The part of `dim` of every rank, in order of ranks."""
    if len(segments.get(dim, ())) < 2:
        return list(x.chunk(size, dim))
    cut = [part.chunk(size, dim) for part in split_segments(x, dim, segments)]
    return [torch.cat([part[rank] for part in cut], dim) for rank in range(size)]


def join_shards(pieces: Sequence[torch.Tensor], dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """The whole tensor from the parts of `dim` of all ranks."""
    if len(segments.get(dim, ())) < 2:
        return torch.cat(list(pieces), dim)
    cut = [split_segments(piece, dim, segments) for piece in pieces]
    return torch.cat([share[part] for part in range(len(cut[0])) for share in cut], dim)


def ring_counts(length: int, size: int, rank: int) -> tuple[list[int], list[int]]:
    """How many of `length` elements go to each rank and come from each rank, if all go to the next rank around a ring."""
    there, here = [0] * size, [0] * size
    there[(rank + 1) % size] = here[(rank - 1) % size] = length
    return there, here
