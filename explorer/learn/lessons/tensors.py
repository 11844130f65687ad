"""Small tensors split over devices by torch: what each holds under a placement, the whole again, and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from explorer.figures.svg_tensors import CELL_W, Drawing, matrix, owned, replicated
from planner_core.core import Partial, Shard, parse_placement


def split(tensor: Any, placement: str, devices: int) -> list[Any]:
    """Return what each device holds of a tensor that is sharded or replicated."""
    p = parse_placement(placement)
    return list(tensor.chunk(devices, p.dim)) if isinstance(p, Shard) else [tensor.clone() for _ in range(devices)]


def join(pieces: Sequence[Any], placement: str) -> Any:
    """Return the whole tensor: slices side by side, terms summed, or the first of equal ones."""
    import torch

    p = parse_placement(placement)
    if isinstance(p, Shard):
        return torch.cat(list(pieces), p.dim)
    return torch.stack(list(pieces)).sum(0) if isinstance(p, Partial) else pieces[0]


def draw_piece(piece: Any, rank: int, placement: str, name: str = "", cell: float = CELL_W) -> Drawing:
    """Return what one device holds of a matrix: grey where all hold it, solid for a slice, hatched for a term of a sum."""
    style = replicated if placement == "R" else owned(rank, placement[0])
    return matrix(piece, style, name, "P, not summed yet" if placement == "P" else placement, cell)
