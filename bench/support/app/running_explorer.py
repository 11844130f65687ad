"""A running explorer and a browser, for `bench.pages`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Place:
    """A running explorer and a browser."""

    browser: Any
    url: str
    process: int

    def worked_ms(self) -> float:
        """Return the processor time of the server and of the processes that it waited for, in milliseconds.

        Others on the machine stretch wall time, but not this.
        """
        fields = Path(f"/proc/{self.process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        # utime, stime, cutime and cstime are fields 14 to 17 of proc(5); the text after the name begins at field 3
        return 1e3 * sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def page(self, path: str) -> Iterator[Any]:
        """A page of the explorer, settled."""
        context = self.browser.new_context(viewport={"width": 1440, "height": 1000})
        page = context.new_page()
        page.set_default_timeout(240_000)
        page.goto(self.url + path)
        settle(page)
        yield page
        context.close()


def settle(page: Any) -> None:
    page.wait_for_selector(".st-key-sentence, .st-key-lesson_head")
    page.wait_for_timeout(300)
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")


def frames(page: Any, act: Callable[[], None], for_ms: int) -> list[float]:
    """Milliseconds between frames while `act` runs."""
    handle = page.evaluate_handle("() => ({times: [], on: true})")
    page.evaluate(
        "(s) => { let last = performance.now(); const tick = (now) => { s.times.push(now - last); last = now;"
        " if (s.on) requestAnimationFrame(tick); }; requestAnimationFrame(tick); }",
        handle,
    )
    act()
    page.wait_for_timeout(for_ms)
    return list(page.evaluate("(s) => { s.on = false; return s.times.slice(1); }", handle))


@contextmanager
def explorer() -> Iterator[tuple[str, int]]:
    """A running explorer of this working tree: its address and its process."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", "streamlit_app.py", "--server.port", str(port)]
    command += ["--server.address", "127.0.0.1", "--server.fileWatcherType", "none"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(20)
