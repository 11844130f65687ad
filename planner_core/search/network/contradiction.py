"""Find the operators because of which a restricted network has no solution.

    deciding(problem)     the block, and the operators of the group that decides

If the first k groups of a block have a solution and the first k + 1 have none, the group k + 1 decides: no way to run it goes with what the
groups before it may deliver. k is found by halves, since more groups never have more solutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner_core.core import Block, Op
from planner_core.search.network.factors import Network
from planner_core.search.network.folded import Problem, prune_states, restricted_to_runs


@dataclass(frozen=True, slots=True)
class InfeasibleGroup:
    """The operators of one group of a block, none of whose strategies goes with the groups before it."""

    block: Block
    ops: tuple[Op, ...]


def find_infeasible_group(problem: Problem) -> InfeasibleGroup | None:
    """The group that decides that a problem has no solution; None if pruning states block by block does not show one."""
    graph = problem.coarse.graph
    nets = {name: (graph.blocks[name], problem.first_variant(name).net) for name in problem.blocks}
    nets[""] = (graph.top, restricted_to_runs(problem, problem.top.net))
    for block, net in nets.values():
        if not _have_solution(net, len(net.nodes)):
            return (
                InfeasibleGroup(block, net.nodes[list(net.nodes)[_num_groups_without_solution(net) - 1]].strategy.ops)
                if net.nodes
                else None
            )
    return None


def _num_groups_without_solution(net: Network) -> int:
    """The least number of groups that have no solution together."""
    low, high = 0, len(net.nodes)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _have_solution(net, middle) else (low, middle)
    return high


def _have_solution(net: Network, number: int) -> bool:
    """Whether the first `number` groups leave a state of every variable."""
    without = set(list(net.nodes)[number:])
    factors = [f for f in net.factors if without.isdisjoint(f.vars)]
    sizes = {name: size for name, size in net.sizes.items() if name not in without}
    return all(len(states) for states in prune_states(replace(net, sizes=sizes, factors=factors)).alive.values())
