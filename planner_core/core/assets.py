"""Where the data files stand: beside the packages in a checkout, inside `planner_core` in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
ASSETS = next((p for p in (_PACKAGE / "_assets", _PACKAGE.parent / "assets") if p.is_dir()), _PACKAGE.parent / "assets")
"""The folder that holds `models/`, `clusters/`, `hardware/` and the published schemas."""
