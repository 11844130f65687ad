"""How fast the pages answer, measured in Chromium with performance.now and frame times; a line of JSON a figure.

    python -m bench.pages [NAME ...]          # all, or some of MEASURES; writes bench/support/results/pages.jsonl, docs/PAGES.md's tables
    python -m bench.pages goals               # what has a goal that a visitor feels, some ten minutes; prints one table, writes nothing

Chromium runs without a GPU, so WebGL is drawn by the processor: a laptop's is faster. To measure something more, write a
function that takes a `Place` and yields figures, and name it in MEASURES.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.support.app import tasks  # noqa: E402
from bench.support.app.graph_component import DRAW, DRAWN, SEEN, TOGGLE, grid, mounted, source  # noqa: E402
from bench.support.app.running_explorer import Place, explorer, frames, settle  # noqa: E402
from bench.support.app.watches import answered, first_picture  # noqa: E402
from explorer.analysis.what_if import best_plan  # noqa: E402
from explorer.analysis.what_if import quick_plan as first_plan  # noqa: E402
from explorer.figures import scatter  # noqa: E402
from explorer.figures.palette import LIGHT  # noqa: E402
from explorer.graph import scene_json as graph_json  # noqa: E402
from explorer.graph.scene import build_scene  # noqa: E402
from planner_core.core import unfold_graph  # noqa: E402
from planner_core.models import open_model  # noqa: E402
from planner_core.ops import coarsen  # noqa: E402
from planner_core.planning import Request, plan_model  # noqa: E402
from planner_core.search.candidates import Candidates, undominated_pairs  # noqa: E402
from tests.conftest import FLAGS  # noqa: E402

RESULTS = ROOT / "bench" / "support" / "results" / "pages.jsonl"
PAGE = ROOT / "docs" / "PAGES.md"


Figure = dict[str, Any]
Measure = Callable[[Place], Iterator[Figure]]


def spread(what: str, values_ms: list[float], goal: str = "", note: str = "") -> Figure:
    """Median, 95th percentile and worst of some times in milliseconds."""
    return {
        "what": what,
        "n": len(values_ms),
        "median_ms": statistics.median(values_ms),
        "p95_ms": float(np.percentile(values_ms, 95)),
        "worst_ms": max(values_ms),
        "goal": goal,
        "note": note,
    }


# --- the scatter of candidates ---------------------------------------------------------------------------


def synthetic(n: int) -> Candidates:
    """Candidates of which no two cost the same."""
    random = np.random.default_rng(0)
    grid = np.indices((3,) * 11, dtype=np.int8).reshape(11, -1).T[:n]
    comm, memory = random.gamma(3.0, 0.01, n), random.gamma(4.0, 2**29, n)
    return Candidates(
        "Block", tuple(f"w{k}" for k in range(11)), grid, comm, memory, undominated_pairs(comm, memory), 8, 4
    )


def of_t5() -> Candidates:
    return max(plan_model(Request("t5-large")).candidates, key=lambda c: c.space)


def scatters(place: Place) -> Iterator[Figure]:
    """Drawing, panning and hovering the candidates, by plotly alone as on the page."""
    script = (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").as_uri()
    cases = (("T5 decoder, 59 049 candidates", of_t5()), ("100 000 synthetic, all different", synthetic(100_000)))
    for name, found in cases:
        start = time.perf_counter()
        figure = scatter.candidates_scatter(found, None, 80 * 2**30, LIGHT)
        text = figure.to_json()
        marks = len(figure.data[0].x)
        yield spread(
            f"{name}: figure in Python ({marks} marks, {len(text) / 1e6:.2f} MB)", [1e3 * (time.perf_counter() - start)]
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "chart.html"
            file.write_text(
                f"<div id=c style='width:640px;height:430px'></div><script src='{script}'></script>", encoding="utf-8"
            )
            page = place.browser.new_page()
            page.goto(file.as_uri())
            page.set_default_timeout(60_000)
            drawn = page.evaluate(
                "async (f) => { const s = performance.now(); const g = JSON.parse(f);"
                " await Plotly.newPlot('c', g.data, g.layout); await new Promise(requestAnimationFrame);"
                " return performance.now() - s; }",
                text,
            )
            yield spread(f"{name}: first drawing", [drawn], "1 000")
            box = page.locator(".nsewdrag").bounding_box()
            yield spread(f"{name}: frame while panning", frames(page, lambda p=page, b=box: pan(p, b), 200), "33")
            yield spread(f"{name}: frame while hovering", frames(page, lambda p=page, b=box: hover(p, b), 200), "33")
            page.close()


def pan(page: Any, box: dict[str, float]) -> None:
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 200, steps=60)
    page.mouse.move(box["x"] + 150, box["y"] + 120, steps=60)
    page.mouse.up()


def hover(page: Any, box: dict[str, float]) -> None:
    page.mouse.move(box["x"] + 30, box["y"] + 30)
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + box["height"] - 30, steps=120)


# --- the what-if panel -----------------------------------------------------------------------------------


def replan(place: Place) -> Iterator[Figure]:
    """One re-plan of Llama-3-8B on 2×8 in Python as the page asks: only the best plan, every mesh, number of micro-batches and way of
    recomputation; and the plan that is shown before it."""
    taken, cpu, early = [], [], []
    asked = Request("llama-3-8b", recompute="auto", accumulate=None)
    before = best_plan(asked)
    for _ in range(2):
        for batch in (8, 16, 32, 64, 128):
            for change in (
                {},
                {"recompute": "full"},
                {"optimizer": "adamw-fp32"},
                {"cluster": "2x8-h100:inter=50"},
                {"zero": 0},
            ):
                request = replace(asked, batch=batch, **change)
                start = time.perf_counter()
                first_plan(request, before)
                early.append(1e3 * (time.perf_counter() - start))
                start, worked = time.perf_counter(), time.process_time()
                best_plan(request)
                taken.append(1e3 * (time.perf_counter() - start))
                cpu.append(1e3 * (time.process_time() - worked))
    yield spread("a plan at once for a change, Llama-3-8B on 2×8 (Python)", early)
    yield spread("the best plan for the same change (Python)", taken, "300")
    yield spread("the same in processor time, which others on the machine do not stretch", cpu, "300")


def whatif(place: Place) -> Iterator[Figure]:
    """From a key on the panel's slider to the new figures on the page, each stop planned for the first time."""
    taken: dict[str, list[float]] = {"any": [], "best": []}
    stops = [("Batch, samples a step", key) for key in ("ArrowRight",) * 4 + ("ArrowLeft",) * 7]
    for start in ("seq:2048", "seq:1024", "seq:8192,recompute:full", "inter:50", "optimizer:sgd"):
        with place.page(f"/whatif?whatif={start},batch:32") as page:
            page.locator(".st-key-whatif_answer").wait_for()
            page.wait_for_timeout(500)
            for label, key in stops:
                knob = page.get_by_role("slider", name=label)
                knob.focus()
                for name, ms in answered(page, key).items():
                    taken[name].append(ms)
                page.wait_for_timeout(100)
    note = "includes the browser, Streamlit's wait after a key, and the drawing"
    what = "what-if: from a key on the batch slider to"
    yield spread(f"{what} the figures of a plan, Llama-3-8B on 2×8", taken["any"], "300", note)
    yield spread(f"{what} those of the best plan, of all meshes and numbers of micro-batches", taken["best"], "", note)


# --- the graph -------------------------------------------------------------------------------------------


def graphs(place: Place) -> Iterator[Figure]:
    """The graph component by itself as on the page: first drawing, opening a block, panning many nodes."""
    script = source()
    deep = open_model("llama-3-8b", layers=190)
    python, first, expand = [], [], []
    for _ in range(5):
        start = time.perf_counter()
        text = json.dumps(graph_json.to_json(build_scene(coarsen(deep))))
        python.append(1e3 * (time.perf_counter() - start))
        with mounted(place.browser) as page:
            first.append(page.evaluate(DRAW, [script, text, []]))
            for _ in range(6):
                before = page.locator("g.node").count()
                expand.append(page.evaluate(TOGGLE))
                assert page.locator("g.node").count() != before, "the block was neither opened nor closed"
    yield spread(
        f"graph of {deep.num_ops} ops (Llama-3-8B of 190 layers), folded: positions and JSON in Python", python
    )
    yield spread("the same: first drawing in the browser", first, "1 000")
    yield spread("the same: a block opened or closed", expand, "100")
    flat = build_scene(coarsen(unfold_graph(open_model("llama-3-8b", layers=180))))
    yield from panned(place, script, graph_json.to_json(flat), "nodes drawn, nothing folded")
    yield from panned(place, script, grid(), "nodes drawn as a grid with edges")


def panned(place: Place, script: str, drawing: dict[str, Any], what: str) -> Iterator[Figure]:
    """First drawing of many nodes, and frames while panning as opened and zoomed out."""
    with mounted(place.browser) as page:
        drawn = page.evaluate(DRAW, [script, json.dumps(drawing), []])
        count = page.locator("g.node").count()
        assert count >= DRAWN
        yield spread(f"{count} {what}: first drawing", [drawn])
        box = page.locator(".canvas").bounding_box()
        for steps in (0, 20):
            page.evaluate(
                "(n) => { for (let i = 0; i < n; i++) document.querySelector('[data-do=out]').click(); }", steps
            )
            if steps and what.endswith("edges"):
                page.evaluate("() => { for (let i = 0; i < 4; i++) document.querySelector('[data-do=in]').click(); }")
            seen, at = page.evaluate(SEEN), page.locator(".world").get_attribute("transform")
            taken = frames(page, lambda: pan(page, box), 200)
            assert page.locator(".world").get_attribute("transform") != at, "nothing was panned"
            how = "zoomed out" if steps else "as opened"
            yield spread(f"{count} {what}, {how}, {seen} of them in the window: frame while panning", taken, "16.7")


# --- a cold browser -----------------------------------------------------------------------------------------


def first(place: Place) -> Iterator[Figure]:
    """From a cold browser's request to the first picture, and the bytes that it loaded till then; the plan itself is known."""
    cases = (
        ("Overview: the graph", "/", "g.node"),
        ("Overview: the table of plans", "/", ".plans tbody tr"),
        ("Plans: the chart", "/plans", ".chart path.mark"),
    )
    with place.page("/"):
        pass
    for what, path, sign in cases:
        taken, loaded = [], []
        for _ in range(5):
            ms, count = first_picture(place, path, sign)
            taken.append(ms)
            loaded.append(count)
        yield spread(
            f"cold browser, {what} ({statistics.median(loaded) / 1e6:.1f} MB loaded till then)", taken, "2 000"
        )


# --- what people wait for ----------------------------------------------------------------------------------


def waits(of: Callable[[Place], Iterator[tasks.Timed]]) -> Measure:
    """Return a task (`bench.support.app.tasks`) as a measure."""

    def measured(place: Place) -> Iterator[Figure]:
        for what, taken, goal in of(place):
            yield spread(what, taken, goal)

    return measured


# --- what jumps --------------------------------------------------------------------------------------------

SHIFTS = """
() => { window.shifted = 0;
  new PerformanceObserver((list) => { for (const e of list.getEntries()) if (!e.hadRecentInput) window.shifted += e.value; })
    .observe({ type: "layout-shift", buffered: true }); }
"""


SHOWN = {
    name: "" if name == "Overview" else name.lower().replace(" ", "")
    for name in ("Overview", "Plans", "Compare", "What if", "Learn")
}
"""Pages by name, each with its address."""


def shift(place: Place) -> Iterator[Figure]:
    """How much of each page jumps while it comes: Chromium's cumulative layout shift, a score without unit; 0.1 is called good."""
    for width in (1440, 800):
        for name, path in {**SHOWN, "Learn, lesson 17": "learn?lesson=memory-walk"}.items():
            found = [shifted(place, path, width) for _ in range(3)]
            yield {**spread(f"{name}, {width} px: layout shift at the first visit", found, "0.1"), "unit": "score"}


def shifted(place: Place, path: str, width: int) -> float:
    """The score of one first visit in a window of `width` pixels."""
    context = place.browser.new_context(viewport={"width": width, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.add_init_script(f"({SHIFTS.strip()})()")
    page.goto(f"{place.url}/{path}")
    settle(page)
    page.wait_for_timeout(2000)
    score = float(page.evaluate("window.shifted"))
    context.close()
    return score


# --- twenty people ---------------------------------------------------------------------------------------


def soak(place: Place) -> Iterator[Figure]:
    """Twenty sessions that re-plan in one process (`bench.support.app.soak`); the browser is not asked."""
    command = [sys.executable, "-m", "bench.support.app.soak"]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    yield from soaked(found)


def soaked(found: dict[str, Any]) -> Iterator[Figure]:
    """What `bench.support.app.soak` printed, as figures."""
    assert not found["errors"], found["errors"][0]
    kept = ", ".join(f"{mb:.0f} MB after {n}" for n, mb in found["memory_mb"][1::2])
    what = f"re-plan of Llama-3-8B on 2×8, {found['people']} people at once (threads of one process, one re-plan each {found['think_s']:g} s)"
    trimmed = (
        f", {found['trimmed_mb']:.0f} MB once the allocator gave back what it held" if "trimmed_mb" in found else ""
    )
    yield spread(f"{what}; memory {kept}{trimmed}", found["ms"], "2 000")


TASKS = (tasks.clicks, tasks.exports, tasks.methods, tasks.edits)
MEASURES: dict[str, Measure] = {
    **{m.__name__: m for m in (first, scatters, replan, whatif, graphs, shift, soak)},
    **{task.__name__: waits(task) for task in TASKS},
}


GOALS = ("first", "clicks", "whatif", "exports", "methods", "edits", "soak")
"""The measures of what a visitor waits for."""

# --- running -------------------------------------------------------------------------------------------------


def measure(names: list[str]) -> list[Figure]:
    from playwright.sync_api import sync_playwright

    found = []
    with explorer() as (url, process), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name in names:
            for one in MEASURES[name](Place(browser, url, process)):
                day = datetime.datetime.now(datetime.UTC).date().isoformat()
                row = {
                    "measure": name,
                    **one,
                    "day": day,
                    "cores": os.cpu_count(),
                    "load": round(os.getloadavg()[0], 1),
                }
                print(json.dumps(row, ensure_ascii=False), flush=True)
                found.append(row)
        browser.close()
    return found


def table(rows: list[Figure]) -> str:
    """Return the figures as tables, one for each unit."""
    lines = []
    units = {r.get("unit", "ms") for r in rows}
    for unit, digits, told in (u for u in (("ms", 0, MS_NOTE), ("score", 3, SHIFT_NOTE)) if u[0] in units):
        head = ["what", "n", *(f"{k}, {unit}" for k in ("median", "p95", "worst", "goal")), "day", "load"]
        lines += ["", told, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        for r in (r for r in rows if r.get("unit", "ms") == unit):
            times = [f"{r[k]:.{digits}f}" for k in ("median_ms", "p95_ms", "worst_ms")]
            lines.append(
                "| " + " | ".join(map(str, [r["what"], r["n"], *times, r["goal"], r["day"], r["load"]])) + " |"
            )
    return "\n".join(lines) + "\n"


MS_NOTE = "By the clock in headless Chromium on two shared cores; “load” is the machine's load average meanwhile:"
SHIFT_NOTE = "How much jumps while a page comes, by Chromium's own score (cumulative layout shift, without unit; 0.1 is called good):"
MEASURED = "## Measured\n"
"""The heading of the part of the page that is written here, up to the next heading; all else is written by hand."""


def put_table(page: str, rows: list[Figure]) -> str:
    """Return the page with the tables of these figures, and all else as it was."""
    before, heading, rest = page.partition(MEASURED)
    assert heading, f"docs/PAGES.md has no heading {MEASURED.strip()!r}"
    _, following, after = rest.partition("\n## ")
    return before + heading + table(rows) + following + after


def main() -> None:
    if sys.argv[1:] == ["goals"]:
        print(table(measure(list(GOALS))))
        return
    names = sys.argv[1:] or list(MEASURES)
    if unknown := [n for n in names if n not in MEASURES]:
        raise SystemExit(f"{unknown[0]!r} is not one of {', '.join(MEASURES)}")
    rows = measure(names)
    old = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []
    kept = [r for r in old if r["measure"] in MEASURES and r["measure"] not in names] + rows
    kept.sort(key=lambda r: list(MEASURES).index(r["measure"]))
    RESULTS.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), encoding="utf-8")
    PAGE.write_text(put_table(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")


if __name__ == "__main__":
    main()
