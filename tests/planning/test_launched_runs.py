"""Runs that people launch: they are stated as they ran and the planner's own choice is no slower, or there is a plan that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.support.published.runs import AMPLE_BYTES, Run, read_runs
from planner_core.core import load_cluster
from planner_core.planning import Request, plan_model
from planner_core.planning.pricing import Pricer

TITAN = {
    "r0282": ("fsdp=8", "selective"),
    "r0289": ("fsdp=128", "selective"),
    "r0300": ("fsdp=8,tp=8,sp", "selective"),
    "r0294": ("fsdp=32,tp=8,sp", "full"),
}
"""torchtitan's published runs on 8, 128, 64 and 256 H100: how each was laid out and what it computed again."""
LARGEST = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "architectures": ["LlamaForCausalLM"],
}


@pytest.fixture(scope="module")
def published() -> dict[str, Run]:
    return {run.id: run for run in read_runs() if run.id in TITAN}


@pytest.mark.slow
@pytest.mark.parametrize("name", TITAN)
def test_torchtitans_runs_are_stated_and_the_choice_is_no_slower(
    name: str, published: dict[str, Run], tmp_path: Path
) -> None:
    run = published[name]
    assert (str(run.stated.layout), run.stated.recompute) == TITAN[name]
    (tmp_path / "config.json").write_text(json.dumps(run.config))
    pricer = Pricer(str(tmp_path / "config.json"), load_cluster(run.cluster).with_memory(AMPLE_BYTES))
    plan = pricer.plan(run.stated)
    assert plan is not None and plan.fits
    best = pricer.best(run.stated, plan)
    assert best is not None and best.fits
    assert best.cost.step_time_s <= plan.cost.step_time_s * (1 + 1e-9)


@pytest.mark.slow
def test_llama_405b_fits_on_512_gpus(tmp_path: Path) -> None:
    """Two million tokens a step. Its micro-batch, what is computed again and its states are chosen."""
    (tmp_path / "config.json").write_text(json.dumps(LARGEST))
    found = plan_model(
        Request(str(tmp_path / "config.json"), cluster="64x8-h100", batch=512, seq=4096, accumulate=None)
    )
    assert found.best.fits
    assert found.best.cost.memory_bytes["peak"] <= found.cluster.gpu.memory_bytes


@pytest.mark.slow
def test_mixtral_fits_on_64_gpus() -> None:
    found = plan_model(
        Request("mixtral-8x7b", cluster="8x8-h100", batch=512, seq=4096, accumulate=None, recompute="auto")
    )
    assert found.best.fits
