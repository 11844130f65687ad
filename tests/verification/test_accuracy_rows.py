"""`bench.accuracy --before DAY` makes rows of earlier days anew, and loses none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import accuracy
from bench.support import kept_rows

OLD, LATER, NEW = "2026-01-01", "2026-01-02", "new"
MEASURED = {
    "ok": True,
    "collectives_ok": True,
    "predicted_bytes": 1,
    "measured_bytes": 1,
    "memory_error": 0.0,
    "seconds": 1.0,
}


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows of three plans on 64 GPUs, of which `TAP` is found still and `gone` is not."""
    monkeypatch.setattr(kept_rows, "RESULTS", tmp_path)
    monkeypatch.setattr(accuracy, "TABLE", tmp_path / "ACCURACY.md")
    monkeypatch.setattr(
        accuracy, "_plans_of_model", lambda *_: dict.fromkeys(("best", "TAP", "ATP"), SimpleNamespace(fits=True))
    )
    monkeypatch.setattr(accuracy, "_verify_fake", lambda found: [dict(MEASURED) for _ in found])
    old = (
        {"check": "8x8", "model": "gpt2-xl", "mesh": "8x8", "plan": p, "date": OLD, **MEASURED}
        for p in ("best", "TAP", "gone")
    )
    accuracy.ROWS.path.write_text("".join(json.dumps(row) + "\n" for row in old), encoding="utf-8")


def sweep(monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, str]:
    """The day of each plan's row after a sweep, as `days` says it."""
    asked = ["accuracy", "--only", "8x8", "--models", "gpt2-xl", *more]
    monkeypatch.setattr("sys.argv", asked)
    accuracy.main()
    return days()


def days() -> dict[str, str]:
    """`OLD`, or `NEW` for any later day: a day may end while the tests run."""
    return {plan: OLD if row["date"] == OLD else NEW for (_, _, _, plan), row in accuracy.ROWS.read().items()}


def test_rows_of_all_plans_are_made_anew_without_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(monkeypatch, "--before", LATER) == {"best": NEW, "TAP": NEW}
    assert "| TAP |" in accuracy.TABLE.read_text(encoding="utf-8")
    assert len(accuracy.ROWS.path.read_text(encoding="utf-8").splitlines()) == 2


def test_a_plan_without_a_row_is_run_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(monkeypatch) == {"best": OLD, "TAP": OLD, "gone": OLD}
    assert sweep(monkeypatch, "--all") == {"best": OLD, "TAP": OLD, "gone": OLD, "ATP": NEW}


def test_an_interrupted_sweep_keeps_its_old_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[Any]) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "_verify_fake", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(monkeypatch, "--before", LATER)
    assert days() == {"best": OLD, "TAP": OLD, "gone": OLD}
