"""15. A step in time: two streams, what hides beside compute, contention, buckets, and why small leads are ties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from explorer.address.settings import MODELS
from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import amount, svg, table
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.predictions import streams
from explorer.learn.lessons.times.l14_pays import TOKENS
from explorer.learn.lessons.times.stated import Stated, at_tokens, names, node, stated, texts, totals
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars, timeline
from explorer.text import units
from planner_core.core import ITEM_BYTES, Block, DeviceMesh
from planner_core.cost import CONTENTION, ENDS, NOT_HIDDEN, WAITED, Component, Unit, exposed_parts, optimizer_bytes
from planner_core.cost.communication import axis_links, collective_time
from planner_core.planning.analysis import MOST_DOUBT, doubt_between
from planner_core.planning.methods import Layout
from planner_core.planning.pricing import band_of

WAYS = {"data": "ZeRO-1", "fsdp": "FSDP", "hsdp": "HSDP", "tensor": "tensor parallel"}
REASONS = {
    WAITED: ("waited for", COMMUNICATION), CONTENTION: ("compute slowed by traffic", DEVICES[1]),
    NOT_HIDDEN: ("traffic longer than compute", DEVICES[3]), ENDS: ("first gather, last sum", DEVICES[4]),
}  # fmt: skip
CODE = """\
contention = 0.196  # seconds that compute loses per second of traffic beside it
phases = {"forward": (2.384, 1.340), "backward": (5.114, 3.850)}  # ms of a layer: compute, weight traffic beside it

def layer(compute, traffic):
    return max(compute + contention * traffic, traffic)

def layers(compute, traffic, count):  # the traffic of the next layer starts with this layer's compute
    now = there = 0.0
    for _ in range(count):
        start = max(now, there)
        now, there = start + compute + contention * traffic, start + traffic
    return max(now, there)

for name, (compute, traffic) in phases.items():
    print(f"{name}: a layer begins every {layer(compute, traffic):.2f} ms, not every {compute + traffic:.2f} ms")
    print(f"{name}: 32 layers, simulated {layers(compute, traffic, 32):.1f} ms, by the formula {32 * layer(compute, traffic):.1f} ms")
    print(f"{name}: the traffic would decide from {compute / (1 - contention):.2f} ms on")
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One copy of a layer, forward or backward: seconds of compute, of what it waits for, of weight traffic beside it."""

    compute: float
    waits: float
    traffic: float
    contention: float

    @property
    def busy(self) -> float:
        """What the compute stream takes, traffic beside it or not."""
        return self.compute + self.waits + self.contention * self.traffic

    @property
    def seconds(self) -> float:
        """Until the next layer can begin."""
        return max(self.busy, self.traffic)


def chosen(learner: Learner, way: str, tokens: int) -> tuple[Stated, str]:
    """The plan of a way to use all GPUs, and a sentence where the model cannot follow it."""
    learner, samples, note = texts(learner, tokens)
    n, t, usual = learner.cluster.num_gpus, node(learner.cluster), names(learner.cluster)
    tensor = Layout(fsdp=n // t, tp=t, sp=True)
    layout = {"data": usual["ZeRO-1"], "fsdp": usual["FSDP (ZeRO-3)"], "hsdp": usual["HSDP"], "tensor": tensor}[way]
    found = stated(learner, layout, samples)
    if found is None:
        instead = stated(learner, usual["FSDP (ZeRO-3)"], samples)
        assert instead, "FSDP splits samples only"
        return instead, note or f"{learner.name} cannot be split so over {t} GPUs; this is FSDP."
    return found, note


def layer_of(case: Stated) -> Unit:
    """The block that most of the step is spent in."""
    inner = [u for u in case.units if u.label]
    return max(inner or case.units, key=lambda u: u.copies * (u.forward_s + u.backward_s))


def phases(case: Stated) -> tuple[Phase, Phase]:
    """Forward and backward of one copy of that block, in a micro-batch that bears what comes once a step."""
    unit, c, k = layer_of(case), Component, case.model.contention
    found = totals(case, unit)
    return (
        Phase(unit.forward_s, found[c.FORWARD] - unit.forward_s, found[c.FORWARD_TRAFFIC] + found[c.FORWARD_ONCE], k),
        Phase(unit.backward_s, found[c.BACKWARD] - unit.backward_s, found[c.BACKWARD_TRAFFIC] + found[c.BACKWARD_ONCE], k),
    )  # fmt: skip


def shown(case: Stated) -> dict[str, float]:
    """Seconds of a step by what it is spent on; they add up to the step."""
    cost, planner = case.plan.cost, case.planner
    found = dict.fromkeys(REASONS, 0.0)
    for part in exposed_parts(case.plan.blocks, planner.graph, case.model, planner.coarse):
        found[part.why] += part.seconds
    return {"compute": cost.compute_time_s, **{why: found[why] for why in REASONS}, "optimizer": cost.optimizer_time_s}


@lru_cache(maxsize=64)
def bucket(case: Stated) -> tuple[int, float, float]:
    """The layer's weights: how many there are, seconds to gather them one by one, and in one bucket, over all GPUs."""
    block: Block = case.planner.graph.blocks[layer_of(case).label.partition("#")[0]]
    sizes = [
        ITEM_BYTES[v.meta.dtype] * math.prod(v.meta.shape)
        for v in block.values
        if v.kind == "parameter" and v.grad and len(v.meta.shape) > 1
    ]
    cluster = case.planner.cluster
    link = axis_links(cluster, DeviceMesh(("shard",), (cluster.num_gpus,)))[0]
    apart = sum(collective_time("all_gather", size, link)[0] for size in sizes)
    return len(sizes), apart, collective_time("all_gather", sum(sizes), link)[0]


def scene(learner: Learner, values: Values) -> Scene:
    """Forward, backward, contention, buckets, the whole step, and the band of its price."""
    way, tokens = str(values["way"]), int(values["tokens"])
    case, note = chosen(learner, way, tokens)
    forward, backward = phases(case)
    fsdp, _ = phases(chosen(learner, "fsdp", tokens)[0])
    first = streams(fsdp.compute + fsdp.contention * fsdp.traffic, fsdp.traffic)
    steps = (
        *first,
        _stream(forward, "Forward", case),
        _stream(backward, "Backward", case),
        _longest(forward, backward),
        _buckets(case),
        _whole(case),
        _optimizer(case),
        _ties(learner, case, tokens),
    )
    numbers = {
        "forward_compute_s": forward.compute, "forward_waits_s": forward.waits, "forward_traffic_s": forward.traffic,
        "forward_s": forward.seconds, "backward_s": backward.seconds, "backward_traffic_s": backward.traffic,
        "backward_waits_s": backward.waits, "decides_s": decides(forward), "step_s": case.plan.cost.step_time_s, "layers": layer_of(case).copies,
        **{f"{why}_s": s for why, s in shown(case).items()}, "apart_s": bucket(case)[1], "bucket_s": bucket(case)[2],
        "updated": updated(case), "bytes_each": sum(moved_bytes(case).values()),
        "bytes_one_by_one": sum(optimizer_bytes(item(case), case.planner.workload, "foreach").values()),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=len(first) + 2, note=note)


def item(case: Stated) -> int:
    """Bytes of a number in the dtype that computes."""
    return ITEM_BYTES[case.planner.workload.dtype]


def moved_bytes(case: Stated) -> dict[str, int]:
    """Bytes that the update of one parameter moves, by what they are."""
    return optimizer_bytes(item(case), case.planner.workload, case.model.software.optimizer_kernels)


def updated(case: Stated) -> float:
    """Parameters that one GPU's optimizer updates."""
    return case.plan.cost.optimizer_time_s * case.planner.cluster.gpu.bytes_per_s / sum(moved_bytes(case).values())


def named(case: Stated) -> str:
    """The model as people call it."""
    return MODELS.get(case.planner.graph.name, case.planner.graph.name)


def _tokens(case: Stated) -> int:
    """Tokens of one GPU in a micro-batch."""
    load = case.planner.workload
    return load.batch * load.seq // load.accumulate // case.planner.cluster.num_gpus


def _stream(phase: Phase, title: str, case: Stated) -> Step:
    """Three layers in a row on two streams."""
    back = title == "Backward"
    order = (4, 3, 2) if back else (1, 2, 3)  # so that each has a neighbour whose weights come beside it
    computing, waiting, moving = [], [], []
    for i, layer in enumerate(order):
        start = i * phase.seconds
        end = start + phase.busy - phase.waits
        computing.append((start, end, f"layer {layer}", COMPUTE))
        if phase.waits:
            waiting.append((end, end + phase.waits, "sum" if phase.waits else "", COMMUNICATION))
        if phase.traffic:
            moving.append((start, start + phase.traffic, f"layer {layer - 1 if back else layer + 1}", DEVICES[3]))
    tracks = [
        ("compute", computing),
        *([("waited for", waiting)] if waiting else []),
        *([("beside it", moving)] if moving else []),
    ]
    what = "gradients are summed, and weights gathered again" if back else "the next layer's weights are gathered"
    beside = (
        f"Beside it {what}: {units.seconds(phase.traffic, 4)} of traffic on a second stream."
        if phase.traffic
        else "No weights travel beside it."
    )
    waits = f" It waits {units.seconds(phase.waits, 4)} for sums that its next operation needs." if phase.waits else ""
    says = (
        f"Three layers of {named(case)}, {title.lower()}. The GPU computes one layer for {units.seconds(phase.compute, 4)}. {beside}{waits} "
        f"A layer begins every **{units.seconds(phase.seconds)}**."
        if back
        else f"Three layers of {named(case)}, forward, {units.whole(_tokens(case))} tokens per GPU. The GPU computes one layer for {units.seconds(phase.compute, 4)}. "
        f"{beside}{waits} The picture begins when the first layer's weights are there: nothing hid them. How long could such traffic become before the next layer waits for it?"
    )
    return Step(
        title, says, svg(timeline(tracks, units.seconds, 3 * phase.seconds), f"{title}: three layers on two streams")
    )


def _longest(forward: Phase, backward: Phase) -> Step:
    items = []
    for name, p in (("forward", forward), ("backward", backward)):
        parts = (
            BarPiece("compute", p.compute, COMPUTE),
            *((BarPiece("waited for", p.waits, COMMUNICATION, True),) if p.waits else ()),
            BarPiece("compute slowed by traffic", p.contention * p.traffic, DEVICES[1]),
        )
        items.append(StackedBar(f"{name}: compute side", parts, "decides" if p.busy >= p.traffic else ""))
        items.append(
            StackedBar(
                f"{name}: traffic side",
                (BarPiece("traffic beside", p.traffic, DEVICES[3], True),),
                "decides" if p.busy < p.traffic else "",
            )
        )
    says = (
        f"A layer takes the longer of two sides. One is compute, with what it waits for, and with what the traffic beside it costs: both "
        f"use the same memory and processors, so a second of traffic slows compute by {forward.contention:g} s (**contention**, fitted to published "
        f"runs). The other is the traffic alone. Forward {units.seconds(forward.seconds)}, backward {units.seconds(backward.seconds)}. "
        f"Forward the traffic would decide from **{units.seconds(decides(forward))}** on."
    )
    return Step("The longer side", says, svg(bars(items, units.seconds), "Two sides of a layer"))


def _buckets(case: Stated) -> Step:
    count, apart, together = bucket(case)
    rows = [
        StackedBar(f"{count} gathers", (BarPiece("each weight alone", apart, COMMUNICATION),)),
        StackedBar(
            "one bucket",
            (BarPiece("all at once", together, COMMUNICATION, True),),
            f"saves {units.percent(1 - together / apart)}" if apart else "",
        ),
    ]
    says = (
        f"The layer has {count} weights. Gathered one by one over all {case.planner.cluster.num_gpus} GPUs, each pays its latency: "
        f"{units.seconds(apart)}. As one **bucket** they take {units.seconds(together)}. Gradients are summed in buckets too. A whole "
        "model as one bucket would be cheaper still, but then nothing could hide: the first layer would wait for all weights."
    )
    return Step("Buckets", says, svg(bars(rows, units.seconds), "Gathers one by one and as a bucket"))


def _whole(case: Stated) -> Step:
    found = shown(case)
    items = [StackedBar("compute", (BarPiece("compute", found["compute"], COMPUTE),))]
    items += [
        StackedBar(name, (BarPiece(name, found[why], colour),))
        for why, (name, colour) in REASONS.items()
        if found[why] > 0
    ]
    items += [StackedBar(name, (BarPiece(name, found[name], colour),)) for name, colour in (("optimizer", DEVICES[2]),)]
    total = sum(found.values())
    exposed = sum(found[why] for why in REASONS)
    says = (
        f"All layers, what lies around them and the optimizer, {units.whole(_tokens(case))} tokens per GPU: **{units.seconds(total)}**. All communication takes "
        f"{units.seconds(case.plan.cost.comm_time_s)}, of which {units.seconds(exposed)} show. The first layer's gather and the last "
        f"layer's sum have no compute to hide behind."
    )
    return Step("The whole step", says, svg(bars(items, units.seconds), "Parts of a step"))


def _optimizer(case: Stated) -> Step:
    """What the optimizer's time is made of: bytes, and the memory's rate."""
    each, gpu = moved_bytes(case), case.planner.cluster.gpu
    count, moved, took = updated(case), sum(each.values()), case.plan.cost.optimizer_time_s
    one_by_one = sum(optimizer_bytes(item(case), case.planner.workload, "foreach").values())
    rows = [
        *((name, f"{b} bytes") for name, b in each.items() if b), ("moved for one parameter", f"{moved} bytes"),
        (f"for the {units.count(count)} parameters that one GPU updates", amount(moved * count)),
        (f"at {units.significant(gpu.bytes_per_s / 1e12)} TB/s, which kernels reach of {units.significant(gpu.memory_bytes_per_s / 1e12)}", units.seconds(took)),
    ]  # fmt: skip
    says = (
        f"The optimizer does no products: its time is memory traffic. A fused AdamW reads the weight, its gradient and two averages once, and writes all but the gradient: with clipping and the "
        f"working copy {moved} bytes for a parameter. PyTorch's unfused optimizer is a row of small operations, each of which reads and writes all again: {one_by_one} bytes. "
        f"Kernels reach {units.significant(gpu.bytes_per_s / 1e12)} of the data sheet's {units.significant(gpu.memory_bytes_per_s / 1e12)} TB/s. So the update takes {units.seconds(took)}."
    )
    return Step("The optimizer's part", says, table(("", ""), rows, len(rows) - 1))


def _ties(learner: Learner, case: Stated, tokens: int) -> Step:
    rows, mine = [], 0
    for i, way in enumerate(WAYS):
        other, _ = chosen(learner, way, tokens)
        band, seconds = band_of(other.plan, other.planner.cluster), other.plan.cost.step_time_s
        mine = i if other is case else mine
        between = f"{units.seconds(seconds * band.low)} to {units.seconds(seconds * band.high)}"
        fits = "" if other.plan.fits else "does not fit"
        rows.append((WAYS[way], units.seconds(seconds), between, f"{band.kind}, {band.runs} runs", fits))
    says = (
        "How sure is such a price? The planner's prices were compared with published runs of the same kind. Nine in ten runs lie between "
        "the two times of the third column. Two plans on the same machine share a part of their errors, so their order is surer than their times, though not sure "
        f"(lesson 19). The planner calls two plans a **tie** if the slower one takes at most as much longer as predictions of both kinds may err together, and never more than "
        f"{units.percent(MOST_DOUBT)}. {_pair(learner, tokens)}Choose the simpler one of two that tie. Lessons 10 and 14 mark ties by a ≈."
    )
    head = ("", "predicted", "nine in ten lie between", "known from", "")
    return Step("Ties", says, table(head, rows, mine))


def _pair(learner: Learner, tokens: int) -> str:
    """The two quickest ways that fit, as an example of the rule."""
    found = [case for way in WAYS if (case := chosen(learner, way, tokens)[0]).plan.fits]
    if len(found) < 2:
        return ""
    names = {id(chosen(learner, way, tokens)[0]): WAYS[way] for way in WAYS}
    one, other = sorted(found, key=lambda case: case.plan.cost.step_time_s)[:2]
    more = other.plan.cost.step_time_s / one.plan.cost.step_time_s - 1
    doubt = doubt_between(one.plan, other.plan, one.planner.cluster)
    said = "a tie" if more <= doubt else "no tie"
    return f"Here {names[id(other)]} takes {units.percent(more)} longer than {names[id(one)]}, and up to {units.percent(doubt)} would be a tie: **{said}**. "


def decides(p: Phase) -> float:
    """Seconds of traffic beside a layer from which on the traffic is the longer side."""
    return (p.compute + p.waits) / (1 - p.contention)


def question(learner: Learner, values: Values) -> Question:
    """From how much traffic on does it decide?"""
    case, _ = chosen(learner, str(values["way"]), int(values["tokens"]))
    p, _ = phases(case)
    t, k, own = units.seconds, p.contention, p.compute + p.waits
    plus = f" + {t(p.waits, 4)}" if p.waits else ""
    right = (
        1e3 * decides(p),
        f"Both sides are equal at x = {t(p.compute, 4)}{plus} + {k:g} · x, so x = {t(own, 4)} / {1 - k:g} = {t(decides(p))}. Here it is {t(p.traffic)}.",
    )
    wrong = (
        (1e3 * own, "So much traffic slows the compute beside it, which is then longer than that: the traffic still hides."),
        (1e3 * own * (1 + k), f"That is the compute side with {t(own)} of traffic beside it. But with more traffic than that, it is slowed by more: write x for the traffic."),
        (1e3 * own * (1 - k), "Contention makes compute longer, so more traffic hides beside it, not less."),
        (1e3 * own / k, "That much traffic would make compute twice as long. It decides long before."),
        (1e3 * p.traffic, "That is the traffic as it is. Which would be as long as the compute beside it?"),
        (1e3 * (own + p.traffic), "That is one after the other. The traffic runs beside compute, on its own stream."),
    )  # fmt: skip
    waits = f" and waits {t(p.waits, 4)} for sums" if p.waits else ""
    ask = (
        f"Forward, a layer computes for {t(p.compute, 4)}{waits}. A second of traffic beside it slows it by {k:g} s. "
        "From how much traffic per layer on does the next layer wait for its weights, and not for compute?"
    )
    return typed(ask, "ms", right, tuple(w for w in wrong if w[0] > 0), lambda value: t(value / 1e3))


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The usual plans side by side at the lesson's tokens."""
    return {**links.ways(learner, values), **at_tokens(learner, int(values["tokens"]))}


LESSON = Lesson(
    15, "step", "A step in time", "A GPU does two things at once: what counts is the longer one.",
    (
        "A step takes less time than its compute and its messages together, since both run at once: compute on one stream, messages on another. What "
        "hides costs nothing, so count what shows. Model and cluster are yours; the tokens per GPU are this lesson's own.",),
    (
        ("Stream", "a queue of work on the GPU; two streams run at the same time"),
        ("Overlap", "communication that runs while something else is computed, so that nobody waits for it"),
        ("Contention", "compute and traffic that run together slow each other"),
        ("Bucket", "several tensors that travel as one message"),
        ("Prefetch", "gathering the next layer's weights before they are needed"),
    ),
    (
        Control("way", "Split by", tuple(WAYS), "fsdp", dict(WAYS.items()), step=2),
        Control("tokens", "Tokens per GPU", TOKENS, 2048, kind="slider"),
    ),
    scene, question, CODE, ("compare", "The step of each plan as a timeline"), uses_model=True, focus=focus,
)  # fmt: skip
