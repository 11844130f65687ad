"""Speed of the search, in processor time; writes docs/BENCHMARKS.md.

    python -m bench.search                        # sections that have no row yet, then the page, and docs/SIMULATION.md
    python -m bench.search --only depth fronts    # some of the sections, measured again
    python -m bench.search --before 2026-11-23    # sections of earlier days, measured again

Processor time counts what a process works, so other programs on the machine disturb it little. Both sides of a ratio are
measured in turns. Sections are stored in bench/support/results/search.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.support import simulation, unusual  # noqa: E402
from bench.support.kept_rows import KeptRows, add_before  # noqa: E402
from planner_core.core import DeviceMesh  # noqa: E402
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
from planner_core.planning.methods import METHODS  # noqa: E402
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


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)] + [""]


def prepare_problem(name: str, mesh: tuple[int, ...], layers: int | None = None) -> tuple[Planner, Problem]:
    """A planner of a zoo model, and its problem on one mesh of H100 with ample memory."""
    planner = prepare_planner(
        Request(name, cluster="2x8-h100" if np.prod(mesh) == 16 else "1x8-h100", layers=layers, memory_gb=1e5)
    )
    return planner, planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh))


def measure_networks() -> list[str]:
    rows = []
    for name in ZOO:
        planner, problem = prepare_problem(name, (2, 8))
        # A planner without networks: it computes the kernel times and tables that meshes and ZeRO stages share.
        network = median_seconds(lambda p=planner: p.changed().problem(DeviceMesh(("data", "tensor"), (2, 8))), 3)
        rows.append([name, format_ms(network), format_ms(fresh_search_seconds(problem, search_within_budget))])
    return [
        "## Network and search alone, (2, 8), memory ample",
        "",
        *markdown_table(["model", "network", "search"], rows),
    ]


def measure_depths() -> list[str]:
    rows = []
    for name in ("llama-3-8b", "t5-large"):
        built = [prepare_problem(name, (2, 8), n)[1] for n in (10, 1000)]
        few, many = map(
            statistics.median,
            zip(*[[fresh_search_seconds(b, search_within_budget, 1) for b in built] for _ in range(7)], strict=True),
        )
        rows.append([name, format_ms(few), format_ms(many), f"{many / few:.2f}"])
    return ["## Depth", "", *markdown_table(["model", "10 layers", "1000 layers", "ratio"], rows)]


def measure_budgets() -> list[str]:
    """Half way between the least memory and the fastest assignment's: bound, labels and proof."""
    rows = []
    for name in ZOO:
        for mesh in ((16,), (2, 8)):
            planner = prepare_planner(Request(name, cluster="2x8-h100"))
            built = planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh))
            free, least = search_within_budget(built).assignment, find_least_memory(built)
            assert free is not None
            assert least is not None
            budget = (memory_bytes(free) + memory_bytes(least)) / 2
            answer = search_within_budget(built, budget=budget)
            took = fresh_search_seconds(built, partial(search_within_budget, budget=budget), 3)
            rows.append([name, str(mesh), format_ms(took), "yes" if answer.optimal else f"gap {answer.gap:.1e}"])
    return [
        "## Search within a memory budget, 16 GPUs",
        "",
        *markdown_table(["model", "mesh", "time", "proven optimal"], rows),
    ]


def measure_fronts() -> list[str]:
    """Every plan with uniform repeats that no other beats."""
    rows = []
    for name, mesh in (
        ("llama-3-8b", (2, 8)),
        ("gpt2-xl", (2, 8)),
        ("mixtral-8x7b", (2, 8)),
        ("t5-large", (16,)),
        ("vit-large", (2, 8)),
    ):
        planner = prepare_planner(Request(name, cluster="2x8-h100"))
        built = planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh), uniform=True)
        for objective in ("time", "communication"):
            start = time.process_time()
            found = find_pareto_front(built, objective)
            took = time.process_time() - start
            rows.append(
                [name, str(mesh), objective, str(len(found.cost_s)), "yes" if found.exact else "no", f"{took:.2f} s"]
            )
    return [
        "## Exact front, all copies alike",
        "",
        *markdown_table(["model", "mesh", "objective", "points", "all of them", "time"], rows),
    ]


def compare_topology() -> list[str]:
    """TAPS: the plan of least communication time against that of least volume, both on the real links."""
    rows = []
    for cluster in ("2x8-h100", "2x8-v100-eth", "4x8-a100"):
        for name in (n for n in ZOO if n != "t5-large"):  # whose plan of least volume takes up to half a minute
            planner = prepare_planner(Request(name, cluster=cluster, method="taps"))
            options = candidate_meshes(planner.request, planner.cluster)
            a = choose_mesh(planner, options)
            b = choose_mesh(planner, options, method=replace(METHODS["taps"], by_volume=True))
            t, v = a.cost.comm_time_s, b.cost.comm_time_s
            saved = (
                "neither fits"
                if not (a.fits and b.fits)
                else "both send nothing"
                if not v
                else f"{100 * (1 - t / v):.1f} %"
            )
            rows.append([cluster, name, f"{a.mesh}: {format_ms(t)}", f"{b.mesh}: {format_ms(v)}", saved])
    head = ["cluster", "model", "by topology", "by volume", "communication saved"]
    return ["## TAPS: cost by topology against cost by volume, weights kept", "", *markdown_table(head, rows)]


def measure_captured_configs() -> list[str]:
    """From a config to the chosen plan, torch and transformers imported before."""
    from planner_core.models import open_model

    with tempfile.TemporaryDirectory() as where:
        config = Path(where) / "config.json"
        config.write_text(json.dumps(prepare_planner(Request("llama-3-8b")).graph.config))
        open_model(str(config), batch=16, seq=4096)  # imports
        rows = []
        for mesh, cluster in (("8", "1x8-h100"), ("2x8", "2x8-h100")):
            request = Request(str(config), cluster=cluster, mesh=mesh, batch=16, seq=4096)

            def run(request: Request = request) -> None:
                planner = prepare_planner(request)
                choose_mesh(planner, candidate_meshes(planner.request, planner.cluster))

            rows.append([mesh, f"{median_seconds(run, 3):.2f} s"])
    return [
        "## Config to plan, capture included, Llama-3-8B with 32 layers",
        "",
        *markdown_table(["mesh", "time"], rows),
    ]


def compare_highs() -> list[str]:
    rows = []
    points: dict[str, list[tuple[int, float, float]]] = {}
    for mesh in ((8,), (2, 8)):
        for layers in (2, 4, 8, 16, 32):
            _, built = prepare_problem("llama-3-8b", mesh, layers)
            objective = make_objective(built, "time")
            answer = solve_folded(built, objective)
            net = unfold_problem(built, objective, answer)
            before = fresh_search_seconds(built, partial(solve_folded, objective=objective))
            start = time.process_time()
            found = highs(net, time_limit=HIGHS_LIMIT_S, near=answer.seconds if answer else 1.0)
            took = time.process_time() - start
            folded = (before + fresh_search_seconds(built, partial(solve_folded, objective=objective))) / 2
            said = f"{took:.1f} s" if took < HIGHS_LIMIT_S else f"over {HIGHS_LIMIT_S:.0f} s, stopped"
            rows.append(
                [
                    str(mesh),
                    str(layers),
                    format_ms(folded),
                    said,
                    f"{'' if took < HIGHS_LIMIT_S else 'over '}{took / folded:.0f}",
                    str(np.isfinite(found)),
                ]
            )
            points.setdefault(str(mesh), []).append((layers, folded, took))
            if took >= 0.9 * HIGHS_LIMIT_S:
                break
    (ROOT / "docs" / "images" / "bench_search.svg").write_text(plot_highs(points), encoding="utf-8")
    head = ["mesh", "layers", "folded", "HiGHS, one-hot", "ratio", "HiGHS has a solution"]
    return [
        "## Folded search against HiGHS on the unfolded network, Llama-3-8B",
        "",
        "![time by depth](images/bench_search.svg)",
        "",
        *markdown_table(head, rows),
    ]


def plot_highs(points: dict[str, list[tuple[int, float, float]]]) -> str:
    """Seconds by layers, both on a log scale, as SVG: folded solid, HiGHS dashed, a colour per mesh."""
    width, height, left, bottom = 640, 360, 70, 50
    colours = ("#2b6cb0", "#c05621")
    ticks = [10.0**e for e in range(-4, 3)]

    def x(layers: float) -> float:
        return left + (np.log2(layers) - 1) / 4 * (width - left - 150)

    def y(s: float) -> float:
        return float(20 + (2 - np.log10(s)) / 6 * (height - bottom - 20))

    parts = [
        f'<line x1="{left}" x2="{width - 150}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="#ccc"/>'
        f'<text x="{left - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{t:g} s</text>'
        for t in ticks
    ]
    parts += [
        f'<text x="{x(n):.1f}" y="{height - bottom + 20}" text-anchor="middle">{n}</text>' for n in (2, 4, 8, 16, 32)
    ]
    parts.append(
        f'<text x="{(left + width - 150) / 2}" y="{height - 8}" text-anchor="middle">layers of Llama-3-8B</text>'
    )
    for colour, (mesh, found) in zip(colours, points.items(), strict=False):
        for column, dash, name in ((1, "", "folded"), (2, "6 4", "HiGHS")):
            path = " ".join(f"{x(p[0]):.1f},{y(p[column]):.1f}" for p in found)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            )
            parts.append(
                f'<text x="{x(found[-1][0]) + 8:.1f}" y="{y(found[-1][column]) + 4:.1f}" fill="{colour}">{name} {mesh}</text>'
            )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    return f'{head}<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'


def measure_whole_runs() -> list[str]:
    rows = []
    planner = prepare_planner(Request("llama-3-8b", cluster="64x8-h100", batch=512))
    rows.append(
        [
            "all factorisations of 512 GPUs, Llama-3-8B",
            f"{median_seconds(lambda: choose_mesh(planner, candidate_meshes(planner.request, planner.cluster)), 1):.2f} s",
        ]
    )
    t5 = prepare_planner(Request("t5-large"))
    chosen = choose_mesh(t5, candidate_meshes(t5.request, t5.cluster))
    rows.append(
        [
            "candidates of T5-large's blocks (729 + 59 049)",
            f"{median_seconds(lambda: block_candidates(t5, chosen), 3):.2f} s",
        ]
    )
    for mesh, cluster in (("8", "1x8-h100"), ("2x8", "2x8-h100")):
        took = median_seconds(lambda m=mesh, c=cluster: plan_model(Request("llama-3-8b", cluster=c, mesh=m)), 3)
        rows.append([f"snapshot to plans with baselines, Llama-3-8B, {mesh}", f"{took:.2f} s"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows.append(["peak memory of this process so far", f"{peak:.2f} GB"])
    return ["## Whole runs", "", *markdown_table(["what", "time"], rows)]


SECTIONS = {
    "network": measure_networks,
    "depth": measure_depths,
    "whole": measure_whole_runs,
    "budgets": measure_budgets,
    "fronts": measure_fronts,
    "topology": compare_topology,
    "captured": measure_captured_configs,
    "unusual": unusual.measure_commands,
    "highs": compare_highs,
}
ROWS = KeptRows("search", ("section",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=SECTIONS, help="measure these sections again")
    add_before(parser)
    args = parser.parse_args()
    for name in args.only or SECTIONS:
        ROWS.forget(args.before, section=name)
        if args.only or (name,) not in ROWS.read():
            ROWS.append({"section": name, "lines": SECTIONS[name](), "machine": describe_machine()})
            print(*ROWS.read()[name,]["lines"], sep="\n", flush=True)
    (ROOT / "docs" / "BENCHMARKS.md").write_text(write_page(ROWS.read()), encoding="utf-8")
    if not args.only:
        simulation.main()


def describe_machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores (shared), load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def write_page(rows: dict[tuple[str, ...], dict[str, Any]]) -> str:
    """The page: every section below the day, the commit and the machine of its measurement."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m bench.search`. Each section says on which day, at which commit and on which machine it was measured. Times are "
        "processor time of one process, imports excluded, where a section does not say otherwise.",
        "",
    ]
    for row in (rows[name,] for name in SECTIONS if (name,) in rows):
        head, *rest = row["lines"]
        lines += [head, "", f"{row['date']}, commit {row['commit']}, {row['machine']}", *rest]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
