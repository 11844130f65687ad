"""The scripts that learners run on their own machine: short, and right on 2 and on 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.torchrun import run_script, torchrun

pytestmark = pytest.mark.lessons


FOLDER = Path(__file__).resolve().parents[2] / "examples" / "learn"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py"))
MAX_LINES = 40


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_shows_what_it_says(name: str, ranks: int) -> None:
    """Each compares itself with one process by an assertion; rank 0 says what was seen."""
    said = run_script(FOLDER / name, ranks=ranks)
    assert said.startswith("equal") and said.count("equal") == 1


def test_scripts_are_short() -> None:
    assert len(SCRIPTS) >= 6
    for name in SCRIPTS:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) < MAX_LINES, name
        assert f"torchrun --standalone --nproc-per-node 2 examples/learn/{name}" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_torchrun_starts_it(name: str) -> None:
    assert torchrun(FOLDER / name).startswith("equal")
