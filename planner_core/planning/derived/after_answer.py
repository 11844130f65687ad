"""What is asked behind an answer that a page shows already: the best plan with stages, and a closed gap."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import STAGED_ROLES, PlanRole
from planner_core.planning.derived.less_memory import LESS_MEMORY, add_less_memory
from planner_core.planning.fitting.host_waits import note_gap_with_waits
from planner_core.planning.pipeline import (
    FEWER_GPUS,
    FIRST_FEWER_GPUS,
    FIRST_STAGES,
    ONE_STAGE_PASSES,
    Draft,
    add_fewer_gpus,
    is_completed_later,
    is_no_worse,
    plan_model,
    raise_bound,
    search_stages,
)
from planner_core.planning.request import Progress, rare_collections
from planner_core.planning.result import STAGES_PASS, Result, append_staged


@rare_collections()
def add_stages(result: Result, progress: Progress | None = None) -> Result:
    """Run what `FIRST_PASSES` lack, after the answer: the result with the best plan with stages, if that is quicker, and with a note if a
    part of the cluster would be faster."""
    if STAGES_PASS in result.reasons:
        return result
    report_progress = progress or (lambda text: None)
    usual = tuple(plan for plan in result.plans if plan.role not in STAGED_ROLES)
    draft = Draft(
        result.asked,
        result.source,
        result.planner.separate(),
        result.searched,
        report_progress,
        result.best_without_tool,
        result.notes,
        usual=usual,
    )
    reasons = {name: text for name, text in result.reasons.items() if name != FIRST_STAGES}
    # Not there after `prove`, which runs the whole pass.
    if first_reason := reasons.pop(FIRST_FEWER_GPUS, None):
        draft, reasons[FEWER_GPUS] = add_fewer_gpus(draft) if is_completed_later(draft) else (draft, first_reason)
    draft, reasons[STAGES_PASS] = search_stages(draft)
    result = replace(result, reasons=reasons, notes=draft.notes, best_without_tool=draft.best_without_tool)
    return append_staged(result, ((one.plan, one.planner) for one in draft.staged))


def prove(result: Result, progress: Progress | None = None) -> Result:
    """Return the result with its gap closed as far as a gap can be closed, which may take a minute: as `Request.prove`, after the answer.

    A page shows `result` at once, and what this returns when it is there. The plan is the same or a better one, and its bound is not
    lower. A result that is proven is returned as it is, and so is one without a plan that fits.
    """
    searched = result.searched
    if searched.optimal or not searched.fits:
        return result
    asked = replace(result.asked, prove=True)
    proven = plan_model(asked, result.source, progress, result.planner.separate(), passes=ONE_STAGE_PASSES)
    if not is_no_worse(proven.searched, searched):
        # A simpler plan that leads has the bound of the one behind it.
        leading = 2 if result.best.role is PlanRole.SIMPLER else 1
        raised = [note_gap_with_waits(raise_bound(plan, proven.searched)) for plan in result.plans[:leading]]
        return replace(result, plans=(*raised, *result.plans[leading:]))
    if LESS_MEMORY in result.reasons:
        proven = add_less_memory(proven, progress)
    # The searches of stages do not depend on a proof, so what they found stands.
    of_stages = {name: reason for name, reason in result.reasons.items() if name in (FIRST_STAGES, STAGES_PASS)}
    proven = replace(proven, reasons={**proven.reasons, **of_stages})
    if result.best_without_tool is not None and proven.best_without_tool is not None:
        proven = replace(proven, best_without_tool=result.best_without_tool.or_better(proven.best_without_tool))
    staged = (p for p in result.plans if p.role in STAGED_ROLES)
    quicker = [p for p in staged if p.cost.step_time_s < proven.searched.cost.step_time_s]
    return append_staged(proven, ((plan, result.of_plan(plan).planner) for plan in quicker))
