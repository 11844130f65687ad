"""Runs of calls of one block, and who keeps the tensor that links two copies for backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.core import Block, Call
from planner_core.cost import Component
from planner_core.search.network.factors import Factor, Network, tensor_name, zero_costs

NO_CHAIN = -1, -1
"""Stands for the numbers (input, output) that link the calls of a run of one call."""


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of one block that follow each other.

    The output number `chain_out` of each call is the input number `chain_in` of the next. All other inputs are the same for
    all calls. A run of one call has no chain: both numbers are -1.
    """

    block: str
    calls: tuple[Call, ...]
    chain_in: int = -1
    chain_out: int = -1


def find_runs(top: Block) -> tuple[list[Run], set[int]]:
    """Return the longest runs of calls of one block, and the values that pass between two calls of a run."""
    calls = [i for i in top.items if isinstance(i, Call)]
    users: dict[int, int] = {}
    for item in top.items:
        # An item that reads a value twice is one reader.
        for v in set(item.inputs):
            users[v] = users.get(v, 0) + 1
    chains: list[tuple[list[Call], tuple[int, int]]] = []
    inside: set[int] = set()
    for call in calls:
        link = _chain_ports(*chains[-1], call, users, top) if chains else None
        if link:
            of_run = chains[-1][0]
            of_run.append(call)
            chains[-1] = of_run, link
            inside.add(call.inputs[link[0]])
        else:
            chains.append(([call], NO_CHAIN))
    return [Run(of_run[0].block, tuple(of_run), *link) for of_run, link in chains], inside


def _chain_ports(
    calls: Sequence[Call], known: tuple[int, int], call: Call, users: Mapping[int, int], top: Block
) -> tuple[int, int] | None:
    """Return the numbers (input, output) that link `call` to the last of a run's `calls`, or None if it does not continue the run.
    `known`: the numbers that link those before it."""
    previous = calls[-1]
    if previous.block != call.block:
        return None
    differ = [
        p
        for p, (a, b) in enumerate(zip(previous.inputs, call.inputs, strict=True))
        if a != b and top.values[b].kind != "constant"
    ]
    if len(differ) != 1:  # a second input that differs would be a second link, and the run would be no matrix power
        return None
    (p,) = differ
    value = call.inputs[p]
    if value not in previous.outputs or users[value] != 1 or value in top.outputs:
        return None  # another reader needs the state of this tensor, which a matrix power eliminates
    q = previous.outputs.index(value)
    others = [o for i, o in enumerate(previous.outputs) if i != q]
    # Any other output that is read would need a variable at each copy, so the run would be no matrix power either.
    if any(users.get(o) or o in top.outputs for o in others):
        return None
    # All links of a run are one (input, output) pair, since all copies are one matrix [state in, state out].
    if known != NO_CHAIN and (p, q) != known:
        return None
    return p, q


def mark_saved_chain_tensors(
    runs: list[Run],
    top: Block,
    blocks: Mapping[str, Block],
    nets: Mapping[str, Mapping[str, Network]],
    at_least: bool,
) -> set[int]:
    """Mark for each chain of copies which side keeps the tensor between two of them for backward.

    If all variants keep their input, or a copy keeps its output, `Network.saves_between` is set. If only some variants keep their
    input, the bytes go into the network of each of these variants. `at_least`: what only some variants keep is not counted for all.
    Returns the tensors with which such chains begin: the first copy counts them, and the top block does not.
    """
    entries: set[int] = set()
    for run in runs:
        if run.chain_in < 0:
            continue
        entry, exit_value = blocks[run.block].inputs[run.chain_in], blocks[run.block].outputs[run.chain_out]
        variants = list(nets[run.block].values())
        keeps = [entry in net.saved_ports for net in variants]
        first = run.calls[0].inputs[run.chain_in]
        if (
            any(keeps)
            and not all(keeps)
            and not any(exit_value in n.saved_ports for n in variants)
            and _is_read_once(run, first, runs, top)
        ):
            entries.add(first)
            for net, keeps_it in zip(variants, keeps, strict=True):
                cost = zero_costs(net.sizes[tensor_name(entry)])
                # Only the variants that keep their input pay for it, so a mix of variants along the run is counted exactly.
                cost[Component.AFTER_FORWARD] = net.tensors[tensor_name(entry)].local_bytes * keeps_it
                net.factors.append(Factor((tensor_name(entry),), cost, np.ones(cost.shape[1], dtype=bool)))
        else:
            combine = all if at_least else any
            for net in variants:
                net.saves_between = combine(keeps) or combine(exit_value in n.saved_ports for n in variants)
    return entries


def _is_read_once(run: Run, first: int, runs: list[Run], top: Block) -> bool:
    """Return whether the run has all calls of its block, and no other reader keeps the tensor with which it begins."""
    is_only_run = sum(r.block == run.block for r in runs) == 1
    others = [i for i in top.items if first in i.inputs and i is not run.calls[0]]
    return (
        is_only_run
        and not any(isinstance(i, Call) or first in i.saved for i in others)
        and run.calls[0].inputs.count(first) == 1
    )
