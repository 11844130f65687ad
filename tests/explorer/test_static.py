"""The JavaScript that Python joins: modules, each whole once its imports are written before it."""

import re
from collections import Counter
from pathlib import Path

import pytest

from explorer.static import STATIC, script

ROOT = Path(__file__).parents[2]
MODULES = sorted(p.stem for p in (STATIC / "js").rglob("*.js"))
TOP_LEVEL = re.compile(r"^(?:const|let|class|function) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_a_joined_module_needs_no_other_file(name: str) -> None:
    text = script(name)
    assert not re.search(r"^import\b|^export (?!default)", text, re.MULTILINE)
    twice = [found for found, times in Counter(TOP_LEVEL.findall(text)).items() if times > 1]
    assert not twice, f"two modules that {name} joins both define {twice}"


def test_what_a_module_imports_stands_before_it_once() -> None:
    text = script("graph")
    order = [text.index(start) for start in ("function make(", "function saveSvg(", "class Graph ")]
    assert order == sorted(order)
    assert text.count("class Drawing ") == 1


@pytest.mark.parametrize("kind", ["js", "css", "html"])
def test_a_name_finds_one_file(kind: str) -> None:
    names = [p.name for p in (STATIC / kind).rglob(f"*.{kind}")]
    assert len(names) == len(set(names)) == len(list(STATIC.rglob(f"*.{kind}"))) > 0


def test_all_javascript_lies_in_the_folder_that_is_checked() -> None:
    own = [p for folder in ("explorer", "planner_core", "assets") for p in (ROOT / folder).rglob("*.[jt]s")]
    assert all(p.is_relative_to(STATIC / "js") for p in own) and len(own) > 10
    assert '"../explorer/static/js"' in (ROOT / ".js" / "tsconfig.json").read_text(encoding="utf-8")
    assert "$(NPM) run --silent check" in (ROOT / "Makefile").read_text(encoding="utf-8")
