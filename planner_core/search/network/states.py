"""The states in which a tensor can be delivered, on one axis and on a whole mesh, as arrays.

On one axis the state of an activation is a pair (forward, gradient): (R, R), (R, P), (P, R) or (S(d), S(d)). The state of a
weight has three placements (see `WeightState`). On a mesh a *joint state* has one such state for each axis. Placements are
coded as numbers, as in `cost.communication.redistribution`. The functions `joint_*` combine the axes.

Example: an activation [4, 6] that has a gradient has the five states (R,R), (R,P), (P,R), (S(0),S(0)), (S(1),S(1)) on one
axis, so it has 25 joint states on two. On a mesh of 2 x 2 the joint state (S(0), S(0)) splits dim 0 into 4 parts and is
even. On a mesh of 4 x 2 it would split dim 0 into 8 parts, which is not even, so it is left out.

Shapes of arrays are written in brackets: [row, state] is an array with one entry per row and state.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner_core.core import ZERO, P, Placement, Placements, R, Shard, State, TensorMeta, needs_uneven_split
from planner_core.cost import Bools, Floats, Ints
from planner_core.cost.communication import Segments, decode, placement_code
from planner_core.ops import Pair

AxisState = tuple[Any, ...]
"""The state of a tensor on one axis: the pair (forward, gradient) of an activation, or a `WeightState`."""


class WeightState(NamedTuple):
    """The state of a weight on one axis: placements of its working copy, its accumulated gradient, and its stored form.

    The stored form is the one that the optimizer keeps. `stage` is the ZeRO stage of a weight that the operators use
    Replicate while they shard the work. `stage` is NO_STAGE where that choice does not exist: the operators use a shard of the
    weight, or the gradient is Replicate already.

    Example: a weight [512, 64] under data parallelism is (R, P, R, 0) in DDP, (R, P, S(0), 1) in ZeRO-1, (R, S(0), S(0), 2)
    in ZeRO-2 and (S(0), S(0), S(0), 3) in ZeRO-3.
    """

    working: Placement
    gradient: Placement
    stored: Placement
    stage: int


def axis_states(shape: tuple[int, ...], grad: bool) -> tuple[Pair, ...]:
    """(forward, gradient) states of an activation on one axis. Only dims of more than one element are sharded."""
    states: list[Pair] = [(R, R)]
    if grad:
        states.append((R, P))
    states.append((P, R))
    states += [(Shard(d), Shard(d) if grad else R) for d in range(len(shape)) if shape[d] > 1]
    return tuple(states)


NO_STAGE = -1
MAX_ZERO_DIMS = 2
"""ZeRO-1 and ZeRO-2 may shard optimizer states along the first MAX_ZERO_DIMS dims. If another axis shards one, the other is used."""


def weight_states(shape: tuple[int, ...], grad: bool, stages: Collection[int]) -> tuple[WeightState, ...]:
    """States of a weight on one axis, in ZeRO stage 0 and in `stages`."""
    states = [WeightState(R, R, R, NO_STAGE)]
    dims = [Shard(d) for d in range(len(shape)) if shape[d] > 1]
    if grad:
        states.append(WeightState(R, P, R, 0))
        states += [WeightState(R, P, shard, 1) for shard in dims[:MAX_ZERO_DIMS] if 1 in stages]
        states += [WeightState(R, shard, shard, 2) for shard in dims[:MAX_ZERO_DIMS] if 2 in stages]
    states += [WeightState(shard, shard if grad else R, shard, 3) for shard in dims if 3 in stages]
    return (*states, *(WeightState(shard, shard if grad else R, shard, NO_STAGE) for shard in dims))


@dataclass(frozen=True, slots=True)
class TensorStates:
    """The joint states of a tensor on a mesh.

    `axis_states` are its states on one axis. `index` [state, axis] is the position in `axis_states` of a joint state's state on each axis.
    `forward`, `gradient` and `stored` [state] are placement codes (of an activation, `stored` is `forward`). `shares`
    [3, state] says into how many parts each of the three is split.
    """

    meta: TensorMeta
    axis_states: tuple[AxisState, ...]
    index: Ints
    forward: Ints
    gradient: Ints
    stored: Ints
    shares: Floats

    def __len__(self) -> int:
        return len(self.index)

    @property
    def local_bytes(self) -> Floats:
        """[state] bytes on one device of the tensor as it is delivered (of a weight: of its working copy)."""
        size: Floats = self.meta.num_bytes / self.shares[0]
        return size

    @property
    def is_stored_in_parts(self) -> Bools:
        """[state] whether a device stores a part of the weight."""
        parts: Bools = self.shares[2] > 1
        return parts

    def state(self, s: int, num_axes: int) -> State:
        """Return joint state number `s` as a value of the core."""
        rank = len(self.meta.shape)
        return State(decode(int(self.forward[s]), rank, num_axes), decode(int(self.gradient[s]), rank, num_axes))

    def stored_at(self, s: int, num_axes: int) -> Placements:
        """Placements of a weight's stored form in joint state number `s`."""
        return decode(int(self.stored[s]), len(self.meta.shape), num_axes)


@dataclass(frozen=True, slots=True)
class Axes:
    """The mesh as states see it: `sizes` of its axes, and `joined`, the axes that operators treat as one with the axis before.

    On joined axes an operator has one strategy and an activation has one state. Only weights may differ between them, which
    is HSDP. `stages` are the ZeRO stages that weights may take.
    """

    sizes: tuple[int, ...]
    joined: tuple[int, ...] = ()
    stages: tuple[int, ...] = ZERO


@functools.lru_cache(maxsize=8192)
def tensor_states(meta: TensorMeta, grad: bool, axes: Axes, segments: Segments) -> TensorStates:
    """Return all joint states of an activation in which every device holds an equal part."""
    pairs = axis_states(meta.shape, grad)
    return _joint_states(
        meta,
        pairs,
        [(f, g, f) for f, g in pairs],
        joint_index(len(pairs), len(axes.sizes), axes.joined),
        axes,
        segments,
    )


@functools.lru_cache(maxsize=8192)
def parameter_states(meta: TensorMeta, grad: bool, axes: Axes, zero: int, segments: Segments) -> TensorStates:
    """Return all joint states of a weight up to ZeRO stage `zero`. Every device holds an equal part, or, of a weight that is
    gathered for use and has no equal parts, one that may be shorter (`needs_uneven_split`)."""
    pairs = weight_states(meta.shape, grad, [s for s in axes.stages if s <= zero])
    gathered = np.array([pair.stage > 0 for pair in pairs])
    index = joint_index(len(pairs), len(axes.sizes))
    return _joint_states(meta, pairs, [pair[:3] for pair in pairs], index, axes, segments, gathered)


def _joint_states(
    meta: TensorMeta,
    axis_states: tuple[Any, ...],
    placements: Sequence[tuple[Placement, Placement, Placement]],
    index: Ints,
    axes: Axes,
    segments: Segments,
    gathered: Bools | None = None,
) -> TensorStates:
    """`gathered` [pair]: whether the state shards a weight that operators use whole."""
    even = np.ones(len(index), dtype=bool)
    shares = np.ones((3, len(index)))
    fused = dict(segments)
    # A state is allowed if each device holds an equal part of every dim. The product of the axes that shard a dim is its number of parts.
    for d, extent in enumerate(meta.shape):
        sharded = np.array([[p == Shard(d) for p in three] for three in placements]).T  # [3, pair]
        # Two axes that shard one dim split it one after the other: on a mesh of 4 x 2 a dim in S(d) twice has 8 parts.
        n = joint_parts(sharded, index, axes.sizes)
        # Bytes follow the largest part: 10 rows in 4 parts are 10 / 3 shares.
        shares *= extent / np.ceil(extent / n) if extent else n
        equal = np.all([e % n == 0 for e in fused.get(d, (extent,))], axis=0)  # [3, choice]
        for axis, size in enumerate(axes.sizes if gathered is not None else ()):
            # Only one axis may split unevenly: with a second axis on the dim, n is not `size` and the state stays out.
            if needs_uneven_split(meta.shape, fused, d, size):  # this axis alone shards the dim
                equal |= (n == size) & (sharded & gathered)[:, index[:, axis]]
        even &= equal.all(axis=0)
    index, shares = index[even], shares[:, even]
    base = 2 + len(meta.shape)
    codes = [joint_codes([placement_code(three[k]) for three in placements], index, base) for k in range(3)]
    return TensorStates(meta, axis_states, index, codes[0], codes[1], codes[2], shares)


@functools.lru_cache(maxsize=256)
def joint_index(num_rows: int, num_axes: int, joined: tuple[int, ...] = ()) -> Ints:
    """[choice, axis]: every choice of one row for each axis. A joined axis takes the row of the axis before.

    Example: 2 rows on 2 axes give [[0, 0], [0, 1], [1, 0], [1, 1]]; if axis 1 is joined, [[0, 0], [1, 1]].
    """
    grid = np.meshgrid(*[np.arange(num_rows)] * num_axes, indexing="ij")
    index = np.stack([g.ravel() for g in grid], axis=1)
    for axis in joined:
        # Joined axes are one axis for operators, so only choices with the same row on both remain.
        index = index[index[:, axis] == index[:, axis - 1]]
    return index


def joint_parts(flag: Bools, index: Ints, sizes: tuple[int, ...]) -> Floats:
    """[..., joint choice]: the product of the sizes of those axes whose row has `flag` [..., row].

    With `flag` "the row shards dim d" this is the number of parts of dim d in each joint choice.
    """
    n = np.ones((*flag.shape[:-1], len(index)))
    for axis, size in enumerate(sizes):
        if size > 1:
            # With sizes (4, 2), flag (no, yes) and rows (1, 1) n is 8; with rows (0, 1) it is 2.
            n *= np.where(flag, float(size), 1.0)[..., index[:, axis]]
    return n


def joint_codes(digits: Sequence[int], index: Ints, base: int) -> Ints:
    """[joint choice] placement codes: one digit in `base` for each axis, the first axis first."""
    table = np.asarray(digits)
    code = np.zeros(len(index), dtype=np.int64)
    # Base 4 (R, P and two dims), codes 2 and 3 on two axes: 2 * 4 + 3 = 11.
    for axis in range(index.shape[1]):
        code = code * base + table[index[:, axis]]
    return code


def joint_all(table: Bools, rows: Ints, cols: Ints) -> Bools:
    """[r, c]: whether `table` [row, col] holds on every axis; `rows` is [r, axis] and `cols` is [c, axis]."""
    out = np.ones((len(rows), len(cols)), dtype=bool)
    for axis in range(rows.shape[1]):
        out &= table[rows[:, axis][:, None], cols[:, axis][None, :]]
    return out


def joint_any(table: Bools, rows: Ints, cols: Ints) -> Bools:
    """[r, c]: whether `table` [row, col] holds on at least one axis; `rows` is [r, axis] and `cols` is [c, axis]."""
    out = np.zeros((len(rows), len(cols)), dtype=bool)
    for axis in range(rows.shape[1]):
        out |= table[rows[:, axis][:, None], cols[:, axis][None, :]]
    return out


def compatible_operand(consumed: Sequence[Pair], states: Sequence[AxisState]) -> tuple[Bools, Bools]:
    """Return two tables [row, state]: whether an operator that takes its operand as `consumed[row]` may read a tensor delivered as
    `states[state]` without communication, and whether it must pad or divide to do so.

    Allowed are equal states, and these changes of a delivered tensor:
    R to S(d): slice it; the gradient is padded with zeros and stays Partial, or it is taken over as it is.
    R to P: divide it by the number of devices.
    Gradient R to P: divide the gradient by the number of devices.
    """
    is_compatible = np.zeros((len(consumed), len(states)), dtype=bool)
    needs_copy = np.zeros_like(is_compatible)
    for r, (c, gc) in enumerate(consumed):
        for s, (f, g) in enumerate(states):
            if (c, gc) == (f, g):
                is_compatible[r, s] = True
            # From R each device has all data, so it can slice or divide alone. From S(d) or P it would need the others.
            elif f == R and (
                (c in (R, P) and gc == R and g in (R, P)) or (isinstance(c, Shard) and (g == P if gc == c else g == R))
            ):
                is_compatible[r, s] = needs_copy[r, s] = True
    return is_compatible, needs_copy


def compatible_weight(consumed: Sequence[Pair], states: Sequence[AxisState]) -> Bools:
    """[row, state]: whether a weight that an operator takes as `consumed[row]` may be in `states[state]` on one axis.

    A Replicate working copy serves an operator that takes the weight as R or P. Its gradient is made Partial; it is
    accumulated Partial, or scattered at once (ZeRO-2). A sharded working copy serves an operator that takes that shard
    (`stage` NO_STAGE), or it is gathered for an operator that takes the weight as R (ZeRO-3).
    """
    is_compatible = np.zeros((len(consumed), len(states)), dtype=bool)
    for r, (used, produced) in enumerate(consumed):
        for s, (working, gradient, _, stage) in enumerate(states):
            if working == R:
                gradient_fits = (
                    produced == gradient
                    or (produced == R and gradient == P)
                    or (produced == P and isinstance(gradient, Shard))
                )
                is_compatible[r, s] = used in (R, P) and gradient_fits
            else:
                is_compatible[r, s] = used == (working if stage == NO_STAGE else R)
    return is_compatible


def can_deliver(produced: list[Pair], states: tuple[AxisState, ...]) -> Bools:
    """[row, state]: whether a result that was `produced` so may be delivered in a state, on one axis.

    A tensor is delivered Partial only if it was made Partial. To make a Replicate tensor Partial gains nothing.
    """
    return np.array([[f != P or m == P for f, _ in states] for m, _ in produced])
