"""Imports point one way, heavy libraries stay at the rim, and the explorer asks no other host."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "planner_core"
EXPLORER = ROOT / "explorer"

# A module may import only what stands before it; a star marks those that may import torch and transformers.
# A sub-package counts as one.
ORDER = (
    "errors", "files", "mesh", "placement", "graph", "plan", "cluster", "collectives", "routes", "atp", "models",
    "sites*", "moe*", "loops*", "scans*", "capture*", "opening",
    "rules", "rules_scan", "rules_index", "rules_more", "rules_math", "check", "coarsen", "fold",
    "strategy", "hardware", "redistribute", "saving", "pinned", "transit", "storages", "passes", "backward", "memory",
    "price", "states", "tables", "weights", "network",
    "eliminate", "hull", "labels", "problem", "chain", "solve", "copies", "closing",
    "generate", "candidates", "chunked", "folding", "assemble",
    "search", "fitting", "front", "narrow",
    "methods", "expert", "planner", "pipeline", "edit",
    "sensitivity", "rungs", "scaling", "report", "unfolded", "retarget",
    "runtime*", "verify*",
    "export*", "__main__",
)  # fmt: skip
NAMES = tuple(name.rstrip("*") for name in ORDER)
HEAVY = {name.rstrip("*") for name in ORDER if name.endswith("*")}
HEAVY_LIBRARIES = {"torch", "transformers"}
# These may import a starred module inside a function, where the user asked for what needs it.
MAY_CALL_HEAVY = {"models", "opening", "__main__"}
STREAMLIT = ("pages", "state", "components", "learn")
HOST = re.compile(
    r"(?:https?:)?//(?!localhost\b|127\.0\.0\.1\b|www\.w3\.org/)[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.IGNORECASE
)


def part(path: Path, root: Path) -> str:
    """The module or sub-package of `root` that a file belongs to."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute dotted name, whether it stands inside a function) of every import; `from a import b` gives a.b."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(ROOT).parts[:-1])
            base = package[: len(package) - node.level + 1] if node.level else []
            found.extend((".".join([*base, *filter(None, [node.module]), alias.name]), inside) for alias in node.names)
        here = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, here)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def core_imports(path: Path) -> list[tuple[str, bool]]:
    """Modules of planner_core that a file imports, its own package left out."""
    own = part(path, CORE)
    split = [(name.split("."), inside) for name, inside in imports(path)]
    return [
        (name[1], inside) for name, inside in split if name[0] == "planner_core" and len(name) > 1 and name[1] != own
    ]


def test_every_module_has_its_place() -> None:
    unplaced = {part(path, CORE) for path in sources(CORE)} - set(NAMES) - {"__init__"}
    assert not unplaced, f"give {sorted(unplaced)} a place in ORDER"
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("path", sources(CORE), ids=lambda p: str(p.relative_to(CORE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path, CORE)
    if own == "__init__" or own not in NAMES:  # the public names; a file without a place fails above
        return
    before = NAMES[: NAMES.index(own)]
    late = {name for name, _ in core_imports(path) if name in NAMES and name not in before}
    assert not late, f"{own} may not import {sorted(late)}, which stands after it"


@pytest.mark.parametrize("path", sources(CORE), ids=lambda p: str(p.relative_to(CORE)))
def test_heavy_libraries_stay_at_the_rim(path: Path) -> None:
    own = part(path, CORE)
    if own in HEAVY:
        return
    direct = {name for name, _ in imports(path) if name.split(".")[0] in HEAVY_LIBRARIES}
    assert not direct, f"{own} imports {sorted(direct)}; only {sorted(HEAVY)} may"
    early = {name for name, inside in core_imports(path) if name in HEAVY and not (inside and own in MAY_CALL_HEAVY)}
    assert not early, (
        f"{own} imports {sorted(early)}, which import torch; only {sorted(MAY_CALL_HEAVY)} may, in a function"
    )


def test_planning_needs_neither_torch_nor_transformers_nor_streamlit() -> None:
    light = [name for name in NAMES if name not in HEAVY and name != "__main__"]
    there = [name for name in light if (CORE / f"{name}.py").exists() or (CORE / name / "__init__.py").exists()]
    code = "import importlib, sys\n" + "".join(f"importlib.import_module('planner_core.{name}')\n" for name in there)
    code += "print(*sorted({'torch', 'transformers', 'streamlit'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("path", sources(CORE), ids=lambda p: str(p.relative_to(CORE)))
def test_the_library_knows_no_front_end(path: Path) -> None:
    """Only the command line may draw, with a function of the explorer that it imports when asked."""
    drawn = {(name.split(".")[0], inside) for name, inside in imports(path)}
    assert not drawn & {
        ("streamlit", True),
        ("streamlit", False),
        ("plotly", True),
        ("plotly", False),
        ("explorer", False),
    }
    assert part(path, CORE) == "__main__" or ("explorer", True) not in drawn


@pytest.mark.parametrize("path", sources(EXPLORER), ids=lambda p: str(p.relative_to(EXPLORER)))
def test_only_pages_state_and_components_know_streamlit(path: Path) -> None:
    roots = {name.split(".")[0] for name, _ in imports(path)}
    assert part(path, EXPLORER) in STREAMLIT or "streamlit" not in roots
    # lessons compute with torch, but only when they are opened
    early = {name.split(".")[0] for name, inside in imports(path) if not (inside and part(path, EXPLORER) == "learn")}
    assert not early & HEAVY_LIBRARIES


def test_the_explorer_names_no_other_host() -> None:
    kinds = {".py", ".js", ".css", ".html", ".svg", ".json"}
    files = [path for path in EXPLORER.rglob("*") if path.suffix in kinds]
    found = {f"{path.name}: {host}" for path in files for host in HOST.findall(path.read_text(encoding="utf-8"))}
    assert not found


def test_no_file_and_no_function_grows_too_long() -> None:
    """At most 400 lines a file and 50 a function (STYLE.md)."""
    long = []
    for path in [*sources(CORE), *sources(EXPLORER)]:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 400:
            long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 50:
                long.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not long


def test_these_rules_see_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: an upward import, torch in a function, and a foreign host are all noticed."""
    bad = tmp_path / "planner_core" / "mesh.py"
    bad.parent.mkdir()
    bad.write_text("from planner_core import plan\ndef f():\n    import torch.nn\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "CORE", bad.parent)
    assert imports(bad) == [("planner_core.core.plan", False), ("torch.nn", True)]
    for rule in (test_imports_point_one_way, test_heavy_libraries_stay_at_the_rim):
        with pytest.raises(AssertionError):
            rule(bad)
    assert HOST.findall('src="https://cdn.example.com/x.js"') and HOST.findall('"//unpkg.com/x"')
    assert not HOST.findall("http://www.w3.org/2000/svg http://localhost:8501 a // b")
