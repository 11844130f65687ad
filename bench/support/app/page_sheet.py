"""Pictures of every page and state of the explorer, and the sheet that shows them: docs/SHEET.md.

    python -m bench.support.app.page_sheet            # all; some minutes
    python -m bench.support.app.page_sheet learn-11   # only states whose name begins so; the sheet lists all that lie there

To have another state photographed, give it a line in STATES. A picture is halved and kept as JPEG, so that all together stay below
MAX_PICTURE_BYTES.
"""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.app.running_explorer import explorer

ROOT = Path(__file__).resolve().parents[3]
SHEET, PICTURES = ROOT / "docs" / "SHEET.md", ROOT / "docs" / "images" / "sheet"
MAX_PICTURE_BYTES = 4_000_000
QUALITY = 62
LOOKS = {
    "1440": (1440, 1000, "light"),
    "1440-dark": (1440, 1000, "dark"),
    "800": (800, 1000, "light"),
    "400": (400, 900, "light"),
}
READY = "[data-testid=stApp][data-test-script-state=notRunning]"
WAIT_MS, DRAWN_MS = 150_000, 1500


@dataclass(frozen=True, slots=True)
class State:
    """A page's address, what it shows, and in which looks; `press`: words that are clicked in turn, `to`: words that are scrolled to,
    `scrub`: how far a moving picture is moved."""

    name: str
    path: str
    shows: str
    looks: tuple[str, ...] = ("1440",)
    press: tuple[str, ...] = ()
    to: str = ""
    scrub: float | None = None


ALL = tuple(LOOKS)
STATES = (
    State("overview", "/", "the folded graph, the plans beside it, the way out", ALL),
    State(
        "overview-node",
        "/?plan=megatron-lm-sequence-parallel&node=LlamaDecoderLayer:self_attn.q_proj/linear",
        "another plan and a weight, in the colours of its GPUs",
        ("1440", "1440-dark", "400"),
    ),
    State("overview-t5", "/?model=t5-large", "two stacks"),
    State("overview-70b-64", "/?model=llama-3-70b&cluster=8x8-h100&tool=torchtitan", "70B on 64 GPUs for torchtitan"),
    State(
        "overview-no-fit",
        "/?model=llama-3-70b&cluster=1x8-h100&recompute=none&zero=0",
        "nothing fits, and what would",
        ("1440", "400"),
    ),
    State("overview-own-setup", "/?setup=dp=2,fsdp=8,recompute=full", "against what is run now", ("1440", "400")),
    State("overview-bad-link", "/?model=mamba9&cluster=moon", "a link that asks for what is not there"),
    State("overview-cluster", "/", "the cluster's fields", ("1440", "1440-dark"), press=("2 nodes × 8 H100",)),
    State("overview-export", "/", "the export", ("1440", "1440-dark"), press=("Export as a script",)),
    State("plans", "/plans", "plans charted and in a table", ALL),
    State("plans-block", "/plans?tab=block&candidate=5", "the candidates of a block", ("1440", "1440-dark")),
    State("plans-weight", "/plans?tab=weight", "a weight changed by hand"),
    State("compare", "/compare", "plans side by side", ALL),
    State(
        "stages",
        "/?model=bert-large&setup=dp=4,pp=4,vp=2&plan=our-current-setup",
        "pipeline stages: the cuts in the graph, the bubble",
        ("1440", "1440-dark"),
    ),
    State(
        "stages-compare",
        "/compare?model=bert-large&setup=dp=4,pp=4,vp=2&plan=our-current-setup",
        "a row for each rank of a pipeline",
    ),
    State("whatif", "/whatif?whatif=batch:32", "one change, a sweep, a worse machine", ALL),
    State("whatif-sweep", "/whatif?sweep=batch", "a sweep over the batch", ("1440", "400"), to="Sweep"),
    State("measured", "/measured", "published runs, predicted and measured", ALL),
    State("learn-contents", "/learn", "the contents of the course", ("1440", "400")),
    State("learn-01", "/learn?lesson=memory", "a run that stops for lack of memory", ALL),
    State(
        "learn-25", "/learn?lesson=pipeline&step=4&with=m:8", "the learner's model in pipeline stages", ("1440", "400")
    ),
    State("learn-01-fits", "/learn?with=gpus:2,recompute:full", "the same, made to fit"),
    State("learn-04", "/learn?lesson=collectives&step=8", "a ring in motion", ("1440", "1440-dark", "400"), scrub=2.6),
    State("learn-12", "/learn?lesson=experts&step=3", "tokens on their way to experts", scrub=0.6),
    State("learn-13", "/learn?lesson=choose", "a block built by dragging cuts", ALL),
    State("learn-14", "/learn?lesson=pays&step=6", "the map of what pays", ("1440", "400")),
    State("learn-19", "/learn?lesson=measured", "published runs and one constant", ("1440", "1440-dark")),
    State("learn-09", "/learn?lesson=algorithms&step=2", "a tree in motion", scrub=1.6),
    State("learn-11", "/learn?lesson=debug&step=3", "a fault to be found", ("1440", "400")),
    State("learn-24", "/learn?lesson=planners&step=3", "how planners think: two copies", ("1440", "1440-dark", "400")),
)


def photograph(browser: Any, url: str, state: State, look: str) -> bytes:
    """Return the state as JPEG, half as wide as the page."""
    from PIL import Image

    width, height, scheme = LOOKS[look]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="no-preference"
    )
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url + state.path)
    page.wait_for_selector(".st-key-sentence, .st-key-lesson_head, h3")
    page.wait_for_timeout(DRAWN_MS)
    page.wait_for_selector(READY)
    for name in state.press:
        page.get_by_text(name, exact=True).first.click()
        page.wait_for_timeout(DRAWN_MS)
        page.wait_for_selector(READY)
    if state.scrub is not None:
        set_to = "(e, to) => { e.value = String(to); e.dispatchEvent(new Event('input')); }"
        page.get_by_role("slider", name="Place in the motion").evaluate(set_to, state.scrub)
    if state.to:
        page.get_by_text(state.to).first.evaluate("e => e.scrollIntoView({block: 'start', behavior: 'instant'})")
    page.wait_for_timeout(DRAWN_MS)
    whole = Image.open(io.BytesIO(page.screenshot(timeout=WAIT_MS))).convert("RGB")
    context.close()
    small = whole.resize(
        (whole.width // 2, whole.height // 2) if width > 400 else (300, 300 * whole.height // whole.width),
        Image.Resampling.LANCZOS,
    )
    small.save(out := io.BytesIO(), "JPEG", quality=QUALITY, optimize=True)
    return out.getvalue()


def sheet() -> str:
    """Return the page that shows all pictures that lie there."""
    lines = [
        "# Every page and state, seen",
        "",
        "Made by `python -m bench.support.app.page_sheet` in headless Chromium: 1440 pixels wide, light and dark, 800 and 400. Pictures are halved.",
        "Llama-3-8B on two nodes of eight H100 unless an address says otherwise.",
        "",
    ]
    for state in STATES:
        found = [look for look in state.looks if file_of(state, look).is_file()]
        if found:
            lines += [f"## {state.name}: {state.shows}", "", f"`{state.path}`", ""]
            lines += [
                " ".join(f"![{state.name}, {look}](images/sheet/{file_of(state, look).name})" for look in found),
                "",
            ]
    return "\n".join(lines)


def file_of(state: State, look: str) -> Path:
    """Where a picture lies."""
    return PICTURES / f"{state.name}-{look}.jpg"


def main(wanted: list[str]) -> None:
    """Photograph, write the sheet, and say how large all is."""
    from playwright.sync_api import Error, sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    with explorer() as (url, _), sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for state in STATES:
            for look in state.looks if not wanted or any(state.name.startswith(w) for w in wanted) else ():
                try:
                    file_of(state, look).write_bytes(photograph(browser, url, state, look))
                    print(state.name, look, flush=True)
                except Error as error:  # the others are worth having all the same
                    print(state.name, look, str(error).splitlines()[0], flush=True)
        browser.close()
    SHEET.write_text(sheet(), encoding="utf-8")
    size = sum(p.stat().st_size for p in PICTURES.glob("*.jpg"))
    print(f"{size / 1e6:.1f} MB")
    if size > MAX_PICTURE_BYTES:
        raise SystemExit(f"the pictures take {size} bytes, more than {MAX_PICTURE_BYTES}")


if __name__ == "__main__":
    main(sys.argv[1:])
