"""Whole steps and peaks of published runs, priced as `price` prices a stated layout: their errors must not grow (docs/PUBLISHED.md)."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bench.published import ROWS
from bench.support.published.memory import measured_peak_bytes, predict_peak_bytes, stated_runs
from bench.support.published.runs import Run, plan_run, read_runs
from bench.support.published.stages import price_run, priced_stage_runs
from bench.support.published.table import errors_of, kind_of_run
from planner_core.planning.pricing import time_band
from planner_core.planning.pricing.bands import BANDS_FILE, RUNS_WITH_STAGES, Z_NINE_IN_TEN

SAMPLE = {
    "r0069": 0.03,  # MPT-760m, FSDP on 8 H100
    "r0147": 0.09,  # MPT-13b, FSDP on 32 A100 of 40 GB, recomputed
    "r0093": 0.05,  # MPT-7b at 65 536 tokens, FSDP on 8 A100
    "r0220": 0.06,  # InternLM-7B, ZeRO-1 on 64 A100
    "r0224": 0.08,  # the same on 1024 A100, its weights handed out rank by rank
    "r0442": 0.06,  # nanotron's 1B, ZeRO-1 on 128 H100, its weights handed out rank by rank
    "r0234": 0.06,  # InternLM-7B, tensor parallel 2 and ZeRO-1 on 16 A100
    "r0282": 0.04,  # Llama-3.1-8B, torchtitan's FSDP on 8 H100, recomputed selectively
    "r0310": 0.03,  # Llama-2-13B, the same on 64 A100
}
"""Runs of several sources, GPUs and layouts, and how far each may be off."""


HOSTED = ("r0370", "r0697")
"""nanotron's tensor parallelism over 8 and 4 GPUs, one sample at a time, of two widths."""


@pytest.fixture(scope="module")
def stated() -> dict[str, Run]:
    return {run.id: run for run in read_runs() if run.id in SAMPLE}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_step_is_met(name: str, stated: dict[str, Run]) -> None:
    plan, _ = plan_run(stated[name])
    assert plan is not None
    assert plan.cost.step_time_s == pytest.approx(stated[name].measured_s, rel=SAMPLE[name])


@pytest.mark.parametrize("name", HOSTED)
def test_where_the_host_sets_the_pace_the_band_reaches_the_measured_step(name: str) -> None:
    (run,) = (run for run in stated_runs() if run.id == name)
    plan, planner = plan_run(run)
    assert plan is not None and plan.cost.step_time_s < 0.85 * run.measured_s  # by the GPU's work alone
    band = time_band(plan, planner.cluster)
    assert band.host_s == pytest.approx(run.measured_s, rel=0.15)
    assert band.low * plan.cost.step_time_s < run.measured_s < 1.15 * band.high * plan.cost.step_time_s
    compiled = replace(plan, workload=replace(plan.workload, compiled=True))
    assert time_band(compiled, planner.cluster).host_s == 0


MEMORY = {
    "r0361": (0.95, 1.02),  # nanotron's 1B, data parallel on 8 H100
    "r0697": (0.95, 1.05),  # nanotron's 8B, tensor parallel 8 with tokens split between the products
    "r0289": (0.78, 0.86),  # Llama-3.1-8B, torchtitan on 128 H100: measured is what its allocator reserved
}
"""Predicted over measured peak memory of runs of several layouts (docs/PUBLISHED_MEMORY.md)."""


@pytest.mark.parametrize("name", MEMORY)
def test_a_published_peak_of_memory_is_met(name: str) -> None:
    (run,) = (run for run in stated_runs() if run.id == name)
    found, (low, high) = predict_peak_bytes(run), MEMORY[name]
    assert found is not None
    assert low <= found / measured_peak_bytes(run) <= high


@pytest.mark.parametrize("name", ["pp0170", "pp0457", "pp1534"])
def test_the_page_of_stages_shows_what_is_priced_now(name: str) -> None:
    """LLaMA-13B on tensor ranks alone and in four stages, and zero bubble; `python -m bench.support.published.stages` prices all."""
    (kept,) = (run for run in priced_stage_runs() if run.run.id == name)
    # Zero Bubble's authors took a layer from the first and the last stage (section 5.1 of their paper).
    assert kept.run.stated.layout.copies == ((2, 3, 3, 3, 3, 3, 3, 2) if name == "pp1534" else ())
    now = price_run(kept.run)
    assert now is not None
    assert now[:2] == pytest.approx([kept.seconds, kept.bytes], rel=0.01) and now[2] == kept.fits == kept.ran


def test_a_band_holds_nine_in_ten_runs_of_sources_that_it_has_not_seen() -> None:
    """The band of a kind of layout is shown for plans of nobody's runs, so it is held to errors with each run's whole source left out."""
    table = json.loads(BANDS_FILE.read_text(encoding="utf-8"))
    kept = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    every = {run.id: run for run in read_runs()}
    errors: dict[str, list[float]] = {}
    for e in errors_of([(every[row["id"]], row) for row in kept if row["id"] in every]):
        errors.setdefault(kind_of_run(e.run), []).append(abs(e.sources))
    assert len(errors) >= 6
    for name, left_out in errors.items():
        width = math.hypot(table["kinds"][name]["p90"], Z_NINE_IN_TEN * table["stack_sigma"])
        assert sum(error <= width for error in left_out) >= 0.9 * len(left_out), name
    # Plans with stages: nothing is fitted to any of the five sources, each of which counts alike.
    staged = [run for run in priced_stage_runs() if run.ran and run.has_known_kernels and run.run.stated.layout.pp > 1]
    assert len({run.source for run in staged}) >= 5
    assert table["kinds"][RUNS_WITH_STAGES]["n"] == 25 * len({run.source for run in staged})
