"""The cost network with every copy of every block written out, for an independent solver.

Nothing of the folded search is used but the block networks themselves: no elimination, no powers. A solver that
finds the same optimum therefore proves the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from planner_core.core import Call
from planner_core.planning.session import Planner, meshes
from planner_core.search import Weights, solve, weights
from planner_core.search.network import MEMORY, Compiled, Problem, tensor_name

INFINITE = 1e12
"""Stands for an impossible combination; real costs are seconds and far smaller."""


def network_json(planner: Planner) -> dict[str, Any]:
    """The `network --json` object of docs/CONTRACT.md, on the first mesh asked for, and the optimum that the folded search claims."""
    problem = planner.problem(meshes(planner.request, planner.cluster)[0])
    price = weights(planner.request.objective)
    answer = solve(problem, price)
    data = unfold_problem(problem, price)
    data["optimum"] = float(np.dot(price, answer.totals)) if answer else INFINITE
    return data


def unfold_problem(problem: Problem, price: Weights) -> dict[str, Any]:
    """Variables, unary and pairwise tables of all copies; states of equal variables are the same list."""
    writer = _Writer(price)
    top_names = {v: v for v in problem.top.alive}
    inner = _chain_values(problem)
    for run_values in inner:
        for outer, (compiled, port) in run_values.items():
            top_names[outer] = outer
            writer.variable(outer, compiled, port)
            if port_is_kept(compiled, port):
                kept = compiled.net.tensors[port].local_bytes[compiled.alive[port]]
                writer.unary(outer, price[MEMORY] * kept)
    # ports first seen from the top keep the top's numbering; a copy's table is spread onto it
    writer.network(problem.top, {v: v for v in problem.top.alive}, {})
    alive_at = {v: problem.top.alive[v] for v in problem.top.alive}
    for run_values in inner:
        alive_at.update({outer: compiled.alive[port] for outer, (compiled, port) in run_values.items()})
    for number, call in enumerate(problem.coarse.graph.calls()):
        compiled = problem.blocks[call.block]
        names = _names(problem, call, number, compiled)
        writer.network(compiled, names, alive_at)
    return {"variables": writer.variables, "unary": writer.unaries, "pairwise": writer.pairs, "infinite": INFINITE}


def port_is_kept(compiled: Compiled, port: str) -> bool:
    """Whether the block keeps this port's tensor for backward."""
    return int(port[1:]) in compiled.net.saved_ports


def _chain_values(problem: Problem) -> list[dict[str, tuple[Compiled, str]]]:
    """Top values inside runs (no variables of the top network), and a block port whose states they take."""
    found = []
    for run in problem.runs:
        block, compiled = problem.coarse.graph.blocks[run.block], problem.blocks[run.block]
        values: dict[str, tuple[Compiled, str]] = {}
        if run.chain_in >= 0:
            port = tensor_name(block.inputs[run.chain_in])
            exit_ = tensor_name(block.outputs[run.chain_out])
            use = port if port_is_kept(compiled, port) or not port_is_kept(compiled, exit_) else exit_
            values = {tensor_name(c.inputs[run.chain_in]): (compiled, use) for c in run.calls[1:]}
        found.append(values)
    return found


def _names(problem: Problem, call: Call, number: int, compiled: Compiled) -> dict[str, str]:
    block = problem.coarse.graph.blocks[call.block]
    outer = {
        tensor_name(i): tensor_name(o)
        for i, o in zip((*block.inputs, *block.outputs), (*call.inputs, *call.outputs), strict=True)
    }
    return {v: outer[v] if v in compiled.keep else f"{call.prefix}:{v}" for v in compiled.alive}


class _Writer:
    """Collects tables by variable name, in the numbering in which each variable was first declared."""

    def __init__(self, price: Weights) -> None:
        self.price = np.asarray(price)
        self.variables: list[dict[str, Any]] = []
        self.unaries: dict[str, list[float]] = {}
        self.pairs: list[dict[str, Any]] = []
        self.index: dict[str, np.ndarray[Any, Any]] = {}

    def variable(self, name: str, compiled: Compiled, local: str) -> None:
        if name in self.index:
            return
        alive = compiled.alive[local]
        self.index[name] = alive
        self.variables.append({"name": name, "states": _labels(compiled, local, alive)})
        self.unaries[name] = [0.0] * len(alive)

    def unary(self, name: str, cost: Any) -> None:
        self.unaries[name] = [min(a + float(b), INFINITE) for a, b in zip(self.unaries[name], cost, strict=True)]

    def network(self, compiled: Compiled, names: Mapping[str, str], alive_at: Mapping[str, Any]) -> None:
        """One copy of a network under the given variable names."""
        for local, name in names.items():
            self.variable(name, compiled, local)
            if name in alive_at:  # a port: states that this copy cannot take are forbidden
                possible = np.isin(self.index[name], compiled.alive[local])
                self.unary(name, np.where(possible, 0.0, INFINITE))
        for f in compiled.factors:
            table = np.where(f.allowed, np.tensordot(self.price, f.cost, axes=1), INFINITE)
            for axis, local in enumerate(f.vars):
                table = self._spread(table, axis, compiled.alive[local], self.index[names[local]])
            if len(f.vars) == 1:
                self.unary(names[f.vars[0]], table)
            else:
                self.pairs.append({"vars": [names[v] for v in f.vars], "cost": table.tolist()})

    @staticmethod
    def _spread(table: Any, axis: int, mine: Any, theirs: Any) -> Any:
        if len(mine) == len(theirs) and (mine == theirs).all():
            return table
        size = int(max(mine.max(), theirs.max())) + 1
        shape = (*table.shape[:axis], size, *table.shape[axis + 1 :])
        wide = np.full(shape, INFINITE)
        wide[(slice(None),) * axis + (mine,)] = table
        return wide.take(theirs, axis=axis)


def _labels(compiled: Compiled, local: str, alive: Any) -> list[str]:
    net = compiled.net
    if local in net.tensors:
        axes = net.tensors[local].index.shape[1]
        return [str(net.tensors[local].state(int(s), axes)) for s in alive]
    node = net.nodes[local]
    lead = next(i for i, op in enumerate(node.strategy.ops) if op.name == local)
    return [",".join(node.strategy.rows[int(i)][lead].label for i in node.index[int(s)]) for s in alive]
