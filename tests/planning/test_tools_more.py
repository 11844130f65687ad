"""Launch scripts, Python configs and YAML of trainers: read as data, or refused by the tool's name; nothing that matters is left unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner_core.cli.main import main
from planner_core.core import InputError, Term
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Setup, read_setup
from planner_core.planning.pricing.configs.neutral import RISKY_WORDS, is_neutral, is_risky
from planner_core.planning.pricing.configs.reading import READERS
from tests.planning.test_tool_configs import ACCELERATE_RUN, MEGATRON_RUN, TITAN_RUN

SCRIPT = """
#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"4"}
WORLD=$(($GPUS_PER_NODE*$NNODES))
TP=${1:-2}
SEQ=4096
MODEL=(
    --num-layers 32 --hidden-size 4096  # of an 8B model
    --seq-length $SEQ
)
if [ -n "$WANDB" ]; then
    MODEL+=(--wandb-project ${NAME:-"x"})
fi
ARGS=" \\
    --tensor-model-parallel-size $TP \\
    --sequence-parallel --use-distributed-optimizer \\
    --micro-batch-size 1 --global-batch-size $((WORLD * 2)) \\
    "
cat <<EOT > ds.json
{"zero_optimization": {"stage": 3}}
EOT
CMD="pretrain_gpt.py $ARGS --bf16"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES $CMD "${MODEL[@]}" "$@" 2>&1 | tee log
"""
TITAN = """
import os
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

SEQ = 8192
os.system("touch was-run")


def _parallel(tensor=4):
    return ParallelismConfig(tensor_parallel_degree=tensor, data_parallel_replicate_degree=2)


def big() -> Trainer.Config:
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=2, seq_len=SEQ),
        parallelism=_parallel(8),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True, components=["model"]),
        optimizer=default_adamw(lr=3e-4),
    )


def changed():
    config = big()
    config.training.local_batch_size = 1
    if os.environ.get("X"):
        config.parallelism.tensor_parallel_degree = 4
    return config
"""
BRIDGE = """
import torch
from megatron.bridge.training.config import ConfigContainer

LONG: int = 16384


def model_config(tensor_parallelism: int = 1):
    return Provider(tensor_model_parallel_size=tensor_parallelism, sequence_parallel=True, num_layers=32)


def pretrain(tensor_parallelism: int = 4, global_batch_size: int = 64):
    cfg = ConfigContainer(model=model_config(tensor_parallelism=tensor_parallelism), train=Train(micro_batch_size=1))
    cfg.train.global_batch_size = global_batch_size
    cfg.model.seq_length = LONG
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.ddp.use_distributed_optimizer = True
    cfg.mixed_precision = "bf16_mixed"
    return cfg
"""
AXOLOTL = """
base_model: any/llama-8b
datasets: [{path: some}]
sequence_len: 16384
gradient_checkpointing: true
micro_batch_size: 1
dp_shard_size: 4
tensor_parallel_size: 8
fsdp_config:
  reshard_after_forward: true
"""
FACTORY = """
model_name_or_path: any/llama-8b
stage: sft
finetuning_type: full
deepspeed: z3.json
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
NANOTRON = """
parallelism: {dp: 16, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER, recompute_layer: false}
tokens: {micro_batch_size: 8, sequence_length: 2048, batch_accumulation_per_replica: 1}
optimizer: {zero_stage: 1}
model: {dtype: bfloat16, model_config: {hidden_size: 576, num_hidden_layers: 30}}
"""
OLMO = """
model: {d_model: 4096, n_heads: 32, n_layers: 32, max_sequence_length: 4096}
global_train_batch_size: 1024
device_train_microbatch_size: 2
precision: amp_bf16
fsdp: {wrapping_strategy: by_block_and_size, precision: mixed}
"""
NEMO = """
trainer: {devices: 8, num_nodes: 4, precision: bf16}
model: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 1, micro_batch_size: 1, global_batch_size: 64, encoder_seq_length: 4096,
  activations_checkpoint_granularity: full, optim: {name: distributed_fused_adam}}
"""
TRAINER = {
    "per_device_train_batch_size": 2,
    "max_length": 4096,
    "gradient_checkpointing": True,
    "bf16": True,
    "fsdp": "full_shard auto_wrap",
    "gradient_accumulation_steps": 4,
}
ACCELERATE_CP = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}
parallelism_config: {parallelism_config_cp_size: 8, parallelism_config_dp_shard_size: 4}
mixed_precision: bf16
"""
ACCELERATE_DS = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\n"
DEEPSPEED_HOST = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
PLAIN: dict[str, Any] = {"micro_batch": 1, "accumulate": 1}
CASES: list[tuple[str, str | dict[str, Any], str, str, dict[str, Any]]] = [
    (
        "run.sh",
        SCRIPT,
        "Megatron-LM",
        "dp=16,tp=2,sp,zero=1",
        MEGATRON_RUN | {"vocab_multiple": 256, "accumulate": 4, "seq": 4096, "dtype": "bfloat16"},
    ),
    (
        "registry.py:big",
        TITAN,
        "torchtitan",
        "dp=2,fsdp=2,tp=8,sp",
        TITAN_RUN | {"micro_batch": 2, "seq": 8192, "recompute": "full", "compiled": True, "loss": "eager"},
    ),
    (
        "recipe.py:pretrain",
        BRIDGE,
        "Megatron-Bridge",
        "dp=8,tp=4,sp,zero=1",
        MEGATRON_RUN | {"vocab_multiple": 512, "accumulate": 8, "seq": 16384, "dtype": "bfloat16"},
    ),
    (
        "axolotl.yml",
        AXOLOTL,
        "axolotl",
        "fsdp=4,tp=8",
        {**PLAIN, "seq": 16384, "recompute": "full", "compiled": False, "optimizer": "adamw", "stack": "accelerate"},
    ),
    (
        "factory.yaml",
        FACTORY,
        "LLaMA-Factory",
        "fsdp=32",
        {
            "micro_batch": 1,
            "accumulate": 2,
            "seq": 1024,
            "recompute": "none",
            "compiled": False,
            "dtype": "bfloat16",
            "gradients": "bfloat16",
            "stack": "deepspeed",
            "optimizer": "adamw",
        },
    ),
    (
        "smol.yaml",
        NANOTRON,
        "nanotron",
        "dp=16,tp=2,sp,zero=1",
        {
            "micro_batch": 8,
            "accumulate": 1,
            "seq": 2048,
            "recompute": "none",
            "dtype": "bfloat16",
            "rank_by_rank": True,
            "stack": "nanotron",
        },
    ),
    (
        "olmo.yaml",
        OLMO,
        "OLMo",
        "fsdp=32",
        {
            "micro_batch": 2,
            "accumulate": 16,
            "seq": 4096,
            "recompute": "none",
            "compiled": False,
            "dtype": "bfloat16",
            "stack": "fsdp2",
        },
    ),
    (
        "nemo.yaml",
        NEMO,
        "NeMo",
        "dp=8,tp=4,zero=1",
        MEGATRON_RUN | {"vocab_multiple": 512, "accumulate": 8, "seq": 4096, "recompute": "full", "dtype": "bfloat16"},
    ),
    (
        "args.json",
        TRAINER,
        "transformers' TrainingArguments",
        "fsdp=32",
        {
            "micro_batch": 2,
            "accumulate": 4,
            "seq": 4096,
            "recompute": "full",
            "compiled": False,
            "dtype": "bfloat16",
            "optimizer": "adamw",
            "stack": "accelerate",
        },
    ),
    (
        "cp.yaml",
        ACCELERATE_CP,
        "accelerate",
        "fsdp=4,cp=8,cp_type=gather",
        ACCELERATE_RUN | {"dtype": "bfloat16", "recompute": "full", "gradients": "bfloat16"},
    ),
    (
        "ds.yaml",
        ACCELERATE_DS,
        "accelerate",
        "fsdp=32",
        {"accumulate": 1, "compiled": False, "offload": True, "stack": "deepspeed"},
    ),
    (
        "stages.sh",
        "--pipeline-model-parallel-size 4 --num-layers 32 --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 "
        "--global-batch-size 64",
        "Megatron-LM",
        "dp=8,pp=4,vp=2",
        MEGATRON_RUN | {"vocab_multiple": 128, "accumulate": 8},
    ),
    (
        "stages.toml",
        "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = 'Interleaved1F1B'\n[training]\nlocal_batch_size = 8",
        "torchtitan",
        "dp=8,zero=1,pp=4,vp=2,schedule=interleaved",
        TITAN_RUN | {"accumulate": 8},
    ),
    (
        "host.json",
        DEEPSPEED_HOST,
        "DeepSpeed",
        "fsdp=32",
        {**PLAIN, "optimizer": "adamw", "offload": True, "stack": "deepspeed"},
    ),
]


def read(folder: Path, name: str, text: str | dict[str, Any], gpus: int = 32) -> Setup:
    file, _, function = name.partition(":")
    (folder / file).write_text(text if isinstance(text, str) else json.dumps(text))
    return read_setup(f"{folder / file}{f':{function}' if function else ''}", gpus)


@pytest.mark.parametrize(("name", "text", "tool", "layout", "options"), CASES, ids=[case[0] for case in CASES])
def test_a_file_is_the_layout_that_its_tool_runs(
    name: str, text: str | dict[str, Any], tool: str, layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3, "overlap_comm": true}}')
    found = read(tmp_path, name, text)
    assert (found.tool, found.layout, dict(found.options)) == (tool, parse_layout(layout), options)
    assert found.describe({})[0].startswith(f"config {name.partition(':')[0]}, a file of {tool}; read: ")


def test_the_adapters_of_trainers_are_stated(tmp_path: Path) -> None:
    found = read(tmp_path, "a.yml", AXOLOTL + "adapter: lora\nlora_r: 16\nlora_target_modules: [q_proj, v_proj]\n")
    assert (
        found.options["lora"] == 16
        and "beside q_proj, v_proj alone; priced beside every linear layer" in found.notes[0]
    )
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert (
        read(tmp_path, "b.yml", FACTORY.replace("full", "lora") + "lora_rank: 4\nlora_target: all\n").options["lora"]
        == 4
    )
    assert "lora" not in read(tmp_path, "c.yml", AXOLOTL).options


def test_a_script_says_what_its_text_does_not(tmp_path: Path) -> None:
    """Arguments of the script's own call, another number of ranks, and options under a condition are told, or refused."""
    notes = " ".join(read(tmp_path, "run.sh", SCRIPT).describe({}))
    assert "passes on the arguments of its own call ($@)" in notes and "--wandb-project" in notes
    assert "starts 4 x 8 ranks" not in notes
    assert "starts 4 x 8 ranks; priced on the 64 GPUs" in " ".join(read(tmp_path, "run.sh", SCRIPT, 64).notes)
    unset = SCRIPT.replace("TP=${1:-2}", "TP=$1")
    with pytest.raises(InputError, match=r'--tensor-model-parallel-size is "\$1", which the file does not set'):
        read(tmp_path, "run.sh", unset)
    branches = SCRIPT.replace("SEQ=4096", "SEQ=4096\nif [ $TP = 2 ]; then\n  SEQ=8192\nfi")
    with pytest.raises(InputError, match=r"--seq-length is .*which the file does not set to one value"):
        read(tmp_path, "run.sh", branches)
    hidden = SCRIPT.replace("--wandb-project", "--context-parallel-size 2 --wandb-project")
    with pytest.raises(InputError, match=r"--context-parallel-size is .*given under a condition"):
        read(tmp_path, "run.sh", hidden)


def test_a_file_of_another_model_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, "run.sh", SCRIPT)
    assert dict(found.sizes) == {"num_hidden_layers": 32, "hidden_size": 4096}
    told = found.describe({"num_hidden_layers": 80, "hidden_size": 4096})[1]
    assert "is of another model: num_hidden_layers 32 (80 in the model)" in told
    wide = read(tmp_path, "run.sh", SCRIPT.replace("--hidden-size 4096", "--hidden-size 4096 --kv-channels 64"))
    assert "is of another model: head_dim 64 (128 in the model)" in wide.describe({"head_dim": 128})[1]
    routed = read(tmp_path, "run.sh", SCRIPT.replace("--hidden-size 4096", "--hidden-size 4096 --moe-router-topk 4"))
    said = routed.describe({"num_experts_per_tok": 2})
    assert "is of another model: num_experts_per_tok 4 (2 in the model)" in said[1]
    assert "--moe-router-topk" not in said[-1], "what the file's model states is read"


def test_python_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read(tmp_path, "registry.py:big", TITAN)
    with pytest.raises(InputError, match=r"tensor_parallel_degree is .*under a condition"):
        read(tmp_path, "registry.py:changed", TITAN)
    with pytest.raises(InputError, match=r"has several configs; name one of big, changed as FILE.py:FUNCTION"):
        read(tmp_path, "registry.py", TITAN)
    with pytest.raises(InputError, match="has no function none"):
        read(tmp_path, "registry.py:none", TITAN)
    with pytest.raises(InputError, match=r"imports neither torchtitan nor megatron\.bridge"):
        read(tmp_path, "own.py:f", "def f():\n    return dict(a=1)\n")
    with pytest.raises(InputError, match="calls itself"):
        read(tmp_path, "own.py:f", "def f():\n    return f()\n")
    assert not Path("was-run").exists()


def test_a_call_that_changes_a_config_is_followed_or_noted(tmp_path: Path) -> None:
    """A function of the file changes what it is given; another's call, and `**` of what is not known, stay in the file's fields."""
    own = "def f():\n    cfg = pretrain()\n    widen(cfg)\n    patch(cfg)\n    return cfg\n"
    found = read(
        tmp_path, "r.py:f", f"{BRIDGE}\n\ndef widen(cfg):\n    cfg.model.tensor_model_parallel_size = 8\n\n\n{own}"
    )
    assert found.layout.tp == 8 and found.unread == ("patch(cfg)",)
    titan = TITAN.replace("tensor_parallel_degree=tensor", "tensor_parallel_degree=tensor, **MORE")
    with pytest.raises(InputError, match=r"parallelism\.\*\*MORE .*may change the layout"):
        read(tmp_path, "t.py:big", titan)


def test_the_deepspeed_file_of_a_trainer_is_read_to_its_end(tmp_path: Path) -> None:
    text = '{"zero_optimization": {"stage": 3, "overlap_comm": true, "zero_hpz_partition_size": 8}}'
    (tmp_path / "z3.json").write_text(text)
    with pytest.raises(InputError, match=r"deepspeed\.zero_optimization\.zero_hpz_partition_size 8 may change"):
        read(tmp_path, "b.yml", FACTORY)
    (tmp_path / "z3.json").write_text(text.replace(', "zero_hpz_partition_size": 8', ""))
    assert read(tmp_path, "b.yml", FACTORY).unread[0] == "deepspeed.zero_optimization.overlap_comm"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.yml",
            AXOLOTL + "adapter: lora\nload_in_8bit: true\n",
            "(axolotl): load_in_8bit true freezes or quantises weights of the model",
        ),
        (
            "a.yml",
            AXOLOTL.replace("true", "offload"),
            "gradient_checkpointing offload keeps activations in the host's memory",
        ),
        ("a.yml", FACTORY.replace("full", "oft"), "(LLaMA-Factory): finetuning_type oft freezes"),
        (
            "a.yml",
            AXOLOTL + "load_in_4bit: true\nlora_r: 16\n",
            "lora=16 with layout prices frozen weights in 16 bits, and nf4 beside it in 4",
        ),
        ("a.yml", FACTORY, 'deepspeed names "z3.json", which is neither beside it nor in a folder above'),
        ("a.yml", ACCELERATE_DS + "deepspeed_config_x: 1\nmixed_precision: maybe", "mixed_precision is"),
        ("a.yml", "actor_rollout_ref: {a: 1}", "is of verl, whose files are not read"),
        ("a.yml", AXOLOTL.replace("dp_shard_size: 4", "dp_shard_size: 8"), "are 8 ranks, but 4 are left"),
        ("a.toml", "[tool]\nname = 'x'", "has the keys tool, by which no tool is known"),
        ("a.toml", "[experimental]\npipeline_parallel_degree = 2", "layout states pipeline stages as pp=N"),
        (
            "a.sh",
            "--tensor-model-parallel-size 2 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            "keeps a part of the states",
        ),
        (
            "a.py:f",
            BRIDGE + "\n\ndef f():\n    cfg = pretrain()\n    cfg.peft = Lora(dim=8)\n    return cfg\n",
            "peft puts adapters beside",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_the_tools_name(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, name, text)
    assert said in str(error.value)


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a.yml": ("axolotl", {"base_model": "x", "sequence_len": 1024}),
    "b.yml": (
        "transformers' TrainingArguments",
        {"per_device_train_batch_size": 1, "deepspeed": {"bf16": {"enabled": 1}}},
    ),
    "c.yml": ("accelerate", {"distributed_type": "FSDP"}),
    "d.json": ("DeepSpeed", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}),
    "e.yml": ("nanotron", {"parallelism": {"dp": 32}, "tokens": {"micro_batch_size": 1}}),
    "f.yml": ("OLMo", {"device_train_microbatch_size": 1, "fsdp": {"precision": "mixed"}}),
    "g.sh": ("Megatron-LM", {"--micro-batch-size": 1}),
    "h.yml": ("NeMo", {"trainer": {"precision": "bf16"}, "model": {"tensor_model_parallel_size": 1}}),
    "i.toml": ("torchtitan", {"parallelism": {"tensor_parallel_degree": 2}, "training": {"seq_len": 1024}}),
    "j.py": ("torchtitan", {"parallelism": {"tensor_parallel_degree": 2}, "training": {"seq_len": 1024}}),
    "k.py": ("Megatron-Bridge", {"model": {"tensor_model_parallel_size": 2, "bias": False}, "checkpoint": {"x": 1}}),
    "l.yml": ("LLaMA-Factory", {"stage": "sft", "finetuning_type": "full", "per_device_train_batch_size": 1}),
    "m.yml": ("GPT-NeoX", {"model-parallel-size": 2, "hidden_size": 64, "zero_optimization": {"stage": 1}}),
    "n.yml": ("LLM Foundry", {"device_train_microbatch_size": 1, "fsdp_config": {"mixed_precision": "PURE"}}),
    "o.json": ("transformers tp_plan", {"tp_plan": {"layers.*.q": "colwise"}, "tp_size": 2}),
}
IMPORTS = {"j.py": "from torchtitan.trainer import Config", "k.py": "from megatron.bridge import Config"}
LETTERS = st.text("bdjkwxyz", min_size=1, max_size=6)


def leaves(data: dict[str, Any], path: str = "") -> set[str]:
    """The dotted names of all settings of a file."""
    names = set()
    for name, value in data.items():
        names |= leaves(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}"}
    return names


def text_of(base: str, data: dict[str, Any]) -> str:
    """A file of the tool with these settings."""
    if base.endswith(".sh"):
        return " ".join(f"{name}={value}" for name, value in data.items())
    if base.endswith(".py"):
        return f"{IMPORTS[base]}\n\ndef f():\n    return Config(**{data!r})\n"
    if base.endswith(".toml"):
        lines = [
            f"[{part}]\n" + "\n".join(f"{n} = {json.dumps(v)}" for n, v in rows.items()) for part, rows in data.items()
        ]
        return "\n".join(lines)
    return json.dumps(data)


def with_field(base: str, section: int, name: str, value: Any) -> tuple[dict[str, Any], str]:
    """The settings of a base with one more field in one of its sections, or at its top, and the dotted name of that field."""
    data = json.loads(json.dumps(BASES[base][1]))
    # A plan of patterns has no other fields, and what a class of checkpoints is given never changes a price.
    places = [n for n, rows in data.items() if isinstance(rows, dict) and n not in ("tp_plan", "checkpoint")]
    places += [] if base in ("i.toml", "h.yml", "k.py") else [""]
    place = places[section % len(places)]
    if base.endswith(".sh"):
        name = f"--{name.replace('_', '-')}"
    (data[place] if place else data)[name] = value
    return data, f"{place}.{name}" if place else name


def test_every_reader_is_under_the_property() -> None:
    assert {tool for tool, _ in BASES.values()} == {name for name, _, _ in READERS} | {
        "torchtitan",
        "Megatron-LM",
        "NeMo",
    }


@given(
    base=st.sampled_from(sorted(BASES)),
    section=st.integers(0, 3),
    before=LETTERS,
    word=st.sampled_from((*RISKY_WORDS, "plain")),
    after=LETTERS,
    value=st.one_of(st.integers(2, 512), st.booleans(), st.sampled_from(["auto", "none", "full", "cpu", 0, 1, -1, ""])),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_field_of_a_file_is_dropped(
    base: str, section: int, before: str, word: str, after: str, value: Any, tmp_path: Path
) -> None:
    """The invariant: each field of a file is read, reported as unread, or of the tool's list of those without effect. A field that nothing
    reads, named after what changes a layout, refuses the file by its name unless its value asks for nothing."""
    data, name = with_field(base, section, f"{before}_{word}_{after}", value)
    file = f"{base}:f" if base.endswith(".py") else base
    if is_risky(name) and not is_neutral(name, value):
        with pytest.raises(InputError) as error:
            read(tmp_path, file, text_of(base, data))
        said = str(error.value)
        assert name.rpartition(".")[2].strip("-").replace("-", "_") in said.replace("-", "_")
        assert any(isinstance(part, Term) and part.kind == "option" for part in error.value.sentence.parts)
        return
    found = read(tmp_path, file, text_of(base, data))
    groups = (found.read, found.unread, found.without_effect)
    fields = [field for group in groups for field in group if not field.endswith("()")]
    assert found.tool == BASES[base][0]
    assert sorted(field.replace("-", "_") for field in fields) == sorted(n.replace("-", "_") for n in leaves(data))


@given(text=st.text("$@{}()[]:-=;\"'#\\ \nABab12|&<>`*+", max_size=120))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_script_is_read_or_refused(text: str, tmp_path: Path) -> None:
    try:
        read(tmp_path, "x.sh", f"{text}\ntorchrun a.py --micro-batch-size 1 $A")
    except InputError as error:
        assert len(str(error)) < 1500


def test_a_file_of_megatron_without_a_dtype_is_of_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM computes in float32 unless it is told --bf16 or --fp16; the price was that of 16 bits, and did not say so."""
    (tmp_path / "run.sh").write_text("--tensor-model-parallel-size 8 --micro-batch-size 1")
    given = ["price", "llama-3-8b", "--cluster", "1x8-h100", "--layers", "1", "--seq", "256", "--alone"]
    given += ["--config", str(tmp_path / "run.sh")]
    said = "states no dtype, without which Megatron-LM computes in float32; priced in bfloat16, and --dtype float32"
    for beside, noted in (([], True), (["--dtype", "float32"], False), (["--dtype", "bfloat16"], False)):
        assert main([*given, *beside]) == 0
        assert (said in capsys.readouterr().out) == noted
    (tmp_path / "run.sh").write_text("--tensor-model-parallel-size 8 --micro-batch-size 1 --bf16")
    assert main(given) == 0 and "states no dtype" not in capsys.readouterr().out
