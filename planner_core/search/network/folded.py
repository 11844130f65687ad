"""The cost network of a whole model on one mesh, folded: one table for each unique block, and powers for runs of equal blocks.

    block network --eliminate--> table over the block's boundary tensors
    run of L equal blocks ------> (min, +) power of that table: at most 2 log2 L products
    top network + runs ---------> eliminate

The answer is the best state of every variable of every copy. Twice the depth costs one or two products more.

Example: Llama-3-8B is a top block (embedding, last norm, loss) and a run of 32 calls of one layer. The layer's network is
eliminated once to a table [state before, state after] of the residual stream. Its power takes 9 products and not 31.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from planner_core.core import Block, Graph
from planner_core.cost import Bools, Component, CostModel, Floats, Ints, ops_at_the_ends
from planner_core.cost.memory import rerun_ops, results_saved_by_readers
from planner_core.ops import BlockStrategies, CoarseGraph, recompute_policies
from planner_core.search.algebra.elimination_order import choose_elimination_order
from planner_core.search.algebra.pareto_points import MAX_UNIT_POINTS, PointAllowance
from planner_core.search.network.block import build_block
from planner_core.search.network.factors import (
    Factor,
    Network,
    TablePool,
    allow_only,
    tensor_name,
)
from planner_core.search.network.group_work import BlockCache, OperatorCache, UnitOptions
from planner_core.search.network.runs import (
    Nets,
    Run,
    add_inputs_saved_by_some,
    find_runs,
    mark_saved_chain_tensors,
    values_always_saved,
)
from planner_core.search.network.search_cache import SearchCache


@dataclass
class CompiledNetwork:
    """A network without impossible states, and an order of elimination.

    `alive[v]` are the remaining states of variable v, in the numbering of `net`; `factors` number them from 0. `boundary`
    are the variables of the block's boundary. `sequence` is the order in which the others are eliminated, and `orders` caches
    the orders for other boundaries.

    Example: a tensor has the states 0 to 4, and the states 1 and 3 go with no strategy. Then `alive` is [0, 2, 4], and state
    number 1 of the factors is state 2 of the network.
    """

    net: Network
    boundary: tuple[str, ...]
    alive: dict[str, Ints]
    factors: list[Factor]
    sequence: list[str]
    orders: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = field(default_factory=dict)
    recipes: dict[Any, Any] = field(default_factory=dict)
    """How the inside is eliminated, by the scopes and the kinds of its tables, as far as that was worked out (see `units.reduction`).
    Variants share it."""

    pool: TablePool = field(default_factory=TablePool)
    """The tables of the factors, each once. All repeated blocks of a problem share it; the top block has one of its own."""

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """[factor]: the number of its table in `pool`."""
        return tuple(self.pool.number(f) for f in self.factors)

    @cached_property
    def least_bytes(self) -> Floats:
        """[end]: a lower bound on the block's bytes when forward and when backward ends: the sum of each factor's least."""
        ends = Component.AFTER_FORWARD, Component.AFTER_BACKWARD
        least = np.zeros(2)
        for number in self.kinds:
            least += self.pool.least(number, ends)
        return least

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of states that are left of each variable."""
        return {v: len(a) for v, a in self.alive.items()}

    @cached_property
    def open_boundary(self) -> tuple[str, ...]:
        """The boundary variables that have more than one state left. The others do not need a dim in a table."""
        return tuple(v for v in self.boundary if len(self.alive[v]) > 1)


@dataclass(frozen=True)
class Problem:
    """The folded network of a model on one mesh.

    `top` is the network of the top block. `blocks` holds each repeated block, in all its variants (`ops.recompute_policies`).
    `scopes` are the top variables that each run touches, by the run's number. `uniform`: all copies of a run pass the residual
    stream on in one state, and so all copies are equal.
    """

    coarse: CoarseGraph
    model: CostModel
    runs: list[Run]
    top: CompiledNetwork
    blocks: dict[str, dict[str, CompiledNetwork]]
    strategies: Mapping[str, BlockStrategies]
    uniform: bool = False
    scopes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    unrestricted: ModelNetworks | None = None
    """The unrestricted networks, if states were removed to make elimination tractable (see `restricted_states`); otherwise None."""
    max_unit_points: int = MAX_UNIT_POINTS
    """The points that may be formed to settle units of this network: without prices of memory, and at all prices together."""
    make_at_least: Callable[[], Problem] | None = field(default=None, compare=False, repr=False)
    """Makes the problem whose sums of memory are of no plan above its simulated peak (`build_networks`). None if this one's are not."""
    cache: SearchCache = field(default_factory=SearchCache, compare=False, repr=False)
    """Results of earlier searches. The cache is not a part of the value."""

    def with_point_limit(self, max_points: int) -> Problem:
        """Return a copy of the problem with an empty cache, whose units may form at most `max_points` points."""
        return replace(self, max_unit_points=max_points, cache=SearchCache(unit_points=PointAllowance(max_points)))

    def first_variant(self, name: str) -> CompiledNetwork:
        """Return the first variant of a repeated block. Variables, states and boundary are the same in all variants."""
        return next(iter(self.blocks[name].values()))

    @cached_property
    def least_bytes_at_ends(self) -> Floats:
        """[end]: bytes per GPU that no assignment's sum is below when forward and when backward ends. It is found at once, without a
        search. When backward ends no activation is left, so the second does not fall with more micro-batches."""
        if self.is_infeasible:
            return np.full(2, np.inf)
        each = {n: np.min([c.least_bytes for c in variants.values()], axis=0) for n, variants in self.blocks.items()}
        total = self.top.least_bytes if self.top.factors else np.zeros(2)
        for run in self.runs:
            # Each copy holds its own bytes: 32 copies of at least 2 GB are at least 64 GB, before any search.
            total = total + len(run.calls) * each[run.block]
        return np.asarray(total)

    @property
    def least_bytes(self) -> float:
        """Bytes per GPU that no assignment's sum of memory is below."""
        return float(self.least_bytes_at_ends.max())

    @property
    def is_infeasible(self) -> bool:
        """Whether some variable has no state left, so that no assignment satisfies the constraints."""
        units = (self.top, *(self.first_variant(name) for name in self.blocks))
        return any(not len(a) for c in units for a in c.alive.values())


@dataclass(frozen=True, slots=True)
class ModelNetworks:
    """The unrestricted networks of a model on one mesh: that of the top block, and each repeated block's by name and variant."""

    runs: list[Run]
    top: Network
    blocks: Nets

    def restricted(self, restrict: Restriction | None) -> ModelNetworks:
        """Return the same networks without the states that `restrict` forbids."""
        blocks = {n: restrict_variants(n, nets, restrict) for n, nets in self.blocks.items()}
        return ModelNetworks(self.runs, apply_restriction("", self.top, restrict), blocks)


def build_networks(
    coarse: CoarseGraph,
    strategies: Mapping[str, BlockStrategies],
    model: CostModel,
    caches: dict[str, BlockCache] | None = None,
    operators: dict[str, OperatorCache] | None = None,
    at_least: bool = False,
) -> ModelNetworks:
    """Build the networks of the top block and of every repeated block.

    `strategies` are the operator strategies by block; the name of the top block is "". `caches` hold values of earlier networks of the
    same mesh, with other ZeRO stages or recomputation. `operators` hold those of earlier networks on any mesh of the cluster.
    `at_least`: count only the memory that is held while the loss runs, so that no plan's sum is above its simulated peak.
    """
    caches, operators = {} if caches is None else caches, {} if operators is None else operators
    graph = coarse.graph
    any_cache = next(iter(caches.values()), BlockCache())
    for name in ("", *coarse.blocks):
        caches.setdefault(name, any_cache.of_block(operators.setdefault(name, OperatorCache())))
    runs, inside = find_runs(graph.top)
    repeats = graph.num_repeats
    saved_by_readers = results_saved_by_readers(graph, in_all_copies=at_least)
    blocks: dict[str, dict[str, Network]] = {}
    for name, block in coarse.blocks.items():
        blocks[name] = {}
        for variant, kept_ops in recompute_policies(block.block, model.workload.recompute).items():
            keeps_all = variant == "none"
            reruns = {} if keeps_all else rerun_ops(block.block, kept_ops)
            # One copy at a time is recomputed and holds its activations, so each of the copies bears 1 / repeats of them. When forward
            # ends no copy holds them, and in backward only one does: T5's sum counts a layer of the encoder and one of the decoder.
            saved_share = 1.0 if keeps_all else 0.0 if at_least else 1 / repeats[name]
            options = UnitOptions(
                repeats[name],
                reruns,
                kept_ops,
                saved_share,
                saved_by_readers=saved_by_readers[name],
                at_least=at_least and keeps_all,
            )
            net = build_block(block, strategies[name], model, options, caches[name])
            if not keeps_all:  # the recomputation starts from the block's inputs
                activations = (i for i in block.block.inputs if block.block.values[i].kind == "activation")
                net.saved_values.update(activations)
            blocks[name][variant] = net
    mark_saved_chain_tensors(runs, graph.blocks, blocks)
    options = UnitOptions(
        saved_by_calls=_values_saved_by_calls(graph, blocks),
        skipped_values=inside,
        ends=ops_at_the_ends(coarse),
        fixed_s=model.software.outside_s,
        fixed_bytes=graph.buffer_bytes,
        at_least=at_least,
    )
    top = build_block(coarse.top, strategies[""], model, options, caches[""])
    add_inputs_saved_by_some(graph, blocks, top.saved_values, at_least)
    _require_replicated_results(coarse.top.block, top)
    return ModelNetworks(runs, top, blocks)


def _values_saved_by_calls(graph: Graph, blocks: Nets) -> set[int]:
    """Return the values of the top block that calls of repeated blocks save for backward under every policy of recomputation."""
    always = {name: values_always_saved(variants) for name, variants in blocks.items()}
    return {
        outer
        for call in graph.calls()
        for inner, outer in zip(
            (*graph.blocks[call.block].inputs, *graph.blocks[call.block].outputs),
            (*call.inputs, *call.outputs),
            strict=True,
        )
        if inner in always[call.block]
    }


def build_problem(
    coarse: CoarseGraph,
    strategies: Mapping[str, BlockStrategies],
    model: CostModel,
    restrict: Restriction | None = None,
    uniform: bool = False,
    networks: ModelNetworks | None = None,
) -> Problem:
    """Build the folded network of a model on one mesh, ready to be solved.

    `restrict` forbids states (see `planning.methods`). `uniform`: all copies of a run pass the residual stream on in one state.
    `networks` are those of `build_networks`, if the caller has them. Raises TooWide.
    """
    nets = networks or build_networks(coarse, strategies, model)
    blocks: dict[str, dict[str, CompiledNetwork]] = {}
    pool = TablePool()
    for name, variants in nets.blocks.items():
        first, *others = restrict_variants(name, variants, restrict).items()
        compiled_first = compile_network(first[1], boundary_variables(coarse.graph.blocks[name]), pool)
        # Variants differ in their costs only. So the states are pruned, and the order is chosen, once for all of them.
        compiled_others = {variant: compile_like(compiled_first, net) for variant, net in others}
        blocks[name] = {first[0]: compiled_first} | compiled_others
    pool.forget_whole_tables()
    return assemble_problem(
        coarse, strategies, model, nets.runs, apply_restriction("", nets.top, restrict), blocks, uniform
    )


def assemble_problem(
    coarse: CoarseGraph,
    strategies: Mapping[str, BlockStrategies],
    model: CostModel,
    runs: list[Run],
    top: Network,
    blocks: dict[str, dict[str, CompiledNetwork]],
    uniform: bool = False,
    largest: float | None = None,
) -> Problem:
    """Put compiled blocks and the top network together to a folded network.

    Raises TooWide if the top network needs a table of more than `largest` entries (default: MAX_TABLE).
    """
    problem = Problem(coarse, model, runs, CompiledNetwork(top, (), {}, [], []), blocks, strategies, uniform)
    problem = replace(problem, scopes={k: _run_scope(problem, run) for k, run in enumerate(runs)})
    return replace(problem, top=_compile_top(problem, top, largest))


def restrict_variants(name: str, nets: Mapping[str, Network], restrict: Restriction | None) -> Mapping[str, Network]:
    """Remove the states that `restrict` forbids from the networks of all variants of a block.

    `restrict` is applied once, since variants have the same variables and states.
    """
    first, net = next(iter(nets.items()))
    # Only the added factors are passed on: the others of a variant have costs of their own.
    first_restricted = apply_restriction(name, net, restrict)
    added = first_restricted.factors[len(net.factors) :]
    # Without new factors the networks stay the same objects, and all that is cached for them stays in use.
    if not added:
        return nets
    return {v: first_restricted if v == first else replace(n, factors=[*n.factors, *added]) for v, n in nets.items()}


def apply_restriction(name: str, net: Network, restrict: Restriction | None) -> Network:
    """Remove the states that `restrict` forbids from a copy of a block's network."""
    if restrict is None:
        return net
    copy = replace(net, factors=list(net.factors))
    restrict.apply(name, copy)
    return copy


def _require_replicated_results(block: Block, net: Network) -> None:
    """Add the constraint that the model's results (the loss) are Replicate."""
    for value in block.outputs:
        name = tensor_name(value)
        if name in net.tensors:
            states = net.tensors[name]
            # Placement code 0 is Replicate on every axis.
            is_replicated = (states.forward == 0) & (states.gradient == 0)
            net.factors.append(allow_only(name, is_replicated))


class Restriction:
    """A rule that forbids states of a network: the base class of usual layouts and of the papers' methods. It forbids nothing itself."""

    def apply(self, block: str, net: Network) -> None:
        """Add factors to `net` that forbid states, the same in all variants of `block` (its name; "" is the top block)."""


def boundary_variables(block: Block) -> tuple[str, ...]:
    """Return the variables at a block's boundary: inputs and outputs that are not constants, each once."""
    both = (*block.inputs, *block.outputs)
    return tuple(dict.fromkeys(tensor_name(v) for v in both if block.values[v].kind != "constant"))


def compile_network(net: Network, boundary: tuple[str, ...], pool: TablePool | None = None) -> CompiledNetwork:
    """Remove states that no solution uses, merge factors of the same variables, and choose an order. Raises TooWide."""
    return with_elimination_order(prune_states(net, pool), boundary)


def with_elimination_order(pruned: CompiledNetwork, wanted_boundary: tuple[str, ...]) -> CompiledNetwork:
    """Choose an order in which all variables of a pruned network but the boundary's are eliminated. Raises TooWide."""
    boundary = tuple(v for v in wanted_boundary if v in pruned.alive)
    return replace(
        pruned,
        boundary=boundary,
        sequence=choose_elimination_order(pruned.sizes, [f.vars for f in pruned.factors], boundary),
        orders={},
    )


def compile_like(first: CompiledNetwork, net: Network) -> CompiledNetwork:
    """Compile another variant of the block whose `first` variant is compiled.

    Variables, states and constraints are the same; only costs differ.
    """
    merged = first.pool.merge(net)
    return replace(first, net=net, factors=[first.pool.select(merged[f.vars], first.alive) for f in first.factors])


def prune_states(net: Network, pool: TablePool | None = None) -> CompiledNetwork:
    """Remove states that no solution uses (arc consistency), and merge factors of the same variables.

    A state is removed if, in one of its factors, it goes with no state of the other variable that is left. A removal may make
    another state impossible, so the factors around a changed variable are looked at again. `pool`: that of the model's other blocks.
    """
    alive: dict[str, Bools] = {v: np.ones(n, dtype=bool) for v, n in net.sizes.items()}
    pool = TablePool() if pool is None else pool
    merged = pool.merge(net)
    possible_states: dict[int, tuple[Bools, ...]] = {}  # by the identity of the table, which many factors share
    factors_of: dict[str, list[tuple[Factor, int]]] = {v: [] for v in alive}
    for f in merged.values():
        if (table := id(f.allowed)) not in possible_states:
            both = f.allowed if len(f.vars) == 2 else f.allowed[:, None]
            possible_states[table] = np.asarray(both.any(axis=1)), np.asarray(both.any(axis=0))
        for axis, (v, possible) in enumerate(zip(f.vars, possible_states[table], strict=False)):
            # What one factor forbids by itself goes first, so the loop starts only from variables that lost a state.
            alive[v] = alive[v] & possible
            if len(f.vars) == 2:
                factors_of[v].append((f, axis))
    changed = {v: None for v, states in alive.items() if not states.all()}
    while changed:
        v = changed.popitem()[0]
        for f, axis in factors_of[v]:
            other = f.vars[1 - axis]
            # [state of the other]: whether it goes with a state that is left; a product of truth values is "and", a sum "or"
            remaining = alive[other] & (alive[v] @ f.allowed if axis == 0 else f.allowed @ alive[v])
            if remaining.tobytes() != alive[other].tobytes():
                alive[other] = remaining
                changed[other] = None
    index = {v: pool.states(states) for v, states in alive.items()}
    return CompiledNetwork(net, (), index, [pool.select(f, index) for f in merged.values()], [], pool=pool)


def boundary_pairs(problem: Problem, run: Run) -> list[tuple[str, str]]:
    """Return the pairs (top variable, boundary variable of the block) of a run: inputs of its first call, outputs of its last."""
    block, compiled = problem.coarse.graph.blocks[run.block], problem.first_variant(run.block)
    outer = [*run.calls[0].inputs, *run.calls[-1].outputs]
    inner = [*block.inputs, *block.outputs]
    both = [(tensor_name(o), tensor_name(i)) for i, o in zip(inner, outer, strict=True)]
    return [(o, i) for o, i in both if i in compiled.boundary]


def _run_scope(problem: Problem, run: Run) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o for o, _ in boundary_pairs(problem, run)))


def restricted_to_runs(problem: Problem, top: Network) -> Network:
    """Remove the states of the top network that its runs of blocks cannot take."""
    factors = list(top.factors)
    for run in problem.runs:
        alive = problem.first_variant(run.block).alive
        for outer, port in boundary_pairs(problem, run):
            ok = np.zeros(top.sizes[outer], dtype=bool)
            # Both ends number the states of one tensor alike, so the block's numbers index the top variable.
            ok[alive[port]] = True
            factors.append(allow_only(outer, ok))
    return replace(top, factors=factors)


def _compile_top(problem: Problem, top: Network, largest: float | None) -> CompiledNetwork:
    # States are numbered as in `top`, which other problems share, so `net` is `top` and not the copy with the constraints of the runs.
    compiled = replace(prune_states(restricted_to_runs(problem, top)), net=top)
    # A run is one table over all top variables that it touches, so the order must count it, although it is no factor yet.
    scopes = [f.vars for f in compiled.factors] + [problem.scopes[k] for k in range(len(problem.runs))]
    compiled.sequence = choose_elimination_order(compiled.sizes, scopes, (), largest)
    return compiled
