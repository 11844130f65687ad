"""The cost of a redistribution if the product that makes the result runs in chunks (`cost.schedule.chunks`).

Example: a product of 8 ms makes terms that an all_reduce of 4 ms sums. In 4 chunks the sums of the first three overlap with
products of 2 ms each. Only the last sum, of 1 ms, is waited for. So the redistribution costs 1 ms, plus contention, plus the extra
time to compute and join four small results.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner_core.core import CollectiveKind, Shard
from planner_core.cost import Bools, Floats, Ints, chunk_waits
from planner_core.cost.communication import Redistributions, collective_times
from planner_core.ops import operator
from planner_core.search.network.group_work import GroupWork
from planner_core.search.network.states import TensorStates, joint_parts

REPLICATE, PARTIAL, FIRST_DIM = 0, 1, 2
"""Digits of Replicate, Partial and Shard(0) in the code of a placement (see `redistribution.Redistributions`)."""


def may_run_in_chunks(work: GroupWork, k: int, fused: bool) -> bool:
    """Return whether op k of a group may run in chunks. Results with fused parts, and results kept for recomputation, are made at once."""
    op = work.strategy.ops[k]
    return (
        work.model.workload.chunks > 1
        and operator(op.fn).chunkable
        and not fused
        and op.name not in work.options.kept_ops
    )


def least_delay(
    work: GroupWork, k: int, forward: Ints, states: TensorStates, redistributions: Redistributions, at_once_s: Floats
) -> tuple[Floats, Floats]:
    """Return two arrays [row, state]: by how many seconds the redistribution of op k's result delays forward, at once or in chunks,
    whichever is less; and the seconds of its collectives.

    `forward` [row] is the code of the placement in which the result is made. `at_once_s` [row, state]: the seconds at once.
    """
    (value,), model, chunks = work.strategy.ops[k].outputs, work.model, work.model.workload.chunks
    delay, sent = at_once_s.copy(), at_once_s.copy()
    last_dim = len(states.meta.shape) - 1
    is_divisible = _divides_evenly(work, k, last_dim, chunks)
    kernel, result_bytes = work.kernel_seconds(k, chunks)[0] / chunks, work.result_bytes(k, value)
    for axis, kind, pairs in _yield_reductions(forward, states, redistributions, last_dim):
        row, state = entries = np.nonzero(pairs & is_divisible[:, None])
        # Each chunk sends its part of the bytes, but pays the latency of a whole collective: chunks are not always the better way.
        each = collective_times(kind, result_bytes[row] / chunks, model.links[axis])
        waits = chunk_waits(each, kernel[row], chunks, model.contention)
        # To join the chunks each byte is read and written once more: 2 * the delivered bytes.
        total = waits + work.extra_seconds_in_chunks(k, chunks, row, 2 * states.local_bytes[state])
        better = total < delay[entries]
        delay[entries] = np.where(better, total, delay[entries])
        sent[entries] = np.where(better, chunks * each, sent[entries])
    return delay, sent


def _divides_evenly(work: GroupWork, k: int, last_dim: int, chunks: int) -> Bools:
    """[row]: whether this GPU's part of the last dim of op k's result can be cut evenly."""
    (value,) = work.strategy.ops[k].outputs
    sharded = np.array([rows[k].outputs[0][0] == Shard(last_dim) for rows in work.strategy.rows])
    features = work.block.values[value].meta.shape[last_dim] // joint_parts(sharded, work.index, work.model.sizes)
    return np.asarray(features % chunks == 0)


def _yield_reductions(
    forward: Ints, states: TensorStates, redistributions: Redistributions, last_dim: int
) -> Iterator[tuple[int, CollectiveKind, Bools]]:
    """Yield each axis and collective that sums a result, with the pairs [row, state] where it is the whole redistribution.

    A result is not scattered by its last dim, since the chunks are cut there.
    """
    base, delivered = 2 + len(states.meta.shape), states.forward[None, :]
    direct = redistributions.first[forward[:, None], delivered] == delivered
    for axis in range(redistributions.num_axes):
        # The first axis has the highest digit: base 4 on two axes gives the units 4 and 1. From P to R on axis 0 the code falls by 4.
        unit = base ** (redistributions.num_axes - 1 - axis)
        summed = direct & (forward // unit % base == PARTIAL)[:, None]
        # A change of one digit: if it is not the digit of this axis, no pair matches below.
        changed = delivered - forward[:, None]
        for digit in (REPLICATE, *range(FIRST_DIM, FIRST_DIM + last_dim)):
            pairs = summed & (changed == (digit - PARTIAL) * unit)
            yield axis, "all_reduce" if digit == REPLICATE else "reduce_scatter", pairs
