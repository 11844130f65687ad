"""Exports for other programs are run by those programs: same loss, same gradients, and the collectives that they issue."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Collection
from dataclasses import field, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner_core as shardscope
from explorer.text.option_words import page_wording
from planner_core.cli.main import main
from planner_core.cli.options import name_flags
from planner_core.core import Plan, Shard, load_cluster
from planner_core.core.errors import InputError
from planner_core.cost import zero_stage
from planner_core.cost.communication.collectives import wire_bytes
from planner_core.exporters import api
from planner_core.exporters.api import export, export_text
from planner_core.exporters.nearest import FormCost, nearest_plan, price_file, unstated_options
from planner_core.exporters.targets import write_target
from planner_core.models.sources.huggingface import build_from_config
from planner_core.planning.methods import TARGETS, parse_layout, tool_spaces
from planner_core.planning.methods.tools import torchtitan
from planner_core.planning.methods.tp_layout import tensor_layout
from planner_core.planning.pipeline import plan_model
from planner_core.planning.pricing import Statement, read_setup
from planner_core.planning.request import Request
from planner_core.verification.api import scaled
from planner_core.verification.build_models import gentle_initializer, materialise
from tests.support.export_spec import DEEPSPEED, model_spec
from tests.support.plans import plan_of_layout, pricer, searched, with_ample_memory
from tests.support.plans import planned as plan_once
from tests.support.ranks import run_ranks
from tests.support.torchrun import run_script

ROOT = Path(__file__).resolve().parents[2]
BATCH, SEQ, WIDTH, LAYERS = 4, 16, 64, 2
PAYLOAD = BATCH * SEQ * WIDTH * 4
"""Bytes of one hidden state."""
OTHERS = [t for t in TARGETS if t not in ("json", "torchrun", "fsdp2", "accelerate")]


@cache
def planned(name: str, mesh: str = "2x8") -> dict[str, Plan]:
    # Room for all of them: a layout that fits nowhere is planned for its least memory, which is another plan.
    request = Request(name, cluster=with_ample_memory("2x8-h100"), mesh=mesh, memory_gb=1000)
    return {p.name: p for p in plan_once(request).plans}


def consume(name: str, which: str, target: str, folder: Path) -> dict[str, Any]:
    """The scaled plan exported and run by its consumer on 2 ranks."""
    plan = scaled(planned(name)[which], 2)
    config = plan.model.config
    model: Any = build_from_config(config, "float32")[0]
    materialise(model, gentle_initializer(model, 0))
    model.save_pretrained(folder / "model")
    found = model_spec(config)
    sizes = {"batch": BATCH, "seq": SEQ}
    inputs = {k: [[sizes.get(d, d) for d in shape], kind, high] for k, (shape, kind, high) in found["inputs"].items()}
    (folder / "spec.json").write_text(json.dumps({"class": found["class"], "inputs": inputs}))
    export(plan, target, folder / ("plan.py" if target == "parallelize_module" else "plan.json"))
    said = run_script(ROOT / "tests" / "support" / "export_consumer.py", target, str(folder))
    row: dict[str, Any] = next(json.loads(x.removeprefix("ROW ")) for x in said.splitlines() if x.startswith("ROW "))
    assert row["parallel"] == pytest.approx(row["single"], rel=1e-6)
    assert row["after"][0] == pytest.approx(row["after"][1], rel=1e-5)
    assert row["after"][0] < row["single"]
    return row


def counts(row: dict[str, Any], phase: str) -> dict[str, tuple[int, int]]:
    return {kind: (r["count"], r["bytes"]) for kind, r in row["collectives"][phase].items()}


def test_parallelize_module_trains_like_one_process(tmp_path: Path) -> None:
    row = consume("llama-3-8b", "Megatron-LM", "parallelize_module", tmp_path)
    assert row["grad_error"] < 1e-5, row["worst"]
    assert len([n for n in row["split"] if ".layers." in n]) == 7 * LAYERS
    forward, backward = counts(row, "forward"), counts(row, "backward")
    assert forward["all_reduce"] == (2 * LAYERS, 2 * LAYERS * PAYLOAD)
    # One for each shared input, one for the head's.
    assert backward["all_reduce"] == (
        (2 * LAYERS + 1),
        (2 * LAYERS + 1) * PAYLOAD,
    )
    predicted = scaled(planned("llama-3-8b")["Megatron-LM"], 2).cost.collectives()["backward"]["all_reduce"]
    assert predicted["count"] == backward["all_reduce"][0]  # the same collectives as the plan, at this batch and length
    assert predicted["bytes"] * BATCH * SEQ == backward["all_reduce"][1] * 8 * 32


def test_parallelize_module_splits_tokens_where_the_plan_does(tmp_path: Path) -> None:
    row = consume("llama-3-8b", "Megatron-LM + sequence parallel", "parallelize_module", tmp_path)
    assert row["grad_error"] < 1e-5, row["worst"]
    text = (tmp_path / "plan.py").read_text()
    assert '"model.layers.*.input_layernorm": SequenceParallel()' in text
    forward, backward = counts(row, "forward"), counts(row, "backward")
    # The head's input.
    assert forward["reduce_scatter"][0] == 2 * LAYERS and backward["reduce_scatter"][0] == 2 * LAYERS + 1
    assert forward["all_gather"][0] >= 2 * LAYERS + 1 and "all_reduce" not in forward


def test_a_model_that_cannot_split_tokens_keeps_them_whole() -> None:
    made = export_text(planned("bert-large")["Megatron-LM + sequence parallel"], "parallelize_module")
    assert "SequenceParallel" not in made.text
    assert "tokens are split between the blocks in the plan" in " ".join(made.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-large", "vit-large", "t5-large", "mixtral-8x7b"])
def test_parallelize_module_of_other_models(name: str, tmp_path: Path) -> None:
    row = consume(name, "Megatron-LM", "parallelize_module", tmp_path)
    assert row["grad_error"] < 1e-5, row["worst"]
    assert row["split"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("llama-3-8b", "Megatron-LM"),
        ("mixtral-8x7b", "hf-expert"),
        ("bert-large", "Megatron-LM"),
        ("vit-large", "Megatron-LM"),
    ],
)
def test_hf_trains_like_one_process(name: str, which: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    row = consume(name, which, "hf", tmp_path)
    assert row["grad_error"] < 2e-5, row["worst"]
    if name == "llama-3-8b":
        assert counts(row, "forward")["all_reduce"] == (2 * LAYERS, 2 * LAYERS * PAYLOAD)
        # Each column by itself.
        assert counts(row, "backward")["all_reduce"] == (
            (5 * LAYERS + 1),
            (5 * LAYERS + 1) * PAYLOAD,
        )
        assert f"{5 * LAYERS} backward all_reduces" in " ".join(
            export_text(scaled(planned(name)[which], 2), "hf").remarks
        )


@pytest.mark.slow
@pytest.mark.skipif(not DEEPSPEED.exists(), reason="DeepSpeed is not installed: make test-all does it")
def test_deepspeed_trains_like_one_process(tmp_path: Path) -> None:
    row = consume("llama-3-8b", "Megatron-LM", "deepspeed", tmp_path)
    assert {"LinearLayer", "LinearAllreduce"} <= set(row["kinds"])


def test_hf_switches_the_built_in_rules_off() -> None:
    data = json.loads(written(planned("mixtral-8x7b")["Megatron-LM"], "hf"))
    assert data["tp_size"] == 8
    assert data["tp_plan"]["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert data["tp_plan"]["model.layers.*.mlp.experts"] in ("replicate", "moe_tp_experts")


@pytest.mark.parametrize("target", ["parallelize_module", "hf", "deepspeed"])
@pytest.mark.slow
def test_what_cannot_be_expressed_is_named(target: str) -> None:
    # Eight samples a GPU, since a GPU that waits for its host runs a stated layout, which lies as DeepSpeed's ZeRO does or is refused.
    ample = with_ample_memory("2x8-h100")
    best = searched(Request("gpt2-xl", cluster=ample, mesh="2x8", layers=2, batch=128, memory_gb=1000))
    if target == "deepspeed":  # a plan without tensor parallelism is a ZeRO stage there, and says how it differs
        assert "11 of its 16 kinds of weights lie in another way there" in " ".join(export_text(best, target).remarks)
    else:
        with pytest.raises(InputError, match="splits no linear layer"):
            export_text(best, target)
    conv = next(p for p in plan_model(Request("gpt2-xl", cluster="1x4-a100-pcie", mesh="4", method="atp")).plans)
    with pytest.raises(InputError, match="Conv1D"):
        export_text(conv, target)
    said = " ".join(export_text(planned("t5-large")["Megatron-LM"], target).remarks)
    assert "encoder.block.*.layer.*.SelfAttention.q" in said
    assert "scores" in said
    said = " ".join(export_text(planned("llama-3-8b")["Megatron-LM + sequence parallel"], target).remarks)
    assert "tokens are split between the blocks" in said


@pytest.mark.slow
def test_a_mask_that_all_heads_share_breaks_no_pair() -> None:
    """The mask of a sliding window was taken for a bias of every head; T5's is one."""
    config = {"model_type": "mistral", **TINY, "sliding_window": 8}
    found = shardscope.plan(config, cluster="1x8-h100:gpus=2", mesh="2", batch=4, seq=32)
    layout = tensor_layout(next(p for p in found.plans if p.name == "Megatron-LM"))
    assert sum(g.attention for g in layout.groups) == 2 and "bias" not in " ".join(map(str, layout.differences))
    t5 = tensor_layout(planned("t5-large")["Megatron-LM"])
    assert "a bias of every head" in " ".join(map(str, t5.differences))


def test_two_tensor_axes_are_refused() -> None:
    plan = searched(Request("llama-3-8b", cluster="1x8-h100", mesh="2x4", layers=1, method="atp"))
    for target in OTHERS:
        with pytest.raises(InputError, match="over 2 mesh axes"):
            write_target(TARGETS[target], plan)


def written(plan: Plan, target: str) -> str:
    """The text of a form, whose price nobody reads."""
    return write_target(TARGETS[target], plan)[0]


def of_layout(layout: str, layers: int = 2) -> Plan:
    micro_batch = 16 // parse_layout(layout).data
    return plan_of_layout("llama-3-8b", "1x8-h100", layout, micro_batch=micro_batch, seq=512, layers=layers)


def test_zero_stages_of_deepspeed_and_megatron() -> None:
    """The stage that the plan's weights have, with or without tensor parallelism."""
    for layout, stage in (
        ("dp=8,zero=1", 1),
        ("dp=8,zero=2", 2),
        ("dp=2,tp=4,zero=2", 2),
        ("dp=2,tp=4", 0),
    ):
        made = export_text(of_layout(layout), "deepspeed")
        data = json.loads(made.text)
        assert data["zero_optimization"] == {"stage": stage}, layout
        assert data["communication_data_type"] == "fp32" and ("data_types" in data) == (stage > 0)
        assert (
            "gradients are kept in bfloat16 here and summed over GPUs in float32, which the plan and the price have for both"
            in " ".join(made.remarks)
        ) == (stage == 0)
        assert ("tensor_parallel" in data) == ("tp" in layout)
        assert ("3 of its 12 kinds" in " ".join(made.remarks)) == ("tp" not in layout), "norms stay at stage 0"
    for layout, distributed in (("dp=2,tp=4,zero=1", True), ("dp=2,tp=4", False)):
        flags = flags_of(written(of_layout(layout), "megatron"))
        assert flags.get("use-distributed-optimizer", False) == distributed


@pytest.mark.parametrize(
    ("dtype", "section", "flag"), [("bfloat16", "bf16", "bf16"), ("float16", "fp16", "fp16"), ("float32", None, None)]
)
def test_the_dtype_of_a_plan_is_that_of_the_run(dtype: str, section: str | None, flag: str | None) -> None:
    """A tool that is told of no dtype takes its own: float32 in DeepSpeed and Megatron-LM, bfloat16 in torchtitan."""
    plan = of_layout("dp=2,tp=4")
    plan = replace(plan, workload=replace(plan.workload, dtype=dtype))
    settings = json.loads(written(plan, "deepspeed"))
    assert [name for name in ("bf16", "fp16") if name in settings] == ([section] if section else [])
    arguments = flags_of(written(plan, "megatron"))
    assert [name for name in ("bf16", "fp16") if name in arguments] == ([flag] if flag else [])
    made = export_text(plan, "torchtitan")
    computes = "float32" if dtype == "float32" else None
    assert flags_of(made.text).get("training.mixed_precision_param") == computes
    differs = "differs from the plan: it computes in bfloat16 here and in float16 there"
    assert (differs in made.remarks) == (dtype == "float16")
    # No flag of Megatron-LM says float32, so its reader has to be told: it took bfloat16, 4 times as fast.
    beside = "price --config FILE reads it back with what it does not state: --dtype float32"
    assert (beside in map(name_flags, export_text(plan, "megatron").remarks)) == (dtype == "float32")


@pytest.mark.parametrize(
    ("target", "run", "differs"),
    [
        ("megatron", {"optimizer": "sgd", "dtype": "float32"}, ()),
        ("megatron", {"gradients": "bfloat16"}, ("sums gradients in float32 here and in bfloat16 there",)),
        ("megatron", {"compiled": True}, ("runs blocks operator by operator here and compiled there",)),
        ("torchtitan", {"compiled": True}, ()),
        ("torchtitan", {"optimizer": "sgd"}, ("updates weights by adamw here and by sgd there",)),
        (
            "torchtitan",
            {"precision": "pure"},
            tuple(f"{does} in float32 here and in bfloat16 there" for does in ("stores weights", "sums gradients")),
        ),
        ("deepspeed", {"dtype": "float32", "compiled": True, "optimizer": "sgd"}, ()),
        ("deepspeed", {"precision": "pure"}, ("stores weights in float32 here and in bfloat16 there",)),
        ("hf", {"dtype": "float16", "loss": "whole"}, ()),
        ("hf", {"gradients": "bfloat16"}, ("sums gradients in float32 here and in bfloat16 there",)),
        ("accelerate", {"gradients": "bfloat16"}, ("sums gradients in float32 here and in bfloat16 there",)),
    ],
)
def test_what_a_file_cannot_carry_of_a_run_is_named(
    target: str, run: dict[str, Any], differs: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a tool does otherwise than a run is in a remark; all else is in the file, or in the options that price it as the export does."""
    plan = pricer("llama-3-8b", "1x8-h100").plan(
        Statement(
            parse_layout({"hf": "dp=4,tp=2", "accelerate": "dp=8"}.get(target, "dp=4,tp=2,sp")),
            2,
            2,
            seq=256,
            layers=2,
            **run,
        )
    )
    assert plan is not None
    made = export_text(plan, target)
    said = [r for r in made.remarks if r.startswith("differs from the plan: it ")]
    assert said == [f"differs from the plan: it {text}" for text in differs]
    back = [name_flags(r).split("state: ")[1] for r in made.remarks if "reads it back" in r]
    (tmp_path / "file").write_text(made.text)
    given = ["price", "llama-3-8b", "--cluster", "1x8-h100", "--layers", "2", "--config", str(tmp_path / "file")]
    assert main([*given, *" ".join(back).split(), "--alone", "--json"]) == 0
    read, priced = json.loads(capsys.readouterr().out), made.nearest
    assert priced is not None
    assert (read["step_time_s"], read["memory_bytes"]["peak"]) == (priced.step_time_s, priced.peak_bytes)


def test_deepspeed_is_told_zero_3_and_plain_data_parallelism(tmp_path: Path) -> None:
    """What `--for deepspeed` lists, its form writes; what it gathers ahead is a layer, as in the plan, and its reader reads it back."""
    made = export_text(of_layout("fsdp=8"), "deepspeed")
    data = json.loads(made.text)
    assert data["zero_optimization"]["stage"] == 3
    layer = 218_112_000
    assert data["zero_optimization"]["stage3_prefetch_bucket_size"] == layer
    assert data["zero_optimization"]["stage3_max_live_parameters"] == 2 * layer
    assert "norms, biases" in " ".join(made.remarks)
    assert json.loads(written(of_layout("dp=8"), "deepspeed"))["zero_optimization"] == {"stage": 0}
    with pytest.raises(InputError, match=r"over 4 of 8 GPUs, and DeepSpeed's ZeRO-3 over all; fsdp=8 would do"):
        export_text(of_layout("dp=2,fsdp=4"), "deepspeed")
    assert parse_layout("fsdp=8") in [s.layout for s in tool_spaces("deepspeed", load_cluster("1x8-h100"))]
    (tmp_path / "ds.json").write_text(made.text)
    found = read_setup(tmp_path / "ds.json", 8)
    assert found.layout == parse_layout("fsdp=8") and found.options["gradients"] == "float32" and not found.notes


def test_data_parallel_forms_give_one_reason_and_write_the_nearest() -> None:
    """A ZeRO-2 plan with its embedding in parts: DeepSpeed spoke of linear layers, and the others offered nothing."""
    plan = of_layout("dp=8,zero=2")
    params = dict(plan.blocks[""].params)
    name = "model.embed_tokens.weight"
    params[name] = replace(params[name], working=(Shard(0),))
    plan = replace(plan, blocks={**plan.blocks, "": replace(plan.blocks[""], params=params)})
    for target, words in (("deepspeed", '"stage": '), ("fsdp2", "REPLICATE, SHARD = 1, 8"), ("accelerate", "FSDP")):
        with pytest.raises(InputError, match=f"splits the work of {name} over mesh axis "):
            write_target(TARGETS[target], plan)
        near = api.export_text(plan, target, nearest=True)
        assert near.nearest is not None and near.nearest.fits and words in near.text
    flags = flags_of(written(plan, "torchtitan"))
    assert flags["parallelism.data_parallel_shard_degree"] == 8, "DDP holds whole states"


def test_nothing_that_does_not_fit_is_written_in_place_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the form holds the fastest that fits is written; if none does, nothing is, and the smallest is named."""
    plan = of_layout("dp=2,fsdp=4")
    near = api.export_text(plan, "deepspeed", nearest=True)
    assert near.nearest is not None and near.nearest.fits
    assert json.loads(near.text)["zero_optimization"]["stage"] in (1, 2, 3)
    find = api.data_parallel_plans

    def none_fits(plan: Plan, names: Collection[str]) -> list[tuple[Plan, FormCost]]:
        return [(found, replace(cost, fits=False)) for found, cost in find(plan, names)]

    monkeypatch.setattr(api, "data_parallel_plans", none_fits)
    monkeypatch.setattr(api, "megatron_alternatives", lambda plan: [])
    with pytest.raises(InputError, match=r"nothing is written, since ZeRO-. over all GPUs, .*does not fit"):
        api.export_text(plan, "deepspeed", nearest=True)


def test_degrees_for_megatron_and_torchtitan() -> None:
    plans = planned("llama-3-8b")
    plan = plans["Megatron-LM + sequence parallel"]
    flags = flags_of(written(plan, "megatron"))
    assert (flags["tensor-model-parallel-size"], flags["sequence-parallel"], flags["num-query-groups"]) == (8, True, 8)
    whole_tokens, sharded = plans["Megatron-LM"], planned("llama-3-8b", "16")["FSDP"]
    for stated, tensor, shard in (
        (plan, 8, 2),
        (whole_tokens, 8, 2),
        (sharded, 1, 16),
    ):  # ZeRO-1 keeps states in shards
        flags = flags_of(written(stated, "torchtitan"))
        assert flags["parallelism.tensor_parallel_degree"] == tensor
        assert flags["parallelism.data_parallel_shard_degree"] == shard
        # By default torchtitan splits tokens.
        assert flags.get("parallelism.no-enable_sequence_parallel", False) == (stated is whole_tokens)


def test_what_is_recomputed_is_told_to_each_tool() -> None:
    """Whole in all layers or in some, and a policy that Megatron-LM does not know; who cannot be told is told to the trainer."""
    plan = of_layout("dp=2,tp=4,sp", 4)
    (label,) = (name for name in plan.blocks if name)
    block = plan.blocks[label]

    def with_policies(**copies: int) -> Plan:
        parts, at = {"": plan.blocks[""]}, 0
        for number, (policy, count) in enumerate(copies.items()):
            prefixes = block.prefixes[at : at + count]
            parts[f"{label}#{number}"] = replace(block, recompute=policy.replace("_", "-"), prefixes=prefixes)
            at += count
        return replace(plan, blocks=parts)

    def megatron(**copies: int) -> tuple[dict[str, Any], str]:
        text, remarks, _ = write_target(TARGETS["megatron"], with_policies(**copies))
        flags = flags_of(text)
        return {k.removeprefix("recompute-"): v for k, v in flags.items() if "recompute" in k}, " ".join(remarks)

    assert megatron(none=4)[0] == {}
    assert megatron(full=4)[0] == {"granularity": "full", "method": "uniform", "num-layers": 1}
    flags, told = megatron(none=1, full=3)
    assert flags == {"granularity": "full", "method": "block", "num-layers": 3} and "first 3 layers" in told
    flags, told = megatron(keep_matmuls=4)
    assert flags["method"] == "uniform" and "recomputes by keep-matmuls" in told
    for policy in ("none", "selective", "full"):
        text, remarks, _ = write_target(TARGETS["torchtitan"], with_policies(**{policy: 4}))
        assert text.endswith(f"\nactivation-checkpoint:{policy}\n") and "recomputes by" not in " ".join(remarks)
    text, remarks, _ = write_target(TARGETS["torchtitan"], with_policies(none=1, full=3))
    assert text.endswith(":full\n") and "recomputes by full, none" in " ".join(remarks)
    for target in ("parallelize_module", "hf", "deepspeed"):
        for one, recomputes in ((with_policies(full=4), True), (plan, False)):
            assert ("gradient_checkpointing_enable" in " ".join(write_target(TARGETS[target], one)[1])) == recomputes


def test_megatron_is_told_of_gpt2() -> None:
    """Its config has other names, and its matrices lie the other way round, which degrees do not mind."""
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 250,
        "n_positions": 64,
    }
    for plan in shardscope.plan(config, cluster="1x8-h100:gpus=2", mesh="2", batch=4, seq=16, dtype="float32").plans:
        if plan.name in ("data parallel", "Megatron-LM", "Megatron-LM + sequence parallel"):
            flags = flags_of(written(plan, "megatron"))
            assert (flags["num-layers"], flags["hidden-size"], flags["ffn-hidden-size"]) == (2, 64, 256)
            assert (flags["num-attention-heads"], flags["max-position-embeddings"]) == (4, 64)
            assert flags["tensor-model-parallel-size"] == (1 if plan.name == "data parallel" else 2)
            assert flags.get("sequence-parallel", False) == ("sequence" in plan.name)
            assert flags["position-embedding-type"] == "learned_absolute"
            assert "disable-bias-linear" not in flags, "its Conv1D layers have biases"


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("kind", "more", "part"),
    [
        ("exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, "norms of queries"),
        ("mistral", {"sliding_window": 8}, r"sliding-window attention \(8 tokens\)"),
        ("llama", {"attention_bias": True}, "has them in .*o_proj"),
        ("granite", {}, "a model of type granite"),
        ("qwen3", {}, r"heads of a size that its config leaves out \(head_dim\)"),
        ("mistral", {"sliding_window": None}, ""),
        ("qwen2", {}, ""),
    ],
)
def test_megatron_is_given_no_model_that_its_flags_do_not_state(kind: str, more: dict[str, Any], part: str) -> None:
    """EXAONE-4 was written as a Llama. What is written has room for the sequence, and Qwen2's biases of queries, keys and values."""
    model = {"model_type": kind, **TINY, **more}
    plan = shardscope.price(model, cluster="1x8-h100:gpus=2", layout="tp=2", batch=4, seq=32, advise=False).plan
    assert plan is not None
    if part:
        with pytest.raises(InputError, match=part):
            write_target(TARGETS["megatron"], plan)
        return
    flags = flags_of(written(plan, "megatron"))
    assert flags["max-position-embeddings"] == 32
    assert flags["disable-bias-linear"] is True and flags.get("add-qkv-bias", False) == (kind == "qwen2")


def flags_of(text: str) -> dict[str, Any]:
    """Arguments, one a line, by name: True without a value, numbers as numbers."""
    flags: dict[str, Any] = {}
    for line in text.splitlines():
        name, _, value = line.removeprefix("--").partition(" ")
        try:
            flags[name] = json.loads(value) if value else True
        except ValueError:
            flags[name] = value
    return flags


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 250,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def built_by_megatron(argv: list[str]) -> tuple[int, float]:
    """In a process of its own: parameters of the model that megatron-core builds from the arguments, and a loss of it."""
    import argparse
    import tempfile

    import torch.distributed as dist
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parser = argparse.ArgumentParser()
    for flag in (
        "swiglu",
        "untie-embeddings-and-output-weights",
        "disable-bias-linear",
        "group-query-attention",
        "qk-layernorm",
        "bf16",
        "sequence-parallel",
    ):
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in ("normalization", "position-embedding-type"):
        parser.add_argument(f"--{flag}")
    for flag in ("norm-epsilon", "attention-dropout", "hidden-dropout"):
        parser.add_argument(f"--{flag}", type=float)
    for flag in (
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "kv-channels",
        "rotary-base",
        "vocab-size",
        "max-position-embeddings",
        "seq-length",
    ):
        parser.add_argument(f"--{flag}", type=int)
    args, _ = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        config = TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            kv_channels=args.kv_channels,
            qk_layernorm=args.qk_layernorm,
            normalization=args.normalization,
            layernorm_epsilon=args.norm_epsilon,
            gated_linear_unit=args.swiglu,
            activation_func=F.silu if args.swiglu else F.gelu,
            add_bias_linear=not args.disable_bias_linear,
            hidden_dropout=args.hidden_dropout,
            attention_dropout=args.attention_dropout,
            use_cpu_initialization=True,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=args.qk_layernorm),
            vocab_size=args.vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
        parallel_state.destroy_model_parallel()  # the process serves the next model too
        return sum(p.numel() for p in model.parameters()), model.config.layernorm_epsilon


@pytest.mark.parametrize("more", [{}, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}])
def test_megatron_core_builds_the_architecture(more: dict[str, Any]) -> None:
    """As many parameters as the model has: its gated feed-forward, norms without bias, grouped heads, rotary positions and untied head.

    And of Qwen3 the norms of queries and keys, over heads that are larger than the width divided by their number.
    """
    pytest.importorskip("megatron.core.models.gpt")
    stated = {"layout": "tp=2", "batch": 4, "seq": 16, "dtype": "float32", "advise": False}
    plan = shardscope.price({**LLAMA, **more}, cluster="1x8-h100:gpus=2", **stated).plan
    assert plan is not None
    text = written(plan, "megatron")
    flags = flags_of(text)
    assert (flags.get("qk-layernorm", False), flags.get("kv-channels")) == (bool(more), more.get("head_dim"))
    assert {"swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear"} <= flags.keys()
    assert (flags["normalization"], flags["position-embedding-type"]) == ("RMSNorm", "rope")
    assert (flags["vocab-size"], flags["make-vocab-size-divisible-by"], flags["rotary-base"]) == (250, 1, 50000)
    ((count, epsilon),) = run_ranks(built_by_megatron, 1, (text.split(),), backend=None)
    assert count == plan.model.params and epsilon == 1e-6


def by_itself(package: str, path: str) -> Any:
    """A module of a package without the package around it, which needs more than is installed."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[misc, union-attr]
    spec = importlib.util.spec_from_file_location("alone", Path(folder) / path)
    made = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["alone"] = made  # dataclasses look their types up there
    spec.loader.exec_module(made)  # type: ignore[union-attr]
    return made


def test_torchtitan_takes_the_options() -> None:
    """With torchtitan 0.3.0 and tyro (requirements-targets.txt)."""
    configs, manager = (
        pytest.importorskip("torchtitan.config.configs"),
        pytest.importorskip("torchtitan.config.manager"),
    )
    import tyro  # type: ignore[import-not-found, unused-ignore]

    checkpointing = by_itself("torchtitan", "distributed/activation_checkpoint.py")
    sections = {"training": configs.TrainingConfig, "parallelism": configs.ParallelismConfig}
    fields = [(name, kind, field(default_factory=kind)) for name, kind in sections.items()]
    by_default = field(default_factory=checkpointing.SelectiveAC.Config)
    form = make_dataclass(
        "Form", [*fields, ("activation_checkpoint", checkpointing.ActivationCheckpointingConfig, by_default)]
    )
    for which, tensor, sequence in (
        ("Megatron-LM", 8, False),
        ("Megatron-LM + sequence parallel", 8, True),
        ("FSDP", 1, True),
    ):
        text = written(planned("llama-3-8b", "16" if which == "FSDP" else "2x8")[which], "torchtitan")
        options = " ".join(line for line in text.splitlines() if not line.startswith("#")).split()
        assert options[:4] == [
            "--module",
            "llama3",
            "--config",
            "llama3_8b",
        ]  # which torchtitan takes off before it parses
        read = tyro.cli(form, args=options[4:], default=form(), registry=manager.custom_registry)
        assert read.activation_checkpoint is None  # nothing is recomputed in the plan
        again = tyro.cli(
            form, args=[*options[4:-1], "activation-checkpoint:full"], default=form(), registry=manager.custom_registry
        )
        assert isinstance(again.activation_checkpoint, checkpointing.FullAC.Config)
        found = read.parallelism
        assert (found.tensor_parallel_degree, found.enable_sequence_parallel) == (tensor, sequence)
        assert found.data_parallel_replicate_degree * found.data_parallel_shard_degree == 16 // tensor


def test_torchtitans_own_llamas_are_those_of_its_source() -> None:
    """Its models cannot be imported without all that it needs, so its source is read."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torchtitan is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "models" / "llama3"
    models, configs = (folder / "__init__.py").read_text(), (folder / "config_registry.py").read_text()
    for (dim, layers, heads, groups, vocabulary), name in torchtitan.CONFIGS.items():
        assert f"def {name}() -> Trainer.Config" in configs
        body = models.partition(f"def _{name.removeprefix('llama3_')}(")[2].partition("return")[0]
        wanted = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": groups, "vocab_size": vocabulary}
        assert all(f"    {key} = {value}\n" in body for key, value in wanted.items()), (name, body)
    bert = export_text(planned("bert-large")["Megatron-LM"], "torchtitan")
    assert "--module" not in bert.text and "module of yours" in " ".join(bert.remarks)


@pytest.mark.parametrize(("target", "same"), [("parallelize_module", False), ("hf", False), ("megatron", True)])
def test_what_the_form_does_is_priced(target: str, same: bool) -> None:
    plan = planned("llama-3-8b")["Megatron-LM"]
    made = export_text(plan, target)
    assert made.nearest is not None
    here, there = made.nearest.step_time_s, plan.cost.step_time_s
    assert there == made.nearest.plan_step_time_s
    if same:  # Megatron-LM's own kernels take another time; what the layout sends is the plan's
        assert made.nearest.wire_bytes == made.nearest.plan_wire_bytes
    else:
        assert here > 1.002 * there
    assert made.lines[-1].startswith("in this form: ") and made.remarks == made.lines[:-1]


def test_the_data_axis_is_priced_as_the_form_runs_it() -> None:
    """Megatron-LM's distributed optimizer is ZeRO-1: a trainer's DDP keeps all states whole, and DeepSpeed is told the stage."""
    plan = planned("llama-3-8b")["Megatron-LM"]
    assert zero_stage(plan) == 1
    for target, stage in (("parallelize_module", 0), ("hf", 0), ("deepspeed", 1)):
        text, remarks, layout = write_target(TARGETS[target], plan)
        assert layout is not None
        named = target != "parallelize_module"
        found = price_file(plan, text, unstated_options(plan, text)) if named else nearest_plan(plan, layout)
        assert found is not None and zero_stage(found[0]) == stage, target
        if target == "deepspeed":
            assert json.loads(text)["zero_optimization"]["stage"] == stage
        else:
            assert any("data parallelism (DDP) over 2" in r for r in remarks)


def test_every_column_sums_by_itself_in_the_price() -> None:
    """The extra all_reduces are those that test_hf_trains_like_one_process counts."""
    plan = planned("llama-3-8b")["Megatron-LM"]
    text = written(plan, "hf")
    one, each = nearest_plan(plan, tensor_layout(plan)), price_file(plan, text, unstated_options(plan, text))
    assert one is not None and each is not None
    payload = 8 * 4096 * 4096 * 2  # samples of a data rank x tokens x width, bfloat16
    more = 3 * 32 * wire_bytes("all_reduce", payload, 8)  # q, k, v and gate, up: 5 in place of 2 in every layer
    assert each[1].wire_bytes - one[1].wire_bytes == more
    # along the tensor axis: two in every layer and the head's; the rest are gradients of weights
    assert (
        sum(t.count for t in one[0].cost.traffic if (t.phase, t.kind, t.axes) == ("backward", "all_reduce", (1,)))
        == 2 * 32 + 1
    )


def test_the_price_of_a_form_has_times_as_everywhere() -> None:
    """A step of 21 s was "2.094e+04 ms a step"; on the page the amounts are its own."""
    cost = FormCost("ZeRO-2", "8", 20.94, 3 * 10**9, 2**30, 0.5, 10**9, 2**30, fits=False)
    assert cost.sentence() == (
        "it does not fit; 20.94 s a step, the plan 500 ms (+4088.0 %); 3 GB sent per GPU, the plan 1 GB (+200.0 %); "
        "1 GiB at the peak, the plan 1 GiB (the same)"
    )
    assert page_wording(cost.sentence()).startswith("It does not fit; 20.9 s a step, the plan 500 ms")


def test_a_step_with_waits_for_the_host_is_not_compared_with_one_without() -> None:
    """A T5 was 68.4 % faster in torchtitan's form than as planned, since only the plan's step had waits for its host."""
    request = Request("t5-large", cluster="2x8-h100", layers=2, mesh="2x8")
    plan = plan_model(request, passes={}).planner.of_layout(parse_layout("dp=16"))
    assert plan is not None and plan.cost.host_wait_s > 0
    cost = export_text(plan, "torchtitan").nearest
    assert cost is not None and cost.is_host_unknown and cost.plan_host_wait_s == plan.cost.host_wait_s
    change = 100 * (cost.step_time_s / (plan.cost.step_time_s - plan.cost.host_wait_s) - 1)
    assert (
        f" a step without waits for the host, the plan {1e3 * (plan.cost.step_time_s - plan.cost.host_wait_s):.4g} ms ({change:+.1f} %), or "
        in cost.sentence()
    )
    calm = replace(plan, cost=replace(plan.cost, host_wait_s=0.0))
    assert "waits" not in cost.compared_with(calm).sentence()
    on_torch = export_text(plan, "deepspeed").nearest
    assert on_torch is not None and not on_torch.is_host_unknown


@pytest.mark.parametrize("target", ["parallelize_module", "hf", "deepspeed"])
@pytest.mark.slow(but=("hf",))
def test_the_nearest_plan_is_offered_with_its_price(target: str, tmp_path: Path) -> None:
    plan = planned("llama-3-8b")["best"]
    nearest = "ZeRO-2 over all GPUs" if target == "deepspeed" else "Megatron-LM's plan on 8 data×2 tensor"
    with pytest.raises(
        InputError,
        match=rf"{nearest} is the nearest that it holds \(nearest=True\): .* ms a step",
    ):
        export_text(plan, target)
    said = export(plan, target, tmp_path / "near", nearest=True)
    assert said[1].startswith(f'{nearest} in place of "best"')
    assert said[-1].startswith("in this form: ")
    assert (tmp_path / "near").read_text()


def test_where_no_split_can_be_held_the_nearest_needs_no_file() -> None:
    """GPT-2's Conv1D: no form splits it, so what is left is data parallelism, with its price."""
    with pytest.raises(
        InputError, match=r"(DDP|FSDP2) over all GPUs is the nearest, and needs no file: .* ms a step, the plan "
    ) as found:
        export_text(planned("gpt2-xl")["best"], "hf")
    assert "nearest=True" not in str(found.value)


def test_the_command_line_says_the_price_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planner_core.cli.main import main
    from planner_core.core.plan_json import plan_to_json

    (tmp_path / "plan.json").write_text(
        json.dumps(plan_to_json(planned("llama-3-8b")["Megatron-LM + sequence parallel"]))
    )
    assert (
        main(["export", str(tmp_path / "plan.json"), "--to", "deepspeed", "-o", str(tmp_path / "ds.json"), "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["nearest"]["step_time_s"] > found["nearest"]["plan_step_time_s"] > 0
    assert found["nearest"]["fits"] is True, "in the memory for which the plan was made"
