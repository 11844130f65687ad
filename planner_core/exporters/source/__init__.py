"""Templates of exported Python files: functions whose text is copied into them."""

from __future__ import annotations

import ast
from pathlib import Path


def template_text(template: str, function: str) -> str:
    """Return the source of a function of a template. The file is read, not imported: an export need not wait for what its text imports."""
    text = (Path(__file__).parent / f"{template}.py").read_text(encoding="utf-8")
    (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == function)
    first = min((d.lineno for d in node.decorator_list), default=node.lineno)
    return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
