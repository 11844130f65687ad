"""Settings of other tools are read as the layout that the tool would run; what is not followed is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner_core.core import InputError
from planner_core.planning.methods import Layout, parse_layout
from planner_core.planning.pricing import Setup, Statement, read_setup
from planner_core.planning.pricing.configs.fields import PRICED_BY_DEGREES, Fields, Table

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 256
seq_len = 8192
compile = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "full"
"""
MEGATRON = """
#!/bin/bash
# 4 nodes --tensor-model-parallel-size 99
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 8 --sequence-parallel \\
    --micro-batch-size 2 --global-batch-size 64 --seq-length 4096 \\
    --recompute-granularity full --recompute-method=uniform \\
    --use-distributed-optimizer --bf16
"""
MEGATRON_ARRAY = """
MODEL_ARGS=(
    --tensor-model-parallel-size 2
    --use-torch-fsdp2
)
"""
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "gradient_clipping": 1.0,
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 4
num_processes: 32
mixed_precision: bf16
gradient_accumulation_steps: 4
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
dynamo_config:
  dynamo_backend: INDUCTOR
"""
TITAN_LONG = """
[parallelism]
data_parallel_shard_degree = 4
context_parallel_degree = 8
"""
TITAN_EXPERTS = """
[parallelism]
data_parallel_replicate_degree = 2
expert_parallel_degree = 8
"""
MEGATRON_LONG = "--context-parallel-size 4 --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
MEGATRON_EXPERTS = "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel"
TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "norm": "sequence_parallel",
}

TITAN_RUN: dict[str, Any] = {
    "stack": "torchtitan",
    "micro_batch": 1,
    "accumulate": 1,
    "recompute": "none",
    "compiled": False,
    "optimizer": "adamw",
}
MEGATRON_RUN: dict[str, Any] = {
    "stack": "megatron",
    "loss": "whole",
    "micro_batch": 1,
    "accumulate": 1,
    "recompute": "none",
    "optimizer": "adamw",
}
ACCELERATE_RUN: dict[str, Any] = {"stack": "accelerate", "accumulate": 1, "compiled": False, "recompute": "none"}
"""What a file of the tool that says no more than degrees is read as."""


def read(tmp_path: Path, name: str, text: str | dict[str, Any], gpus: int = 32) -> Setup:
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return read_setup(path, gpus)


@pytest.mark.parametrize(
    ("name", "text", "layout", "options"),
    [
        (
            "titan.toml",
            TITAN,
            "dp=2,fsdp=4,tp=4,sp",
            TITAN_RUN | {"micro_batch": 2, "accumulate": 16, "seq": 8192, "recompute": "full", "compiled": True},
        ),
        (
            "run.sh",
            MEGATRON,
            "dp=4,tp=8,sp,zero=1",
            MEGATRON_RUN
            | {
                "vocab_multiple": 1024,
                "micro_batch": 2,
                "accumulate": 8,
                "seq": 4096,
                "recompute": "full",
                "dtype": "bfloat16",
            },
        ),
        ("args.txt", MEGATRON_ARRAY, "fsdp=16,tp=2", MEGATRON_RUN | {"vocab_multiple": 256}),
        (
            "ds.json",
            DEEPSPEED,
            "dp=32,zero=2",
            {
                "micro_batch": 2,
                "accumulate": 2,
                "dtype": "bfloat16",
                "gradients": "bfloat16",
                "optimizer": "adamw",
                "stack": "deepspeed",
            },
        ),
        (
            "ds3.json",
            {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
            "fsdp=32",
            {
                "micro_batch": 1,
                "accumulate": 1,
                "dtype": "float16",
                "gradients": "bfloat16",
                "optimizer": "adamw",
                "stack": "deepspeed",
            },
        ),
        (
            "fsdp.yaml",
            ACCELERATE,
            "dp=4,fsdp=8",
            ACCELERATE_RUN
            | {"accumulate": 4, "dtype": "bfloat16", "compiled": True, "recompute": "full", "gradients": "bfloat16"},
        ),
        (
            "fsdp2.yml",
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n",
            "dp=32,zero=2",
            ACCELERATE_RUN,
        ),
        ("long.toml", TITAN_LONG, "fsdp=4,cp=8,cp_type=gather", TITAN_RUN),
        (
            "ring.toml",
            "[parallelism]\ncontext_parallel_degree = 32\ncontext_parallel_rotate_method = 'alltoall'",
            "cp=32,zero=3",
            TITAN_RUN,
        ),
        ("experts.toml", TITAN_EXPERTS, "dp=2,fsdp=16,ep=8", TITAN_RUN),
        ("long.sh", MEGATRON_LONG, "dp=4,cp=4,cp_type=ulysses,tp=2,sp,zero=1", MEGATRON_RUN | {"vocab_multiple": 256}),
        (
            "ring.sh",
            "--context-parallel-size 8 --use-megatron-fsdp",
            "fsdp=4,cp=8",
            MEGATRON_RUN | {"vocab_multiple": 128},
        ),
        ("experts.sh", MEGATRON_EXPERTS, "dp=16,ep=8,tp=2,sp", MEGATRON_RUN | {"vocab_multiple": 256}),
        (
            "padded.sh",
            MEGATRON_EXPERTS + " --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
            "dp=16,ep=8,tp=2,sp",
            MEGATRON_RUN | {"vocab_multiple": 256, "expert_imbalance": 1.25},
        ),
        ("plan.json", TP_PLAN, "tp=32,sp", {"stack": "accelerate"}),
        ("auto.json", {"tp_plan": "auto", "tp_size": 8}, "dp=4,tp=8", {"stack": "accelerate"}),
    ],
)
def test_a_tools_file_is_the_layout_that_it_runs(
    name: str, text: str | dict[str, Any], layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, name, text)
    stated = dict(found.options)
    assert (stated.pop("split_layers", None) is not None) == (name == "plan.json")
    assert (found.layout, stated) == (parse_layout(layout), options)


def test_selective_recomputation_of_each_tool(tmp_path: Path) -> None:
    """torchtitan's keeps every second product; Megatron-LM's runs core attention again, which is next to nothing."""
    titan = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = "
    assert read(tmp_path, "a.toml", titan + "'op'").options["recompute"] == "selective"
    with pytest.raises(InputError, match='selective_ac_option is "2", but must be one of op'):
        read(tmp_path, "b.toml", titan + "'2'")
    for words in ("--recompute-granularity selective", "--recompute-activations"):
        found = read(tmp_path, "run.sh", MEGATRON_ARRAY.replace("--use-torch-fsdp2", words))
        assert found.options["recompute"] == "none"
        assert "next to nothing: priced as no recomputation" in found.notes[0] and words in found.notes[0]


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, "ds.json", DEEPSPEED)
    assert found.notes == () and found.unread == ("gradient_clipping", "zero_optimization.overlap_comm")
    assert found.describe({})[-1].endswith(
        "not read, and not in the price if they change it: gradient_clipping, zero_optimization.overlap_comm"
    )
    found = read(tmp_path, "run.sh", MEGATRON)
    assert (found.notes, found.unread) == ((), ())
    assert found.describe({})[0].startswith("config run.sh, a file of Megatron-LM; read: --bf16, --global-batch-size, ")
    (note,) = read(tmp_path, "auto.json", {"tp_plan": "auto"}).notes
    assert note.endswith(PRICED_BY_DEGREES)


BATCHES = (
    ("run.sh", "torchrun a.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 128"),
    ("t.toml", "[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 1\nglobal_batch_size = 128"),
    (
        "ds.json",
        '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}',
    ),
    (
        "neox.yml",
        "model_parallel_size: 2\ntrain_batch_size: 128\ntrain_micro_batch_size_per_gpu: 1\nfp16: {enabled: true}",
    ),
    ("olmo.yaml", "device_train_microbatch_size: 1\nglobal_train_batch_size: 128\nmodel: {max_sequence_length: 2048}"),
)


@pytest.mark.parametrize(("name", "text"), BATCHES, ids=[case[0] for case in BATCHES])
@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("", {}),
        ("tp=1,dp=16,zero=1", {}),
        ("tp=8,dp=2", {}),
        ("", {"micro_batch": 2}),
        ("", {"accumulate": 4}),
        ("dp=4,pp=4", {"micro_batch": 4}),
    ],
)
def test_a_step_keeps_the_samples_of_a_file(
    name: str, text: str, layout: str, given: dict[str, int], tmp_path: Path
) -> None:
    setup = read(tmp_path, name, text, gpus=16)
    stated_layout = parse_layout(layout) if layout else setup.layout
    stated = Statement(stated_layout, **setup.override_options(stated_layout, given))
    assert (
        stated.batch == 128
        and given.items() <= {"micro_batch": stated.micro_batch, "accumulate": stated.accumulate}.items()
    )


def test_samples_of_a_file_that_options_do_not_divide_are_one_sentence(tmp_path: Path) -> None:
    setup = read(tmp_path, *BATCHES[0], gpus=16)
    with pytest.raises(
        InputError, match="--global-batch-size 128 is not a multiple of 3 samples on each of 8 data-par"
    ):
        setup.override_options(setup.layout, {"micro_batch": 3})
    both = {"micro_batch": 3, "accumulate": 2}
    assert both.items() <= setup.override_options(setup.layout, both).items()
    # only a batch is stated here, so a rank's samples follow from the layout
    alone = read(tmp_path, "ds.json", '{"train_batch_size": 128, "gradient_accumulation_steps": 4}', gpus=16)
    assert alone.override_options(parse_layout("dp=2,tp=8"), {})["micro_batch"] == 16
    with pytest.raises(
        InputError, match=r"128 is not the 64 samples of gradient_accumulation_steps 4 x .* leave one of the three"
    ):
        read(
            tmp_path,
            "ds.json",
            '{"train_batch_size": 128, "gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 1}',
            gpus=16,
        )


@pytest.mark.parametrize(
    ("settings", "gradients", "notes"),
    [
        ({"bf16": {"enabled": True}}, "bfloat16", 0),
        ({}, None, 0),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "float32", 1),
        (
            {
                "bf16": {"enabled": True},
                "communication_data_type": "fp32",
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            "float32",
            0,
        ),
        ({"bf16": {"enabled": True}, "sequence_parallel_size": 4}, "float32", 1),
    ],
)
def test_gradients_of_deepspeed_have_the_dtype_of_the_model(
    settings: dict[str, Any], gradients: str | None, notes: int, tmp_path: Path
) -> None:
    found = read(tmp_path, "ds.json", {"train_micro_batch_size_per_gpu": 1, **settings})
    assert found.options.get("gradients") == gradients and len(found.notes) == notes and not found.unread


def test_the_dtype_in_which_torchtitan_sums_gradients_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, "t.toml", "[training]\nlocal_batch_size = 1\nmixed_precision_reduce = 'bfloat16'")
    assert found.options["gradients"] == "bfloat16" and not found.unread


def test_modules_that_megatron_runs_again_are_priced_or_named(tmp_path: Path) -> None:
    run = (
        "torchrun a.py --tensor-model-parallel-size 2 --recompute-granularity selective --recompute-modules core_attn "
    )
    assert len(read(tmp_path, "run.sh", run).notes) == 1
    found = read(tmp_path, "run.sh", run + "layernorm moe_act")
    assert found.notes[0].startswith(
        "--recompute-modules layernorm moe_act of config run.sh: priced as no recomputation"
    )
    assert not found.unread
    with pytest.raises(InputError, match="--recompute-modules core_attn mlp layernorm runs parts of a layer again"):
        read(tmp_path, "run.sh", run + "mlp layernorm")
    bridge = "model: {tensor_model_parallel_size: 2, recompute_granularity: selective, recompute_modules: [mlp]}\ntrain: {}\n"
    with pytest.raises(InputError, match="--recompute-modules mlp runs parts of a layer again"):
        read(tmp_path, "bridge.yaml", bridge)


def test_experts_that_a_tool_deals_out_elsewhere_are_told(tmp_path: Path) -> None:
    assert read(tmp_path, "experts.sh", MEGATRON_EXPERTS).notes == ()
    told = read(
        tmp_path, "b.sh", "--expert-model-parallel-size 8 --context-parallel-size 2 --moe-expert-capacity-factor 1.25"
    ).notes
    assert any("allgather" in note and "priced as alltoall" in note for note in told)
    assert any("to context ranks as well as data-parallel ones" in note for note in told)
    assert any("no token were dropped" in note for note in told)
    (told_titan,) = read(tmp_path, "c.toml", TITAN_EXPERTS + "tensor_parallel_degree = 2\n").notes
    assert "priced over data-parallel ranks" in told_titan


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.toml",
            "[parallelism]\npipeline_parallel_degree = 3",
            "tensor_parallel_degree with pipeline_parallel_degree makes groups of 3 ranks, but 32 GPUs do not divide by that",
        ),
        (
            "a.toml",
            "[parallelism]\ntensor_parallel_degree = 'x'",
            'tensor_parallel_degree is "x", but must be a whole number from 1',
        ),
        (
            "a.toml",
            "[parallelism]\ntensor_parallel_degree = 5",
            "makes groups of 5 ranks, but 32 GPUs do not divide by that",
        ),
        (
            "a.toml",
            "[training]\nglobal_batch_size = 33",
            "global_batch_size 33 is not a multiple of 1 samples on each of 32",
        ),
        (
            "a.toml",
            "[activation_checkpoint]\nmode = 'some'",
            'mode is "some", but must be one of none, selective, full',
        ),
        ("a.toml", "= 3", "is not TOML"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "--tensor-model-parallel-size 8", "has options of a launch script; name it .sh or .txt"),
        ("a.toml", '{"train_batch_size": 16}', "it is JSON; name it .json"),
        ("a.json", "[]", "must be settings by name"),
        ("a.json", '{"hidden_size": 3}', "has the keys hidden_size, by which no tool is known"),
        (
            "a.json",
            '{"schema": "shardscope.plan/3", "name": "best"}',
            'is a file of Shardscope, "shardscope.plan/3", and no tool\'s settings; give a file of torchtitan',
        ),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4, but must be 0, 1, 2 or 3"),
        (
            "a.json",
            '{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}',
            "keeps states on a disk, which cannot be priced; offload prices them in the host's memory",
        ),
        ("a.json", '{"layers.*": "sideways"}', "'sideways', which is not a known style; give e.g. colwise or rowwise"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 8", "num_processes is 8, but the cluster has 32 GPUs"),
        ("a.yaml", "a: &x [1]\ndistributed_type: *x", "repeats parts by aliases"),
        ("a.yaml", "x: 1", "has the keys x, by which no tool is known"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.sh", "echo hello", "has no options such as --tensor-model-parallel-size 8"),
        ("a.sh", "--moe-expert-capacity-factor many", 'capacity-factor is "many", but must be a number'),
        ("a.sh", "--context-parallel-size 5", "makes groups of 5 ranks, but 32 GPUs do not divide by that"),
        (
            "a.sh",
            "--context-parallel-size 2 --cp-comm-type a2a+p2p",
            "exchanges heads inside a ring, which cannot be priced",
        ),
        ("a.toml", "[parallelism]\ncontext_parallel_rotate_method = 'ring'", "must be one of allgather, alltoall"),
        ("a.sh", "--bf16 'open", "is not a list of arguments"),
    ],
)
def test_what_cannot_be_priced_is_one_sentence(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, name, text)
    assert said in str(error.value) and f"config {name}" in str(error.value)


@pytest.mark.parametrize("suffix", ["", ".deepspeed", ".txt"])
def test_a_file_without_a_suffix_of_its_format_is_known_by_its_content(suffix: str, tmp_path: Path) -> None:
    for text, layout in (
        ('{"train_batch_size": 32, "zero_optimization": {"stage": 3}}', "fsdp=32"),
        ("[parallelism]\ntensor_parallel_degree = 8", "fsdp=4,tp=8,sp"),
        ("distributed_type: FSDP\nnum_processes: 32", "fsdp=32"),
        ("--tensor-model-parallel-size 8", "dp=4,tp=8"),
    ):
        assert read(tmp_path, f"a{suffix}", text).layout == parse_layout(layout), text


def test_a_file_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"there is no file .*none\.toml.*give a file of torchtitan"):
        read_setup("/no/such/none.toml", 8)


@pytest.mark.parametrize(
    ("name", "text", "kernels"),
    [
        ("t.toml", '[optimizer]\nimplementation = "foreach"\n[training]\nseq_len = 8192\n', "foreach"),
        ("t.toml", '[optimizer]\nimplementation = "for-loop"\n[training]\nseq_len = 8192\n', "for-loop"),
        ("t.toml", "[optimizer]\nfused = true\n[training]\nseq_len = 8192\n", "fused"),
        ("t.toml", "[training]\nseq_len = 8192\n", None),
        ("h.yaml", "per_device_train_batch_size: 1\noptim: adamw_torch\n", "foreach"),
        ("h.yaml", "per_device_train_batch_size: 1\noptim: adamw_torch_fused\n", "fused"),
        ("h.yaml", "per_device_train_batch_size: 1\n", None),
    ],
)
def test_how_weights_are_updated_is_read(name: str, text: str, kernels: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_setup(tmp_path / name, 8).options.get("optimizer_kernels") == kernels


def test_layers_are_split_as_a_file_names_them(tmp_path: Path) -> None:
    """Of both files the first pattern that matches a layer counts, and other layers are whole."""
    specs = [{"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"}]
    specs += [{"patterns": [r".*_proj\.weight$"], "partition_type": "column"}]
    partition = {"use_default_specs": False, "layer_specs": specs}
    run = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 4, "partition_config": partition}}
    named = read(tmp_path, "ds.json", run).options["split_layers"]
    styles = {"model.layers.1.q_proj": "colwise", "model.layers.1.o_proj": "rowwise", "lm_head": ""}
    assert {module: named.of_module(module) for module in styles} == styles
    partition["use_default_specs"] = True  # which adds patterns of its own
    found = read(tmp_path, "ds.json", run)
    assert "split_layers" not in found.options and any(PRICED_BY_DEGREES in note for note in found.notes)
    partition |= {"use_default_specs": False, "layer_specs": [{"patterns": ["("], "partition_type": "row"}]}
    with pytest.raises(InputError, match="must be patterns with a partition_type of column, row, skip"):
        read(tmp_path, "ds.json", run)
    hf = {
        "tp_size": 4,
        "tp_plan": {"layers.*.o_proj": "rowwise", "lm_head": "colwise_gather_output", "norm": "replicate"},
    }
    named = read(tmp_path, "hf.json", hf).options["split_layers"]
    styles = {
        "model.layers.1.o_proj": "rowwise",
        "lm_head": "gathered",
        "model.norm": "",
        "model.layers.1.x.o_proj": "",
    }
    assert {module: named.of_module(module) for module in styles} == styles


@pytest.mark.parametrize(
    "read",
    [
        lambda fields: fields.get("num_shards"),
        lambda fields: fields.lowered("num_shards"),
        lambda fields: fields.first_set("num_shards", "shards"),
        lambda fields: fields.read_int("num_shards", 1),
        lambda fields: fields.read_optional_int("num_shards"),
        lambda fields: fields.read_float("num_shards", 1.0),
        lambda fields: fields.read_word("num_shards", "1"),
        lambda fields: fields.read_words("num_shards"),
        lambda fields: fields.require_value("num_shards", 8, "shards"),
        lambda fields: fields.if_used(False).read_flag("num_shards"),
    ],
)
def test_a_field_counts_as_read_by_reading_it(read: Callable[[Fields], object]) -> None:
    """Nothing else marks a field, and one that is not read refuses the file if it may change the layout."""
    fields = Fields.from_nested({"num_shards": 8}, "config run.yaml")
    with pytest.raises(InputError, match="num_shards"):
        fields.finish(Table("a tool"), Layout(), {})
    read(fields)
    assert fields.finish(Table("a tool"), Layout(), {}).read == ("num_shards",)
