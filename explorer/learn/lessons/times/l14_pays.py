"""14. When does it pay? Compute against wires: the roofline, tokens per GPU, link speed, and the planner's own prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from explorer.figures.svg_tensors import Drawing
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import sketch_waits
from explorer.learn.lessons.times.stated import (
    PricedLayout,
    gpus_per_node,
    price_layout,
    tensor_layout,
    token_settings,
    usual_layouts,
    with_samples,
)
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import plot
from explorer.learn.pictures.sketch import Prediction
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh, Gpu
from planner_core.cost.communication import axis_links, collective_time
from planner_core.planning import doubt_between
from planner_core.planning.methods import Layout

TOKENS = (512, 1024, 2048, 4096, 8192)
SPEEDS = (1, 2, 4, 8, 16)
"""Eighths of the links' own speed, as the control has them."""
SKETCH_TOKENS = (TOKENS[0], TOKENS[2], TOKENS[-1])
"""Tokens at which the learner draws what a layer waits for."""
ITEM_BYTES = 2
"""Of a weight or an activation in 16 bits (`with_16_bit_products`)."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer, forward, on one GPU: seconds per token of compute, of one gather of its weights, per token of its two sums."""

    weights: int
    compute_s: float
    gather_s: float
    sums_s: float
    degree: int

    @property
    def crossing(self) -> float:
        """Tokens per GPU from which on compute is longer than the gather."""
        return self.gather_s / self.compute_s


def layer_weights(layer: Layer) -> int:
    """Return the parameters of a layer's products: q, k, v, o, and two or three of the feed-forward part."""
    heads, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return layer.hidden * (2 * heads + 2 * keys + (2 + layer.gated) * layer.inner)


def scale_outer_links(cluster: Cluster, eighths: int) -> Cluster:
    """Return the cluster with its outermost links at so many eighths of their speed."""
    return cluster.with_bandwidth(eighths / 8, len(cluster.levels) - 1)


def layer_times(learner: Learner, tokens: int, speed: int) -> LayerTimes:
    """Return what a layer computes and sends: gathered over all GPUs (FSDP), or summed inside a node (tensor parallelism)."""
    layer, cluster = learner.layer(), scale_outer_links(learner.cluster, speed)
    weights, n, t = layer_weights(layer), cluster.num_gpus, gpus_per_node(cluster)
    compute = 2 * weights / cluster.gpu.flops_per_s(learner.planner.workload.dtype)
    everyone = axis_links(cluster, DeviceMesh(("shard",), (n,)))[0]
    gather = collective_time("all_gather", ITEM_BYTES * weights, everyone)[0]
    return LayerTimes(weights, compute, gather, sums_s(layer, cluster, t, tokens) / tokens, t)


def sums_s(layer: Layer, cluster: Cluster, degree: int, tokens: int) -> float:
    """Return the seconds of a layer's two all_reduces forward over `degree` neighbours with `tokens` for each GPU of the group."""
    if degree == 1:
        return 0.0
    mesh = DeviceMesh(("data", "tensor"), (cluster.num_gpus // degree, degree))
    # A tensor group works on the tokens of all its GPUs together.
    num_bytes = tokens * degree * layer.hidden * ITEM_BYTES
    return 2 * collective_time("all_reduce", num_bytes, axis_links(cluster, mesh)[1])[0]


def list_layouts(cluster: Cluster) -> dict[str, Layout]:
    """Return four ways to use all GPUs, by name."""
    usual, t = usual_layouts(cluster), gpus_per_node(cluster)
    hybrid = {"HSDP": usual["HSDP"]} if cluster.num_gpus > t else {}
    tensor = {f"tensor parallel {t}": tensor_layout(cluster)}
    return {"ZeRO-1": usual["ZeRO-1"], "FSDP": usual["FSDP (ZeRO-3)"], **hybrid, **tensor}


@remember(64)
def price_layouts(learner: Learner, tokens: int) -> dict[str, PricedLayout]:
    """Return the planner's plan of each contender that the model can follow, with so many tokens per GPU."""
    learner, samples, _ = with_samples(learner, tokens)
    cases = {name: price_layout(learner, layout, samples) for name, layout in list_layouts(learner.cluster).items()}
    return {name: case for name, case in cases.items() if case}


def best_layout(cases: dict[str, PricedLayout], cluster: Cluster) -> str:
    """Return the quickest contender that fits, else the one that needs the least memory."""
    quickest = rank_layouts(cases, cluster)
    return quickest[0] if quickest else min(cases, key=lambda name: cases[name].plan.cost.memory_bytes["peak"])


def rank_layouts(cases: dict[str, PricedLayout], cluster: Cluster) -> list[str]:
    """Return the contenders that fit, the quickest first."""
    took = {name: sum(case.seconds(cluster)) for name, case in cases.items() if case.plan.fits}
    return sorted(took, key=lambda name: took[name])


def fastest_with_ties(cases: dict[str, PricedLayout], cluster: Cluster) -> str:
    """Return the quickest that fits, and every other that ties with it."""
    order = rank_layouts(cases, cluster)
    if not order:
        return "none fits"
    first = cases[order[0]]
    limits = {
        name: (1 + doubt_between(first.plan, cases[name].plan, cluster)) * sum(first.seconds(cluster)) for name in order
    }
    return " ≈ ".join(name for name in order if sum(cases[name].seconds(cluster)) <= limits[name])


def live(learner: Learner, values: Values) -> Live:
    """Return the roofline, a gather against compute, the crossing, sums by degree, the planner's prices, and the map."""
    tokens, speed = int(values["tokens"]), int(values["speed"])
    learner, _, note = with_samples(learner, max(TOKENS))
    layer, cluster, gpu = learner.layer(), scale_outer_links(learner.cluster, speed), learner.cluster.gpu
    w, cases = layer_times(learner, tokens, speed), price_layouts(learner, tokens)
    dtype = learner.planner.workload.dtype
    best = best_layout(cases, cluster)
    numbers = {
        "tokens": tokens,
        "gather_s": w.gather_s,
        "compute_s": w.compute_s * tokens,
        "sums_s": w.sums_s * tokens,
        "crossing": w.crossing,
        "weights": w.weights,
        "ridge": ridge_point(gpu, dtype),
        "intensity": intensity(layer, tokens),
        **{f"{name}_s": sum(case.seconds(cluster)) for name, case in cases.items()},
    }
    rows = _map_rows(learner)
    few = layer_times(learner, SKETCH_TOKENS[0], speed)
    facts = {
        "sheet": _data_sheet_ridge(gpu, dtype),
        "of_one_token": intensity(layer, 1),
        "weight_bytes": ITEM_BYTES * w.weights,
        "thousand_s": 1000 * w.compute_s,
        "degree": w.degree,
        "shown_tokens": SKETCH_TOKENS,
        "few_compute_s": SKETCH_TOKENS[0] * few.compute_s,
        "few_sums_s": SKETCH_TOKENS[0] * few.sums_s,
        "any_fits": any(case.plan.fits for case in cases.values()),
        "best": best,
        "quickest": fastest_with_ties(cases, cluster),
        "has_hsdp": "HSDP" in cases,
        "outer": learner.cluster.levels[-1].name,
        "tensor_leads": "tensor" in rows[0][1],  # with the fewest tokens and the slowest links
        "senders": [n for n in list_layouts(learner.cluster) if "tensor" not in n and n in " ".join(rows[-1][1:])],
        "degrees": [
            (t, sums_s(layer, cluster, t, tokens), t <= gpus_per_node(cluster))
            for t in (2, 4, 8, 16, 32)
            if cluster.num_gpus % t == 0 and layer.heads % t == 0
        ],
        "priced": [(name, case.seconds(cluster), case.plan.fits) for name, case in cases.items()],
        "map": rows,
        "speeds": [LESSON.controls[1].name(s) for s in SPEEDS],
    }
    pictures: dict[str, Picture] = {
        "roofline": _roofline_chart(layer, gpu, dtype, tokens),
        "crossing": _crossing_chart(w, tokens),
        "waits": _make_sketch(learner, speed),
    }
    return Live(facts, pictures, numbers, learner, note)


def ridge_point(gpu: Gpu, dtype: str) -> float:
    """Return FLOPs per byte from which on a GPU is limited by its arithmetic in `dtype`."""
    return gpu.flops_per_s(dtype) / gpu.bytes_per_s


def intensity(layer: Layer, tokens: int) -> float:
    """Return FLOPs per byte of memory traffic of the first product of the feed-forward part."""
    m, k, n = tokens, layer.hidden, layer.inner
    return 2 * m * k * n / (ITEM_BYTES * (m * k + k * n + m * n))


def _data_sheet_ridge(gpu: Gpu, dtype: str) -> float:
    """Return the ridge by the data sheet."""
    peaks = dict(gpu.peak_flops)
    return peaks.get(dtype, min(peaks.values())) / gpu.memory_bytes_per_s


def _roofline_chart(layer: Layer, gpu: Gpu, dtype: str, tokens: int) -> Drawing:
    peak, memory, top = gpu.flops_per_s(dtype), gpu.bytes_per_s, ridge_point(gpu, dtype)
    at, one = intensity(layer, tokens), intensity(layer, 1)
    reach = {"what the GPU can reach": lambda x: min(peak, x * memory)}
    marks = [
        (one, f"1 token: {one:.2g}"),
        (top, f"ridge: {units.significant(top)}"),
        (at, f"yours: {units.significant(at)}"),
    ]
    below, beside = "FLOP per byte of memory traffic (intensity)", "reachable FLOP per second"
    return plot((0.5, 1, top, 1e4), reach, below, beside, "{:g}".format, units.count, marks)


def _make_sketch(learner: Learner, speed: int) -> Prediction:
    """Return a prediction to draw: what a layer waits for at few and at many tokens."""
    times = {t: layer_times(learner, t, speed) for t in SKETCH_TOKENS}
    w = times[SKETCH_TOKENS[0]]
    compute, sums = {t: t * w.compute_s for t in SKETCH_TOKENS}, {t: t * times[t].sums_s for t in SKETCH_TOKENS}
    return sketch_waits(SKETCH_TOKENS, w.gather_s, compute, sums)


def _crossing_chart(w: LayerTimes, tokens: int) -> Drawing:
    xs = [2.0**k for k in range(6, 18)]
    curves: dict[str, Callable[[float], float]] = {
        "compute": lambda x: x * w.compute_s,
        "gather of the weights (FSDP)": lambda x: w.gather_s,
    }
    if w.sums_s:
        curves[f"two sums over {w.degree} GPUs (tensor)"] = lambda x: x * w.sums_s
    marks = [(float(tokens), f"yours: {units.whole(tokens)} tokens")]
    if xs[0] <= w.crossing <= xs[-1]:
        marks.append((w.crossing, f"crossing: {units.whole(w.crossing)} tokens"))
    return plot(xs, curves, "tokens per GPU", "time of one layer, forward", units.whole, units.seconds, marks)


def _map_rows(learner: Learner) -> list[tuple[str, ...]]:
    """Return a row for each number of tokens: the quickest that fits at each speed, and what ties with it."""
    rows = []
    for count in TOKENS:
        cases = price_layouts(learner, count)
        rows.append(
            (
                units.whole(count),
                *(fastest_with_ties(cases, scale_outer_links(learner.cluster, speed)) for speed in SPEEDS),
            )
        )
    return rows


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """Return the planner with the lesson's tokens and speed of links."""
    speed, outer = int(values["speed"]), learner.cluster.levels[-1]
    settings = token_settings(learner, int(values["tokens"]))
    place = dict(enumerate(("intra", "inter"))).get(len(learner.cluster.levels) - 1)
    if place and speed != 8:
        settings[place] = f"{speed / 8 * outer.unit_bytes_per_s / 1e9:g}"
    return settings


LESSON = read_lesson("14-pays", live, focus=focus)
