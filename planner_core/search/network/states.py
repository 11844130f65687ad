"""The states a tensor can be delivered in, and the prices of getting there, as arrays over a whole mesh.

Along one axis the state of a tensor is (forward, gradient): (R,R), (R,P), (P,R) or (S(d),S(d)). On a mesh it
is one such pair per axis, jointly. Placements are coded as in `redistribute`; a *pair table* holds, for each
row or state of one axis, the two digits; `joint` combines axes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner_core.core import P, R, Shard, State, TensorMeta
from planner_core.cost.communication import Segments, decode, digit
from planner_core.ops import Pair

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def axis_states(rank: int, shape: tuple[int, ...], grad: bool, param: bool) -> tuple[Pair, ...]:
    """States along one axis; a parameter is never Partial, and only dims of more than one element are split."""
    found: list[Pair] = [(R, R)]
    if grad:
        found.append((R, P))
    if not param:
        found.append((P, R))
    found += [(Shard(d), Shard(d) if grad else R) for d in range(rank) if shape[d] > 1]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TensorStates:
    """Joint states of a tensor on a mesh: per state the codes of its placement and its gradient's.

    `index[s, a]` is the position of axis a's pair in `pairs`; `local_bytes[s]` what one device holds.
    """

    meta: TensorMeta
    pairs: tuple[Pair, ...]
    index: Ints
    forward: Ints
    gradient: Ints
    local_bytes: Floats

    def __len__(self) -> int:
        return len(self.index)

    def state(self, s: int, num_axes: int) -> State:
        """State number `s` as a value."""
        rank = len(self.meta.shape)
        return State(decode(int(self.forward[s]), rank, num_axes), decode(int(self.gradient[s]), rank, num_axes))


@functools.lru_cache(maxsize=8192)
def tensor_states(
    meta: TensorMeta, grad: bool, param: bool, sizes: tuple[int, ...], segments: Segments = ()
) -> TensorStates:
    """All joint states whose splits are even."""
    shape = meta.shape
    pairs = axis_states(len(shape), shape, grad, param)
    index = joint_index(len(pairs), len(sizes))
    even = np.ones(len(index), dtype=bool)
    parts = np.ones(len(index))
    fused = dict(segments)
    for d, extent in enumerate(shape):
        sharded = np.array([p == Shard(d) for p, _ in pairs])
        n = joint_parts(sharded, index, sizes)
        parts *= n
        for e in fused.get(d, (extent,)):
            even &= e % n == 0
    index, parts = index[even], parts[even]
    base = 2 + len(shape)
    return TensorStates(
        meta, pairs, index, joint_codes([digit(p) for p, _ in pairs], index, base),
        joint_codes([digit(g) for _, g in pairs], index, base), meta.num_bytes / parts,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def joint_index(num_rows: int, num_axes: int) -> Ints:
    """Every choice of one row per axis: [num_rows ** num_axes, num_axes]."""
    grid = np.meshgrid(*[np.arange(num_rows)] * num_axes, indexing="ij")
    return np.stack([g.ravel() for g in grid], axis=1)


def joint_parts(flag: Bools, index: Ints, sizes: tuple[int, ...]) -> Floats:
    """Product of the sizes of the axes whose row has `flag` [..., row]: [..., joint choice]."""
    n = np.ones((*flag.shape[:-1], len(index)))
    for axis, size in enumerate(sizes):
        if size > 1:
            n *= np.where(flag, float(size), 1.0)[..., index[:, axis]]
    return n


def joint_codes(digits: Sequence[int], index: Ints, base: int) -> Ints:
    """Placement codes of joint choices from per-axis digits."""
    table = np.asarray(digits)
    code = np.zeros(len(index), dtype=np.int64)
    for axis in range(index.shape[1]):
        code = code * base + table[index[:, axis]]
    return code


def joint_all(table: Bools, rows: Ints, cols: Ints) -> Bools:
    """`out[r, c]`: whether `table[row, col]` holds on every axis."""
    out = np.ones((len(rows), len(cols)), dtype=bool)
    for axis in range(rows.shape[1]):
        out &= table[rows[:, axis][:, None], cols[:, axis][None, :]]
    return out


def joint_any(table: Bools, rows: Ints, cols: Ints) -> Bools:
    """`out[r, c]`: whether `table[row, col]` holds on some axis."""
    out = np.zeros((len(rows), len(cols)), dtype=bool)
    for axis in range(rows.shape[1]):
        out |= table[rows[:, axis][:, None], cols[:, axis][None, :]]
    return out


def compatible(taken: Sequence[Pair], states: Sequence[Pair]) -> tuple[Bools, Bools]:
    """Whether an operand taken as `taken[r]` may be read from a tensor delivered as `states[s]`, and whether that
    touches the tensor (pads or divides).

    Allowed: the same; a slice of a whole tensor whose gradient is summed later (pad); a whole tensor as one
    term of a sum (divide); a whole gradient as one term of a sum (divide).
    """
    ok = np.zeros((len(taken), len(states)), dtype=bool)
    touch = np.zeros_like(ok)
    for r, (c, gc) in enumerate(taken):
        for s, (f, g) in enumerate(states):
            if (c, gc) == (f, g):
                ok[r, s] = True
            elif f == R and (
                (c in (R, P) and gc == R and g in (R, P)) or (isinstance(c, Shard) and (g == P if gc == c else g == R))
            ):
                ok[r, s] = touch[r, s] = True
    return ok, touch


def stored_for(taken: Sequence[Pair], states: Sequence[Pair], may_gather: bool) -> tuple[Bools, Bools]:
    """Whether a weight used as `taken[r]` may be stored as `states[s]`, and whether it is then gathered at use."""
    ok = np.zeros((len(taken), len(states)), dtype=bool)
    gather = np.zeros_like(ok)
    for r, (c, gc) in enumerate(taken):
        for s, (f, g) in enumerate(states):
            if f == R:
                ok[r, s] = c in (R, P) and (gc == g or (gc == R and g == P))
            elif c == f:
                ok[r, s] = True
            elif c == R:
                ok[r, s] = gather[r, s] = may_gather
    return ok, gather
