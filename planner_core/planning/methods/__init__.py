"""Methods and baselines, each a restriction of one space of plans. `registry` has one entry for each."""

from planner_core.planning.methods.differences import (
    TOKENS_OR_GATHERED,
    WHOLE_PLANS,
    CannotHold,
    Difference,
    DifferenceKind,
    describe_modules,
    star_numbers,
)
from planner_core.planning.methods.hf_tp_plan import VendorRules, load_vendor_plans, vendor_rules
from planner_core.planning.methods.layout import (
    CP_TYPES,
    EXAMPLE,
    PEERS_TYPES,
    Layout,
    check_layout,
    list_schedules,
    note_schedule,
    parse_layout,
)
from planner_core.planning.methods.legality import (
    operator_faults,
    undecided_fault,
    unsearchable_faults,
)
from planner_core.planning.methods.method import Method, unrestricted
from planner_core.planning.methods.pair_forms import (
    EXPERT_STYLE,
    LayerStyles,
    form_rules,
    may_split_tokens,
    splittable_layers,
    sum_for_each_column,
)
from planner_core.planning.methods.registry import (
    ALL,
    BASELINES,
    EXACT,
    METHODS,
    OF_MEGATRON,
    describe_least,
    find_method,
    note_own_workload,
    note_shared_workload,
)
from planner_core.planning.methods.restrictions import (
    AxisRules,
    DataAxis,
    is_batch_split,
    is_unsplit,
    is_used_in_parts,
    pass_any,
    sums_gradient_whole,
)
from planner_core.planning.methods.tools import (
    FREE,
    MEGATRON,
    SWITCHES,
    TARGETS,
    TOOL_SWITCHES,
    TOOLS,
    TORCHRUN,
    Inner,
    PairForm,
    Target,
    Tool,
    ToolStages,
    bounding_tool,
    describe_tool_space,
    find_tool,
    linear_biases,
    list_layouts,
    megatron_fault,
    note_recompute,
    tool_spaces,
    tool_stages,
    tool_term,
)
from planner_core.planning.methods.tp_layout import (
    NothingSplit,
    TensorParallelGroup,
    TpLayout,
    drop_summed,
    parallel_degrees,
    recompute_by_hand,
    tensor_layout,
)
