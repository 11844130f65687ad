"""Models of transformers that a person builds and hands over run under every plan as they run alone: with their caches and their hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from tests.support.ranks import run_ranks
from tests.support.saved_plans import saved_plans

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


def _model(kind: str) -> nn.Module:
    """With a cache, which its config leaves on; and with a loss that balances the experts of all layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, output_router_logits=True, use_cache=True)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("batched_mm")
    return model.train()  # type: ignore[no-any-return]


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _steps(model: Any, **options: bool) -> tuple[list[float], list[torch.Tensor]]:
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(**_batch(), **options)["loss"]
        loss.backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, grads


def _compared(kind: str, files: list[str]) -> list[tuple[list[float], list[float], float]]:
    wanted, grads = _steps(_model(kind))
    found = []
    for file in files:
        losses, own = _steps(shardscope.apply(_model(kind), shardscope.load_plan(file)), global_batch=True)
        error = max(float((a - b).abs().max()) for a, b in zip(own, grads, strict=True))
        found.append((wanted, losses, error))
    return found


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("granitemoe", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_with_a_balancing_loss(kind: str, tmp_path: Path) -> None:
    _, files = saved_plans(_model(kind), _batch(), tmp_path)
    files = [f for f in files if kind != "mixtral" or f.endswith(("best", "Megatron-LM"))]
    assert len(files) > 1
    for wanted, got, error in run_ranks(_compared, 2, (kind, files), timeout_s=300)[0]:
        assert got == pytest.approx(wanted, rel=1e-4) and error < 1e-4


def test_experts_of_another_type_are_told_the_way_out() -> None:
    model: Any = _model("mixtral")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(CaptureError, match=r"set_experts_implementation\('batched_mm'\)"):
        shardscope.plan(model, inputs=_batch(), cluster="1x2-h100")
