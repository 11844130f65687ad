"""`pip install .` gives the `shardscope` command, with its assets, wherever it is called from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import planner_core

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_package_needs_what_the_tests_run_with() -> None:
    """requirements.txt pins a version that pyproject.toml allows, of the same packages."""
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    least = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", d).groups() for d in PROJECT["dependencies"])  # type: ignore[union-attr]
    assert set(pinned) == set(least)
    for name, version in least.items():
        assert (pinned[name] + ".").startswith(version + "."), f"{name}: {version} was never run"


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
        [sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith(str(installed))
