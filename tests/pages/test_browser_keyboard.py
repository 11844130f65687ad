"""Three people at work without a mouse: every control is reached by Tab and used by keys."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.pages.test_browser_own import LONG, config
from tests.pages.test_browser_plans import drag
from tests.support.visiting import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.slow
MOST_STOPS = 90


def tab_to(visit: Visit, target: Locator) -> None:
    """Press Tab until the target has the focus."""
    target.wait_for()
    for _ in range(MOST_STOPS):
        visit.page.keyboard.press("Tab")
        if target.evaluate("e => e === document.activeElement || e.contains(document.activeElement)"):
            return
    raise AssertionError(f"{MOST_STOPS} times Tab did not reach {target}")


def test_an_engineer_changes_the_batch_asks_why_and_exports(visit: Visit) -> None:
    page = visit.page
    visit.open("/?model=gpt2-xl&layers=2")
    tab_to(visit, page.get_by_role("button", name=re.compile("^batch 32")))
    page.keyboard.press("Enter")
    tab_to(visit, page.get_by_label("Batch, samples per step over all GPUs"))
    page.keyboard.press("Control+A")
    page.keyboard.type("64")
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('batch=64')")
    visit.settle()
    page.keyboard.press("Escape")
    tab_to(visit, page.get_by_role("button", name="Compare them in full"))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/compare"))
    visit.settle()
    tab_to(visit, page.get_by_role("link", name="Export", exact=True))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/export"))
    visit.settle()
    tab_to(visit, page.get_by_role("button", name="Download plan JSON"))
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    assert waiting.value.suggested_filename.endswith(".json")


def test_a_researcher_colours_candidates_chooses_one_and_keeps_the_data(visit: Visit) -> None:
    page = visit.page
    visit.open("/plans?model=gpt2-xl&cluster=1x8-h100&layers=2")
    tab_to(visit, page.get_by_role("combobox", name=re.compile("Coloured by")))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('node=')")
    visit.settle()
    expect(page.locator("[data-testid=stPlotlyChart]").nth(1).locator(".legend")).to_contain_text(
        re.compile(r"S\([01]\)")
    )
    tab_to(visit, page.get_by_role("combobox", name=re.compile("Candidate")))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('candidate=')")
    visit.settle()
    tab_to(visit, page.get_by_role("button", name=re.compile("Data")).first)
    page.keyboard.press("Enter")
    tab_to(visit, page.get_by_role("button", name=re.compile("very candidate of .* as CSV")))
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    assert waiting.value.suggested_filename.startswith("candidates")


def test_somebody_plans_an_own_config_on_own_gpus_beside_their_own_setup(visit: Visit) -> None:
    page = visit.page
    visit.open("/?cluster=1x8-h100")
    tab_to(visit, page.get_by_role("button", name="Llama-3-8B"))
    page.keyboard.press("Enter")
    tab_to(visit, page.locator("summary").filter(has_text="Your own model"))
    page.keyboard.press("Enter")
    tab_to(visit, page.get_by_label("Or paste it here, or the model’s id"))
    page.keyboard.insert_text(json.dumps(config()))
    page.keyboard.press("Control+Enter")
    tab_to(visit, page.get_by_role("button", name="Plan this model"))
    page.keyboard.press("Enter")
    visit.asks(lambda query: "model=own-" in query)
    page.locator("h2.recipe").wait_for(timeout=LONG)

    visit.settle()
    tab_to(visit, page.get_by_role("button", name=re.compile("^1 node × 8 H100")))
    page.keyboard.press("Enter")
    tab_to(visit, page.locator("summary").filter(has_text="Your own cluster"))
    page.keyboard.press("Enter")
    tab_to(visit, page.get_by_label("Name of the GPU"))
    page.keyboard.type("Own GPU")
    tab_to(visit, page.get_by_label("Memory, GiB"))
    page.keyboard.type("48")
    tab_to(visit, page.get_by_role("button", name="Plan on these figures"))
    page.keyboard.press("Enter")
    visit.asks(lambda query: "cluster=own-" in query)
    visit.settle()
    expect(page.locator("p.kicker")).to_contain_text("Own GPU")
    page.keyboard.press("Escape")

    tab_to(visit, page.get_by_role("button", name="Set our current setup"))
    page.keyboard.press("Enter")
    tab_to(visit, page.get_by_role("spinbutton", name="Ranks that keep whole weights"))
    page.keyboard.press("Control+A")
    page.keyboard.type("8")
    tab_to(visit, page.get_by_role("spinbutton", name="Ranks that the weights are sharded over"))
    page.keyboard.press("Control+A")
    page.keyboard.type("1")
    tab_to(visit, page.get_by_role("button", name="Measure against it"))
    page.keyboard.press("Enter")
    visit.asks(lambda query: "setup=dp" in query)
    visit.settle()
    expect(page.locator("table.steps")).to_contain_text("Our current setup")
    page.keyboard.press("Escape")
    tab_to(visit, page.get_by_role("button", name="Export"))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/export"))
    visit.settle()
    tab_to(visit, page.get_by_role("button", name="Download plan JSON"))
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    assert waiting.value.suggested_filename.endswith(".json")


def taken(
    visit: Visit, button: Locator, what: str, kinds: tuple[str, ...] = ("csv", "json")
) -> list[list[dict[str, str]]]:
    """Open a *Data* button by keys and take the rows along, as CSV and as JSON; both as rows of text. The focus stays where it was."""
    found = []
    tab_to(visit, button)
    for kind in kinds:
        expect(button).to_be_focused()
        visit.page.keyboard.press("Enter")
        download = visit.page.get_by_role("button", name=f"{what} as {kind.upper()}")
        tab_to(visit, download)
        with visit.page.expect_download() as waiting:
            visit.page.keyboard.press("Enter")
        expect(download).to_be_focused()
        text = Path(waiting.value.path()).read_text(encoding="utf-8")
        assert waiting.value.suggested_filename.endswith(f".{kind}")
        rows = list(csv.DictReader(io.StringIO(text))) if kind == "csv" else json.loads(text)
        found.append([{k: str(v) for k, v in row.items() if v not in (None, "")} for row in rows])
        visit.page.keyboard.press("Escape")
        visit.page.get_by_role("button", name=f"{what} as {kind.upper()}").wait_for(state="detached")
    return found


def test_a_researcher_takes_every_figure_along(visit: Visit) -> None:
    """Plans from start to finish: candidates, plans and methods as data, a brushed chart, a sweep, and the notebook."""
    page = visit.page
    visit.open("/plans?model=gpt2-xl&cluster=1x8-h100&layers=2")
    data = page.get_by_role("button", name=re.compile("Data"))
    by_csv, by_json = taken(visit, data.nth(0), "Every candidate of GPT2Block")
    assert len(by_csv) == len(by_json) > 10 and by_csv[0].keys() == by_json[0].keys()
    by_csv, by_json = taken(visit, data.nth(1), "The plans")
    assert {r["plan"] for r in by_csv} == {r["plan"] for r in by_json} > {"fsdp"}

    tab_to(visit, page.locator("summary").filter(has_text="Every method side by side"))
    page.keyboard.press("Enter")
    tab_to(visit, page.get_by_role("button", name="Plan by every method"))
    page.keyboard.press("Enter")
    inside = page.locator(".st-key-methods")
    inside.get_by_role("button", name=re.compile("Data")).wait_for()
    visit.settle()
    by_csv, by_json = taken(visit, inside.get_by_role("button", name=re.compile("Data")), "The methods")
    assert [r["method"] for r in by_csv][:4] == [r["method"] for r in by_json][:4] == ["exact", "tap", "taps", "atp"]
    assert float(by_csv[0]["step_above_exact"]) == 0 and all(float(r["search_s"]) > 0 for r in by_csv[:4])

    chart = page.locator("[data-testid=stPlotlyChart]").nth(0)
    drag(visit, chart, "Box Select", [(0.02, 0.02), (0.98, 0.98)])
    page.wait_for_function("location.search.includes('among=')")
    visit.settle()
    page.get_by_text(re.compile(r"^\d+ plans marked in the chart")).wait_for()

    tab_to(visit, page.locator("summary").filter(has_text="How the answer changes"))
    page.keyboard.press("Enter")
    visit.settle()
    tab_to(visit, page.get_by_role("combobox", name="The best plan for each"))
    page.wait_for_timeout(600)  # a list that opens while the page still scrolls to it closes again
    page.keyboard.press("ArrowDown")
    page.locator("[role=listbox] [role=option]").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('sweep=batch')")
    page.get_by_role("button", name="Stop", exact=True).wait_for(state="detached")
    visit.settle()
    rows, again = taken(visit, data.last, "The sweep")
    assert len(rows) == len(again) > 3

    page.get_by_role("button", name="Notebook").first.focus()
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    cells = json.loads(Path(waiting.value.path()).read_text(encoding="utf-8"))["cells"]
    assert any("gpt2-xl" in "".join(cell["source"]) for cell in cells)
