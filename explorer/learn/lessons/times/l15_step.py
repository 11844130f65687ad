"""15. A step in time: two streams, what hides beside compute, contention, buckets, and why small leads are ties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from explorer.address.settings import MODELS
from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import sketch_streams
from explorer.learn.lessons.times.stated import (
    PricedLayout,
    gpus_per_node,
    price_layout,
    tensor_layout,
    token_settings,
    unit_components,
    usual_layouts,
    with_samples,
)
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import timeline
from explorer.text import units
from planner_core.core import ITEM_BYTES, Block, BlockLabel, DeviceMesh, Plan
from planner_core.cost import (
    Cause,
    Component,
    PricedUnit,
    exposed_parts,
    optimizer_bytes,
)
from planner_core.cost.communication import axis_links, collective_time
from planner_core.planning import MAX_DOUBT, doubt_between
from planner_core.planning.pricing import time_band


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


def plan_layout(learner: Learner, layout_name: str, tokens: int) -> tuple[PricedLayout, str]:
    """Return the plan of a way to use all GPUs, and a sentence where the model cannot follow it."""
    learner, samples, note = with_samples(learner, tokens)
    usual = usual_layouts(learner.cluster)
    layouts = {"data": usual["ZeRO-1"], "fsdp": usual["FSDP (ZeRO-3)"], "hsdp": usual["HSDP"]}
    case = price_layout(learner, layouts.get(layout_name) or tensor_layout(learner.cluster), samples)
    if case is None:
        instead = price_layout(learner, usual["FSDP (ZeRO-3)"], samples)
        assert instead, "FSDP splits samples only"
        return (
            instead,
            note or f"{learner.name} cannot be split so over {gpus_per_node(learner.cluster)} GPUs; this is FSDP.",
        )
    return case, note


def main_layer(case: PricedLayout) -> PricedUnit:
    """Return the block that most of the step is spent in."""
    inner = [u for u in case.units if u.label]
    return max(inner or case.units, key=lambda u: u.copies * (u.forward_s + u.backward_s))


def layer_phases(case: PricedLayout) -> tuple[Phase, Phase]:
    """Return forward and backward of one copy of that block, in a micro-batch that bears what comes once a step."""
    # Forward and backward of the components are compute with what it waits for: what is above the compute was waited for.
    unit, c, k = main_layer(case), Component, case.model.contention
    components = unit_components(case, unit)
    return (
        Phase(
            unit.forward_s,
            components[c.FORWARD] - unit.forward_s,
            components[c.FORWARD_TRAFFIC] + components[c.FORWARD_ONCE],
            k,
        ),
        Phase(
            unit.backward_s,
            components[c.BACKWARD] - unit.backward_s,
            components[c.BACKWARD_TRAFFIC] + components[c.BACKWARD_ONCE],
            k,
        ),
    )


def shown(case: PricedLayout) -> dict[str, float]:
    """Return the seconds of a step by what it is spent on; they add up to the step."""
    cost, planner = case.plan.cost, case.planner
    seconds: dict[str, float] = dict.fromkeys(Cause, 0.0)
    for part in exposed_parts(case.plan.blocks, planner.graph, case.model, planner.coarse):
        seconds[part.cause] += part.seconds
    busy = {"compute": cost.gpu_compute_s, "host": cost.host_wait_s}
    return {**busy, **seconds, "optimizer": cost.optimizer_time_s}


@remember(64)
def gather_times(case: PricedLayout) -> tuple[int, float, float]:
    """Return the layer's weights: how many there are, seconds to gather them one by one, and in one bucket, over all GPUs."""
    block: Block = case.planner.graph.blocks[BlockLabel.parse(main_layer(case).label).block]
    sizes = [
        ITEM_BYTES[v.meta.dtype] * math.prod(v.meta.shape)
        for v in block.values
        if v.kind == "parameter" and v.grad and len(v.meta.shape) > 1
    ]
    cluster = case.planner.cluster
    link = axis_links(cluster, DeviceMesh(("shard",), (cluster.num_gpus,)))[0]
    one_by_one = sum(collective_time("all_gather", size, link)[0] for size in sizes)
    return len(sizes), one_by_one, collective_time("all_gather", sum(sizes), link)[0]


def live(learner: Learner, values: Values) -> Live:
    """Return forward, backward, contention, buckets, the whole step, and the band of its price."""
    layout_name, tokens = str(values["way"]), int(values["tokens"])
    case, note = plan_layout(learner, layout_name, tokens)
    forward, backward = layer_phases(case)
    fsdp, _ = layer_phases(plan_layout(learner, "fsdp", tokens)[0])
    busy, cost = fsdp.compute + fsdp.contention * fsdp.traffic, case.plan.cost
    parts, together = shown(case), gather_times(case)
    one_by_one = sum(optimizer_bytes(item_bytes(case), case.planner.workload, "foreach").values())
    numbers = {
        **_phase_numbers(forward, backward),
        "step_s": cost.step_time_s,
        "layers": main_layer(case).copies,
        **{f"{why}_s": s for why, s in parts.items()},
        "apart_s": together[1],
        "bucket_s": together[2],
        "updated": num_updated(case),
        "bytes_each": sum(update_bytes(case).values()),
        "bytes_one_by_one": one_by_one,
    }
    gpu = case.planner.cluster.gpu
    facts = {
        "model": name_of_model(case),
        "gpus": case.planner.cluster.num_gpus,
        "tokens_of_gpu": _tokens_per_gpu(case),
        "forward": forward,
        "backward": backward,
        "fsdp": {"traffic": fsdp.traffic, "busy_ms": 1e3 * busy, "traffic_ms": 1e3 * fsdp.traffic},
        "bucket": dict(zip(("count", "apart", "together"), together, strict=True)),
        "total_s": sum(parts.values()),
        "comm_s": cost.comm_time_s,
        "exposed_s": sum(parts[cause] for cause in Cause),
        "rate": {"kernels": gpu.bytes_per_s / 1e12, "sheet": gpu.memory_bytes_per_s / 1e12},
        "most_doubt": MAX_DOUBT,
        "parts": parts,
        "update": update_bytes(case),
        "ways": _price_layouts(learner, tokens),
        "pair": _closest_pair(learner, tokens),
        "stands_in": note,
    }
    streams = sketch_streams(busy, fsdp.traffic)
    pictures: dict[str, Picture] = {
        **({"streams": streams} if streams else {}),
        "forward": _stream_chart(forward, back=False),
        "backward": _stream_chart(backward, back=True),
    }
    return Live(facts, pictures, numbers)


def _phase_numbers(forward: Phase, backward: Phase) -> dict[str, float]:
    return {
        "forward_compute_s": forward.compute,
        "forward_waits_s": forward.waits,
        "forward_traffic_s": forward.traffic,
        "forward_s": forward.seconds,
        "backward_s": backward.seconds,
        "backward_traffic_s": backward.traffic,
        "backward_waits_s": backward.waits,
        "decides_s": deciding_traffic_s(forward),
    }


def item_bytes(case: PricedLayout) -> int:
    """Return the bytes of a number in the dtype that computes."""
    return ITEM_BYTES[case.planner.workload.dtype]


def update_bytes(case: PricedLayout) -> dict[str, int]:
    """Return the bytes that the update of one parameter moves, by what they are."""
    return optimizer_bytes(item_bytes(case), case.planner.workload, case.model.software.optimizer_kernels)


def num_updated(case: PricedLayout) -> float:
    """Return the parameters that one GPU's optimizer updates."""
    return case.plan.cost.optimizer_time_s * case.planner.cluster.gpu.bytes_per_s / sum(update_bytes(case).values())


def name_of_model(case: PricedLayout) -> str:
    """Return the model as people call it."""
    return MODELS.get(case.planner.graph.name, case.planner.graph.name)


def _tokens_per_gpu(case: PricedLayout) -> int:
    """Return the tokens of one GPU in a micro-batch."""
    load = case.planner.workload
    return load.batch * load.seq // load.accumulate // case.planner.cluster.num_gpus


def _stream_chart(phase: Phase, *, back: bool) -> Drawing:
    """Draw three layers in a row on two streams."""
    order = (4, 3, 2) if back else (1, 2, 3)  # so that each has a neighbour whose weights come beside it
    computing, waiting, moving = [], [], []
    for i, layer in enumerate(order):
        start = i * phase.seconds
        end = start + phase.busy - phase.waits
        computing.append((start, end, f"layer {layer}", COMPUTE))
        if phase.waits:
            waiting.append((end, end + phase.waits, "sum", COMMUNICATION))
        if phase.traffic:
            moving.append((start, start + phase.traffic, f"layer {layer - 1 if back else layer + 1}", DEVICES[3]))
    tracks = [("compute", computing), ("waited for", waiting), ("beside it", moving)]
    return timeline([track for track in tracks if track[1]], units.seconds, 3 * phase.seconds)


def _price_layouts(learner: Learner, tokens: int) -> list[tuple[str, str, Plan, Any]]:
    """Return every way with its name, its plan, and the band of its price."""
    control, prices = LESSON.controls[0], []
    for option in map(str, control.options):
        case, _ = plan_layout(learner, option, tokens)
        prices.append((option, control.name(option), case.plan, time_band(case.plan, case.planner.cluster)))
    return prices


def _closest_pair(learner: Learner, tokens: int) -> dict[str, Any] | None:
    """Return the two quickest ways that fit, as an example of the rule."""
    control = LESSON.controls[0]
    cases = {option: plan_layout(learner, str(option), tokens)[0] for option in control.options}
    names_ = {id(case): control.name(option) for option, case in cases.items()}
    fitting = sorted((c for c in cases.values() if c.plan.fits), key=lambda case: case.plan.cost.step_time_s)
    if len(fitting) < 2:
        return None
    one, other = fitting[:2]
    return {
        "quicker": names_[id(one)],
        "slower": names_[id(other)],
        "more": other.plan.cost.step_time_s / one.plan.cost.step_time_s - 1,
        "doubt": doubt_between(one.plan, other.plan, one.planner.cluster),
    }


def deciding_traffic_s(p: Phase) -> float:
    """Return the seconds of traffic beside a layer from which on the traffic is the longer side."""
    # Beside t seconds of traffic a layer is busy for compute + waits + k t: t is longer from where both are equal.
    return (p.compute + p.waits) / (1 - p.contention)


LESSON = read_lesson("15-step", live, focus=lambda learner, v: token_settings(learner, int(v["tokens"])))
