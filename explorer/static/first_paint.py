"""What a browser gets with the page itself, before any of it is drawn: the styles, and which scripts it will need at once.

Streamlit sends styles as an element like any other, and loads the script that draws an element when the first such element comes.
Styles then come after what they style, and lists after what is below them: the page jumps, the more the busier the machine. So the
server's HTML holds the styles, and asks for the scripts, from its first byte.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from explorer.static import style

STYLES = ("app", "parts", "overview", "learn")
DARK = "@media (prefers-color-scheme: dark) { html { background: #0f1317; color-scheme: dark; } }"
"""Until Streamlit's theme is there (.streamlit/config.toml) a page is as the browser draws it: a white flash to who reads in the dark."""
NEEDED = ("Html", "BidiComponent", "Selectbox", "Checkbox", "PageLink", "Button", "ButtonGroup", "Slider")
"""The elements that pages are made of and whose scripts Streamlit loads late."""
CHARTED = ("/measured",)
"""Pages whose first picture is a chart of Plotly's. Others do not wait for its script, of megabytes."""
IMPORTED = re.compile(r'(?:from|import)\s*"\./([\w.~-]+\.js)"')
END = b"</body>"
DROPPED = {b"accept-encoding", b"if-none-match", b"if-modified-since"}
"""Headers of a request for a page that are dropped: the page is changed on its way, and its tag is that of Streamlit's file."""
UNSAID = {b"content-length", b"etag", b"last-modified"}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Server = Callable[[Message, Receive, Send], Awaitable[None]]


def markup(scripts: Path, elements: Sequence[str] = NEEDED) -> bytes:
    """Return the styles, and a hint for each script below `scripts` that draws these elements."""
    hints = "".join(f'<link rel="modulepreload" href="./static/js/{name}">' for name in needed(scripts, elements))
    return f"{hints}<style>{DARK}{''.join(map(style, STYLES))}</style>".encode()


def needed(scripts: Path, elements: Sequence[str] = NEEDED) -> list[str]:
    """Return the files that draw these elements, with all that they import; an element that this Streamlit lacks is left out."""
    files: list[str] = []
    waiting = [path.name for name in elements for path in sorted(scripts.glob(f"{name}.*.js"))]
    while waiting:
        name = waiting.pop(0)
        if name not in files and (scripts / name).is_file():
            files.append(name)
            waiting += IMPORTED.findall((scripts / name).read_text(encoding="utf-8"))
    return files


class FirstPaint:
    """Inserts its markup into every page that a browser asks for, and leaves all other answers as they are."""

    def __init__(self, app: Server, scripts: Path) -> None:
        self.app, self.added = app, markup(scripts)
        # Run and not only fetched: it takes the processor as long as the server takes to answer, and would otherwise begin behind that.
        run = "".join(
            f'<script type="module" src="./static/js/{path.name}"></script>'
            for path in scripts.glob("PlotlyChart.*.js")
        )
        self.with_chart = markup(scripts, (*NEEDED, "PlotlyChart")) + run.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """An ASGI application around another one."""
        if not _asks_for_a_page(scope):
            await self.app(scope, receive, send)
            return
        scope = {**scope, "headers": [h for h in scope["headers"] if h[0].lower() not in DROPPED]}
        added = self.with_chart if scope["path"] in CHARTED else self.added
        started: Message | None = None
        body = b""

        async def changed(message: Message) -> None:
            nonlocal started, body
            if message["type"] == "http.response.start" and _is_page(message):
                started = message
            elif started is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    await _send_whole(started, body.replace(END, added + END, 1), send)

        await self.app(scope, receive, changed)


def _asks_for_a_page(scope: Message) -> bool:
    """Tell whether a browser asks for a page: it accepts HTML for nothing else."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    accepted: bytes = dict(scope["headers"]).get(b"accept", b"")
    return b"text/html" in accepted


def _is_page(start: Message) -> bool:
    kind: bytes = dict(start["headers"]).get(b"content-type", b"")
    return kind.startswith(b"text/html") and start["status"] == 200


async def _send_whole(start: Message, body: bytes, send: Send) -> None:
    headers = [h for h in start["headers"] if h[0].lower() not in UNSAID]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
