"""Placements that were changed by hand: their text in the address, and the plan that they make. No Streamlit here.

best:keep,LlamaDecoderLayer/mlp.up_proj.weight:R.S(0)      from the best plan, all other weights as in it
megatron-lm:anew,lm_head.weight:S(1)                       from Megatron-LM's, the rest chosen again around it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner_core.core import InputError, Placements, Plan, R, Shard, format_placements
from planner_core.planning import Editable, Result, edit, prepare_planner

OTHER_WEIGHTS = {"keep": "stay as they are", "anew": "are chosen again"}


@dataclass(frozen=True, slots=True)
class Edits:
    """The plan that is edited (its id), what becomes of the other weights, and the placements by weight key."""

    base: str
    rest: str = "keep"
    changes: Mapping[str, Placements] = field(default_factory=dict)

    def write(self) -> tuple[str, ...]:
        """Return the texts of the address; empty where nothing is changed."""
        if not self.changes:
            return ()
        return f"{self.base}:{self.rest}", *(
            f"{k}:{format_placements(p).replace(',', '.')}" for k, p in self.changes.items()
        )

    def put(self, key: str, placements: Placements, before: tuple[Placements, ...]) -> Edits:
        """Return the edits with one weight placed so; without an edit of it where it was placed so `before`."""
        changes = {k: p for k, p in self.changes.items() if k != key}
        return replace(self, changes=changes if before == (placements,) else {**changes, key: placements})


def parse_edits(texts: tuple[str, ...]) -> Edits:
    """Invert `Edits.write`; raises PlannerError for text that is not a placement."""
    base, _, rest = texts[0].rpartition(":")
    return Edits(base, rest, dict(edit.parse_edit(t) for t in texts[1:]))


def build_edited_plan(result: Result, plans: Mapping[str, Plan], texts: tuple[str, ...]) -> Plan:
    """Build the plan with these edits; raises PlannerError with one sentence where it cannot be."""
    edits = parse_edits(texts)
    if edits.base not in plans:
        raise InputError(
            f"the plan {edits.base!r} that was edited is not here any more; plans here: {', '.join(plans)}"
        )
    base = plans[edits.base]
    result = result.of_plan(base)
    weights = {edit.weight_key(e.weight): e.weight for e in edit.editable_weights(result.graph, base)}
    missing = [k for k in edits.changes if k not in weights]
    if missing:
        raise InputError(f"there is no weight {missing[0]!r} in this model")
    changes = {weights[k]: p for k, p in edits.changes.items()}
    return edit.plan_with_pins(prepare_planner(result.request, result.graph), base, changes, keep=edits.rest == "keep")


def placement_options(one: Editable) -> list[str]:
    """Return the placements along one axis that a weight can have: whole, or split by any of its dims."""
    return [str(R), *(str(Shard(d)) for d in range(len(one.meta.shape)))]
