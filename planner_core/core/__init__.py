"""The values on which all other packages work: placement, mesh, graph, plan, workload, cluster. They import nothing else of the
project."""

from planner_core.core.cluster.cluster import (
    Cluster,
    Level,
    assumed_node_notes,
    cluster_names,
    load_cluster,
    split_size,
)
from planner_core.core.cluster.constants import Timing, load_timing
from planner_core.core.cluster.gpu import Gpu, gpu_names, load_gpu, slow_dtype_notes
from planner_core.core.cluster.kernels import Collectives
from planner_core.core.errors import (
    CaptureError,
    InputError,
    NeedsValues,
    NotRunnable,
    PlannerError,
    SearchFault,
    Sentence,
    ShardingError,
    Term,
    VerificationFailed,
    is_installed,
    naming_extras,
    require_packages,
)
from planner_core.core.files import ASSETS, check_writable, is_file, is_folder, path_exists, write_file
from planner_core.core.forms import list_names, read_json, read_text, shorten_error, shorten_value, suggest_names
from planner_core.core.graph import (
    ITEM_BYTES,
    NO_GRADIENT,
    STANDIN_LOSS,
    STANDIN_SCOPE,
    VARIES,
    Attr,
    Block,
    Call,
    CallSite,
    Graph,
    GraphSizes,
    Op,
    TensorMeta,
    Value,
    ValueKind,
    check_graph,
    differentiable_inputs,
    is_later_call,
    is_within,
    join_name,
    module_path,
    nth_call,
    numbered_names,
    root,
    unfold_graph,
    with_result_as_output,
)
from planner_core.core.graph_json import graph_from_json, graph_to_json
from planner_core.core.mesh import (
    MAX_AXES,
    ONE_RANK,
    DeviceMesh,
    PipelineAxis,
    axis_names,
    divisors,
    mesh_shapes,
    nearest_multiple,
    parse_mesh,
)
from planner_core.core.placement import (
    CollectiveKind,
    P,
    Partial,
    Placement,
    Placements,
    R,
    Replicate,
    Shard,
    State,
    Step,
    format_placements,
    group_sums,
    joint_axes,
    largest_local_shape,
    local_shape,
    needs_uneven_split,
    parse_placement,
    parse_placements,
    shortest_steps,
    unevenly_split_dims,
)
from planner_core.core.plan.blocks import BlockLabel, BlockPlan, Edge, ParamPlan, SitePlan
from planner_core.core.plan.cost import PASSES, PHASES, Cost, Phase, PipelineCost, StageCost, Traffic
from planner_core.core.plan.model import PlannedModel
from planner_core.core.plan.no_plan_fits import NoPlanFits
from planner_core.core.plan.notes import STAGED_ROLES, UNPROVEN_KINDS, Note, NoteKind, PlanRole
from planner_core.core.plan.pipeline import ONE_EACH, SCHEDULES, V_SHAPED, VIRTUAL_OF_V, Pipeline
from planner_core.core.plan.plan import (
    Plan,
    data_axes_of,
    glob_name,
    params_by_pattern,
    placements_by_pattern,
    refuse_stages,
    states_by_pattern,
)
from planner_core.core.plan_json import (
    axes_from_json,
    axes_to_json,
    is_plan_json,
    load_plan,
    plan_from_json,
    plan_to_json,
    save_plan,
)
from planner_core.core.workload.amounts import MAGNITUDES, Unreadable, parse_tokens
from planner_core.core.workload.options import (
    AUTO,
    CHUNKS,
    DTYPES,
    MAX_SAMPLES,
    OPTIMIZER_KERNELS,
    OPTIMIZERS,
    OPTIONS,
    RECOMPUTE,
    TORCH_ATTENTION,
    TORCH_RELEASE,
    ZERO,
    Option,
    check_options,
    memory_amount,
    named,
    named_check,
    named_form,
    option_switch,
    time_amount,
)
from planner_core.core.workload.software import (
    PACKED,
    PUBLISHED_STACKS,
    SOFTWARE,
    USUAL_STACK,
    Software,
    Stack,
    load_stack,
    stack_names,
)
from planner_core.core.workload.workload import DEFAULT_PRECISION, Workload, keeps_masters
