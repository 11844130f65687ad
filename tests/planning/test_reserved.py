"""What the allocator reserves beside the tensors: the fit finds what made the figures, and a plan's figure follows from its kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.support.published import memory
from bench.support.published.reserved import TENSORS_ALONE, Fit, Peak, close_left_out, fit_peaks
from planner_core.core import ASSETS, load_cluster
from planner_core.planning import Request, plan_model
from planner_core.planning.analysis import plan_report, price_report, price_text, text
from planner_core.planning.analysis.legend import FITS_WORDS, TENSORS, describe_fits, fits_mark
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import (
    GATHERED_WEIGHTS,
    PLANNED_PROGRAM,
    WHOLE_WEIGHTS,
    Pricer,
    Statement,
    predict_reserved,
    price_statement,
)
from planner_core.planning.pricing.configs.reading import read_text

GB = 2**30
ASSET = json.loads((ASSETS / "reserved.json").read_text())
ROWS_BY_KIND, OUTSIDE_BYTES = ASSET["kinds"], ASSET["outside_bytes"]["value"]


def made(scale: float, add_gb: float) -> list[Peak]:
    """Peaks of 40 runs in four parts; one in ten is half of what it should be and is not to be fitted."""
    tensors = np.geomspace(2, 80, 40) * GB
    odd = [i % 10 == 5 for i in range(40)]
    return [
        Peak(t, (scale * t + add_gb * GB) * (0.5 if o else 1), str(i % 4), fitted=not o)
        for i, (t, o) in enumerate(zip(tensors, odd, strict=True))
    ]


def test_a_fit_finds_what_made_the_figures() -> None:
    peaks = made(1.13, 0.7)
    assert fit_peaks(peaks) == pytest.approx(Fit(1.13, 0.7 * GB))
    assert fit_peaks(peaks).close(peaks) == close_left_out(peaks) == 36
    assert TENSORS_ALONE.close(peaks) < 36


def test_a_part_that_is_left_out_is_not_fitted() -> None:
    """Where a part follows another law, the fit to the others misses all of it."""
    others = made(1.1, 0.0)
    alone = [Peak(t * GB, t * GB * 1.35, "own", fitted=True) for t in (4.0, 9.0, 30.0)]
    assert close_left_out([*others, *alone]) == close_left_out(others)


@pytest.mark.parametrize(
    ("layout", "stack", "kind"),
    [
        ("fsdp=8", "torchtitan", GATHERED_WEIGHTS),
        ("dp=2,fsdp=4", "torchtitan", GATHERED_WEIGHTS),
        ("tp=8,sp", "megatron", WHOLE_WEIGHTS),
        ("dp=8", "megatron", WHOLE_WEIGHTS),
        ("fsdp=8", "accelerate", GATHERED_WEIGHTS),
        ("fsdp=8", None, PLANNED_PROGRAM),
        ("dp=8", "torch", PLANNED_PROGRAM),
    ],
)
def test_a_plan_is_told_by_its_kind(layout: str, stack: str | None, kind: str) -> None:
    cluster = load_cluster("1x8-h100")
    plan = Pricer("llama-3-8b", cluster).plan(Statement(parse_layout(layout), layers=2, stack=stack))
    assert plan is not None and plan.cost is not None
    found, row = predict_reserved(plan, cluster), ROWS_BY_KIND[kind]
    assert (found.kind, found.runs, found.short) == (kind, row["n"], False)
    assert found.likely_bytes == round(row["scale"] * plan.cost.memory_bytes["peak"] + row["add_bytes"])
    assert (
        plan.cost.memory_bytes["peak"] < found.likely_bytes and found.low_bytes < found.likely_bytes < found.high_bytes
    )


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP",
        "per_device_train_batch_size: 1\nfsdp: full_shard",
        "base_model: m\nmicro_batch_size: 1\nfsdp_config: {fsdp_version: 2}",
        "device_train_microbatch_size: 1\nfsdp: {sharding_strategy: FULL_SHARD}",
        "zero_optimization: {stage: 3}\ntrain_micro_batch_size_per_gpu: 1",
    ],
)
def test_a_file_of_a_tool_is_not_of_a_plan_as_it_runs(text: str) -> None:
    """Of accelerate's FSDP 61.8 GiB were said, the program of a plan, and of DeepSpeed's ZeRO-3 73.2."""
    cluster = load_cluster("1x8-h100")
    setup = read_text(text, "config", cluster.num_gpus, Path("run.yaml"))
    pricer = Pricer("llama-3-8b", cluster)
    stated, _ = pricer.stated_model.state_run(setup.layout, {**setup.options, "layers": 2})
    plan = pricer.plan(stated)
    assert plan is not None and predict_reserved(plan, cluster).kind == GATHERED_WEIGHTS


def test_more_than_the_gpu_is_said_and_not_shown() -> None:
    cluster = load_cluster("1x8-h100")
    plan = Pricer("llama-3-8b", cluster).plan(Statement(parse_layout("fsdp=8"), layers=2))
    assert plan is not None and plan.cost is not None
    memory_bytes = round(plan.cost.memory_bytes["peak"] * 1.05)
    small = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=memory_bytes))
    found = predict_reserved(plan, small)
    assert found.short and found.likely_bytes == found.high_bytes == memory_bytes


def test_a_budget_is_not_the_memory_of_the_gpu() -> None:
    """The allocator does not know of a budget: 18.6 GiB of an 80 GiB GPU make it free nothing."""
    asked = Request("llama-3-8b", cluster="2x8-h100", layers=2, mesh="16", batch=16, seq=512)
    peak = plan_model(asked, passes={}).best.cost.memory_bytes["peak"]
    result = plan_model(replace(asked, memory_gb=peak * 1.001 / 1e9), passes={})
    reserved = predict_reserved(result.best, result.cluster)
    assert result.best.fits and not reserved.short and reserved.likely_bytes > result.planner.budget


def test_fits_is_no_plain_yes_where_the_allocator_may_reserve_more_than_was_stated() -> None:
    """`fits` said yes of 18.6 GiB in the 18.6 of `--memory-gb 20`, and two lines below the allocator had 19.5 reserved."""
    cluster, stated = load_cluster("1x8-h100"), Statement(parse_layout("tp=8,sp"), layers=2)
    plan = Pricer("llama-3-8b", cluster).plan(stated)
    assert plan is not None
    high_gb = predict_reserved(plan, cluster).high_bytes / 1e9
    for memory_gb, mark in ((None, "yes"), (high_gb * 1.001, "yes"), (high_gb * 0.999, TENSORS)):
        assert fits_mark(plan, cluster, memory_gb) == mark
        assert describe_fits([plan], cluster, memory_gb) == (FITS_WORDS[TENSORS],) * (mark == TENSORS)
        priced = price_text(price_statement(Pricer("llama-3-8b", cluster, memory_gb), stated, advise=False))
        assert (FITS_WORDS[TENSORS] in priced) == (mark == TENSORS)


def test_the_table_of_plans_tells_of_the_stated_memory() -> None:
    asked = Request("llama-3-8b", cluster="2x8-h100", layers=2, mesh="16", batch=16, seq=512)
    peak = plan_model(asked, passes={}).best.cost.memory_bytes["peak"]
    result = plan_model(replace(asked, memory_gb=peak * 1.001 / 1e9), passes={})
    assert FITS_WORDS[TENSORS] in text(result)
    assert plan_report(result)["plans"][0]["memory_reserved"]["above_stated"]
    ample = replace(result, planner=replace(result.planner, request=replace(result.request, memory_gb=None)))
    assert not plan_report(ample)["plans"][0]["memory_reserved"]["above_stated"]


def test_the_command_tells_it() -> None:
    priced = price_statement(
        Pricer("llama-3-8b", load_cluster("1x8-h100")), Statement(parse_layout("tp=8,sp"), layers=2)
    )
    told = price_report(priced)["memory_reserved"]
    assert f"about {told['likely_bytes'] / GB:.1f} GiB reserved" in price_text(priced)


def test_the_asset_is_the_fit_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The asset and the page are what the kept prices of the published runs give."""
    kept = dict(map(json.loads, memory.ROWS.read_text().splitlines()))
    runs = {run.id: run for run in memory.stated_runs() if kept.get(run.id) and run.row["mem_gb"]}
    found = [memory.Memory(run, kept[name], memory.measured_peak_bytes(run)) for name, run in runs.items()]
    asset = tmp_path / "reserved.json"
    monkeypatch.setattr(memory.reserved, "TABLE", asset)
    memory.reserved.write_asset(memory.peaks_by_kind(found))
    assert json.loads(asset.read_text()) == json.loads((ASSETS / "reserved.json").read_text())
    assert memory.reserved.format_section(memory.peaks_by_kind(found)) in memory.TABLE.read_text()


def test_fits_is_no_plain_yes_where_the_allocator_may_need_more_than_the_gpu_has() -> None:
    """`fits` said yes of 74 to 79.6 GiB reserved of 79.6, and of 74.0 to 79.5, which leaves CUDA and NCCL 0.13 GiB."""
    pricer = Pricer("llama-3-8b", load_cluster("1x8-h100"))
    plan = pricer.plan(Statement(parse_layout("fsdp=8"), layers=2))
    assert plan is not None
    row, peak = ROWS_BY_KIND[PLANNED_PROGRAM], plan.cost.memory_bytes["peak"]
    likely = row["scale"] * peak + row["add_bytes"]
    marks = []
    high = likely * row["high"]
    for memory_bytes in (high + OUTSIDE_BYTES * 1.01, high + OUTSIDE_BYTES * 0.99, high * 1.002, likely * 0.999):
        small = replace(pricer.cluster, gpu=replace(pricer.cluster.gpu, memory_bytes=round(memory_bytes)))
        marks.append((fits_mark(plan, small), predict_reserved(plan, small).short))
        said = [words.partition(":")[0] for words in describe_fits([plan], small)]
        assert said == [mark for mark in marks[-1][:1] if mark != "yes"]
    assert marks == [("yes", False), ("tight", False), ("tight", False), ("short", True)]
    assert fits_mark(replace(plan, fits=False), pricer.cluster) == "no"
