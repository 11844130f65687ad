"""The cost network of a block on a mesh, and the folded network of a whole model."""

from planner_core.search.network.contradiction import Deciding, deciding
from planner_core.search.network.factors import Factor, Network, only, tensor_name
from planner_core.search.network.folded import (
    Compiled,
    Networks,
    Problem,
    Restriction,
    build_networks,
    build_problem,
    ports,
)
from planner_core.search.network.group_work import KernelTimes, Runs
from planner_core.search.network.runs import Run, find_runs
from planner_core.search.network.samples import Dims, Samples, given_by_samples, samples_of
from planner_core.search.network.search_cache import SearchCache
from planner_core.search.network.states import FREE, AxisState, Bools, Ints, WeightState

__all__ = [
    "FREE",
    "AxisState",
    "Bools",
    "Compiled",
    "Deciding",
    "Dims",
    "Factor",
    "Ints",
    "KernelTimes",
    "Network",
    "Networks",
    "Problem",
    "Restriction",
    "Run",
    "Runs",
    "Samples",
    "SearchCache",
    "WeightState",
    "build_networks",
    "build_problem",
    "deciding",
    "find_runs",
    "given_by_samples",
    "only",
    "ports",
    "samples_of",
    "tensor_name",
]
