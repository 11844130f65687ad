"""22. Two dimensions: ATP's row-first and column-first weights on a d1 × d2 mesh, the best mesh, and chunk overlap."""

from __future__ import annotations

from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import Drawing, matrix, owned
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.board import BoardState, board_film, matrix_chunks
from explorer.learn.pictures.charts import timeline
from explorer.learn.pictures.film import Film
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh
from planner_core.cost.communication import (
    LayerMatrix,
    axis_links,
    chunk_timeline,
    collective_time,
    reductions,
    wire_bytes,
)

COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)
ITEM_BYTES = 2


@remember(8)
def multiply_tiles(kind: str) -> dict[str, Any]:
    """Multiply X W on a 2×2 mesh: each device's tile of W, its term, and the error of the sums against the whole."""
    import torch

    gen = torch.Generator().manual_seed(3)
    x, w = (torch.randint(-3, 4, s, generator=gen).double() for s in ((2, 4), (4, 4)))
    tiles, terms = {}, {}
    for a in range(2):
        for b in range(2):
            # Column-first: axis 1 cuts the outputs, so terms are summed over axis 2, the cut of the inputs.
            out, inner = (a, b) if kind == "column-first" else (b, a)
            tiles[a, b] = w.chunk(2, 1)[out].chunk(2, 0)[inner]
            terms[a, b] = x.chunk(2, 1)[inner] @ tiles[a, b]
    if kind == "column-first":
        whole = torch.cat([terms[a, 0] + terms[a, 1] for a in range(2)], 1)
    else:
        whole = torch.cat([terms[0, b] + terms[1, b] for b in range(2)], 1)
    return {"x": x, "w": w, "tiles": tiles, "terms": terms, "error": float((whole - x @ w).abs().max())}


def list_meshes(n: int) -> list[tuple[int, int]]:
    """Return all d1 × d2 = n with powers of two."""
    return [(d1, n // d1) for d1 in (*COUNTS[::-1], 2, 1) if n % d1 == 0 and d1 <= n]


def layer_matrices(layer: Layer) -> tuple[LayerMatrix, ...]:
    """Return the four weights of a layer in features; q, k and v are one, and so are a gate and the weight beside it."""
    heads = layer.heads * layer.head_dim
    return (
        LayerMatrix("qkv", layer.hidden, heads + 2 * layer.kv_heads * layer.head_dim, column_first=True),
        LayerMatrix("attention out", heads, layer.hidden, column_first=False),
        LayerMatrix("FFN-1", layer.hidden, layer.inner * (1 + layer.gated), column_first=True),
        LayerMatrix("FFN-2", layer.inner, layer.hidden, column_first=False),
    )


def summed_features(layer: Layer) -> tuple[int, int]:
    """Return the features per token that a layer sums over axis 1 and over axis 2, forward and backward, on a 1 × 1 mesh."""
    sums = reductions(1, 1, layer_matrices(layer))
    first, second = (int(sum(r.share for r in sums if r.axis == axis)) for axis in (1, 2))
    return first, second


def axis_ratio(layer: Layer) -> float:
    """Return how many times as much goes over axis 2 as over axis 1; 3 for GPT's layer, as in ATP's paper."""
    first, second = summed_features(layer)
    return second / first


def ring_cost(layer: Layer, mesh: tuple[int, int], b1: float, b2: float) -> float:
    """Return (d1-1)/B1 + factor·(d2-1)/B2: the part of the ring time that the mesh decides."""
    return (mesh[0] - 1) / b1 + axis_ratio(layer) * (mesh[1] - 1) / b2


def ring_s(layer: Layer, tokens: int, mesh: tuple[int, int], b1: float, b2: float) -> float:
    """Return the seconds per step of a model's all_reduces in rings over two even networks of `b1` and `b2` bytes per second."""
    # A ring of d GPUs sends 2 (d - 1) / d of a tensor that is cut over the other axis: 2 (d1 - 1) / (d1 d2) of the whole, or with d2.
    per_layer = 2 * tokens * ITEM_BYTES * summed_features(layer)[0] / (mesh[0] * mesh[1])
    return layer.layers * per_layer * ring_cost(layer, mesh, b1, b2)


def best_mesh(layer: Layer, n: int, b1: float, b2: float) -> tuple[int, int]:
    """Return the mesh with the least ring time; on a tie the one with the larger d1."""
    return min(list_meshes(n), key=lambda mesh: ring_cost(layer, mesh, b1, b2))


def take_neighbours(cluster: Cluster, n: int) -> Cluster | None:
    """Return `n` neighbouring GPUs of the cluster, or of one with more of its nodes; None where they do not divide evenly."""
    sizes, left = [], n
    for i, level in enumerate(cluster.levels):
        size = left if i == len(cluster.levels) - 1 and i else min(level.size, left)
        if left % size:
            return None
        left //= size
        sizes.append(size)
    return cluster.part(*sizes) if left == 1 else None


def links_s(layer: Layer, tokens: int, mesh: tuple[int, int], cluster: Cluster) -> float:
    """Return the seconds per step of the same all_reduces on the cluster's links, as the planner times them."""
    links = axis_links(cluster, DeviceMesh(("first", "second"), mesh))
    sent = [r for r in reductions(*mesh, layer_matrices(layer)) if mesh[r.axis - 1] > 1]
    return layer.layers * sum(
        collective_time("all_reduce", int(r.share * tokens * ITEM_BYTES), links[r.axis - 1])[0] for r in sent
    )


def live(learner: Learner, values: Values) -> Live:
    """Return tiles, the four all_reduces, meshes compared, growth, and the timeline."""
    learner, note = learner.transformer()
    n, ratio, chunks = int(values["n"]), int(values["ratio"]), int(values["chunks"])
    layer, load = learner.layer(), learner.planner.workload
    tokens, base = load.batch * load.seq, learner.cluster.levels[0].bytes_per_s
    quickest = best_mesh(layer, n, base, base * ratio)
    times = {m: ring_s(layer, tokens, m, base, base * ratio) for m in list_meshes(n)}
    inside = take_neighbours(learner.cluster, n)
    wires = {m: links_s(layer, tokens, m, inside) for m in list_meshes(n)} if inside else {}
    compute, comm, spans = _chunk_times(learner, quickest, chunks, base * ratio)
    column, row = multiply_tiles("column-first"), multiply_tiles("row-first")
    numbers = {
        "d1": quickest[0],
        "d2": quickest[1],
        "best_s": times[quickest],
        "megatron_s": times[n, 1],
        "end_s": spans[-1].end_s,
        "factor": axis_ratio(layer),
        "compute_s": compute,
        "comm_s": comm,
        "error": max(column["error"], row["error"]),
        **{f"{a}x{b}_wires_s": t for (a, b), t in wires.items()},
    }
    pictures: dict[str, Picture] = {
        "column_first": summing_film(column, "column-first"),
        "row_first": summing_film(row, "row-first"),
        "timeline": _draw_timeline(spans, spans[-1].end_s),
    }
    errors = {"column_error": column["error"], "row_error": row["error"]}
    tables = {
        "meshes": [(m, ring_cost(layer, m, 1, ratio), t, sent_bytes(layer, tokens, m)) for m, t in times.items()],
        "wires": wires,
        "growth": [_gain_of_mesh(layer, count, ratio) for count in COUNTS],
        "four": _list_reductions(layer, *quickest),
    }
    facts = {**errors, **_shape_facts(layer), **_links_facts(wires, n), **_offered_meshes(layer, n, ratio)}
    level = {"level": learner.cluster.levels[0].name, "rate": base / 1e9}
    return Live({**facts, **tables, **level}, pictures, numbers, learner, note)


def _shape_facts(layer: Layer) -> dict[str, Any]:
    """Say where the factor of the question's formula comes from: sizes, and the widths that a token sends over each axis."""
    first, second = (x / layer.hidden for x in summed_features(layer))
    return {"hidden": layer.hidden, "inner": layer.inner, "gated": layer.gated, "first": first, "second": second}


def _links_facts(wires: dict[tuple[int, int], float], n: int) -> dict[str, Any]:
    """Return the quickest mesh on the learner's own links, which are not even; None where the GPUs do not divide evenly."""
    if not wires:
        return {"real": None}
    real = min(wires, key=lambda m: wires[m])
    return {"real": real, "real_s": wires[real], "real_megatron_s": wires[n, 1]}


def _offered_meshes(layer: Layer, n: int, ratio: int) -> dict[str, Any]:
    """Return the meshes that the question offers, with what the formula gives: the best, Megatron-LM's and the nearest others."""
    quickest, cost = best_mesh(layer, n, 1, ratio), {m: ring_cost(layer, m, 1, ratio) for m in list_meshes(n)}
    others = sorted((m for m in cost if m != quickest), key=lambda m: (m != (n, 1), m != (1, n), cost[m]))[:3]
    # The right answer stands in another place for each number of GPUs, and in the same one at each visit.
    others.insert(n % 3 % (len(others) + 1), quickest)
    return {"offered": [(m, cost[m]) for m in others], "least": cost[quickest]}


def sent_bytes(layer: Layer, tokens: int, mesh: tuple[int, int]) -> int:
    """Return the bytes that one GPU sends in a step's all_reduces on a mesh."""
    sums = [r for r in reductions(*mesh, layer_matrices(layer)) if mesh[r.axis - 1] > 1]
    return layer.layers * sum(
        wire_bytes("all_reduce", int(r.share * tokens * ITEM_BYTES), mesh[r.axis - 1]) for r in sums
    )


def _gain_of_mesh(layer: Layer, n: int, ratio: int) -> tuple[int, tuple[int, int], float]:
    """Return a number of GPUs, their best mesh, and its time over Megatron-LM's."""
    mesh = best_mesh(layer, n, 1, ratio)
    return n, mesh, ring_cost(layer, mesh, 1, ratio) / ring_cost(layer, (n, 1), 1, ratio)


def summing_film(c: dict[str, Any], kind: str) -> Film:
    """Return the one all_reduce of a weight on a 2×2 mesh: over axis 2 GPUs 0 and 1, 2 and 3 exchange terms, over axis 1 0 and 2, 1 and
    3."""
    places = [(a, b) for a in range(2) for b in range(2)]
    other = {(a, b): (a, 1 - b) if kind == "column-first" else (1 - a, b) for a, b in places}
    wide = int(c["terms"][0, 0].shape[1])
    before = [matrix_chunks(c["terms"][p], ("P", r)) for r, p in enumerate(places)]
    after = [
        matrix_chunks(c["terms"][p] + c["terms"][other[p]], ("S", r - r % 2 if kind == "column-first" else r % 2))
        for r, p in enumerate(places)
    ]
    moves = [(r, i, places.index(other[p]), i) for r, p in enumerate(places) for i in range(len(before[0]))]
    axis = 2 if kind == "column-first" else 1
    stops = [
        BoardState(
            before,
            f"Each GPU multiplied its part of X with its tile of W: a term over axis {axis}, P, not summed yet.",
            moves,
        ),
        BoardState(
            after, f"After the all_reduce over axis {axis} pairs hold the same finished columns (of one colour)."
        ),
    ]
    tiles = [matrix(c["tiles"][p], owned(r), "tile of W", "", 40) for r, p in enumerate(places)]
    return board_film(
        stops,
        wide,
        cell=46,
        names=[f"GPU {r}: axis 1 = {a}, axis 2 = {b}" for r, (a, b) in enumerate(places)],
        beside=tiles,
    )


def _list_reductions(layer: Layer, d1: int, d2: int) -> list[tuple[str, ...]]:
    """Return every all_reduce of a layer and all together: phase, weight, axis, the tensor of a GPU, what it sends, and that of all
    parts."""
    rows: list[tuple[str, ...]] = []
    for r in reductions(d1, d2, layer_matrices(layer)):
        share = r.share / layer.hidden
        wire = wire_bytes("all_reduce", int(share * 10**6), {1: d1, 2: d2}[r.axis]) / 1e6
        rows.append(
            (r.phase, r.weight, str(r.axis), str(share), f"{wire:.3f}", f"{float(share) * {1: d2, 2: d1}[r.axis]:g}")
        )
    both = []
    for axis, (over, parts) in enumerate(((d1, d2), (d2, d1)), 1):
        shares = [r.share / layer.hidden for r in reductions(d1, d2, layer_matrices(layer)) if r.axis == axis]
        total = float(sum(shares))
        sent = sum(wire_bytes("all_reduce", int(share * 10**6), over) for share in shares) / 1e6
        both.append((str(axis), f"{total:g}", f"{sent:.3f}", f"{total:g} · {parts} = {total * parts:g}"))
    rows.append(("together", "", *(" and ".join(pair) for pair in zip(*both, strict=True))))
    return rows


def _chunk_times(learner: Learner, mesh: tuple[int, int], chunks: int, b2: float) -> tuple[float, float, Any]:
    """Return the seconds of a layer's feed-forward products, of their all_reduces forward, and ATP's timeline of both."""
    layer, load = learner.layer(), learner.planner.workload
    d1, d2 = mesh
    tokens = load.batch * load.seq
    flops = 2 * tokens * layer.hidden * layer.inner * (2 + layer.gated) / (d1 * d2)
    compute = flops / learner.cluster.gpu.flops_per_s(load.dtype)
    b1 = learner.cluster.levels[0].bytes_per_s
    size, outputs = tokens * ITEM_BYTES, layer.inner * (1 + layer.gated)
    first = wire_bytes("all_reduce", size * outputs // d1, d2) / b2
    second = wire_bytes("all_reduce", size * layer.hidden // d2, d1) / b1
    comm = first + second
    return compute, comm, chunk_timeline([compute / chunks] * chunks, [comm / chunks] * chunks)


def _draw_timeline(spans: Any, end: float) -> Drawing:
    colours = {"compute": COMPUTE, "communication": COMMUNICATION}
    tracks = []
    for stream, colour in colours.items():
        mine = [x for x in spans if x.stream == stream]
        tracks.append((stream, [(x.start_s, x.end_s, f"chunk {x.chunk + 1}", colour) for x in mine]))
    return timeline(tracks, units.seconds, end)


LESSON = read_lesson("22-two-dimensions", live)
