"""The front end's own files: JavaScript, styles and templates, which Python joins and never holds as strings.

html/  templates
js/    the components' JavaScript as modules; types.d.ts tells the type checker what Python sends them
css/   their styles

A name is enough to find a file: no two files of one kind have the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

SLOT = re.compile(r"\{\{(\w+)\}\}")
STATIC = Path(__file__).resolve().parent
IMPORT = re.compile(r'^import \{[^}]*\} from "\.{1,2}/(?:\w+/)*(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


def template(name: str) -> str:
    """Return the HTML of this name, e.g. `graph`."""
    return _file("html", name).read_text(encoding="utf-8")


def filled(name: str, values: Mapping[str, str]) -> str:
    """Return the template of this name, each slot `{{name}}` with its value. `{{head}}` is the template of that name."""
    text = template(name).replace("{{head}}", template("head"))
    return SLOT.sub(lambda m: values[m[1]], text)


def style(name: str) -> str:
    """Return the styles of this name, e.g. `app`."""
    return _file("css", name).read_text(encoding="utf-8")


def script(name: str) -> str:
    """Return one module of JavaScript, after the modules that it imports; nothing is loaded from elsewhere."""
    return "\n".join(_joined(name, set()))


def _file(kind: str, name: str) -> Path:
    """Return the only file of this kind and name, in whatever folder it is."""
    (path,) = (STATIC / kind).rglob(f"{name}.{kind}")
    return path


def _joined(name: str, done: set[str]) -> list[str]:
    if name in done:
        return []
    done.add(name)
    text = _file("js", name).read_text(encoding="utf-8")
    before = [part for needed in IMPORT.findall(text) for part in _joined(needed, done)]
    return [*before, EXPORT.sub("", IMPORT.sub("", text))]
