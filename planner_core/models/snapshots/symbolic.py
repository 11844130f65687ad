"""One snapshot for every workload: dims as text in b (batch) and s (sequence length).

Three captures, at (b, s), (2b, s) and (b, 2s), show for every integer how it depends on the workload. An integer that does not have
the form `[coef*][b*][s][+const]` is refused. Further captures are compared with the merged graph.

Example: an integer is 3200, 6400 and 6400 in the three captures at b = 10, s = 40. It doubles with both, so it is "8*b*s".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner_core.core import CaptureError, Graph, graph_from_json, graph_to_json
from planner_core.models.snapshots.compare import graph_difference


def merge_symbolic(graphs: Sequence[Graph]) -> dict[str, Any]:
    """Merge captures at (b, s), (2b, s) and (b, 2s) into the JSON that `graph_from_json` reads; raises CaptureError.

    Any further captures are not merged but compared with the result at their workload.
    """
    first, wide, long = graphs[:3]
    b, s = first.workload["batch"], first.workload["seq"]
    if (wide.workload["batch"], wide.workload["seq"], long.workload["batch"], long.workload["seq"]) != (
        2 * b,
        s,
        b,
        2 * s,
    ):
        raise CaptureError("a symbolic graph is made from captures at (b, s), (2b, s) and (b, 2s)")
    plain = [graph_to_json(g) for g in graphs[:3]]
    merge = _Merge(b, s)
    merged: dict[str, Any] = {
        k: v if k in ("workload", "config") else merge.walk(k, *(p[k] for p in plain)) for k, v in plain[0].items()
    }
    return _check_proofs(merged, graphs[3:])


def merge_symbolic_batch(first: Graph, wide: Graph, *proofs: Graph) -> dict[str, Any]:
    """Merge captures at b and 2b of one sequence length, and compare the result with captures at other batches."""
    b, s = first.workload["batch"], first.workload["seq"]
    if wide.workload != {"batch": 2 * b, "seq": s}:
        raise CaptureError("a graph that is symbolic in the batch is made from captures at (b, s) and (2b, s)")
    x, y = graph_to_json(first), graph_to_json(wide)
    merge = _Merge(b, s)
    plain = ("workload", "config", "assumptions")
    # The first capture stands for the longer one too: then no integer seems to depend on the length.
    merged: dict[str, Any] = {k: v if k in plain else merge.walk(k, v, y[k], v) for k, v in x.items()}
    return _check_proofs(merged, proofs)


def _check_proofs(merged: dict[str, Any], proofs: Sequence[Graph]) -> dict[str, Any]:
    """Return `merged` if it equals every proof at that proof's workload. Raises CaptureError."""
    for proof in proofs:
        graph = graph_from_json(merged, batch=proof.workload["batch"], seq=proof.workload["seq"])
        # Folded first: a difference is looked for op by op, which takes seconds for a thousand layers.
        if replace(graph, assumptions=()) == replace(proof, assumptions=()):
            continue
        if difference := graph_difference(graph, proof):
            raise CaptureError(
                f"the graph depends on the workload in no simple way ({difference}): no snapshot can hold it"
            )
    return merged


class _Merge:
    def __init__(self, b: int, s: int) -> None:
        self.b, self.s = b, s

    def walk(self, where: str, x: Any, wide: Any, long: Any, attrs: bool = False) -> Any:
        """Merge three parallel pieces of JSON."""
        # A tuple that has come through JSON is a list.
        kinds = {type(v) if not isinstance(v, tuple) else list for v in (x, wide, long)}
        if len(kinds) > 1 or (isinstance(x, (list, tuple, dict)) and not len(x) == len(wide) == len(long)):
            raise CaptureError(f"the graph changes its form with the workload at {where}, so no snapshot can hold it")
        if isinstance(x, dict):
            if not set(x) == set(wide) == set(long):
                raise CaptureError(
                    f"the graph changes its form with the workload at {where}, so no snapshot can hold it"
                )
            return {k: self.walk(f"{where}.{x.get('op', k)}", x[k], wide[k], long[k], attrs or k == "attrs") for k in x}
        if isinstance(x, (list, tuple)):
            return [self.walk(where, *row, attrs=attrs) for row in zip(x, wide, long, strict=True)]
        if x == wide == long:
            return x
        if not isinstance(x, int) or isinstance(x, bool):
            raise CaptureError(
                f"{where} is {x!r}, {wide!r} and {long!r} as the workload grows, so no snapshot can hold it"
            )
        text = self.dim(where, x, wide, long)
        return {"dim": text} if attrs else text

    def dim(self, where: str, x: int, wide: int, long: int) -> str:
        """Write an integer as text in b and s, from its values at the three workloads."""
        by_b, by_s = wide - x, long - x
        # b*s counts tokens: it doubles with either, so both differences are the same step.
        if by_b and by_s:
            symbol, unit, step = "b*s", self.b * self.s, by_b if by_b == by_s else 0
        elif by_b:
            symbol, unit, step = "b", self.b, by_b
        else:
            symbol, unit, step = "s", self.s, by_s
        # A large negative constant means a product of lengths: s*s takes the values 40*40 and 80*80, which fits 120*s - 3200.
        if step <= 0 or step % unit or 2 * (step - x) >= step:
            raise CaptureError(
                f"{where} is {x}, {wide} with twice the batch, {long} with twice the length: not of the form 4*b*s+1"
            )
        coef, rest = step // unit, x - step
        return (f"{coef}*" if coef > 1 else "") + symbol + (f"{rest:+d}" if rest else "")
