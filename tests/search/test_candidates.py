"""All candidates of a block: the counts of TAP (3 to the number of matrices), and the cost of each against a search with the weights held fixed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from planner_core.core.mesh import DeviceMesh
from planner_core.core.placement import R, Shard
from planner_core.cost.model import CostModel, cost_model
from planner_core.cost.step_time import CostVector
from planner_core.models.loading import capture_graph
from planner_core.planning.pipeline import plan_model
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.request import Request
from planner_core.search.algebra.convex_hull import slope
from planner_core.search.algebra.elimination import eliminate
from planner_core.search.candidates.clear_choices import without_clear_choices
from planner_core.search.candidates.generate import tie_variables
from planner_core.search.candidates.scoring import (
    Candidates,
    _residual_stream,
    _tables_by_choice,
    score_candidates,
    undominated_pairs,
    weight_matrices,
)
from planner_core.search.candidates.two_sums import TwoSums, limit_between
from planner_core.search.network.block import Network, build_block, tensor_name
from planner_core.search.network.factors import Factor
from planner_core.search.network.folded import boundary_variables, compile_network
from planner_core.search.units.tables import weighted_tables

COUNTS = {
    "t5-large": [729, 59049],
    "gpt2-xl": [81],
    "llama-3-8b": [2187],
    "llama-3-70b": [2187],
    "bert-large": [729],
    "vit-large": [729],
}


def one_axis(planner: Planner, mesh: DeviceMesh) -> CostModel:
    """A cost model of the tensor axis alone, with the links of adjacent GPUs. Weights are not gathered at use."""
    n = mesh.axis_sizes[0]
    whole = DeviceMesh(("data", "tensor"), (planner.cluster.num_gpus // n, n))
    model = cost_model(planner.cluster, whole, replace(planner.workload, zero=0))
    return replace(model, mesh=mesh, links=model.links[-1:], joint_links=())


@lru_cache
def scored(name: str, size: int = 8) -> tuple[Planner, list[Candidates]]:
    planner = prepare_planner(Request(name, layers=2))
    model = one_axis(planner, DeviceMesh(("tensor",), (size,)))
    found = [score_candidates(planner.coarse.blocks[n], planner.strategies[n], model, 2) for n in planner.coarse.blocks]
    return planner, [c for c in found if c is not None]


@pytest.mark.parametrize(("name", "want"), COUNTS.items())
def test_counts(name: str, want: list[int]) -> None:
    _, found = scored(name)
    assert sorted({c.space for c in found if c.space in want}) == want
    for c in found:
        assert len(c.choice) == len(c.comm_s) == len(c.memory_bytes) == c.space == 3 ** len(c.weights)
        assert len({tuple(row) for row in c.choice.tolist()}) == c.space


def fixed_search(planner: Planner, c: Candidates, choice: np.ndarray) -> float:  # type: ignore[type-arg]
    """Least communication of the block with every matrix held in its placement, the stream the same in and out."""
    coarse = planner.coarse.blocks[c.block]
    net: Network = build_block(
        coarse, planner.strategies[c.block], one_axis(planner, DeviceMesh(("tensor",), (c.axis_size,)))
    )
    for w, kind in zip(weight_matrices(coarse.block), choice, strict=True):
        states = net.tensors[tensor_name(w)]
        wanted = R if kind == 0 else Shard(int(kind) - 1)
        for f in net.factors:
            if f.vars == (tensor_name(w),):
                f.allowed = f.allowed & np.array([states.axis_states[i][0] == wanted for i in states.index[:, 0]])
    compiled = compile_network(net, boundary_variables(coarse.block))
    if any(not len(a) for a in compiled.alive.values()):
        return float("inf")
    price = CostVector(communication=1.0).array()
    table = eliminate(compiled.sizes, weighted_tables(compiled.factors, price), compiled.sequence, compiled.boundary)
    block = coarse.block
    first = next(i for i in block.inputs if block.values[i].kind == "activation")
    last = next(o for o in block.outputs if block.values[o].meta == block.values[first].meta)
    a, b = tensor_name(first), tensor_name(last)
    best = float("inf")
    for index in np.ndindex(table.table.shape):
        at = dict(zip(table.scope, index, strict=True))
        if compiled.alive[a][at[a]] == compiled.alive[b][at[b]]:
            best = min(best, float(table.table[index]))
    return best


@pytest.mark.parametrize(
    ("name", "number"), [("gpt2-xl", 81), ("llama-3-8b", 60), ("t5-large", 40), ("bert-large", 30)]
)
@pytest.mark.slow(but=("t5-large-40", "bert-large-30"))
def test_candidates_cost_what_a_search_with_fixed_weights_finds(name: str, number: int) -> None:
    planner, found = scored(name, 2 if name == "gpt2-xl" else 8)
    c = found[0]
    picks = range(c.space) if number == c.space else np.random.default_rng(0).choice(c.space, number, replace=False)
    for i in picks:
        assert c.comm_s[i] == pytest.approx(fixed_search(planner, c, c.choice[i]), rel=1e-6, abs=1e-7)


def test_the_front_of_the_candidates_is_a_front() -> None:
    for name in ("llama-3-8b", "t5-large"):
        for c in scored(name)[1]:
            front = np.flatnonzero(c.on_front)
            for i in front:
                better = (c.comm_s <= c.comm_s[i]) & (c.memory_bytes <= c.memory_bytes[i])
                worse = (c.comm_s == c.comm_s[i]) & (c.memory_bytes == c.memory_bytes[i])
                assert not (better & ~worse).any()
            assert c.scored == np.isfinite(c.comm_s).sum() <= c.space


def test_feed_forward_only_lies_between() -> None:
    """TAP's partially sharded plan: splitting only the feed-forward sends less than splitting all, and keeps more."""
    _, found = scored("t5-large")
    c = next(c for c in found if c.space == 729)
    wide = [i for i, w in enumerate(c.weights) if "DenseReluDense" in w or ".wi" in w or ".wo" in w]
    assert len(wide) == 2
    kinds = c.choice > 0
    only = np.flatnonzero(kinds[:, wide].all(1) & (kinds.sum(1) == 2))
    every = np.flatnonzero(kinds.all(1))
    assert c.comm_s[only].min() < c.comm_s[every].min()
    assert c.memory_bytes[only].min() > c.memory_bytes[every].min()


@pytest.mark.parametrize("seed", range(20))
def test_pareto(seed: int) -> None:
    dice = np.random.default_rng(seed)
    a, b = dice.integers(0, 6, 30).astype(float), dice.integers(0, 6, 30).astype(float)
    a[dice.random(30) < 0.1] = np.inf
    keep = undominated_pairs(a, b)
    points = {(x, y) for x, y in zip(a, b, strict=True) if np.isfinite(x)}
    front = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert {(x, y) for x, y, k in zip(a, b, keep, strict=True) if k} == front
    assert keep.sum() == len(front)


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "gpt2-xl", "mixtral-8x7b"])
@pytest.mark.slow(only=("t5-large",))
def test_generated_candidates_beat_or_equal_all_scored_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were too many to score: what is generated is no worse than the front of all, and what it says is true."""
    _, every = scored(name)
    monkeypatch.setattr("planner_core.search.candidates.scoring.MAX_CANDIDATES", 1)
    _, generated = scored.__wrapped__(name)
    for whole, few in zip(every, generated, strict=True):
        assert (few.block, few.space) == (whole.block, whole.space)
        assert whole.scored <= few.possible <= few.space
        index = {tuple(c): i for i, c in enumerate(whole.choice.tolist())}
        for choice, comm in zip(few.choice.tolist(), few.comm_s, strict=True):
            assert comm >= whole.comm_s[index[tuple(choice)]] * (1 - 1e-9) - 1e-12
        for i in np.flatnonzero(whole.on_front):
            near = (few.comm_s <= whole.comm_s[i] * (1 + 1e-6) + 1e-9) & (few.memory_bytes <= whole.memory_bytes[i] + 1)
            assert near.any()


@pytest.mark.slow
def test_a_space_too_large_to_score_is_searched_best_first(tmp_path: Path) -> None:
    """A block of sixteen matrices has 43 million candidates."""
    (tmp_path / "wide.py").write_text(WIDE)
    result = plan_model(Request(f"{tmp_path / 'wide.py'}:make", cluster="1x8-h100", mesh="8"))
    (found,) = result.candidates
    assert found.space == 3**16
    assert 0 < found.scored < 10_000
    assert sum(result.dropped.values()) == found.space - int((found.on_front & (found.model_memory_bytes < 8e10)).sum())


def test_a_matrix_that_no_op_reads_is_no_choice() -> None:
    """A decoder alone holds the weights of an attention to an encoder that is not there."""
    sizes = {
        "hidden_size": 32,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "vocab_size": 64,
    }
    config = {"model_type": "prophetnet", "architectures": ["ProphetNetForCausalLM"], **sizes}
    graph = capture_graph(config, batch=4, seq=16, dtype="float32")
    layer = graph.blocks["ProphetNetDecoderLayer"]
    assert "cross_attn.key_proj.weight" in {v.name for v in layer.values}
    assert weight_matrices(layer) and not any("cross_attn" in layer.values[w].name for w in weight_matrices(layer))


WIDE = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(16))

    def forward(self, x):
        for part in self.parts:
            x = x + part(torch.nn.functional.gelu(x))
        return x

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    return Model(), (torch.zeros(8, 32, 64),)
"""


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b"])
def test_a_tied_block_costs_what_the_whole_costs_on_the_diagonal(name: str) -> None:
    """Eliminated to one number for each state of the stream; a state that one end lacks is gone."""
    planner, _ = scored(name)
    model = one_axis(planner, DeviceMesh(("tensor",), (8,)))
    for label, coarse in planner.coarse.blocks.items():
        first, last = _residual_stream(coarse.block) or ("", "")
        whole = compile_network(build_block(coarse, planner.strategies[label], model), boundary_variables(coarse.block))
        whole.alive[last] = whole.alive[last][1:]
        whole.factors = [_without_first(f, last) for f in whole.factors]
        weights = CostVector(communication=1.0, after_forward=1e-12).array()
        ends = eliminate(whole.sizes, weighted_tables(whole.factors, weights), whole.sequence, (first, last)).table
        both = np.intersect1d(whole.alive[first], whole.alive[last])
        at = [np.searchsorted(whole.alive[v], both) for v in (first, last)]
        one = tie_variables(whole, first, last)
        mine = eliminate(
            one.sizes, weighted_tables(one.factors, weights), [v for v in one.sequence if v != first], (first,)
        ).table
        assert last not in one.alive and len(mine) == len(both) > 1
        assert mine == pytest.approx(ends[at[0], at[1]], rel=1e-12)


def _without_first(f: Factor, name: str) -> Factor:
    """The factor without the first state of one variable."""
    if name not in f.vars:
        return f
    axis = f.vars.index(name)
    return Factor(f.vars, np.delete(f.cost, 0, axis + 1), np.delete(f.allowed, 0, axis))


def drawn(seed: int) -> tuple[list[tuple[tuple[str, ...], np.ndarray]], dict[str, int]]:
    """Tables [sum, entry] over a chain of variables with a shortcut, in small whole numbers; few entries are impossible."""
    dice = np.random.default_rng(seed)
    sizes = {f"v{i}": int(dice.integers(2, 4)) for i in range(7)}
    scopes = [*pairwise(sizes), ("v1", "v4"), *((v,) for v in sizes)]
    tables = []
    for scope in scopes:
        table = dice.integers(0, 4, (2, *(sizes[v] for v in scope))).astype(float)
        table[1] *= dice.random() < 0.5  # many hold no memory, as operators do
        table[:, dice.random(table.shape[1:]) < 0.1] = [[np.inf], [0.0]]
        tables.append((scope, table))
    return tables, sizes


def front_of(
    tables: list[tuple[tuple[str, ...], np.ndarray]], sizes: dict[str, int], told: tuple[str, ...]
) -> set[tuple[float, ...]]:
    """The undominated pairs of sums for each choice of `told`, of all assignments; a pair comes behind its choice."""
    names = [*dict.fromkeys((*told, *(v for scope, _ in tables for v in scope)))]
    points: dict[tuple[int, ...], set[tuple[float, float]]] = {}
    for states in product(*(range(sizes[v]) for v in names)):
        at = dict(zip(names, states, strict=True))
        first, second = (sum(t[(k, *(at[v] for v in scope))] for scope, t in tables) for k in (0, 1))
        if np.isfinite(first):
            points.setdefault(states[: len(told)], set()).add((float(first), float(second)))
    return {
        (*choice, *p)
        for choice, found in points.items()
        for p in found
        if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in found)
    }


@pytest.mark.parametrize("seed", range(12))
def test_without_clear_choices_the_fronts_are_the_same(seed: int) -> None:
    tables, sizes = drawn(seed)
    told = ("v0", "v5")
    fewer = without_clear_choices(tables, sizes, told, sizes)
    left = {v for scope, _ in fewer for v in scope}
    assert len(left - {*told}) < len(sizes) - len(told) or seed == 5  # nothing is clear there
    assert front_of(fewer, sizes, told) == front_of(tables, sizes, told)


@pytest.mark.parametrize("seed", range(6))
def test_what_lies_between_two_corners_is_never_dropped(seed: int) -> None:
    """All undominated pairs of sums between the ends of the front are among the points."""
    tables, sizes = drawn(seed)
    every = sorted(front_of(tables, sizes, ()))
    left, right = every[0], every[-1]
    whole = TwoSums({v: np.arange(n) for v, n in sizes.items()}, tables, [*sizes], ["v3"])
    tree = whole.bucket_tree(slope(left, right))
    states, sums = whole.best_assignment(tree)
    assert set(states) == set(sizes) and sums[0] + slope(left, right) * sums[1] == pytest.approx(float(tree.root))
    part = whole.prune_between(tree, limit_between(left, right))
    assert sum(map(len, part.alive.values())) <= sum(sizes.values())
    found = {sums for *_, a, b in part.points_between(left, right) if (sums := (a, b))}
    assert {p for p in every if left[0] < p[0] < right[0]} <= found


def test_a_choice_is_clear_if_one_state_is_the_least_in_both_sums() -> None:
    """The example of `clear_choices`."""
    table = np.array([[[1.0, 3.0], [2.0, 1.0]], [[4.0, 2.0], [4.0, 2.0]]])  # [sum, state, state of the neighbour]
    ((names, found),) = without_clear_choices([(("v", "near"), table)], {"v": 2, "near": 2}, ["near"], ["v"])
    assert names == ("near",) and found.tolist() == [[1.0, 1.0], [4.0, 2.0]]
    table[1, 0, 0] = 5.0
    assert len(without_clear_choices([(("v", "near"), table)], {"v": 2, "near": 2}, ["near"], ["v"])[0][0]) == 2


TWICE = """
import torch
from torch.nn import Linear, Module, ModuleList
class Layer(Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = Linear(64, 64, bias=False), Linear(64, 64, bias=False)
    def forward(self, x):
        return x + self.v(torch.relu(self.w(torch.relu(self.w(x)))))
class Model(Module):
    def __init__(self):
        super().__init__()
        self.layers = ModuleList(Layer() for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def make():
    return Model(), (torch.zeros(8, 16, 64),)
"""


def test_the_bytes_of_a_matrix_that_is_read_twice_count_once(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    planner = prepare_planner(Request(f"{tmp_path}/twice.py:make"))
    name, coarse = next(iter(planner.coarse.blocks.items()))
    model = one_axis(planner, DeviceMesh(("tensor",), (8,)))
    compiled = compile_network(build_block(coarse, planner.strategies[name], model), boundary_variables(coarse.block))
    matrix = tensor_name(weight_matrices(coarse.block)[0])
    tables = [(cost, memory) for names, cost, memory in _tables_by_choice(compiled, [matrix]) if matrix in names]
    of_readers = [float(memory[np.isfinite(cost[:, 0]), 0].min()) for cost, memory in tables]
    assert len(of_readers) == 2
    # In float32: the weight and Adam's two moments.
    assert sum(of_readers) == 3 * 4 * 64 * 64
