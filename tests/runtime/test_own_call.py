"""A training loop gives a model its own samples and gets all that the model returns: nothing is sent for what the loop does not read."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import planner_core as shardscope
from planner_core.core import Plan, Shard
from planner_core.planning import Request
from planner_core.runtime import Parallel
from planner_core.runtime.training.data import batch_position
from planner_core.verification import scaled, verify
from planner_core.verification.build_models import build_whole_model, make_example_inputs
from tests.runtime.test_own_loop import mixed_alone
from tests.support import own_model
from tests.support.own_model import OwnGPT
from tests.support.plans import own_planned, searched
from tests.support.ranks import run_ranks

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "vocab_size": 12800,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
BATCH, SEQ, RANKS = 16, 64, 16
KINDS_BY_WORD = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


@functools.cache
def _best() -> Plan:
    """The best plan in which the ranks split the table of tokens: each needs the tokens of all. (A step as small as this waits for the
    host, so data parallel, which launches least, is faster.)"""
    found = shardscope.plan(
        LLAMA, cluster="2x8-h100", batch=BATCH, seq=SEQ, mesh="16", accumulate=1, dtype="float32"
    ).plans
    tables = ((p, p.param_plans()["model.embed_tokens.weight"]) for p in found if p.data_axes)
    return next(p for p, table in tables if isinstance(table.working[0], Shard) and not table.gathered)


class _Sent(TorchDispatchMode):
    """Bytes of the whole tensor of every collective, by kind, as the dispatcher sees them: below all that a run may call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        kind = next((k for word, k in KINDS_BY_WORD.items() if word in name), "") if space == "c10d" else ""
        if kind:
            self.rows[kind] += _bytes(args[1] if kind in ("reduce_scatter", "all_to_all") else args[0])
        return func(*args, **(kwargs or {}))


def _bytes(x: Any) -> int:
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else int(x.nbytes)


def _step(plan: Plan) -> dict[str, int]:
    """What the second step of rank 0 sends: the first one is recorded, too.

    A step ends with the optimizer's: weights that are gathered once a step (ZeRO-1 and 2) are gathered again only if that changed them.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        model, parsed = build_whole_model(plan.model.config, "float32", 0)
        inputs = make_example_inputs(model, parsed, plan.workload, 0)
        model = shardscope.apply(model, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = BATCH // batch_position(plan, 0)[1]
        for _ in range(2):
            with _Sent() as sent:
                out = model(**{name: x[:own] for name, x in inputs.items()})
                out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(sent.rows)
    finally:
        dist.destroy_process_group()


def test_a_loop_sends_what_the_plan_says_beside_its_tokens() -> None:
    plan = _best()
    assert plan.data_axes, "the test wants a plan whose ranks have samples of their own"
    (sent,) = run_ranks(_step, 1, (plan,), timeout_s=300.0, backend=None)
    said: Counter[str] = Counter()
    for part in ("forward", "backward"):
        said.update({kind: row["bytes"] for kind, row in plan.cost.collectives()[part].items()})
    tokens = BATCH * SEQ * 8  # of ids, and of labels, in 64 bits
    assert sent.pop("all_gather") - said.pop("all_gather") in (tokens, 2 * tokens)
    assert sent == said


def test_verification_makes_the_call_of_a_loop() -> None:
    """Its report has the tokens apart, and what a loop would hold that keeps the logits until backward is over."""
    found = verify(_best())
    assert found["ok"], found
    assert found["inputs"]["count"] and found["inputs"]["bytes"] <= 2 * BATCH * SEQ * 8
    assert found["memory_bytes"]["results_kept"] >= found["memory_bytes"]["measured"]


def test_a_run_on_one_gpu_gathers_and_keeps_nothing() -> None:
    """Weights in float32 are cast for each use in bfloat16, as the plan counts: no working copy lasts, and nothing is sent."""
    plan = searched(Request("gpt2-xl", cluster="1x8-h100:gpus=1", layers=2, batch=2, seq=128))
    found = verify(plan)
    assert found["ok"] and found["memory_bytes"]["rel_error"] < 0.001, found["memory_bytes"]
    assert not any(found["collectives"]["measured"].values())


def _alone(plan: Plan) -> list[float]:
    model: Any = shardscope.apply(OwnGPT(), plan)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(6):
        loss = model(*own_model.batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_weights_that_are_cast_for_each_use_learn_as_masters_do() -> None:
    plan = own_planned(1, dtype="bfloat16", optimizer="adamw-fp32").best
    (found,) = run_ranks(_alone, 1, (plan,))
    assert found == pytest.approx(mixed_alone(), rel=0.02)


def _logits(plan: Plan) -> float:
    """How far the logits of this rank are from those of one process."""
    single, parsed = build_whole_model(plan.model.config, "float32", 0)
    model, _ = build_whole_model(plan.model.config, "float32", 0)
    inputs = make_example_inputs(model, parsed, plan.workload, 0)
    wanted = single(**inputs).logits.detach()
    mesh = init_device_mesh("cpu", plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    model.__dict__["forward"] = Parallel(model, plan, mesh).forward
    place, places = batch_position(plan, dist.get_rank())
    logits = model(**{name: x.chunk(places)[place] for name, x in inputs.items()}).logits
    if isinstance(logits, DTensor):
        return float((logits.full_tensor() - wanted).abs().max())
    return float((logits - wanted.chunk(places)[place]).abs().max())


def test_logits_that_are_read_are_those_of_the_ranks_own_samples() -> None:
    small = scaled(_best(), 2)
    assert small.data_axes
    assert max(run_ranks(_logits, 2, (small,))) < 1e-4
