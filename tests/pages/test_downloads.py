"""A file that is made when its button is pressed is made after the page's script has ended, in a thread without a session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import streamlit as st

from tests.pages.test_app import open_page

FEW = {"model": "gpt2-xl", "cluster": "1x8-h100", "layers": "2", "setup": "dp=8"}
ADDRESSES: dict[str, tuple[str, dict[str, str]]] = {
    "overview": ("overview", FEW),
    "plans": ("plans", {**FEW, "compare": "best,fsdp", "tokens": "1e9"}),
    "compare": ("compare", {**FEW, "compare": "best,setup", "tokens": "1e9", "price": "2"}),
    "whatif": ("whatif", FEW),
    "measured": ("measured", {}),
    "learn": ("learn", FEW),
}


def made(make: Callable[[], Any]) -> Any:
    """What `make` gives in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(make()))
    thread.start()
    thread.join()
    return found[0] if found else None


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "address", [pytest.param(a, marks=pytest.mark.lessons) if a == "learn" else a for a in ADDRESSES]
)
def test_files_are_made_without_a_session(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page, query = ADDRESSES[address]
    makers: dict[str, Callable[[], Any]] = {}
    button = st.download_button

    def noted(label: str, data: Any, *args: Any, **kwargs: Any) -> Any:
        if callable(data):
            makers[label] = data
        return button(label, data, *args, **kwargs)

    monkeypatch.setattr(st, "download_button", noted)
    at = open_page(page, **query)
    assert not at.exception
    assert (len(makers) > 1) == (page in ("plans", "compare", "measured"))
    for label, make in makers.items():
        assert made(make), label
