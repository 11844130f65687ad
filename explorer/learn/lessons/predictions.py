"""The predictions that lessons let one draw before the truth is shown (`pictures/sketch.py`), from the lessons' own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from explorer.figures.palette import COMPUTE, DEVICES, MEMORY_COLOURS
from explorer.learn.pictures.sketch import (
    LOW_Y,
    Curve,
    ExpectedMistake,
    Handle,
    Sketch,
    bars,
    curve_scales,
    curves,
    spans,
)
from explorer.text import units


def sketch_memory_by_gpus(
    peaks: Mapping[int, float], room: tuple[float, str], shared: str, whole: float, activations: float
) -> str:
    """Lesson 1: the fullest moment of each of n GPUs, from that of one (`peaks` by n, bytes). `shared` says where the largest number comes from,
    `whole` are bytes that every GPU keeps whole, `activations` those of one GPU. Empty where there is but one."""
    one, more = peaks[1], [n for n in peaks if n > 1]
    if not more:
        return ""
    gib, last = units.GIB, more[-1]
    even = (
        abs(whole + (one - whole) / last - peaks[last]) < 0.05 * peaks[last]
    )  # else heads do not divide, and other plans stand in
    why = f"With {last} GPUs each one holds " + (
        f"about {shared}." if even else f"{units.memory(peaks[last])}, one GPU {units.memory(one)}."
    )
    slips = [
        ExpectedMistake(
            tuple(one / gib for _ in more),
            "So it would be if each GPU kept the whole model and the whole batch. Here each keeps a part of every weight.",
        ),
    ]
    if whole > 0.01 * one:
        slips += [
            ExpectedMistake(
                tuple(one / n / gib for n in more),
                f"You divided everything by the number of GPUs. But {units.memory(whole)} of the activations stay whole on every GPU.",
            ),
            ExpectedMistake(
                tuple(((one - activations) / n + activations) / gib for n in more),
                f"You left all activations whole. Only {units.memory(whole)} of them are; the others are divided.",
            ),
        ]
    sketch = Sketch(
        f"gpus {one:.0f}",
        "GiB",
        1.02 * max(*peaks.values(), room[0]) / gib,
        tuple(Handle(f"each of {n} GPUs", 0.8 * one / gib, peaks[n] / gib) for n in more),
        why,
        tuple(slips),
    )
    return bars(sketch, ("one GPU", one / gib), (room[0] / gib, room[1]))


def sketch_waits(tokens: Sequence[int], gather: float, compute: Mapping[int, float], sums: Mapping[int, float]) -> str:
    """Lesson 14: what a layer waits for forward, under FSDP and under tensor parallelism, by tokens per GPU (seconds)."""
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
    slips = [
        ExpectedMistake(
            (*(whole for _ in tokens), *rest),
            "Your gather is always waited for. It runs beside compute, and only what is longer than compute shows.",
        ),
        ExpectedMistake(
            (*(whole * t / last for t in tokens), *rest),
            "Your gather grows with the tokens. It carries weights, which are the same for any number of tokens.",
        ),
    ]
    if tensor:
        slips += [
            ExpectedMistake(
                (*none, *(tensor[0] for _ in tensor)),
                "Your sums are the same for all tokens. They carry activations, so their bytes grow with the tokens.",
            ),
            ExpectedMistake(
                (*none, *reversed(tensor)),
                "Your sums shrink as tokens grow, as if compute hid them. The layer waits for them: its next product needs the sum.",
            ),
        ]
    why = f"FSDP waits for what its gather of {units.seconds(gather)} is longer than compute ({units.seconds(compute[first])} at {units.whole(first)} tokens): less and less, then nothing."
    if tensor:
        why += " The sums of tensor parallelism are waited for, and grow with the tokens. So few tokens speak for tensor parallelism, and many for FSDP."
    sketch = Sketch(f"waits {gather:.9f}", "ms", most, tuple(handles), why, tuple(slips))
    ticks = [(x, units.whole(t)) for x, t in zip(places, tokens, strict=True)]
    lines = [Curve(name) for name in ("FSDP", "tensor parallel")[: 1 + bool(tensor)]]
    return curves(sketch, lines, ticks, "ms that a layer waits for, by tokens per GPU")


def sketch_streams(busy: float, traffic: float) -> str:
    """Lesson 15: when the gathers and the compute of two more layers begin, under FSDP (seconds). Nothing to draw where nothing is gathered."""
    if traffic <= 0:
        return ""
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
    slips = [
        ExpectedMistake(
            (b, b + g, 2 * b + g, 2 * b + 2 * g),
            "You let one thing happen at a time. The gather has a stream of its own, and runs beside the compute of the layer before.",
        ),
        ExpectedMistake(
            (0, each, g, max(2 * each, 2 * g)),
            "You gather all layers at once. That would hide too, but a GPU would hold more and more whole layers: FSDP gathers one layer ahead.",
        ),
    ]
    if b > g:
        slips.append(
            ExpectedMistake(
                (0, g, g, 2 * g),
                "Your layers begin as soon as their weights are there. But layer 2 needs what layer 1 gives: compute is one stream, one layer at a time.",
            )
        )
    longer = "compute, so the gathers hide" if b >= g else "the gather, so compute waits for it"
    why = f"While layer 1 computes, layer 2's weights come; while layer 2 computes, layer 3's. A layer begins every {units.significant(each)} ms, the longer of the two: here {longer}."
    sketch = Sketch(f"streams {b:.6f} {g:.6f}", "ms", most, handles, why, tuple(slips))
    tracks = [("compute", [(0.0, b, "layer 1", COMPUTE)]), ("beside it", [])]
    return spans(sketch, tracks)


def sketch_zero_stages(
    whole: float, kinds: tuple[int, int, int, int], truth: Mapping[str, float], n: int, inner: int
) -> str:
    """Lesson 16: bytes per parameter that a GPU keeps by stage. `kinds` are those of the copy to compute with, the fp32 weights, the averages and
    the gradient; `whole` is their sum."""
    copy, stored, averages, gradient = kinds
    part = whole / n
    late = (copy + stored + averages / n + gradient, copy + stored + (averages + gradient) / n)
    slips = [
        ExpectedMistake(
            (part, part, part, None),
            f"You dealt out everything at once. Each stage deals out one kind more: only the last divides all by {n}.",
        ),
        ExpectedMistake(
            (*late, None, None),
            "You left the fp32 weights whole. They are the optimizer's: they are dealt out with its averages, from ZeRO-1 on.",
        ),
        ExpectedMistake(
            (None, None, truth["FSDP (ZeRO-3)"] + copy, None),
            "You kept the copy that computes. It is there for one layer at a time, and not counted here.",
        ),
    ]
    if inner < n:
        slips.append(
            ExpectedMistake(
                (None, None, None, truth["FSDP (ZeRO-3)"]),
                f"HSDP deals to the {inner} GPUs of a group only, not to all {n}.",
            )
        )
    names = list(truth)
    handles = tuple(Handle(name, 0.55 * whole, truth[name]) for name in names)
    told = {name: units.significant(truth[name]) for name in names}
    why = (
        f"ZeRO-1 deals out the optimizer's {stored + averages}: {copy} + {stored + averages}/{n} + {gradient} = {told['ZeRO-1']}. ZeRO-2 the gradient too: {copy} + {stored + averages + gradient}/{n} = {told['ZeRO-2']}. "
        f"FSDP keeps no copy: {stored + averages + gradient}/{n} = {told['FSDP (ZeRO-3)']}. HSDP the same by {inner}: {told['HSDP']}."
    )
    sketch = Sketch(f"stages {n} {inner}", "bytes", 1.02 * whole, handles, why, tuple(slips))
    return bars(sketch, ("data parallel", whole))


def sketch_backward_memory(
    forward: Sequence[float], backward: Sequence[float], stays: float, whole: float, n: int
) -> str:
    """Lesson 17: memory without buffers on the way back (bytes at each moment). `stays` stands all the time, `whole` are gradients that were not dealt to n
    GPUs."""
    gib = units.GIB
    top, shares = forward[-1], (0.25, 0.5, 0.75, 1.0)
    at = [backward[min(len(backward) - 1, round(f * (len(backward) - 1)))] for f in shares]
    most = 1.15 * max(*forward, *backward) / gib
    handles = tuple(
        Handle(f"{100 * f:.0f} % of backward", 0.5 * most, v / gib, at=0.5 + f / 2)
        for f, v in zip(shares, at, strict=True)
    )
    slips = [
        ExpectedMistake(
            tuple(top / gib for _ in shares),
            "You kept all activations to the end. Backward frees a layer's as soon as it has used them.",
        ),
        ExpectedMistake(
            tuple((top + (whole - (top - stays)) * f) / gib for f in shares),
            f"You let whole gradients take the place of activations. FSDP deals each layer's out at once: a GPU keeps 1/{n}.",
        ),
        ExpectedMistake(
            (0.75 * top / gib, 0.5 * top / gib, 0.25 * top / gib, 0.0),
            f"You went down to nothing. Weights and optimizer states stand all the time, {units.memory(stays)}.",
        ),
    ]
    grads = backward[-1] - stays
    why = (
        f"Backward frees what it used, layer by layer, and leaves gradients: {units.memory(grads)} at its end"
        f"{f', 1/{n} of all' if abs(grads * n / whole - 1) < 0.02 else ''}. With the {units.memory(stays)} that always stand it ends at {units.memory(backward[-1])}."
    )
    px, py = curve_scales(most)
    outline = [(px(0.5 * i / max(1, len(forward) - 1)), py(v / gib)) for i, v in enumerate(forward)]
    area = (
        f"M{px(0):.1f} {LOW_Y:.1f}L" + "L".join(f"{x:.1f} {y:.1f}" for x, y in outline) + f"L{px(0.5):.1f} {LOW_Y:.1f}Z"
    )
    still = f'<path d="{area}" fill="{MEMORY_COLOURS["activations"]}" fill-opacity="0.35"/>'
    true = [(0.5 + 0.5 * i / max(1, len(backward) - 1), v / gib) for i, v in enumerate(backward)]
    sketch = Sketch(f"back {top:.0f} {stays:.0f} {n}", "GiB", most, handles, why, tuple(slips))
    ticks = [(0.0, "forward"), (0.5, "backward"), (1.0, "its end")]
    way = Curve("way back", (0.5, top / gib), true)
    return curves(sketch, [way], ticks, "GiB of one GPU, without buffers", still)
