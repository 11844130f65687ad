"""What the tests share: a hypothesis profile, a browser, and a running explorer."""

import gc
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import settings

from tests.support.ports import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ViewportSize

    from tests.support.visiting import Visit

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",
]
"""A page of its own process would compile the explorer's 9 MB of scripts again: half of what it takes to open a page."""
WINDOW: "ViewportSize" = {"width": 1440, "height": 1000}
START_S = 60
PATIENCE_MS = 90_000
"""How long a browser test waits for what must come: shared machines stall now and then."""

# Threads sum in another order: without make, too, numbers must not depend on how many cores there are. Torch is not imported yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# shared machines stall now and then, and a red run must be repeatable
settings.register_profile("shared", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("shared")


gc.set_threshold(10_000, 20, 20)  # tests make and keep many values, few of them in cycles


OPENED = pytest.StashKey[ExitStack]()
BROWSER: "pytest.StashKey[Browser]" = pytest.StashKey()
WINDOW_OF: "pytest.StashKey[tuple[Browser | None, BrowserContext]]" = pytest.StashKey()
WANTED = pytest.StashKey[bool]()


LONG_FIRST = (
    "pages/test_accessibility",
    "pages/test_browser",
    "explorer/test_graph_diff",
    "pages",
    "exporters",
    "runtime",
    "verification",
    "search",
    "planning",
    "models",
    "explorer",
    "cli",
    "test_library.py",
    "test_docs.py",
    "corpus",
    "ops",
)
"""Beginnings of paths below `tests/` whose files take long. Files are dealt to the workers in this order, so that none ends alone with a long
one, and a browser goes from one file to the next."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first; within a file nothing changes. Mark what needs a browser, and leave `slow` on those cases only that it names."""
    unmet: dict[str, set[str]] = {}
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        for mark in [m for m in item.own_markers if m.name == "slow" and m.kwargs]:
            ids = mark.kwargs.get("only") or mark.kwargs["but"]
            case = item.callspec.id  # type: ignore[attr-defined]
            unmet.setdefault(item.nodeid.partition("[")[0], set(ids)).discard(case)
            if (case in ids) != ("only" in mark.kwargs):
                item.own_markers.remove(mark)
    unknown = [f"{test}: {', '.join(sorted(ids))}" for test, ids in unmet.items() if ids]
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("no such case, but its mark `slow` names it: " + "; ".join(unknown))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Place of a test's file among those that take long; the others are behind them."""
    path = item.path.relative_to(ROOT / "tests").as_posix()
    return next((i for i, start in enumerate(LONG_FIRST) if path.startswith(start)), len(LONG_FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Remember whether the next test wants the browser, too."""
    item.session.stash[WANTED] = "chromium" in getattr(nextitem, "fixturenames", ())


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What the modules before have left is not walked again whenever garbage is collected: that took a twelfth of all processor time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _warm_captures() -> Iterator[None]:
    """A user's file is captured in a fork of a process that has imported torch. A new one is started in `models/test_sandbox.py`."""
    from planner_core.models.sandbox import process
    from tests.support.warm_sandbox import SUBPROCESS

    with mock.patch.object(process, "subprocess", SUBPROCESS):
        yield


@pytest.fixture(scope="module")
def chromium(request: pytest.FixtureRequest) -> Iterator["Browser"]:
    """A headless browser. It stays for the next module that wants it, and is closed before one that does not: playwright keeps an event
    loop running in this thread meanwhile."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    stash = request.session.stash
    if OPENED not in stash:
        found = filter(None, (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")))
        stash[OPENED] = stack = ExitStack()
        playwright = stack.enter_context(sync_playwright())
        stash[BROWSER] = playwright.chromium.launch(executable_path=next(found, None), args=FLAGS)
        stack.callback(stash[BROWSER].close)
    yield stash[BROWSER]
    if not stash[WANTED]:
        stash[OPENED].close()
        del stash[OPENED]


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of an explorer that runs for the whole session."""
    log = tmp_path_factory.mktemp("app") / "log"
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", "streamlit_app.py", "--server.port", str(port)]
    command += ["--server.address", "127.0.0.1", "--server.fileWatcherType", "none"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def window(chromium: "Browser", app: str, request: pytest.FixtureRequest) -> "BrowserContext":
    """The browser's window, which has read the explorer's scripts once for all modules; each test has a page of its own in it.

    Its first page shows one word of the explorer and stays, so that the process of the explorer's pages stays.
    """
    stash = request.session.stash
    if stash.get(WINDOW_OF, (None, None))[0] is not chromium:
        stash[WINDOW_OF] = chromium, chromium.new_context(viewport=WINDOW, accept_downloads=True)
        stash[WINDOW_OF][1].new_page().goto(f"{app}/_stcore/health")
    return stash[WINDOW_OF][1]


@pytest.fixture
def visit(window: "BrowserContext", app: str) -> Iterator["Visit"]:
    """A person with a fresh page and nothing stored, who must have met no error and asked no other host for anything."""
    from tests.support.visiting import Visit

    page = window.new_page()
    page.set_default_timeout(PATIENCE_MS)
    person = Visit(page, app)
    yield person
    forget(window)
    assert person.abroad == [], "a request left this machine"
    assert person.errors == [], "the browser's console holds errors"


def forget(window: "BrowserContext") -> None:
    """Close the pages of a window but its first, and leave nothing that they stored but the files in its cache."""
    for page in window.pages[1:]:
        if page.url.startswith("http"):
            page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        page.close()
    window.clear_cookies()
    window.clear_permissions()


def wait_for_health(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return once the explorer answers; fail with its log if it ends or takes too long."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    pytest.fail(f"the explorer did not start (exit status {process.poll()}):\n{log.read_text()[-3000:]}")
