"""Speed of the search, as ratios in one run on one machine; writes docs/BENCHMARKS.md. `--quick` leaves out the slow solvers."""

from __future__ import annotations

import datetime
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from planner_core.mesh import DeviceMesh  # noqa: E402
from planner_core.models import ZOO  # noqa: E402
from planner_core.pipeline import block_candidates, choose, plan_model  # noqa: E402
from planner_core.planner import Request, meshes, prepare  # noqa: E402
from planner_core.search import search, weights  # noqa: E402
from planner_core.solve import solve  # noqa: E402
from planner_core.unfolded import unfold_problem  # noqa: E402
from tests.solvers import highs  # noqa: E402

HIGHS_LIMIT_S = 60.0


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """Median wall time."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def ms(s: float) -> str:
    return f"{1e3 * s:.1f} ms"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)] + [""]


def problem(name: str, mesh: tuple[int, ...], layers: int | None = None) -> Any:
    planner = prepare(
        Request(name, cluster="2x8-h100" if np.prod(mesh) == 16 else "1x8-h100", layers=layers, memory_gb=1e5)
    )
    return planner, planner.problem(DeviceMesh(("data", "tensor")[-len(mesh) :], mesh))


def zoo() -> list[str]:
    rows = []
    for name in ZOO:
        planner, built = problem(name, (2, 8))
        network = seconds(lambda p=planner: (p.networks.clear(), p.problem(DeviceMesh(("data", "tensor"), (2, 8)))), 3)
        rows.append([name, ms(network), ms(seconds(lambda b=built: search(b)))])
    return ["## Network and search alone, (2, 8), memory ample", "", *table(["model", "network", "search"], rows)]


def depth() -> list[str]:
    rows = []
    for name in ("llama-3-8b", "t5-large"):
        built = [problem(name, (2, 8), n)[1] for n in (10, 1000)]
        few, many = (seconds(lambda b=b: search(b)) for b in built)
        rows.append([name, ms(few), ms(many), f"{many / few:.2f}"])
    return ["## Depth", "", *table(["model", "10 layers", "1000 layers", "ratio"], rows)]


def against_highs(depths: tuple[int, ...], limit_s: float) -> list[str]:
    rows = []
    price = weights("time")
    for mesh in ((8,), (2, 8)):
        for layers in depths:
            _, built = problem("llama-3-8b", mesh, layers)
            folded = seconds(lambda b=built: solve(b, [price]))
            net = unfold_problem(built, price)
            start = time.perf_counter()
            found = highs(net, time_limit=limit_s)
            took = time.perf_counter() - start
            said = f"{took:.1f} s" if took < limit_s else f"over {limit_s:.0f} s, stopped"
            rows.append(
                [
                    str(mesh),
                    str(layers),
                    ms(folded),
                    said,
                    f"{'' if took < limit_s else 'over '}{took / folded:.0f}",
                    str(np.isfinite(found)),
                ]
            )
            if took >= limit_s:
                break
    head = ["mesh", "layers", "folded", "HiGHS, one-hot", "ratio", "HiGHS has a solution"]
    return ["## Folded search against HiGHS on the unfolded network, Llama-3-8B", "", *table(head, rows)]


def whole() -> list[str]:
    rows = []
    planner = prepare(Request("llama-3-8b", cluster="64x8-h100", batch=512))
    rows.append(
        [
            "all factorisations of 512 GPUs, Llama-3-8B",
            f"{seconds(lambda: choose(planner, meshes(planner.request, planner.cluster)), 1):.2f} s",
        ]
    )
    t5 = prepare(Request("t5-large"))
    chosen = choose(t5, meshes(t5.request, t5.cluster))
    rows.append(
        ["candidates of T5-large's blocks (729 + 59 049)", f"{seconds(lambda: block_candidates(t5, chosen), 3):.2f} s"]
    )
    for mesh, cluster in (("8", "1x8-h100"), ("2x8", "2x8-h100")):
        took = seconds(lambda m=mesh, c=cluster: plan_model(Request("llama-3-8b", cluster=c, mesh=m)), 3)
        rows.append([f"snapshot to plans with baselines, Llama-3-8B, {mesh}", f"{took:.2f} s"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows.append(["peak memory of this process so far", f"{peak:.2f} GB"])
    return ["## Whole runs", "", *table(["what", "time"], rows)]


def main() -> None:
    quick = "--quick" in sys.argv
    head = [
        "# Benchmarks", "", "Written by `bench/search.py`; medians of wall time, imports excluded.", "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores (shared), load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__} (its HiGHS)", "",
    ]  # fmt: skip
    depths, limit = ((2,), 20.0) if quick else ((2, 4, 8, 16, 32), HIGHS_LIMIT_S)
    lines = [*head, *zoo(), *depth(), *whole(), *against_highs(depths, limit)]
    path = ROOT / "docs" / "BENCHMARKS.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
