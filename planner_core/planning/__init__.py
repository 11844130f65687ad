"""From a request to plans.

`plan_model` takes a `Request` (model, cluster, workload, method) and runs the parts in order: the graph, its groups, a problem for
each mesh, the search, the memory simulation, the baselines, pipeline stages. `compare_methods` does this for every method.

    pipeline    the passes in order
    result      the plans, and which of them is the one to run
    planner     what all meshes of one request share
    fitting/    what memory decides: micro-batches, recomputation, and the reason if nothing fits
    methods/    one entry for each method and baseline
    pricing/    the price of a layout that a team states
    analysis/   questions about plans: reports, ties and regret, ablation
    stages/     the best plan with pipeline stages
    derived/    another plan made from a given one
"""

from planner_core.planning.derived import (
    LESS_MEMORY,
    WITH_RECOMPUTATION,
    add_less_memory,
    add_stages,
    compare_methods,
    edit,
    prove,
    retarget_plan,
    shrink_config,
    shrunk_configs,
    small_mesh,
)
from planner_core.planning.derived.edit import Editable
from planner_core.planning.fitting.baselines import find_faster_baseline, plan_baselines
from planner_core.planning.fitting.for_tool import follow_tp_layout, runs_on_stock_tools
from planner_core.planning.fitting.front import (
    TRADE_OFF,
    FrontPoint,
    describe_front,
    exact_front,
    with_open_recomputation,
)
from planner_core.planning.fitting.host_waits import note_unknown_host
from planner_core.planning.fitting.mesh_search import choose_mesh
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.fitting.micro_batches import choose_micro_batches
from planner_core.planning.fitting.shortage import least_state_bytes, replicated_gpus
from planner_core.planning.fitting.simpler import FASTEST
from planner_core.planning.library import Folded, Front, compare, fold, front, plan, price
from planner_core.planning.methods import METHODS
from planner_core.planning.pipeline import FIRST_PASSES, plan_model
from planner_core.planning.planner import (
    USABLE_MEMORY,
    Planner,
    candidate_meshes,
    prepare_planner,
    replace_request,
    usable_bytes,
    with_recompute,
)
from planner_core.planning.request import Effort, Progress, Request, rare_collections, request_of
from planner_core.planning.result import (
    MAX_DOUBT,
    STAGES_PASS,
    Choice,
    Result,
    block_candidates,
    doubt_between,
    plan_ids,
)
from planner_core.planning.stages import LEAST_MEMORY_NAME, STAGES_PLAN_NAME, may_use_stages, stage_trace
