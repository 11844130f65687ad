"""The forms of products and collectives against published timings (`assets/measurements`): their errors must not grow.

The bounds are the errors that were measured when the constants were fitted, rounded up.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner_core.core import ASSETS, Cluster, DeviceMesh, Gpu, Level, load_gpu
from planner_core.cost.communication import axis_links, collective_time
from planner_core.cost.compute import product_seconds
from planner_core.ops import Gemm

TABLES = ASSETS / "measurements" / "published"


def table(name: str) -> Iterator[dict[str, str]]:
    with (TABLES / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def errors(found: list[float]) -> tuple[float, float]:
    """Median, and what nine in ten stay within."""
    size = np.abs(np.array(found))
    return float(np.median(size)), float(np.quantile(size, 0.9))


# --- matrix products ------------------------------------------------------------------------------


def alone(gpu: Gpu, name: str, ideal_s: float) -> Gpu:
    """The GPU with what one product reaches by itself: a training run is hot all the time, an isolated product throttles by
    how long it lasts."""
    said = json.loads((ASSETS / "hardware" / f"{name}.json").read_text())["products"]["residual"]
    throttle = 1 + said["alone_throttle"] * math.log1p(ideal_s / 1e-3)
    return replace(gpu, flops_efficiency=said["alone_flops_efficiency"] / throttle)


@pytest.mark.parametrize(
    ("name", "measured", "rows", "median", "nine_in_ten"),
    [
        ("a100-80gb-sxm", "NVIDIA A100-SXM4-80GB", 1055, 0.028, 0.135),
        ("h100-sxm", "NVIDIA H100 80GB HBM3", 1618, 0.034, 0.115),
        ("h200-sxm", "NVIDIA H200", 1000, 0.03, 0.1),
    ],
)
def test_products_take_what_was_measured(
    name: str, measured: str, rows: int, median: float, nine_in_ten: float
) -> None:
    gpu = load_gpu(name)
    peak, found = dict(gpu.peak_flops)["bfloat16"], []
    for row in table("gemm.csv"):
        if row["gpu"] != measured or row["dtype"] != "bf16" or not row["source"].startswith("ai-dynamo"):
            continue
        kernel = Gemm(int(row["m"]), int(row["n"]), int(row["k"]))
        took = float(row["time_us"]) * 1e-6 if row["time_us"] else kernel.flops / float(row["tflops"]) / 1e12
        found.append(product_seconds(kernel, "bfloat16", alone(gpu, name, kernel.flops / peak)) / took - 1)
    assert len(found) >= rows
    assert errors(found)[0] < median
    assert errors(found)[1] < nine_in_ten


# --- collectives ----------------------------------------------------------------------------------


def seconds(row: dict[str, str]) -> float:
    """What a row says that one collective takes; a bus bandwidth counts the bytes on the wire (nccl-tests)."""
    size, n = float(row["size_bytes"]), int(row["gpus"])
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    if row["algbw_GBps"]:
        return size / float(row["algbw_GBps"]) / 1e9
    return size * (n - 1) / n * (2 if row["kind"] == "all_reduce" else 1) / float(row["busbw_GBps"]) / 1e9


def predicted(row: dict[str, str], gpu: Gpu, intra: float, inter: float, tree_s: float) -> float:
    nodes = int(row["nodes"])
    measured = gpu.collectives
    assert measured is not None
    levels = [Level("node", int(row["gpus"]) // nodes, intra, measured.hop_s, measured.efficiency)]
    if nodes > 1:
        levels.append(Level("fabric", nodes, inter, measured.ring_hop_s, measured.outer_efficiency, tree_s))
    cluster = Cluster("measured", gpu, tuple(levels))
    (link,) = axis_links(cluster, DeviceMesh(("all",), (cluster.num_gpus,)))
    return collective_time(row["kind"], float(row["size_bytes"]), link)[0]


@pytest.mark.parametrize(
    ("name", "word", "intra", "median", "nine_in_ten"),
    [("a100-80gb-sxm", "A100", 300e9, 0.05, 0.165), ("h100-sxm", "H", 450e9, 0.06, 0.16)],
)
def test_collectives_of_one_node_take_what_was_measured(
    name: str, word: str, intra: float, median: float, nine_in_ten: float
) -> None:
    """all_reduce, all_gather and reduce_scatter of 2, 4 and 8 GPUs from 1 KiB to 512 MiB, by nccl-tests."""
    gpu, found = load_gpu(name), []
    for row in table("collectives.csv"):
        here = row["source"].startswith("ai-dynamo") and word in row["gpu"] and row["nodes"] == "1"
        broken = word == "H" and row["kind"] == "reduce_scatter" and row["gpus"] == "8"  # its table contradicts itself
        if here and not broken and float(row["size_bytes"]) >= 1024:
            found.append(predicted(row, gpu, intra, 0.0, 0.0) / seconds(row) - 1)
    assert len(found) >= 120
    assert errors(found)[0] < median
    assert errors(found)[1] < nine_in_ten


@pytest.mark.parametrize(
    ("measured", "name", "intra", "inter", "tree_s", "median"),
    [
        ("A100 80GB (AWS p4de)", "a100-80gb-sxm", 300e9, 50e9, 100.2e-6, 0.045),
        ("H100 80GB (AWS p5)", "h100-sxm", 450e9, 400e9, 46.5e-6, 0.045),
        ("H100 80GB (GCP a3-megagpu)", "h100-sxm", 450e9, 200e9, 131.9e-6, 0.1),
    ],
)
def test_all_reduce_of_two_nodes_takes_what_was_measured(
    measured: str, name: str, intra: float, inter: float, tree_s: float, median: float
) -> None:
    """From 1 MiB; only the latency of the fabric's tree is fitted to each cloud."""
    found = []
    for row in table("collectives.csv"):
        here = row["gpu"] == measured and row["nodes"] == "2" and row["kind"] == "all_reduce"
        if here and float(row["size_bytes"]) >= 2**20 and "2.18" not in row["notes"]:
            found.append(predicted(row, load_gpu(name), intra, inter, tree_s) / seconds(row) - 1)
    assert len(found) >= 12
    assert errors(found)[0] < median
