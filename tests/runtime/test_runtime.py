"""Any combination of rows, on real ranks, computes what one process computes: the rows and the runtime judge each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from planner_core.core import OPTIMIZERS, Workload
from planner_core.models.loading import capture_graph
from planner_core.ops.registry import rule_of
from planner_core.planning.request import Request
from planner_core.runtime.training.optimizers import make_optimizer
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.numerics import verify_all
from tests.support.plans import searched
from tests.support.runtime_plans import make_plan, random_choice
from tests.support.tiny_models import NAMES, tiny_config

QUICK = {("llama", (2, 2)), ("gpt2", (2,))}
CASES = [
    pytest.param(n, s, id=f"{n}-{'x'.join(map(str, s))}", marks=() if (n, s) in QUICK else pytest.mark.slow)
    for n in NAMES
    for s in ((2,), (2, 2))
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
@pytest.mark.slow(only=("gpt2-2", "llama-2x2"))
def test_random_plans_compute_the_same(name: str, sizes: tuple[int, ...]) -> None:
    graph = capture_graph(tiny_config(name), batch=4, seq=16, dtype="float32")
    plans = [make_plan(graph, sizes, random_choice(i), shard_storage=i % 2 == 1, seed=i) for i in range(3)]
    for i, found in enumerate(verify_all(plans)):
        assert found["numbers_ok"], (i, found["loss"], found["grad"], found["param"])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_rare_ops_compute_the_same(sizes: tuple[int, ...]) -> None:
    """Weight norm, Fourier transform, windows, strided views, `...` in einsum, and attention of torch's own layer, opened."""
    graph = capture_graph(f"{Path(__file__).parents[1] / 'support' / 'rare_ops.py'}:make", batch=4, seq=16)
    ops = [op for b in (graph.top, *graph.blocks.values()) for op in b.ops]
    assert {"_weight_norm", "fft_fftn", "unfold", "as_strided", "einsum", "nll_loss", "softmax"} <= {
        op.fn for op in ops
    }
    assert all(rule_of(op, b.values).is_known for b in (graph.top, *graph.blocks.values()) for op in b.ops)
    plans = [make_plan(graph, sizes, random_choice(i), seed=i) for i in range(4)]
    for i, found in enumerate(verify_all(plans)):
        assert found["numbers_ok"], (i, found["loss"], found["grad"], found["param"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_keeps_the_states_that_are_counted(name: str) -> None:
    load = Workload(1, 1, optimizer=name)
    param = nn.Parameter(torch.zeros(1000, dtype=torch.float32 if load.kept_item(2) == 4 else torch.bfloat16))
    optimizer = make_optimizer(name, [param], 1e-3)
    param.grad = torch.ones_like(param)
    optimizer.step()
    held = sum(t.nbytes for t in optimizer.state[param].values() if isinstance(t, torch.Tensor) and t.dim())
    assert held == 1000 * load.moment_bytes(2)
    assert param.max() < 0


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("owlvit", ("text_config", "vision_config")),  # casts its images to the dtype of a weight
        ("vit_mae", ()),  # gives weights of a convolution
    ],
)
@pytest.mark.slow(but=("vit_mae-parts1",))
def test_code_that_asks_for_a_dtype_sees_the_one_that_computes(
    kind: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    """Master weights in float32 are seen in bfloat16 by the model's code, also where it asks for a dtype."""
    layers = {"num_hidden_layers": 2}
    parted = dict.fromkeys(parts, layers) if parts else {**layers, "decoder_num_hidden_layers": 2}
    config = {"model_type": kind, **parted}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = verify_fake(searched(Request(str(tmp_path / "config.json"), cluster="2x8-h100", batch=16)))
    assert found["ok"], found["memory_bytes"]
