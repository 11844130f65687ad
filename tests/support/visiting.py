"""A person at the explorer in a real browser, as the browser tests share it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

LONG_MS = 180_000
"""How long a page may take; loaded machines take long."""
HERE = re.compile(r"^(?:(?:https?|wss?)://(?:127\.0\.0\.1|localhost)[:/]|data:|blob:|about:)")
# On a deep link Streamlit looks for its endpoints below the page's path first.
PROBE = re.compile(r"/_stcore/(?:health|host-config)")


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

    def _said(self, message: object) -> None:
        kind, text = getattr(message, "type", ""), getattr(message, "text", "")
        where = (getattr(message, "location", None) or {}).get("url", "")
        if kind == "error" and not PROBE.search(where):
            self.errors.append(f"{text} ({where})")

    def open(self, path: str = "/") -> None:
        self.page.goto(self.base + path)
        self.settle()

    def settle(self) -> None:
        """Wait until the sentence stands and nothing runs any more."""
        self.page.wait_for_selector(".st-key-sentence, .st-key-lesson_head", timeout=LONG_MS)
        self.page.wait_for_timeout(300)
        self.page.wait_for_selector("[data-testid=stStatusWidget]", state="detached", timeout=LONG_MS)
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=LONG_MS)

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
