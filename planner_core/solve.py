"""Solve the folded network of a whole model: block tables once, runs of equal blocks as (min, +) powers.

Tensors that all copies of a run share (an encoder's output) multiply the run's table. Its powers are found only for the
shared states that an optimum asks for: a state not yet worked out stands with a lower bound, and when the optimum
of the top network rests on none of those, it is the optimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner_core.eliminate import Elimination, Floats, Power, Table, eliminate, power, times
from planner_core.problem import Compiled, Problem, Run
from planner_core.tables import MEMORY, NUM_COMPONENTS, Factor, Network, tensor_name

Weights = tuple[float, float, float, float]
"""Prices of the components of `network`: time, memory, communication, memory at the end of backward."""
EAGER = 4
"""Runs with at most this many shared states are worked out at once."""


@dataclass
class Assignment:
    """The state of every variable: of the top block, and of each call in order. Numbers as in the networks."""

    top: dict[str, int]
    calls: list[dict[str, int]]
    totals: Floats


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a block's boundary stands: names of its shared inputs, of the chain's ends, and their top names."""

    shared: tuple[str, ...]
    entry: str
    exit: str
    top: dict[str, str]


def scalar(factors: Sequence[Factor], weights: Weights) -> list[Table]:
    """Tables of one number per entry: the weighted components, infinite where impossible."""
    w = np.asarray(weights)
    return [(f.vars, (w @ f.cost.reshape(NUM_COMPONENTS, -1)).reshape(f.allowed.shape) + f.barrier) for f in factors]


def solve(problem: Problem, weights: Sequence[Weights], switch: Mapping[int, int] | None = None) -> Assignment | None:
    """The assignment of least weighted cost, or None where there is none.

    With two `weights`, run k uses the first for its first `switch[k]` copies and the second for the rest, and
    everything else uses the last; this is how a memory budget is spent on some of the repeats.

    Tensors that all copies of a run share (an encoder's output) multiply the run's table. Its powers are found
    only for the shared states that an optimum asks for: a state not yet worked out stands with a lower bound,
    and when the optimum of the top network rests on none of those, it is the optimum.
    """
    if problem.impossible:
        return None
    solved = [
        {name: eliminate(c.sizes, scalar(c.factors, w), c.sequence, c.keep) for name, c in problem.blocks.items()}
        for w in weights
    ]
    runs = [_LazyRun(problem, k, solved, weights, (switch or {}).get(k, 0)) for k in range(len(problem.runs))]
    top = problem.top
    fixed = scalar(top.factors, weights[-1])
    while True:
        result = eliminate(top.sizes, [*fixed, *(r.table() for r in runs)], top.sequence, ())
        if not np.isfinite(result.table):
            return None
        assignment = result.assignment({})
        if not sum(r.work_out(assignment) for r in runs):
            break
    calls = [c for r in runs for c in r.walk(assignment)]
    return _finish(problem, assignment, calls)


class _LazyRun:
    """A run's table over top variables, its powers worked out per shared state when an optimum rests on it."""

    def __init__(
        self,
        problem: Problem,
        k: int,
        solved: Sequence[Mapping[str, Elimination]],
        weights: Sequence[Weights],
        switch: int,
    ) -> None:
        self.problem, self.run = problem, problem.runs[k]
        self.axes, self.compiled = _axes(problem, self.run), problem.blocks[self.run.block]
        links = [s[self.run.block] for s in solved]
        count = len(self.run.calls)
        self.links = [links[0]] * switch + [links[-1]] * (count - switch)
        self.chains: dict[int, Power] = {}
        if count == 1:
            self.current = _to_top(problem, self.axes, self.compiled, links[-1].table, self.compiled.keep)
            return
        self.pieces = [(_as_matrix(link, self.axes, self.compiled), _between(problem, self.run, w), n)
                       for link, w, n in ((links[0], weights[0], switch), (links[-1], weights[-1], count - switch)) if n]  # fmt: skip
        if problem.uniform:
            stay = np.where(np.eye(self.pieces[0][0].shape[1], dtype=bool), 0.0, np.inf)
            self.pieces = [(matrix + stay, between, n) for matrix, between, n in self.pieces]
        self.cost = self._bounds()
        if len(self.cost) <= EAGER:
            for s in range(len(self.cost)):
                self._power(s)

    def _bounds(self) -> Floats:
        """No chain is cheaper than its first and last link at their ends plus the cheapest link for every other copy."""
        first, last = self.pieces[0], self.pieces[-1]
        least = [(m + b).min(axis=(1, 2)) for m, b, _ in self.pieces]
        total = sum(x * n for x, (_, _, n) in zip(least, self.pieces, strict=True)) - least[0] - least[-1]
        if sum(n for _, _, n in self.pieces) == 1:
            return first[0].copy()
        entry = (first[0] + first[1]).min(axis=2)
        exit_ = last[0].min(axis=1)
        total = np.where(np.isfinite(total), total, np.inf)
        bound: Floats = total[:, None, None] + entry[:, :, None] + exit_[:, None, :]
        return bound

    def _power(self, s: int) -> None:
        chain: Power | None = None
        for position, (matrix, between, n) in enumerate(self.pieces):
            leaf = Power(matrix[s : s + 1])
            link = Power(leaf.cost + between)
            last = position == len(self.pieces) - 1
            piece = power(link, n) if not last else times(power(link, n - 1), leaf) if n > 1 else leaf
            chain = piece if chain is None else times(chain, piece)
        assert chain is not None
        self.chains[s] = chain
        self.cost[s] = chain.cost[0]

    def table(self) -> Table:
        """The run's costs so far: exact or a lower bound."""
        if len(self.run.calls) == 1:
            return self.current
        shape = [len(self.compiled.alive[v]) for v in self.axes.shared]
        full = self.cost.reshape(*shape, *self.cost.shape[1:])
        names = (*self.axes.shared, self.axes.entry, self.axes.exit)
        return _to_top(self.problem, self.axes, self.compiled, full, names, matrix=True)

    def work_out(self, top: Mapping[str, int]) -> bool:
        """Make the shared state that `top` uses exact; False where it was already."""
        if len(self.run.calls) == 1:
            return False
        s, _ = self._at(top)
        if s in self.chains:
            return False
        self._power(s)
        return True

    def _at(self, top: Mapping[str, int]) -> tuple[int, dict[str, int]]:
        at = {
            inner: int(self.problem.top.alive[outer][top[outer]])
            for inner, outer in self.axes.top.items()
            if outer in top
        }
        shape = [len(self.compiled.alive[v]) for v in self.axes.shared]
        shared = [int(np.searchsorted(self.compiled.alive[v], at[v])) for v in self.axes.shared]
        return (int(np.ravel_multi_index(shared, shape)) if shape else 0), at

    def walk(self, top: Mapping[str, int]) -> list[dict[str, int]]:
        """The assignment of each copy, in the block network's full numbering."""
        s, at = self._at(top)
        if len(self.run.calls) == 1:
            return [_inside(self.compiled, self.links[0], at)]
        both = _chain_states(self.axes, self.compiled)
        ends = [int(np.searchsorted(both, at[self.axes.entry])), int(np.searchsorted(both, at[self.axes.exit]))]
        states = [ends[0], *self.chains[s].path(0, *ends), ends[1]]
        known: dict[tuple[int, int, int], dict[str, int]] = {}  # copies that run alike share one assignment
        found = []
        for link, i, j in zip(self.links, states, states[1:], strict=False):
            key = (id(link), i, j)
            if key not in known:
                known[key] = _inside(
                    self.compiled, link, {**at, self.axes.entry: int(both[i]), self.axes.exit: int(both[j])}
                )
            found.append(known[key])
        return found


def shared_states(problem: Problem, k: int) -> int:
    """Joint states of the tensors that all copies of run k share."""
    run = problem.runs[k]
    if len(run.calls) == 1:
        return 1
    alive = problem.blocks[run.block].alive
    return int(np.prod([len(alive[v]) for v in _axes(problem, run).shared], dtype=int))


def _axes(problem: Problem, run: Run) -> _Axes:
    block = problem.coarse.graph.blocks[run.block]
    first, last = run.calls[0], run.calls[-1]
    entry = tensor_name(block.inputs[run.chain_in]) if run.chain_in >= 0 else ""
    exit_ = tensor_name(block.outputs[run.chain_out]) if run.chain_in >= 0 else ""
    inner = [*block.inputs, *block.outputs]
    outer = [*first.inputs, *last.outputs]
    top = {tensor_name(i): tensor_name(o) for i, o in zip(inner, outer, strict=True)}
    keep = problem.blocks[run.block].keep
    return _Axes(tuple(k for k in keep if k not in (entry, exit_)), entry, exit_, top)


def _as_matrix(link: Elimination, axes: _Axes, compiled: Compiled) -> Floats:
    """[shared, entry, exit]; entry and exit are both in the numbering of the states alive at either."""
    places = [link.kept.index(v) for v in (*axes.shared, axes.entry, axes.exit)]
    table = link.table.transpose(places)
    shared = int(np.prod(table.shape[: len(axes.shared)], dtype=int))
    table = table.reshape(shared, *table.shape[-2:])
    n = compiled.net.sizes[axes.entry]
    wide = np.full((shared, n, n), np.inf)
    wide[:, compiled.alive[axes.entry][:, None], compiled.alive[axes.exit][None, :]] = table
    both = _chain_states(axes, compiled)
    return wide[:, both[:, None], both[None, :]]


def _chain_states(axes: _Axes, compiled: Compiled) -> NDArray[np.int64]:
    return np.union1d(compiled.alive[axes.entry], compiled.alive[axes.exit])


def _between(problem: Problem, run: Run, weights: Weights) -> Floats:
    """Price of keeping the tensor between two copies for backward, per state of the exit."""
    compiled = problem.blocks[run.block]
    block = problem.coarse.graph.blocks[run.block]
    axes = _axes(problem, run)
    both = _chain_states(axes, compiled)
    if not {block.inputs[run.chain_in], block.outputs[run.chain_out]} & compiled.net.saved_ports:
        return np.zeros(len(both))
    return weights[MEMORY] * compiled.net.tensors[axes.entry].local_bytes[both]


def _to_top(
    problem: Problem, axes: _Axes, compiled: Compiled, table: Floats, names: Sequence[str], matrix: bool = False
) -> Table:
    """The table over top variables, in their numbering of alive states."""
    out = table
    for position, name in enumerate(names):
        mine = _chain_states(axes, compiled) if matrix and name in (axes.entry, axes.exit) else compiled.alive[name]
        theirs = problem.top.alive[axes.top[name]]
        if len(mine) == len(theirs) and (mine == theirs).all():
            continue
        at = np.minimum(np.searchsorted(mine, theirs), len(mine) - 1)
        out = out.take(at, axis=position)
        missing = mine[at] != theirs
        if missing.any():  # states that this run cannot take
            out[(slice(None),) * position + (missing,)] = np.inf
    return _once(tuple(axes.top[n] for n in names), out)


def _once(names: tuple[str, ...], table: Floats) -> Table:
    """A table in which each variable stands once: a block may be given one tensor in two places."""
    for j in range(len(names)):
        i = names.index(names[j])
        if i < j:
            table = np.moveaxis(np.diagonal(table, axis1=i, axis2=j), -1, i)
            return _once((*names[:j], *names[j + 1 :]), table)
    return names, table


def _inside(compiled: Compiled, link: Elimination, at: Mapping[str, int]) -> dict[str, int]:
    kept = {v: int(np.searchsorted(compiled.alive[v], at[v])) for v in link.kept}
    return {v: int(compiled.alive[v][s]) for v, s in link.assignment(kept).items()}


def _finish(problem: Problem, top: Mapping[str, int], calls: list[dict[str, int]]) -> Assignment:
    full = {v: int(problem.top.alive[v][s]) for v, s in top.items()}
    totals = _total(problem.top.net, full)
    weight: Weights = (0.0, 1.0, 0.0, 0.0)
    position = 0
    for run in problem.runs:
        mine = calls[position : position + len(run.calls)]
        position += len(run.calls)
        alike = Counter(map(id, mine))
        by_id = {id(at): at for at in mine}
        for key, count in alike.items():
            totals = totals + count * _total(problem.blocks[run.block].net, by_id[key])
        if len(mine) > 1:  # what the next copy keeps of the tensor between two
            axes = _axes(problem, run)
            both = _chain_states(axes, problem.blocks[run.block])
            between = _between(problem, run, weight)
            for key, count in Counter(map(id, mine[:-1])).items():
                totals[MEMORY] += count * between[np.searchsorted(both, by_id[key][axes.exit])]
    return Assignment(full, calls, totals)


def block_totals(problem: Problem, a: Assignment, name: str) -> Floats:
    """What all copies of one block add to an assignment's totals."""
    net = problem.blocks[name].net
    copies = [at for call, at in zip(problem.coarse.graph.calls(), a.calls, strict=True) if call.block == name]
    by_id = {id(at): at for at in copies}
    zero = np.zeros(NUM_COMPONENTS)
    return sum((n * _total(net, by_id[key]) for key, n in Counter(map(id, copies)).items()), start=zero)


def _total(net: Network, at: Mapping[str, int]) -> Floats:
    total = np.zeros(NUM_COMPONENTS)
    for f in net.factors:
        where: tuple[Any, ...] = (slice(None), *(at[v] for v in f.vars))
        total += f.cost[where]
    return total
