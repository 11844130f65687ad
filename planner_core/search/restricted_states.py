"""If elimination needs tables that are too large: restrict the space and search it exactly, and bound the whole space.

If all copies of a block share its weights (ALBERT's layer, Zamba's attention), every weight is at the block's boundary, and the
table over the boundary is too large. The same holds for a block that shares keys and values with layers before it (Gemma 3n).

*Restriction* (`restrict_states`): each shared weight gets the best state for a single copy, and tensors pass between blocks in
fewer states, until every table can be made; at last weights of the top block have stage 0 or the highest. The answer is the best
plan of this smaller space.

*Relaxation* (`relax`): each copy may have what it shares in a state of its own. The least cost of this larger space is a lower
bound on every plan of the whole space:

    best of the larger space  ≤  best of the whole space  ≤  best of the smaller space

Example: a block of 12 copies shares 8 weights of 10 states each. A table over them has 10^8 entries, and 7 · 10^7 are allowed.
With the 8 weights fixed at one state each, the table has one entry per pair of states of the residual stream.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner_core.core import Block, P, Placement, R, Shard
from planner_core.cost import Bools, Component, CostVector, Floats
from planner_core.ops import CoarseGraph
from planner_core.search.algebra.elimination import eliminate
from planner_core.search.algebra.elimination_order import TooWide
from planner_core.search.algebra.reduced_costs import least_cost_bound
from planner_core.search.budget.limits import UNPROVEN
from planner_core.search.folded_solver import FoldedTables
from planner_core.search.lagrangian import make_objective, search_roughly, search_within_budget
from planner_core.search.network.factors import Costs, Factor, Network, TablePool, allow_only, tensor_name
from planner_core.search.network.folded import (
    CompiledNetwork,
    ModelNetworks,
    Problem,
    Restriction,
    apply_restriction,
    assemble_problem,
    boundary_variables,
    compile_like,
    compile_network,
    prune_states,
    with_elimination_order,
)
from planner_core.search.network.search_cache import Answer
from planner_core.search.network.states import NO_STAGE, TensorStates, WeightState
from planner_core.search.objective import EVEN_SHARES
from planner_core.search.units.dual_shares import best_shares
from planner_core.search.units.tables import weighted_tables

RESTRICTED_NOTE = (
    "too many tensors are shared between the parts of this model for an exact search on this mesh: "
    "the best plan of a smaller space"
)
NO_BOUND_NOTE = ", with no bound on what is better"

_TIME_PRICES = CostVector(forward=1, backward=1, forward_once=1, backward_once=1, step=1).array()
"""The prices at which the states of shared weights are chosen: seconds of compute, waits and traffic once a step, most of which
shows in the step's time."""


# --- fewer states ---------------------------------------------------------------------------------------------


def _without_partials(states: TensorStates) -> Bools:
    """[state]: neither the tensor nor its gradient is Partial on any axis."""
    return _on_every_axis(states, lambda forward, gradient: P not in (forward, gradient))


def _batch_or_replicate(states: TensorStates) -> Bools:
    """[state]: on every axis Replicate or Shard(0), and the gradient is not Partial."""
    return _on_every_axis(states, lambda forward, gradient: forward in (R, Shard(0)) and gradient != P)


def _same_on_every_axis(states: TensorStates) -> Bools:
    """[state]: Replicate on all axes, or Shard(0) on all axes."""
    return np.asarray(_batch_or_replicate(states) & (states.index == states.index[:, :1]).all(axis=1))


def _replicate(states: TensorStates) -> Bools:
    """[state]: the tensor and its gradient are Replicate on all axes."""
    return np.asarray((states.forward == 0) & (states.gradient == 0))


def _lowest_and_highest_stage(states: TensorStates) -> Bools:
    """[state] of a weight: on every axis its ZeRO stage, where it has one, is 0 or the highest that it may have.

    The highest is kept, since only there a plan may fit.
    """
    stages = np.array([stage for *_, stage in states.axis_states])
    return np.asarray(np.isin(stages, (NO_STAGE, 0, stages.max()))[states.index].all(axis=1))


def _on_every_axis(states: TensorStates, ok: Callable[[Placement, Placement], bool]) -> Bools:
    return np.asarray(np.array([ok(*pair) for pair in states.axis_states])[states.index].all(axis=1))


LEVELS: tuple[Callable[[TensorStates], Bools], ...] = (
    _without_partials,
    _batch_or_replicate,
    _same_on_every_axis,
    _replicate,
)
"""The states that tensors between blocks may have: each level allows fewer."""


@dataclass
class StateRestriction(Restriction):
    """A restriction on top of an `inner` one: `allowed` has the states [state] that remain, by block and variable."""

    inner: Restriction | None
    allowed: Mapping[tuple[str, str], Bools]

    def apply(self, block: str, net: Network) -> None:
        """Add a factor for each restricted variable."""
        if self.inner is not None:
            self.inner.apply(block, net)
        net.factors += [allow_only(name, ok) for (where, name), ok in self.allowed.items() if where == block]


def restrict_states(
    networks: ModelNetworks,
    make_problem: Callable[[ModelNetworks, Restriction], Problem],
    coarse: CoarseGraph,
    restrict: Restriction | None,
) -> Problem:
    """Return the problem that `make_problem` makes of the networks under a restriction that gives up few states. Raises TooWide if
    not even the strongest restriction is enough."""
    # The cost of a shared weight is in the top block. A single copy must count its part of it, or it would choose what costs most there.
    shared = _move_weight_costs_to_calls(networks, coarse, _TIME_PRICES)
    allowed: dict[tuple[str, str], Bools] = {}
    fixed_weights: dict[int, int] = {}  # value of the top block -> its state
    calls = [c.block for c in coarse.graph.calls()]
    # Most work first: the first block that reads a shared weight chooses its state.
    for name in sorted(networks.blocks, key=lambda n: -calls.count(n) * len(coarse.graph.blocks[n].ops)):
        allowed |= _restrict_block(name, _first_variant(shared.blocks[name]), coarse, restrict, fixed_weights)
    top = networks.top
    allowed |= {
        ("", tensor_name(o)): np.arange(top.sizes[tensor_name(o)]) == s
        for o, s in fixed_weights.items()
        if tensor_name(o) in top.sizes
    }
    levels = [
        _allowed_by_level("", range(len(coarse.graph.top.values)), coarse.graph.top, top, level) for level in LEVELS
    ]
    # No level narrows the table of a weight and its one operator, e.g. of an embedding: of two axes it has 100 * 36 entries with all
    # ZeRO stages, and 36 * 36 with two of them.
    of_two_stages = {
        ("", v): _lowest_and_highest_stage(states)
        for v, states in top.tensors.items()
        if isinstance(states.axis_states[0], WeightState) and ("", v) not in allowed
    }
    # Give up as little as possible: at first only the states of shared weights, then also more and more states between blocks.
    for further in ({}, *levels, levels[-1] | of_two_stages):
        try:
            return replace(
                make_problem(networks, StateRestriction(restrict, allowed | further)),
                unrestricted=networks.restricted(restrict),
            )
        except TooWide as error:
            error_of_last = error
    raise error_of_last


def _move_weight_costs_to_calls(networks: ModelNetworks, coarse: CoarseGraph, prices: Floats) -> ModelNetworks:
    """Move the cost of each weight that calls share from the top block to these calls, in equal parts.

    The costs of a whole plan stay the same, except that the weight's seconds are a plain sum at `prices` [component], as they
    are in the top block.
    """
    calls = list(coarse.graph.calls())
    uses = Counter(o for call in calls for o in call.inputs)
    cost = {f.vars[0]: f.cost for f in networks.top.factors if len(f.vars) == 1}
    blocks = {
        name: {v: replace(net, factors=list(net.factors)) for v, net in nets.items()}
        for name, nets in networks.blocks.items()
    }
    top = replace(networks.top, factors=list(networks.top.factors))
    for name, nets in blocks.items():
        block_calls = [c for c in calls if c.block == name]
        for position, v in _input_weights(coarse.graph.blocks[name]):
            outer = [c.inputs[position] for c in block_calls]
            # A weight that costs c[s] and is used by 12 calls: each call gets c[s] / 12, the top block gets -c[s] / 12 for each of them.
            # If all calls have the weight in state s, the parts cancel, so no plan's cost changes.
            part = np.min([cost[tensor_name(o)] / uses[o] for o in outer], axis=0)
            allowed = np.ones(part.shape[1:], dtype=bool)
            plain = part.copy()
            # A sum of maxima is not linear in its sides, so only seconds that are a plain sum can be moved from block to block.
            plain[: Component.STEP] = 0.0
            plain[Component.STEP] = prices[: Component.STEP + 1] @ part[: Component.STEP + 1]
            costs = Costs.of(plain)  # one object for all variants, so that they share the table
            for net in nets.values():
                net.factors.append(Factor((tensor_name(v),), costs, allowed))
            top.factors += [Factor((tensor_name(o),), -part, allowed) for o in outer]
    return ModelNetworks(networks.runs, top, blocks)


def _first_variant(variants: Mapping[str, Network]) -> Network:
    return next(iter(variants.values()))


def _restrict_block(
    name: str, net: Network, coarse: CoarseGraph, restrict: Restriction | None, fixed_weights: dict[int, int]
) -> dict[tuple[str, str], Bools]:
    """Return the states [state] that remain of a block's variables, so that its table can be made. The states that it chooses for shared
    weights are put into `fixed_weights`."""
    block = coarse.graph.blocks[name]
    allowed: dict[tuple[str, str], Bools] = {}
    if _can_be_eliminated(apply_restriction(name, net, restrict), boundary_variables(block)):
        return allowed
    everywhere = range(len(block.values))
    # In this order: the tensors at the boundary in fewer and fewer states, then all activations. The first way that fits is taken.
    limits = [
        _allowed_by_level(name, v, block, net, level)
        for v in ((*block.inputs, *block.outputs), everywhere)
        for level in LEVELS
    ]
    for allowed in limits:
        restricted_net = apply_restriction(name, net, StateRestriction(restrict, allowed))
        if _can_be_eliminated(restricted_net, boundary_variables(block)):
            return allowed
        try:
            states = _best_shared_weight_states(name, block, restricted_net, coarse, fixed_weights)
        except TooWide:
            continue
        allowed |= {(name, v): np.arange(net.sizes[v]) == s for v, s in states.items()}
        if states and _can_be_eliminated(
            apply_restriction(name, net, StateRestriction(restrict, allowed)), boundary_variables(block)
        ):
            _fix_shared_weights(name, states, block, coarse, fixed_weights)
            return allowed
    return allowed


def _can_be_eliminated(net: Network, keep: tuple[str, ...]) -> bool:
    try:
        compile_network(net, keep)
    except TooWide:
        return False
    return True


def _allowed_by_level(
    name: str, values: Iterable[int], block: Block, net: Network, level: Callable[[TensorStates], Bools]
) -> dict[tuple[str, str], Bools]:
    """Return the states that a level allows to those `values` that are activations, by block and variable."""
    names = {tensor_name(v) for v in values if block.values[v].kind == "activation"}
    return {(name, v): level(net.tensors[v]) for v in sorted(names & net.tensors.keys())}


def _input_weights(block: Block) -> list[tuple[int, int]]:
    """Position and number of each weight that is an input of a block."""
    return [(p, v) for p, v in enumerate(block.inputs) if block.values[v].kind == "parameter"]


def _best_shared_weight_states(
    name: str, block: Block, net: Network, coarse: CoarseGraph, fixed_weights: Mapping[int, int]
) -> dict[str, int]:
    """Return the state of each weight that is an input of the block: the best for one copy, if no other block has fixed it."""
    calls = [c for c in coarse.graph.calls() if c.block == name]
    for position, v in _input_weights(block):
        outer = [c.inputs[position] for c in calls]
        fixed_state = next((fixed_weights[o] for o in outer if o in fixed_weights), None)
        # Another block has chosen this weight's state already; a weight has one state in the whole model.
        if fixed_state is not None:
            net.factors.append(allow_only(tensor_name(v), np.arange(net.sizes[tensor_name(v)]) == fixed_state))
    shared = {tensor_name(v) for _, v in _input_weights(block)}
    compiled = compile_network(net, tuple(k for k in boundary_variables(block) if k not in shared))
    # The level of `net` may leave an operator no strategy at all. Example: HRM-text, whose later levels are then looked at.
    if not all(map(len, compiled.alive.values())):
        return {}
    link = eliminate(
        compiled.sizes, weighted_tables(compiled.factors, _TIME_PRICES), compiled.sequence, compiled.boundary
    )
    best = np.unravel_index(int(link.table.argmin()), link.table.shape) if link.scope else ()
    states = link.assignment({k: int(s) for k, s in zip(link.scope, best, strict=True)})
    return {v: int(compiled.alive[v][states[v]]) for v in shared if v in states}


def _fix_shared_weights(
    name: str, states: Mapping[str, int], block: Block, coarse: CoarseGraph, fixed_weights: dict[int, int]
) -> None:
    for position, v in _input_weights(block):
        for call in coarse.graph.calls():
            if call.block == name:
                fixed_weights.setdefault(call.inputs[position], states[tensor_name(v)])


# --- a bound on what was given up -----------------------------------------------------------------------------


def with_relaxed_bound(problem: Problem, answer: Answer, objective: str, budget: float) -> Answer:
    """Return the answer of a restricted problem, with a lower bound for the whole space; the bound is 0 if none was found.

    The cost of a shared weight is moved from the top block to the blocks that use it. That is exact only for a plain sum, so the
    top block is priced as a plain sum at some shares of its maxima, which is a lower bound.
    """
    assert answer.assignment is not None
    # The walk may let a plan through whose sum exceeds the budget. A bound must hold for that plan, too. Without a budget no sum counts.
    at_least = problem.make_at_least if budget < math.inf else None
    networks = (at_least() if at_least is not None else problem).unrestricted
    assert networks is not None
    unpriced = make_objective(problem, objective)
    try:
        shares = best_shares(unpriced, [answer.assignment.top_totals], EVEN_SHARES)
        prices = unpriced.step_time.linear(shares).array()
        relaxed = relax(problem, _move_weight_costs_to_calls(networks, problem.coarse, prices))
        bound = search_within_budget(
            relaxed, objective=objective, budget=budget, limits=UNPROVEN, top_shares=shares
        ).bound
    except TooWide:
        bound = _bound_without_tables(problem, networks, objective)
    return replace(answer, bound=min(bound, answer.value))


def bound_of_whole_space(problem: Problem, objective: str, budget: float = math.inf) -> float:
    """Return a lower bound on the value of every plan of the whole space within `budget` bytes per GPU, by default of any memory; 0 if
    none was found."""
    assignment = search_roughly(problem, objective)
    if problem.unrestricted is None:
        return assignment.bound if assignment else math.inf
    return (
        with_relaxed_bound(problem, Answer(assignment, math.inf, 0.0, 0.0), objective, budget).bound
        if assignment
        else 0.0
    )


def relax(problem: Problem, networks: ModelNetworks, largest: float | None = None) -> Problem:
    """Return a problem with a larger space: copies of a block may have shared tensors in states of their own, first the weights.

    As few tensors are let go as it takes to make every table. Raises TooWide if that is not enough.
    """
    blocks: dict[str, dict[str, CompiledNetwork]] = {}
    pool = TablePool()
    for name, nets in networks.blocks.items():
        pruned = prune_states(_first_variant(nets), pool)
        boundary = boundary_variables(problem.coarse.graph.blocks[name])
        releasable = _releasable_ports(problem, name, networks)
        # Each tensor that is let go makes the block's table smaller and the space larger, so the bound stays a bound but falls.
        while name not in blocks:
            try:
                first = with_elimination_order(pruned, boundary)
                blocks[name] = {v: compile_like(first, net) if k else first for k, (v, net) in enumerate(nets.items())}
            except TooWide:
                if not releasable:
                    raise
                released = releasable.pop()
                boundary = tuple(k for k in boundary if k != released)
    pool.forget_whole_tables()
    return assemble_problem(
        problem.coarse, problem.strategies, problem.model, networks.runs, networks.top, blocks, largest=largest
    )


def _bound_without_tables(problem: Problem, networks: ModelNetworks, objective: str) -> float:
    """Return a lower bound if the top network is too wide too. It ignores the memory budget. 0 if none was found."""
    try:
        relaxed = relax(problem, networks, math.inf)
    except TooWide:
        return 0.0
    tables = FoldedTables(relaxed, replace(make_objective(relaxed, objective), top_shares=EVEN_SHARES)).tables
    return least_cost_bound(tables, [id(table) for _, table in tables])


def _releasable_ports(problem: Problem, name: str, networks: ModelNetworks) -> list[str]:
    """Return the ports of a block that copies may have in states of their own. The last one is let go first."""
    block = problem.coarse.graph.blocks[name]
    runs = [r for r in networks.runs if r.block == name and r.chain_in >= 0]
    ends = {tensor_name(v) for r in runs for v in (block.inputs[r.chain_in], block.outputs[r.chain_out])}
    weights = {tensor_name(v) for _, v in _input_weights(block)}
    return sorted(
        (p for p in boundary_variables(block) if p not in ends),
        key=lambda p: (p in weights, _first_variant(networks.blocks[name]).sizes[p]),
    )
