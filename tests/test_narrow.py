"""Models too wide for exact elimination: planned in a smaller space, and said to be so."""

from __future__ import annotations

import pytest

from planner_core.capture import capture_graph
from planner_core.eliminate import MAX_KEPT, TooWide, order
from planner_core.hardware import cost_model
from planner_core.narrow import NOTE, narrow
from planner_core.pipeline import choose
from planner_core.planner import Request, meshes, prepare
from planner_core.problem import build_networks, build_problem

ALBERT = {"model_type": "albert", "architectures": ["AlbertForMaskedLM"], "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
          "num_attention_heads": 16, "embedding_size": 128, "vocab_size": 1024}  # fmt: skip


def test_weights_shared_by_every_layer_are_planned() -> None:
    request = Request(model="albert", mesh="2x8")
    planner = prepare(request, capture_graph(ALBERT, batch=16, seq=128))
    plan = choose(planner, meshes(request, planner.cluster))
    assert plan.fits and not plan.optimal and plan.notes == (NOTE,)


def test_a_narrow_plan_is_one_of_the_wide_space() -> None:
    """On one axis both can be solved: what is narrowed costs no less, and its states are among the others."""
    request = Request(model="albert", cluster="1x8-h100", mesh="2")
    request = Request(model="albert", cluster="1x4-a100-pcie", mesh="4")
    small = {**ALBERT, "num_hidden_layers": 2}
    planner = prepare(request, capture_graph(small, batch=16, seq=128))
    (mesh,) = meshes(request, planner.cluster)
    model = cost_model(planner.cluster, mesh, planner.workload)
    nets = build_networks(planner.coarse, planner.strategies, model)
    less = narrow(nets, planner.coarse, None)
    for (block, name), left in less.left.items():
        net = nets.blocks[block] if block else nets.top
        assert 0 < left.sum() <= len(left) == net.sizes[name]
    cut = build_problem(planner.coarse, planner.strategies, model, less, False, nets)
    assert not cut.impossible


def test_a_model_that_fits_is_left_alone() -> None:
    request = Request(model="llama-3-8b", mesh="2x8", layers=2)
    planner = prepare(request)
    (mesh,) = meshes(request, planner.cluster)
    nets = build_networks(planner.coarse, planner.strategies, cost_model(planner.cluster, mesh, planner.workload))
    assert not [k for k in narrow(nets, planner.coarse, None).left if k[0]]
    assert choose(planner, [mesh]).optimal


def test_too_many_boundary_tensors_are_refused() -> None:
    names = [f"v{i}" for i in range(MAX_KEPT + 1)]
    with pytest.raises(TooWide, match="mesh of one axis"):
        order(dict.fromkeys(names, 1), [], names)
