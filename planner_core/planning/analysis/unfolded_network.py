"""The cost network with every copy of every block written out, before any pruning, for an independent solver.

Of the folded search it uses the block networks alone. Arc consistency, elimination and powers are not used. The step's time is
not a sum (`cost.step_time`), so the network has two forms:

* `unary` and `pairwise` have one number per entry: the weighted sum of the components, at those shares of the step's maxima and
  those prices of memory that bound the answer. The least sum is `optimum`. A solver that finds the same proves the elimination,
  the powers and the pruning.
* `components` has every component of every entry. `units` says which factors belong to one unit, `step` has the form of the step's
  time, and `limits` has the memory. A mixed-integer solver that minimises this form proves `value`, the claimed answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner_core.core import Call
from planner_core.cost import Component, Shares
from planner_core.planning.planner import Planner, candidate_meshes
from planner_core.search import Assignment, Objective, best_shares, make_objective, search_within_budget, solve_folded
from planner_core.search.network import Factor, Network, Problem, tensor_name

INFINITE = 1e12
"""The cost of an impossible combination. Real costs are seconds, and far smaller."""


def network_json(planner: Planner) -> dict[str, Any]:
    """Return the object of `network --json` (docs/CONTRACT.md) for the first mesh of the request, with the answer that the search
    claims."""
    mesh, kind = candidate_meshes(planner.request, planner.cluster)[0], planner.request.objective
    # Without a stated budget memory limits nothing, so that a solver of plain sums can check the answer.
    budget = planner.budget if planner.request.memory_gb is not None else float("inf")
    problem = planner.problem(mesh)
    answer = search_within_budget(problem, objective=kind, budget=budget)
    objective = relaxed_objective(problem, kind, answer.assignment, answer.prices)
    relaxed = solve_folded(problem, objective)
    data = unfold_problem(problem, objective, answer.assignment)
    data["optimum"] = relaxed.bound if relaxed else INFINITE
    data["value"] = answer.value if answer.assignment else None
    data["limits"] = {} if budget == float("inf") else {"after_forward": budget, "after_backward": budget}
    return data


def relaxed_objective(
    problem: Problem, kind: str, assignment: Assignment | None, prices: tuple[float, float]
) -> Objective:
    """Return the objective as a plain sum: at the shares that suit an assignment best, and at `prices` of memory."""
    # At fixed shares the maxima are sums, which any solver of sums can minimise; at the best shares their least sum is the bound.
    objective = make_objective(problem, kind)
    shares = best_shares(objective, [assignment.totals], Shares()) if assignment else Shares()
    return replace(objective.with_prices(*prices), fixed_shares=shares)


def unfold_problem(problem: Problem, objective: Objective, assignment: Assignment | None = None) -> dict[str, Any]:
    """Variables, unary tables and pairwise tables of all copies. Each copy is in the variant that `assignment` has, or in the first."""
    writer = _Writer(objective.weights())
    top = problem.top.net
    writer.unit({name: name for name in top.sizes}, top, top.factors)
    for number, (call, variant) in enumerate(_calls_with_variants(problem, assignment)):
        net = problem.blocks[call.block][variant].net
        names = outer_names(problem, call, net)
        writer.unit({v: names.get(v, f"{number}:{call.prefix}:{v}") for v in net.sizes}, net, net.factors)
    # A tensor between two copies is of neither network alone, so what it keeps is a table of its own.
    for outer, net, port in _saved_between_copies(problem):
        saved_bytes = np.zeros((len(Component), net.sizes[port]))
        saved_bytes[Component.AFTER_FORWARD] = net.tensors[port].local_bytes
        writer.factor((outer,), saved_bytes, np.ones(net.sizes[port], dtype=bool))
    step = problem.model.step_time
    return {
        "variables": writer.variables,
        "unary": writer.unary,
        "pairwise": writer.pairwise,
        "infinite": INFINITE,
        "components": {"names": [c.name.lower() for c in Component], "factors": writer.factors},
        "units": writer.units,
        "step": {"accumulate": step.accumulate, "contention": step.contention},
    }


def _calls_with_variants(problem: Problem, assignment: Assignment | None) -> Iterator[tuple[Call, str]]:
    """Yield every call with its variant."""
    for number, call in enumerate(problem.coarse.graph.calls()):
        yield call, assignment.copies[number].variant if assignment else next(iter(problem.blocks[call.block]))


def outer_names(problem: Problem, call: Call, net: Network) -> dict[str, str]:
    """For each boundary variable of the block: the name of the top block's variable."""
    block = problem.coarse.graph.blocks[call.block]
    pairs = zip((*block.inputs, *block.outputs), (*call.inputs, *call.outputs), strict=True)
    return {tensor_name(i): tensor_name(o) for i, o in pairs if tensor_name(i) in net.sizes}


def _saved_between_copies(problem: Problem) -> Iterator[tuple[str, Network, str]]:
    """Yield the tensors between two copies of a run that are kept for backward: name, the block's network, its port."""
    for run in problem.runs:
        net = problem.first_variant(run.block).net
        if run.chain_in >= 0 and net.saves_between:
            port = tensor_name(problem.coarse.graph.blocks[run.block].inputs[run.chain_in])
            # From the second copy on: what enters the first is a tensor of the top block, which counts it itself.
            for call in run.calls[1:]:
                yield tensor_name(call.inputs[run.chain_in]), net, port


@dataclass
class _Writer:
    """Collects the tables, by names of variables."""

    weights: np.ndarray[Any, Any]
    variables: list[dict[str, Any]] = field(default_factory=list)
    unary: dict[str, list[float]] = field(default_factory=dict)
    pairwise: list[dict[str, Any]] = field(default_factory=list)
    factors: list[dict[str, Any]] = field(default_factory=list)
    units: list[list[int]] = field(default_factory=list)

    def unit(self, names: Mapping[str, str], net: Network, factors: list[Factor]) -> None:
        """Add one unit, with the given names of variables. `units` lists the numbers of its factors."""
        for local, name in names.items():
            if name not in self.unary:
                self.variables.append({"name": name, "states": _state_labels(net, local)})
                self.unary[name] = [0.0] * net.sizes[local]
        first = len(self.factors)
        for f in factors:
            self.factor(tuple(names[v] for v in f.vars), f.cost, f.allowed)
        self.units.append(list(range(first, len(self.factors))))

    def factor(self, names: tuple[str, ...], cost: np.ndarray[Any, Any], allowed: np.ndarray[Any, Any]) -> None:
        """Add one table: its weighted sum for solvers of sums, and its components for other solvers."""
        table = np.where(allowed, np.tensordot(self.weights, cost, axes=1), INFINITE)
        if len(names) == 1:
            (name,) = names
            # Two impossible entries would add up to more than INFINITE: so every one of them has the same cost.
            self.unary[name] = [min(a + float(b), INFINITE) for a, b in zip(self.unary[name], table, strict=True)]
        else:
            self.pairwise.append({"vars": list(names), "cost": table.tolist()})
        used = np.flatnonzero(cost.reshape(len(cost), -1).any(axis=1))
        self.factors.append(
            {
                "vars": list(names),
                "allowed": allowed.tolist(),
                "cost": {Component(int(c)).name.lower(): cost[c].tolist() for c in used},
            }
        )


def _state_labels(net: Network, local: str) -> list[str]:
    if local in net.tensors:
        states = net.tensors[local]
        return [str(states.state(s, states.index.shape[1])) for s in range(len(states))]
    node = net.nodes[local]
    lead = next(i for i, op in enumerate(node.strategy.ops) if op.name == local)
    return [",".join(node.strategy.rows[int(i)][lead].name for i in row) for row in node.index]
