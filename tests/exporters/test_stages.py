"""Pipeline stages in the files of Megatron-LM and torchtitan: their own parsers take them, and their readers give the layout back."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from planner_core.core import InputError, Plan, load_cluster
from planner_core.exporters.api import export_text
from planner_core.exporters.configs.megatron import stage_layout
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement, read_text
from planner_core.planning.pricing.configs.tools import megatron
from planner_core.planning.pricing.configs.tools.megatron_stages import layers_of
from tests.exporters.test_targets import megatron_flags


@cache
def of_layout(text: str, layers: int = 8) -> Plan:
    plan = Pricer("llama-3-8b", load_cluster("2x8-h100")).plan(
        Statement(parse_layout(text), accumulate=8, seq=2048, layers=layers)
    )
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,tp=2,pp=2,zero=1",
        "dp=2,tp=2,pp=4,order=tp-pp-dp,zero=1",
        "dp=4,tp=2,sp,pp=2,vp=2,zero=1",
        "dp=2,tp=2,pp=4,zero=1,copies=1-3-2-2",
    ],
)
def test_megatron_is_told_of_stages(text: str) -> None:
    made = export_text(of_layout(text), "megatron")
    assert made.nearest is not None, "stages are priced too"
    stated = parse_layout(text)
    assert megatron_flags(made.text)["pipeline-model-parallel-size"] == stated.pp
    fields, notes = megatron.read_arguments(made.text, "exported")
    again = megatron.read(fields, 16, notes)
    assert again.layout == stated and again.options["accumulate"] == 8


def test_stages_that_a_tool_deals_to_other_gpus_are_refused() -> None:
    between, inside = of_layout("dp=4,tp=2,pp=2,order=tp-pp-dp"), of_layout("dp=4,tp=2,pp=2,order=pp-tp-dp")
    with pytest.raises(InputError, match="torchtitan's pipeline is the outermost axis"):
        export_text(between, "torchtitan")
    with pytest.raises(InputError, match="in the orders tp-dp-pp and tp-pp-dp"):
        export_text(inside, "megatron")


@pytest.mark.parametrize("text", ["dp=4,tp=2,pp=2,zero=2", "fsdp=4,tp=2,pp=2"])
def test_no_tool_is_given_stages_that_need_more_memory_there(text: str) -> None:
    """Both run stages under ZeRO-1, so gradients and weights that the plan shards would be whole. To torchtitan they went without a word."""
    with pytest.raises(InputError, match=r"ZeRO-[23], and Megatron-LM's distributed optimizer is ZeRO-1"):
        export_text(of_layout(text), "megatron")
    with pytest.raises(InputError, match=r"ZeRO-[23], and with stages torchtitan gathers weights once a step"):
        export_text(of_layout(text), "torchtitan")


def test_deepspeed_says_why_its_file_holds_no_stages() -> None:
    with pytest.raises(
        InputError, match=r"lists its layers \(PipelineModule\), which no configuration says; give .*megatron"
    ):
        export_text(of_layout("dp=4,tp=2,pp=2,zero=1"), "deepspeed")


@pytest.mark.parametrize("copies", [(4, 4), (1, 3, 2, 2), (3, 2, 2, 1)])
def test_megatron_core_reads_the_layout(copies: tuple[int, ...]) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    text = stage_layout(copies)
    read = module.PipelineParallelLayerLayout(text, 2)
    read.validate_layer_layout(num_layers=sum(copies), mtp_num_layers=0)
    stages = module.PipelineParallelLayerLayout.parse_str_to_list(text)
    assert (
        tuple(sum("decoder" in str(x) or x == "t" for x in s) for s in stages) == copies == layers_of(text.lower(), "")
    )


@pytest.mark.parametrize(
    ("text", "copies"), [("Et*3|(tt|)*2t*2L", (3, 2, 2, 2)), ("Ett|tt|t,tL", (2, 2, 2)), ("E(t)*2|tL", (2, 1))]
)
def test_layouts_of_megatron(text: str, copies: tuple[int, ...]) -> None:
    assert layers_of(text.lower(), "") == copies


@pytest.mark.parametrize("text", ["E|ttL", "Et|xL", "t*9999|(t*9999|)*9999"])
def test_layouts_that_cannot_be(text: str) -> None:
    with pytest.raises(InputError):
        layers_of(text.lower(), "a.sh")


def test_first_and_last_stages_of_megatron() -> None:
    text = "--num-layers 40 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 9 --decoder-last-pipeline-num-layers 9"
    fields, notes = megatron.read_arguments(f"{text} --hidden-size 64 --num-attention-heads 4", "run.sh")
    assert megatron.read(fields, 16, notes).layout.copies == (9, 11, 11, 9)
    fields, notes = megatron.read_arguments(text.replace("40", "41"), "run.sh")
    with pytest.raises(InputError, match="23 to deal out in 2 equal parts"):
        megatron.read(fields, 16, notes)


def test_torchtitan_is_told_of_stages() -> None:
    made = export_text(of_layout("dp=4,tp=2,sp,pp=2,vp=2,zero=1"), "torchtitan")
    options = [
        w.removeprefix("--parallelism.") for x in made.text.splitlines() if "--parallelism." in x for w in x.split()
    ]
    assert "--training.local_batch_size 8" in made.text
    assert any("data parallelism (ZeRO-1) over 4" in r for r in made.remarks), "no weight of the plan is in shards"
    configs, tyro = pytest.importorskip("torchtitan.config.configs"), pytest.importorskip("tyro")
    args = [f"--{w}" if i % 2 == 0 else w for i, w in enumerate(options)]
    read = tyro.cli(configs.ParallelismConfig, args=args)
    assert (read.pipeline_parallel_degree, read.pipeline_parallel_schedule) == (2, "Interleaved1F1B")
    assert (read.pipeline_parallel_layers_per_stage, read.pipeline_parallel_microbatch_size) == (2, 1)
    uneven = export_text(of_layout("dp=4,tp=2,sp,pp=2,zero=1", 7), "torchtitan")
    assert any("stages have 4-3 layers in the plan" in r for r in uneven.remarks)


def test_torchtitan_is_given_zero_bubbles_as_it_runs_them() -> None:
    """The schedule is one of at least two stages a rank. It was written for one, which torchtitan refuses, and for two it was not read."""
    with pytest.raises(InputError, match="takes at least 2 stages of a rank"):
        export_text(of_layout("dp=4,tp=2,pp=2,schedule=zb"), "torchtitan")
    text = export_text(of_layout("dp=4,tp=2,sp,pp=2,vp=2,schedule=zb,zero=1"), "torchtitan").text
    read = read_text(text, "the file", 16, Path())
    assert (read.layout.schedule, read.layout.vp, read.notes) == ("zb", 2, ())
    replicas = text.replace("replicate_degree 1", "replicate_degree 2").replace("shard_degree 4", "shard_degree 2")
    (note,) = read_text(replicas, "the file", 16, Path()).notes
    assert "beside replicas it is priced with both in shards" in note


@pytest.mark.parametrize("target", ["deepspeed", "fsdp2"])
def test_no_form_is_advised_that_refuses_the_stages_too(target: str) -> None:
    """Both tools were advised for a plan that they refuse, and the cause was not said."""
    plan = of_layout("dp=4,tp=2,pp=2,order=pp-tp-dp")
    with pytest.raises(
        InputError, match=r"give .*json\W or \S*torchrun\W; megatron does not hold it: .* orders"
    ) as refused:
        export_text(plan, target)
    assert "torchtitan does not hold it: " in str(refused.value)


def test_forms_without_stages_say_so() -> None:
    plan = of_layout("dp=4,tp=2,pp=2,zero=1")
    with pytest.raises(InputError, match="takes no plan with pipeline stages"):
        export_text(plan, "fsdp2")
    with pytest.raises(InputError, match="not as zb"):
        export_text(of_layout("dp=4,tp=2,pp=2,schedule=zb"), "megatron")
    assert json.loads(export_text(plan, "json").text)["pipeline"]["copies"] == [4, 4]


def test_stated_copies() -> None:
    plan = of_layout("dp=4,tp=2,pp=2,copies=5-3")
    assert plan.pipeline is not None and plan.pipeline.copies == (5, 3)
    assert str(parse_layout("dp=4,tp=2,pp=2,copies=5-3")) == "dp=4,tp=2,pp=2,copies=5-3"
    for text, told in (
        ("pp=2,copies=3-3-2", "is for 3 stages"),
        ("copies=4-4", "give pp=2"),
        ("pp=2,copies=8-0", "copies of each stage"),
    ):
        with pytest.raises(InputError, match=told):
            parse_layout(text)
    with pytest.raises(InputError, match="deals out 9 copies"):
        of_layout("dp=4,tp=2,pp=2,copies=5-4")
