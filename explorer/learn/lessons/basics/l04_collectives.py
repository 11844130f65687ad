"""4. Collectives: ring all-reduce step by step, its bytes, and latency against bandwidth."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from explorer.figures.palette import DEVICES
from explorer.figures.svg_tensors import Drawing, Style, amount, column, device, row, svg, text, tile
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.pictures.board import BoardState, Chunk, board
from explorer.learn.pictures.charts import Line, plot
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost.communication import AxisLink, algorithms, axis_links, collective_time, wire_bytes

SIZES = (2**14, 2**17, 2**20, 2**23, 2**26, 2**29)
CODE = """\
import torch

n = 4
same = torch.Generator().manual_seed(n)  # the numbers of the picture
data = list(torch.randint(0, 10, (n, n), generator=same).double())  # n GPUs, n chunks each
want = sum(data)

for step in range(n - 1):  # reduce-scatter: pass a chunk on, add what arrives
    sent = [data[r][(r - 1 - step) % n].clone() for r in range(n)]
    for r in range(n):
        data[(r + 1) % n][(r - 1 - step) % n] += sent[r]
for step in range(n - 1):  # all-gather: pass finished chunks on
    sent = [data[r][(r - step) % n].clone() for r in range(n)]
    for r in range(n):
        data[(r + 1) % n][(r - step) % n] = sent[r]

print(f"each GPU sent {2 * (n - 1)} chunks and holds {data[0].tolist()}")
print("difference", max((d - want).abs().max().item() for d in data))
# on real GPUs: torch.distributed.all_reduce(tensor)
"""


@lru_cache(maxsize=32)
def ring(n: int) -> list[dict[str, Any]]:
    """States of a ring all-reduce of n chunks on n devices: values, how many terms each holds, who sent what. The sum of
    chunk r is finished on device r."""
    import torch

    gen = torch.Generator().manual_seed(n)
    data = torch.randint(0, 10, (n, n), generator=gen).double()
    terms = torch.ones(n, n, dtype=torch.int64)
    states = [{"data": data.clone(), "terms": terms.clone(), "sent": [], "phase": "start"}]
    for step in range(2 * (n - 1)):
        adding = step < n - 1
        chunks = [(r - 1 - step) % n if adding else (r - (step - n + 1)) % n for r in range(n)]
        moved = [(float(data[r, chunks[r]]), int(terms[r, chunks[r]])) for r in range(n)]
        for r, (value, count) in enumerate(moved):
            to = (r + 1) % n
            data[to, chunks[r]] = data[to, chunks[r]] + value if adding else value
            terms[to, chunks[r]] = terms[to, chunks[r]] + count if adding else count
        phase = "reduce-scatter" if adding else "all-gather"
        states.append({"data": data.clone(), "terms": terms.clone(), "sent": chunks, "phase": phase})
    return states


def link_of(learner: Learner, n: int) -> AxisLink:
    """n neighbouring GPUs of the learner's cluster."""
    cluster = learner.cluster
    level = replace(cluster.levels[0], size=n)
    return axis_links(replace(cluster, levels=(level,)), DeviceMesh(("tensor",), (n,)))[0]


def crossover(link: AxisLink) -> float:
    """Bytes at which sending takes as long as the fixed part of the ring."""
    a = algorithms("all_reduce", link)[0]
    return a.fixed_s / a.s_per_byte


def scene(learner: Learner, values: Values) -> Scene:
    """Every step of the ring, then the halves, then time against size."""
    n, size = int(values["n"]), int(values["bytes"])
    states = ring(n)
    steps = []
    for k, state in enumerate(states):
        sent = k * size / n
        title = "Start" if k == 0 else f"{state['phase']}, step {(k - 1) % (n - 1) + 1} of {n - 1}"
        steps.append(
            Step(title, _says(k, n, sent), svg(_grid(state, n, sent), f"Ring all-reduce on {n} GPUs after {k} steps"))
        )
    steps.append(_motion(states, n))
    wire, half = wire_bytes("all_reduce", size, n), wire_bytes("reduce_scatter", size, n)
    link = link_of(learner, n)
    seconds, name = collective_time("all_reduce", size, link)
    cross = crossover(link)
    steps.append(
        Step(
            "The bill",
            f"Each GPU sent {2 * (n - 1)} chunks of B/{n}: 2({n}−1)/{n} · B = **{amount(wire)}** for B = "
            f"{amount(size)}. The first half alone is a **reduce-scatter**, the second an **all-gather**, "
            f"{amount(half)} each. An all-reduce is one after the other.",
            svg(_bill(n, size), "Bytes of the two halves"),
        )
    )
    steps.append(
        Step(
            "Latency against bandwidth",
            _time_says(size, seconds, name, cross, n),
            svg(_curve(link, size, cross), "Time of an all-reduce by size"),
        )
    )
    checked = float((states[-1]["data"] - states[0]["data"].sum(0)).abs().max())
    return Scene(
        tuple(steps),
        {
            "wire": wire,
            "half": half,
            "seconds": seconds,
            "crossover": cross,
            "error": checked,
            "moved": 2 * (n - 1) * size / n,
        },
        reveal=2,
    )


def _motion(states: list[dict[str, Any]], n: int) -> Step:
    """The whole ring as a film."""
    stops = []
    for k, state in enumerate(states):
        held = [[_chunk(state, n, r, c) for c in range(n)] for r in range(n)]
        sends = states[k + 1]["sent"] if k + 1 < len(states) else []
        moves = [(r, c, (r + 1) % n, c) for r, c in enumerate(sends)]
        stops.append(
            BoardState(
                held,
                "Before the first step." if k == 0 else f"{state['phase']}: {k} chunk{'s' * (k > 1)} sent by each GPU.",
                moves,
            )
        )
    film = board(
        stops,
        n,
        cell=44 if n < 7 else 34,
        note="hatched: not summed yet; solid: all terms; grey: the same on every GPU",
    )
    says = f"The {_steps(2 * n - 1)} again, in motion. Play it, drag it, or use the arrow keys. At every stop the numbers are those that the GPUs hold then."
    return Step("The ring in motion", says, film.markup(f"A ring all-reduce on {n} GPUs in motion"))


def _chunk(state: dict[str, Any], n: int, r: int, c: int) -> Chunk:
    """Chunk c as device r holds it: grey where all hold the sums, solid with all terms, else hatched."""
    done, full = bool((state["terms"] == n).all()), int(state["terms"][r, c]) == n
    look: Style = ("R", None) if done else ("S", c) if full else ("P", c)
    return look, f"{float(state['data'][r, c]):.0f}"


def _says(k: int, n: int, sent: float) -> str:
    if k == 0:
        return (
            f"{n} GPUs, each with its own numbers, cut into {n} chunks. All want the sum. Every GPU sends only to "
            f"the next GPU, the last to GPU 0, one chunk at a time: {_steps(n)} until every sum is finished "
            f"somewhere, then {_steps(n)} until all have all. A chunk has the colour of the GPU that finishes its sum."
        )
    if k < n - 1:
        return (
            "Each GPU passes one chunk on, and the receiver adds it to its own. Outlined: what has just arrived. "
            f"Sent by each so far: {amount(sent)}."
        )
    if k == n - 1:
        return f"After {n - 1} steps every GPU has one chunk with all {n} terms: solid. Sent by each: {amount(sent)}."
    if k < 2 * (n - 1):
        return f"Now finished chunks go round; nothing is added any more. Sent by each so far: {amount(sent)}."
    return f"All GPUs hold all sums: Replicate, grey. Sent by each: {amount(sent)}."


def _steps(n: int) -> str:
    return f"{n - 1} step{'s' * (n > 2)}"


def _grid(state: dict[str, Any], n: int, sent: float) -> Drawing:
    frames, wide = [], 44 if n < 7 else 32
    for r in range(n):
        cells = []
        for c in range(n):
            box = tile(wide, 30, *_chunk(state, n, r, c))
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


def _bill(n: int, size: int) -> Drawing:
    from explorer.figures.palette import KIND_COLOURS
    from explorer.learn.pictures.charts import BarPiece, StackedBar, bars

    half = float(wire_bytes("reduce_scatter", size, n))
    parts = (
        BarPiece("reduce_scatter", half, KIND_COLOURS["reduce_scatter"]),
        BarPiece("all_gather", half, KIND_COLOURS["all_gather"], True),
    )
    return bars(
        [
            StackedBar(f"ring, n = {n}", parts),
            StackedBar("each to each", (BarPiece("everything to all others", float((n - 1) * size), "#8a97a3"),)),
        ],
        amount,
    )


def _time_says(size: int, seconds: float, name: str, cross: float, n: int) -> str:
    side = "below" if size < cross else "above"
    return (
        f"On {n} neighbouring GPUs of your cluster, {amount(size)} take **{units.seconds(seconds)}** "
        f"({name}). Below {amount(cross)} "
        f"the ring waits mostly for its {2 * (n - 1)} hops (latency); above it mostly for bytes (bandwidth). "
        f"You are {side} it. Measured runs add two things. Near the crossover a collective takes longer than both waits added. And few GPUs do not fill the links, "
        "however large the tensor is, so the rate that they reach is below the link's."
    )


def _curve(link: AxisLink, size: int, cross: float) -> Drawing:
    xs = [2.0**k for k in range(12, 31)]
    found = []
    for k, a in enumerate(algorithms("all_reduce", link)):
        found.append(
            Line(
                a.name,
                tuple((x, a.seconds(x)) for x in xs),
                (DEVICES[0], DEVICES[5], DEVICES[2])[k % 3],
                ("", "7 4", "2 3")[k % 3],
            )
        )
    return plot(
        found,
        "size of the tensor",
        "time of one all_reduce",
        amount,
        units.seconds,
        [(float(size), f"yours: {amount(size)}"), (cross, f"crossover of the ring: {amount(cross)}")],
    )


def question(learner: Learner, values: Values) -> Question:
    """What does each GPU send?"""
    n, size = int(values["n"]), int(values["bytes"])
    right = wire_bytes("all_reduce", size, n)
    name, unit = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if right >= u[1]), ("B", 1.0))

    def shown(value: float) -> str:
        return amount(value * unit)

    wrong = (
        ((n - 1) * size, f"That is what it would take to send everything to all {n - 1} others. The ring sends chunks of B/{n} instead."),
        (right / 2, f"That is {n - 1} chunk{'s' * (n > 2)}: the reduce-scatter alone. The finished chunks must still go round."),
        (2 * n * size, f"That is {2 * n} times the whole tensor. In the ring a GPU sends one chunk of B/{n} a step."),
        (size, "That is the tensor once. Count the steps: n − 1 while sums grow, n − 1 while finished sums go round, a chunk in each."),
        (2 * size, f"Nearly: that would be {2 * n} chunks. A chunk needs only n − 1 steps to pass all others, so {2 * (n - 1)} are sent."),
        (size / n, "That is one chunk, one step of the ring."),
    )  # fmt: skip
    why = f"{2 * (n - 1)} steps, each with one chunk of {amount(size / n)}: {amount(right)}. It hardly grows with n: never more than 2B."
    return typed(
        f"A ring all-reduce of {amount(size)} on {n} GPUs: how much does each GPU send in all?",
        name,
        (right / unit, why),
        tuple((value / unit, words) for value, words in wrong),
        shown,
    )


LESSON = Lesson(
    4, "collectives", "Collectives", "In a ring every device gets the sum of all, and none sends more than twice the tensor.",
    ("The picture shows real numbers going round a ring. Step through it and count what each GPU sends.",),
    (
        ("Ring", "each device sends to its neighbour only, the last one to the first"),
        ("Latency", "what one message takes before its first byte arrives, a few microseconds"),
        ("Bandwidth", "bytes per second once they flow"),
        ("Hop, tree", "a hop is one send from neighbour to neighbour; a tree sums in pairs, then pairs of pairs, so it needs fewer"),
    ),
    (
        Control("n", "Devices", (2, 3, 4, 5, 6, 7, 8), 4, kind="slider"),
        Control("bytes", "Tensor size B", SIZES, 2**26, {s: amount(s) for s in SIZES}, "slider", step=2),
    ),
    scene, question, CODE, ("topology", "Which links this model's collectives use"), uses_model=True,
)  # fmt: skip
