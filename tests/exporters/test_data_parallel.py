"""Plans that split the batch only leave as FSDP2 code, which trains as one process does, and as accelerate's configuration."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import planner_core as shardscope
from planner_core.cli.main import main
from planner_core.cli.options import name_flags
from planner_core.core import DeviceMesh, Edge, InputError, ParamPlan, Plan, R, SitePlan, State, load_cluster, load_plan
from planner_core.cost import zero_stage
from planner_core.exporters.api import export, export_text
from planner_core.exporters.nearest import data_parallel_plans
from planner_core.exporters.remarks import Remark, RemarkKind
from planner_core.planning import Request, plan_model
from planner_core.planning.methods import TORCHRUN
from tests.support.plans import plan_of_layout, planned
from tests.support.ranks import run_ranks
from tests.support.tiny_models import LLAMA, LLAMA_SIZES, tiny_config


@cache
def plans(gpus: int = 2, mesh: str = "2") -> dict[str, Plan]:
    found = shardscope.plan(LLAMA, cluster=f"1x8-h100:gpus={gpus}", mesh=mesh, batch=8, seq=16, dtype="float32")
    return {p.name: p for p in found.plans}


def trained(shard: Any, own: slice) -> list[float]:
    """Losses of the whole batch over three steps; `shard` takes the model, `own` are this rank's samples."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, use_cache=False))
    if shard is not None:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0))[own]
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if shard is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses


def on_ranks(file: str) -> list[Any]:
    spec = importlib.util.spec_from_file_location("exported", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size, rank = 8 // dist.get_world_size(), dist.get_rank()
    held: list[int] = []

    def shard(model: Any) -> None:
        module.shard(model, device="cpu")
        held.append(sum(p.to_local().numel() for p in model.parameters()))

    losses = trained(shard, slice(rank * size, (rank + 1) * size))
    with pytest.raises(ValueError, match="mesh of sizes"):
        module.shard(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)), init_device_mesh("cpu", (dist.get_world_size(), 1)))
    return [losses, held[0]]


def test_fsdp2_code_trains_as_one_process_does(tmp_path: Path) -> None:
    said = export(plans()["FSDP"], "fsdp2", tmp_path / "shard.py")
    assert any("norm" in line and "whole in the plan" in line for line in said), said
    losses, held = run_ranks(on_ranks, 2, (str(tmp_path / "shard.py"),))[0]
    assert losses == pytest.approx(trained(None, slice(None)), rel=1e-4)
    assert held == sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)).parameters()) // 2


def hybrid() -> Plan:
    """Data parallel over an outer axis and FSDP over an inner one, of 2 devices each; its edges have placements but no steps."""
    outer, inner = plans()["data parallel"], plans()["FSDP"]

    def state(a: State, b: State) -> State:
        return State((*a.forward, *b.forward), (*a.gradient, *b.gradient))

    def edges(a: tuple[Edge, ...], b: tuple[Edge, ...]) -> tuple[Edge, ...]:
        return tuple(
            replace(x, src=state(x.src, y.src), dst=state(x.dst, y.dst), forward=(), backward=())
            for x, y in zip(a, b, strict=True)
        )

    def param(a: ParamPlan, b: ParamPlan) -> ParamPlan:
        return ParamPlan(
            (*a.stored, *b.stored), (*a.working, *b.working), (*a.gradient, *b.gradient), tuple(1 for _ in b.gathered)
        )

    blocks = {}
    for label, block in inner.blocks.items():
        other = outer.blocks[label]
        sites = {
            k: SitePlan(edges(other.sites[k].inputs, s.inputs), edges(other.sites[k].outputs, s.outputs))
            for k, s in block.sites.items()
        }
        blocks[label] = replace(
            block, params={k: param(other.params[k], p) for k, p in block.params.items()}, sites=sites
        )
    return replace(inner, name="HSDP", blocks=blocks, mesh=DeviceMesh(("node", "gpu"), (2, 2)))


@pytest.mark.slow
def test_hsdp_code_trains_as_one_process_does(tmp_path: Path) -> None:
    said = export(hybrid(), "fsdp2", tmp_path / "shard.py")
    assert any("2 shards, 2 times" in line for line in said)
    losses, held = run_ranks(on_ranks, 4, (str(tmp_path / "shard.py"),))[0]
    assert losses == pytest.approx(trained(None, slice(None)), rel=1e-4)
    assert held == sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)).parameters()) // 2


def test_plans_that_split_more_than_the_batch_are_refused() -> None:
    for target in ("fsdp2", "accelerate"):
        with pytest.raises(InputError, match=r"splits .* over mesh axis tensor.*torchrun"):
            export_text(plans()["Megatron-LM"], target)


def test_accelerate_reads_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By accelerate's own parser: the environment that it would launch with, and the plugin that a training run makes of it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = tmp_path / "accelerate.yaml"
    export(plans()["FSDP"], "accelerate", file)
    hybrid_file = tmp_path / "hybrid.yaml"
    export(hybrid(), "accelerate", hybrid_file)
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(hybrid_file), "train.py"])
    )
    assert (args.num_processes, args.parallelism_config_dp_replicate_size, args.parallelism_config_dp_shard_size) == (
        4,
        2,
        2,
    )
    args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args, _, _ = _validate_launch_command(args)
    assert (args.num_processes, args.num_machines, args.use_fsdp, args.mixed_precision) == (2, 1, True, "no")
    made = prepare_multi_gpu_env(args)
    wanted = {
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    assert {k: made[k] for k in wanted} == wanted
    for key, value in made.items():
        if key.startswith("FSDP") and value is not None:
            monkeypatch.setitem(os.environ, key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]


def test_accelerate_reads_its_deepspeed_plugin_and_ddp(tmp_path: Path) -> None:
    """A plan of ZeRO on DeepSpeed's stack is its plugin's; whole states are DDP."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    asked = {"cluster": "1x8-h100", "batch": 32, "seq": 2048, "layers": 2, "accumulate": 2}
    plan = plan_model(Request("llama-3-8b", tool="accelerate", **asked), passes={}).best
    file = tmp_path / "accelerate.yaml"
    said = " ".join(export(plan, "accelerate", file))
    # The norms are of no weight beside the rest, so the difference changes no number.
    assert (
        "post_attention_layernorm.weight: " in said and "optimizer states are whole in the plan, sharded here" in said
    )
    assert "less memory, more traffic" not in said
    said = " ".join(export(plan, "deepspeed", tmp_path / "zero.json"))
    assert (
        "lie in another way there: input_layernorm.weight, model.norm.weight, post_attention_layernorm.weight" in said
    )
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    assert args.use_deepspeed and not args.use_fsdp and args.gradient_accumulation_steps == 2
    assert args.zero_stage == zero_stage(plan) > 0 and args.mixed_precision == "bf16"
    export(plans()["data parallel"], "accelerate", file)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
    assert args.multi_gpu and not args.use_deepspeed and not args.use_fsdp


@pytest.mark.parametrize(
    ("target", "recompute", "flags"),
    [
        ("accelerate", "none", "--accumulate 2 --seq 512 --micro-batch 2"),
        ("deepspeed", "none", "--seq 512"),
        ("deepspeed", "full", "--seq 512 --recompute full"),
    ],
)
def test_a_file_is_priced_as_it_is_read_back_with_what_it_does_not_state(
    target: str, recompute: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan of micro-batches of 2 came back from accelerate's file as one of 1, and one that recomputes from DeepSpeed's without that."""
    run = {"micro_batch": 2, "accumulate": 2, "seq": 512, "layers": 2, "recompute": recompute}
    stack = None if target == "accelerate" else target
    plan = plan_of_layout("llama-3-8b", "1x8-h100", "fsdp=8", **run, stack=stack)
    made = export_text(plan, target)
    said = f"price --config FILE reads it back with what it does not state: {flags}"
    assert said in map(name_flags, made.remarks)
    assert made.nearest is not None
    (tmp_path / "file").write_text(made.text)
    given = ["price", "llama-3-8b", "--cluster", "1x8-h100", "--layers", "2", "--config", str(tmp_path / "file")]
    assert main([*given, *flags.split(), "--alone", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert made.nearest.step_time_s == pytest.approx(read["step_time_s"])
    assert made.nearest.peak_bytes == read["memory_bytes"]["peak"]


@pytest.mark.parametrize(
    ("model", "layout", "target", "flags"),
    [
        ("llama-3-8b", "dp=4,tp=2,zero=1", "deepspeed", "--seq 512"),
        ("llama-3-8b", "dp=2,tp=4", "hf", "--accumulate 2 --seq 512 --micro-batch 2"),
        ("llama-3-8b", "fsdp=4,tp=2", "hf", "--accumulate 2 --seq 512 --micro-batch 2 --layout fsdp=4,tp=2"),
        ("mixtral-8x7b", "dp=4,tp=2", "hf", "--accumulate 2 --seq 512 --micro-batch 2"),
        ("mixtral-8x7b", "dp=4,tp=2", "deepspeed", "--seq 512"),
        ("bert-large", "tp=8", "deepspeed", "--seq 512"),
        # The embedding was split by words, and the decoder that has its weight was not: no plan is like that, so it had no price.
        ("bert-large", "dp=2,tp=4,sp", "hf", "--accumulate 2 --seq 512 --micro-batch 2"),
    ],
)
def test_a_file_of_named_layers_is_priced_by_these_layers(
    model: str, layout: str, target: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`price --config` split what Megatron-LM splits: 2.33 s and 65.8 GiB, where the export had said 2.57 s and 70.4 GiB of its file."""
    plan = plan_of_layout(model, "1x8-h100", layout, micro_batch=2, accumulate=2, seq=512, layers=2)
    made = export_text(plan, target)
    assert f"price --config FILE reads it back with what it does not state: {flags}" in map(name_flags, made.remarks)
    assert made.nearest is not None
    (tmp_path / "file").write_text(made.text)
    given = ["price", model, "--cluster", "1x8-h100", "--layers", "2", "--config", str(tmp_path / "file")]
    assert main([*given, *flags.split(), "--alone", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["step_time_s"] == made.nearest.step_time_s
    assert read["memory_bytes"]["peak"] == made.nearest.peak_bytes
    # Ranks for which no file names layers are priced by their degrees, and that is said.
    main([*given, "--layout", "dp=2,tp=2,cp=2", "--micro-batch", "2", "--seq", "512", "--alone", "--json"])
    assert any("priced by degrees" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize("target", ["deepspeed", "hf"])
def test_samples_of_context_ranks_are_not_priced_as_if_there_were_more(target: str) -> None:
    """Ranks that share a sample have one each in these files. transformers' was priced with 8 samples a step beside the plan's 4."""
    run = {"accumulate": 2, "seq": 256, "layers": 2}
    for samples, priced in ((1, False), (2, True)):
        plan = plan_of_layout("llama-3-8b", "1x8-h100", "dp=2,cp=2,tp=2,sp", micro_batch=samples, **run)
        made = export_text(plan, target)
        why = "it has no price in this form: 2 samples of a micro-batch cannot be dealt to its 4 data-parallel ranks"
        assert (why in made.remarks) == (made.nearest is None) == (not priced)


@pytest.mark.parametrize("target", ["deepspeed", "accelerate", "fsdp2"])
def test_images_have_no_tokens_to_state(target: str) -> None:
    """ViT's export said "--seq 1", which its price then called unused."""
    for model, seq in (("vit-large", None), ("llama-3-8b", 1)):
        plan = plan_of_layout(model, "1x8-h100", "fsdp=8", micro_batch=2, accumulate=2, layers=2, seq=seq)
        assert plan.workload.seq == 1
        said = " ".join(map(name_flags, export_text(plan, target).remarks))
        assert "price --config FILE" in said or target == "deepspeed"
        assert ("--seq 1" in said) == (model == "llama-3-8b")


def test_fsdp2_code_names_the_layout_that_prices_it() -> None:
    """`price --config` reads no such module, and nothing said how to price it."""
    plan = plans()["FSDP"]
    said = "price --config FILE reads no such file; state it as --layout fsdp=2 --micro-batch 4 --accumulate 1 --seq 16 --dtype float32"
    assert name_flags(export_text(plan, "fsdp2").remarks[-1]) == said
    beside = "--optimizer sgd --precision pure --stack fsdp2 --loss whole --gradients bfloat16"
    kernels = replace(plan.workload, stack="fsdp2", loss="whole")
    stated = replace(plan, workload=replace(kernels, gradients="bfloat16", optimizer="sgd", precision="pure"))
    assert name_flags(export_text(stated, "fsdp2").remarks[-1]).endswith(f"--seq 16 --dtype float32 {beside}")
    stays = {
        label: replace(b, params={n: replace(p, gathered=(), working=(R,)) for n, p in b.params.items()})
        for label, b in plan.blocks.items()
    }
    assert 'layout="dp=2,zero=2" micro_batch=4' in export_text(replace(plan, blocks=stays), "fsdp2").remarks[-1]


def test_accelerate_says_where_it_sums_gradients_otherwise() -> None:
    """FSDP sums them in the dtype that computes there, and DDP in float32, whatever a plan says."""
    for name, sums in (("FSDP", "bfloat16"), ("data parallel", "float32")):
        plan = plans()[name]
        for gradients in ("float32", "bfloat16"):
            load = replace(plan.workload, dtype="bfloat16", precision="mixed", gradients=gradients)
            made = export_text(replace(plan, workload=load), "accelerate")
            assert (f"sums gradients in {sums} here" in " ".join(made.remarks)) == (gradients != sums), (
                name,
                gradients,
            )


def test_accelerate_leaves_micro_batches_to_the_script() -> None:
    """Its file has no field for them, so a remark says what the script has to state."""
    plan = plans()["FSDP"]
    parts = replace(plan, workload=replace(plan.workload, batch=24, accumulate=3))
    said = "batches of 4 samples on each rank and Accelerator(gradient_accumulation_steps=3)"
    assert said in " ".join(export_text(parts, "accelerate").remarks)
    assert "gradient_accumulation_steps" not in " ".join(export_text(plan, "accelerate").remarks)


def test_any_plan_of_the_report_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["gpt2-xl", "--cluster", "1x8-h100", "--layers", "2", "--mesh", "8"]
    assert main(["plan", *options, "--pick", "FSDP", "-o", str(tmp_path / "plan.json")]) == 0
    assert load_plan(tmp_path / "plan.json").name == "FSDP"
    # The page's addresses and rows name the plans so.
    assert main(["plan", *options, "--pick", "data-parallel", "-o", str(tmp_path / "plan.json")]) == 0
    assert load_plan(tmp_path / "plan.json").name == "data parallel"
    capsys.readouterr()
    assert main(["plan", *options, "--pick", "nothing", "-o", str(tmp_path / "other.json")]) == 2
    assert "it has best, " in capsys.readouterr().err and not (tmp_path / "other.json").exists()
    assert main(["plan", *options, "--pick", "FSDP"]) == 2
    assert "-o FILE" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["fsdp2", "accelerate"])
def test_the_nearest_plan_shards_weights_whatever_the_zero_stage_of_the_given_one(target: str) -> None:
    """Beside a plan of Megatron-LM, whose ZeRO stage is 1, FSDP2 is priced with its weights in parts, as `price --layout fsdp=8` does.

    It was priced as DDP: 165 GiB for 73 of llama-3-8b, so that nothing was written.
    """
    request = Request("llama-3-8b", cluster="1x8-h100", mesh="4x2", batch=16, seq=512, layers=2, recompute="none")
    found = planned(request, "baselines")
    given = next(p for p in found.plans if p.name == "Megatron-LM + sequence parallel")
    assert given.workload.zero == 1
    priced = plan_of_layout("llama-3-8b", "1x8-h100", "fsdp=8", micro_batch=2, seq=512, layers=2)
    near = export_text(given, target, nearest=True).nearest
    assert near is not None
    assert near.peak_bytes == priced.cost.memory_bytes["peak"]
    assert near.step_time_s == pytest.approx(priced.cost.step_time_s, rel=1e-12)


@pytest.mark.parametrize("software", [{"loss": "fused"}, {"attention": "math"}, {"stack": "megatron"}])
def test_the_nearest_plan_runs_the_software_of_the_given_one(software: dict[str, Any]) -> None:
    """A plan that FSDP2 holds is its own nearest one, so both have one price, whatever kernels run it.

    With a fused loss the form was said to need 11.9 GB, where the plan and its `price` had 8.7 GB: operators kept what torch's do."""
    plan = plan_of_layout("llama-3-8b", "1x8-h100", "fsdp=8", seq=512, layers=2, **software)
    ((_, cost),) = data_parallel_plans(plan, ["FSDP2"])
    assert cost.peak_bytes == cost.plan_peak_bytes
    assert cost.step_time_s == pytest.approx(cost.plan_step_time_s, rel=1e-12)


def test_a_launch_has_as_many_processes_as_a_node_has_gpus() -> None:
    """Two nodes of four GPUs are two machines, not one of eight."""
    cluster = load_cluster("2x8-h100").with_sizes(4, 2).to_json()
    found = shardscope.plan(LLAMA, cluster=cluster, mesh="8", batch=8, seq=16, dtype="float32")
    plan = next(p for p in found.plans if p.name == "FSDP")
    assert "num_machines: 2\nnum_processes: 8\n" in export_text(plan, "accelerate").text
    script = export_text(plan, "torchrun")
    launch = "torchrun --nproc-per-node 4 --nnodes 2 "
    assert launch in script.text and any(launch in remark for remark in script.remarks)


def test_a_launch_names_the_data_that_the_script_reads() -> None:
    """A file of tokens trains causal language models only; the script refused the line that the export of an image model printed."""
    image = tiny_config("vit")
    (plan, *_) = shardscope.plan(image, cluster="1x8-h100", mesh="8", batch=8, dtype="float32").plans
    script = export_text(plan, "torchrun")
    launch, _tiny = (r for r in map(Remark.of, script.remarks) if r.kind is RemarkKind.LAUNCH)
    assert " --data DATASET --save FOLDER" in launch and "TOKENS" not in script.text
    options = {
        "LlamaForCausalLM": " --data TOKENS",
        "GPT2LMHeadModel": " --data TOKENS",
        "T5ForConditionalGeneration": " --data DATASET",
    }
    for name, option in options.items():
        config = {"architectures": [name]}
        assert TORCHRUN.option(replace(plan, model=replace(plan.model, config=config))) == option
    unnamed = replace(plan, model=replace(plan.model, config={"model_type": "llama"}))
    assert TORCHRUN.option(unnamed) == " --data TOKENS_OR_DATASET"
    own = replace(plan, model=replace(plan.model, config={"callable": "model.py:build"}))
    assert TORCHRUN.option(own) == "", "the script refuses the option for a model that brings its inputs"
