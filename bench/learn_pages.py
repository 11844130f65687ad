"""How long each interaction of each lesson takes in a browser, from the event to the last change of the page.

    python -m bench.learn_pages              # every lesson, then docs/LEARN_TIMES.md
    python -m bench.learn_pages 4 13         # only these lessons; the others keep their rows
    python -m bench.learn_pages --rounds 1   # one walk each instead of three
    python -m bench.learn_pages --table      # docs/LEARN_TIMES.md alone

In the page a capture listener notes `performance.now` at the event (pointer up or key down), an observer at every change
of the page, and the next frame after it. An interaction ends with the frame after the last change; it has ended when
nothing changed for QUIET_MS and Streamlit runs nothing. Before each part the script waits, up to PATIENCE_S, until others
leave most of the machine idle, and notes how busy it was. Beside the time stands the CPU time that the explorer and the
browser's renderer took: what other work cannot stretch. One explorer process, already warm as for a class that is at
work; each lesson is opened and given READ_S to be read, then every control, step, answer and reveal is used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.support.app.running_explorer import explorer  # noqa: E402
from explorer.learn.learner import Learner  # noqa: E402
from explorer.learn.lesson import Lesson, Question  # noqa: E402
from explorer.learn.lessons import LESSONS  # noqa: E402
from planner_core.planning import Request  # noqa: E402

ROWS = ROOT / "bench" / "support" / "results" / "learn_pages.jsonl"
TABLE = ROOT / "docs" / "LEARN_TIMES.md"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ROUNDS = 3
READ_S, QUIET_MS, LIMIT_MS = 3.0, 400, 300
PATIENCE_S, BUSY = 15, 0.5
SETTLED = "[data-testid=stApp][data-test-script-state=notRunning]"
WATCH = """() => {
  window.seen = { start: 0, end: 0 };
  const begin = (e) => { if (e.isTrusted) { seen.start = performance.now(); seen.end = 0; } };
  for (const name of ["pointerup", "keydown"]) window.addEventListener(name, begin, true);
  const known = new WeakSet();
  const observer = new MutationObserver(() => { requestAnimationFrame(() => { seen.end = performance.now(); }); look(); });
  const what = { subtree: true, childList: true, characterData: true, attributes: true,
    attributeFilter: ["disabled", "aria-valuetext", "aria-checked", "aria-expanded", "checked", "aria-label"] };
  const look = () => {  // pictures live in a shadow root
    const main = document.querySelector("[data-testid=stMain]");
    const roots = [...main.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean);
    for (const root of [main, ...roots]) if (!known.has(root)) { known.add(root); observer.observe(root, what); }
  };
  look();
}"""
DONE = f"""() => {{
  const quiet = performance.now() - Math.max(seen.start, seen.end) > (seen.end ? {QUIET_MS} : 2500);
  return seen.start && quiet && document.querySelector("{SETTLED}");
}}"""
"""Nothing changed for a while; an event that changes nothing at all is given longer, for a busy server may begin late."""


class Player:
    """A learner in a browser who notes how long everything takes."""

    def __init__(self, page: Any, lesson: Lesson, learner: Learner, server: int) -> None:
        self.page, self.lesson, self.learner = page, lesson, learner
        self.pids = [server, *renderers()]
        self.rows: list[dict[str, Any]] = []

    def timed(self, kind: str, what: str, act: Any) -> None:
        """Do it, wait until the page stands still, keep the milliseconds."""
        self.page.evaluate("seen.start = seen.end = 0")
        before = cpu_s(self.pids)
        act()
        self.page.wait_for_function(DONE, timeout=60_000, polling=100)
        work = round(1e3 * (cpu_s(self.pids) - before), 1)
        seen = self.page.evaluate("seen")
        ms = round(max(0.0, seen["end"] - seen["start"]), 1) if seen["end"] else 0.0
        self.rows.append({"lesson": self.lesson.number, "kind": kind, "what": what, "ms": ms, "cpu_ms": work})

    def button(self, key: str) -> Any:
        return self.page.locator(f".st-key-{key} button").first

    def steps(self) -> None:
        """Next to the end of what is open, then back, then by the scrubber's keys."""
        n = 0
        while self.button("w_next").is_enabled():
            n += 1
            self.timed("step forward", f"to step {n + 1}", self.button("w_next").click)
        for k in range(n, 0, -1):
            self.timed("step back", f"to step {k}", self.button("w_back").click)

    def scrub(self) -> None:
        """One step each way with the keys."""
        thumb = self.page.locator(".st-key-scrubber input[type=range]")
        thumb.focus()
        for key in ("ArrowRight", "ArrowLeft"):
            self.timed("scrubber", key, lambda key=key: self.page.keyboard.press(key))

    def to_question(self) -> None:
        """Next, untimed, as far as it goes."""
        while self.button("w_next").is_enabled():
            self.timed("", "", self.button("w_next").click)
            self.rows.pop()

    def walk(self) -> None:
        """Forward and back, a wrong answer, the right one, and the rest of the steps."""
        self.place()
        self.steps()
        self.scrub()
        self.to_question()
        question = self.lesson.question(self.learner, self.lesson.defaults())
        wrong = (question.answer + 1) % len(question.options)
        self.answer("wrong answer", question, wrong)
        self.answer("right answer", question, question.answer)
        self.steps()
        self.scrub()

    def answer(self, kind: str, question: Question, index: int) -> None:
        """A number typed, or an option chosen, both given before: what is timed begins at Enter or at the button."""
        asked = self.page.locator(".st-key-question")
        if question.values:
            field = asked.get_by_role("textbox")
            field.fill(f"{question.values[index]:.6g}")
            self.timed(kind, question.options[index], lambda: field.press("Enter"))
        else:
            asked.locator("label:has(input)").nth(index).click()
            self.timed(kind, question.options[index], asked.get_by_role("button", name="Answer", exact=True).click)

    def place(self) -> None:
        """What is placed in the picture: each matrix by a key to its next cut, and back."""
        for control in (c for c in self.lesson.controls if c.kind == "placed"):
            for key in (
                ("ArrowUp", "ArrowDown") if control.options.index(control.default) < 2 else ("ArrowDown", "ArrowUp")
            ):
                slot = self.page.get_by_role("spinbutton", name=control.label, exact=True)
                self.timed("placed", control.label, lambda key=key, slot=slot: slot.press(key))

    def reveal(self) -> None:
        """The rest without an answer."""
        self.to_question()
        self.timed("reveal", "show the rest", self.button("w_show").click)

    def controls(self) -> None:
        """Every option of every control, the last step in view; a button that draws begins anew."""
        self.to_question()
        self.button("w_show").click()
        self.page.wait_for_timeout(1000)
        self.to_question()
        for c in (c for c in self.lesson.controls if c.kind != "placed"):
            at = self.page.locator(f".st-key-w_{self.lesson.number}_{c.key}")
            if c.kind == "draw":
                for _ in range(3):
                    self.timed("draw", c.label, at.locator("button").first.click)
            elif c.kind == "slider":
                at.locator("input[type=range]").focus()
                here = c.options.index(c.default)
                turns = ["ArrowRight"] * (len(c.options) - 1 - here) + ["ArrowLeft"] * (len(c.options) - 1)
                for key in turns:
                    self.timed("slider", c.label, lambda key=key: self.page.keyboard.press(key))
            else:
                for option in (*(o for o in c.options if o != c.default), c.default):
                    self.choose(at, c, option)

    def onward(self) -> None:
        """Another lesson by the rail, and back again."""
        links = self.page.get_by_role("navigation", name="Lessons").get_by_role("link")
        other = self.lesson.number % len(LESSONS)
        self.timed("to another lesson", LESSONS[other].title, links.nth(other).click)
        self.timed("to another lesson", self.lesson.title, links.nth(self.lesson.number - 1).click)

    def choose(self, at: Any, c: Any, option: Any) -> None:
        """A segmented control, or a list that opens first."""
        if len(c.options) < 4:
            self.timed("choice", c.label, at.get_by_role("radio", name=c.name(option), exact=True).click)
            return
        at.locator("[role=combobox], input, button").first.click()
        entry = self.page.get_by_role("option", name=c.name(option), exact=True)
        entry.wait_for()
        self.timed("list", c.label, entry.click)


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that processes have taken so far, ended threads included (Linux: a process's CPU clock by its id)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def renderers() -> list[int]:
    """The browser's processes that run pages, of this script's own browser."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(entry.name)] = (entry / "cmdline").read_bytes()
    found = []
    for pid in (p for p, name in names.items() if b"--type=renderer" in name):
        above = pid
        while above > 1 and above != os.getpid():
            above = parents.get(above, 0)
        found += [pid] if above == os.getpid() else []
    return found


def play(browser: Any, where: tuple[str, int], lesson: Lesson, learner: Learner) -> list[dict[str, Any]]:
    """All interactions of a lesson: walked through, revealed, and every control from its first step."""
    rows: list[dict[str, Any]] = []
    url, server = where
    for part in (Player.walk, Player.reveal, Player.controls, Player.onward):
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"{url}/learn?lesson={lesson.key}")
        page.wait_for_selector(".lesson svg, .lesson table", timeout=60_000)
        page.wait_for_selector(SETTLED, timeout=60_000)
        page.wait_for_timeout(READ_S * 1000)
        page.evaluate(WATCH)
        player = Player(page, lesson, learner, server)
        busy = wait_for_quiet()
        part(player)
        rows += [{**r, "busy": round(busy, 2)} for r in player.rows]
        page.close()
    return rows


def wait_for_quiet() -> float:
    """Share of the machine's cores that is busy, once it is small or patience is at its end."""
    end, share = time.monotonic() + PATIENCE_S, 1.0
    while time.monotonic() < end:
        before = _ticks()
        time.sleep(1.5)
        busy, idle = (b - a for a, b in zip(before, _ticks(), strict=True))
        share = busy / max(1, busy + idle)
        if share <= BUSY:
            break
    return float(share)


def _ticks() -> tuple[int, int]:
    found = [int(x) for x in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    idle = found[3] + found[4]
    return sum(found) - idle, idle


def measure(numbers: set[int], rounds: int) -> None:
    """`rounds` walks through each lesson; the rows of these lessons are replaced."""
    from playwright.sync_api import sync_playwright

    found = [r for r in read_rows() if r["lesson"] not in numbers]
    learner, program = Learner(Request("llama-3-8b")), shutil.which("chromium") or shutil.which("google-chrome")
    with explorer() as where, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        for k, lesson in itertools.product(range(rounds), (x for x in LESSONS if x.number in numbers)):
            rows = play(browser, where, lesson, learner)
            found += [{**r, "round": k, "day": time.strftime("%Y-%m-%d")} for r in rows]
            lines = (
                json.dumps(r, ensure_ascii=False) + "\n" for r in sorted(found, key=lambda r: (r["lesson"], r["round"]))
            )
            ROWS.write_text("".join(lines), encoding="utf-8")
            middle, most = statistics.median(r["ms"] for r in rows), max(r["ms"] for r in rows)
            print(
                f"round {k}, lesson {lesson.number}: {rows[-1]['busy']:.0%} busy, median {middle:.0f} ms, slowest {most:.0f} ms",
                flush=True,
            )
        browser.close()


def read_rows() -> list[dict[str, Any]]:
    """What was measured so far."""
    return [json.loads(x) for x in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Time and CPU time per lesson and kind of interaction, and those beyond the limit."""
    kinds, busy = list(dict.fromkeys(r["kind"] for r in rows)), [r["busy"] for r in rows]
    lines = [
        "# Learn: time of each interaction",
        "",
        "Written by `bench/learn_pages.py` in Chromium. First the time from the event to the frame after the last change of the page, "
        "then the CPU time of explorer and renderer together, both in ms: medians over all interactions of the kind.",
        "",
        f"{rows[-1]['day']}, {platform.machine()}, {os.cpu_count()} cores shared with other work: {min(busy):.0%} to {max(busy):.0%} busy "
        f"(median {statistics.median(busy):.0%}) before the parts, {len({r['round'] for r in rows})} rounds, {len(rows)} interactions.",
        "",
        "| lesson | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for lesson in LESSONS:
        mine = [r for r in rows if r["lesson"] == lesson.number]
        cells = [_cell([r for r in mine if r["kind"] == k]) for k in kinds]
        lines.append(f"| {lesson.number}. {lesson.title} | " + " | ".join(cells) + " |")
    for key, name in (("ms", "time"), ("cpu_ms", "CPU time")):
        one = medians(rows, key)
        slow = {k: v for k, v in one.items() if v > LIMIT_MS}
        lines += [
            "",
            f"Median of the {name}: {statistics.median(r[key] for r in rows):.0f} ms, 95 % are below "
            f"{statistics.quantiles([r[key] for r in rows], n=20)[-1]:.0f} ms. Above {LIMIT_MS} ms: {len(slow)} of {len(one)} interactions.",
        ]
        lines += [
            f"- lesson {k[0]}, {k[1]}, {k[2]}: {v:.0f} ms" for k, v in sorted(slow.items(), key=lambda x: -x[1])[:20]
        ]
    return "\n".join(lines) + "\n"


def medians(rows: list[dict[str, Any]], key: str) -> dict[tuple[Any, ...], float]:
    """Median over the rounds of each single interaction: the k-th of a round is the same one in every round."""
    found: dict[tuple[Any, ...], list[float]] = {}
    place: dict[tuple[int, int], int] = {}
    for r in rows:
        k = place[r["lesson"], r["round"]] = place.get((r["lesson"], r["round"]), -1) + 1
        found.setdefault((r["lesson"], r["kind"], r["what"], k), []).append(r[key])
    return {k: statistics.median(v) for k, v in found.items()}


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    return " / ".join(f"{statistics.median(r[key] for r in rows):.0f}" for key in ("ms", "cpu_ms"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lessons", nargs="*", type=int)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        measure(set(args.lessons or range(1, len(LESSONS) + 1)), args.rounds)
    TABLE.write_text(table(read_rows()), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
