"""Checkpoints of a plan that pads the vocabulary have the model's own rows, and what has those alone is loaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import planner_core as shardscope
from planner_core.core import InputError, Shard
from planner_core.core.plan_json import plan_from_json, plan_to_json
from planner_core.runtime import training
from planner_core.verification.build_models import build_whole_model
from tests.support.ranks import run_ranks

OWN, PADDED = 101, 104
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": OWN,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


@functools.cache
def padded_plan(layout: str, tied: bool = False) -> shardscope.Plan:
    priced = shardscope.price(
        {**LLAMA, "tie_word_embeddings": tied},
        cluster="1x8-h100:gpus=2",
        layout=layout,
        micro_batch=4 if layout.startswith("tp") else 2,
        seq=16,
        dtype="float32",
        accumulate=2 if layout == "pp=2" else 1,
        advise=False,
        vocab_multiple=8,
    )
    assert priced.plan is not None
    return priced.plan


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, OWN, (4, 16), generator=torch.Generator().manual_seed(step))


def start(plan: shardscope.Plan, source: str = "") -> tuple[Any, Any]:
    """The model that starts from the same numbers as everywhere, or from the weights of a folder."""
    begun = training.model_of(plan, weights=Path(source) if source else None)
    model = shardscope.apply(begun.model, plan, init=begun.init)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def train(model: Any, optimizer: Any, steps: range, **options: Any) -> list[float]:
    losses = []
    for step in steps:
        x = tokens(step)
        loss = model(input_ids=x, labels=x, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(x: Any) -> Any:
    """All numbers of a tensor, as a rank can return them."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).tolist()


def save_after_two_steps(plan: shardscope.Plan, folder: str, wait: bool) -> dict[str, Any]:
    model, optimizer = start(plan)
    train(model, optimizer, range(2), global_batch=True)
    future = shardscope.save(model, optimizer, folder, wait=wait)
    assert (future is None) == wait
    if future is not None:
        future.result()
    return {name: whole(x) for name, x in model.state_dict().items()}


def resume(plan: shardscope.Plan, folder: str) -> tuple[dict[str, Any], list[float]]:
    """What a model, its optimizer and its next losses are after it has loaded a checkpoint; it has trained on other samples before."""
    model, optimizer = start(plan)
    train(model, optimizer, range(7, 8), global_batch=True)
    shardscope.load(model, optimizer, folder)
    found = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": whole(v) for key, v in optimizer.state[p].items()}
    return found, train(model, optimizer, range(2, 4), global_batch=True)


def plan_of(config: dict[str, Any]) -> shardscope.Plan:
    return shardscope.plan(config, cluster="1x8-h100:gpus=1", batch=4, seq=16, dtype="float32", accumulate=1).best


@pytest.mark.parametrize(
    ("layout", "tied"),
    [("fsdp=2", True), *(pytest.param(layout, False, marks=pytest.mark.slow) for layout in ("tp=2,sp", "dp=2"))],
)
def test_a_checkpoint_of_a_padded_vocabulary_is_the_model_s_own(layout: str, tied: bool, tmp_path: Path) -> None:
    plan = plan_from_json(plan_to_json(padded_plan(layout, tied)))
    own = {EMBEDDING: (OWN, 32)} if tied else {EMBEDDING: (OWN, 32), HEAD: (OWN, 32)}
    assert plan.model.own_shapes == own
    assert any(isinstance(p, Shard) for p in plan.param_plans()[EMBEDDING].stored) == (layout != "dp=2")
    folder = str(tmp_path / "checkpoint")
    state = run_ranks(save_after_two_steps, 2, (plan, folder, not tied))[0]
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    saved = torch.load(tmp_path / "one.pt", weights_only=False)
    model, _ = build_whole_model({**LLAMA, "tie_word_embeddings": tied}, "float32", 0)
    model.load_state_dict(saved["model"])  # strict: names and shapes are those of the plain model
    assert state.keys() == saved["model"].keys()
    for name, value in state.items():
        torch.testing.assert_close(torch.tensor(value), saved["model"][name], rtol=0, atol=0)
    for name in own:
        assert saved["optimizer"]["state"][name]["exp_avg"].shape == (OWN, 32)
        assert saved["optimizer"]["state"][name]["exp_avg"].abs().sum() > 0

    # the same steps of the padded model on one process
    alone = run_ranks(save_after_two_steps, 1, (alone_plan(tied), str(tmp_path / "alone"), True))[0]
    for name, value in alone.items():
        rows = torch.tensor(value[: len(saved["model"][name])])
        torch.testing.assert_close(rows, saved["model"][name], rtol=1e-4, atol=1e-5)

    # under another layout every own row is back, and those of no word are zeros
    other = padded_plan("fsdp=2" if layout != "fsdp=2" else "tp=2,sp", tied)
    loaded, losses = run_ranks(resume, 2, (other, folder))[0]
    for name in own:
        for key, kept in (("", saved["model"][name]), (" exp_avg", saved["optimizer"]["state"][name]["exp_avg"])):
            found = torch.tensor(loaded[name + key])
            assert found.shape == (PADDED, 32)
            torch.testing.assert_close(found[:OWN], kept, rtol=0, atol=0)
            assert not found[OWN:].any()
    assert losses == pytest.approx(run_ranks(resume, 2, (plan, folder))[0][1], rel=1e-4)


def alone_plan(tied: bool) -> shardscope.Plan:
    """A plan of the model that has the padded vocabulary for its own, on one rank."""
    return plan_of({**LLAMA, "vocab_size": PADDED, "tie_word_embeddings": tied})


def save_of_stages(plan: shardscope.Plan, folder: str) -> None:
    model, optimizer = start(plan)
    x = tokens(0)
    model.step(input_ids=x, labels=x, global_batch=True)
    optimizer.step()
    shardscope.save(model, optimizer, folder)
    shardscope.load(model, optimizer, folder)
    assert all(len(v) == OWN for n, v in model.state_dict().items() if n in plan.model.own_shapes)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stages_save_the_model_s_own_rows(tied: bool, tmp_path: Path) -> None:
    """Each stage has another padded weight; of a tied one both have a copy."""
    run_ranks(save_of_stages, 2, (padded_plan("pp=2", tied), str(tmp_path / "checkpoint")))
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "one.pt")
    saved = torch.load(tmp_path / "one.pt", weights_only=False)
    model, _ = build_whole_model({**LLAMA, "tie_word_embeddings": tied}, "float32", 0)
    model.load_state_dict(saved["model"])
    assert saved["optimizer"]["state"][EMBEDDING]["exp_avg"].shape == (OWN, 32)


def load_published(plan: shardscope.Plan, folder: str) -> list[Any]:
    """The head from files of whole weights, and from a state of whole tensors."""
    model, _ = start(plan, folder)
    heads = [whole(model.lm_head.weight)]
    state = {name: torch.full(x.shape, 2.0) for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    return [*heads, whole(model.lm_head.weight)]


def test_a_published_checkpoint_loads_into_a_padded_run(tmp_path: Path) -> None:
    plan = padded_plan("tp=2,sp")
    model, _ = build_whole_model(LLAMA, "float32", 3)
    save_file({n: x.contiguous() for n, x in model.state_dict().items()}, tmp_path / "model.safetensors")
    from_files, from_state = map(torch.tensor, run_ranks(load_published, 2, (plan, str(tmp_path)))[0])
    torch.testing.assert_close(from_files[:OWN], model.lm_head.weight.detach(), rtol=0, atol=0)
    assert (from_state[:OWN] == 2).all()
    for head in (from_files, from_state):
        assert head.shape == (PADDED, 32) and not head[OWN:].any()


def refused_state(plan: shardscope.Plan, folder: str) -> str:
    model, optimizer = start(plan)
    train(model, optimizer, range(1), global_batch=True)
    optimizer.state[model.lm_head.weight]["row"] = torch.ones(PADDED)
    with pytest.raises(InputError) as refused:
        shardscope.save(model, optimizer, folder)
    shardscope.save(model, None, folder)
    return str(refused.value)


def test_a_state_whose_rows_are_not_the_weight_s_is_refused(tmp_path: Path) -> None:
    said = run_ranks(refused_state, 2, (padded_plan("tp=2,sp"), str(tmp_path)))[0]
    assert (
        said.startswith("the optimizer's row of lm_head.weight has shape (104,)")
        and "save and load the module alone" in said
    )
