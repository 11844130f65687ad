"""The cost network with every copy of every block written out, before any pruning, for an independent solver.

Nothing of the folded search is used but the block networks themselves: no arc consistency, no elimination, no powers. The
step's time is not a sum (`cost.step_time`), so the network says it in two ways:

* `unary` and `pairwise` hold one number per entry, the weighted sum of the components at the shares of the step's maxima
  and the prices of memory that bound the answer. Its least sum is `optimum`: a solver that finds the same proves the
  elimination, the powers and the pruning.
* `components` holds every component of every entry, `units` which variables belong to one unit, `step` the form of the
  step's time, `limits` the memory. A mixed-integer solver that minimises the form proves `value`, the claimed answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner_core.core import Call
from planner_core.cost import Component, Shares
from planner_core.planning.session import Planner, meshes
from planner_core.search import Assignment, Objective, best_shares, objective_of, search, solve
from planner_core.search.network import Factor, Network, Problem, tensor_name

INFINITE = 1e12
"""Stands for an impossible combination; real costs are seconds and far smaller."""


def network_json(planner: Planner) -> dict[str, Any]:
    """The `network --json` object of docs/CONTRACT.md, on the first mesh asked for, and what the search claims of it."""
    problem = planner.problem(meshes(planner.request, planner.cluster)[0])
    kind = planner.request.objective
    budget = planner.budget if planner.request.memory_gb is not None else float("inf")
    answer = search(problem, objective=kind, budget=budget)
    objective = relaxation(problem, kind, answer.assignment, answer.prices)
    relaxed = solve(problem, objective)
    data = unfold_problem(problem, objective, answer.assignment)
    data["optimum"] = relaxed.bound if relaxed else INFINITE
    data["value"] = answer.value if answer.assignment else None
    data["limits"] = {} if budget == float("inf") else {"after_forward": budget, "after_backward": budget}
    return data


def relaxation(
    problem: Problem, kind: str, found: Assignment | None, prices: tuple[float, float] = (0.0, 0.0)
) -> Objective:
    """The objective as a plain sum: at the shares that suit an assignment, and at prices of memory."""
    free = objective_of(problem, kind)
    shares = best_shares(free, [found.totals], Shares()) if found else Shares()
    return replace(free.priced(*prices), fixed=shares)


def unfold_problem(problem: Problem, objective: Objective, found: Assignment | None = None) -> dict[str, Any]:
    """Variables, unary and pairwise tables of all copies, each block in the variant that `found` runs it in (or its first)."""
    writer = _Writer(objective.weights())
    top = problem.top.net
    writer.unit({name: name for name in top.sizes}, top, top.factors)
    for number, (call, variant) in enumerate(_calls(problem, found)):
        net = problem.blocks[call.block][variant].net
        names = _names(problem, call, net)
        writer.unit({v: names.get(v, f"{number}:{call.prefix}:{v}") for v in net.sizes}, net, net.factors)
    for outer, net, port in _between(problem):
        kept = np.zeros((len(Component), net.sizes[port]))
        kept[Component.AFTER_FORWARD] = net.tensors[port].local_bytes
        writer.factor((outer,), kept, np.ones(net.sizes[port], dtype=bool))
    step = problem.model.step_time
    return {
        "variables": writer.variables, "unary": writer.unary, "pairwise": writer.pairwise, "infinite": INFINITE,
        "components": {"names": [c.name.lower() for c in Component], "factors": writer.factors}, "units": writer.units,
        "step": {"accumulate": step.accumulate, "contention": step.contention},
    }  # fmt: skip


def _calls(problem: Problem, found: Assignment | None) -> Iterator[tuple[Call, str]]:
    """Every call with the variant it runs in."""
    for number, call in enumerate(problem.coarse.graph.calls()):
        yield call, found.copies[number].variant if found else next(iter(problem.blocks[call.block]))


def _names(problem: Problem, call: Call, net: Network) -> dict[str, str]:
    """The block's boundary variables by the names of the top block's."""
    block = problem.coarse.graph.blocks[call.block]
    pairs = zip((*block.inputs, *block.outputs), (*call.inputs, *call.outputs), strict=True)
    return {tensor_name(i): tensor_name(o) for i, o in pairs if tensor_name(i) in net.sizes}


def _between(problem: Problem) -> Iterator[tuple[str, Network, str]]:
    """The tensors between two copies of a run that are kept for backward: name, the block's network, its port."""
    for run in problem.runs:
        net = problem.compiled(run.block).net
        if run.chain_in >= 0 and net.keeps_between:
            port = tensor_name(problem.coarse.graph.blocks[run.block].inputs[run.chain_in])
            for call in run.calls[1:]:
                yield tensor_name(call.inputs[run.chain_in]), net, port


@dataclass
class _Writer:
    """Collects tables by variable name."""

    weights: np.ndarray[Any, Any]
    variables: list[dict[str, Any]] = field(default_factory=list)
    unary: dict[str, list[float]] = field(default_factory=dict)
    pairwise: list[dict[str, Any]] = field(default_factory=list)
    factors: list[dict[str, Any]] = field(default_factory=list)
    units: list[list[int]] = field(default_factory=list)

    def unit(self, names: Mapping[str, str], net: Network, factors: list[Factor]) -> None:
        """One unit under the given variable names; `units` lists the numbers of its factors."""
        for local, name in names.items():
            if name not in self.unary:
                self.variables.append({"name": name, "states": _labels(net, local)})
                self.unary[name] = [0.0] * net.sizes[local]
        first = len(self.factors)
        for f in factors:
            self.factor(tuple(names[v] for v in f.vars), f.cost, f.allowed)
        self.units.append(list(range(first, len(self.factors))))

    def factor(self, names: tuple[str, ...], cost: np.ndarray[Any, Any], allowed: np.ndarray[Any, Any]) -> None:
        """One table: its weighted sum for solvers of sums, its components for others."""
        table = np.where(allowed, np.tensordot(self.weights, cost, axes=1), INFINITE)
        if len(names) == 1:
            (name,) = names
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


def _labels(net: Network, local: str) -> list[str]:
    if local in net.tensors:
        states = net.tensors[local]
        return [str(states.state(s, states.index.shape[1])) for s in range(len(states))]
    node = net.nodes[local]
    lead = next(i for i, op in enumerate(node.strategy.ops) if op.name == local)
    return [",".join(node.strategy.rows[int(i)][lead].label for i in row) for row in node.index]
