"""What the pages show runs, and prints what they say; what they link to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import planner_core as shardscope
from planner_core.cli.main import _make_parser
from planner_core.planning.methods import TARGETS
from tests.support.snippets import ROOT, Session, Snippet, same, snippets, steps
from tests.test_architecture import ORDER

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("C*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SHELL = {"make app", "make test"}
"""Commands in README's `sh` blocks, which nothing runs here: the first runs until it is stopped, the second is this."""
REFRESH = "if that is right, `make docs` writes it into the pages"
SLOW = ("--fake", "--ranks", "torchrun --")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- snippets -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_snippet_of_the_api_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = read(ROOT / "docs" / "API.md")
    session = Session(tmp_path)
    for block, text, shown in steps(page):
        printed = session.run(block, text)
        assert same(shown, printed), f"{text}\nprints\n{printed}\n{REFRESH}"


def test_the_api_has_ten_snippets_and_every_name() -> None:
    page = read(ROOT / "docs" / "API.md")
    assert [int(n) for n in re.findall(r"^## (\d+)\. ", page, re.MULTILINE)] == list(range(1, 11))
    assert len([b for b in snippets(page) if b.kind == "python"]) == 1 + 10
    assert [name for name in shardscope.__all__ if f"`{name}`" not in page] == []


def readme(slow: bool, folder: Path) -> list[tuple[str, str, str]]:
    """(command or code, shown, printed) of README, in order; what takes long is left out unless `slow`."""
    session = Session(folder)
    found = []
    for block, text, shown in steps(read(ROOT / "README.md")):
        if slow or not any(word in text for word in SLOW):
            found.append((text, shown, session.run(block, text)))
    return found


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_snippet_of_the_readme_prints_what_the_page_shows(slow: bool, tmp_path: Path) -> None:
    for text, shown, printed in readme(slow, tmp_path):
        assert same(shown, printed), f"{text}\nprints\n{printed}\n{REFRESH}"


def test_nothing_in_the_readme_is_left_unrun() -> None:
    blocks = snippets(read(ROOT / "README.md"))
    assert {b.kind for b in blocks} == {"sh", "console", "python", "json"}
    assert {line.partition("  #")[0].strip() for b in blocks if b.kind == "sh" for line in b.text.splitlines()} == SHELL
    assert not re.search(
        r"^(?: {4}|\t)\S", re.sub(r"^```.*?^```", "", read(ROOT / "README.md"), flags=re.M | re.S), re.M
    )
    for block in blocks:
        if block.kind == "json":
            assert shardscope.load_cluster(json.loads(block.text)).num_gpus == 16


def test_a_snippet_that_does_not_hold_is_seen(tmp_path: Path) -> None:
    session = Session(tmp_path)
    printed = session.run(Snippet("python", "", "", 0, 0), "a = 1\nprint('one')\nprint('two')\n")
    assert same("one\ntwo\n", printed) and same("one\n...\n", printed) and same("...\ntwo\n", printed)
    assert session.run(Snippet("python", "", "", 0, 0), "print(a)") == "1\n"
    assert not same("one\n", printed) and not same("one\n2\n", printed) and not same("two\n...\n", printed)
    with pytest.raises(AssertionError, match="No such file"):
        session.run(Snippet("console", "", "", 0, 0), "cat nowhere")
    with pytest.raises(ZeroDivisionError):
        session.run(Snippet("python", "", "", 0, 0), "1 / 0")


def test_the_contract_names_every_command_option_and_form() -> None:
    page = read(ROOT / "docs" / "CONTRACT.md")
    (commands,) = (a for a in _make_parser()._actions if isinstance(a.choices, dict))
    assert [name for name in commands.choices if f"planner_core {name}" not in page] == []
    options = {o for p in commands.choices.values() for a in p._actions for o in a.option_strings if o.startswith("--")}
    assert [o for o in sorted(options - {"--help", "--output"}) if o not in page] == []
    assert [name for name in TARGETS if not re.search(rf"[{{,]{name}[,}}]", page)] == []


@pytest.mark.slow
def test_the_figures_of_alpas_method_are_those_of_the_commands_that_the_page_names() -> None:
    page = " ".join(read(ROOT / "docs" / "PEERS.md").split())
    said = {
        "gpt2-xl": "`compare gpt2-xl` has its plan as data parallelism ({0:.0f} ms a step, as the best plan of one stage takes)",
        "llama-3-8b": "`compare llama-3-8b` at {0:.0f} ms (the best plan takes {1:.0f})",
    }
    for model, words in said.items():
        compared = shardscope.compare(model, cluster="2x8-h100")
        method = next(p for p in compared.plans if p.method == "alpa").cost.step_time_s
        best = min(p.cost.step_time_s for p in compared.plans if p.method == "exact" and p.fits and not p.pipeline)
        assert words.format(1e3 * method, 1e3 * best) in page
        assert model != "gpt2-xl" or round(1e3 * best) == round(1e3 * method)
    alone = shardscope.plan("llama-3-8b", cluster="2x8-h100", method="alpa").best.cost.step_time_s
    assert "`plan llama-3-8b --method alpa` gives the same plan" in page and alone == method


# --- links ------------------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """The names that a page's headings have."""
    heads = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        there = (page.parent / place).resolve() if place else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(read(there))):
            broken.append(target)
    assert not broken


def test_the_code_names_pages_that_are_there() -> None:
    files = [p for root in ("planner_core", "explorer", "bench", "tests") for p in (ROOT / root).rglob("*.py")]
    # What writes a page of docs/ links to another one by its name alone.
    texts = [(p.name, re.sub(r"\[([A-Z_]+\.md)\]\(\1\)", r"docs/\1", read(p))) for p in files]
    named = {(p, name) for p, text in texts for name in re.findall(r"(?<![\w/\"])[\w/]*[A-Z_]{3,}\.md\b", text)}
    missing = {(file, name) for file, name in named if not (ROOT / name).exists()}
    assert named and not missing


OF_OTHERS = re.compile(
    r"(torch|transformers|uop|_ops)/|(models/llama3/parallelize|configs/7B_sft)\.py|path/to/|.*\b(NAME|NN)\b"
)
"""Paths in pages that are none of this project: of libraries, of programs that STYLE and PUBLISHED read, and where a name is to be put."""


def named_paths(page: str) -> set[str]:
    """Return the Python files and the folders of this project that a page names with their folder: `a/{b,c}.py` names two."""
    page = re.sub(
        r"([\w/]+/)\{([\w,]+)\}(\S*\.py)", lambda m: " ".join(f"{m[1]}{name}{m[3]}" for name in m[2].split(",")), page
    )
    files = re.findall(r"(?<![\w./-])(?:[\w-]+/)+[\w-]+\.py\b", page)
    folders = re.findall(r"(?<![\w./-])(?:planner_core|explorer|bench|tests|assets)/[\w/-]*\w\b(?![.{])", page)
    return {path for path in (*files, *folders) if not OF_OTHERS.match(path)}


def test_the_pages_name_files_and_folders_that_are_there() -> None:
    tops = [ROOT / name for name in ("planner_core", "explorer", "bench", "tests", "assets", "examples")]
    places = [p.relative_to(ROOT) for top in tops for p in (top, *top.rglob("*"))]
    # `planning/pipeline.py` is enough where a page tells of `planner_core`.
    ends = {"/".join(p.parts[k:]) for p in places for k in range(len(p.parts))}
    missing = {p.name: gone for p in PAGES if p.name != "CHANGELOG.md" and (gone := named_paths(read(p)) - ends)}
    assert not missing
    assert named_paths("`core/{graph,plan}.py`, tests/models") == {"core/graph.py", "core/plan.py", "tests/models"}
    assert "core/plan.py" not in ends


def test_the_pages_name_tests_that_are_there() -> None:
    """A name that ends with `_` is the beginning of several tests. What ends with `.py` is a path."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    known = {file.stem for file in files}.union(*(re.findall(r"^def (test_\w+)", read(f), re.MULTILINE) for f in files))
    pages = {p.name: re.findall(r"\btest_\w+\b(?!\.py)", read(p)) for p in PAGES if p.name != "CHANGELOG.md"}
    missing = {
        (page, name)
        for page, names in pages.items()
        for name in names
        if not (name in known or (name.endswith("_") and any(one.startswith(name) for one in known)))
    }
    assert any(pages.values()) and not missing


# --- architecture -----------------------------------------------------------------------------------------


def test_the_pages_list_the_packages_in_the_order_of_their_imports() -> None:
    core, explorer = ORDER.values()
    design, tree = read(ROOT / "docs" / "DESIGN.md"), snippets(read(ROOT / "CONTRIBUTING.md"))[0].text
    table = design.partition("| package of `planner_core` |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == core
    assert f"`{' '.join(explorer)}`" in design
    assert f"only those before it\nin `{' '.join(core)}`" in read(ROOT / "README.md")
    # Two trees stand side by side.
    head, *lines = tree.splitlines()
    edge = head.index("explorer/")
    for column, names in ((slice(edge), core), (slice(edge, None), explorer)):
        assert tuple(line[column].split()[0] for line in lines[: len(names)]) == names
