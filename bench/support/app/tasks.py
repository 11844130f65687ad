"""What a person waits for on the pages: a chosen row, an export, the methods' table, edits one after the other."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from bench.support.app.running_explorer import Place

Timed = tuple[str, list[float], str]
"""(what was measured, milliseconds, the goal in milliseconds)."""


class Clock:
    """Milliseconds of a wait: by the clock, and of the server's processors, which others on the machine do not stretch."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.taken: list[float] = []
        self.worked: list[float] = []

    def start(self) -> None:
        """Begin a wait."""
        self._start, self._worked = time.perf_counter(), self.place.worked_ms()

    def stop(self) -> None:
        """End the wait."""
        self.taken.append(1e3 * (time.perf_counter() - self._start))
        self.worked.append(self.place.worked_ms() - self._worked)

    def figures(self, what: str, goal: str) -> Iterator[Timed]:
        """Return both times as figures."""
        yield what, self.taken, goal
        yield f"{what}: processor time of the server", self.worked, ""


QUIET_LOOKS = 30
"""Looks in a row, a tenth of a second apart, without a spinner: then nothing is planned any more."""
CLICK = """
(row) => new Promise((done) => {
  const inside = (sign) => [...document.querySelectorAll('*')]
    .map((e) => e.shadowRoot?.querySelector(sign)).find(Boolean);
  const graph = () => inside('svg.canvas').querySelector('.world').innerHTML;
  const before = graph();
  const button = inside('.plans').querySelectorAll('tbody button')[row];
  const start = performance.now();
  button.click();
  const look = () => (graph() !== before ? done(performance.now() - start) : requestAnimationFrame(look));
  requestAnimationFrame(look);
})
"""
"""Milliseconds from a click on a row of the first page until the graph is drawn for its plan."""


def clicks(place: Place) -> Iterator[Timed]:
    """A row of the first page is clicked until the graph has its colours: each plan for the first time, and later ones."""
    first, later = Clock(place), Clock(place)
    for _ in range(2):
        with place.page("/") as page:
            # a search in the background may add or drop a row when it ends
            page.wait_for_function("() => !/Proving the best plan|Looking (for|at) /.test(document.body.innerText)")
            for sign in ("g.node", ".plans tbody button"):  # the run may have ended before the browser has drawn them
                page.locator(sign).first.wait_for()
            count = page.locator(".plans tbody button").count()
            for clock in (first, later, later):
                # the row that is chosen at first comes last: a click on it changes nothing before
                for row in (*range(1, count), 0):
                    clock.start()
                    shown = page.evaluate(CLICK, row)
                    page.wait_for_timeout(300)
                    clock.stop()
                    clock.taken[-1] = shown  # by the page's own clock
    yield from later.figures("a row clicked until the graph has the plan's colours, drawn before", "150")
    yield from first.figures("the same, each plan for the first time of a visit", "150")


def exports(place: Place) -> Iterator[Timed]:
    """From the button until the file can be downloaded, of plans that nobody exported before."""
    for tool in ("torchtitan", "fsdp2", "megatron", ""):
        clock = Clock(place)
        for batch in (16, 32):
            with place.page(f"/?tool={tool}&batch={batch}") as page:
                page.locator(".plans tbody button").first.wait_for()
                page.wait_for_timeout(2000)  # nothing else works by now
                clock.start()
                page.locator(".st-key-export button").click()
                page.get_by_role("dialog").get_by_role("button", name=re.compile("^Download ")).first.wait_for()
                clock.stop()
        name = f"to {tool}" if tool else "as a script"
        yield from clock.figures(f"export {name} until its file can be taken", "3 000")


def methods(place: Place) -> Iterator[Timed]:
    """From the button until the plans of all methods stand in the table, of T5-large."""
    clock = Clock(place)
    with place.page("/plans?model=t5-large") as page:
        clock.start()
        page.locator(".st-key-plan_methods button").click()
        page.get_by_text("may repeat work to send less").wait_for()
        quiet = 0
        while quiet < QUIET_LOOKS:  # between two methods the page runs again, and has no spinner
            page.wait_for_timeout(100)
            quiet = 0 if page.locator("[data-testid=stSpinner]").count() else quiet + 1
            if quiet == 1:
                clock.stop()
        clock.taken, clock.worked = clock.taken[-1:], clock.worked[-1:]
    yield from clock.figures("plans of all methods for T5-large, until the last stands", "10 000")


def edits(place: Place) -> Iterator[Timed]:
    """One edit of the batch, then seven in a row without waiting: how long until the table is of the last one."""
    with place.page("/") as page:
        for what, batches in (("one edit of the batch", (20,)), ("seven edits in a row", (24, 28, 36, 40, 44, 52, 60))):
            clock = Clock(place)
            clock.start()
            for batch in batches:
                _edit(page, batch)
            # the edits themselves take as long as the browser types: the wait is from the last one on
            edited = time.perf_counter()
            _wait_for_batch(page, batches[-1])
            clock.stop()
            clock.taken[-1] = 1e3 * (time.perf_counter() - edited)
            yield from clock.figures(f"{what}, then until its plans stand", "")


def _edit(page: Any, batch: int) -> None:
    """Change the batch by its chip, and do not wait for a plan."""
    page.locator("[class*='st-key-chip_batch'] button").first.click()
    # the form of the edit before stands until the run has come past it
    page.get_by_role("textbox", name="Batch of a step").last.fill(str(batch))
    page.locator("[class*='st-key-plan_batch'] button").last.click()
    page.locator("[class*='st-key-chip_batch']", has_text=f"{batch} ×").wait_for()


def _wait_for_batch(page: Any, batch: int) -> None:
    """Wait until the page's run for this batch is at its end."""
    page.wait_for_function("(text) => location.search.includes(text)", arg=f"batch={batch}")
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=120_000)
