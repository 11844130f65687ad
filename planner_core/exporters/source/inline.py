"""Joins several modules into the text of one: imports once at the top, each module's docstring as a heading, bodies in order."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def inline(files: Iterable[Path], package: str) -> str:
    """Source of `files` in one file; imports from `package` fall away, since all of it stands there. Asserts unique names."""
    imports: dict[str, None] = {}
    bodies: list[str] = []
    taken: dict[str, Path] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for name in _defined(tree):
            assert name not in taken, f"{file} and {taken[name]} both define {name}"
            taken[name] = file
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not _own(node, package):
                imports.update(dict.fromkeys(_split(node)))
        bodies.append(_heading(tree) + _body(text, tree))
    lines = sorted((i for i in imports if "__future__" not in i), key=lambda i: (_third_party(i), i.split()[1], i))
    return "\n".join(lines) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"


def _own(node: ast.Import | ast.ImportFrom, package: str) -> bool:
    module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
    return module.split(".")[0] == package


def _split(node: ast.Import | ast.ImportFrom) -> list[str]:
    """One import statement per name, so that doubles show."""
    shown = [f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names]
    if isinstance(node, ast.Import):
        return [f"import {name}" for name in shown]
    return [f"from {node.module} import {name}" for name in shown]


def _third_party(line: str) -> bool:
    return line.split()[1].split(".")[0] in ("torch", "transformers")


def _defined(tree: ast.Module) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [t.id for t in targets if isinstance(t, ast.Name)]
    return names


def _heading(tree: ast.Module) -> str:
    text = ast.get_docstring(tree) or ""
    rule = "# " + "=" * 110
    return "\n".join([rule, *(f"# {line}".rstrip() for line in text.splitlines()), rule]) + "\n\n"


def _body(text: str, tree: ast.Module) -> str:
    """All but the docstring and the imports at the top."""
    lines = text.splitlines()
    dropped: set[int] = set()
    for i, node in enumerate(tree.body):
        doc = i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if doc or isinstance(node, (ast.Import, ast.ImportFrom)):
            dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "\n".join(
        line for n, line in enumerate(lines, 1) if n not in dropped and not line.startswith("# mypy:")
    ).strip()
