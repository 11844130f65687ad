"""Express the speed of a plan in common figures: tokens per second and GPU, model FLOPs utilisation, a band, money, what a step waits for.

Model FLOPs are those of matrix products and attention, forward and backward, without recomputation. With a causal mask only
the computed half counts. Model FLOPs per second, divided by the GPU's peak in the dtype of training, are the utilisation (MFU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner_core.core import OPTIONS, Block, Cluster, Graph, InputError, Plan, named
from planner_core.cost import Cause, cost_model, exposed_parts
from planner_core.ops import work_of
from planner_core.planning.planner import Planner
from planner_core.planning.pricing.bands import UNKNOWN_BAND, Band, time_band

SECONDS_PER_DAY = 86_400
SECONDS_PER_HOUR = 3_600
COMPUTE, EXPOSED_COMM, WEIGHT_TRAFFIC, OPTIMIZER, MEMORY = "compute", "waits", "weight traffic", "optimizer", "memory"
BUBBLE, OUTSIDE, HOST = "bubble", "outside", "host"


@dataclass(frozen=True, slots=True)
class Speed:
    """The figures of one plan. Nine in ten measured runs of its kind take `low_s` to `high_s` seconds a step; None if no runs are known."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    low_s: float | None
    high_s: float | None
    band: Band

    def between(self, seconds: Callable[[float], str]) -> tuple[str, str]:
        """Both ends of the band as text; `seconds` formats a time."""
        return (
            (UNKNOWN_BAND, "")
            if self.low_s is None or self.high_s is None
            else (seconds(self.low_s), seconds(self.high_s))
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of tokens to train on, and the price of a GPU per hour."""

    tokens: float
    price_per_gpu_hour: float | None = None

    def check(self) -> None:
        """Raise InputError for a value that is not a positive number."""
        for name, value in (("tokens", self.tokens), ("price_per_gpu_hour", self.price_per_gpu_hour)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(
                    named(name, value), " is not a positive number; give e.g. ", named(name, OPTIONS[name].example)
                )

    def to_json(self, speed: Speed, num_gpus: int) -> dict[str, float | None]:
        """Days, GPU hours and money for all tokens at a speed. Money is None if no price was given."""
        seconds = self.tokens / (speed.tokens_per_s_per_gpu * num_gpus)
        # A GPU is paid for while it waits, too, so all GPUs of the cluster count.
        hours = seconds * num_gpus / SECONDS_PER_HOUR
        price = self.price_per_gpu_hour
        return {
            "tokens": self.tokens,
            "days": seconds / SECONDS_PER_DAY,
            "gpu_hours": hours,
            "cost": None if price is None else hours * price,
        }

    def cells(self, speed: Speed, num_gpus: int) -> list[str]:
        """Days and money, for a table."""
        run = self.to_json(speed, num_gpus)
        return [f"{run['days']:,.1f}", "" if run["cost"] is None else f"{run['cost']:,.0f}"]


def name_throughput(plan: Plan) -> str:
    """Return the unit in which a plan's throughput is counted: images have no tokens."""
    return "tokens/s" if plan.workload.seq > 1 else "samples/s"


def count_model_flops(graph: Graph) -> int:
    """Count the FLOPs of products and attention, forward and twice as many backward, for the graph's batch. A causal mask counts half."""
    repeats = graph.num_repeats
    return _count_flops(graph.top) + sum(n * _count_flops(graph.blocks[name]) for name, n in repeats.items())


def _count_flops(block: Block) -> int:
    # What is computed again, by a plan or inside of an attention kernel, is not counted: MFU is of the work that the model needs.
    return sum(work_of(op, block.values).model_flops for op in block.ops)


def measure_speed(plan: Plan, flops: int, cluster: Cluster) -> Speed:
    """Return the figures of a plan whose model has `flops` FLOPs in one global micro-batch."""
    load, step = plan.workload, plan.cost.step_time_s
    # The samples of a step are those of all ranks, so the cluster's rate is divided by all its GPUs, busy or not.
    per_gpu = 1 / step / cluster.num_gpus
    band = time_band(plan, cluster)
    return Speed(
        step_time_s=step,
        tokens_per_s_per_gpu=load.batch * load.seq * per_gpu,
        mfu=flops * plan.accumulate * per_gpu / _peak_flops(cluster, load.dtype),
        low_s=band.low and step * band.low,
        high_s=band.high and step * band.high,
        band=band,
    )


def _peak_flops(cluster: Cluster, dtype: str) -> float:
    """FLOP/s by the vendor's data sheet; for a dtype without an entry, the slowest."""
    peaks = dict(cluster.gpu.peak_flops)
    return peaks.get(dtype, min(peaks.values()))


def split_step(plan: Plan, planner: Planner) -> dict[str, float]:
    """Split the seconds of a step by the resource that it waits for. The parts add up to the step."""
    if plan.pipeline:
        return split_pipeline_step(plan)
    model = cost_model(planner.cluster, plan.mesh, planner.workload)
    exposed = exposed_parts(plan.blocks, planner.graph, model, planner.coarse)
    waits = sum(e.seconds for e in exposed if e.cause is Cause.WAITED)
    return {
        COMPUTE: plan.cost.gpu_compute_s,
        EXPOSED_COMM: waits,
        WEIGHT_TRAFFIC: sum(e.seconds for e in exposed) - waits,
        OPTIMIZER: plan.cost.optimizer_time_s,
        **_idle_parts(plan),
    }


def split_pipeline_step(plan: Plan) -> dict[str, float]:
    """Split the step of a plan with stages on its busiest rank. The bubble, in which it waits for other stages, is a part of its own."""
    cost = plan.cost
    bubble = cost.pipeline.bubble_s if cost.pipeline else 0.0
    waits = max(0.0, cost.exposed_comm_time_s - bubble)
    parts = {COMPUTE: cost.gpu_compute_s, EXPOSED_COMM: waits, OPTIMIZER: cost.optimizer_time_s, **_idle_parts(plan)}
    # Files of plans that are older than this sum have a mean over ranks as their bubble, which may be more than what is left.
    return {**parts, BUBBLE: min(bubble, cost.exposed_comm_time_s)}


def _idle_parts(plan: Plan) -> dict[str, float]:
    """Return the seconds in which the GPU has no work, where there are any: it waits for the host, or for a loader and a logger."""
    return {what: s for what, s in ((HOST, plan.cost.host_wait_s), (OUTSIDE, plan.cost.outside_time_s)) if s}


def limiting_resource(plan: Plan, planner: Planner) -> str:
    """Return the resource that a step waits for most, or memory if the plan does not fit."""
    # Seconds outside of the GPU's work are a line of their own and no plan changes them, so they never name what limits a run.
    parts = {what: s for what, s in split_step(plan, planner).items() if what != OUTSIDE}
    return max(parts, key=lambda what: parts[what]) if plan.fits else MEMORY
