"""19. Predicted and measured: one constant fitted to published runs, its residuals, the planner's own, and what a model is for."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing, svg, table
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.pictures.charts import Dots, columns, scatter
from explorer.text import units
from planner_core.core import ASSETS
from planner_core.planning.pricing import PREDICTED, PublishedRun, published_runs

GROUP_OUT = "group out"
SHARES = tuple(range(20, 85, 5))
TIE = 0.05
"""Two runs whose times are nearer than this are not asked to be put in order."""
CODE = """\
import statistics

# model FLOPs of a step, GPUs, peak FLOP/s of one, measured seconds: four published runs of llm-foundry and torchtitan
runs = [(4.55e18, 512, 989e12, 16.3), (1.96e16, 8, 989e12, 5.36), (4.0e15, 8, 312e12, 3.1), (7.7e15, 8, 312e12, 6.2)]
shares = [flops / (gpus * peak * measured) for flops, gpus, peak, measured in runs]
constant = statistics.median(shares)  # the share of the peak that is reached
for (flops, gpus, peak, measured), share in zip(runs, shares):
    predicted = flops / (gpus * peak * constant)
    print(f"measured {measured} s, predicted {predicted:.2f} s, residual {predicted / measured - 1:+.0%}")
print(f"constant {constant:.2f}")
"""


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
        """Predicted over measured, less one, if every run reached `share` of the peak."""
        return self.share / share - 1


def step_flops(row: dict[str, str], micro_batch: int, accumulate: int, recompute: str) -> float:
    """FLOPs of a step on one GPU: 2 per weight and token forward and 4 backward, attention's half of a square, and forward once
    more where all is computed again. `row` is a run's line of runs.csv."""
    hidden, layers, seq = int(row["hidden"]), int(row["layers"]), int(row["seq_len"])
    keys = hidden * int(row["kv_heads"] or row["heads"]) // int(row["heads"])
    feed = (3 if row["ffn_gated"] == "1" else 2) * hidden * int(row["ffn"])
    layer = 2 * hidden * hidden + 2 * hidden * keys + feed
    forward = 2 * (layers * layer + hidden * int(row["vocab"])) + 2 * layers * seq * hidden
    times = 4 if recompute == "full" else 3
    split = int(row["tp"] or 1)
    return times * forward * micro_batch * accumulate * seq / split


@lru_cache(maxsize=1)
def runs() -> tuple[FittedRun, ...]:
    """The published runs with their FLOPs; shapes come from the file that their sources fill."""
    with (PREDICTED.parent / "runs.csv").open(encoding="utf-8", newline="") as file:
        shapes = {row["id"]: row for row in csv.DictReader(file)}
    with PREDICTED.open(encoding="utf-8", newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    found = []
    for run in published_runs():
        row = rows[run.id]
        flops = step_flops(shapes[run.id], int(row["micro_batch"]), int(row["accumulate"]), row["recompute"])
        found.append(FittedRun(run, flops, peak(run.gpu)))
    return tuple(found)


@lru_cache(maxsize=16)
def peak(gpu: str) -> float:
    """FLOP/s in bf16 of a GPU's data sheet."""
    import json

    return float(
        json.loads((ASSETS / "hardware" / f"{gpu}.json").read_text(encoding="utf-8"))["peak_flops"]["bfloat16"]
    )


@lru_cache(maxsize=1)
def best_share() -> float:
    """The constant with the least median error, to a thousandth."""
    shares = np.array([r.share for r in runs()])
    candidates = np.arange(0.2, 0.8, 0.001)
    return float(min(candidates, key=lambda c: np.median(np.abs(shares / c - 1))))


def spread(errors: Sequence[float]) -> tuple[float, float]:
    """Median of the errors' sizes, and what nine in ten stay below."""
    sizes = np.abs(errors)
    return float(np.median(sizes)), float(np.quantile(sizes, 0.9))


def pairs(alike: bool) -> list[tuple[FittedRun, FittedRun]]:
    """Runs of one source, model and GPU (where `alike`, also of as many GPUs and tokens a sample) whose speeds differ by more than `TIE`."""
    groups: dict[tuple[str, ...], list[FittedRun]] = {}
    for r in runs():
        x = r.run
        more = (str(x.gpus), x.workload.split(", ")[1]) if alike else ()
        groups.setdefault((x.source, x.model, x.gpu, *more), []).append(r)
    found = [(a, b) for group in groups.values() for i, a in enumerate(group) for b in group[i + 1 :]]
    return [(a, b) for a, b in found if abs(math.log(pace(a, a.run.measured_s) / pace(b, b.run.measured_s))) > TIE]


def pace(r: FittedRun, seconds: float) -> float:
    """Seconds per FLOP that the model needs, so that runs of different batches compare; recomputation is not what it needs."""
    again = 4 / 3 if "full recomputation" in r.run.workload else 1.0
    return seconds / (r.flops / again)


def in_order(predict: Callable[[FittedRun], float], alike: bool) -> float:
    """Share of `pairs` whose order a prediction tells; where it sees no difference, half."""
    told = []
    for a, b in pairs(alike):
        x, y = pace(a, predict(a)), pace(b, predict(b))
        told.append(0.5 if near_equal(x, y) else float((x < y) == _first(a, b)))
    return float(np.mean(told))


def near_equal(x: float, y: float) -> bool:
    """Whether two paces differ by rounding only."""
    return abs(x / y - 1) < 1e-9


def _first(a: FittedRun, b: FittedRun) -> bool:
    return pace(a, a.run.measured_s) < pace(b, b.run.measured_s)


def by_planner(r: FittedRun) -> float:
    """Seconds that the planner predicts with constants that have not seen the run's group."""
    return r.run.seconds[GROUP_OUT]


def scene(learner: Learner, values: Values) -> Scene:
    """The measured runs, the learner's constant, its residuals, the best constant, the planner's, and what a model is for."""
    share = int(values["share"]) / 100
    one = [r.one_constant(share) for r in runs()]
    best = best_share()
    best_errors = [r.one_constant(best) for r in runs()]
    planner = [r.run.error(GROUP_OUT) for r in runs()]

    def by_one(r: FittedRun) -> float:
        return r.flops / r.peak / best

    order = {alike: (in_order(by_one, alike), in_order(by_planner, alike)) for alike in (False, True)}
    steps = (
        _fit(share, one),
        _residuals(share),
        _best(share, best, best_errors),
        _causes(best),
        _planner(best_errors, planner),
        _purpose(order),
    )
    numbers = {
        "runs": len(one), "median": spread(one)[0], "nine": spread(one)[1], "best": best, "best_median": spread(best_errors)[0],
        "best_nine": spread(best_errors)[1], "planner_median": spread(planner)[0], "planner_nine": spread(planner)[1],
        "one_order": order[False][0], "planner_order": order[False][1], "pairs": len(pairs(False)),
        "one_alike": order[True][0], "planner_alike": order[True][1], "pairs_alike": len(pairs(True)),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=2)


def _clouds(predict: Callable[[FittedRun], float]) -> list[Dots]:
    looks = {"one node": (COMPUTE, "o"), "2 to 8 nodes": (DEVICES[1], "square"), "more nodes": (COMMUNICATION, "cross")}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in looks}
    for r in runs():
        name = "one node" if r.run.nodes == 1 else "2 to 8 nodes" if r.run.nodes <= 8 else "more nodes"
        found[name].append((r.run.measured_s, predict(r)))
    return [Dots(name, tuple(found[name]), *looks[name]) for name in looks if found[name]]


def _fit(share: float, errors: Sequence[float]) -> Step:
    half, nine = spread(errors)
    says = (
        f"{len(runs())} training runs that others measured and published. The simplest model of a step has one constant: **time = FLOPs ÷ (share × "
        f"the GPU's peak)**, recomputation counted in. With a share of {units.percent(share)} half of the runs are within **{units.percent(half)}** of what was measured, nine in "
        f"ten within {units.percent(nine)}. Another share moves all points up or down."
    )
    picture = scatter(
        _clouds(lambda r: r.flops / r.peak / share), "measured", "predicted with one constant", units.seconds
    )
    return Step(
        "Fit one constant", says, svg(picture, f"Predicted against measured at {units.percent(share)} of the peak")
    )


def _residuals(share: float) -> Step:
    low, high = (float(np.quantile([r.share for r in runs()], q)) for q in (0.05, 0.95))
    says = (
        f"What is left is the **residual**: predicted over measured, less one. A constant moves all points up or down together; it cannot bring "
        f"them nearer to each other. The runs reached from {units.percent(low)} to {units.percent(high)} of their GPUs' peaks (nine in ten of them), "
        "so no constant can be right for all. Which one is least wrong?"
    )
    return Step(
        "What is left over", says, svg(_histogram([r.one_constant(share) for r in runs()]), "Residuals of one constant")
    )


def _histogram(errors: Sequence[float]) -> Drawing:
    edges = (-0.5, -0.3, -0.2, -0.1, 0.1, 0.2, 0.3, 0.5)
    names = ("< −50 %", "−50…−30", "−30…−20", "−20…−10", "−10…+10", "+10…+20", "+20…+30", "+30…+50", "> +50 %")
    counts = np.bincount(np.searchsorted(edges, errors), minlength=len(names))
    return columns(list(zip(names, map(float, counts), strict=True)), "runs by residual, per cent", COMPUTE, 4)


def _best(share: float, best: float, errors: Sequence[float]) -> Step:
    half, nine = spread(errors)
    says = (
        f"The share with the least median error is **{units.percent(best)}**; you chose {units.percent(share)}. With it half of the runs are within "
        f"{units.percent(half)}, nine in ten within {units.percent(nine)}. One number for all models, GPUs and layouts is that good, and no better."
    )
    picture = scatter(
        _clouds(lambda r: r.flops / r.peak / best), "measured", "predicted with the best constant", units.seconds
    )
    return Step("The best constant", says, svg(picture, "Predicted against measured with the best constant"))


def _causes(best: float) -> Step:
    rows = []
    for name, of in (
        ("GPU", lambda r: r.run.gpu),
        ("layout", lambda r: r.run.kind),
        ("nodes", lambda r: _nodes(r.run.nodes)),
    ):
        for value in sorted({of(r) for r in runs()}):
            mine = [r for r in runs() if of(r) == value]
            middle = float(np.median([r.one_constant(best) for r in mine]))
            off = spread([r.run.error(GROUP_OUT) for r in mine])[0]
            rows.append((name, value, str(len(mine)), units.change(middle, 0), units.percent(off)))
    says = (
        "Residuals are a message: where they lean to one side, something is missing. Medians by group, with the best constant. Minus means that the "
        "runs were slower than the constant says. The last column is how far the planner is off, which knows products, links, overlap and memory traffic."
    )
    head = ("", "", "runs", "one constant, middle", "planner, half within")
    return Step("What residuals say", says, table(head, rows))


def _nodes(n: int) -> str:
    return "1" if n == 1 else "2 to 8" if n <= 8 else "more than 8"


def _planner(one: Sequence[float], planner: Sequence[float]) -> Step:
    (a, b), (c, d) = spread(one), spread(planner)
    says = (
        f"The planner's model adds up operators, collectives and what hides. Its constants were fitted to these runs too, so each point here is predicted "
        f"by constants **that have not seen the run's group**: otherwise a model with more constants always looks better. Half within **{units.percent(c)}** "
        f"({units.percent(a)} with one constant), nine in ten within **{units.percent(d)}** ({units.percent(b)})."
    )
    picture = scatter(
        _clouds(lambda r: r.run.seconds[GROUP_OUT]), "measured", "predicted by the planner", units.seconds
    )
    return Step("The planner's model", says, svg(picture, "Predicted by the planner against measured"))


def _purpose(order: dict[bool, tuple[float, float]]) -> Step:
    names = {False: "one source, model and GPU", True: "also as many GPUs and tokens a sample"}
    rows = [
        (name, str(len(pairs(alike))), *(units.percent(x) for x in order[alike])) for alike, name in names.items()
    ]  # fmt: skip
    wrong = [(a, b) for a, b in pairs(True) if (pace(a, by_planner(a)) < pace(b, by_planner(b))) != _first(a, b)]
    odd = sum(bool(a.run.contradicted or b.run.contradicted) for a, b in wrong)
    fine = sum(bool(a.run.contradicted or b.run.contradicted) for a, b in pairs(True) if (a, b) not in wrong)
    says = (
        f"A model is for choosing: which of two ways is quicker? These pairs of runs differ by more than {units.percent(TIE)} in speed. A model may be off "
        "everywhere and still order them. A coin gets half of them right. The second row is the hard one, where only layout, micro-batch or recomputation "
        f"differ. There the planner gets {len(wrong)} pairs wrong. Some of these measurements may be off themselves: a run that is slower on 8 GPUs than the "
        f"same on 16, say, does not agree with its own source. There is such a run in {odd} of the pairs that are predicted wrong, and in {fine} of the "
        f"{len(pairs(True)) - len(wrong)} that are predicted right. A model chooses what is worth trying, and a "
        "measurement decides between the last two."
    )
    return Step(
        "What a model is for", says, table(("pairs of", "pairs", "one constant: right", "planner: right"), rows)
    )


def question(learner: Learner, values: Values) -> Question:
    """What share did a run reach?"""
    r = example()
    right = 100 * r.share
    flops, seconds = r.flops, r.run.measured_s
    why = f"{units.count(flops)} ÷ ({units.count(r.peak)} per second · {units.seconds(seconds)}) = {right:.0f} %."
    gpus = r.run.gpus
    wrong = (
        (100 / r.share, "That is the other way round: the share is what was done over what could have been done."),
        (right * gpus, f"The FLOPs are those of one GPU already; they need not be divided among {gpus}."),
        (right / gpus, f"The FLOPs are those of one GPU already; do not divide by {gpus} again."),
        (100.0, "No run reaches the peak: kernels start and end, memory is read, messages are waited for."),
        (right / 100, "In per cent, please."),
    )
    ask = (
        f"{r.run.model} on {gpus} × {r.run.gpu}: each GPU does {units.count(flops)} FLOP in a step that took {units.seconds(seconds)}. Its peak is "
        f"{units.count(r.peak)} FLOP per second. Which share of the peak did the run reach?"
    )
    return typed(ask, "per cent", (right, why), wrong, lambda value: f"{units.significant(value, 2)} %")


def example() -> FittedRun:
    """The run of the question: the first on one node whose source agrees with itself."""
    return next(r for r in runs() if r.run.nodes == 1 and not r.run.contradicted)


SHARE_NAMES: dict[Choice, str] = {s: f"{s} %" for s in SHARES}
LESSON = Lesson(
    19, "measured", "Predicted and measured", "A model is known by its residuals, and judged by what it lets you choose.",
    (
        "Every plan of this course rests on predicted times. How wrong are they? Published runs tell; first fit one constant yourself, the share of the "
        "peak that runs reach. On logarithmic axes a factor is the same distance everywhere.",),
    (
        ("Residual", "what a model leaves over: predicted over measured, less one"),
        ("Fit", "to choose constants so that predictions come near measurements"),
        ("Peak", "what the data sheet of a GPU promises, in FLOP per second"),
    ),
    (Control("share", "Share of the peak that runs reach", SHARES, 80, SHARE_NAMES, "slider"),),
    scene, question, CODE, ("measured", "Every run with its source, and filters"),
)  # fmt: skip
