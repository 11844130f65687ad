"""The server's page holds the styles from its first byte, so that nothing is drawn without them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import streamlit

from explorer.static import style
from explorer.static.first_paint import IMPORTED, NEEDED, STYLES, FirstPaint, Message, Receive, Send, needed

SCRIPTS = Path(streamlit.__file__).parent / "static" / "static" / "js"
PAGE = (SCRIPTS.parents[1] / "index.html").read_bytes()


def asked(path: str, headers: dict[bytes, bytes], kind: bytes, body: bytes) -> tuple[dict[bytes, bytes], bytes, Any]:
    """Headers and body that a browser gets, and the headers that the server behind was asked with."""
    seen: list[Any] = []
    got: list[Message] = []

    async def server(scope: Message, receive: Receive, send: Send) -> None:
        seen.append(dict(scope["headers"]))
        start = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"etag", b"streamlit's")]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        await send({"type": "http.response.body", "body": body[:100], "more_body": True})
        await send({"type": "http.response.body", "body": body[100:]})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        got.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers.items())}
    asyncio.run(FirstPaint(server, SCRIPTS)(scope, receive, send))
    return dict(got[0]["headers"]), b"".join(m["body"] for m in got[1:]), seen[0]


def test_a_page_comes_with_its_styles_and_is_asked_for_whole() -> None:
    asking = {b"accept": b"text/html,*/*", b"accept-encoding": b"gzip", b"if-none-match": b"streamlit's"}
    headers, body, seen = asked("/measured", asking, b"text/html; charset=utf-8", PAGE)
    for name in STYLES:
        assert style(name).encode() in body
    assert body.index(b"</style>") > body.index(b'<div id="root">'), (
        "styles of Streamlit's that stand later would win over ours"
    )
    assert headers[b"content-length"] == str(len(body)).encode()
    assert b"etag" not in headers, "a page with older styles would be taken from the browser's cache"
    assert set(seen) == {b"accept"}
    assert re.search(rb'<script type="module" src="./static/js/PlotlyChart\.[\w-]+\.js">', body), (
        "its first picture is a chart"
    )
    for path in ("/", "/plans"):
        assert b"/PlotlyChart." not in asked(path, asking, b"text/html", PAGE)[1]


@pytest.mark.parametrize("accept", [b"*/*", b"text/html"])
def test_other_answers_are_left_as_they_are(accept: bytes) -> None:
    headers, body, seen = asked("/_stcore/health", {b"accept": accept}, b"application/json", b"{}</body>" * 20)
    assert body == b"{}</body>" * 20
    assert headers[b"etag"] == b"streamlit's"
    assert seen == {b"accept": accept}


def test_every_script_that_is_hinted_at_is_there_with_all_it_imports() -> None:
    found = needed(SCRIPTS)
    for name in NEEDED:
        assert any(re.fullmatch(rf"{name}\.[\w-]+\.js", file) for file in found), f"this Streamlit has no script {name}"
    imported = {i for file in found for i in IMPORTED.findall((SCRIPTS / file).read_text(encoding="utf-8"))}
    assert imported <= set(found)
    assert not any(file.startswith("PlotlyChart") for file in found), "4.7 MB that the first picture does not wait for"
