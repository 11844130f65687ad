"""The states a tensor can be delivered in, and the prices of getting there, as arrays over a whole mesh.

Along one axis the state of an activation is (forward, gradient): (R,R), (R,P), (P,R) or (S(d),S(d)); that of a weight has
three placements (see `WeightState`). On a mesh it is one such state per axis, jointly. Placements are coded as in
`cost.communication.redistribution`; `joint_*` combine the axes. Shapes are written [row, state] and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner_core.core import ZERO, P, Placement, Placements, R, Shard, State, TensorMeta
from planner_core.cost.communication import Segments, decode, digit
from planner_core.ops import Pair

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


AxisState = tuple[Any, ...]
"""How a tensor lies along one axis: (forward, gradient), or a `WeightState`."""


class WeightState(NamedTuple):
    """How a weight lies along one axis: its working copy, its accumulated gradient, and as the optimizer keeps it.

    `stage` is the ZeRO stage of a weight that is used whole on this axis while the work is split; FREE where there is no
    such choice, since the weight is used in parts or its gradient is whole.
    """

    working: Placement
    gradient: Placement
    stored: Placement
    stage: int


def axis_states(shape: tuple[int, ...], grad: bool) -> tuple[Pair, ...]:
    """(forward, gradient) states of an activation along one axis; only dims of more than one element are split."""
    found: list[Pair] = [(R, R)]
    if grad:
        found.append((R, P))
    found.append((P, R))
    found += [(Shard(d), Shard(d) if grad else R) for d in range(len(shape)) if shape[d] > 1]
    return tuple(found)


FREE = -1
HOMES = 2
"""Dims along which optimizer states may be sharded: the first two. Where an inner axis shards one of them, the other serves."""


def weight_states(shape: tuple[int, ...], grad: bool, stages: Collection[int]) -> tuple[WeightState, ...]:
    """States of a weight along one axis, at ZeRO `stages` and stage 0."""
    found = [WeightState(R, R, R, FREE)]
    dims = [Shard(d) for d in range(len(shape)) if shape[d] > 1]
    if grad:
        found.append(WeightState(R, P, R, 0))
        found += [WeightState(R, P, at, 1) for at in dims[:HOMES] if 1 in stages]
        found += [WeightState(R, at, at, 2) for at in dims[:HOMES] if 2 in stages]
    found += [WeightState(at, at if grad else R, at, 3) for at in dims if 3 in stages]
    return (*found, *(WeightState(at, at if grad else R, at, FREE) for at in dims))


@dataclass(frozen=True, slots=True)
class TensorStates:
    """Joint states of a tensor on a mesh: per state the codes of its placement and its gradient's.

    `index` [state, axis] is the position of an axis's state in `pairs`. `forward`, `gradient` and (of a weight) `stored`
    [state] are placement codes, `shares` [3, state] into how many parts each of them is split. `local_bytes` [state] is what
    one device holds of the tensor as it is delivered (of a weight: of its working copy, in the graph's dtype).
    """

    meta: TensorMeta
    pairs: tuple[AxisState, ...]
    index: Ints
    forward: Ints
    gradient: Ints
    stored: Ints
    shares: Floats

    def __len__(self) -> int:
        return len(self.index)

    @property
    def local_bytes(self) -> Floats:
        """[state] bytes of the tensor on one device."""
        size: Floats = self.meta.num_bytes / self.shares[0]
        return size

    def state(self, s: int, num_axes: int) -> State:
        """State number `s` as a value."""
        rank = len(self.meta.shape)
        return State(decode(int(self.forward[s]), rank, num_axes), decode(int(self.gradient[s]), rank, num_axes))

    def stored_at(self, s: int, num_axes: int) -> Placements:
        """How the optimizer keeps a weight in state number `s`."""
        return decode(int(self.stored[s]), len(self.meta.shape), num_axes)


@dataclass(frozen=True, slots=True)
class Axes:
    """The mesh as states see it: its axis sizes, and which axes the operators treat as one with the axis before.

    On joined axes an operator runs alike and an activation lies alike; only weights may lie differently (HSDP). `stages` are
    the ZeRO stages that weights may take at all.
    """

    sizes: tuple[int, ...]
    joined: tuple[int, ...] = ()
    stages: tuple[int, ...] = ZERO


@functools.lru_cache(maxsize=8192)
def tensor_states(meta: TensorMeta, grad: bool, axes: Axes, segments: Segments = ()) -> TensorStates:
    """All joint states of an activation whose splits are even."""
    pairs = axis_states(meta.shape, grad)
    return _joint(
        meta,
        pairs,
        [(f, g, f) for f, g in pairs],
        joint_index(len(pairs), len(axes.sizes), axes.joined),
        axes,
        segments,
    )


@functools.lru_cache(maxsize=8192)
def parameter_states(meta: TensorMeta, grad: bool, axes: Axes, zero: int, segments: Segments = ()) -> TensorStates:
    """All joint states of a weight whose splits are even."""
    pairs = weight_states(meta.shape, grad, [s for s in axes.stages if s <= zero])
    return _joint(meta, pairs, [pair[:3] for pair in pairs], joint_index(len(pairs), len(axes.sizes)), axes, segments)


def _joint(
    meta: TensorMeta, pairs: tuple[Any, ...], placed: Sequence[tuple[Placement, Placement, Placement]], index: Ints,
    axes: Axes, segments: Segments,
) -> TensorStates:  # fmt: skip
    even = np.ones(len(index), dtype=bool)
    shares = np.ones((3, len(index)))
    fused = dict(segments)
    for d, extent in enumerate(meta.shape):
        sharded = np.array([[p == Shard(d) for p in three] for three in placed]).T  # [3, pair]
        n = joint_parts(sharded, index, axes.sizes)
        shares *= n
        for e in fused.get(d, (extent,)):
            even &= (e % n == 0).all(axis=0)
    index, shares = index[even], shares[:, even]
    base = 2 + len(meta.shape)
    codes = [joint_codes([digit(three[k]) for three in placed], index, base) for k in range(3)]
    return TensorStates(meta, pairs, index, codes[0], codes[1], codes[2], shares)


@functools.lru_cache(maxsize=256)
def joint_index(num_rows: int, num_axes: int, joined: tuple[int, ...] = ()) -> Ints:
    """Every choice of one row per axis, the same on axes `joined` to the one before: [choice, axis]."""
    grid = np.meshgrid(*[np.arange(num_rows)] * num_axes, indexing="ij")
    index = np.stack([g.ravel() for g in grid], axis=1)
    for axis in joined:
        index = index[index[:, axis] == index[:, axis - 1]]
    return index


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


def compatible(taken: Sequence[Pair], states: Sequence[AxisState]) -> tuple[Bools, Bools]:
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


def kept_for(taken: Sequence[Pair], states: Sequence[AxisState]) -> Bools:
    """[row, state] whether a weight used as `taken[row]` may lie as `states[state]` along one axis.

    A working copy that is whole serves uses of the whole weight (or of it as one term); the gradient is Partial there,
    accumulated as it is or scattered at once (ZeRO-2). A sharded one serves uses of that shard, or is gathered for use.
    """
    ok = np.zeros((len(taken), len(states)), dtype=bool)
    for r, (used, made) in enumerate(taken):
        for s, (working, gradient, _, stage) in enumerate(states):
            if working == R:
                lies = made == gradient or (made == R and gradient == P) or (made == P and isinstance(gradient, Shard))
                ok[r, s] = used in (R, P) and lies
            else:
                ok[r, s] = used == (working if stage == FREE else R)
    return ok
