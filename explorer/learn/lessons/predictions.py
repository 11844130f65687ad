"""The predictions that lessons let one draw before the truth is shown (`pictures/sketch.py`), from the lessons' own figures.

What is said to each stands in the lesson's Markdown, under `# Drawn`: first why the truth is as it is, then a reply to every expected mistake by
its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from explorer.figures.palette import COMPUTE, DEVICES, MEMORY_COLOURS
from explorer.learn.pictures.sketch import (
    LOW_Y,
    Curve,
    ExpectedMistake,
    Handle,
    Prediction,
    Sketch,
    bars,
    curve_scales,
    curves,
    spans,
)
from explorer.text import units


def sketch_memory_by_gpus(
    peaks: Mapping[int, float], room: tuple[float, str], whole: float, activations: float
) -> Prediction | None:
    """Sketch for lesson 1 the fullest moment of each of n GPUs, from that of one (`peaks` by n, bytes).

    `whole` are bytes that every GPU keeps whole, `activations` those of one GPU. None where there is but one.
    """
    one, more = peaks[1], [n for n in peaks if n > 1]
    if not more:
        return None
    gib, last = units.GIB, more[-1]
    mistakes = [ExpectedMistake("undivided", tuple(one / gib for _ in more))]
    if whole > 0.01 * one:
        mistakes += [
            ExpectedMistake("all divided", tuple(one / n / gib for n in more)),
            ExpectedMistake("whole activations", tuple(((one - activations) / n + activations) / gib for n in more)),
        ]
    sketch = Sketch(
        f"gpus {one:.0f}",
        "GiB",
        1.02 * max(*peaks.values(), room[0]) / gib,
        tuple(Handle(f"each of {n} GPUs", 0.8 * one / gib, peaks[n] / gib) for n in more),
        tuple(mistakes),
    )
    # Where heads do not divide, other plans stand in, and what a GPU holds is no share of one GPU's.
    is_share = abs(whole + (one - whole) / last - peaks[last]) < 0.05 * peaks[last]
    facts = {"last": last, "is_share": is_share, "one": one, "last_peak": peaks[last], "kept_whole": whole}
    return Prediction(sketch, lambda s: bars(s, ("one GPU", one / gib), (room[0] / gib, room[1])), facts)


def sketch_waits(
    tokens: Sequence[int], gather: float, compute: Mapping[int, float], sums: Mapping[int, float]
) -> Prediction:
    """Sketch for lesson 14 what a layer waits for forward, under FSDP and under tensor parallelism, by tokens per GPU (seconds)."""
    first, last = tokens[0], tokens[-1]
    fsdp = [1e3 * max(0.0, gather - compute[t]) for t in tokens]
    tensor = [1e3 * sums[t] for t in tokens] if any(sums.values()) else []
    places = [k / (len(tokens) - 1) for k in range(len(tokens))]
    most = 1.15 * max(1e3 * gather, *tensor, *fsdp)
    handles = [
        Handle(f"FSDP, {units.whole(t)} tokens", 0.75 * most, v, at=x)
        for t, v, x in zip(tokens, fsdp, places, strict=True)
    ]
    handles += [
        Handle(f"tensor parallel, {units.whole(t)} tokens", 0.45 * most, v, at=x, line=1)
        for t, v, x in zip(tokens, tensor, places, strict=False)
    ]
    rest: tuple[None, ...] = (None,) * len(tensor)
    whole, none = 1e3 * gather, (None,) * len(tokens)
    mistakes = [
        ExpectedMistake("always waited for", (*(whole for _ in tokens), *rest)),
        ExpectedMistake("gather grows", (*(whole * t / last for t in tokens), *rest)),
    ]
    if tensor:
        mistakes += [
            ExpectedMistake("same sums", (*none, *(tensor[0] for _ in tensor))),
            ExpectedMistake("sums shrink", (*none, *reversed(tensor))),
        ]
    sketch = Sketch(f"waits {gather:.9f}", "ms", most, tuple(handles), tuple(mistakes))
    ticks = [(x, units.whole(t)) for x, t in zip(places, tokens, strict=True)]
    lines = [Curve(name) for name in ("FSDP", "tensor parallel")[: 1 + bool(tensor)]]
    facts = {
        "drawn_gather_s": gather,
        "drawn_compute_s": compute[first],
        "drawn_tokens": first,
        "has_sums": bool(tensor),
    }
    return Prediction(sketch, lambda s: curves(s, lines, ticks, "ms that a layer waits for, by tokens per GPU"), facts)


def sketch_streams(busy: float, traffic: float) -> Prediction | None:
    """Sketch for lesson 15 when the gathers and the compute of two more layers begin, under FSDP (seconds). None where nothing is gathered."""
    if traffic <= 0:
        return None
    b, g = 1e3 * busy, 1e3 * traffic
    each, most = max(b, g), 3 * (b + g)
    colours = {"compute": COMPUTE, "gather": DEVICES[3]}

    def handle(what: str, layer: int, start: float, truth: float) -> Handle:
        return Handle(
            f"{what} of layer {layer}",
            start * most,
            truth,
            at=float(what == "gather"),
            long=b if what == "compute" else g,
            colour=colours[what],
        )

    handles = (
        handle("gather", 2, 0.5, 0),
        handle("compute", 2, 0.46, each),
        handle("gather", 3, 0.75, each),
        handle("compute", 3, 0.74, 2 * each),
    )
    mistakes = [
        ExpectedMistake("one at a time", (b, b + g, 2 * b + g, 2 * b + 2 * g)),
        ExpectedMistake("all gathered at once", (0, each, g, max(2 * each, 2 * g))),
    ]
    if b > g:
        mistakes.append(ExpectedMistake("layers overlap", (0, g, g, 2 * g)))
    sketch = Sketch(f"streams {b:.6f} {g:.6f}", "ms", most, handles, tuple(mistakes))
    tracks = [("compute", [(0.0, b, "layer 1", COMPUTE)]), ("beside it", [])]
    return Prediction(sketch, lambda s: spans(s, tracks), {"every_ms": each, "hides": b >= g})


def sketch_zero_stages(
    whole: float, kinds: tuple[int, int, int, int], truth: Mapping[str, float], n: int, inner: int
) -> Prediction:
    """Sketch for lesson 16 bytes per parameter that a GPU keeps by stage. `kinds` are those of the copy to compute with, the fp32 weights, the averages and
    the gradient; `whole` is their sum."""
    copy, stored, averages, gradient = kinds
    part = whole / n
    late = (copy + stored + averages / n + gradient, copy + stored + (averages + gradient) / n)
    mistakes = [
        ExpectedMistake("all at once", (part, part, part, None)),
        ExpectedMistake("whole weights", (*late, None, None)),
        ExpectedMistake("copy kept", (None, None, truth["FSDP (ZeRO-3)"] + copy, None)),
    ]
    if inner < n:
        mistakes.append(ExpectedMistake("all GPUs", (None, None, None, truth["FSDP (ZeRO-3)"])))
    handles = tuple(Handle(name, 0.55 * whole, truth[name]) for name in truth)
    facts = {"kinds": kinds, "kept": dict(truth), "dealt_to": n, "dealt_inside": inner}
    sketch = Sketch(f"stages {n} {inner}", "bytes", 1.02 * whole, handles, tuple(mistakes))
    return Prediction(sketch, lambda s: bars(s, ("data parallel", whole)), facts)


def sketch_backward_memory(
    forward: Sequence[float], backward: Sequence[float], stays: float, whole: float, n: int
) -> Prediction:
    """Sketch for lesson 17 memory without buffers on the way back (bytes at each moment). `stays` stands all the time, `whole` are gradients that were not dealt to n
    GPUs."""
    gib = units.GIB
    top, shares = forward[-1], (0.25, 0.5, 0.75, 1.0)
    at = [backward[min(len(backward) - 1, round(f * (len(backward) - 1)))] for f in shares]
    most = 1.15 * max(*forward, *backward) / gib
    handles = tuple(
        Handle(f"{100 * f:.0f} % of backward", 0.5 * most, v / gib, at=0.5 + f / 2)
        for f, v in zip(shares, at, strict=True)
    )
    mistakes = (
        ExpectedMistake("kept to the end", tuple(top / gib for _ in shares)),
        ExpectedMistake("whole gradients", tuple((top + (whole - (top - stays)) * f) / gib for f in shares)),
        ExpectedMistake("down to nothing", (0.75 * top / gib, 0.5 * top / gib, 0.25 * top / gib, 0.0)),
    )
    gradients = backward[-1] - stays
    facts = {
        "left": gradients,
        "is_part": abs(gradients * n / whole - 1) < 0.02,
        "dealt_to": n,
        "stays": stays,
        "ends_at": backward[-1],
    }
    px, py = curve_scales(most)
    outline = [(px(0.5 * i / max(1, len(forward) - 1)), py(v / gib)) for i, v in enumerate(forward)]
    area = (
        f"M{px(0):.1f} {LOW_Y:.1f}L" + "L".join(f"{x:.1f} {y:.1f}" for x, y in outline) + f"L{px(0.5):.1f} {LOW_Y:.1f}Z"
    )
    still = f'<path d="{area}" fill="{MEMORY_COLOURS["activations"]}" fill-opacity="0.35"/>'
    true = [(0.5 + 0.5 * i / max(1, len(backward) - 1), v / gib) for i, v in enumerate(backward)]
    sketch = Sketch(f"back {top:.0f} {stays:.0f} {n}", "GiB", most, handles, mistakes)
    ticks = [(0.0, "forward"), (0.5, "backward"), (1.0, "its end")]
    curve = Curve("way back", (0.5, top / gib), true)
    return Prediction(sketch, lambda s: curves(s, [curve], ticks, "GiB of one GPU, without buffers", still), facts)
