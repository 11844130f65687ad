"""The notebook of a page's figures: its cells run, and plan what the page planned."""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest

from explorer.text.notebook import build_notebook
from planner_core.planning import Request
from tests.support.plans import planned


def test_its_cells_run_and_plan_what_the_page_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[go.Figure] = []
    monkeypatch.setattr(go.Figure, "show", lambda figure: shown.append(figure))
    request = Request("gpt2-xl", cluster="1x8-h100", layers=2, batch=16, recompute="full", zero=None)
    cells = json.loads(build_notebook(request))["cells"]
    assert [c["cell_type"] for c in cells] == ["markdown", "code", "code"]
    names: dict[str, object] = {}
    for cell in cells[1:]:
        exec(cell["source"], names)
    made, page = names["result"], planned(request)
    assert [p.cost for p in made.plans] == [p.cost for p in page.plans]  # type: ignore[attr-defined]
    assert len(shown) == 1 + len(page.candidates)


def test_what_was_uploaded_stands_as_a_file_beside_it() -> None:
    text = build_notebook(
        Request("own-0123456789abcdef", cluster="/tmp/shardscope-own-clusters/own-0123456789abcdef.json")
    )
    assert "MODEL = 'config.json'" in text
    assert "'cluster': 'cluster.json'" in text
