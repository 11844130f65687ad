"""`pip install .` gives the `shardscope` command, with its assets, wherever it is called from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

import planner_core
from planner_core.core.errors import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


def least(names: list[str]) -> dict[str, str]:
    """By package: the lowest version that is allowed. An extra may name another extra of this project."""
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+)", d) for d in names if not d.startswith("shardscope["))
    return {m[1]: m[2] for m in found if m}


EXTRAS_OF = {name: least(packages) for name, packages in PROJECT["optional-dependencies"].items()}


def test_planning_brings_no_page_server_and_no_torch() -> None:
    assert set(least(PROJECT["dependencies"])) == {"jsonschema", "networkx", "numpy", "pyyaml"}
    assert {name: set(packages) for name, packages in EXTRAS_OF.items()} == {
        "run": {"torch"},
        "models": {"transformers"},
        "app": {"jinja2", "plotly", "pyvis", "streamlit"},
    }
    for package, extra in EXTRAS.items():
        assert package in EXTRAS_OF[extra] or package == "safetensors"  # which transformers brings


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-oldest.txt"])
def test_the_tests_run_with_the_newest_and_the_oldest(file: str) -> None:
    """requirements.txt pins versions that are allowed, requirements-oldest.txt the oldest of those that a plan runs with."""
    lines = [line for line in (ROOT / file).read_text().split("\n") if line and line[0] != "#"]
    pinned = dict(line.lower().split("==") for line in lines)
    allowed = least(PROJECT["dependencies"]) | {n: v for packages in EXTRAS_OF.values() for n, v in packages.items()}
    if file == "requirements.txt":
        assert set(pinned) == set(allowed) - {"pyyaml"}  # which transformers brings
        assert all(numbers(pinned[name]) >= numbers(allowed[name]) for name in pinned)
    else:
        assert set(pinned) == set(allowed) - set(EXTRAS_OF["app"])
        assert {name: numbers(v)[:2] for name, v in pinned.items()} == {n: numbers(allowed[n])[:2] for n in pinned}


def test_a_package_that_is_missing_is_told_with_the_line_that_installs_it() -> None:
    """Without torch and transformers the zoo is planned; what needs them says so in one sentence."""
    code = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "gone = {'jinja2', 'torch', 'transformers', 'streamlit', 'plotly', 'pyvis'}\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in gone: raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "import planner_core.core.errors as e; e.find_spec = lambda n: None if n in gone else find(n)\n"
        "from planner_core.cli.main import main; import planner_core as s\n"
        "assert main(['plan', 'gpt2-xl', '--layers', '2', '--cluster', '1x8-h100', '--json', '-o', sys.argv[1]]) == 0\n"
        "assert main(['verify', sys.argv[1], '--rules']) == 0\n"
        "tried = [['verify', sys.argv[1], '--fake'], ['plan', sys.argv[2]], ['fold', 'gpt2-xl', '--html', sys.argv[1] + '.html'],\n"
        "         ['plan', 'gpt3-xl']]\n"
        "assert [main(t) for t in tried] == [2] * 4\n"
        "try: s.apply\n"
        "except s.InputError as error: print(error, file=sys.stderr)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text('{"model_type": "gpt2"}')
        arguments = [sys.executable, "-c", code, str(Path(folder) / "plan.json"), str(config)]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "install" in line or "zoo" in line]
    run = "this needs torch, which is not installed here; install it with: pip install '.[run]' in a checkout of Shardscope"
    assert told == [
        run,
        run,
        "this needs pyvis, which is not installed here; install it with: pip install '.[app]' in a checkout of Shardscope",
        "\"gpt3-xl\" is neither a model of the zoo nor a file; did you mean 'gpt2-xl'?",
        run,
    ]


def test_no_text_installs_a_package_of_this_name_from_a_registry() -> None:
    """An exported script said `pip install 'shardscope[models]'`, a name that nobody holds on a registry."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "planner_core").rglob("*.py")]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert [name for name, text in texts.items() if re.search(r"pip install '?shardscope", text)] == []


def test_the_version_is_told_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", planner_core.__version__)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built wheel in it, and nothing else of this project."""
    made = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(made)], check=True
    )
    (wheel,) = made.glob("shardscope-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(made / "site"), str(wheel)], check=True)
    return made / "site"


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command in another folder; what it imports besides is this environment's."""
    command = [sys.executable, str(installed / "bin" / "shardscope"), *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_wheel_plans_from_another_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "plan", "gpt2-xl", "--cluster", "1x8-h100", "-o", "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    here = [sys.executable, "-m", "planner_core", "plan", "gpt2-xl", "--cluster", "1x8-h100", "--json"]
    same = json.loads(subprocess.run(here, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert found["plans"] == same["plans"]
    assert run(installed, tmp_path, "verify", "plan.json", "--rules").returncode == 0
    assert run(installed, tmp_path, "export", "plan.json", "--to", "torchrun", "-o", "train.py").returncode == 0
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")
    assert run(installed, tmp_path, "fold", "gpt2-xl", "--html", "fold.html").returncode == 0
    assert (tmp_path / "fold.html").stat().st_size > 10_000
    assert {p.name for p in tmp_path.iterdir()} == {"plan.json", "train.py", "train.plan.json", "fold.html"}
    wrong = run(installed, tmp_path, "plan", "nowhere")
    assert wrong.returncode == 2 and "neither a model of the zoo nor a file" in wrong.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_asset_and_every_module(installed: Path) -> None:
    for folder, there in (
        ("assets", "planner_core/_assets"),
        ("planner_core", "planner_core"),
        ("explorer", "explorer"),
    ):
        tracked = subprocess.run(
            ["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        missing = [f for f in tracked.split() if not (installed / there / Path(f).relative_to(folder)).exists()]
        assert tracked and not missing
    code = (
        "import planner_core as s; print(s.__file__); print(len(s.plan('gpt2-xl', cluster='1x8-h100', layers=2).plans))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(installed))
