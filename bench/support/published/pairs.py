"""Pairs of published runs that differ in layout on one model and machine: is the faster one predicted to be faster?

Runs of grade A and B are taken, stated as `memory.as_it_ran` says. The two runs of a pair have one source, model, GPU, number of
GPUs, sequence and global batch, and layouts of other degrees. Each prediction is kept in `bench/support/results`.

The same runs show the host's floor: below some time for each operator of a micro-batch no eager run is seen, however little the
GPU has to do (`host_floor`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.published.memory import stated_runs
from bench.support.published.runs import Run, plan_run
from planner_core.core import InputError, Plan
from planner_core.planning.pricing import num_operator_calls

ROWS = Path(__file__).resolve().parents[1] / "results" / "published_pairs.jsonl"
APART = 1.1
"""Pairs whose measured speeds differ by less are not counted."""
NODE = 8
HEAD = """\
## Pairs that differ in layout

Is the faster of two runs predicted to be faster? The two have one source, model, GPU, number of GPUs, sequence and global batch;
their layouts have other degrees, and their measured times differ by at least 10 %. Runs of grade A and B are taken; nanotron's
tensor parallelism is stated with its tokens split between the products, as its memory says (docs/PUBLISHED_MEMORY.md).
"""

WHY = """\
The last column takes the host's floor as the least time of an eager run: the smallest that any run took for each call of an operator
(`host.call_s` of assets/bands.json; nanotron's tensor parallelism with one sample takes 4.3 to 4.5 ms a layer, whatever the
width). The product shows it as the upper end of a step's band. What is left: of nanotron's {runs} runs on 512 GPUs whose model and degree
of tensor parallelism ran on 256 too, {slower} were measured slower than there, some by ten times; its fabric between nodes is not stated.
With one sample its tensor parallelism over 16 ranks takes 8.0 to 8.6 ms a layer, and over 32 ranks 15.2 to 18.2 ms, from 1 B to 80 B
parameters: so it is not the bytes. Predicted are 2 to 5 ms. The band of such plans says so: from as predicted to six times as long.
"""
Chosen = Callable[["PricedRun", "PricedRun"], bool]


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A run, its predicted seconds, the calls of operators of a step, and the seconds that these take at the host's floor."""

    run: Run
    seconds: float
    calls: int
    host_s: float

    @property
    def waits(self) -> bool:
        """Whether the host is slower than the GPU, by the floor."""
        return self.host_s > self.seconds


def price_runs(redo: bool = False) -> list[PricedRun]:
    """All runs with their predictions; what has no row is priced."""
    known: dict[str, tuple[float, int]] = {}
    if ROWS.exists() and not redo:
        known = {name: (seconds, calls) for name, seconds, calls in map(json.loads, ROWS.read_text().splitlines())}
    every = {run.id: run for run in stated_runs()}
    for name in sorted(every.keys() - known.keys()):
        known[name] = _price_run(every[name])
    ROWS.write_text("".join(json.dumps([name, *known[name]]) + "\n" for name in sorted(known)))
    call_s = host_floor([(every[name], calls) for name, (_, calls) in known.items() if calls])
    return [
        PricedRun(every[name], seconds, calls, 0.0 if every[name].stated.compiled else calls * call_s)
        for name, (seconds, calls) in known.items()
        if calls
    ]


def _price_run(run: Run) -> tuple[float, int]:
    """Predicted seconds and the calls of operators of a step; zeros for what cannot be priced."""
    try:
        plan: Plan | None = plan_run(run)[0]
    except InputError:
        plan = None
    return (0.0, 0) if plan is None else (plan.cost.step_time_s, num_operator_calls(plan))


def host_floor(runs: Sequence[tuple[Run, int]]) -> float:
    """Return the least seconds that an eager run was measured to take for each call of an operator, forward and backward together."""
    return min(run.measured_s / calls for run, calls in runs if not run.stated.compiled)


def _find_pairs(priced_runs: Sequence[PricedRun]) -> Iterator[tuple[PricedRun, PricedRun]]:
    """Yield the pairs, the run that was measured to be faster first."""
    groups: dict[object, list[PricedRun]] = {}
    for one in priced_runs:
        r, s = one.run, one.run.stated
        # The global batch and not the micro-batch: two layouts of one batch are the choice that a person has.
        samples = s.micro_batch * s.accumulate * s.layout.data
        shape = json.dumps(r.config, sort_keys=True)
        groups.setdefault((r.source, shape, r.gpu, r.gpus, s.seq, samples), []).append(one)
    for group in groups.values():
        for a, b in itertools.combinations(sorted(group, key=lambda t: t.run.measured_s), 2):
            if a.run.stated.layout != b.run.stated.layout and b.run.measured_s >= APART * a.run.measured_s:
                yield a, b


def format_pairs(priced_runs: Sequence[PricedRun]) -> str:
    """Return the section of docs/PUBLISHED.md."""
    every = list(_find_pairs(priced_runs))

    def inside(a: PricedRun, b: PricedRun) -> bool:
        return max(a.run.stated.layout.tp, b.run.stated.layout.tp) <= NODE

    def gpus(least: int, most: int) -> Chosen:
        return lambda a, b: inside(a, b) and least <= a.run.gpus <= most

    def zero(a: PricedRun, b: PricedRun) -> bool:
        return a.run.stated.layout.zero == 1 or b.run.stated.layout.zero == 1

    few, many = gpus(1, 64), gpus(128, 256)
    rows: Mapping[str, Chosen] = {
        "all": lambda a, b: True,
        "all to 256 GPUs": lambda a, b: a.run.gpus <= 256,
        "tensor parallelism inside a node, to 64 GPUs": few,
        "the same, neither run waits for the host": lambda a, b: few(a, b) and not (a.waits or b.waits),
        "inside a node, 128 and 256 GPUs, whole optimizer states": lambda a, b: many(a, b) and not zero(a, b),
        "the same, ZeRO-1 in one or both": lambda a, b: many(a, b) and zero(a, b),
        "inside a node, 512 and 1024 GPUs": gpus(512, 1024),
        "tensor parallelism over nodes in one or both": lambda a, b: not inside(a, b),
    }
    lines = [
        HEAD,
        "| pairs | number | faster is predicted faster | the same, no faster than the host |",
        "|---|--:|--:|--:|",
    ]
    for name, chosen in rows.items():
        these = [p for p in every if chosen(*p)]
        right = sum(a.seconds < b.seconds for a, b in these) / len(these)
        hosted = sum(max(a.seconds, a.host_s) < max(b.seconds, b.host_s) for a, b in these) / len(these)
        lines.append(f"| {name} | {len(these)} | {right:.1%} | {hosted:.1%} |")
    runs, slower = _count_slower_on_twice(priced_runs, 256)
    return "\n".join([*lines, "", WHY.format(runs=runs, slower=slower)])


def _count_slower_on_twice(priced_runs: Sequence[PricedRun], gpus: int) -> tuple[int, int]:
    """Return how many of nanotron's runs on twice as many GPUs have a run of the same model and degree of tensor parallelism on `gpus`, and
    how many of them were measured slower than the fastest of those. All have one global batch."""
    fastest: dict[tuple[str, int], float] = {}
    twice = []
    for t in priced_runs:
        key = t.run.name, t.run.stated.layout.tp
        if "nanotron" in t.run.source and t.run.gpus == gpus:
            fastest[key] = min(t.run.measured_s, fastest.get(key, t.run.measured_s))
        elif "nanotron" in t.run.source and t.run.gpus == 2 * gpus:
            twice.append((key, t.run.measured_s))
    are_slower = [seconds > fastest[key] for key, seconds in twice if key in fastest]
    return len(are_slower), sum(are_slower)
