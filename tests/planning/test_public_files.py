"""Well-known training runs, each stated by a small file with its own tool's keys and values (docs/CASES.md)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planner_core.core import InputError
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Setup, read_setup

FILES = Path(__file__).parents[1] / "support" / "case_files"


def read(name: str, gpus: int, folder: Path) -> Setup:
    """A file of `FILES`. Those of Python are kept as text, since they name what is not installed."""
    file, _, function = name.partition(":")
    if function:
        shutil.copy(FILES / f"{file}_py.txt", folder / f"{file}.py")
        return read_setup(f"{folder / file}.py:{function}", gpus)
    return read_setup(FILES / file, gpus)


@pytest.mark.parametrize(
    ("name", "gpus", "layout", "samples", "seq", "recompute"),
    [
        ("bloom.sh", 384, "dp=8,tp=4,pp=12,zero=1", 2048, 2048, "full"),
        ("gpt3.sh", 128, "tp=8,pp=16", 1536, 2048, "none"),
        ("sc21_7b.sh", 128, "dp=32,tp=4", 512, 2048, "full"),
        ("sc21_18b.sh", 256, "dp=32,tp=8", 1024, 2048, "full"),
        ("sc21_39b.sh", 512, "dp=32,tp=8,pp=2", 1536, 2048, "full"),
        ("sc21_76b.sh", 1024, "dp=32,tp=8,pp=4,vp=3", 1792, 2048, "full"),
        ("titan:llama3_8b", 8, "fsdp=8", 16, 8192, "selective"),
        ("titan:llama3_70b", 256, "fsdp=32,tp=8,sp", 512, 8192, "full"),
        ("titan:llama3_405b", 512, "fsdp=64,tp=8,sp", 128, 8192, "full"),
        ("bridge:gpt_oss_120b_pretrain_64gpu_h100_bf16_config", 64, "dp=16,ep=8,pp=4,zero=1", 1280, 4096, "none"),
        ("neox_20b.yml", 96, "dp=12,tp=2,pp=4,zero=1", 1536, 2048, "full"),
        ("tr1_13b.sh", 256, "dp=8,tp=4,pp=8,zero=1", 2048, 1024, "full"),
        ("foundry_7b.yaml", 8, "fsdp=8", 48, 2048, "none"),
        ("olmo_7b.yaml", 256, "fsdp=256", 2048, 2048, "none"),
        ("titan_v3.toml", 64, "fsdp=64", 256, 4096, "selective"),
        ("accelerate_fsdp2.yaml", 2, "fsdp=2", 2, None, "none"),
        ("smollm.yaml", 64, "dp=64", 512, 2048, "none"),
        ("olmo2.yaml", 128, "fsdp=128", 1024, 4096, "none"),
        ("axolotl_nd.yml", 8, "fsdp=2,tp=2,cp=2,cp_type=gather", 2, 8192, "none"),
        ("axolotl_qlora.yml", 8, "fsdp=8", 32, 512, "full"),
        ("axolotl_lora.yml", 8, "dp=8", 64, 4096, "full"),
        ("factory.yaml", 8, "fsdp=8", 16, 1024, "none"),
        ("olympic.yaml", 8, "dp=8", 128, 32768, "full"),
    ],
)
def test_a_public_run_is_stated_by_its_own_file(
    name: str, gpus: int, layout: str, samples: int, seq: int | None, recompute: str, tmp_path: Path
) -> None:
    found = read(name, gpus, tmp_path)
    options = found.options
    assert found.layout == parse_layout(layout)
    assert found.layout.data * options.get("micro_batch", 1) * options["accumulate"] == samples
    assert (options.get("seq"), options["recompute"]) == (seq, recompute)


def test_a_misspelt_option_of_a_public_script_is_refused_by_its_name(tmp_path: Path) -> None:
    """bigscience's tr1-13B script has --ffn_hidden_size, which Megatron-LM does not know either."""
    text = (FILES / "tr1_13b.sh").read_text()
    (tmp_path / "run.sh").write_text(text.replace("--ffn-hidden-size", "--ffn_hidden_size"))
    with pytest.raises(InputError, match='--ffn_hidden_size "20480" may change the layout'):
        read_setup(tmp_path / "run.sh", 256)


def test_a_compiled_loss_does_not_compile_the_model() -> None:
    assert read_setup(FILES / "titan_v3.toml", 8).options["compiled"] is False


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("foundry_7b.yaml", "microbatch_size: 6", "microbatch_size: auto", "auto is found while the run starts"),
        (
            "foundry_7b.yaml",
            "limit_all_gathers: true",
            "device_mesh: [2, 4]",
            r"device_mesh \[2, 4\].* FULL_SHARD is not read",
        ),
        ("foundry_7b.yaml", "activation_cpu_offload: false", "activation_cpu_offload: true", "in the host's memory"),
        ("neox_20b.yml", '"stage": 1', '"stage": 3', "zero_optimization.stage 3 is not read"),
        ("neox_20b.yml", '"save":', '"hidden_size": 6144, "save":', "hidden-size with hyphens and with underscores"),
        ("neox_20b.yml", '"save":', '"attention_config": [[["sparse"], 44]], "save":', "must be global or flash"),
    ],
)
def test_what_two_readers_cannot_price_is_refused(name: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    text = (FILES / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=said):
        read_setup(tmp_path / name, 96)


def test_weights_in_the_hosts_memory_are_refused_with_what_would_do() -> None:
    with pytest.raises(
        InputError,
        match="fsdp_offload_params asks for weights in the host's memory, which cannot be priced; set it to false",
    ):
        read_setup(FILES / "axolotl_liger.yml", 8)
