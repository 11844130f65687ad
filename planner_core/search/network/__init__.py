"""The cost network of a block on a mesh, and the folded network of a whole model."""

from planner_core.search.network.factors import COMM, MEMORY, NUM_COMPONENTS, Factor, Network, tensor_name
from planner_core.search.network.folded import (
    Compiled,
    Networks,
    Problem,
    Restriction,
    Run,
    build_networks,
    build_problem,
    find_runs,
)
from planner_core.search.network.states import Bools, Ints

__all__ = [
    "COMM",
    "MEMORY",
    "NUM_COMPONENTS",
    "Bools",
    "Compiled",
    "Factor",
    "Ints",
    "Network",
    "Networks",
    "Problem",
    "Restriction",
    "Run",
    "build_networks",
    "build_problem",
    "find_runs",
    "tensor_name",
]
