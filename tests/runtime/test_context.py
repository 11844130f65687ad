"""Plans whose only data is one long sequence: split through causal attention, they run as predicted and use every GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from planner_core.core import P, R, Shard, Workload, load_cluster
from planner_core.core.mesh import DeviceMesh
from planner_core.cost.compute import has_kernels, kernel_seconds
from planner_core.cost.model import cost_model
from planner_core.exporters import export
from planner_core.models.loading import capture_graph
from planner_core.ops import Row, rows
from planner_core.ops.catalog.attention import CONTEXT
from planner_core.planning.pipeline import Result
from planner_core.planning.request import Request
from planner_core.runtime.program.collectives import Axis
from planner_core.runtime.program.operators.dropout import attention, shard_seed
from planner_core.runtime.program.setup import make_axes
from planner_core.verification.api import scaled
from planner_core.verification.fake.group import verify_fake_all
from planner_core.verification.numerics import verify_all
from tests.support.plans import planned
from tests.support.ranks import run_ranks
from tests.support.runtime_plans import make_plan
from tests.support.tiny_models import tiny_config
from tests.support.torchrun import script_losses

SDPA = "self_attn/scaled_dot_product_attention"
TOKENS = 131072


@cache
def long(mesh: str, recompute: str = "none", model: str = "llama-3-8b", attention: str | None = None) -> Result:
    """The plan of one sequence of 131 072 tokens on 16 GPUs."""
    asked = Request(
        model,
        cluster="2x8-h100",
        batch=1,
        seq=TOKENS,
        mesh=mesh,
        recompute=recompute,
        precision="pure",
        attention=attention,
    )
    return planned(asked)


def attention_of(found: Result) -> list[Any]:
    """Placements of query, key, value and result in the blocks of the first plan."""
    block = next(b for label, b in found.plans[0].blocks.items() if label)
    site = block.sites[SDPA]
    return [*(e.dst.forward for e in site.inputs), site.outputs[0].src.forward]


def floor_s(found: Result) -> float:
    """Seconds of a step if the kernels of every product and attention, at the rates of one GPU, were dealt out over 16 evenly."""
    model = cost_model(
        load_cluster("2x8-h100"), DeviceMesh(("world",), (16,)), Workload(1, TOKENS, attention=found.request.attention)
    )
    total = 0.0
    for block in (found.graph.top, *found.graph.blocks.values()):
        for op in filter(has_kernels, block.ops):
            whole = kernel_seconds(op, block.values, rows(op, block.values)[:1], model)
            total += sum(whole) * found.graph.num_repeats.get(block.name, 1)
    return total / 16 * model.slowdown


# --- the choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "most"), [("flash2", 1.25), (None, 1.30)])
def test_the_sequence_is_split_beside_the_heads(attention: str | None, most: float) -> None:
    """Eight key-value heads inside the nodes, and a ring over the two nodes: within a quarter of the floor by FlashAttention-2. By
    PyTorch's own choice, cuDNN, the floor is 0.7 of that, and what is sent takes as long as before: within 30 %."""
    found = long("2x8", attention=attention)
    assert attention_of(found) == [(Shard(2), Shard(1))] * 4
    plan = found.plans[0]
    assert plan.fits and plan.bound is not None and plan.cost.gpu_time_s <= 1.005 * plan.bound
    assert floor_s(found) <= plan.cost.compute_time_s <= plan.cost.step_time_s <= most * floor_s(found)
    assert plan.cost.compute_time_s <= 1.17 * floor_s(found)
    assert plan.cost.exposed_comm_time_s == pytest.approx(long("2x8").plans[0].cost.exposed_comm_time_s, rel=1e-6)


def test_more_gpus_than_heads_split_the_sequence_alone() -> None:
    """16 GPUs on one axis cannot split 8 key-value heads. Keys and values are gathered, and their gradients are scattered back."""
    found = long("16")
    assert attention_of(found) == [(Shard(2),), (R,), (R,), (Shard(2),)]
    block = next(b for label, b in found.plans[0].blocks.items() if label)
    assert all(e.dst.gradient == (P,) for e in block.sites[SDPA].inputs[1:])
    assert found.plans[0].cost.compute_time_s <= 1.25 * floor_s(found)


# --- the run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [("16", 2), pytest.param("16", 4, marks=pytest.mark.slow), pytest.param("2x8", 4, marks=pytest.mark.slow)],
)
def test_it_runs_as_predicted(mesh: str, ranks: int) -> None:
    """On real processes: loss, every gradient, a step of AdamW; kinds, numbers and bytes of all collectives by phase and axis."""
    plan = scaled(long(mesh).plans[0], ranks)
    assert plan.workload.batch == 1 and plan.cost.collectives()["forward"]["all_to_all"]["count"] >= 4
    (found,) = verify_all([plan])
    assert found["ok"], (found["loss"], found["grad"], found["param"], found["collectives"])


@pytest.mark.slow
def test_other_models_run_on_one_axis_and_on_two() -> None:
    """One projection of q, k and v (GPT-2), groups of heads (Llama) and experts (Mixtral); the rest of each model is Replicate."""
    plans = []
    for name in ("llama-gqa", "gpt2", "mixtral"):
        graph = capture_graph(tiny_config(name), batch=2, seq=16, dtype="float32")
        for axes in ((0,), (1,), (0, 1)):
            plans.append(
                make_plan(graph, (2, 2), lambda op, found, at, axes=axes: _context(found) if at in axes else found[0])
            )
    for plan, found in zip(plans, verify_all(plans), strict=True):
        assert found["numbers_ok"], (plan.model.name, found["loss"], found["grad"])
        assert "all_to_all" in found["collectives"]["measured"]["backward"]


def _context(found: tuple[Row, ...]) -> Row:
    """The row of this label, where an operator has one."""
    return next((r for r in found if r.name == CONTEXT), found[0])


MEMORY = [("16", "none"), ("16", "keep-attention"), ("2x8", "none"), ("16", "full"), ("16", "selective")]


@pytest.mark.parametrize("ways", [MEMORY[:1], pytest.param(MEMORY[1:], marks=pytest.mark.slow)], ids=["one", "others"])
@pytest.mark.slow(but=("others",))
def test_traffic_and_memory_at_full_size(ways: list[tuple[str, str]]) -> None:
    """What the kernel keeps is its own copy of queries and results, beside what its readers keep; a plan that keeps attention
    keeps both."""
    results = [long(*row) for row in ways]
    reports = verify_fake_all([r.plans[0] for r in results], graphs=[r.graph for r in results])
    for row, report in zip(ways, reports, strict=True):
        assert report["ok"], (row, report["order"])
        assert report["memory_bytes"]["rel_error"] < 0.001, (row, report["memory_bytes"])


@pytest.mark.slow
def test_its_script_trains_alike_on_two_and_four_ranks(tmp_path: Path) -> None:
    """Also compiled: each block is one graph, with its exchanges in it."""
    found = []
    for ranks, options in ((2, ()), (4, ()), (2, ("--compile",))):
        export(scaled(long("16").plans[0], ranks), "torchrun", tmp_path / f"{ranks}.py")
        found.append(script_losses(tmp_path / f"{ranks}.py", 3, *options, ranks=ranks))
    assert found[0][2] != found[0][0]
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)


# --- dropout -----------------------------------------------------------------------------------------------

DROPPED, SEED, BLOCKS = 0.3, 7, 4


def _inputs() -> list[torch.Tensor]:
    """Query, key, value and the gradient of the result."""
    torch.manual_seed(0)
    return [torch.randn(2, 3, 16, 8, dtype=torch.float64, requires_grad=i < 3) for i in range(4)]


def _dropped() -> list[Any]:
    """On a rank: its part of the result, and the gradients of its queries, of all keys and of all values."""
    (axis,) = make_axes(init_device_mesh("cpu", (2,)))
    query, key, value, gradient = _inputs()
    mine = query.detach().chunk(2, -2)[axis.rank].requires_grad_()
    out = attention(mine, key, value, dropout_p=DROPPED, seed=SEED, split=[axis], queries=[axis])
    out.backward(gradient.chunk(2, -2)[axis.rank])
    for whole in (key, value):
        dist.all_reduce(whole.grad)
    return [t.tolist() for t in (out, mine.grad, key.grad, value.grad)]  # type: ignore[union-attr]


def _one_process() -> list[torch.Tensor]:
    """The same of one process that draws the masks of both ranks: rank i computes the blocks i and 3 - i of its pair, in this order."""
    query, key, value, gradient = _inputs()
    rows = query.shape[-2] // BLOCKS
    made = {}
    for rank in range(2):
        torch.manual_seed(shard_seed(SEED, [Axis("queries", None, 2, rank)]))
        for block in (2 * rank, BLOCKS - 1 - 2 * rank):
            seen = rows * (block + 1)
            mask = torch.ones(rows, seen, dtype=torch.bool).tril(seen - rows)
            own = query[..., seen - rows : seen, :]
            made[block] = F.scaled_dot_product_attention(own, key[..., :seen, :], value[..., :seen, :], mask, DROPPED)
    out = torch.cat([made[b] for b in range(BLOCKS)], -2)
    out.backward(gradient)
    return [t.detach() for t in (out, query.grad, key.grad, value.grad)]  # type: ignore[union-attr]


def test_dropout_of_split_attention_is_that_of_one_process_with_the_same_masks() -> None:
    """Result and gradients. The masks of the two ranks differ, and so do those of a rank's two blocks."""
    ranks, wanted = run_ranks(_dropped, 2, ()), _one_process()
    for at, whole in enumerate(wanted):
        parts = [torch.tensor(r[at], dtype=torch.float64) for r in ranks]
        found = torch.cat(parts, -2) if at < 2 else parts[0]
        assert torch.allclose(found, whole, rtol=1e-12, atol=1e-12), at
    ones = [torch.ones(1, 1, 64, 8), torch.zeros(1, 1, 64, 8), torch.eye(64)[None, None]]
    masks = [attention(*ones, dropout_p=DROPPED, seed=SEED, split=[Axis("queries", None, 2, r)]) for r in range(2)]
    assert not torch.equal(*masks) and all(abs(float((m == 0).float().mean()) - DROPPED) < 0.03 for m in masks)
