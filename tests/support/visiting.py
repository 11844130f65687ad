"""A person at the explorer in a real browser, as the browser tests share it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, WebSocket, WebSocketRoute

LONG_MS = 180_000
"""How long a page may take; loaded machines take long."""
ENDED = (ForwardMsg.FINISHED_SUCCESSFULLY, ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY)
HERE = re.compile(r"^(?:(?:https?|wss?)://(?:127\.0\.0\.1|localhost)[:/]|data:|blob:|about:|file:)")
# On a deep link Streamlit looks for its endpoints below the page's path first.
PROBE = re.compile(r"/_stcore/(?:health|host-config)")

# Streamlit scrolls the page in an element of its own, so that the document is never wider than the window.
WINDOWS = "html, [data-testid=stMain], [role=dialog]"


def ends_a_run(frame: bytes | str) -> bool:
    """Whether a message of Streamlit says that a run has ended that no other interrupted."""
    message = ForwardMsg.FromString(frame) if isinstance(frame, bytes) else None
    return bool(message and message.WhichOneof("type") == "script_finished" and message.script_finished in ENDED)


class SlowServer:
    """Between a page that is not open yet and its server: holds back what the server says, until it is released."""

    def __init__(self, page: Page) -> None:
        self.ended = False
        self._holds: Callable[[bytes | str], bool] = lambda frame: False
        self._held: list[bytes | str] = []
        page.route_web_socket(re.compile("_stcore/stream"), self._stand_between)

    def _stand_between(self, browser: WebSocketRoute) -> None:
        self._browser = browser
        browser.connect_to_server().on_message(self._down)

    def _down(self, frame: bytes | str) -> None:
        if self._held or self._holds(frame):
            self._held.append(frame)
            self.ended = self.ended or ends_a_run(frame)
        else:
            self._browser.send(frame)

    def hold_all(self) -> None:
        """Hold back everything; `ended` turns true with the end of the next run."""
        self._holds = lambda frame: True

    def hold_end(self) -> None:
        """Hold back the end of the next run, and what follows."""
        self._holds = ends_a_run

    def release(self) -> None:
        """Pass on what is held, all at once, and from now on everything."""
        self._holds = lambda frame: False
        while self._held:
            self._browser.send(self._held.pop(0))


class Visit:
    """A page that keeps what it asked for and what went wrong."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base = page, base
        self.abroad: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda r: None if HERE.match(r.url) else self.abroad.append(r.url))
        page.on("websocket", lambda w: None if HERE.match(w.url) else self.abroad.append(w.url))
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("console", self._said)
        self._unanswered = False
        self.num_runs = 0
        page.on("websocket", self._listen)

    def _said(self, message: object) -> None:
        kind, text = getattr(message, "type", ""), getattr(message, "text", "")
        where = (getattr(message, "location", None) or {}).get("url", "")
        if kind == "error" and not PROBE.search(where):
            self.errors.append(f"{text} ({where})")

    def _listen(self, socket: WebSocket) -> None:
        """Note when a run of the page is asked for, and when one has ended that no other interrupted: Streamlit's own messages."""
        self._unanswered = True  # the first run begins by itself

        def sent(frame: bytes | str) -> None:
            if isinstance(frame, bytes) and BackMsg.FromString(frame).WhichOneof("type") == "rerun_script":
                self._unanswered = True

        def received(frame: bytes | str) -> None:
            if ends_a_run(frame):
                self._unanswered = False
                self.num_runs += 1

        socket.on("framesent", sent)
        socket.on("framereceived", received)

    def open(self, path: str = "/") -> None:
        self.page.goto(self.base + path)
        self.settle()

    def settle(self) -> None:
        """Wait until every run that was asked for has ended, and the browser has drawn it.

        A moment without a running script is not enough: on a loaded machine it is also there between a click and the run that it starts,
        and what is clicked then is replaced under the pointer.
        """
        self.page.wait_for_selector(".st-key-sentence, .st-key-lesson_head, .st-key-run_filters", timeout=LONG_MS)
        self.page.wait_for_timeout(300)  # a click asks for its run by then
        end = time.monotonic() + LONG_MS / 1e3
        while self._unanswered and time.monotonic() < end:
            self.page.wait_for_timeout(50)
        self.page.wait_for_selector("[data-testid=stStatusWidget]", state="detached", timeout=LONG_MS)
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=LONG_MS)
        self.page.wait_for_selector("[data-testid=stMain] [data-stale=true]", state="detached", timeout=LONG_MS)

    def overflow(self) -> int:
        """Return the pixels by which something is wider than the window: the document, the page that scrolls in it, or a dialog."""
        return int(
            self.page.evaluate(
                f"() => Math.max(...[...document.querySelectorAll('{WINDOWS}')].map((e) => e.scrollWidth - e.clientWidth))"
            )
        )

    def turn(self, title: str) -> None:
        self.page.get_by_role("link", name=title, exact=True).click()
        self.page.wait_for_url(re.compile(title.lower().replace(" ", "")))
        self.settle()

    def click(self, target: Locator) -> None:
        """Click well inside the window: a list that opens while the page still scrolls under it closes again."""
        self.settle()
        target.evaluate("e => e.scrollIntoView({block: 'center', behavior: 'instant'})")
        self.settle()
        target.click()

    def node(self, node_id: str) -> Locator:
        return self.page.locator(f'g.node[data-id="{node_id}"]')

    def asks(self, what: Callable[[str], bool]) -> None:
        """Wait until the address asks for `what`: it may come to the browser a moment after the page."""
        self.page.wait_for_url(lambda url: what(urlsplit(url).query), wait_until="commit")

    @property
    def query(self) -> str:
        return urlsplit(self.page.url).query
