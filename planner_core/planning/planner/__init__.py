"""All that the meshes and methods of one request share: the model, its groups and strategies, the cluster, and the memory budget.

prepare    a request becomes a planner
planner    from a mesh and a restriction to an answer and its plan
networks   the cost networks that it has built
"""

from planner_core.planning.planner.networks import Networks
from planner_core.planning.planner.planner import (
    STATED,
    STATED_METHOD,
    USABLE_MEMORY,
    MeshAnswer,
    Planner,
    recomputation_of,
    replace_request,
    usable_bytes,
    with_any_samples,
    with_recompute,
    with_zero,
)
from planner_core.planning.planner.prepare import candidate_meshes, prepare_planner
