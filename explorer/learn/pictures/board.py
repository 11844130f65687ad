"""Devices with places for chunks, and a film of what goes where: the states are the data's, the moves are what a collective sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from explorer.figures.palette import DEVICES
from explorer.figures.svg_tensors import Drawing, Style, at, device, number, text, tile
from explorer.learn.pictures.charts import WIDTH
from explorer.learn.pictures.film import Cell, Film, Flight

CELL_HIGH = 30.0
EDGE, HEAD = 10.0, 32.0
"""Of a device's frame: its margin, and the height of its name."""
PLAIN_FRAME = len(DEVICES) - 1
"""The colour of a frame that is not a GPU's."""
Chunk = tuple[Style, str]
DeviceChunks = Sequence[Chunk | None]
"""What the places of one device hold, row by row."""
Move = tuple[int, int, int, int]
"""From a device and its place to a device and its place."""


@dataclass(frozen=True, slots=True)
class BoardState:
    """`chunks[r]` is what device r holds, `words` says what one sees, `moves` is what goes on its way to the next stop."""

    chunks: Sequence[DeviceChunks]
    words: str
    moves: Sequence[Move] = ()


def board_film(
    stops: Sequence[BoardState],
    wide: int,
    *,
    cell: float,
    names: Sequence[str] = (),
    beside: Sequence[Drawing] = (),
    note: str = "",
) -> Film:
    """Return the film. A device has rows of `wide` places of `cell` by 30; `names` are the devices', `beside` stands in each frame on
    the left, `note` below all."""
    count, places = len(stops[0].chunks), len(stops[0].chunks[0])
    aside = max((b.width + 14 for b in beside), default=0.0)
    ranks = [r if not names or names[r].startswith("GPU") else PLAIN_FRAME for r in range(count)]
    inner = Drawing(aside + wide * cell, max([places // wide * CELL_HIGH, *(b.height for b in beside)]))
    frames = [device(ranks[r], inner, names[r] if names else "") for r in range(count)]
    corners = _corners(frames)
    slots = [
        [(x + EDGE + aside + i % wide * cell, y + HEAD + i // wide * CELL_HIGH) for i in range(places)]
        for x, y in corners
    ]
    still = "".join(at(x, y, f) for (x, y), f in zip(corners, frames, strict=True))
    still += "".join(at(x + EDGE, y + HEAD, b) for (x, y), b in zip(corners, beside, strict=False))
    high = max(y + f.height for (_, y), f in zip(corners, frames, strict=True))
    if note:
        still += at(0, high + 8, text(note, 13, muted=True))
        high += 28
    cells = [
        Cell(*slots[r][i], tuple(_tile(stop.chunks[r][i], cell) for stop in stops))
        for r in range(count)
        for i in range(places)
    ]
    flights = []
    for k, stop in enumerate(stops[:-1]):
        for r, i, to, j in stop.moves:
            body = _tile(stop.chunks[r][i], cell)
            assert body, "only what a device holds is sent"
            flights.append(Flight(k, slots[r][i], slots[to][j], body))
    width = max(x + f.width for (x, _), f in zip(corners, frames, strict=True))
    return Film(width, high, tuple(s.words for s in stops), Drawing(0, 0, still), tuple(cells), tuple(flights))


def _tile(chunk: Chunk | None, cell: float) -> Drawing | None:
    return tile(cell - 1, CELL_HIGH - 1, chunk[0], chunk[1], 13 if cell > 34 else 12) if chunk else None


def _corners(frames: Sequence[Drawing]) -> list[tuple[float, float]]:
    """Place frames of one size in equal rows no wider than a picture."""
    width, height = max(f.width for f in frames) + 14, frames[0].height + 14
    most = max(1, int((WIDTH + 14) // width))
    per = -(-len(frames) // -(-len(frames) // most))
    return [(i % per * width, i // per * height) for i in range(len(frames))]


def matrix_chunks(matrix: Sequence[Sequence[float]], style: Style) -> list[Chunk]:
    """Return the cells of a matrix, row by row."""
    return [(style, number(float(v))) for line in matrix for v in line]
