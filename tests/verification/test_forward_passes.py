"""How often a model's forward is run to be recorded, from a plan to its run and its verification (docs/DESIGN.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import planner_core as shardscope
from planner_core.core import Workload
from planner_core.models import load_model
from planner_core.models.capture import Recorder
from planner_core.verification.build_models import build_whole_model, make_example_inputs
from planner_core.verification.fake.group import run_fake_step
from tests.support.own_model import make
from tests.support.ranks import run_ranks

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
CLUSTER, RANKS = "1x8-h100:gpus=4", 4


@contextmanager
def counting() -> Iterator[list[str]]:
    """The recorders of all passes that are recorded while entered."""
    plain, passes = Recorder.run, list[str]()

    def run(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        passes.append(type(recorder).__name__)
        return plain(recorder, *args, **kwargs)

    with mock.patch.object(Recorder, "run", run):
        yield passes


def _count_passes(layout: str) -> dict[str, int]:
    """The passes of each stage of the life of a plan, on rank 0 of a fake group."""
    counts = {}
    with counting() as passes:
        graph = load_model(LLAMA, batch=8, seq=16, dtype="float32")
        counts["capture"] = len(passes)
        plan = next(p for p in shardscope.plan(graph, cluster=CLUSTER).plans if p.name == layout)
        counts["plan"] = len(passes) - sum(counts.values())
        model, config = build_whole_model(plan.model.config, "float32", 0)
        inputs = make_example_inputs(model, config, Workload(8, 16, "float32"), 0)
        own = {n: x.chunk(RANKS)[0] if plan.data_axes else x for n, x in inputs.items()}
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        try:
            shardscope.apply(model, plan)
            counts["apply"] = len(passes) - sum(counts.values())
            model(**own)
            counts["first step"] = len(passes) - sum(counts.values())
            model(**own)
            counts["second step"] = len(passes) - sum(counts.values())
            with torch.no_grad():
                model.eval()
                model(**own)
            counts["evaluation"] = len(passes) - sum(counts.values())
        finally:
            dist.destroy_process_group()
        run_fake_step(plan)
        counts["verify --fake"] = len(passes) - sum(counts.values())
    return counts


@pytest.mark.parametrize(
    ("layout", "per_kind"),
    [("data parallel", 2), ("Megatron-LM", 1)],
    ids=["ranks with samples of their own", "ranks with equal samples"],
)
def test_a_llama_is_recorded_once_for_each_kind_of_call(layout: str, per_kind: int) -> None:
    """Two passes a kind if ranks have samples of their own: with those of one rank, and with those of all."""
    (counts,) = run_ranks(_count_passes, 1, (layout,), backend=None)
    assert counts == {
        "capture": 1,
        "plan": 0,
        "apply": 0,
        "first step": per_kind,
        "second step": 0,
        "evaluation": per_kind,
        "verify --fake": per_kind,
    }


def test_a_module_of_a_user_is_run_twice_to_see_that_it_keeps_no_state() -> None:
    module, inputs = make()
    assert isinstance(module, nn.Module)
    with counting() as passes:
        graph = load_model(module, inputs=inputs)
    assert passes == ["Recorder", "Recorder"] and graph.num_params > 0
