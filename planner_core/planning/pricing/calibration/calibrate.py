"""Fit the constants of a GPU to measurements: of collectives, of matrix products, or of one step of a whole run.

Each fit begins with the known constants of the cluster's GPU. It returns new constants, and the residual before and after. The
formulas are those of `cost.communication.collectives` and `cost.compute.products`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from planner_core.core import Cluster, Collectives, DeviceMesh, Gpu, InputError, Level, divisors, load_cluster, named
from planner_core.cost import Floats
from planner_core.cost.communication import axis_links, collective_time
from planner_core.cost.compute import product_seconds
from planner_core.ops import Gemm
from planner_core.planning.pricing.calibration.fits import Fit
from planner_core.planning.pricing.calibration.fitting import Predict, fit_constants
from planner_core.planning.pricing.calibration.measured import Collective, Machine, MeasuredStep, Product
from planner_core.planning.pricing.price import Pricer, check_statement
from planner_core.planning.pricing.speed import Speed
from planner_core.planning.request import Progress

NODE_CONSTANTS = ("base_s", "hop_s", "efficiency", "curve", "summing")
NETWORK_CONSTANTS = ("ring_hop_s", "tree_hop_s", "outer_efficiency")
UPPER_BOUNDS = {"efficiency": 1.0, "outer_efficiency": 1.0, "flops_efficiency": 1.0}
HOT_FACTOR = 1.36
"""Factor by which products are slower in a training run, which draws power all the time, than alone. Fitted to runs it is 1.31 for
A100 and 1.42 for H100."""
DEFAULT_COLLECTIVES = Collectives(
    base_s=1e-5, hop_s=1e-5, ring_hop_s=1e-4, tree_hop_s=1e-4, efficiency=0.9, few=0.01, curve=0.5
)
"""The constants with which the fit begins on an unknown machine."""
MIN_FACTOR, MAX_BISECTIONS = 0.2, 18
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Calibration:
    """A GPU with new constants: the fit, and each constant before and after."""

    gpu: Gpu
    fit: Fit
    changed: Mapping[str, tuple[float, float]]


def fit_collectives(cluster: Cluster, rows: Sequence[Collective], source: str) -> Calibration:
    """Fit latencies and efficiencies of links to timed collectives. `cluster` has the nominal speed of the links."""
    nominal = cluster.gpu.collectives
    if nominal is None:
        raise InputError(f"{cluster.gpu.name} has no constants of collectives to start from; start from e.g. h100-sxm")
    groups = sorted({(r.ranks, r.nodes) for r in rows})
    outside = {(ranks, nodes): _split_ranks(cluster, ranks, nodes)[1] for ranks, nodes in groups}
    names = (
        NODE_CONSTANTS
        if all(units == 1 for units in outside.values())
        else NETWORK_CONSTANTS
        if all(units == ranks for (ranks, _), units in outside.items())
        else (*NODE_CONSTANTS, *NETWORK_CONSTANTS)
    )
    # Constants that no timing depends on are not fitted: one node says nothing about the network, one GPU a node nothing about the node.
    start = {name: value for name, value in asdict(nominal).items() if name in names and value > 0}
    if any(units > 1 for units in outside.values()) and cluster.is_one_node:
        raise InputError(
            f"{cluster.name} is one node, but collectives over several were timed; give ",
            named("cluster"),
            " with inter=GB/s",
        )

    def predict(constants: Mapping[str, float]) -> Floats:
        links = {g: axis_links(*_sub_cluster(cluster, replace(nominal, **constants), *g))[0] for g in groups}
        return np.array([collective_time(r.kind, r.num_bytes, links[r.ranks, r.nodes])[0] for r in rows])

    measured = np.array([r.seconds for r in rows])
    fitted = fit_constants(start, UPPER_BOUNDS, predict, measured)
    gpu = replace(cluster.gpu, collectives=replace(nominal, **fitted))
    return _make_calibration(gpu, "collectives", source, start, fitted, predict, measured)


def replace_gpu(cluster: Cluster, gpu: Gpu) -> Cluster:
    """Return the cluster with another GPU, and with the latencies and efficiencies that belong to this GPU."""
    c = gpu.collectives
    if c is None:
        return replace(cluster, gpu=gpu)
    inside, network = (c.hop_s, c.hop_s, c.efficiency), (c.ring_hop_s, c.tree_hop_s, c.outer_efficiency)
    figures = [inside if cluster.is_inside(i) else network for i in range(len(cluster.levels))]
    levels = tuple(
        replace(level, latency_s=ring, tree_latency_s=tree, efficiency=efficiency)
        for level, (ring, tree, efficiency) in zip(cluster.levels, figures, strict=True)
    )
    return replace(cluster, gpu=gpu, levels=levels)


def _split_ranks(cluster: Cluster, ranks: int, nodes: int) -> tuple[int, int]:
    """Return the measured ranks that talk without the network between nodes, and the number of such groups. A rack joins several nodes."""
    joined = max(n for n in divisors(nodes) if n <= cluster.near_gpus // cluster.node_gpus)
    return ranks // nodes * joined, nodes // joined


def _sub_cluster(cluster: Cluster, constants: Collectives, ranks: int, nodes: int) -> tuple[Cluster, DeviceMesh]:
    """Return a cluster and mesh of the measured number of ranks, whose links have these constants."""
    inside, outside = _split_ranks(cluster, ranks, nodes)
    last = max(filter(cluster.is_inside, range(len(cluster.levels))))
    sizes, left = [], inside
    for level in cluster.levels[:last]:
        sizes.append(max(n for n in divisors(left) if n <= level.size))
        left //= sizes[-1]
    sizes += [left, outside] if outside > 1 else [left]
    levels = tuple(replace(level, size=size) for level, size in zip(cluster.levels, sizes, strict=False))
    part = replace(cluster, levels=levels, gpus_per_node=cluster.gpus_per_node and inside)
    return replace_gpu(part, replace(cluster.gpu, collectives=constants)), DeviceMesh(("world",), (ranks,))


def fit_products(gpu: Gpu, rows: Sequence[Product], source: str, hot: float = HOT_FACTOR) -> Calibration:
    """Fit the constants of products to products that were timed alone. In a run they are `hot` times slower."""
    peaks = dict(gpu.peak_flops)
    for row in rows:
        if row.dtype not in peaks:
            raise InputError(
                f"{gpu.name} has no peak for {row.dtype}, which a product was timed in; there are {', '.join(peaks)}"
            )
    # The fit is in logarithms, so a constant that is 0 in a plain roofline begins at a small number.
    start = {
        "flops_efficiency": min(1.0, gpu.flops_efficiency * hot),
        "ramp_k": max(1.0, gpu.products.ramp_k),
        "fixed_s": max(1e-7, gpu.products.fixed_s),
    }

    def predict(constants: Mapping[str, float]) -> Floats:
        trial = _with_products(gpu, constants)
        return np.array([product_seconds(Gemm(r.m, r.n, r.k), r.dtype, trial) for r in rows])

    measured = np.array([r.seconds for r in rows])
    fitted = fit_constants(start, UPPER_BOUNDS, predict, measured)
    # Alone a product is quicker than in a run, which draws power all the time. What is stored is for runs.
    in_a_run = {**fitted, "flops_efficiency": fitted["flops_efficiency"] / hot}
    return _make_calibration(_with_products(gpu, in_a_run), "products", source, start, fitted, predict, measured)


def _with_products(gpu: Gpu, constants: Mapping[str, float]) -> Gpu:
    form = replace(gpu.products, ramp_k=constants["ramp_k"], fixed_s=constants["fixed_s"])
    return replace(gpu, flops_efficiency=constants["flops_efficiency"], products=form)


def _make_calibration(
    gpu: Gpu,
    group: str,
    source: str,
    start: Mapping[str, float],
    fitted: Mapping[str, float],
    predict: Predict,
    measured: Floats,
) -> Calibration:
    fit = Fit.from_times(group, source, measured, predict(start), predict(fitted))
    return Calibration(gpu, fit, {name: (start[name], fitted[name]) for name in start})


def fit_step(
    step: MeasuredStep, source: str, report_progress: Progress = lambda text: None, calibrated_gpu: Gpu | None = None
) -> Calibration:
    """Fit the share of the peak that products reach in a run, so that the predicted speed of one whole run is the measured speed.
    `calibrated_gpu`: a GPU with other constants that were calibrated before."""
    cluster = load_cluster(step.cluster)
    if calibrated_gpu is not None:
        cluster = replace_gpu(cluster, calibrated_gpu)
    check_statement(step.stated, cluster)
    first = Pricer(step.model, cluster, None, report_progress)

    def speed(factor: float) -> Speed:
        gpu = replace(cluster.gpu, flops_efficiency=min(1.0, cluster.gpu.flops_efficiency * factor))
        pricer = replace(first, cluster=replace(cluster, gpu=gpu), planners={})
        plan = pricer.plan(step.stated)
        if plan is None:
            raise InputError(
                f"layout {step.stated.layout} is not legal for {step.model}, so it was not measured; see price"
            )
        return pricer.speed(plan, step.stated)

    # At the upper end products reach the vendor's peak.
    low, high = MIN_FACTOR, 1 / cluster.gpu.flops_efficiency
    slow, now, fast = speed(low), speed(1.0), speed(high)
    wanted, slowest, fastest = step.tokens_per_s_per_gpu, slow.tokens_per_s_per_gpu, fast.tokens_per_s_per_gpu
    if not slowest < wanted < fastest:
        raise InputError(
            f"{source}: {wanted:g} tokens/s/GPU cannot be reached with any speed of products, which gives {slowest:.0f} to {fastest:.0f}; "
            "check layout, micro-batch, recompute and GB/s of the links"
        )
    for _ in range(MAX_BISECTIONS):
        # The factor is bounded and judged by ratio, so the middle is the geometric one.
        middle = (low * high) ** 0.5
        low, high = (middle, high) if speed(middle).tokens_per_s_per_gpu < wanted else (low, middle)
        if high / low < 1 + TOLERANCE:
            break
    factor = (low * high) ** 0.5
    gpu = replace(cluster.gpu, flops_efficiency=cluster.gpu.flops_efficiency * factor)
    # Both speeds are of the same tokens a step, so seconds are to each other as the speeds are inversely.
    measured_s = now.step_time_s * now.tokens_per_s_per_gpu / wanted
    seconds = (np.array([s]) for s in (measured_s, now.step_time_s, speed(factor).step_time_s))
    shares = {"flops_efficiency": (cluster.gpu.flops_efficiency, gpu.flops_efficiency)}
    return Calibration(gpu, Fit.from_times("step", source, *seconds), shares)


def fit_machine(machine: Machine, source: str) -> tuple[Cluster, list[Calibration]]:
    """Return the cluster of one node that was measured, and the fits, without any constants known before."""
    # Nothing is known of the machine, so its fastest product stands for the peak, and the fit says what share others reach.
    rate = max(2 * r.m * r.n * r.k / r.seconds for r in machine.products)
    dtype, gpu_name = machine.products[0].dtype, machine.device
    gpu = Gpu(
        gpu_name,
        ((dtype, rate),),
        0.9,
        machine.memory_bytes,
        machine.memory_bytes_per_s,
        1.0,
        1e-6,
        collectives=DEFAULT_COLLECTIVES,
    )
    calibrations = [fit_products(gpu, machine.products, source, hot=1.0)]
    wire = {"all_reduce": 2.0}  # of the tensor; all_gather and reduce_scatter send it once
    # And the fastest collective for the link: an all_reduce of B over n ranks sends 2 (n - 1) / n B, an all_gather half of that.
    link = max(
        (wire.get(r.kind, 1.0) * r.num_bytes * (1 - 1 / r.ranks) / r.seconds for r in machine.collectives), default=rate
    )
    level = Level(
        "this machine", max(1, machine.ranks), link, DEFAULT_COLLECTIVES.hop_s, DEFAULT_COLLECTIVES.efficiency
    )
    cluster = Cluster(f"{machine.ranks} x {gpu_name}", calibrations[0].gpu, (level,), f"measured: {source}")
    if machine.collectives:
        calibrations.append(fit_collectives(cluster, machine.collectives, source))
        constants = calibrations[-1].gpu.collectives
        assert constants is not None
        cluster = _sub_cluster(cluster, constants, machine.ranks, 1)[0]
    return cluster, calibrations


def hardware_file(calibrations: Sequence[Calibration], gpu: Gpu, name: str) -> dict[str, Any]:
    """Return the GPU as a hardware file for `--cluster NAME:gpu=FILE` and for cluster files, with the source and residual of each group."""
    data = Cluster("", replace(gpu, name=name), ()).to_json()["gpu"]
    return {"schema": "shardscope.gpu/1", **data, "sources": list_sources(calibrations, gpu.name)}


def list_sources(calibrations: Sequence[Calibration], start: str) -> dict[str, Any]:
    """Return the fits as the `sources` of a hardware file. `start`: the GPU with whose constants they began."""
    return {c.fit.group: {**c.fit.to_json(), "start": start} for c in calibrations}
