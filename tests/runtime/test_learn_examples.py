"""The scripts that learners run on their own machine: short, and right on 2 and on 4 ranks."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from planner_core.verification.processes import run_ranks
from tests.support.torchrun import torchrun

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "learn"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py"))
MOST_LINES = 40


def _script(name: str) -> str:
    """What one rank prints; it has a group already, so the script's own is not made."""
    said = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(said),
    ):
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_shows_what_it_says(name: str, ranks: int) -> None:
    """Each compares itself with one process by an assertion; rank 0 says what was seen."""
    first, *others = run_ranks(_script, ranks, (name,), timeout_s=120)
    assert first.startswith("equal") and not any(others)


def test_scripts_are_short() -> None:
    assert len(SCRIPTS) >= 6
    for name in SCRIPTS:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) < MOST_LINES, name
        assert f"torchrun --standalone --nproc-per-node 2 examples/learn/{name}" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_torchrun_starts_it(name: str) -> None:
    assert torchrun(FOLDER / name).startswith("equal")
