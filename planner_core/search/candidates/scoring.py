"""Score every candidate of a block: each assignment of R, S(0) or S(1) to its weight matrices, on the last axis of the mesh.

TAP counts 3^N such candidates for N matrices. All are scored at once. The block's network is eliminated, but the choices of the
matrices are kept. What remains is one table [3, 3, ..., 3] with one entry per candidate, in which all other choices are at their best. The
memory of that choice is carried along. The tensor that enters the block and the one that leaves it have the same state, so that
copies can be stacked.

Example: a block with two linear layers, whose weights are [out, in], has 9 candidates. Entry (1, 2) of the table is "the first
weight S(0), the second S(1)". That is Megatron-LM's way: column-parallel, then row-parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner_core.core import Block, R, Shard
from planner_core.cost import Bools, Component, CostModel, Floats
from planner_core.ops import BlockStrategies, CoarseBlock
from planner_core.search.algebra.elimination_order import choose_elimination_order
from planner_core.search.candidates.generate import generate_front, tie_variables
from planner_core.search.network.block import build_block
from planner_core.search.network.factors import tensor_name
from planner_core.search.network.folded import CompiledNetwork, Restriction, boundary_variables, compile_network

MAX_CANDIDATES = 3**11
"""If there are more candidates than this, only the Pareto front is generated."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of one unique block, on the last axis of the mesh.

    `choice` [candidate, matrix] is 0, 1 or 2 for R, S(0) or S(1) of `weights[matrix]`. `comm_s` [candidate] is the seconds of
    communication of one copy of the block, and `memory_bytes` [candidate] its bytes per GPU; both are infinite if the candidate
    cannot run. `on_front` [candidate] says which are on the Pareto front. `rest_comm_s` and `rest_memory_bytes` are those of the
    rest of the model. If there are more than `MAX_CANDIDATES`, only the Pareto front is here.
    """

    block: str
    weights: tuple[str, ...]
    choice: NDArray[np.int8]
    comm_s: Floats
    memory_bytes: Floats
    on_front: Bools
    axis_size: int
    repeats: int
    rest_comm_s: float = 0.0
    rest_memory_bytes: float = 0.0
    num_even: int = -1

    @property
    def possible(self) -> int:
        """Number of candidates that shard evenly: those that can run if all were scored, otherwise the product over matrices."""
        return self.num_even if self.num_even >= 0 else self.scored

    @property
    def model_comm_s(self) -> Floats:
        """[candidate]: seconds of communication of the whole model, if all copies run so and the rest is at its best."""
        return self.rest_comm_s + self.repeats * self.comm_s

    @property
    def model_memory_bytes(self) -> Floats:
        """[candidate]: bytes per GPU of the whole model at the end of forward."""
        return self.rest_memory_bytes + self.repeats * self.memory_bytes

    @property
    def space(self) -> int:
        """Number of all candidates, 3^N."""
        return int(3 ** len(self.weights))

    @property
    def scored(self) -> int:
        """Number of candidates that were scored and can run."""
        return int(np.isfinite(self.comm_s).sum())


def weight_matrices(block: Block) -> list[int]:
    """Return the numbers of the block's own weight matrices that an operator reads, in order."""
    read = {i for item in block.items for i in item.inputs}
    return [i for i, v in block.own_parameters.items() if len(v.meta.shape) >= 2 and i in read]


def score_candidates(
    coarse: CoarseBlock,
    strategies: BlockStrategies,
    model: CostModel,
    repeats: int,
    restrict: Restriction | None = None,
) -> Candidates | None:
    """Score a block's candidates on the last axis of a mesh; None if it has none.

    `restrict` fixes the other axes. If there are too many candidates, only the Pareto front is generated (`generate_front`).
    """
    block = coarse.block
    weights = weight_matrices(block)
    if not weights:
        return None
    net = build_block(coarse, strategies, model)
    if restrict:
        restrict.apply(block.name, net)
    compiled = compile_network(net, boundary_variables(block))
    if any(not len(a) for a in compiled.alive.values()):
        return None
    names = tuple(block.values[w].name for w in weights)
    if 3 ** len(weights) > MAX_CANDIDATES:
        return _generated_candidates(compiled, block, weights, model.sizes[-1], repeats)
    comm, memory = _score_tables(compiled, block, weights)
    grid = np.indices((3,) * len(weights), dtype=np.int8).reshape(len(weights), -1).T
    comm, memory = comm.ravel(), memory.ravel()
    return Candidates(block.name, names, grid, comm, memory, undominated_pairs(comm, memory), model.sizes[-1], repeats)


def _generated_candidates(
    compiled: CompiledNetwork, block: Block, weights: list[int], size: int, repeats: int
) -> Candidates | None:
    """Return the Pareto front of the candidates. One choice may be there twice, with two ways to run the other operators."""
    names = [tensor_name(w) for w in weights]
    kinds = {n: _placement_kinds(compiled, n) for n in names}
    stream = _residual_stream(block)
    choices = generate_front(tie_variables(compiled, *stream) if stream else compiled, names)
    by_kinds = [(tuple(kinds[n][s] for n, s in zip(names, states, strict=True)), c, m) for states, c, m in choices]
    if not by_kinds:
        return None
    front = np.flatnonzero(undominated_pairs(*(np.array([x[i] for x in by_kinds]) for i in (1, 2))))
    comm, memory = (np.array([by_kinds[b][i] for b in front]) for i in (1, 2))
    return Candidates(
        block.name,
        tuple(block.values[w].name for w in weights),
        np.array([by_kinds[b][0] for b in front], dtype=np.int8),
        comm,
        memory,
        np.ones(len(front), dtype=bool),
        size,
        repeats,
        num_even=prod(len(set(k)) for k in kinds.values()),
    )


def _placement_kinds(compiled: CompiledNetwork, name: str) -> list[int]:
    """[state]: 0, 1 or 2 for each state of a matrix that is alive: R, S(0) or S(1) on the last axis."""
    states = compiled.net.tensors[name]
    return [_placement_kind(states.axis_states[int(i)][0]) for i in states.index[compiled.alive[name], -1]]


def undominated_pairs(a: Floats, b: Floats) -> Bools:
    """[point]: whether no other point is at most as large in both `a` and `b`. Of equal points one is kept."""
    finite = np.isfinite(a) & np.isfinite(b)
    # By a, then by b: among points of equal a the least b comes first, so the running minimum drops the others and equal points.
    sequence = np.lexsort((b, a))
    sequence = sequence[finite[sequence]]
    best = np.minimum.accumulate(b[sequence]) if len(sequence) else b[:0]
    keep = np.ones(len(sequence), dtype=bool)
    keep[1:] = b[sequence][1:] < best[:-1]
    front = np.zeros(len(a), dtype=bool)
    front[sequence[keep]] = True
    return front


def _score_tables(compiled: CompiledNetwork, block: Block, weights: list[int]) -> tuple[Floats, Floats]:
    """Return two tables [3, ..., 3]: the least communication of each candidate over all states of the residual stream, and the memory of
    that choice."""
    names = [tensor_name(w) for w in weights]
    factors = _tables_by_choice(compiled, names)
    # One state at both ends, so that copies can be stacked: the best of each state is taken, and then the best of all states.
    ends = _residual_stream(block)
    best_c = np.full((3,) * len(names), np.inf)
    best_m = np.full_like(best_c, np.inf)
    states = range(compiled.net.sizes[ends[0]]) if ends else range(1)
    for s in states:
        fixed = _fix_stream(compiled, factors, ends, s)
        if fixed is None:
            continue
        c, m = _eliminate_carrying_memory(fixed, names)
        # Communication decides and memory breaks ties: the memory reported is that of the choice with least communication.
        better = (c < best_c) | ((c == best_c) & (m < best_m))
        best_c, best_m = np.where(better, c, best_c), np.where(better, m, best_m)
    return best_c, best_m


def _residual_stream(block: Block) -> tuple[str, str] | None:
    """Return the variables of the residual stream before and after the block: the first activation input that has an output of its shape
    and dtype, and that output."""
    for i in block.inputs:
        if block.values[i].kind != "activation":
            continue
        for o in block.outputs:
            if block.values[o].meta == block.values[i].meta and o != i:
                return tensor_name(i), tensor_name(o)
    return None


def _tables_by_choice(compiled: CompiledNetwork, names: list[str]) -> list[tuple[tuple[str, ...], Floats, Floats]]:
    """Tables (variables, communication, memory) in which each matrix has three states; its other axes are at their best."""
    owned = {n: [f for f in compiled.factors if n in f.vars] for n in names}
    out = [
        (
            f.vars,
            np.where(f.allowed, f.costs.component(Component.COMMUNICATION), np.inf),
            f.costs.component(Component.AFTER_FORWARD),
        )
        for f in compiled.factors
        if not set(f.vars) & set(names)
    ]
    for name, factors in owned.items():
        kind = _placement_kinds(compiled, name)
        total: dict[str, tuple[Floats, Floats]] = {}
        unary = [f for f in factors if len(f.vars) == 1]
        for f in factors:
            if len(f.vars) == 1:
                continue
            axis = f.vars.index(name)
            other = f.vars[1 - axis]
            cost = np.where(f.allowed, f.costs.component(Component.COMMUNICATION), np.inf)
            memory = f.costs.component(Component.AFTER_FORWARD)
            cost, memory = (cost, memory) if axis else (cost.T, memory.T)
            # Its own costs count once, in the table of its first reader: a layer that is called twice is one weight.
            for u in unary:
                cost = cost + np.where(u.allowed, u.costs.component(Component.COMMUNICATION), np.inf)
                memory = memory + u.costs.component(Component.AFTER_FORWARD)
            unary = []
            total[other] = _least_by_kind(cost, memory, kind)
            out.append(((other, name), *total[other]))
    return out


def _placement_kind(placement: object) -> int:
    if placement == R:
        return 0
    assert isinstance(placement, Shard)
    return 1 + min(placement.dim, 1)


def _least_by_kind(cost: Floats, memory: Floats, kind: list[int]) -> tuple[Floats, Floats]:
    c = np.full((cost.shape[0], 3), np.inf)
    m = np.zeros_like(c)
    for state, k in enumerate(kind):
        better = cost[:, state] < c[:, k]
        c[:, k] = np.where(better, cost[:, state], c[:, k])
        m[:, k] = np.where(better, memory[:, state], m[:, k])
    return c, m


Tables = list[tuple[tuple[str, ...], Floats, Floats]]


def _fix_stream(compiled: CompiledNetwork, tables: Tables, ends: tuple[str, str] | None, state: int) -> Tables | None:
    """Return the tables with both ends of the residual stream fixed at one state; None if that state is impossible."""
    if ends is None:
        return tables
    states = {}
    for end in ends:
        where = np.flatnonzero(compiled.alive[end] == state)
        if not len(where):
            return None
        states[end] = int(where[0])
    out = []
    for names, c, m in tables:
        pick = tuple(states.get(n, slice(None)) for n in names)
        out.append((tuple(n for n in names if n not in states), np.asarray(c[pick]), np.asarray(m[pick])))
    return out


def _eliminate_carrying_memory(tables: Tables, keep: list[str]) -> tuple[Floats, Floats]:
    sizes: dict[str, int] = {}
    for names, c, _ in tables:
        sizes.update(zip(names, c.shape, strict=True))
    pool = list(tables)
    for v in choose_elimination_order(sizes, [t[0] for t in tables], keep):
        joined = [t for t in pool if v in t[0]]
        pool = [t for t in pool if v not in t[0]]
        others = tuple(dict.fromkeys(n for t in joined for n in t[0] if n != v))
        c, m = _add_tables(joined, (*others, v), sizes)
        # Memory is carried along, not minimised: both arrays must take the same state of v.
        best = c.argmin(axis=-1)[..., None]
        pool.append((others, np.take_along_axis(c, best, -1)[..., 0], np.take_along_axis(m, best, -1)[..., 0]))
    return _add_tables(pool, tuple(keep), sizes)


def _add_tables(tables: Tables, scope: tuple[str, ...], sizes: dict[str, int]) -> tuple[Floats, Floats]:
    shape = [sizes[n] for n in scope]
    assert prod(shape) < 10**8
    c, m = np.zeros(shape), np.zeros(shape)
    for names, cost, memory in tables:
        positions = [scope.index(n) for n in names]
        view = [1] * len(scope)
        for p in positions:
            view[p] = shape[p]
        axes = np.argsort(positions)
        c += cost.transpose(axes).reshape(view)
        m += memory.transpose(axes).reshape(view)
    return c, m
