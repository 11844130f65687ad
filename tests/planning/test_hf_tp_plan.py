"""transformers' own tensor-parallel plans as a baseline: read rightly, priced as their authors would, never beating ours."""

from __future__ import annotations

import pytest

from planner_core.core import Plan
from planner_core.core.graph import Graph
from planner_core.core.mesh import DeviceMesh, parse_mesh
from planner_core.core.placement import R, Shard
from planner_core.cost.step_time import Component
from planner_core.models.loading import capture_graph
from planner_core.models.snapshots.write import collect_tp_plans
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.planning.fitting.baselines import plan_baselines
from planner_core.planning.methods.hf_tp_plan import load_vendor_plans, split_dim, vendor_plan, vendor_rules
from planner_core.planning.methods.registry import BASELINES
from planner_core.planning.planner import Planner, candidate_meshes, prepare_planner
from planner_core.planning.request import Request
from planner_core.search.lagrangian import search_within_budget
from planner_core.search.network.folded import Restriction

LLAMA = load_vendor_plans()["llama"]
SAMPLE = {"llama": 8, "qwen3": 8, "gemma2": 4, "mixtral": 8, "olmo2": 8, "cohere": 8, "phi": 8}


@pytest.mark.slow
def test_the_table_is_what_transformers_says() -> None:
    assert load_vendor_plans() == collect_tp_plans()


@pytest.mark.parametrize(
    ("name", "ndim", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, 0),
        ("model.layers.0.self_attn.q_proj.bias", 1, 0),
        ("model.layers.11.self_attn.o_proj.weight", 2, 1),
        ("model.layers.11.self_attn.o_proj.bias", 1, None),
        ("model.layers.3.mlp.gate_proj.weight", 2, 0),
        ("model.layers.3.input_layernorm.weight", 1, None),
        ("model.embed_tokens.weight", 2, None),
        ("lm_head.weight", 2, None),
        ("model.layers.x.mlp.gate_proj.weight", 2, None),
    ],
)
def test_the_dim_that_a_style_splits(name: str, ndim: int, dim: int | None) -> None:
    assert split_dim(name, ndim, LLAMA) == dim


def test_experts_are_split_inside() -> None:
    plan = load_vendor_plans()["mixtral"]
    assert split_dim("model.layers.0.mlp.experts.gate_up_proj", 3, plan) == 1
    assert split_dim("model.layers.0.mlp.experts.down_proj", 3, plan) == 2


def test_text_half_of_a_composite_config() -> None:
    assert vendor_plan({"model_type": "llava", "text_config": {"model_type": "llama"}}) == LLAMA
    assert vendor_plan({"model_type": "t5"}) is None
    both = vendor_plan(
        {
            "model_type": "llama4",
            "vision_config": {"model_type": "llama4_vision_model"},
            "text_config": {"model_type": "llama"},
        }
    )
    assert both == {**LLAMA, **load_vendor_plans()["llama4"]}, (
        "the plan of the whole and that of its text, not its vision's"
    )


def theirs_and_ours(graph: Graph, gpus: int = 8) -> tuple[Plan, float, float]:
    request = Request(model=graph.name, cluster={8: "1x8-h100", 4: "1x4-a100-pcie"}[gpus], mesh=str(gpus))
    planner = prepare_planner(request, graph)
    mesh = candidate_meshes(request, planner.cluster)[0]
    found = []
    for along_any_dim in (False, True):
        problem = planner.problem(
            planner.cost_model(mesh, zero=0), vendor_rules(graph, mesh, along_any_dim=along_any_dim)
        )
        answer = search_within_budget(problem, objective="communication")
        assert answer.assignment is not None
        plan = planner.plan(problem, answer, "hf-expert", "hf-expert", "communication")
        found.append((plan, answer.assignment.totals[Component.COMMUNICATION]))
    return found[0][0], found[0][1], found[1][1]


@pytest.mark.parametrize("layers", [1, 5])
def test_llama_costs_two_all_reduces_a_layer_each_way(layers: int) -> None:
    graph = load_snapshot("llama-3-8b", batch=4, seq=1024, layers=layers)
    plan, _, _ = theirs_and_ours(graph)
    tensor = 4 * 1024 * 4096 * 2
    assert {(t.phase, t.kind, t.count, t.num_bytes) for t in plan.cost.traffic} == {
        (phase, "all_reduce", 2 * layers, 2 * layers * tensor) for phase in ("forward", "backward")
    }


HRM = {
    "model_type": "hrm_text",
    "num_layers_per_stack": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "H_cycles": 1,
    "L_cycles": 2,
}


def test_layers_that_run_again_are_split_as_the_vendor_says_and_their_gate_is_no_residual_stream() -> None:
    """HRM calls one stack of layers several times, by names with `@`, and gates its attention's result."""
    graph = capture_graph(HRM, batch=8, seq=64)
    plan, theirs, ours = theirs_and_ours(graph, 4)
    calls = 2 * (2 + 1)  # layers of a stack, and stacks that are run
    assert {(t.phase, t.kind, t.count) for t in plan.cost.traffic if t.phase == "forward"} == {
        ("forward", "all_reduce", 2 * calls)
    }
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_rules_share_on_one_mesh_only_what_they_agree_on() -> None:
    """Networks of one mesh keep what rules say of activations. The vendor's say other things of them than Megatron-LM's."""
    graph = capture_graph(HRM, batch=8, seq=64)
    request = Request(model=graph.name, cluster="1x4-a100-pcie", mesh="4")

    def states(planner: Planner, rules: Restriction | None) -> dict[str, list[int]]:
        problem = planner.problem(planner.cost_model(DeviceMesh(("tensor",), (4,)), zero=0), rules)
        units = {"": problem.top, **{name: problem.first_variant(name) for name in problem.blocks}}
        return {name + v: list(alive) for name, unit in units.items() for v, alive in unit.alive.items()}

    mesh = DeviceMesh(("tensor",), (4,))
    both = [vendor_rules(graph, mesh), BASELINES["megatron"].restrict(graph, mesh)]
    alone = [states(prepare_planner(request, graph), rules) for rules in both]
    assert alone[0] != alone[1]
    for order in ([0, 1], [1, 0]):
        planner = prepare_planner(request, graph)
        assert all(states(planner, both[k]) == alone[k] for k in order)


def test_stored_as_the_vendor_says() -> None:
    plan, _, _ = theirs_and_ours(load_snapshot("llama-3-8b", layers=2))
    stored = {n: p.stored[0] for b in plan.blocks.values() if b.prefixes[0] for n, p in b.params.items()}
    assert stored["self_attn.q_proj.weight"] == Shard(0) and stored["mlp.down_proj.weight"] == Shard(1)
    assert stored["input_layernorm.weight"] == R


@pytest.mark.parametrize("kind", SAMPLE)
def test_ours_never_communicates_more(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    depth = {k: 2 for k in ("num_hidden_layers",) if hasattr(config, k)}
    graph = capture_graph({**config.to_dict(), **depth, "layer_types": None, "model_type": kind}, batch=4, seq=256)
    _, theirs, ours = theirs_and_ours(graph, SAMPLE[kind])
    assert 0 < ours <= theirs * (1 + 1e-6)


def test_an_axis_that_divides_no_weight_of_the_plan_has_none() -> None:
    """Llama-3-8B on 15 GPUs had a row of 3.1 s and 145 GiB, in which every GPU did the whole work; transformers deals out none of it."""
    planner = prepare_planner(Request("llama-3-8b", "3x5-h100", batch=15, seq=64, layers=2))
    meshes = candidate_meshes(planner.request, planner.cluster)
    assert all(vendor_rules(planner.graph, mesh) is None for mesh in meshes if mesh.axis_sizes[-1] % 3)
    assert "hf-expert" not in {p.method for p in plan_baselines(planner, [parse_mesh("15", 15), parse_mesh("3x5", 15)])}
    assert vendor_rules(planner.graph, parse_mesh("8", 8)) is not None


def test_it_is_among_the_baselines() -> None:
    request = Request(model="llama-3-8b", cluster="1x8-h100", mesh="8", layers=2)
    planner = prepare_planner(request)
    assert BASELINES["hf-expert"].title in [
        p.name for p in plan_baselines(planner, candidate_meshes(request, planner.cluster))
    ]
    assert BASELINES["hf-expert"].title == "hf-expert" and any(vendor_plan(m.config) for m in ZOO.values())
