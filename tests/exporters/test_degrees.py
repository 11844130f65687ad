"""Plans with context and expert ranks, as the degrees of Megatron-LM and torchtitan: each tool's own parser and mesh takes them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from planner_core.core import InputError, Plan, Replicate, Shard
from planner_core.core.plan_json import plan_to_json
from planner_core.exporters.api import export, export_text
from planner_core.exporters.targets import write_target
from planner_core.planning.methods import TARGETS, parse_layout
from planner_core.planning.pricing import Statement, read_setup
from planner_core.planning.pricing.configs.tools import megatron
from tests.exporters.test_targets import flags_of, written
from tests.support.plans import plan_of_layout, pricer

FIELDS = {
    "context-parallel-size": "context_parallel_size",
    "cp-comm-type": "cp_comm_type",
    "moe-router-topk": "moe_router_topk",
    "expert-model-parallel-size": "expert_model_parallel_size",
    "moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "tensor-model-parallel-size": "tensor_model_parallel_size",
    "pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "sequence-parallel": "sequence_parallel",
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads",
    "num-query-groups": "num_query_groups",
    "num-experts": "num_moe_experts",
    "bf16": "bf16",
}
"""Flags of Megatron-LM, and the fields of megatron-core's TransformerConfig that they set."""
STATED = (  # a model, a layout, what Megatron-LM and torchtitan are told of it, and whether that is the plan
    (
        "llama-3-8b",
        "dp=2,cp=8,zero=1",
        {"context-parallel-size": 8, "cp-comm-type": "p2p"},
        True,
        (1, 2, 1, 8, 1),
        False,
    ),
    (
        "llama-3-8b",
        "fsdp=2,cp=8,cp_type=gather",
        {"context-parallel-size": 8, "cp-comm-type": "all_gather"},
        False,
        (1, 2, 1, 8, 1),
        True,
    ),
    (
        "llama-3-8b",
        "dp=2,cp=4,tp=2,sp,cp_type=ulysses",
        {"context-parallel-size": 4, "cp-comm-type": "a2a", "sequence-parallel": True},
        True,
        (2, 1, 2, 4, 1),
        False,
    ),
    (
        "mixtral-8x7b",
        "dp=16,ep=8,zero=1",
        {"expert-model-parallel-size": 8, "moe-token-dispatcher-type": "alltoall"},
        True,
        (1, 16, 1, 1, 8),
        True,
    ),
    (
        "mixtral-8x7b",
        "fsdp=16,ep=8",
        {"expert-model-parallel-size": 8, "moe-token-dispatcher-type": "alltoall"},
        False,
        (1, 16, 1, 1, 8),
        True,
    ),
    (
        "mixtral-8x7b",
        "dp=8,ep=8,tp=2,sp",
        {"expert-model-parallel-size": 8, "tensor-model-parallel-size": 2, "sequence-parallel": True},
        True,
        (1, 8, 2, 1, 8),
        False,
    ),
)


@cache
def of_layout(name: str, text: str) -> Plan:
    """The plan of a stated layout on 16 GPUs, of two layers."""
    return plan_of_layout(name, "2x8-h100", text, seq=8192, layers=2)


def test_a_form_without_a_model_needs_no_torch(tmp_path: Path) -> None:
    """The page writes a form in a process of its own, where importing torch takes longer than the rest."""
    code = "import sys; from planner_core.cli.main import main"
    for target, layout in (
        ("megatron", "dp=2,tp=8,sp,zero=1"),
        ("torchtitan", "dp=2,tp=8,sp,zero=1"),
        ("fsdp2", "fsdp=16"),
    ):
        file = tmp_path / f"{target}.json"
        file.write_text(json.dumps(plan_to_json(of_layout("llama-3-8b", layout))))
        main = ["export", str(file), "--to", target, "-o", str(tmp_path / target), "--json"]
        code += f"; assert main({main!r}) == 0; assert 'torch' not in sys.modules, {target!r}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "text", "flags", "held"), [case[:4] for case in STATED])
def test_megatron_is_told_of_context_and_experts(name: str, text: str, flags: dict[str, Any], held: bool) -> None:
    """Its flags state the layout again, as its reader reads them."""
    file, remarks, _ = write_target(TARGETS["megatron"], of_layout(name, text))
    found = flags_of(file)
    assert {k: found.get(k) for k in flags} == flags
    fields, notes = megatron.read_arguments(file, "exported")
    again = megatron.read(fields, 16, notes)
    if held:
        assert again.layout == parse_layout(text) and not any("priced" in note for note in again.notes)
    assert held or "the plan's weights are of stage 3" in " ".join(remarks)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-3-8b", "fsdp=8,tp=2"),
        ("llama-3-8b", "dp=8,tp=2,sp"),
        ("llama-3-8b", "fsdp=2,cp=8,cp_type=gather"),
        ("mixtral-8x7b", "dp=16,ep=8,zero=2"),  # was written as 2 replicas of 8 shards, which the reader refuses
    ],
)
def test_torchtitans_options_are_read_again(name: str, text: str, tmp_path: Path) -> None:
    """`price --config` takes the file that the export writes: the same layout, batch and recomputation."""
    (tmp_path / "out.torchtitan").write_text(
        written(with_policies(of_layout(name, text), "full", "full"), "torchtitan")
    )
    again = read_setup(tmp_path / "out.torchtitan", 16)
    assert again.layout == parse_layout(text)
    assert {k: again.options[k] for k in ("micro_batch", "accumulate", "seq", "recompute", "stack")} == {
        "micro_batch": 1,
        "accumulate": 1,
        "seq": 8192,
        "recompute": "full",
        "stack": "torchtitan",
    }


def with_policies(plan: Plan, *policies: str) -> Plan:
    """The plan with another policy of recomputation in each of its two layers."""
    (label,) = (name for name in plan.blocks if name)
    block = plan.blocks[label]
    parts = {
        f"{label}#{i}": replace(block, recompute=policy, prefixes=(prefix,))
        for i, (policy, prefix) in enumerate(zip(policies, block.prefixes, strict=True))
    }
    workload = replace(plan.workload, recompute=policies[0] if len(set(policies)) == 1 else "auto")
    return replace(plan, blocks={"": plan.blocks[""], **parts}, workload=workload)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize(
    ("layout", "policies", "runs"),
    [
        ("dp=8,tp=2,sp", ("none", "keep-matmuls"), "full"),
        ("dp=8,tp=2,sp", ("keep-matmuls", "keep-matmuls"), "full"),
        ("dp=8,tp=2,sp", ("none", "none"), "none"),
        ("dp=2,cp=8,zero=1", ("none", "none"), "none"),
    ],
)
def test_a_form_is_priced_as_price_reads_its_file(
    target: str, layout: str, policies: tuple[str, str], runs: str, tmp_path: Path
) -> None:
    """The report of an export has the figures of `price --config`: of what the file states, and of the tool's own stack."""
    plan = with_policies(of_layout("llama-3-8b", layout), *policies)
    made = export_text(plan, target)
    (tmp_path / "written").write_text(made.text)
    setup = read_setup(tmp_path / "written", 16)
    assert setup.options["recompute"] == runs and setup.options["stack"] == target
    priced = pricer("llama-3-8b", "2x8-h100").plan(Statement(setup.layout, **setup.options, layers=2))
    assert priced is not None and made.nearest is not None
    assert made.nearest.step_time_s == pytest.approx(priced.cost.step_time_s)
    assert made.nearest.peak_bytes == pytest.approx(priced.cost.memory_bytes["peak"])
    assert any("that of the written file" in remark for remark in made.remarks)


@pytest.mark.parametrize(
    ("target", "name", "said"),
    [
        (
            "torchtitan",
            "tt.toml",
            r"writes command-line options, and price\(config=FILE\) would read tt.toml as TOML; .* in .txt or .sh",
        ),
        ("megatron", "mega.YAML", "would read mega.YAML as YAML; .* in .txt or .sh"),
        ("accelerate", "acc.toml", "writes YAML, and .* as TOML; .* in .yaml"),
    ],
)
def test_a_name_of_another_format_is_refused(target: str, name: str, said: str, tmp_path: Path) -> None:
    """Options were written into a file called tt.toml without a word, and `price --config` then refused it as "not TOML"."""
    with pytest.raises(InputError, match=said):
        export(of_layout("llama-3-8b", "fsdp=8,tp=2"), target, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["tt.txt", "tt.sh", "tt"])
def test_a_name_of_options_is_written_and_read_again(name: str, tmp_path: Path) -> None:
    said = export(with_policies(of_layout("llama-3-8b", "dp=8,tp=2,sp"), "none", "none"), "torchtitan", tmp_path / name)
    assert any("that of the written file" in line for line in said)
    assert read_setup(tmp_path / name, 16).layout == parse_layout("dp=8,tp=2,sp")


def test_a_form_that_recomputes_other_layers_than_the_plan_has_no_price() -> None:
    """Megatron-LM recomputes the first layers; the search would choose a policy for each by itself."""
    made = export_text(with_policies(of_layout("llama-3-8b", "dp=8,tp=2,sp"), "none", "full"), "megatron")
    assert flags_of(made.text)["recompute-method"] == "block"
    assert made.nearest is None and "it has no price in this form" in made.lines[-1]


@pytest.mark.parametrize(("name", "text", "sizes", "held"), [(case[0], case[1], *case[4:]) for case in STATED])
def test_torchtitan_is_told_of_context_and_experts(name: str, text: str, sizes: tuple[int, ...], held: bool) -> None:
    """Its own mesh takes the degrees: experts are dealt over ranks that shard weights, and attention gathers keys and values."""
    made = export_text(of_layout(name, text), "torchtitan")
    words = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "expert_parallel")
    told = dict(
        line.removeprefix("--parallelism.").split()
        for line in made.text.splitlines()
        if line.startswith("--parallelism.") and "_degree" in line
    )
    assert tuple(int(told.get(f"{word}_degree", 1)) for word in words) == sizes
    assert held != any(remark.startswith("differs from the plan: ") for remark in made.remarks)
    replicate, shard, tensor, context, expert = sizes
    assert replicate * shard * tensor * context == 16 and shard * tensor * context % expert == 0, (
        "as ParallelDims asserts"
    )


def test_forms_without_such_axes_say_what_is_lost() -> None:
    for name, text, words in (
        ("llama-3-8b", "dp=2,cp=4,tp=2", "those ranks take samples of their own"),
        ("mixtral-8x7b", "dp=8,ep=8,tp=2", "here every rank has all of them"),
    ):
        assert words in " ".join(write_target(TARGETS["parallelize_module"], of_layout(name, text))[1])


def test_megatrons_own_groups_are_those_of_the_mesh() -> None:
    """With megatron-core's generator of ranks: context ranks are neighbours of tensor ranks, expert ranks of data-parallel ones."""
    state = pytest.importorskip("megatron.core.parallel_state")
    for text, which, sizes in (
        ("dp=2,cp=4,tp=2", "cp", {"tp": 2, "cp": 4, "dp": 2, "ep": 1}),
        ("dp=8,ep=4,tp=2", "ep", {"tp": 2, "cp": 1, "dp": 2, "ep": 4}),
    ):
        groups = state.RankGenerator(pp=1, order="tp-cp-ep-dp-pp", **sizes).get_ranks(which)
        mesh = parse_layout(text).mesh()
        axis = mesh.axis_names.index({"cp": "context", "ep": "expert"}[which])
        ranks = torch.arange(16).view(mesh.axis_sizes).movedim(axis, -1).reshape(-1, mesh.axis_sizes[axis])
        assert sorted(groups) == sorted(ranks.tolist())


@pytest.mark.parametrize(("name", "text", "sizes"), [(case[0], case[1], case[4]) for case in STATED])
def test_torchtitans_own_config_takes_context_and_experts(name: str, text: str, sizes: tuple[int, ...]) -> None:
    configs = pytest.importorskip("torchtitan.config.configs")
    tyro = pytest.importorskip("tyro")
    lines = written(of_layout(name, text), "torchtitan").splitlines()
    options = [x.replace("--parallelism.", "--").split() for x in lines if x.startswith("--parallelism.")]
    read = tyro.cli(configs.ParallelismConfig, args=[word for words in options for word in words])
    assert (read.fsdp_reshard_after_forward == "never") == ("zero=1" in text and "cp" not in text)
    assert (read.data_parallel_replicate_degree, read.data_parallel_shard_degree, read.tensor_parallel_degree) == sizes[
        :3
    ]
    assert (read.context_parallel_degree, read.expert_parallel_degree) == sizes[3:]


@pytest.mark.parametrize(("name", "text", "flags"), [case[:3] for case in STATED])
def test_megatron_core_takes_the_flags(name: str, text: str, flags: dict[str, Any]) -> None:
    """With megatron-core 0.16.1 (requirements-targets.txt)."""
    core = pytest.importorskip("megatron.core.transformer")
    found = flags_of(written(of_layout(name, text), "megatron"))
    fields = {FIELDS[flag]: value for flag, value in found.items() if flag in FIELDS}
    config = core.TransformerConfig(**fields, params_dtype=torch.bfloat16, add_bias_linear=False)
    assert all(getattr(config, FIELDS[flag]) == value for flag, value in flags.items())
    with pytest.raises(ValueError, match="num_moe_experts must be non None"):  # it does check what it is given
        core.TransformerConfig(
            **{**fields, "num_moe_experts": None, "expert_model_parallel_size": 2}, add_bias_linear=False
        )


@pytest.mark.parametrize(("target", "where"), [("megatron", "split over all here"), ("hf", "on all here")])
def test_whole_experts_on_tensor_ranks_are_not_called_whole_in_a_tool_that_splits_them(target: str, where: str) -> None:
    """Megatron-LM's file was priced as the plan, and said to hold the experts whole, which it splits over the tensor ranks."""
    run = {"micro_batch": 2, "accumulate": 2, "seq": 512, "layers": 2, "stack": "megatron"}
    plan = plan_of_layout("mixtral-8x7b", "1x8-h100", "dp=4,tp=2", **run)
    experts = [p.stored for b in plan.blocks.values() for n, p in b.params.items() if n.endswith("experts.down_proj")]
    assert experts == [(Replicate(), Shard(0))]
    made = export_text(plan, target)
    assert made.nearest is not None
    assert (made.nearest.peak_bytes == made.nearest.plan_peak_bytes) == (target == "megatron")
    (said,) = [r for r in made.remarks if r.startswith("differs from the plan: ") and "expert lies on one" in r]
    assert where in said and not [r for r in made.remarks if "down_proj: split in the plan, whole here" in r]
