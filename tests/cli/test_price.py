"""`price` on the command line: the object of docs/CONTRACT.md, exit statuses, and one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import planner_core as shardscope
from planner_core.cli.main import main
from planner_core.core import load_plan, time_amount
from planner_core.cost import zero_stage
from planner_core.planning import Request
from planner_core.planning.analysis.legend import step_parts
from planner_core.planning.analysis.priced import price_text
from planner_core.planning.analysis.reporting import format_seconds, text
from tests.cli.test_cli import run
from tests.support.plans import planned

KEYS = {
    "schema",
    "layout",
    "legal",
    "reasons",
    "fits",
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "compute_time_s",
    "comm_time_s",
    "exposed_comm_time_s",
    "optimizer_time_s",
    "outside_time_s",
    "memory_bytes",
    "limited_by",
    "about",
    "fills",
    "suggestions",
    "best",
}


def price(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    status, out, err = run(capsys, "price", "llama-3-8b", "--layers", 2, "--seq", 1024, *args, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_report_has_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    r = price(capsys, "--layout", "dp=2,fsdp=8", "--micro-batch", 2, "--accumulate", 2)
    assert r.keys() >= KEYS
    assert (r["schema"], r["legal"], r["reasons"], r["fits"]) == ("shardscope.price/1", True, [], True)
    assert r["layout"] == {
        "dp": 2,
        "fsdp": 8,
        "tp": 1,
        "sp": False,
        "cp": 1,
        "ep": 1,
        "zero": 0,
        "cp_type": "ring",
        "pp": 1,
        "vp": 1,
        "schedule": "",
        "copies": [],
        "order": "tp-dp-pp",
    }
    assert (r["batch"], r["mesh"]) == (64, {"axes": ["data", "shard"], "sizes": [2, 8], "roles": ["data", "shard"]})
    assert sum(r["step_parts_s"].values()) == pytest.approx(r["step_time_s"])
    assert r["step_time_s"] == pytest.approx(r["compute_time_s"] + r["exposed_comm_time_s"] + r["optimizer_time_s"])
    assert r["step_time_low_s"] < r["step_time_s"] < r["step_time_high_s"]
    assert all(s.keys() >= {"change", "step_time_s", "fits"} and s["memory_bytes"] > 0 for s in r["suggestions"])
    assert (
        r["best"]["step_time_s"] <= r["step_time_s"] and r["best"]["tokens_per_s_per_gpu"] >= r["tokens_per_s_per_gpu"]
    )


def test_tokens_and_a_price_become_days_and_money(capsys: pytest.CaptureFixture[str]) -> None:
    r = price(capsys, "--layout", "fsdp=16", "--alone", "--tokens", "1B", "--price-per-gpu-hour", 2)
    assert (r["best"], r["suggestions"]) == (None, [])
    assert r["run"]["days"] == pytest.approx(1e9 / r["tokens_per_s_per_gpu"] / 16 / 86_400)
    assert r["run"]["cost"] == pytest.approx(2 * r["run"]["gpu_hours"]) == pytest.approx(2 * 24 * 16 * r["run"]["days"])


def test_a_tools_file_is_priced_as_its_layout_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}'
    )
    read = price(capsys, "--config", path, "--alone")
    assert sum("gradient_clipping" in note for note in read["notes"]) == 1
    said = price(capsys, "--layout", "dp=16,zero=1", "--micro-batch", 2, "--alone")
    assert read["step_time_s"] == said["step_time_s"]
    other = price(capsys, "--config", path, "--alone", "--micro-batch", 4)
    assert (other["layout"], other["micro_batch"]) == (said["layout"], 4)


def test_a_layout_that_is_not_legal_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "price", "llama-3-8b", "--layers", 2, "--layout", "tp=16", "--json")
    r = json.loads(out)
    assert (status, r["legal"], r["fits"]) == (3, False, False)
    assert r["reasons"] == ["8 key and value heads cannot be dealt to tp=16 ranks; give a divisor of 8"]
    status, out, _ = run(capsys, "price", "llama-3-8b", "--layers", 2, "--layout", "tp=16")
    assert status == 3 and r["reasons"][0] in out


def test_the_words_say_what_the_numbers_are(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "price", "llama-3-8b", "--layers", 2, "--seq", 1024, "--layout", "dp=2,tp=8", "--tokens", "1e9"
    )
    assert status == 0
    assert "dp=2,tp=8, micro-batch 8 x 1, 1024 tokens" in out
    assert "limited by" in out and "1e+09 tokens take" in out
    assert re.search(r"what helps most:\n.+: [\d.]+ m?s, [\d,]+ tokens/s/GPU, [\d.]+ GiB\n", out)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--layout", "fsdp=8"], "fsdp=8 takes 8 GPUs, but 2x8-h100 has 16; say for example fsdp=16"),
        (["--layout", "fsdp=16,cp=2"], "takes 32 GPUs, but 2x8-h100 has 16; say for example fsdp=8,cp=2"),
        (["--layout", "fsdp=16", "--micro-batch", "0"], "--micro-batch 0"),
        (["--layout", "fsdp=16", "--recompute", "some"], "some"),
        (["--layout", "fsdp=16", "--tokens", "-1"], "--tokens -1 is not a number of tokens such as 15T, 300B or 1e12"),
        (["--layout", "fsdp=16", "--price-per-gpu-hour", "2"], "needs --tokens"),
        (["--layout", "fsdp=16", "--compile", "--eager"], "not allowed with"),
        (["--config", "/no/such.toml"], "there is no file"),
        ([], "price needs a layout: --layout dp=2,fsdp=8,tp=4,sp, or --config FILE"),
    ],
)
def test_wrong_input_is_one_sentence(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "price", "llama-3-8b", *args)
    assert (status, out) == (2, "")
    assert said in err and len(err.splitlines()) <= 2


@pytest.mark.slow
def test_what_runs_now_stands_among_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys,
        "plan",
        "llama-3-8b",
        "--layers",
        2,
        "--batch",
        16,
        "--seq",
        512,
        "--layout",
        "dp=2,fsdp=8",
        "--tokens",
        "1e9",
        "--json",
    )
    r = json.loads(out)
    assert status == 0
    (now,) = (p for p in r["plans"] if p["name"] == "our current setup")
    assert now["mesh"]["roles"] == ["data", "shard"] and now["method"] == "layout"
    for p in r["plans"]:
        assert 0 < p["mfu"] < 1
        if p["band"]["why"]:  # nothing like it was published
            assert p["step_time_low_s"] is None and p["step_time_high_s"] is None
        else:
            assert p["step_time_low_s"] < p["step_time_s"] < p["step_time_high_s"]
        assert p["run"]["days"] * p["tokens_per_s_per_gpu"] == pytest.approx(1e9 / 16 / 86_400)
    status, _, err = run(capsys, "plan", "llama-3-8b", "--layers", 2, "--batch", 17, "--layout", "dp=16")
    assert status == 2 and "17 samples cannot be dealt to 16 ranks" in err


def test_a_missing_band_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """K11: experts that are dealt out have no published runs of a known machine."""
    arguments = "price mixtral-8x7b --cluster 2x8-h100 --layout dp=8,ep=8,tp=2,sp,zero=1 --seq 2048 --layers 2 --alone"
    assert main(arguments.split()) == 0
    assert (
        "from ... to is not known: no published run of which all is known deals out experts" in capsys.readouterr().out
    )


STAGED = ("llama-3-8b", "--cluster", "1x8-h100", "--layers", "2", "--batch", "32", "--layout", "dp=2,tp=2,pp=2")


def test_a_stated_setup_with_stages_takes_one_sample_at_once_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` took the number of the chosen plan, with which the stages stood idle, and the page as many as there are samples."""
    status, out, _ = run(capsys, "plan", *STAGED, "--json")
    (now,) = (p for p in json.loads(out)["plans"] if p["name"] == "our current setup")
    assert (status, now["micro_batch"], now["accumulate"]) == (0, 1, 16)
    assert not now["optimal"]  # the simulated step of stages is not what a search minimises
    assert any("micro-batch 1 x 16 and recomputation none" in n and "--micro-batch" in n for n in now["notes"])
    model, cluster, rest = STAGED[0], STAGED[1:3], (*STAGED[3:5], *STAGED[7:])
    _, out, _ = run(capsys, "price", model, *cluster, *rest, "--accumulate", 16, "--alone", "--json")
    assert json.loads(out)["step_time_s"] == pytest.approx(now["step_time_s"])
    _, out, _ = run(capsys, "plan", *STAGED, "--micro-batch", 2, "--json")
    (now,) = (p for p in json.loads(out)["plans"] if p["name"] == "our current setup")
    assert (now["micro_batch"], now["accumulate"]) == (2, 8)
    status, _, err = run(capsys, "plan", *STAGED[:-1], "dp=8", "--batch", 12, "--micro-batch", 1)
    assert status == 2 and "12 samples a step are not a multiple of the 8" in err and "--batch 8" in err


def test_a_bubble_is_not_communication(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", *STAGED)
    head, _, *rows = (line for line in out.splitlines() if "  " in line and not line.startswith(" "))
    assert "exposed comm" in head and "bubble" in head
    (own,) = (row for row in rows if row.startswith("our current setup"))
    names, as_s = ("exposed comm", "bubble", "all comm"), {"ms": 1e-3, "s": 1.0}
    cells = (own[: head.index(name) + len(name)].split()[-2:] for name in names)
    exposed, bubble, every = (float(number) * as_s[unit] for number, unit in cells)
    assert bubble > 0 and exposed < every < exposed + bubble


@pytest.mark.parametrize(
    "request_",
    [
        Request("gpt2-xl", cluster="1x8-h100", layers=1, batch=8, seq=256),  # waits for the host
        Request(
            "llama-3-8b", cluster="1x8-h100", layers=2, batch=16, seq=512, stack="torchtitan"
        ),  # is outside for 23 ms
        # stands idle in a bubble
        Request("t5-large", cluster="1x8-h100", layers=8, batch=64, seq=512, layout="dp=4,pp=2", accumulate=None),
    ],
    ids=lambda r: r.model,
)
def test_the_parts_of_a_row_add_up_to_its_step(request_: Request) -> None:
    """Of a step of 568 ms the table showed 535, without a word on its optimizer and on what is outside of the GPU's work."""
    found = planned(request_)
    head = re.split(r" {2,}", text(found).split("\n\n")[1].splitlines()[0])
    shown = head[head.index("MFU %") + 1 : head.index("all comm")]
    for plan in found.plans:
        parts = step_parts(plan)
        assert sum(parts[name] for name in shown) == pytest.approx(plan.cost.step_time_s, rel=1e-9), plan.name
    words = next(line for line in text(found).splitlines() if line.startswith("a step is "))
    assert all(name in words for name in shown)


def test_a_wait_for_the_host_is_not_computation() -> None:
    """A plan of many small kernels seemed to compute longer than one of few. What does not wait has no such column."""
    few, many = (planned(Request("gpt2-xl", cluster="1x8-h100", layers=1, batch=n, seq=256)) for n in (8, 2048))
    assert few.best.cost.host_wait_s and not any(p.cost.host_wait_s for p in many.plans)
    head, _, row, *_ = text(few).split("\n\n")[1].splitlines()
    cells = dict(zip(re.split(r" {2,}", head), re.split(r" {2,}", row), strict=True))
    cost = few.best.cost
    assert cells["compute"] == format_seconds(cost.compute_time_s - cost.host_wait_s)
    assert cells["host wait"] == format_seconds(cost.host_wait_s)
    assert "host wait" not in text(many)
    (told,) = (str(n) for n in few.notes if "waits for its host" in str(n))
    assert told.startswith(
        f"in {time_amount(cost.host_wait_s)} of the step of the best plan of one pipeline stage the GPU waits for its host, "
    )
    assert f"no such plan's step is shorter than {time_amount(few.best.bound or 0)}" in told


def test_a_usual_layout_of_another_micro_batch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "plan", "llama-3-8b", "--layers", 1, "--cluster", "1x8-h100", "--batch", 8, "--micro-batch", 1, "--json"
    )
    found = json.loads(out)
    names = {p["name"] for p in found["plans"]}
    told = next(n for n in found["notes"] if n.startswith("without a row"))
    assert "Megatron-LM" not in names and "Megatron-LM (2 at once)" in told and "--micro-batch 1" in told


def test_what_does_not_fit_is_not_called_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`price` called a stated plan of 1 190 GiB the best one, since it was the fastest of those that do not fit."""
    cluster, path = "1x8-h100:gpus=4,gpu=v100-32gb-sxm", tmp_path / "plan.json"
    priced = shardscope.price("llama-3-8b", cluster=cluster, dtype="float16", layout="dp=4")
    shown = price_text(priced)
    assert "needs least: " in shown and "best" not in shown
    assert priced.plan is not None and priced.best is not None and not priced.best.fits
    assert priced.best.cost.memory_bytes["peak"] < priced.plan.cost.memory_bytes["peak"] / 2
    status, out, err = run(capsys, "plan", "llama-3-8b", "--cluster", cluster, "--dtype", "float16", "-o", path)
    plan = load_plan(path)
    assert status == 0 and not plan.fits
    gib = plan.cost.memory_bytes["peak"] / 2**30
    assert f"plan.json: least memory, which does not fit: it takes {gib:.1f} GiB a GPU of " in err
    assert "0 candidates scored" not in out and not any(row.startswith("best ") for row in out.splitlines())


@pytest.mark.parametrize(
    ("narrowing", "stages", "scope"),
    [
        ((), {1, 2}, "plans of one pipeline stage"),
        pytest.param(("--zero", 3), {3}, "plans of one pipeline stage and ZeRO-0 or 3", marks=pytest.mark.slow),
        pytest.param(("--zero", 0), {0}, "plans of one pipeline stage and ZeRO-0", marks=pytest.mark.slow),
        (
            ("--for", "deepspeed"),
            {1, 2},
            "plans of one pipeline stage that deepspeed can be told by ZeRO-1 to 3 over all ranks",
        ),
        pytest.param(
            ("--for", "torchtitan"),
            {0, 2, 3},
            "plans of one pipeline stage that torchtitan can be told with tensor ranks that split tokens, experts over data-parallel "
            "ranks alone, and context ranks that gather, for long or few samples",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_proof_says_among_which_plans(
    narrowing: tuple[object, ...], stages: set[int], scope: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The default searched stages 0 and 3, and `price` named a plan of ZeRO-2 that is 5 % faster than its "proven"."""
    line, path = ("llama-3-8b", "--cluster", "1x8-h100", "--layers", 1), tmp_path / "plan.json"
    _, out, _ = run(capsys, "plan", *line, *narrowing, "--pick", "best", "-o", path)
    assert f"proven the best among {scope};" in out and f"none is better among {scope};" in out
    best = load_plan(path)
    assert best.optimal and zero_stage(best) in stages
    if not narrowing:
        found = price(capsys, *line[1:-2], "--layers", 1, "--seq", best.workload.seq, "--layout", "fsdp=8")
        assert found["best"]["step_time_s"] == pytest.approx(best.cost.step_time_s, rel=1e-9)


def test_a_note_stands_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Notes of a result went to stderr too, and those of a paper's method began with its name twice."""
    _, out, err = run(capsys, "plan", "gpt2-xl", "--cluster", "1x8-h100", "--layers", 2, "--batch", 17)
    assert (out + err).count("17 samples do not divide over 8 GPUs") == 1
    _, out, _ = run(capsys, "compare", "gpt2-xl", "--cluster", "1x8-h100", "--layers", 2)
    assert "TAP: TAP" not in out and "\nTAP: least volume" in out


@pytest.mark.parametrize(("beside", "said"), [((), True), (("--recompute", "full"), False)])
def test_a_file_that_cannot_state_recomputation_is_priced_with_a_word_of_it(
    beside: tuple[str, ...], said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exported plan that recomputes came back from DeepSpeed's file as one that does not fit, without a word of why."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    )
    given = ["price", "llama-3-8b", "--cluster", "1x8-h100", "--layers", "1", "--seq", "256", "--config", str(file)]
    assert main([*given, *beside, "--alone"]) == 0
    shown = capsys.readouterr().out
    note = "does not say whether layers are recomputed, which the training script does; priced without, and --recompute full"
    assert (note in shown) is said


def test_images_have_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """--seq 12 made twelve tokens of each image, and the speed of a ResNet stood in tokens."""
    stated = ("price", "resnet50-100k", "--cluster", "1x8-h100", "--layout", "dp=8", "--batch", "64", "--alone")
    status, out, err = run(capsys, *stated, "--seq", "12")
    assert status == 0, err
    assert "--seq 12 is not used" in out and "samples/s/GPU" in out and "tokens/s" not in out
    assert run(capsys, *stated)[1].splitlines()[2:] == [line for line in out.splitlines() if "--seq" not in line][2:]
