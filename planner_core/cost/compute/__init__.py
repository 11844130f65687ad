"""The seconds that one operator, or the optimizer, takes on one GPU."""

from planner_core.cost.compute.optimizer import (
    check_offload,
    optimizer_bytes,
    optimizer_seconds,
    weight_handout_seconds,
)
from planner_core.cost.compute.products import product_seconds
from planner_core.cost.compute.roofline import has_kernels, kernel_seconds, op_time, op_work
from planner_core.cost.compute.weights import copied_seconds, divided_seconds, kept_gradient_seconds
