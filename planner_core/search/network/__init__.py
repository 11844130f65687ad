"""The cost network of a block on a mesh, and the folded network of a whole model."""

from planner_core.search.network.contradiction import find_infeasible_group
from planner_core.search.network.factors import Factor, Network, SampleDims, allow_only, tensor_name
from planner_core.search.network.folded import (
    ModelNetworks,
    Problem,
    Restriction,
    boundary_variables,
    build_networks,
    build_problem,
)
from planner_core.search.network.group_work import BlockCache, OperatorCache
from planner_core.search.network.runs import Run, find_runs
from planner_core.search.network.samples import DimByValue, find_sample_dims, input_sample_dims
from planner_core.search.network.states import NO_STAGE, AxisState, TensorStates, WeightState
