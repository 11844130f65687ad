"""Operators: how each may be split over one mesh axis, what it costs, and which ops of a model share a placement.

An *operator* is a torch function (`linear`, `softmax`); an *op* is one call of it in a model's graph. Everything that
the planner knows of an operator is one `Operator` value in `catalog`, and `operator("linear")` finds it by any of its
spellings. A name that the catalogue lacks gives an operator that runs whole on every GPU, and reports name it.

A rule, with small numbers
--------------------------
`matmul` of a [4, 6] and b [6, 8] gives [4, 8]: the equation `mk,kn->mn` with m = 4, k = 6, n = 8. On a mesh axis of two
GPUs any of its three dims may be split, and where the dim stands says the rest:

    split   a [4, 6]              b [6, 8]              result [4, 8]         each GPU computes
    m       S(0): [2, 6]          R, gradient Partial   S(0): [2, 8]          its rows
    n       R, gradient Partial   S(1): [6, 4]          S(1): [4, 4]          its columns
    k       S(1): [4, 3]          S(0): [3, 8]          Partial: [4, 8]       one term of a @ b = a1 @ b1 + a2 @ b2

An operand that lacks the dim is replicated (R) while the work is split, so each GPU makes one term of its gradient:
the gradient is Partial. A result that lacks the dim is Partial itself. `matmul` is also linear in a: a Partial a gives
a Partial result (row "P"). Its rule in `catalog/products.py` returns just the three lines (`Split`) and `linear=(0,)`;
`rows` makes the strategies of them, each the placements of every operand and result and of their gradients.

What a product does on one GPU are kernels with shapes (`work_of`): split by n above, forward is `Gemm(m=4, n=4, k=6)`,
192 FLOPs, and so is each of the two gradients.

From rules to groups
--------------------
`coarsen` merges ops that must share a placement into groups, and `block_strategies` lists for each group the ways to run
it: rows of its ops that agree on every tensor between them.

The order inside: `rules` (what a rule is) and `work` (kernels) < `operators` (`Operator`) < `catalog` (all of them, one
file for each kind) < `registry` (find one, ask it) < `recomputation` < `grouping` < `strategy`.
"""

from planner_core.ops.catalog.attention import CONTEXT, RING
from planner_core.ops.catalog.products import DISPATCH
from planner_core.ops.grouping import CoarseBlock, CoarseGraph, Group, coarsen, coarsen_block
from planner_core.ops.operators import (
    AS_RUN,
    FLOPS_BOUND_KINDS,
    WHOLE_LOGITS,
    CallDescription,
    Kind,
    LocalBytes,
    LocalExecution,
    Operator,
    writes_in_place,
)
from planner_core.ops.recomputation import kept_ops, last_saving, recompute_policies
from planner_core.ops.registry import (
    backward_workspace_bytes,
    canonical_function,
    extra_bytes,
    extra_saved_bytes,
    global_bytes,
    is_free,
    is_heavy,
    known_functions,
    operator,
    rows,
    splits_saved_tensor,
    work_of,
)
from planner_core.ops.rules import Pair, Row, can_run_together
from planner_core.ops.strategy import (
    BlockStrategies,
    GroupStrategy,
    SegmentMap,
    block_strategies,
    graph_strategies,
    strategies_of_any_samples,
)
from planner_core.ops.traffic import (
    FUSED,
    NORM_KERNEL,
    TIMED_WITH_BYTES,
    MemoryPasses,
    find_norms,
    memory_passes,
)
from planner_core.ops.work import Attention, Gemm, GroupedGemm, Kernel, Merge, Scan, Work
