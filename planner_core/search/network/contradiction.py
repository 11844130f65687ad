"""Find the operators because of which a restricted network has no solution.

    find_infeasible_group(problem) -> the block, and the operators of its infeasible group

If the first k groups of a block have a solution and the first k + 1 have none, no strategy of group k + 1 is possible with the tensors
that the groups before it may deliver. k is found by bisection, since more groups never have more solutions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner_core.core import Block, Op
from planner_core.search.network.factors import Network
from planner_core.search.network.folded import Problem, prune_states, restricted_to_runs


@dataclass(frozen=True, slots=True)
class InfeasibleGroup:
    """The operators of a group of a block that has no strategy compatible with the groups before it."""

    block: Block
    ops: tuple[Op, ...]


def find_infeasible_group(problem: Problem) -> InfeasibleGroup | None:
    """Find the group because of which a problem has no solution, or None if pruning single blocks does not prove it."""
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
    """Return the least number of first groups that have no solution."""
    low, high = 0, len(net.nodes)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _have_solution(net, middle) else (low, middle)
    return high


def _have_solution(net: Network, number: int) -> bool:
    """Return whether the first `number` groups leave a state of every variable."""
    without = set(list(net.nodes)[number:])
    factors = [f for f in net.factors if without.isdisjoint(f.vars)]
    sizes = {name: size for name, size in net.sizes.items() if name not in without}
    return all(len(states) for states in prune_states(replace(net, sizes=sizes, factors=factors)).alive.values())
