"""The cost network of a whole model on one mesh, folded: each block's table once, runs of equal blocks as powers.

    block network --eliminate--> table over the block's boundary tensors
    run of L equal blocks ------> (min, +) power of that table: log L products
    top network + runs ---------> eliminate

The answer is the best state of every variable of every copy. Depth costs a few more products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner_core.coarsen import CoarseGraph
from planner_core.eliminate import Elimination, Floats, Power, Table, eliminate, order, power, times
from planner_core.graph import Block, Call
from planner_core.hardware import CostModel
from planner_core.network import MEMORY, NUM_COMPONENTS, Factor, Network, build_block, tensor_name
from planner_core.saving import kept_results
from planner_core.strategy import BlockStrategies

Weights = tuple[float, float, float, float]
"""Prices of the components of `network`: time, memory, communication, memory at the end of backward."""


EAGER = 4
"""Runs with at most this many shared states are worked out at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of one block that follow each other: the output at `chain_out` of each is the input at `chain_in` of
    the next, all else they read is the same. A run of one has no chain."""

    block: str
    calls: tuple[Call, ...]
    chain_in: int = -1
    chain_out: int = -1


@dataclass
class Compiled:
    """A network without impossible states: `alive[v]` are the states left of variable v, in the old numbering."""

    net: Network
    keep: tuple[str, ...]
    alive: dict[str, NDArray[np.int64]]
    factors: list[Factor]
    sequence: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        """States left of each variable."""
        return {v: len(a) for v, a in self.alive.items()}


@dataclass
class Assignment:
    """The state of every variable: of the top block, and of each call in order. Numbers as in the networks."""

    top: dict[str, int]
    calls: list[dict[str, int]]
    totals: Floats


@dataclass
class Problem:
    """The folded network of a model on one mesh."""

    coarse: CoarseGraph
    model: CostModel
    runs: list[Run]
    top: Compiled
    blocks: dict[str, Compiled]
    strategies: Mapping[str, BlockStrategies]
    uniform: bool = False
    scopes: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def impossible(self) -> bool:
        """Whether some variable has no state left: nothing satisfies the constraints."""
        return any(not len(a) for c in (self.top, *self.blocks.values()) for a in c.alive.values())


def build_problem(
    coarse: CoarseGraph, strategies: Mapping[str, BlockStrategies], model: CostModel, restrict: Restriction | None = None,
    uniform: bool = False,
) -> Problem:  # fmt: skip
    """Networks of the top block and of every repeated block; `restrict` forbids states (see `methods`); `uniform` makes
    all copies of a run pass on the stream in one state, and so run alike.

    `strategies` maps a block's name to its rows; the top block is "".
    """
    graph = coarse.graph
    runs, inside = find_runs(graph.top)
    repeats = graph.num_repeats
    recompute = model.workload.recompute == "full"
    kept = kept_results(graph)
    blocks, saved_top = {}, set()
    for name, block in coarse.blocks.items():
        net = build_block(
            block, strategies[name], model, saved_scale=1 / repeats[name] if recompute else 1.0, kept_results=kept[name]
        )
        if recompute:
            net.saved_ports.update(i for i in block.block.inputs if block.block.values[i].kind == "activation")
        if restrict:
            restrict.apply(name, net)
        blocks[name] = compile_network(net, ports(block.block))
        for call in graph.calls():
            if call.block == name:
                outer = dict(zip((*block.block.inputs, *block.block.outputs), (*call.inputs, *call.outputs), strict=True))
                saved_top.update(outer[v] for v in net.saved_ports)
    top = build_block(coarse.top, strategies[""], model, saved_by_calls=saved_top, skip=inside)
    _whole_results(coarse.top.block, top)
    if restrict:
        restrict.apply("", top)
    problem = Problem(coarse, model, runs, Compiled(top, (), {}, [], []), blocks, strategies, uniform)
    for k, run in enumerate(runs):
        problem.scopes[k] = _run_scope(graph.blocks[run.block], run)
    problem.top = _compile_top(problem, top)
    return problem


def _whole_results(block: Block, net: Network) -> None:
    """What the model returns (the loss) must be whole on every device."""
    for value in block.outputs:
        name = tensor_name(value)
        if name in net.tensors:
            states = net.tensors[name]
            whole = (states.forward == 0) & (states.gradient == 0)
            net.factors.append(Factor((name,), np.zeros((NUM_COMPONENTS, len(states))), whole))


class Restriction:
    """Forbids states of a network: the base of baselines and of the papers' methods. Does nothing itself."""

    def apply(self, block: str, net: Network) -> None:
        """Mark factors of `net` as impossible; `block` is "" for the top block."""


def ports(block: Block) -> tuple[str, ...]:
    """Boundary variables of a block: inputs and outputs that are no constants, each once."""
    both = (*block.inputs, *block.outputs)
    return tuple(dict.fromkeys(tensor_name(v) for v in both if block.values[v].kind != "constant"))


def find_runs(top: Block) -> tuple[list[Run], set[int]]:
    """Maximal runs of equal calls, and the values that lie inside them."""
    calls = [i for i in top.items if isinstance(i, Call)]
    users: dict[int, int] = {}
    for item in top.items:
        for v in set(item.inputs):
            users[v] = users.get(v, 0) + 1
    runs: list[Run] = []
    inside: set[int] = set()
    for call in calls:
        last = runs[-1] if runs else None
        link = _link(last, call, users, top) if last else None
        if last and link:
            runs[-1] = Run(call.block, (*last.calls, call), *link)
            inside.add(call.inputs[link[0]])
        else:
            runs.append(Run(call.block, (call,)))
    return runs, inside


def _link(run: Run, call: Call, users: Mapping[int, int], top: Block) -> tuple[int, int] | None:
    before = run.calls[-1]
    if run.block != call.block:
        return None
    differ = [p for p, (a, b) in enumerate(zip(before.inputs, call.inputs, strict=True)) if a != b and top.values[b].kind != "constant"]
    if len(differ) != 1:
        return None
    (p,) = differ
    value = call.inputs[p]
    if value not in before.outputs or users[value] != 1 or value in top.outputs:
        return None
    q = before.outputs.index(value)
    others = [o for i, o in enumerate(before.outputs) if i != q]
    if any(users.get(o) or o in top.outputs for o in others):
        return None
    if run.chain_in >= 0 and (p, q) != (run.chain_in, run.chain_out):
        return None
    return p, q


def compile_network(net: Network, keep: tuple[str, ...]) -> Compiled:
    """Take out states that no solution uses (arc consistency), merge tables of the same variables, choose an order."""
    alive = {v: np.ones(n, dtype=bool) for v, n in net.sizes.items()}
    merged: dict[tuple[str, ...], Factor] = {}
    for f in net.factors:
        old = merged.get(f.vars)
        merged[f.vars] = f if old is None else Factor(f.vars, old.cost + f.cost, old.allowed & f.allowed)
    changed = True
    while changed:
        changed = False
        for f in merged.values():
            for axis, v in enumerate(f.vars):
                if len(f.vars) == 1:
                    support = f.allowed
                else:
                    other = alive[f.vars[1 - axis]]
                    support = (f.allowed & (other[None, :] if axis == 0 else other[:, None])).any(axis=1 - axis)
                fresh = alive[v] & support
                if fresh.sum() != alive[v].sum():
                    alive[v], changed = fresh, True
    index = {v: np.flatnonzero(a) for v, a in alive.items()}
    small = []
    for f in merged.values():
        pick = np.ix_(*(index[v] for v in f.vars))
        small.append(Factor(f.vars, f.cost[(slice(None), *pick)], f.allowed[pick]))
    sizes = {v: len(a) for v, a in index.items()}
    kept = tuple(v for v in keep if v in sizes)
    return Compiled(net, kept, index, small, order(sizes, [f.vars for f in small], kept))


def _run_scope(block: Block, run: Run) -> tuple[str, ...]:
    """Top variables that a run touches: those of its first call's inputs and its last call's outputs."""
    first, last = run.calls[0], run.calls[-1]
    outer = [*first.inputs, *last.outputs]
    inner = [*block.inputs, *block.outputs]
    names = [tensor_name(o) for i, o in zip(inner, outer, strict=True) if block.values[i].kind != "constant"]
    return tuple(dict.fromkeys(names))


def _compile_top(problem: Problem, top: Network) -> Compiled:
    compiled = compile_network(top, ())
    scopes = [f.vars for f in compiled.factors] + [problem.scopes[k] for k in range(len(problem.runs))]
    compiled.sequence = order(compiled.sizes, scopes, ())
    return compiled


# --- solving -----------------------------------------------------------------------------------------


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
        if not any([r.work_out(assignment) for r in runs]):
            break
    calls = [c for r in runs for c in r.walk(assignment)]
    return _finish(problem, assignment, calls)


class _LazyRun:
    """A run's table over top variables, its powers worked out per shared state when an optimum rests on it."""

    def __init__(
        self, problem: Problem, k: int, solved: Sequence[Mapping[str, Elimination]], weights: Sequence[Weights], switch: int
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
        return total[:, None, None] + entry[:, :, None] + exit_[:, None, :]

    def _power(self, s: int) -> None:
        chain: Power | None = None
        for position, (matrix, between, n) in enumerate(self.pieces):
            leaf = Power(matrix[s : s + 1])
            link = Power(leaf.cost + between)
            if position < len(self.pieces) - 1:
                piece = power(link, n)
            else:
                piece = times(power(link, n - 1), leaf) if n > 1 else leaf
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
        at = {inner: int(self.problem.top.alive[outer][top[outer]]) for inner, outer in self.axes.top.items() if outer in top}
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
                known[key] = _inside(self.compiled, link, {**at, self.axes.entry: int(both[i]), self.axes.exit: int(both[j])})
            found.append(known[key])
        return found


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


def _to_top(problem: Problem, axes: _Axes, compiled: Compiled, table: Floats, names: Sequence[str], matrix: bool = False) -> Table:
    """The table over top variables, in their numbering of alive states."""
    top = problem.top
    out = table
    for position, name in enumerate(names):
        mine = _chain_states(axes, compiled) if matrix and name in (axes.entry, axes.exit) else compiled.alive[name]
        n = compiled.net.sizes[name]
        shape = (*out.shape[:position], n, *out.shape[position + 1 :])
        wide = np.full(shape, np.inf)
        wide[(slice(None),) * position + (mine,)] = out
        out = wide.take(top.alive[axes.top[name]], axis=position)
    return tuple(axes.top[n] for n in names), out


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


def _total(net: Network, at: Mapping[str, int]) -> Floats:
    total = np.zeros(NUM_COMPONENTS)
    for f in net.factors:
        total += f.cost[(slice(None), *(at[v] for v in f.vars))]
    return total
