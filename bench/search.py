"""Speed of the search, in processor time; writes docs/BENCHMARKS.md.

    python -m bench.search                            # parts that have no row yet, then the page, and docs/SIMULATION.md
    python -m bench.search --only depth fronts        # some of the sections, measured again
    python -m bench.search --before 2026-11-23        # parts of earlier days, measured again
    python -m bench.search --peer ../autoparallel     # beside autoparallel too, from a checkout of it

Processor time counts what a process works, so other programs on the machine disturb it less than a clock; both sides of a ratio are
measured in turns. Each part of a section is printed and stored in bench/support/results/search.jsonl as it ends, so that a run that was
stopped goes on. All of it takes some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import coverage  # noqa: E402
from bench.support import commands, peer, simulation  # noqa: E402
from bench.support.kept_rows import KeptRows, Row, add_before, describe_dates  # noqa: E402
from planner_core.core import DeviceMesh, load_cluster  # noqa: E402
from planner_core.models import ZOO  # noqa: E402
from planner_core.planning import (  # noqa: E402
    Planner,
    Request,
    block_candidates,
    candidate_meshes,
    choose_mesh,
    plan_model,
    prepare_planner,
)
from planner_core.planning.analysis import unfold_problem  # noqa: E402
from planner_core.search import (  # noqa: E402
    find_least_memory,
    find_pareto_front,
    make_objective,
    memory_bytes,
    search_within_budget,
    solve_folded,
)
from planner_core.search.network import Problem  # noqa: E402
from tests.support.solvers import highs  # noqa: E402

HIGHS_LIMIT_S = 60.0


def median_seconds(work: Callable[[], Any], times: int = 5) -> float:
    """Median processor time of several runs."""
    return statistics.median(processor_seconds(work) for _ in range(times))


def processor_seconds(work: Callable[[], Any]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    work()
    return time.process_time() - start


def fresh_search_seconds(problem: Problem, search: Callable[[Problem], Any], times: int = 5) -> float:
    """Median processor time of a search on a problem with an empty cache. Each run gets a cache of its own, since a problem keeps all
    that was solved, and the points that searches may still form."""
    return median_seconds(lambda: search(problem.with_point_limit(problem.max_unit_points)), times)


def format_ms(s: float) -> str:
    return f"{1e3 * s:.1f} ms"


def prepare_problem(name: str, mesh: tuple[int, ...], layers: int | None = None) -> tuple[Planner, Problem]:
    """A planner of a zoo model, and its problem on one mesh of H100 with ample memory."""
    cluster = load_cluster("2x8-h100" if np.prod(mesh) == 16 else "1x8-h100").with_memory(10**15)
    planner = prepare_planner(Request(name, cluster=cluster, layers=layers))
    return planner, planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh))


Cells = list[str]
Measurement = Callable[[], Cells]


def measure_network(name: str) -> Cells:
    """The time to build the network of a zoo model on (2, 8), and to search it with ample memory."""
    planner, problem = prepare_problem(name, (2, 8))
    # A planner without networks: it computes the kernel times and tables that meshes share.
    network = median_seconds(lambda: planner.changed().problem(problem.model.mesh), 3)
    return [format_ms(network), format_ms(fresh_search_seconds(problem, search_within_budget))]


def measure_depth(name: str) -> Cells:
    """The search of 10 and of 1 000 layers, in turns."""
    built = [prepare_problem(name, (2, 8), n)[1] for n in (10, 1000)]
    runs = [[fresh_search_seconds(b, search_within_budget, 1) for b in built] for _ in range(7)]
    few, many = map(statistics.median, zip(*runs, strict=True))
    return [format_ms(few), format_ms(many), f"{many / few:.2f}"]


def measure_budget(name: str, mesh: tuple[int, ...]) -> Cells:
    """A search half way between the least memory and that of the fastest assignment."""
    planner = prepare_planner(Request(name, cluster="2x8-h100"))
    built = planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh))
    free, least = search_within_budget(built).assignment, find_least_memory(built)
    assert free is not None
    assert least is not None
    budget = (memory_bytes(free) + memory_bytes(least)) / 2
    answer = search_within_budget(built, budget=budget)
    took = fresh_search_seconds(built, partial(search_within_budget, budget=budget), 3)
    return [format_ms(took), "yes" if answer.optimal else f"gap {answer.gap:.1e}"]


def measure_front(name: str, mesh: tuple[int, ...], objective: str) -> Cells:
    """Every plan with uniform repeats that no other beats."""
    planner = prepare_planner(Request(name, cluster="2x8-h100"))
    built = planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh), uniform=True)
    start = time.process_time()
    found = find_pareto_front(built, objective)
    took = time.process_time() - start
    return [str(len(found.cost_s)), "yes" if found.exact else "no", f"{took:.2f} s"]


def measure_highs(mesh: tuple[int, ...], layers: int) -> Cells:
    """The folded search of Llama-3-8B, and HiGHS on the unfolded network."""
    _, built = prepare_problem("llama-3-8b", mesh, layers)
    objective = make_objective(built, "time")
    answer = solve_folded(built, objective)
    net = unfold_problem(built, objective, answer)
    before = fresh_search_seconds(built, partial(solve_folded, objective=objective))
    start = time.process_time()
    found = highs(net, time_limit=HIGHS_LIMIT_S, near=answer.seconds if answer else 1.0)
    took = time.process_time() - start
    folded = (before + fresh_search_seconds(built, partial(solve_folded, objective=objective))) / 2
    stopped = took >= HIGHS_LIMIT_S
    return [
        format_ms(folded),
        f"over {HIGHS_LIMIT_S:.0f} s, stopped" if stopped else f"{took:.1f} s",
        f"{'over ' * stopped}{took / folded:.0f}",
        str(np.isfinite(found)),
    ]


def measure_all_meshes() -> Cells:
    planner = prepare_planner(Request("llama-3-8b", cluster="64x8-h100", batch=512))
    options = candidate_meshes(planner.request, planner.cluster)
    return [f"{processor_seconds(lambda: choose_mesh(planner, options)):.2f} s"]


def measure_candidates() -> Cells:
    t5 = prepare_planner(Request("t5-large"))
    chosen = choose_mesh(t5, candidate_meshes(t5.request, t5.cluster))
    return [f"{median_seconds(lambda: block_candidates(t5, chosen), 3):.2f} s"]


def measure_snapshot(mesh: str, cluster: str) -> Cells:
    return [f"{median_seconds(lambda: plan_model(Request('llama-3-8b', cluster=cluster, mesh=mesh)), 3):.2f} s"]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page: its title, what it says above the table, the names of its columns, and what measures the cells of each part
    after the first column, by the first."""

    title: str
    columns: str
    parts: Mapping[str, Measurement]
    words: str = ""


SECTIONS = {
    "first": Section(
        "The first plan",
        "model and cluster | imported | built on meta | first plan | what it says | memory of the planner",
        {case.label: partial(commands.measure_first_plan, case) for case in commands.CASES},
        commands.FIRST_WORDS,
    ),
    "commands": Section(
        "From a command to its answer",
        "model and cluster | processor time | imported and built | ratio | | peak memory | answer",
        {case.label: partial(commands.measure_command, case) for case in commands.CASES if case.name not in ZOO},
        commands.COMMAND_WORDS,
    ),
    "peer": Section(
        "Beside autoparallel, Llama-3-8B's shape",
        "layers and mesh | autoparallel | its peak memory | this planner | its peak memory | ratio",
        {f"{layers} layers, {mesh}": partial(peer.measure, layers, mesh) for layers, mesh in peer.SIZES},
        peer.WORDS,
    ),
    "network": Section(
        "Network and search alone, (2, 8), memory ample",
        "model | network | search",
        {name: partial(measure_network, name) for name in ZOO},
    ),
    "depth": Section(
        "Depth: the search alone",
        "model | 10 layers | 1000 layers | ratio",
        {name: partial(measure_depth, name) for name in ("llama-3-8b", "t5-large")},
        "A request is not as flat: modules are built and captured one by one. Of the first plan of a T5 of 2 x 1 001 layers, the one capture of "
        "all layers takes a third (sampled).",
    ),
    "whole": Section(
        "Other parts of a request",
        "what | time",
        {
            "all factorisations of 512 GPUs, Llama-3-8B": measure_all_meshes,
            "candidates of T5-large's blocks (729 + 59 049)": measure_candidates,
            **{
                f"snapshot to plans with baselines, Llama-3-8B, {mesh}": partial(measure_snapshot, mesh, cluster)
                for mesh, cluster in (("8", "1x8-h100"), ("2x8", "2x8-h100"))
            },
        },
    ),
    "budgets": Section(
        "Search within a memory budget, 16 GPUs",
        "model and mesh | time | proven",
        {f"{name}, {mesh}": partial(measure_budget, name, mesh) for name in ZOO for mesh in ((16,), (2, 8))},
    ),
    "fronts": Section(
        "Exact front, all copies alike",
        "model, mesh and objective | points | all of them | time",
        {
            f"{name}, {mesh}, {objective}": partial(measure_front, name, mesh, objective)
            for name, mesh in (("llama-3-8b", (2, 8)), ("mixtral-8x7b", (2, 8)), ("t5-large", (16,)))
            for objective in ("time", "communication")
        },
    ),
    "highs": Section(
        "Folded search against HiGHS on the unfolded network, Llama-3-8B",
        "mesh and layers | folded | HiGHS, one-hot | ratio | HiGHS has a solution",
        {
            f"{mesh}, {layers}": partial(measure_highs, mesh, layers)
            for mesh in ((8,), (2, 8))
            for layers in (2, 4, 8, 16, 32)
        },
    ),
}
ROWS = KeptRows("search", ("section", "part"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=SECTIONS, help="measure these sections again")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="a checkout of meta-pytorch/autoparallel")
    add_before(parser)
    args = parser.parse_args()
    peer.CHECKOUT = args.peer
    for name in args.only or SECTIONS:
        if name == "peer" and args.peer is None:
            continue
        measure_section(name, args.before, again=bool(args.only))
    (ROOT / "docs" / "BENCHMARKS.md").write_text(write_page(ROWS.read()), encoding="utf-8")
    if not args.only:
        simulation.main()
    print(f"{sum(used_seconds()):.0f} s of processor time")


def measure_section(name: str, before: str, *, again: bool) -> None:
    """Measure the parts of a section that have no row, or all of them `again`; print and store each as it ends."""
    for part, measure in SECTIONS[name].parts.items():
        ROWS.forget(before, section=name, part=part)
        if again or (name, part) not in ROWS.read():
            cells = measure()
            ROWS.append({"section": name, "part": part, "cells": cells})
            print(f"{name:9} | {part} | {' | '.join(cells)}", flush=True)


def used_seconds() -> list[float]:
    """The user seconds of this process and of its children."""
    return [resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def write_page(rows: Mapping[tuple[str, ...], Row]) -> str:
    """The page: each section with the days and commits of its parts."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    every = coverage.read_rows()
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m bench.search`. Times are processor time of one process, imports excluded, where a section does not say "
        f"otherwise. The machine ({machine}) was shared with other work, which lengthens processor time too, by up to a half: "
        "ratios within a row say more than seconds.",
        "",
        "## The first plan of every model of transformers",
        "",
        f"Of {len(every)} default configs, at their own depth, on {coverage.CLUSTER}; each is a row of [TRANSFORMERS.md](TRANSFORMERS.md). "
        + describe_dates(every),
        "",
        f"- {coverage.describe_outcomes(every)}",
        *(f"- {line}" for line in coverage.describe_seconds(every)),
        "",
    ]
    for name, section in SECTIONS.items():
        found = {part: rows[name, part] for part in section.parts if (name, part) in rows}
        if not found:
            continue
        columns = section.columns.split(" | ")
        lines += [f"## {section.title}", "", *([section.words, ""] if section.words else [])]
        lines += [describe_dates(list(found.values())), "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {part} | {' | '.join(row['cells'])} |" for part, row in found.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
