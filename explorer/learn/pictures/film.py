"""A picture in motion: numbered stops, each a state of the data, and tiles that fly from one to the next.

Python makes every stop; `static/js/lessons/pictures/film.js` plays, pauses and scrubs between them. What is drawn at a stop is the data at that
stop: a cell shows its number of the stop until the next one is reached, and a flight shows what is under way. Who asked for
reduced motion steps from stop to stop and sees no flight.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from explorer.figures.svg_tensors import PAPER, Drawing, svg


@dataclass(frozen=True, slots=True)
class Cell:
    """A place at (x, y) with what stands there at each stop; None where nothing does."""

    x: float
    y: float
    bodies: tuple[Drawing | None, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A tile on its way from `start` to `end` between the stops `leaves` and `leaves` + 1."""

    leaves: int
    start: tuple[float, float]
    end: tuple[float, float]
    body: Drawing


@dataclass(frozen=True, slots=True)
class Film:
    """Words for every stop; `still` stands all the time; `width` and `height` hold everything."""

    width: float
    height: float
    said: tuple[str, ...]
    still: Drawing
    cells: tuple[Cell, ...]
    flights: tuple[Flight, ...]

    def __post_init__(self) -> None:
        stops = len(self.said)
        if any(len(cell.bodies) != stops for cell in self.cells) or any(
            not 0 <= f.leaves < stops - 1 for f in self.flights
        ):
            raise ValueError(f"a film of {stops} stops has cells of as many, and flights between two of them")

    def markup(self, alt: str) -> str:
        """Return the film for the page: without JavaScript its first stop stands still."""
        inside = self.still.body + "".join(map(_draw_cell, self.cells)) + "".join(map(_draw_flight, self.flights))
        said = "".join(_write_captions(i, words) for i, words in enumerate(self.said))
        picture = svg(Drawing(self.width, self.height, inside), alt)
        return f'<div class="film" data-stops="{len(self.said)}">{picture}{said}</div>'


def _draw_cell(cell: Cell) -> str:
    """Draw the bodies of a cell, each from the first to the last stop at which it stands."""
    # One group for a run of equal stops: most cells change once or twice in a film of many stops.
    runs: list[tuple[int, int, Drawing]] = []
    for stop, body in enumerate(cell.bodies):
        if body is None:
            continue
        if runs and runs[-1][1] == stop - 1 and runs[-1][2] == body:
            runs[-1] = (runs[-1][0], stop, body)
        else:
            runs.append((stop, stop, body))
    return "".join(
        f'<g class="cell" data-from="{first}" data-to="{last}"{_hide_attribute(first > 0)} transform="translate({cell.x:.1f} {cell.y:.1f})">{body.body}</g>'
        for first, last, body in runs
    )


def _draw_flight(f: Flight) -> str:
    path = " ".join(f"{v:.1f}" for v in (*f.start, *f.end))
    paper = f'<rect width="{f.body.width:.1f}" height="{f.body.height:.1f}" fill="{PAPER}"/>'  # what lies under it does not shine through
    return f'<g class="flight" data-at="{f.leaves}" data-way="{path}"{_hide_attribute(True)}>{paper}{f.body.body}</g>'


def _write_captions(stop: int, words: str) -> str:
    return f'<p class="said" data-at="{stop}"{_hide_attribute(stop > 0)}>{html.escape(words)}</p>'


def _hide_attribute(hidden: bool) -> str:
    return ' style="display:none"' if hidden else ""
