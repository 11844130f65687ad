"""A Jupyter notebook that makes the figures of a page from the library. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from explorer.text.commands import UPLOADED_CLUSTER, UPLOADED_CONFIG, is_uploaded_model
from planner_core.planning import Request

TEMPLATE = Path(__file__).resolve().parents[1] / "static" / "figure_notebook.py"
"""A script whose cells begin with `# %%`."""


def build_notebook(request: Request) -> str:
    """Return the notebook of a request's plans, as JSON; an uploaded model or cluster is a file next to it."""
    default = {f.name: f.default for f in fields(Request)}
    given = {k: v for k in default if k != "model" and ((v := getattr(request, k)) != default[k] or k == "cluster")}
    given = {k: UPLOADED_CLUSTER.sub("cluster.json", v) if isinstance(v, str) else v for k, v in given.items()}
    text = TEMPLATE.read_text(encoding="utf-8")
    model = UPLOADED_CONFIG if is_uploaded_model(request.model) else request.model
    text = re.sub(r"^MODEL = .*$", lambda _: f"MODEL = {model!r}", text, flags=re.MULTILINE)
    text = re.sub(r"^OPTIONS: Any = .*$", lambda _: f"OPTIONS = {given!r}", text, flags=re.MULTILINE)
    cells = [
        _cell(head, body) for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", text, flags=re.MULTILINE)
    ]
    return json.dumps(
        {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5},
        indent=1,
    )


def _cell(head: str, body: str) -> dict[str, Any]:
    """One cell; markdown stands in comments."""
    if "markdown" in head:
        source = "\n".join(line.removeprefix("# ") for line in body.strip().splitlines())
        return {"cell_type": "markdown", "metadata": {}, "source": source}
    return {"cell_type": "code", "metadata": {}, "source": body.strip(), "execution_count": None, "outputs": []}
