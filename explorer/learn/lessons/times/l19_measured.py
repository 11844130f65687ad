"""19. Predicted and measured: one constant fitted to published runs, its residuals, the planner's own, and what a model is for."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import Dots, columns, scatter
from explorer.text import units
from planner_core.core import load_gpu
from planner_core.planning.pricing import PREDICTIONS_FILE, PublishedRun, load_published_runs

GROUP_OUT = "group out"
MIN_DIFFERENCE = 0.05
"""Two runs whose times are nearer than this are not asked to be put in order."""


@dataclass(frozen=True, slots=True)
class FittedRun:
    """A published run with what one constant needs: FLOPs of a step on one GPU, and its GPU's peak, FLOP/s."""

    run: PublishedRun
    flops: float
    peak: float

    @property
    def share(self) -> float:
        """Share of the peak that the run reached."""
        return self.flops / self.peak / self.run.measured_s

    def one_constant(self, share: float) -> float:
        """Return predicted over measured, less one, if every run reached `share` of the peak."""
        return self.share / share - 1


def step_flops(row: dict[str, str], micro_batch: int, accumulate: int, recompute: str) -> float:
    """Return FLOPs of a step on one GPU: 2 per weight and token forward and 4 backward, attention's half of a square, and forward once
    more where all is computed again. `row` is a run's line of runs.csv."""
    hidden, layers, seq = int(row["hidden"]), int(row["layers"]), int(row["seq_len"])
    keys = hidden * int(row["kv_heads"] or row["heads"]) // int(row["heads"])
    feed = (3 if row["ffn_gated"] == "1" else 2) * hidden * int(row["ffn"])
    layer = 2 * hidden * hidden + 2 * hidden * keys + feed
    forward = 2 * (layers * layer + hidden * int(row["vocab"])) + 2 * layers * seq * hidden
    times = 4 if recompute == "full" else 3
    split = int(row["tp"] or 1)
    return times * forward * micro_batch * accumulate * seq / split


@remember(1)
def fitted_runs() -> tuple[FittedRun, ...]:
    """Return the published runs with their FLOPs; shapes come from the file that their sources fill."""
    shapes, rows = _rows_by_id(PREDICTIONS_FILE.parent / "runs.csv"), _rows_by_id(PREDICTIONS_FILE)
    runs = []
    for run in load_published_runs():
        row = rows[run.id]
        flops = step_flops(shapes[run.id], int(row["micro_batch"]), int(row["accumulate"]), row["recompute"])
        runs.append(FittedRun(run, flops, peak_flops(run.gpu)))
    return tuple(runs)


def _rows_by_id(path: Path) -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@remember(16)
def peak_flops(gpu: str) -> float:
    """Return FLOP/s in bf16 of a GPU's data sheet."""
    return dict(load_gpu(gpu).peak_flops)["bfloat16"]


@remember(1)
def best_share() -> float:
    """Return the constant with the least median error, to a thousandth."""
    shares = np.array([r.share for r in fitted_runs()])
    # The median of errors has a kink at each run, so the shares are tried one by one.
    candidates = np.arange(0.2, 0.8, 0.001)
    return float(min(candidates, key=lambda c: np.median(np.abs(shares / c - 1))))


def error_quantiles(errors: Sequence[float]) -> tuple[float, float]:
    """Return the median of the errors' sizes, and what nine in ten stay below."""
    sizes = np.abs(errors)
    return float(np.median(sizes)), float(np.quantile(sizes, 0.9))


def comparable_pairs(alike: bool) -> list[tuple[FittedRun, FittedRun]]:
    """Return (faster, slower) runs of one source, model and GPU (where `alike`, also of as many GPUs and tokens a sample) whose speeds
    differ by more than `MIN_DIFFERENCE`."""
    groups: dict[tuple[str, ...], list[FittedRun]] = {}
    for r in fitted_runs():
        x = r.run
        more = (str(x.gpus), x.workload.split(", ")[1]) if alike else ()
        groups.setdefault((x.source, x.model, x.gpu, *more), []).append(r)
    pairs = [pair for group in groups.values() for pair in itertools.permutations(group, 2)]
    return [(a, b) for a, b in pairs if math.log(measured_pace(b) / measured_pace(a)) > MIN_DIFFERENCE]


def seconds_per_flop(r: FittedRun, seconds: float) -> float:
    """Return the seconds per FLOP that the model needs, so that runs of different batches compare; recomputation is not what it needs."""
    rerun_factor = 4 / 3 if "full recomputation" in r.run.workload else 1.0
    return seconds / (r.flops / rerun_factor)


def measured_pace(r: FittedRun) -> float:
    """Return the seconds per FLOP that a run was measured at."""
    return seconds_per_flop(r, r.run.measured_s)


def order_accuracy(predict: Callable[[FittedRun], float], alike: bool) -> float:
    """Return the share of `comparable_pairs` whose order a prediction tells; where it sees no difference, half."""
    scores = []
    for a, b in comparable_pairs(alike):
        x, y = seconds_per_flop(a, predict(a)), seconds_per_flop(b, predict(b))
        # One constant gives all runs of a GPU the same pace, and the last digits must not decide an order.
        scores.append(0.5 if near_equal(x, y) else float(x < y))
    return float(np.mean(scores))


def near_equal(x: float, y: float) -> bool:
    """Return whether two paces differ by rounding only."""
    return abs(x / y - 1) < 1e-9


def planner_prediction(r: FittedRun) -> float:
    """Return the seconds that the planner predicts with constants that have not seen the run's group."""
    return r.run.seconds[GROUP_OUT]


def live(learner: Learner, values: Values) -> Live:
    """Return the measured runs, the learner's constant, its residuals, the best constant, the planner's, and what a model is for."""
    share, best = int(values["share"]) / 100, best_share()
    one, best_errors = ([r.one_constant(c) for r in fitted_runs()] for c in (share, best))
    planner = [r.run.error(GROUP_OUT) for r in fitted_runs()]

    def by_one(r: FittedRun) -> float:
        return r.flops / r.peak / best

    order = {
        alike: (order_accuracy(by_one, alike), order_accuracy(planner_prediction, alike)) for alike in (False, True)
    }
    numbers = {
        "runs": len(one),
        "median": error_quantiles(one)[0],
        "nine": error_quantiles(one)[1],
        "best": best,
        "best_median": error_quantiles(best_errors)[0],
        "best_nine": error_quantiles(best_errors)[1],
        "planner_median": error_quantiles(planner)[0],
        "planner_nine": error_quantiles(planner)[1],
        "one_order": order[False][0],
        "planner_order": order[False][1],
        "pairs": len(comparable_pairs(False)),
        "one_alike": order[True][0],
        "planner_alike": order[True][1],
        "pairs_alike": len(comparable_pairs(True)),
    }
    predictions: dict[str, tuple[Callable[[FittedRun], float], str]] = {
        "fit": (lambda r: r.flops / r.peak / share, "predicted with one constant"),
        "best": (by_one, "predicted with the best constant"),
        "planner": (planner_prediction, "predicted by the planner"),
    }
    pictures: dict[str, Picture] = {
        name: scatter(_run_clouds(predict), "measured", words, units.seconds)
        for name, (predict, words) in predictions.items()
    }
    pictures["residuals"] = _draw_histogram(one)
    low, high = (float(np.quantile([r.share for r in fitted_runs()], q)) for q in (0.05, 0.95))
    facts = {"least_share": low, "most_share": high, "tie": MIN_DIFFERENCE, "run": _example_facts(), **_wrong_pairs()}
    facts["causes"] = _group_residuals(best)
    return Live(facts, pictures, numbers)


def _run_clouds(predict: Callable[[FittedRun], float]) -> list[Dots]:
    looks = {"one node": (COMPUTE, "o"), "2 to 8 nodes": (DEVICES[1], "square"), "more nodes": (COMMUNICATION, "cross")}
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in looks}
    for r in fitted_runs():
        name = "one node" if r.run.nodes == 1 else "2 to 8 nodes" if r.run.nodes <= 8 else "more nodes"
        points[name].append((r.run.measured_s, predict(r)))
    return [Dots(name, tuple(points[name]), *looks[name]) for name in looks if points[name]]


def _draw_histogram(errors: Sequence[float]) -> Drawing:
    edges = (-0.5, -0.3, -0.2, -0.1, 0.1, 0.2, 0.3, 0.5)
    names = ("< −50 %", "−50…−30", "−30…−20", "−20…−10", "−10…+10", "+10…+20", "+20…+30", "+30…+50", "> +50 %")
    counts = np.bincount(np.searchsorted(edges, errors), minlength=len(names))
    return columns(list(zip(names, map(float, counts), strict=True)), "runs by residual, per cent", COMPUTE, 4)


def _group_residuals(best: float) -> list[tuple[str, str, int, float, float]]:
    """Group runs by GPU, layout and nodes: the group, how many, the middle residual of one constant, and what half of the planner's stay below."""
    kinds: dict[str, Callable[[PublishedRun], str]] = {
        "GPU": lambda run: run.gpu,
        "layout": lambda run: run.kind,
        "nodes": lambda run: _nodes_name(run.nodes),
    }
    rows = []
    for name, kind in kinds.items():
        for value in sorted({kind(r.run) for r in fitted_runs()}):
            mine = [r for r in fitted_runs() if kind(r.run) == value]
            middle = float(np.median([r.one_constant(best) for r in mine]))
            off = error_quantiles([r.run.error(GROUP_OUT) for r in mine])[0]
            rows.append((name, value, len(mine), middle, off))
    return rows


def _nodes_name(n: int) -> str:
    return "1" if n == 1 else "2 to 8" if n <= 8 else "more than 8"


def _wrong_pairs() -> dict[str, int]:
    """Count of the hard pairs how many the planner gets wrong, and in how many of either a run does not agree with its own source."""
    odd: dict[bool, list[bool]] = {True: [], False: []}
    for a, b in comparable_pairs(True):
        wrong = seconds_per_flop(a, planner_prediction(a)) >= seconds_per_flop(b, planner_prediction(b))
        odd[wrong].append(bool(a.run.contradicted or b.run.contradicted))
    return {"wrong": len(odd[True]), "odd_of_wrong": sum(odd[True]), "odd_of_right": sum(odd[False])}


def _example_facts() -> dict[str, float | str]:
    r = example_run()
    facts: dict[str, float | str] = {
        "model": r.run.model,
        "gpus": r.run.gpus,
        "gpu": r.run.gpu,
        "seconds": r.run.measured_s,
    }
    return {**facts, "flops": r.flops, "peak": r.peak, "share": r.share}


def example_run() -> FittedRun:
    """Return the run of the question: the first on one node whose source agrees with itself."""
    return next(r for r in fitted_runs() if r.run.nodes == 1 and not r.run.contradicted)


LESSON = read_lesson("19-measured", live)
