"""The front end's own files: JavaScript, styles and templates that Python joins but never holds as strings."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).resolve().parent


def static_text(name: str) -> str:
    """The text of one file, e.g. `graph.js`."""
    return (STATIC / name).read_text(encoding="utf-8")
