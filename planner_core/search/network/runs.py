"""Runs of calls of one block, and who keeps the tensors at their ends for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner_core.core import Block, Call, Graph
from planner_core.cost import Component
from planner_core.search.network.factors import Factor, Network, tensor_name, zero_costs

Nets = Mapping[str, Mapping[str, Network]]
"""The networks of each repeated block, by its name and by policy of recomputation."""

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


def mark_saved_chain_tensors(runs: list[Run], blocks: Mapping[str, Block], nets: Nets) -> None:
    """Set `Network.saves_between` of each chain whose copies keep the tensor between two of them under every policy."""
    for run in runs:
        if run.chain_in < 0:
            continue
        always = values_always_saved(nets[run.block])
        ends = {blocks[run.block].inputs[run.chain_in], blocks[run.block].outputs[run.chain_out]}
        for net in nets[run.block].values():
            net.saves_between = not always.isdisjoint(ends)


def values_always_saved(variants: Mapping[str, Network]) -> set[int]:
    """Return the values of a block that it keeps for backward under every policy of recomputation."""
    return set.intersection(*(net.saved_values for net in variants.values()))


def add_inputs_saved_by_some(graph: Graph, nets: Nets, saved: Collection[int], at_least: bool) -> None:
    """Add the inputs that a block keeps under some policies of recomputation to the memory of these policies.

    So what a policy costs does not depend on the others that copies may choose. `saved`: the values of the top block that it counts
    itself. The calls that read one value share its bytes, so copies that are alike are counted exactly, and so is any mix of copies if each
    reads a value of its own. One network stands for all calls of a block: it has the mean of their shares, or the least if its sum must
    not be above the walk (`at_least`).

    Example: a layer of Llama keeps its input only if it is recomputed, so each recomputed layer has one more tensor. 24 layers of T5 read
    one position bias, and each recomputed layer has 1 / 24 of it.
    """
    some = {
        name: set.union(*(n.saved_values for n in variants.values())) - values_always_saved(variants)
        for name, variants in nets.items()
    }
    reads = [
        (call.block, port, value)
        for call in graph.calls()
        for port, value in zip(graph.blocks[call.block].inputs, call.inputs, strict=True)
        if port in some[call.block]
    ]
    readers = Counter(value for _, _, value in reads)
    shares: dict[tuple[str, int], list[float]] = {}
    for block, port, value in reads:
        shares.setdefault((block, port), []).append(0.0 if value in saved else 1 / readers[value])
    for (block, port), of_calls in shares.items():
        share = min(of_calls) if at_least else sum(of_calls) / len(of_calls)
        for net in nets[block].values():
            name = tensor_name(port)
            cost = zero_costs(net.sizes[name])
            cost[Component.AFTER_FORWARD] = net.tensors[name].local_bytes * share * (port in net.saved_values)
            net.factors.append(Factor((name,), cost, np.ones(cost.shape[1], dtype=bool)))
