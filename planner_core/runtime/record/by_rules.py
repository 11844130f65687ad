"""Check a running call against the rules: what is planned for its name must be one of the ways in which this call can run.

The arguments of a call may have changed since it was planned, since the model's code reads them from attributes that a training
script sets. Example: `x.softmax(self.dim)` was planned with the last dim, and its rows were split by samples. If `dim` is 0
now, the same placements would give each rank a softmax of its own samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner_core.core import Op, SitePlan, Value
from planner_core.ops import rows
from planner_core.runtime.mismatch import PlanMismatch


def check_call_by_rules(op: Op, values: Sequence[Value], row: SitePlan, sizes: Sequence[int]) -> None:
    """Raise PlanMismatch if `op` cannot run by `row` on a mesh of `sizes`. `values` have global shapes, or those of some
    samples."""
    planned_ways = [[*map(str, (p for p, _ in (*r.inputs, *r.outputs)))] for r in rows(op, values)]
    for axis, size in enumerate(sizes):
        takes = [str(e.dst.forward[axis]) for e in row.inputs]
        makes = [str(e.src.forward[axis]) for e in row.outputs]
        if size > 1 and [*takes, *makes] not in planned_ways:
            raise PlanMismatch(
                f"{op.name} is planned to take {', '.join(takes) or 'nothing'} and make {', '.join(makes)} on mesh axis {axis}, which is "
                f"not one of the ways in which {op.fn} can run with the arguments and shapes that the model gives it now; set the model "
                "as it was when it was planned, or plan it again"
            )
