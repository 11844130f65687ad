"""What operators keep and take under the software that runs them: the attention kernel, the loss, torch.compile, the optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner_core.core import InputError, Op, Plan, Workload, load_gpu, load_plan, save_plan
from planner_core.cost import graph_as_run, optimizer_bytes
from planner_core.cost.compute.compiled import compiled_block
from planner_core.cost.compute.sdpa import attention_kernel
from planner_core.cost.compute.stated_loss import with_stated_loss
from planner_core.models import load_model
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from tests.support.plans import with_ample_memory

TOKENS = 4096
GIB = 2**30


def priced(model: str, layout: str, cluster: str = "1x8-h100", **stated: object) -> Plan:
    found = Pricer(model, with_ample_memory(cluster)).plan(Statement(parse_layout(layout), **stated))  # type: ignore[arg-type]
    assert found is not None
    return found


def attention_of(model: str) -> tuple[Op, object]:
    graph = load_model(model, batch=1, seq=512, dtype="bfloat16")
    block = next(iter(graph.blocks.values()))
    return next(op for op in block.ops if "attention" in op.fn), block.values


@pytest.mark.parametrize(
    ("model", "gpu", "kernel"),
    [
        ("llama-3-8b", "h100-sxm", "cudnn"),
        ("llama-3-8b", "a100-80gb-sxm", "flash2"),
        ("llama-3-8b", "v100-32gb-sxm", "efficient"),
        ("t5-large", "h100-sxm", "math"),
        ("t5-large", "a100-80gb-sxm", "math"),
        ("bert-large", "a100-80gb-sxm", "flash2"),
    ],
)
def test_the_kernel_of_attention_is_the_one_that_torch_takes(model: str, gpu: str, kernel: str) -> None:
    op, values = attention_of(model)
    assert attention_kernel(op, values, "sdpa", load_gpu(gpu)) == kernel  # type: ignore[arg-type]
    assert attention_kernel(op, values, "flash3", load_gpu(gpu)) == "flash3"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stated", "kernel"),
    [
        ("sdpa", "cudnn"),
        ("sdpa:2.6", "flash2"),
        ("sdpa:2.9", "flash2"),
        ("sdpa:2.10", "cudnn"),
        ("sdpa:2.11.0+cu128", "flash2"),
        ("sdpa:2.11.0+cu130", "cudnn"),
    ],
)
def test_the_release_of_torch_says_whether_cudnn_comes_first(stated: str, kernel: str) -> None:
    op, values = attention_of("llama-3-8b")
    assert attention_kernel(op, values, stated, load_gpu("h100-sxm")) == kernel  # type: ignore[arg-type]
    assert attention_kernel(op, values, stated, load_gpu("a100-80gb-sxm")) == "flash2"  # type: ignore[arg-type]


def test_a_run_states_its_torch_and_a_plan_keeps_it(tmp_path: Path) -> None:
    plan = priced("llama-3-8b", "dp=8", attention="sdpa:2.9", layers=2, micro_batch=1)
    assert plan.cost.compute_time_s > priced("llama-3-8b", "dp=8", layers=2, micro_batch=1).cost.compute_time_s
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").workload.attention == "sdpa:2.9"
    with pytest.raises(InputError, match=r'sdpa:latest.*give e\.g\. attention="sdpa:2\.9"'):
        priced("llama-3-8b", "dp=8", attention="sdpa:latest")


def test_a_bias_with_a_gradient_keeps_scores_in_float32() -> None:
    """T5-large, 8 x 512 tokens on one H100: 26.08 GiB were measured."""
    peak = priced("t5-large", "dp=1", "1x8-h100:gpus=1", micro_batch=8, seq=512).cost.memory_bytes["peak"]
    assert peak == pytest.approx(28_007_417_856, rel=0.03)


def test_a_graph_is_made_as_it_runs_once() -> None:
    """And a second time changes nothing; its sizes are those of the model's graph."""
    graph, gpu = load_model("gpt2-xl", batch=2, seq=64, layers=1), load_gpu("h100-sxm")
    load = Workload(2, 64, compiled=True)
    as_run = graph_as_run(graph, gpu, load)
    assert as_run.as_run and not graph.as_run and as_run.all_blocks != graph.all_blocks
    assert as_run.workload == graph.workload == {"batch": 2, "seq": 64}
    assert graph_as_run(as_run, gpu, load) is as_run


def test_a_compiled_llama_layer_keeps_what_products_read_and_no_float32() -> None:
    """x, both normed inputs, q, k, v, attention, the second residual: 7 x 4096 and 2 x 1024; gate, up and their product: 3 x 14336."""
    graph = load_model("llama-3-8b", batch=1, seq=TOKENS, dtype="bfloat16")
    block = compiled_block(next(iter(graph.blocks.values())))
    kept = {block.values[v].storage for op in block.ops for v in op.saved if block.values[v].kind == "activation"}
    metas = [block.values[v].meta for v in kept]
    assert {m.dtype for m in metas} == {"bfloat16"}
    assert sum(m.num_bytes for m in metas) == 2 * TOKENS * (6 * 4096 + 2 * 1024 + 3 * 14336)


def test_a_compiled_run_needs_the_memory_that_was_measured() -> None:
    """Llama-3-8B, FSDP over 16, 4096 tokens on H100: 27.20 GiB compiled and 37.60 eager were measured."""
    found = {c: priced("llama-3-8b", "fsdp=16", "2x8-h100", seq=TOKENS, compiled=c).cost for c in (True, False)}
    assert found[True].memory_bytes["peak"] == pytest.approx(27.20 * GIB, rel=0.03)
    assert found[False].memory_bytes["peak"] == pytest.approx(37.60 * GIB, rel=0.03)
    assert found[True].compute_time_s < found[False].compute_time_s


def test_a_loss_in_other_words_takes_the_memory_that_it_says() -> None:
    """16 384 tokens x 128 256 words on each GPU: 3.9 GiB in bfloat16, 7.8 in float32. Eager the loss has three copies in float32."""
    whole = 2 * 8192 * 128256
    peaks = {
        loss: priced("llama-3-8b", "fsdp=8", micro_batch=2, seq=8192, recompute="full", loss=loss).cost.memory_bytes[
            "peak"
        ]
        for loss in ("eager", "whole", "fused", "chunked:8")
    }
    assert peaks["eager"] - peaks["whole"] > 4 * whole
    assert peaks["eager"] > peaks["whole"] > peaks["fused"] >= peaks["chunked:8"]


def test_a_compiled_run_that_states_its_loss_does_not_compile_it() -> None:
    """torchtitan of December 2024 compiled its blocks alone. Llama-3.1-8B, FSDP over 8, 2 x 8 192 tokens: its allocator had reserved 82.7 GB
    compiled, and 88.5 eager. With a compiled loss 51 GB of tensors would be said."""
    run = {"micro_batch": 2, "seq": 8192, "recompute": "selective", "stack": "torchtitan"}
    runs = [(True, None), (True, "eager"), (False, None)]
    peaks = [
        priced("llama-3-8b", "fsdp=8", compiled=c, loss=loss, **run).cost.memory_bytes["peak"] / 1e9 for c, loss in runs
    ]
    assert peaks == pytest.approx([51.3, 68.1, 68.4], rel=0.01)


def test_a_loss_that_is_not_there_is_refused() -> None:
    graph = load_model("vit-large", batch=2, seq=None, dtype="bfloat16")
    none = tuple(i for i in graph.top.items if not isinstance(i, Op) or i.fn != "cross_entropy")
    with pytest.raises(InputError, match="no cross-entropy of logits; leave loss out"):
        with_stated_loss(replace(graph, top=replace(graph.top, items=none)), "fused", compiled=False)
    with pytest.raises(InputError, match="is not one of eager, fused, whole, gathered and chunked:N"):
        Statement(parse_layout("dp=8"), loss="parts").check()


def test_gradients_in_bfloat16_take_half() -> None:
    stated = {"micro_batch": 1, "seq": 1024, "accumulate": 2}
    usual, half = (
        priced("gpt2-xl", "dp=8,zero=1", gradients=g, **stated).cost.memory_bytes["grads"] for g in (None, "bfloat16")
    )
    assert half == pytest.approx(usual / 2, rel=0.01)


def test_a_fused_optimizer_moves_each_state_once() -> None:
    """AdamW in float32: 28 bytes a parameter, and 80 by one operator after the other."""
    load = Statement(parse_layout("dp=8")).workload(1, "bfloat16")
    clip_and_copy = 3 * 4 + 6
    assert sum(optimizer_bytes(2, load, "fused").values()) == 28 + clip_and_copy
    assert sum(optimizer_bytes(2, load, "foreach").values()) == 80 + clip_and_copy
    kernels = {
        k: priced("gpt2-xl", "dp=8", seq=1024, optimizer_kernels=k).cost.optimizer_time_s
        for k in ("fused", "foreach", "for-loop")
    }
    assert kernels["fused"] < kernels["foreach"] < kernels["for-loop"] < 1.5 * kernels["foreach"]


def test_the_optimizer_takes_what_was_measured() -> None:
    """AdamW of Llama-3-8B on data 4 x tensor 4: 23.6 ms on an H100, without the clip and the copy to bfloat16."""
    cost = priced("llama-3-8b", "dp=4,tp=4,sp", "2x8-h100", micro_batch=4, seq=TOKENS).cost
    assert cost.optimizer_time_s * 28 / 46 == pytest.approx(23.6e-3, rel=0.05)
    assert cost.outside_time_s == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_megatrons_buffer_of_gradients_is_there_however_many_micro_batches(accumulate: int) -> None:
    """Its distributed optimizer divides moments and float32 weights over d data ranks, and no gradients: 6 + 12 / d bytes a parameter of
    a tensor rank, where both are in float32 (NVIDIA's page of the distributed optimizer)."""
    stated = {"accumulate": accumulate, "recompute": "full"}
    ours, theirs = (
        priced("llama-3-8b", "dp=4,tp=2,sp,zero=1", stack=stack, **stated).cost.memory_bytes
        for stack in (None, "megatron")
    )
    states = theirs["params"] + theirs["grads"] + theirs["optimizer"]
    assert states == pytest.approx(8.03e9 / 2 * (6 + 12 / 4), rel=0.01)
    assert (ours["grads"] == theirs["grads"]) == (accumulate > 1)
