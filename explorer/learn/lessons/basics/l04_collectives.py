"""4. Collectives: ring all-reduce step by step, its bytes, and latency against bandwidth."""

from __future__ import annotations

from typing import Any

from explorer.figures.svg_tensors import Drawing, Style, amount, column, device, row, text, tile
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.board import BoardState, Chunk, board_film
from explorer.learn.pictures.charts import plot
from explorer.learn.pictures.film import Film
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost.communication import AxisLink, algorithms, axis_links, collective_time, wire_bytes


@remember(32)
def run_ring(n: int) -> list[dict[str, Any]]:
    """Return the states of a ring all-reduce of n chunks on n devices: values, how many terms each holds, who sent what. The sum of
    chunk r is finished on device r."""
    import torch

    gen = torch.Generator().manual_seed(n)
    data = torch.randint(0, 10, (n, n), generator=gen).double()
    terms = torch.ones(n, n, dtype=torch.int64)
    states = [{"data": data.clone(), "terms": terms.clone(), "sent": [], "phase": "start"}]
    for step in range(2 * (n - 1)):
        adding = step < n - 1
        # Device r begins with the chunk before its own, so that its own arrives with all terms after n - 1 steps.
        chunks = [(r - 1 - step) % n if adding else (r - (step - n + 1)) % n for r in range(n)]
        # All send at once: what they send is read before anything arrives.
        moved = [(float(data[r, chunks[r]]), int(terms[r, chunks[r]])) for r in range(n)]
        for r, (value, count) in enumerate(moved):
            to = (r + 1) % n
            data[to, chunks[r]] = data[to, chunks[r]] + value if adding else value
            terms[to, chunks[r]] = terms[to, chunks[r]] + count if adding else count
        phase = "reduce-scatter" if adding else "all-gather"
        states.append({"data": data.clone(), "terms": terms.clone(), "sent": chunks, "phase": phase})
    return states


def neighbour_link(learner: Learner, n: int) -> AxisLink:
    """Return the link between n neighbouring GPUs of the learner's cluster."""
    return axis_links(learner.cluster.with_sizes(n), DeviceMesh(("tensor",), (n,)))[0]


def crossover_bytes(link: AxisLink) -> float:
    """Return the bytes at which sending takes as long as the fixed part of the ring."""
    a = algorithms("all_reduce", link)[0]
    return a.fixed_s / a.s_per_byte


def live(learner: Learner, values: Values) -> Live:
    """Return every step of the ring, then the halves, then time against size."""
    n, size = int(values["n"]), int(values["bytes"])
    states, link = run_ring(n), neighbour_link(learner, n)
    wire, half = wire_bytes("all_reduce", size, n), wire_bytes("reduce_scatter", size, n)
    seconds, name = collective_time("all_reduce", size, link)
    cross = crossover_bytes(link)
    pictures: dict[str, Picture] = {f"state_{k}": _draw_state(state, n) for k, state in enumerate(states)}
    pictures |= {
        "motion": _ring_film(states, n),
        "curve": _time_chart(link, size, cross),
    }
    unit, unit_bytes = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if wire >= u[1]), ("B", 1.0))
    facts = {"wire_half": half, "time": seconds, "algorithm": name, "unit": unit, "unit_bytes": unit_bytes}
    numbers = {"wire": wire, "half": half, "seconds": seconds, "crossover": cross, "moved": 2 * (n - 1) * size / n}
    numbers["error"] = float((states[-1]["data"] - states[0]["data"].sum(0)).abs().max())
    return Live(facts, pictures, numbers)


def _ring_film(states: list[dict[str, Any]], n: int) -> Film:
    """Return the whole ring as a film."""
    stops = []
    for k, state in enumerate(states):
        boards = [[_make_chunk(state, n, r, c) for c in range(n)] for r in range(n)]
        sends = states[k + 1]["sent"] if k + 1 < len(states) else []
        moves = [(r, c, (r + 1) % n, c) for r, c in enumerate(sends)]
        said = f"{state['phase']}: {k} chunk{'s' * (k > 1)} sent by each GPU." if k else "Before the first step."
        stops.append(BoardState(boards, said, moves))
    note = "hatched: not summed yet; solid: all terms; grey: the same on every GPU"
    return board_film(stops, n, cell=44 if n < 7 else 34, note=note)


def _make_chunk(state: dict[str, Any], n: int, r: int, c: int) -> Chunk:
    """Return chunk c as device r holds it: grey where all hold the sums, solid with all terms, else hatched."""
    done, full = bool((state["terms"] == n).all()), int(state["terms"][r, c]) == n
    look: Style = ("R", None) if done else ("S", c) if full else ("P", c)
    return look, f"{float(state['data'][r, c]):.0f}"


def _draw_state(state: dict[str, Any], n: int) -> Drawing:
    frames, wide = [], 44 if n < 7 else 32
    for r in range(n):
        cells = []
        for c in range(n):
            box = tile(wide, 30, *_make_chunk(state, n, r, c))
            if state["sent"] and state["sent"][(r - 1) % n] == c:
                edge = f'<rect x="2" y="2" width="{wide - 4}" height="26" fill="none" stroke="currentColor" '
                box = Drawing(wide, 30, box.body + edge + 'stroke-width="2.5"/>')
            cells.append(box)
        frames.append(device(r, row(*cells, gap=4 if n < 7 else 2)))
    per = 1 if 4 < n < 7 else 2
    grid = column(*(row(*frames[i : i + per], gap=12) for i in range(0, n, per)), gap=8)
    key = row(
        tile(22, 14, ("P", 0)),
        text("not summed yet", 13, muted=True),
        tile(22, 14, ("S", 0)),
        text(f"all {n} terms", 13, muted=True),
        tile(22, 14, ("R", None)),
        text("the same on every GPU", 13, muted=True),
        gap=6,
    )
    return column(grid, key, gap=12)


def _time_chart(link: AxisLink, size: int, cross: float) -> Drawing:
    curves = {a.name: a.seconds for a in algorithms("all_reduce", link)}
    marks = [(float(size), f"yours: {amount(size)}"), (cross, f"crossover of the ring: {amount(cross)}")]
    xs = [2.0**k for k in range(12, 31)]
    return plot(xs, curves, "size of the tensor", "time of one all_reduce", amount, units.seconds, marks)


LESSON = read_lesson("04-collectives", live)
