"""The parts of a dim that belong to ranks, and how they are joined.

A fused dim (q, k and v in one projection) is sharded segment by segment: every rank holds a part of each segment. A dim that
the number of ranks does not divide has one segment, its full length, and is cut as `torch.chunk` does. Messages carry a shorter
part padded to the length of the longest.

    segments (4, 2) over 2 ranks: rows 0 1 2 3 | 4 5 -> rank 0 has 0 1 4, rank 1 has 2 3 5
    length 5 over 2 ranks: rank 0 has 0 1 2, rank 1 has 3 4 and sends 3 4 0
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from planner_core.runtime.mismatch import PlanMismatch

Segments = Mapping[int, tuple[int, ...]]
NO_SEGMENTS: Segments = {}


def split_segments(x: torch.Tensor, dim: int, segments: Segments) -> Sequence[torch.Tensor]:
    """Return the segments of a dim as views; the whole dim if it is not fused."""
    sizes = segments.get(dim, (1,))
    if len(sizes) < 2:
        return (x,)
    # The sizes are those of the whole dim, and `x` may be a part of it. Example: (4, 2) of a part with 3 rows is 2 and 1.
    segments_of_dim: Sequence[torch.Tensor] = x.split([size * x.size(dim) // sum(sizes) for size in sizes], dim)
    return segments_of_dim


def uneven_length(segments: Segments, dim: int) -> int | None:
    """Return the full length of a dim whose parts differ in length; None for any other dim."""
    sizes = segments.get(dim, ())
    return sizes[0] if len(sizes) == 1 else None


def longest_part(full: int, size: int) -> int:
    """Return the length of the longest part of a dim over `size` ranks."""
    return -(-full // size)


def shard_length(full: int, size: int, rank: int) -> int:
    """Return the length of the part of `rank`."""
    part = longest_part(full, size)
    # Example: length 5 over 4 ranks is 2, 2, 1 and 0, since the longest part is 2 and three ranks have all rows.
    return max(0, min(part, full - rank * part))


def split_unevenly(x: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    """Return the part of every rank as views, for a dim whose parts differ in length. The last ones may be empty."""
    full = x.size(dim)
    lengths = [shard_length(full, size, rank) for rank in range(size)]
    return list(x.split(lengths, dim))


def pad_dim(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Append zeros along `dim` up to `length`."""
    missing = length - x.size(dim)
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def describe_uneven_split(dim: int, shape: Sequence[int], size: int) -> str:
    """Return a sentence about a dim that cannot be split into equal parts."""
    return (
        f"dim {dim} of a tensor of shape {tuple(shape)} cannot be split evenly over {size} ranks; batches of other sizes than the planned "
        "ones run where these divide, so pad them to it"
    )


def local_shard(x: torch.Tensor, dim: int, size: int, rank: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """Return the part of `dim` that belongs to `rank`: a view unless the dim is fused."""
    if x.size(dim) % size and uneven_length(segments, dim) is None:
        raise PlanMismatch(describe_uneven_split(dim, x.shape, size))
    if uneven_length(segments, dim) is not None:
        return split_unevenly(x, dim, size)[rank]
    local = [part.chunk(size, dim)[rank] for part in split_segments(x, dim, segments)]
    return local[0] if len(local) == 1 else torch.cat(local, dim)


def place_in_zeros(x: torch.Tensor, dim: int, size: int, rank: int, segments: Segments) -> torch.Tensor:
    """Return a tensor of the full size with the part of `rank` in its place and zeros elsewhere."""
    full = x.new_zeros((*x.shape[:dim], size * x.size(dim), *x.shape[dim + 1 :]))
    for part, piece in zip(split_segments(full, dim, segments), split_segments(x, dim, segments), strict=True):
        part.chunk(size, dim)[rank].copy_(piece)
    return full


def split_by_rank(x: torch.Tensor, dim: int, size: int, segments: Segments) -> list[torch.Tensor]:
    """Return the part of `dim` of every rank, in order of ranks."""
    if len(segments.get(dim, ())) < 2:
        return list(x.chunk(size, dim))
    by_segment = [part.chunk(size, dim) for part in split_segments(x, dim, segments)]
    return [torch.cat([part[rank] for part in by_segment], dim) for rank in range(size)]


def join_shards(pieces: Sequence[torch.Tensor], dim: int, segments: Segments = NO_SEGMENTS) -> torch.Tensor:
    """Join the parts of `dim` of all ranks."""
    if len(segments.get(dim, ())) < 2:
        return torch.cat(list(pieces), dim)
    by_segment = [split_segments(piece, dim, segments) for piece in pieces]
    # Example: rank 0 has 0 1 | 4 and rank 1 has 2 3 | 5. All ranks' first segments come first: 0 1 2 3 | 4 5.
    return torch.cat([share[part] for part in range(len(by_segment[0])) for share in by_segment], dim)


def ring_counts(length: int, size: int, rank: int) -> tuple[list[int], list[int]]:
    """Return how many elements go to each rank and come from each rank, if all `length` go to the next rank of a ring."""
    sent, received = [0] * size, [0] * size
    sent[(rank + 1) % size] = received[(rank - 1) % size] = length
    return sent, received
