"""11. Two dimensions: ATP's row-first and column-first weights on a d1 × d2 mesh, the best mesh, and chunk overlap."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import Box, amount, column, device, matrix, number, owned, row, svg, table
from explorer.learn import links
from explorer.learn.charts import Bar, Part, bars, timeline
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.text import units
from planner_core.cost.communication import (
    best_mesh,
    bracket,
    chunk_timeline,
    layer_wire_bytes,
    reductions,
    ring_time_s,
    wire_bytes,
)

COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)
CODE = """\
import torch

d1, d2 = 2, 2
X = torch.randint(-3, 4, (2, 4)).double()
W = torch.randint(-3, 4, (4, 4)).double()

# column-first: outputs (dim 1) over axis 1, inputs (dim 0) over axis 2
columns = []
for w in W.chunk(d1, dim=1):  # axis 1
    terms = [x @ p for x, p in zip(X.chunk(d2, dim=1), w.chunk(d2, dim=0))]  # axis 2
    columns.append(sum(terms))  # the all_reduce over axis 2
assert torch.equal(torch.cat(columns, dim=1), X @ W)
"""


@lru_cache(maxsize=8)
def tile_product(kind: str) -> dict[str, Any]:
    """X W on a 2×2 mesh: each device's tile of W, its term, and the error of the sums against the whole."""
    import torch

    gen = torch.Generator().manual_seed(3)
    x, w = (torch.randint(-3, 4, s, generator=gen).double() for s in ((2, 4), (4, 4)))
    tiles, terms = {}, {}
    for a in range(2):
        for b in range(2):
            out, inner = (a, b) if kind == "column-first" else (b, a)
            tiles[a, b] = w.chunk(2, 1)[out].chunk(2, 0)[inner]
            terms[a, b] = x.chunk(2, 1)[inner] @ tiles[a, b]
    if kind == "column-first":
        whole = torch.cat([terms[a, 0] + terms[a, 1] for a in range(2)], 1)
    else:
        whole = torch.cat([terms[0, b] + terms[1, b] for b in range(2)], 1)
    return {"x": x, "w": w, "tiles": tiles, "terms": terms, "error": float((whole - x @ w).abs().max())}


def meshes(n: int) -> list[tuple[int, int]]:
    """All d1 × d2 = n with powers of two."""
    return [(d1, n // d1) for d1 in (*COUNTS[::-1], 2, 1) if n % d1 == 0 and d1 <= n]


def scene(learner: Learner, values: Values) -> Scene:
    """Tiles, the four all_reduces, meshes compared, growth, and the timeline."""
    learner, note = learner.transformer()
    n, ratio, chunks = int(values["n"]), int(values["ratio"]), int(values["chunks"])
    layer, load = learner.layer(), learner.planner.workload
    tokens, base = load.batch * load.seq, learner.cluster.levels[0].bytes_per_s
    d1, d2 = best_mesh(n, base, base * ratio)
    times = {
        m: ring_time_s(*m, base, base * ratio, layers=layer.layers, tokens=tokens, hidden=layer.hidden)
        for m in meshes(n)
    }
    compute, comm, spans = _chunks(learner, (d1, d2), chunks, base * ratio)
    tiles, error = _tiles()
    four = (
        f"A layer has four weights (q, k and v count as one), so four all_reduces forward and four backward. On {d1} × {d2}, in units "
        "of tokens · "
        "hidden, each over one axis only (FFN-1 and FFN-2 are the two weights of the feed-forward part). Per part of a "
        "weight three times as much goes over axis 2, hence the 3 in the formula of the question:"
    )
    which = (
        f"{n} GPUs, the second axis with {ratio}× the bandwidth of the first. Least: **{d1} × {d2}**, "
        f"{units.seconds(times[d1, d2])} of communication a step; Megatron-LM is {n} × 1, {units.seconds(times[n, 1])}."
    )
    growth = (
        f"The best mesh for each number of GPUs, at {ratio}× bandwidth on axis 2. Cutting two ways pays more and more."
    )
    steps = (
        *tiles,
        Step("Four all-reduces", four, _four(d1, d2)),
        Step("Which mesh?", which, _meshes(times, ratio, layer, tokens, (d1, d2))),
        Step("As N grows", growth, svg(_growth(ratio), "Gain of the best mesh by number of GPUs")),
        _overlap(chunks, compute + comm, spans),
    )
    numbers = {
        "d1": d1, "d2": d2, "best_s": times[d1, d2], "megatron_s": times[n, 1], "end_s": spans[-1].end_s,
        "compute_s": compute, "comm_s": comm, "error": error,
    }  # fmt: skip
    return Scene(steps, numbers, reveal=3, note=note)


def _tiles() -> tuple[list[Step], float]:
    """The two ways to cut one weight on a 2×2 mesh, with real numbers; and the larger of their errors."""
    c, r = tile_product("column-first"), tile_product("row-first")
    first = (
        "A 2 × 2 mesh. Axis 1 cuts the outputs, axis 2 the inputs of W. Each result is a term over axis 2: one "
        f"all_reduce there. Error of the sums: **{number(c['error'])}**."
    )
    second = (
        "The other way round: axis 1 cuts the inputs, axis 2 the outputs, so the sum runs over axis 1. It "
        "fits behind a "
        f"column-first weight without moving anything. Error: **{number(r['error'])}**."
    )
    steps = [
        Step("Column-first", first, svg(_mesh(c), "Column-first weight on a 2 by 2 mesh")),
        Step("Row-first", second, svg(_mesh(r), "Row-first weight on a 2 by 2 mesh")),
    ]
    return steps, max(c["error"], r["error"])


def _meshes(times: dict[tuple[int, int], float], ratio: int, layer: Layer, tokens: int, best: tuple[int, int]) -> str:
    rows = []
    for (a, b), t in times.items():
        wire = sum(layer_wire_bytes(a, b, phase, tokens, layer.hidden) for phase in ("forward", "backward"))
        rows.append((f"{a} × {b}", f"{bracket(a, b, 1, ratio):g}", units.seconds(t), amount(layer.layers * wire)))
    head = ("d1 × d2", "(d1−1)/B1 + 3(d2−1)/B2", "time a step", "sent per GPU")
    return table(head, rows, list(times).index(best))


def _overlap(chunks: int, alone: float, spans: Any) -> Step:
    end = spans[-1].end_s
    says = (
        f"Feed-forward of one layer, its batch in {chunks} chunk{'s' * (chunks > 1)}: while one chunk's sum "
        "travels, the "
        f"next one is computed. {units.seconds(end)} instead of {units.seconds(alone)}."
    )
    return Step("Chunk overlap", says, svg(_timeline(spans, end), "Compute and communication on a timeline"))


def _mesh(c: dict[str, Any]) -> Box:
    rows = []
    for a in range(2):
        cells = []
        for b in range(2):
            rank = 2 * a + b
            body = row(
                matrix(c["tiles"][a, b], owned(rank), "tile of W", "", 40),
                matrix(c["terms"][a, b], owned(rank, "P"), "result", "P, not summed yet", 40),
                gap=14,
            )
            cells.append(device(rank, body, f"GPU {rank}: axis 1 = {a}, axis 2 = {b}"))
        rows.append(row(*cells, gap=12))
    return column(*rows, gap=12)


def _four(d1: int, d2: int) -> str:
    rows = []
    for r in reductions(d1, d2):
        wire = wire_bytes("all_reduce", int(r.share * 10**6), {1: d1, 2: d2}[r.axis]) / 1e6
        rows.append((r.phase, r.weight, str(r.axis), str(r.share), f"{wire:.3f}"))
    return table(("phase", "weight", "axis", "tensor, tokens · hidden", "sent per GPU"), rows)


def _growth(ratio: int) -> Box:
    items = []
    for n in COUNTS:
        a, b = best_mesh(n, 1, ratio)
        gain = bracket(a, b, 1, ratio) / bracket(n, 1, 1, ratio)
        items.append(Bar(f"{n} GPUs", (Part("best mesh", gain, COMMUNICATION),), f"of Megatron-LM's time, {a} × {b}"))
    return bars(items, units.percent)


def _chunks(learner: Learner, mesh: tuple[int, int], chunks: int, b2: float) -> tuple[float, float, Any]:
    """Seconds of the layer's first feed-forward product, of its all_reduces, and ATP's timeline of both."""
    layer, load = learner.layer(), learner.planner.workload
    d1, d2 = mesh
    tokens = load.batch * load.seq
    flops = 2 * tokens * layer.hidden * layer.inner * 2 / (d1 * d2)
    compute = flops / learner.cluster.gpu.flops_per_s(load.dtype)
    b1 = learner.cluster.levels[0].bytes_per_s
    size = tokens * 2
    first = wire_bytes("all_reduce", size * layer.inner // d1, d2) / b2
    second = wire_bytes("all_reduce", size * layer.hidden // d2, d1) / b1
    comm = first + second
    return compute, comm, chunk_timeline([compute / chunks] * chunks, [comm / chunks] * chunks)


def _timeline(spans: Any, end: float) -> Box:
    colours = {"compute": COMPUTE, "communication": COMMUNICATION}
    tracks = []
    for stream, colour in colours.items():
        mine = [x for x in spans if x.stream == stream]
        tracks.append((stream, [(x.start_s, x.end_s, f"chunk {x.chunk + 1}", colour) for x in mine]))
    return timeline(tracks, units.seconds, end)


def question(learner: Learner, values: Values) -> Question:
    """Which mesh is best?"""
    n, ratio = int(values["n"]), int(values["ratio"])
    best = best_mesh(n, 1, ratio)
    cost = {m: bracket(*m, 1, ratio) for m in meshes(n)}
    others = sorted((m for m in cost if m != best), key=lambda m: (m != (n, 1), m != (1, n), cost[m]))[:3]
    options = []
    for m in (best, *others):
        name = f"{m[0]} × {m[1]}" + (" (Megatron-LM)" if m == (n, 1) else "")
        options.append((name, f"({m[0]}−1)/1 + 3·({m[1]}−1)/{ratio} = {cost[m]:g}; the best is {cost[best]:g}."))
    told = (
        f"Time goes with (d1−1)/B1 + 3(d2−1)/B2, where B1 and B2 are the bandwidths of the axes. {n} GPUs, B1 = 1, "
        f"B2 = {ratio}: which d1 × d2 is quickest?"
    )
    return asked(told, options[0], tuple(options[1:]), n % 3)


LESSON = Lesson(
    11, "Two dimensions", "Cut inputs and outputs of each weight at once: smaller tensors are summed, in smaller groups.",
    (
        "ATP (Adaptive Tensor Parallelism) puts the GPUs on a grid of d1 × d2 and cuts every weight both ways. "
        "Megatron-LM is the case d2 = 1.",),
    (
        ("Axis", "one direction of the mesh; a collective runs along one axis"),
        ("Column-first, row-first", "outputs over axis 1 and inputs over axis 2, or the other way round"),
        ("Overlap", "communication that runs while something else is computed, so that nobody waits for it"),
    ),
    (
        Control("n", "GPUs", COUNTS, 16, kind="slider"),
        Control("ratio", "Bandwidth of axis 2, axis 1 being 1", (1, 2, 4, 8), 1, kind="slider"),
        Control("chunks", "Chunks of the batch", (1, 2, 4, 8), 4, kind="slider"),
    ),
    scene, question, CODE, ("topology", "Best mesh against number of GPUs"), uses_model=True,
    focus=links.layers,
)  # fmt: skip
