"""What a visitor runs now: as text in the address, from a tool's own file, and as a plan beside the recommended one."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.address import settings, setups
from explorer.jobs import export as exporting
from explorer.text import units
from planner_core.cli.main import main
from planner_core.core import RECOMPUTE, InputError, load_plan
from planner_core.planning.methods import CP_TYPES, Layout
from tests.pages.test_app import open_page, table
from tests.pages.test_edits_stay import SCRIPT as SENTENCE
from tests.pages.test_edits_stay import field, plan
from tests.support.app_test import AppTest
from tests.support.plans import planned

TOML = b"""
[parallelism]
tensor_parallel_degree = 2
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 2048
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
degrees = st.integers(1, 64)
plain = st.builds(Layout, degrees, degrees, st.integers(2, 64), st.booleans(), zero=st.sampled_from([0, 1, 2]))
long = st.builds(replace, plain, cp=st.integers(2, 64), cp_type=st.sampled_from(list(CP_TYPES)))
layouts = plain | long | st.builds(replace, plain | long, ep=degrees)
setup = st.builds(
    setups.StatedSetup, layouts, st.none() | st.integers(1, 999), st.sampled_from([r for r in RECOMPUTE if r != "auto"])
) | st.builds(setups.StatedSetup, layouts, micro_batch=st.integers(1, 999))


@given(setup)
def test_a_setup_is_read_back_from_the_address(stated: setups.StatedSetup) -> None:
    assert setups.parse_setup(stated.write()) == stated
    values, problems = settings.parse_query({"setup": ",".join(stated.write())})
    assert not problems
    assert values["setup"] == stated.write()


@pytest.mark.parametrize("text", ["tp", "dp=0", "tp=2,accumulate=0", "dp=8,recompute=auto", "dp=8,recompute=some"])
def test_what_is_no_setup_is_told(text: str) -> None:
    with pytest.raises(InputError):
        setups.parse_setup(text.split(","))
    values, problems = settings.parse_query({"setup": text})
    assert values["setup"] == ()
    assert "is not a layout" in problems[0]


def test_a_tools_file_states_the_layout_and_the_work_of_a_step() -> None:
    stated, work, _ = setups.parse_file("run.toml", TOML, 16, {})
    software = (("stack", "torchtitan"), ("compiled", True))
    assert stated == setups.StatedSetup(Layout(fsdp=8, tp=2, sp=True), None, "full", 2, software)
    assert work == {"batch": 64, "seq": 2048, "optimizer": "adamw"}
    with pytest.raises(InputError, match=r"run\.toml"):
        setups.parse_file("run.toml", b"[", 16, {})


MEGATRON = """torchrun pretrain_gpt.py --num-layers 4 --hidden-size 1600 --num-attention-heads 25 --tensor-model-parallel-size 1
    --micro-batch-size 2 --global-batch-size 32 --seq-length 1024 --bf16 --use-distributed-optimizer --make-vocab-size-divisible-by 1"""


def test_the_page_prices_what_the_file_of_a_tool_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program that runs the step and its loss reach the page's price: it is that of `price --config`."""
    file = tmp_path / "run.sh"
    file.write_text(MEGATRON)
    assert (
        main(["price", "gpt2-xl", "--cluster", "1x8-h100", "--layers", "4", "--config", str(file), "--alone", "--json"])
        == 0
    )
    step_s = json.loads(capsys.readouterr().out)["step_time_s"]
    stated, work, _ = setups.parse_file("run.sh", MEGATRON.encode(), 8, {})
    assert {"stack": "megatron", "loss": "whole"}.items() <= dict(stated.options).items()
    address = {key: str(value) for key, value in work.items()}
    at = open_page("compare", **address, model="gpt2-xl", cluster="1x8-h100", layers="4", setup=",".join(stated.write()), compare="best,our-current-setup")  # fmt: skip
    assert not at.exception
    (steps,) = (h.value for h in at.html if "class='steps'" in h.value)
    assert f"<b>{units.seconds(step_s)}</b>" in steps


def test_a_file_of_another_model_is_told(tmp_path: Path) -> None:
    *_, notes = setups.parse_file("run.sh", MEGATRON.encode(), 8, {"num_hidden_layers": 48})
    assert any("num_hidden_layers 4 (48 in the model)" in note for note in notes)


def test_a_setup_that_cannot_be_is_told_in_place() -> None:
    at = open_page("overview", model="gpt2-xl", cluster="1x8-h100", layers="2", setup="dp=4")
    assert not at.exception
    assert "DP 4 takes 4 GPUs, but the cluster has 8; say for example DP 4 × FSDP 2." in at.warning[0].value


def test_compare_shows_the_setup_on_its_own_micro_batch() -> None:
    """Its row has the step and the memory of a plan of two micro-batches of half the batch."""
    address = {"model": "gpt2-xl", "cluster": "1x8-h100", "layers": "2", "batch": "64"}
    at = open_page("compare", **address, setup="fsdp=8,accumulate=2", compare="best,our-current-setup")
    assert not at.exception
    (steps,) = (h.value for h in at.html if "class='steps'" in h.value)
    row = next(r for r in steps.split("<tr") if "<th scope='row'>Our current setup<" in r)
    here = settings.build_request(settings.parse_query(address)[0])
    asked = replace(here, layout="fsdp=8", accumulate=2, recompute=setups.NO_RECOMPUTATION)
    (cost,) = (p.cost for p in planned(asked).plans if p.method == "layout")
    assert f"<b>{units.seconds(cost.step_time_s)}</b>" in row and units.memory(cost.memory_bytes["peak"]) in row


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        ("FSDP 8 x TP 8, mbs 1, selective", setups.StatedSetup(Layout(fsdp=8, tp=8), None, "selective", 1)),
        ("fsdp=8,tp=8", setups.StatedSetup(Layout(fsdp=8, tp=8))),
        ("HSDP 2x8, full", setups.StatedSetup(Layout(dp=2, fsdp=8), None, "full")),
        ("DDP 64", setups.StatedSetup(Layout(dp=64))),
        ("ZeRO-1 8 × TP 8, SP, 4 micro-batches", setups.StatedSetup(Layout(dp=8, tp=8, sp=True, zero=1), 4)),
        ("fsdp2 8 + cp 8, ulysses", setups.StatedSetup(Layout(fsdp=8, cp=8, cp_type="ulysses"))),
        ("dp=4,tp=2,pp=2,zero=1", setups.StatedSetup(Layout(dp=4, tp=2, pp=2, zero=1))),
        ("DP 4 x TP 2 x PP 2, ZeRO-1, mbs=2", setups.StatedSetup(Layout(dp=4, tp=2, pp=2, zero=1), micro_batch=2)),
        (
            "TP 8, stack=megatron, loss=whole",
            setups.StatedSetup(Layout(tp=8), options=(("stack", "megatron"), ("loss", "whole"))),
        ),
    ],
)
def test_a_setup_is_a_line_of_text(line: str, stated: setups.StatedSetup) -> None:
    assert setups.parse_line(line) == stated
    assert setups.parse_line(stated.line()) == stated


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("FSDP eight", "fsdp eight"),
        ("FSDP 8, mbs 3, 2 micro-batches", "leave one out"),
        ("FSDP 8, mbs 0", "from 1"),
        ("SP, DP 8", "sp splits"),
        ("DP 4, DP 2", "dp is given twice"),
        ("DP 4, stack=megatorn", "megatorn"),
        ("FSDP 8, attention=flash9", "flash9"),
    ],
)
def test_a_line_that_states_no_setup_is_refused(line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        setups.parse_line(line)


def test_the_size_of_a_micro_batch_stays_where_the_batch_changes() -> None:
    stated = setups.parse_line("HSDP 2x4, mbs 2")
    assert [stated.count_micro_batches(batch) for batch in (16, 64)] == [1, 4]
    with pytest.raises(InputError, match="8 ranks take 16 at once; give another mbs, or a multiple of 16"):
        stated.count_micro_batches(24)


def test_the_field_of_the_page_takes_it_and_checks_the_gpus() -> None:
    at = AppTest.from_string(SENTENCE).run()
    field(at, "setup").set_value("FSDP 8 x TP 4")
    plan(at, "setup")
    refusal = "FSDP 8 × TP 4 takes 32 GPUs, but the cluster has 16; say for example FSDP 4 × TP 4."
    assert refusal in at.warning[0].value and not at.session_state["values"]["setup"]
    field(at, "setup").set_value("FSDP 8 x TP 2, mbs 1")
    plan(at, "setup")
    assert not at.warning and at.session_state["values"]["setup"] == ("fsdp=8", "tp=2", "mbs=1")
    assert field(at, "setup").value == "FSDP 8 × TP 2, mbs 1"
    field(at, "batch").set_value("64")
    plan(at, "batch")
    assert not at.warning and field(at, "setup").value == "FSDP 8 × TP 2, mbs 1"


def test_micro_batches_of_the_setup_share_the_batch_of_the_step() -> None:
    """The model's own batch is of a step: in two micro-batches each has half of it, and all that a step computes stays the same."""
    found = {}
    for times in (1, 2):
        at = open_page("plans", layers="2", setup=f"fsdp=8,tp=2,accumulate={times}", plan=setups.PLAN_ID)
        assert not at.exception and not at.warning
        (row,) = (r for r in table(at) if r["what"].startswith("Our current setup"))
        found[times] = [cell["order"] for cell in row["cells"]]
    assert found[2][0] < 1.5 * found[1][0] and found[2][2] < found[1][2]


OWN = {"model": "gpt2-xl", "cluster": "1x8-h100", "layers": "4", "setup": "dp=8,zero=1,accumulate=2,recompute=full"}


@pytest.mark.parametrize("page", ["overview", "plans", "compare"])
def test_every_page_of_plans_can_show_the_setup(page: str) -> None:
    at = open_page(page, **OWN, plan=setups.PLAN_ID)
    assert not at.exception and not at.warning
    assert at.session_state["values"]["plan"] == setups.PLAN_ID
    if page == "overview":
        assert any(m.value.startswith("ZeRO\\-1 8") and " takes " in m.value for m in at.markdown)
        row = next(r for r in table(at) if r["what"].startswith("our current setup"))
        named = (
            "ZeRO-1 8, 2 micro-batches",
            "our current setup; full recomputation",
        )  # what the name says is not said again
        assert (row["name"], row["what"]) == named
    if page == "plans":
        assert "### ZeRO\\-1 8" in [m.value for m in at.markdown]
    if page == "compare":  # its messages stand beside those of the strongest rival
        heads = [m.value for m in at.markdown if m.value.endswith(" GB per GPU")]
        assert len(heads) == 2 and heads[0].startswith("Our current setup")


def test_the_setup_is_exported_and_its_command_makes_it_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []
    monkeypatch.setattr(
        exporting, "export", lambda plan, *_, **options: made.append(plan) or exporting.ExportedFile("", ())
    )
    at = open_page("overview", **OWN, plan=setups.PLAN_ID)
    at.button(key="export").click().run()
    assert not at.exception and [p.method for p in made] == ["layout"]
    (command,) = (c.value.replace("\\\n", "") for c in at.code if c.value.startswith("python -m planner_core plan"))
    assert "--layout dp=8,zero=1" in command and "--pick 'our current setup'" in command
    assert main([*shlex.split(command)[3:-1], str(tmp_path / "plan.json")]) == 0
    assert load_plan(tmp_path / "plan.json").cost == made[0].cost


def test_another_model_leaves_out_what_its_own_capture_decides() -> None:
    """Who uploads a model after the file of a tool typed none of the file's options: its layout is priced, and what is left out is said."""
    stated = setups.parse_setup(("dp=4", "tp=2", "zero=1", "vocab_multiple=128", "attention=flash2"))
    here, left = stated.for_model("own-1234")
    assert here.options == (("attention", "flash2"),) and here.layout == stated.layout
    assert left == "left out, since an uploaded model keeps its own graph: vocab_multiple 128"
    assert stated.for_model("llama-3-8b") == (stated, "")
