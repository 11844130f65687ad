"""What one training step does (`workload`), and the software that runs it (`software`)."""

from planner_core.core.workload.software import (
    ATTENTION,
    GRADIENTS,
    LOSSES,
    OPTIMIZER_KERNELS,
    PACKED,
    PUBLISHED_STACKS,
    SOFTWARE,
    TORCH_ATTENTION,
    Software,
    Stack,
    load_stack,
    stack_names,
)
from planner_core.core.workload.workload import (
    CHUNKS,
    DEFAULT_PRECISION,
    DTYPES,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTE,
    ZERO,
    Workload,
)

__all__ = [
    "ATTENTION",
    "CHUNKS",
    "DEFAULT_PRECISION",
    "DTYPES",
    "GRADIENTS",
    "LOSSES",
    "OPTIMIZERS",
    "OPTIMIZER_KERNELS",
    "PACKED",
    "PRECISIONS",
    "PUBLISHED_STACKS",
    "RECOMPUTE",
    "SOFTWARE",
    "TORCH_ATTENTION",
    "ZERO",
    "Software",
    "Stack",
    "Workload",
    "load_stack",
    "stack_names",
]
