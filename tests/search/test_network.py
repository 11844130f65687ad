"""Elimination and (min, +) powers against brute force and two independent solvers; the network's own promises."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner_core.core import RECOMPUTE, DeviceMesh, Workload, load_cluster
from planner_core.core.graph import Op
from planner_core.core.mesh import parse_mesh
from planner_core.cost import Component
from planner_core.cost.model import cost_model
from planner_core.models.loading import load_model
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.planning import Request, prepare_planner
from planner_core.search import solve_folded
from planner_core.search.algebra.elimination import eliminate
from planner_core.search.algebra.elimination_order import TooWide, choose_elimination_order
from planner_core.search.algebra.minplus import MinPlusPower, min_plus_power, min_plus_product
from planner_core.search.lagrangian import make_objective
from planner_core.search.network import BlockCache, Problem, build_networks
from planner_core.search.network import block as block_module
from planner_core.search.network.block import build_block
from planner_core.search.network.factors import NUM_COMPONENTS, Costs, Factor, Network, TablePool
from planner_core.search.network.folded import boundary_pairs, build_problem
from planner_core.search.network.search_cache import SearchCache
from tests.support.random_graphs import B, S, prepared, random_graph
from tests.support.solvers import brute_force, evaluate, highs, toulbar2
from tests.support.tiny_models import TEXT


def random_network(seed: int) -> dict[str, Any]:
    """Up to eight variables of up to four states; some combinations impossible, some costs equal."""
    dice = random.Random(seed)
    sizes = [dice.randint(1, 4) for _ in range(dice.randint(1, 8))]
    names = [f"v{i}" for i in range(len(sizes))]

    def cost() -> float:
        return 1e12 if dice.random() < 0.15 else float(dice.choice((0, 0, 1, 2, 3, 5, 8, 13)))

    pairs = [(a, b) for a in range(len(sizes)) for b in range(a) if dice.random() < 0.4]
    return {
        "variables": [{"name": n, "states": [str(s) for s in range(k)]} for n, k in zip(names, sizes, strict=True)],
        "unary": {n: [cost() for _ in range(k)] for n, k in zip(names, sizes, strict=True)},
        "pairwise": [
            {"vars": [names[a], names[b]], "cost": [[cost() for _ in range(sizes[b])] for _ in range(sizes[a])]}
            for a, b in pairs
        ],
        "infinite": 1e12,
    }


def eliminated(net: dict[str, Any], keep: tuple[str, ...] = ()) -> tuple[float, dict[str, int]]:
    sizes = {v["name"]: len(v["states"]) for v in net["variables"]}
    tables = [((n,), np.array(t)) for n, t in net["unary"].items()] + [
        (tuple(p["vars"]), np.array(p["cost"])) for p in net["pairwise"]
    ]
    tables = [(names, np.where(t >= net["infinite"], np.inf, t)) for names, t in tables]
    found = eliminate(sizes, tables, choose_elimination_order(sizes, [t[0] for t in tables], keep), keep)
    at = np.unravel_index(int(found.table.argmin()), found.table.shape) if keep else ()
    return float(found.table.min()), found.assignment(dict(zip(keep, map(int, at), strict=True)))


@pytest.mark.parametrize("seed", [*range(120), *(pytest.param(n, marks=pytest.mark.slow) for n in range(120, 300))])
def test_elimination_is_exact(seed: int) -> None:
    net = random_network(seed)
    want = brute_force(net)
    best, at = eliminated(net)
    assert best == want == toulbar2(net)
    if np.isfinite(want):
        assert evaluate(net, at) == want
        keep = tuple(sorted(at)[:2])
        kept_best, kept_at = eliminated(net, keep)
        assert kept_best == evaluate(net, kept_at) == want


def component(names: list[str], table: Any) -> dict[str, Any]:
    """A table as the one component of a network's form for mixed-integer solvers."""
    cost = np.asarray(table)
    return {
        "vars": names,
        "allowed": (cost < 1e12).tolist(),
        "cost": {"cost": np.where(cost < 1e12, cost, 0.0).tolist()},
    }


@pytest.mark.parametrize("seed", range(0, 300, 30))
def test_integer_program_agrees(seed: int) -> None:
    net = random_network(seed)
    tables = [([name], table) for name, table in net["unary"].items()]
    tables += [(p["vars"], p["cost"]) for p in net["pairwise"]]
    net["components"] = {
        "names": ["cost"],
        "factors": [component(*one) for one in tables],
    }
    assert highs(net, of="cost") == pytest.approx(brute_force(net), abs=1e-6)


def test_a_wrong_argument_would_be_seen() -> None:
    """The check above can fail: another assignment than the best one does not evaluate to the optimum."""
    net = random_network(7)
    best, at = eliminated(net)
    others = [
        evaluate(net, {**at, v["name"]: s})
        for v in net["variables"]
        for s in range(len(v["states"]))
        if s != at[v["name"]]
    ]
    assert others and all(o >= best for o in others) and any(o > best for o in others)


@pytest.mark.parametrize("seed", range(40))
def test_powers_are_chains(seed: int) -> None:
    dice = np.random.default_rng(seed)
    shared, n, count = int(dice.integers(1, 4)), int(dice.integers(1, 6)), int(dice.integers(1, 20))
    cost = dice.integers(0, 30, (shared, n, n)).astype(float)
    cost[dice.random(cost.shape) < 0.2] = np.inf
    chain = min_plus_power(MinPlusPower(cost), count)
    for s in range(shared):
        naive = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
        for _ in range(count):
            naive = (naive[:, :, None] + cost[s][None]).min(axis=1)
        assert np.array_equal(chain.cost[s], naive)
        for i, j in np.argwhere(np.isfinite(naive)):
            states = [int(i), *chain.cheapest_path(s, int(i), int(j)), int(j)]
            assert len(states) == count + 1
            assert sum(cost[s, a, b] for a, b in pairwise(states)) == naive[i, j]


def test_products_of_different_links() -> None:
    dice = np.random.default_rng(0)
    a, b = dice.random((2, 3, 4)), dice.random((2, 4, 5))
    both = min_plus_product(MinPlusPower(a), MinPlusPower(b))
    assert np.allclose(both.cost, (a[:, :, :, None] + b[:, None]).min(axis=2))
    k = both.cheapest_path(1, 2, 3)[0]
    assert both.cost[1, 2, 3] == a[1, 2, k] + b[1, k, 3]


def test_a_network_that_is_too_wide_is_refused() -> None:
    names = [f"v{i}" for i in range(12)]
    with pytest.raises(TooWide) as error:
        choose_elimination_order(dict.fromkeys(names, 30), [(a, b) for a in names for b in names if a < b], ())
    assert error.value.entries > 1e15


# --- networks of models ----------------------------------------------------------------------------------

MODEL_CACHE: dict[tuple[str, str], Any] = {}


def zoo_problem(name: str, mesh: str, cluster: str = "2x8-h100", layers: int | None = 2) -> Any:
    key = (name, mesh)
    if key not in MODEL_CACHE:
        graph = load_snapshot(name, layers=None if name.startswith("resnet") else layers)
        c = load_cluster(cluster)
        model = cost_model(c, parse_mesh(mesh, c.num_gpus), Workload(graph.workload["batch"], graph.workload["seq"]))
        coarse, strategies = prepared(graph)
        MODEL_CACHE[key] = build_problem(coarse, strategies, model)
    return MODEL_CACHE[key]


@pytest.mark.parametrize("name", ZOO)
def test_every_variable_has_a_state_and_every_cost_is_sane(name: str) -> None:
    problem = zoo_problem(name, "2x8")
    for compiled in (problem.top, *(c for variants in problem.blocks.values() for c in variants.values())):
        assert all(len(a) for a in compiled.alive.values())
        for f in compiled.factors:
            assert f.cost.shape == (NUM_COMPONENTS, *f.allowed.shape)
            assert np.isfinite(f.cost[:, f.allowed]).all() and (f.cost[:, f.allowed] >= 0).all()


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b", "resnet50-100k"])
def test_pruned_states_are_in_no_solution(name: str) -> None:
    """Arc consistency takes out only states that have no partner in some table: put back, each is impossible."""
    problem = zoo_problem(name, "2x8")
    by_runs: dict[str, set[int]] = {}  # states of the top block's tensors that some run of blocks cannot take
    for run in problem.runs:
        for outer, port in boundary_pairs(problem, run):
            cannot = set(range(problem.top.net.sizes[outer])) - set(
                problem.first_variant(run.block).alive[port].tolist()
            )
            by_runs.setdefault(outer, set()).update(cannot)
    for compiled in (problem.top, *(c for variants in problem.blocks.values() for c in variants.values())):
        net = compiled.net
        for v, n in net.sizes.items():
            for s in set(range(n)) - set(compiled.alive[v].tolist()):
                blocked = compiled is problem.top and s in by_runs.get(v, ())
                for f in TablePool().merge(net).values():
                    if v in f.vars:
                        axis = f.vars.index(v)
                        row = f.allowed.take(s, axis)
                        if len(f.vars) == 2:
                            row = row[compiled.alive[f.vars[1 - axis]]]
                        blocked = blocked or not row.any()
                assert blocked, f"{v} lost state {s} without a reason"


def test_data_parallel_gradient_sums_are_the_bytes_of_the_weights() -> None:
    """Along one axis with everything split by batch, the network's communication is one all_reduce of each unit's weights, and one of the
    small gradients, whose latency the top block's bear."""
    from planner_core.cost.communication.collectives import collective_time
    from planner_core.cost.step_time import Component
    from planner_core.planning.methods.registry import BASELINES
    from planner_core.search.lagrangian import search_within_budget

    graph = load_snapshot("llama-3-8b", layers=2)
    c = load_cluster("1x8-h100")
    model = cost_model(c, parse_mesh("8", 8), Workload(graph.workload["batch"], graph.workload["seq"], zero=0))
    coarse, strategies = prepared(graph)
    problem = build_problem(coarse, strategies, model, BASELINES["data-parallel"].restrict(graph, model.mesh))
    a = search_within_budget(problem).assignment
    assert a is not None
    units: dict[str, int] = {}
    for name, meta in graph.parameters().items():
        unit = name[: len("model.layers.0")] if name.startswith("model.layers.") else ""
        units[unit] = units.get(unit, 0) + meta.num_bytes
    assert len(units) == 3
    sums = sum(collective_time("all_reduce", size, model.links[0])[0] for size in units.values())
    norm = graph.parameters()["model.norm.weight"].num_bytes
    alone, share = collective_time("all_reduce", norm, model.links[0])[0], norm / units[""]
    sums += alone - collective_time("all_reduce", norm, model.links[0], share)[0]
    count = 2 * collective_time("all_reduce", 4, model.links[0])[0]  # valid targets of the loss, and the loss itself
    # A local move counts a tenth of a nanosecond.
    assert a.totals[Component.COMMUNICATION] == pytest.approx(sums + count, abs=1e-7)


def test_rows_of_a_group_agree_inside_it() -> None:
    graph = random_graph(3)
    coarse, strategies = prepared(graph)
    c = load_cluster("1x8-h100")
    model = cost_model(c, parse_mesh("8", 8), Workload(B, S))
    for name, block in (("", coarse.top), *coarse.blocks.items()):
        net = build_block(block, strategies[name], model)
        for node in net.nodes.values():
            for r in range(len(node.index)):
                for rows in (node.strategy.rows[int(i)] for i in node.index[r]):
                    made = {}
                    for op, row in zip(node.strategy.ops, rows, strict=True):
                        assert isinstance(op, Op)
                        for v, pair in zip(op.inputs, row.inputs, strict=True):
                            assert made.get(v, pair) == pair
                        made.update(zip(op.outputs, row.outputs, strict=True))


@pytest.mark.parametrize("model", ["mixtral-8x7b", "t5-large"])
def test_what_is_alike_has_one_table(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What equal groups and weights share, within a block and between blocks, is what each of them has by itself."""
    check_shared_tables(model, monkeypatch, most=0.5)


def test_weights_of_experts_have_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLLB-MoE's experts are modules of their own, so one group reads the weights of all of them."""
    sizes = {"d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "num_experts": 16, "vocab_size": 1024}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = {
        "model_type": "nllb-moe",
        "architectures": ["NllbMoeForConditionalGeneration"],
        **sizes,
        **layers,
        **heads,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_shared_tables(str(tmp_path / "config.json"), monkeypatch, most=0.3)


def check_shared_tables(model: str, monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    """Check that the factors which share tables are those that are made one by one, of which at most a share `most` is made."""
    planner = prepare_planner(Request(model, recompute="auto"))
    cost = cost_model(planner.cluster, parse_mesh("2x8", 16), planner.workload)
    caches: dict[str, BlockCache] = {}
    shared = build_networks(planner.coarse, planner.strategies, cost, caches)

    def add_own_factor(self: Any, make: Callable[[], Factor], names: tuple[str, ...], *key: object) -> None:
        self.net.factors.append(make())

    monkeypatch.setattr(block_module._Builder, "_add_shared_factor", add_own_factor)
    own = build_networks(planner.coarse, planner.strategies, cost)
    pairs = [(shared.top, own.top)]
    pairs += [(net, own.blocks[name][variant]) for name, nets in shared.blocks.items() for variant, net in nets.items()]
    for one, other in pairs:
        for f, g in zip(one.factors, other.factors, strict=True):
            assert f.vars == g.vars
            np.testing.assert_array_equal(f.cost, g.cost)
            np.testing.assert_array_equal(f.allowed, g.allowed)
    assert len(caches[""].tables) <= most * sum(len(net.factors) for _, net in pairs)


def test_costs_without_their_zero_components_are_those_of_the_whole_arrays() -> None:
    """Sums, selections and weighted sums, of tables with none, some and all of the components."""
    dice = np.random.default_rng(0)
    used = [[], [3], [3], [0, 3, 9], range(NUM_COMPONENTS)]
    arrays = [np.zeros((NUM_COMPONENTS, 4, 3)) for _ in used]
    for array, components in zip(arrays, used, strict=True):
        array[list(components)] = dice.random((len(components), 4, 3))
    weights, pick = dice.random((2, NUM_COMPONENTS)), (np.array([[0], [2]]), np.array([1, 2]))
    for array, components in zip(arrays, used, strict=True):
        costs = Costs.of(array)
        assert len(costs.rows) == len(components)
        assert np.array_equal(costs.dense(), array)
        assert np.array_equal(costs[pick].dense(), array[(slice(None), *pick)])
        np.testing.assert_allclose(costs.weighted(weights), np.tensordot(weights, array, axes=1), rtol=1e-14)
        np.testing.assert_allclose(costs.weighted(weights[0]), np.tensordot(weights[0], array, axes=1), rtol=1e-14)
        assert np.array_equal(costs.component(3), array[3])
        for other in arrays:
            assert np.array_equal((costs + Costs.of(other)).dense(), array + other)
            assert costs.equals(Costs.of(other)) == np.array_equal(array, other)


def test_equal_sums_of_factors_are_formed_once() -> None:
    """Pairs of variables whose factors have the same tables get one table of the sum, and one of the states that are left."""
    dice = np.random.default_rng(0)
    shape = 3, 2
    tables = [(Costs.of(dice.random((NUM_COMPONENTS, *shape))), dice.random(shape) < 0.8) for _ in range(3)]
    pairs = [("a", "x"), ("b", "y"), ("c", "z")]
    numbers = [(0, 1), (0, 1), (0, 2)]  # the third pair adds another table
    net = Network(
        {v: n for a, x in pairs for v, n in ((a, 3), (x, 2))},
        [Factor(pair, *tables[k]) for pair, both in zip(pairs, numbers, strict=True) for k in both],
    )
    pool = TablePool()
    first, same, other = (pool.merge(net)[pair] for pair in pairs)
    assert same.vars == ("b", "y")
    assert same.costs is first.costs
    assert same.allowed is first.allowed
    for merged, both in zip((first, same, other), numbers, strict=True):
        assert merged.costs.equals(tables[both[0]][0] + tables[both[1]][0])
        assert np.array_equal(merged.allowed, tables[both[0]][1] & tables[both[1]][1])
    rows, states = pool.states(np.array([True, False, True])), pool.states(np.array([False, True]))
    alive = dict.fromkeys("abc", rows) | dict.fromkeys("xyz", states)
    assert pool.select(same, alive).costs is pool.select(first, alive).costs
    assert np.array_equal(pool.select(other, alive).cost, other.cost[:, rows[:, None], states])


def test_blocks_of_a_model_share_tables() -> None:
    """T5's layers of the encoder and of the decoder have one array of each table that is in both."""
    encoder, decoder = ([*variants.values()] for variants in zoo_problem("t5-large", "2x8").blocks.values())
    of_both = [{number for c in variants for number in c.kinds} for variants in (encoder, decoder)]
    shared = set.intersection(*of_both)
    assert shared
    for number in shared:
        factors = [f for c in (*encoder, *decoder) for f, n in zip(c.factors, c.kinds, strict=True) if n == number]
        assert len({id(f.costs) for f in factors}) == 1


GEMMA: dict[str, Any] = {
    **TEXT,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
}
"""Runs of two layers with a window, and one layer without between them."""


@pytest.mark.parametrize(("model", "layers"), [("llama-3-8b", 1), ("t5-large", 2), (GEMMA, None)])
def test_what_a_policy_costs_does_not_depend_on_the_others(model: str | dict[str, Any], layers: int | None) -> None:
    """One layer of Llama that recomputes nothing paid for its input, which only recomputed layers keep."""
    graph = load_model(model, layers=layers, batch=16, seq=32)

    def problems(recompute: str) -> tuple[Problem, Problem]:
        asked = Request("a model", cluster="1x8-h100:gpus=4", recompute=recompute)
        problem = prepare_planner(asked, graph).problem(DeviceMesh(("world",), (4,)))
        assert problem.make_at_least is not None
        return problem, problem.make_at_least()

    def least(problem: Problem, s_per_byte: float) -> float:
        found = solve_folded(problem, make_objective(problem, "time").with_prices(s_per_byte, 0.0))
        assert found is not None
        return found.seconds + s_per_byte * float(found.totals[Component.AFTER_FORWARD])

    of_all = problems("auto")
    # A policy that keeps the same as another is not among those of `auto`.
    policies = [p for p in RECOMPUTE if all(p in variants for variants in of_all[0].blocks.values())]
    assert {"none", "full"} <= {*policies}
    for policy in policies:
        for alone, every in zip(problems(policy), of_all, strict=True):
            blocks = {name: {policy: variants[policy]} for name, variants in every.blocks.items()}
            among = replace(every, blocks=blocks, cache=SearchCache())
            for price in (1e-11, 1e-7):
                assert least(among, price) == pytest.approx(least(alone, price), rel=1e-9), policy
