"""A weight as the GPUs hold it: a matrix whose parts have the colours of their GPUs, stored and where it is used. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.figures import svg_tensors as draw
from explorer.figures.svg_tensors import Drawing
from planner_core.core import DeviceMesh, ParamPlan, Placement, Shard

SIDE = 132.0
MOST = 16
"""Parts of a side that are drawn; more would be lines."""
NAMED = 15.0
"""Pixels that the number of a GPU needs."""


def weight_picture(p: ParamPlan, mesh: DeviceMesh, shape: Sequence[int]) -> str:
    """Draw the weight as it is stored, and gathered where it is used, if that differs."""
    used = [r if axis not in p.gathered else None for axis, r in enumerate(p.working)]
    rest = draw.titled(_draw_matrix(list(p.stored), mesh, shape), "stored")
    differs = [str(r) for r in p.stored] != [str(r) if r is not None else "R" for r in used]
    picture = (
        draw.row(rest, draw.titled(_draw_matrix(used, mesh, shape), "while used"), gap=26, align=1) if differs else rest
    )
    text = draw.svg(picture, "The weight in the colours of the GPUs that hold its parts")
    return text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _draw_matrix(placed: Sequence[Placement | None], mesh: DeviceMesh, shape: Sequence[int]) -> Drawing:
    """Draw the parts: rows are dim 0, columns dim 1; a part has the colour of its first GPU. None counts as whole."""
    cuts: dict[int, list[tuple[int, int]]] = {}
    # Ranks count along the last axis first: two GPUs next to each other on an axis are as many ranks apart as the axes after it have.
    stride = mesh.num_devices
    for placement, n in zip(placed, mesh.axis_sizes, strict=True):
        stride //= n
        if isinstance(placement, Shard) and n > 1:
            # A convolution's further dims, and an expert's third, are drawn as columns.
            cuts.setdefault(min(placement.dim, 1), []).append((n, stride))
    rows, columns = (_list_owners(cuts.get(dim, [])) for dim in (0, 1))
    wide = SIDE if len(shape) > 1 else SIDE / 3
    w, h = wide / len(columns), SIDE / 1.6 / len(rows)
    named = w > 1.4 * NAMED and h > NAMED
    tiles = [
        draw.row(
            *(
                draw.tile(w, h, ("S", a + b) if cuts else ("R", None), f"{a + b}" if named and cuts else "", 11)
                for b in columns
            ),
            gap=0,
        )
        for a in rows
    ]
    return draw.column(*tiles, gap=0)


def _list_owners(cuts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first GPU of each part of a dim that several axes split in turn; at most `MOST` parts."""
    ranks = [0]
    for n, stride in cuts:
        ranks = [rank + k * stride for rank in ranks for k in range(n)]
    return ranks[:MOST]
