"""Pipeline stages in the files of Megatron-LM and torchtitan: their own parsers take them, and their readers give the layout back."""

from __future__ import annotations
import __future__

import ast
import json
import math
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner_core.cli.options import name_flags
from planner_core.core import InputError, Plan
from planner_core.cost import even_copies
from planner_core.exporters.api import export_text
from planner_core.exporters.configs.megatron import stage_layout
from planner_core.exporters.nearest import price_file
from planner_core.exporters.targets import write_target
from planner_core.planning.methods import TARGETS, parse_layout
from planner_core.planning.pricing import read_text
from planner_core.planning.pricing.configs.tools import megatron
from planner_core.planning.pricing.configs.tools.megatron_stages import layers_of
from tests.exporters.test_targets import flags_of, written
from tests.support.plans import plan_of_layout


@cache
def of_layout(text: str, layers: int = 8) -> Plan:
    return plan_of_layout("llama-3-8b", "2x8-h100", text, accumulate=8, seq=2048, layers=layers)


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
    assert flags_of(made.text)["pipeline-model-parallel-size"] == stated.pp
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


def test_what_no_tool_holds_names_the_search_for_a_tool() -> None:
    """Llama-3-70B on slow links is best with stages of context ranks and ZeRO-2, which no tool holds; --for megatron was not named."""
    plan = of_layout("dp=4,tp=2,pp=2,zero=2")
    for target, tools in (
        ("megatron", "megatron"),
        ("torchtitan", "torchtitan"),
        ("deepspeed", "megatron or torchtitan"),
    ):
        with pytest.raises(InputError) as refused:
            export_text(plan, target)
        searches = " or ".join(f"--for {tool}" for tool in tools.split(" or "))
        assert name_flags(refused.value.sentence).endswith(f"; {searches} plans what it can be told")
    config = {**plan.model.config, "num_hidden_layers": 7, "model_type": "t5"}
    encoder = replace(plan, model=replace(plan.model, config=config))
    with pytest.raises(InputError) as refused:
        export_text(encoder, "torchtitan")
    assert "--for" not in name_flags(refused.value.sentence), "it has no stages of such a model"


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
    assert flags_of(made.text)["training.local_batch_size"] == 8
    assert any("data parallelism (ZeRO-1) over 4" in r for r in made.remarks), "no weight of the plan is in shards"
    configs, tyro = pytest.importorskip("torchtitan.config.configs"), pytest.importorskip("tyro")
    args = [f"--{w}" if i % 2 == 0 else w for i, w in enumerate(options)]
    read = tyro.cli(configs.ParallelismConfig, args=args)
    assert (read.pipeline_parallel_degree, read.pipeline_parallel_schedule) == (2, "Interleaved1F1B")
    assert (read.pipeline_parallel_layers_per_stage, read.pipeline_parallel_microbatch_size) == (2, 1)
    uneven = export_text(of_layout("dp=4,tp=2,sp,pp=2,zero=1", 7), "torchtitan")
    assert not any("layers in the plan" in r for r in uneven.remarks), "torchtitan deals out 4 and 3 too"


@cache
def titan_functions() -> dict[str, Any]:
    """Return torchtitan's functions that deal layers to stages. Their module imports packages that need a GPU, so they run alone."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    file = Path(pytest.importorskip("torchtitan").__path__[0]) / "distributed" / "pipeline_parallel.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = ("_get_pipeline_metadata", "_generate_llm_fqn_per_model_part")
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(tree.body) == len(names)
    functions: dict[str, Any] = {"math": math, **vars(schedules)}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(file), "exec", flags=flags), functions)
    return functions


def dealt_by_torchtitan(text: str, layers: int) -> tuple[int, ...]:
    """Return the layers of each stage that torchtitan's own functions make of written options. They raise ValueError for wrong ones."""
    functions = titan_functions()
    configs, tyro = pytest.importorskip("torchtitan.config.configs"), pytest.importorskip("tyro")
    lines = [x.replace("--parallelism.", "--") for x in text.splitlines() if x.startswith("--parallelism.")]
    read = tyro.cli(configs.ParallelismConfig, args=" ".join(lines).split())
    ranks = SimpleNamespace(pp=read.pipeline_parallel_degree)
    sizes = functions["_get_pipeline_metadata"](ranks, read, SimpleNamespace(layers=range(layers)))
    stages = functions["_generate_llm_fqn_per_model_part"](*sizes)
    return tuple(sum(name.startswith("layers.") for name in stage) for stage in stages)


@pytest.mark.parametrize(
    ("layout", "layers", "same"),
    [
        ("dp=4,tp=2,sp,pp=2,vp=2,zero=1", 8, True),
        ("tp=2,sp,pp=8,vp=3", 80, False),
        ("tp=2,sp,pp=8", 9, True),
        ("tp=2,sp,pp=8", 10, True),
        ("dp=2,tp=2,pp=4,zero=1,copies=1-3-3-2", 9, True),
        ("dp=2,tp=2,pp=4,zero=1,copies=1-2-4-2", 9, False),
        ("dp=2,tp=2,pp=4,zero=1,copies=9-11-11-9", 40, True),
        ("dp=2,tp=2,pp=4,vp=2,zero=1,schedule=zbv", 20, True),
        ("dp=4,tp=2,sp,pp=2,vp=3,zero=1", 16, True),
    ],
)
@pytest.mark.slow(
    but=(
        "dp=4,tp=2,sp,pp=2,vp=2,zero=1-8-True",
        "tp=2,sp,pp=8,vp=3-80-False",
        "dp=2,tp=2,pp=4,zero=1,copies=1-3-3-2-9-True",
        "dp=2,tp=2,pp=4,vp=2,zero=1,schedule=zbv-20-True",
    )
)
def test_torchtitan_makes_the_stages_of_the_plan(layout: str, layers: int, same: bool) -> None:
    """Its options gave as many layers a stage as the fullest one of the plan has, of which torchtitan made 20 stages for 24, and refused
    them; the price was of 16."""
    plan = of_layout(layout, layers)
    assert plan.pipeline is not None
    text, remarks, _ = write_target(TARGETS["torchtitan"], plan)
    dealt = dealt_by_torchtitan(text, layers)
    assert (dealt == plan.pipeline.copies) is same
    assert any("layers in the plan, and" in r for r in remarks) is not same
    priced = price_file(plan, text)
    assert priced is not None and priced[0].pipeline is not None
    assert priced[0].pipeline.copies == dealt, "the price is of the file's stages"


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_are_read_as_torchtitan_deals_them(schedule: str) -> None:
    """Layers of a stage were read by nobody, so each number of them had one price."""
    number = 0
    for layers, each, first, last in product((8, 13, 32), (None, 1, 2, 3, 4, 8), (0, 1, 2), (0, 1, 2)):
        options = {"degree": 4, "schedule": schedule, "first_stage_less_layers": first, "last_stage_less_layers": last}
        options |= {"layers_per_stage": each} if each else {}
        lines = [f"--parallelism.pipeline_parallel_{name} {value}" for name, value in options.items()]
        setup = read_text("\n".join([*lines, "--training.local_batch_size 8"]), "the file", 16, Path())
        assert setup.stages is not None
        try:
            dealt = dealt_by_torchtitan("\n".join(lines), layers)
        except ValueError:
            dealt = ()
        # torchtitan's schedule of two stages a rank refuses more of them later, and no price has a stage without layers.
        if not all(dealt) or not dealt or (schedule == "ZBVZeroBubble" and len(dealt) > 8):
            with pytest.raises(InputError, match=r"^the file: "):
                setup.stages.deal(setup.layout, layers, "the file")
            continue
        made = setup.stages.deal(setup.layout, layers, "the file")
        assert (made.copies or even_copies(layers, made.pp * made.vp)) == dealt
        number += 1
    assert number > 10


def test_layers_of_a_stage_change_the_price() -> None:
    plan = of_layout("dp=4,tp=2,sp,pp=2,vp=2,zero=1", 16)
    text = written(plan, "torchtitan")
    files = [text.replace("layers_per_stage 4", f"layers_per_stage {n}") for n in (4, 2, 1)]
    priced = [price_file(plan, file) for file in files]
    assert [len(p[0].pipeline.copies) for p in priced if p and p[0].pipeline] == [4, 8, 16]
    assert len({p[1].step_time_s for p in priced if p}) == 3
    with pytest.raises(InputError, match=r"layers_per_stage 8 makes 2 stages of 16 layers"):
        price_file(plan, text.replace("layers_per_stage 4", "layers_per_stage 8"))
    with pytest.raises(InputError, match=r"layers_per_stage 6 makes 3 stages"):
        price_file(plan, text.replace("layers_per_stage 4", "layers_per_stage 6"))


def test_modules_of_stages_are_counted() -> None:
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3"], ["layers.4"], ["norm", "layers.5"]]
    toml = f"[parallelism]\npipeline_parallel_degree = 4\nmodule_fqns_per_model_part = {parts}\n[training]\nlocal_batch_size = 8\n"
    setup = read_text(toml, "a.toml", 16, Path("a.toml"))
    assert setup.stages is not None and setup.stages.deal(setup.layout, 6, "a.toml").copies == (1, 3, 1, 1)
    with pytest.raises(InputError, match="lists 3 stages, but must list a multiple of 4"):
        replace(setup.stages, parts=(1, 3, 2)).deal(setup.layout, 6, "a.toml")


def test_torchtitan_is_given_zero_bubbles_as_it_runs_them() -> None:
    """The schedule is one of at least two stages a rank. It was written for one, which torchtitan refuses, and for two it was not read."""
    with pytest.raises(InputError, match="takes at least 2 stages of a rank"):
        export_text(of_layout("dp=4,tp=2,pp=2,schedule=zb"), "torchtitan")
    text = written(of_layout("dp=4,tp=2,sp,pp=2,vp=2,schedule=zb,zero=1"), "torchtitan")
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
