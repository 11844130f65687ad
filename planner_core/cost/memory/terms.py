"""Every term of the memory of weights, defined once. The search's sums and the simulation along a step both use it.

Let a weight have `item` bytes per element in compute dtype. On one GPU let w, g and s be the numbers of elements of its working
copy, its accumulated gradient and its stored form. Then

    params      s · kept_item, plus w · item if a working copy is held beside the stored parameter
    gradients   g · gradient_item, from its first backward until it is reduced, and s · updated_item from then to the optimizer
    optimizer   s · moments · kept_item, and 0 if the host's memory keeps the moments

`kept_item` is 4 bytes in mixed precision, and so is `gradient_item` unless `--gradients` says another dtype. `updated_item` is then still
4 bytes where torch's optimizer takes the gradient, and `gradient_item` for a tool that keeps its sums (`Stack.keeps_sums`). A gradient
that nothing is left to sum of stands as the optimizer takes it from the first.
A working copy is held beside the stored parameter if the two differ in dtype or in
placement. If the weight is gathered at each use from the stored parameter itself, the copy is made for the use and then freed.

Example: 1000 elements in bf16, AdamW with fp32 states, DDP: w = g = s = 1000. params are 4000 + 2000 bytes, gradients 4000,
optimizer 8000: 18 bytes per element. ZeRO-1 on 4 GPUs: s = 250, so params are 1000 + 2000 bytes and optimizer 2000. The gradient takes
4000 bytes until it is reduced, and 1000 then. ZeRO-3 on 4 GPUs: g = s = 250 and no working copy: 1000 + 1000 + 2000 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner_core.core import Workload


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes per element of each form of a weight. `working` is that of a copy that is held beside the stored parameter, `gradient`
    that of a sum that grows, `updated` that of the gradient that the optimizer takes."""

    stored: int
    working: int
    gradient: int
    updated: int
    moments: int


def weight_bytes(item: int, trained: bool, workload: Workload) -> WeightBytes:
    """Return the bytes per element of a weight. A weight that is not trained is kept in its own dtype, without gradient and moments."""
    if not trained:
        return WeightBytes(item, item, 0, 0, 0)
    moments = 0 if workload.offload else workload.moment_bytes(item)
    gradient, updated = workload.gradient_item(item), workload.updated_item(item)
    return WeightBytes(workload.kept_item(item), item, gradient, updated, moments)


def has_working_copy(item: int, trained: bool, workload: Workload, same_placement: bool, gathered: bool) -> bool:
    """Return whether a kept working copy takes memory beside the stored parameter. `gathered`: the weight is gathered at each use."""
    # In one placement and one dtype the stored parameter is the working copy. In another dtype a weight that is gathered at use is cast
    # for the use and freed. All others are held beside it: bfloat16 beside a float32 master, or whole beside a part (ZeRO-1 and 2).
    return trained and not (same_placement and (gathered or workload.kept_item(item) == item))
