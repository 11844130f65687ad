"""What one training step does (`workload`), the software that runs it (`software`), and every option (`options`)."""

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
