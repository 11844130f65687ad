"""What is predicted of one rank, held to steps that were measured on GPUs (`assets/measurements/one_rank`). No GPU is needed. The
host's seconds for a call are fitted to the rows of T5, and those for a compiled block to that of ViT; nothing else is fitted to rows here."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as commands
from bench.gpu.cases import CASES, FSDP2, OURS, PARALLELIZE, PLANS, Case, Job
from bench.gpu.kernels import KERNEL_KINDS, kind_of, sum_by_kind
from bench.gpu.page import PAGE, predict, read_judged_steps, read_measured_rows, read_steps
from planner_core.core import load_plan
from planner_core.planning.pricing import load_own_runs

AIM = (0.10, 0.03)
"""The largest allowed error of a step's seconds, and of its peak of memory."""
MEASURED = [pytest.param(case, row, id=f"{row['id']} {case.name}") for case, row in read_judged_steps()]


@pytest.mark.parametrize(("case", "row"), MEASURED)
def test_a_step_takes_what_is_predicted(case: Case, row: dict[str, Any]) -> None:
    seconds, num_bytes = predict(case, row["compiled"])
    most_s, most_bytes = AIM
    assert abs(seconds / row["step_s"] - 1) <= most_s
    assert abs(num_bytes / row["peak_allocated_bytes"] - 1) <= most_bytes


def test_the_page_of_measurements_shows_these_predictions() -> None:
    """`python -m bench.gpu --table` writes the page and the file that the explorer reads."""
    shown = {run.id: run for run in load_own_runs()}
    assert set(shown) == {row["id"] for _, row in read_judged_steps()}
    page = PAGE.read_text(encoding="utf-8")
    for case, row in read_judged_steps():
        run = shown[row["id"]]
        assert run.measured_s == row["step_s"] and run.gpus == row["ranks"]
        assert run.seconds["fitted"] == pytest.approx(predict(case, row["compiled"])[0], rel=0.02), (
            "run bench.gpu --table"
        )
    for case, row in read_steps():
        assert f"| {case.what} | {row['date']} | {row['way']}" in page and f"| {1e3 * row['step_s']:.0f} |" in page


def test_every_plan_that_is_measured_is_there_and_is_the_stated_one() -> None:
    for case in CASES.values():
        plan = load_plan(str(case.plan))
        assert all(way in (OURS, FSDP2, PARALLELIZE) for way, _ in case.runs) and case.runs[0] == (OURS, False)
        assert plan.workload.seq == case.options.get("seq", plan.workload.seq)
    assert sum(file.stat().st_size for file in PLANS.iterdir()) < 1 << 20  # they travel with the tree
    assert {Path(row["plan"]).stem for row in read_measured_rows()} <= {*CASES, "script"}


def test_kernels_have_kinds() -> None:
    """Most of the time of each profiled step is of a kind that its name says."""
    assert kind_of("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT") == "products"
    assert kind_of("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26") == "attention"
    assert (
        kind_of("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>")
        == "gathers' and scatters' copies"
    )
    assert sum_by_kind({"a": (3.0, 2), "b": (1.0, 1), "Memcpy DtoD": (9.0, 4)}) == {
        "memory copies": [9.0, 4],
        "other": [4.0, 3],
    }
    assert len({kind for kind, _ in KERNEL_KINDS}) == len(KERNEL_KINDS)
    for _, row in read_steps():
        kinds = row.get("kinds_us", {})
        total = sum(us for us, _ in kinds.values())
        assert not kinds or kinds.get("other", [0.0])[0] < 0.1 * total
        if row["way"] == OURS:  # its kernels are on one stream, so they cannot take longer than the step
            assert total < 1.02e6 * row["step_s"]


@pytest.mark.parametrize(
    ("case", "way", "compiled"),
    [
        ("vit", "ours", False),
        pytest.param("vit", "FSDP2", False, marks=pytest.mark.slow),
        pytest.param("l8b_fsdp", "ours", True, marks=pytest.mark.slow),
        pytest.param("mix_fsdp", "ours", False, marks=pytest.mark.slow),
        pytest.param("l8b_sp", "parallelize_module", False, marks=pytest.mark.slow),
    ],
)
def test_a_job_runs_dry_on_a_cpu(
    case: str, way: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it works at once where there is a GPU: the same code with a small model, in a fork of one process."""
    for name in ("OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(commands, "JOB_S", 600.0)  # by the clock of a machine that has other work
    job = Job(CASES[case], way, compiled)
    row = commands.run_job(job, commands.make_fork_context(True), tmp_path / "log", True, time.monotonic() + 600)
    assert "error" not in row, row
    assert row["dry"] and row["way"] == way and row["compiled"] == compiled and len(row["all_steps_s"]) == 2
    assert row["loss"] > 0 and sum(us for us, _ in row["kinds_us"].values()) > 0


def test_a_job_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(commands, "JOB_S", 600.0)
    job = Job(replace(CASES["vit"], name="nobody"), OURS, False)
    row = commands.run_job(job, commands.make_fork_context(True), tmp_path / "log", True, time.monotonic() + 600)
    assert row["plan"] == "nobody.json" and "nobody.json" in row["error"]
