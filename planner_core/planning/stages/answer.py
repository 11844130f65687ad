"""Compare the best plan with stages with the best plan of one stage, and with what a stock tool makes of stages."""

from __future__ import annotations

from dataclasses import replace

from planner_core.core import Cluster, Graph, InputError, Note, Plan, Sentence, Term, time_amount
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.methods import BASELINES, EXACT
from planner_core.planning.planner import Planner, prepare_planner
from planner_core.planning.request import Progress, Request
from planner_core.planning.stages.cuts import STAGES_PLAN_NAME
from planner_core.planning.stages.search import StagedPlan, search_stages
from planner_core.planning.stages.tool_forms import FORMS, may_have_stages

STOCK_TOOL, STOCK_PLAN_NAME = "megatron", "Megatron-LM with stages"
"""The tool whose best plan with stages stands beside the best of all, and the name of that plan."""
STAGED_NAMES = (STAGES_PLAN_NAME, STOCK_PLAN_NAME)
"""The names of the plans that a search of stages adds to an answer."""


def find_staged_plans(
    request: Request,
    chosen: Plan,
    say: Progress = lambda text: None,
    source: GraphSource = None,
    like: Planner | None = None,
) -> tuple[StagedPlan, ...]:
    """Find the best plan with stages for the same samples a step, and the best of those that a stock tool can be told.

    Empty unless stages are quicker than the `chosen` plan of one stage. A request for a tool gets the best plan of that tool alone. `like`:
    the planner of the chosen plan, whose graphs are reused."""
    best = _find_staged_plan(request, chosen, say, source, like)
    if best is None:
        return ()
    if request.tool in FORMS:
        tool = Term("tool", str(request.tool), None, str(request.tool))
        return (_add_note(best, Sentence("the best with stages that ", tool, " can be told")),)
    stock = _find_staged_plan(replace(request, tool=STOCK_TOOL), chosen, say, source, like)
    if stock is None:
        return (best,)
    # Each search ends before all degrees are tried, so that of the tool may meet a better plan, which is one of all plans too.
    if stock.plan.cost.step_time_s < best.plan.cost.step_time_s:
        best = replace(stock, bound=best.bound)
    slower = stock.plan.cost.step_time_s / best.plan.cost.step_time_s - 1
    comparison = f"takes {100 * slower:.2g} % longer" if slower else "is as fast"
    # `ToolForm.layout` splits tokens wherever products are sharded.
    method = "megatron-sp" if "tensor" in stock.plan.mesh.axis_names else "megatron"
    row = replace(stock.plan, name=STOCK_PLAN_NAME, method=BASELINES[method].name)
    return _add_note(best, f"{STOCK_PLAN_NAME} {comparison}"), replace(stock, plan=row)


def may_use_stages(request: Request, cluster: Cluster, source: GraphSource = None) -> bool:
    """Whether stages are searched: with several nodes, and if the request fixes neither mesh nor micro-batches, nor a tool without stages.

    The model is built for each size of a micro-batch, so it must come from a config or the zoo."""
    if isinstance(source, Graph) or ".py:" in request.model or request.model.endswith(".pt2"):
        return False
    free = request.mesh is None and may_have_stages(request.tool) and request.method == EXACT.name
    several = cluster.num_gpus > cluster.levels[0].size and request.objective == "time"
    return free and several and request.accumulate is None and request.micro_batch is None


def _find_staged_plan(
    request: Request, chosen: Plan, say: Progress, source: GraphSource, like: Planner | None
) -> StagedPlan | None:
    """Find the best plan with stages that the request's tool can be told; None unless it is quicker than the `chosen` plan."""
    staged_request = replace(request, batch=chosen.workload["batch"], seq=chosen.workload["seq"], accumulate=1)
    load_graph = source if callable(source) else None
    try:
        planner = prepare_planner(staged_request, load_graph(staged_request) if load_graph else None, like=like)
    except InputError:  # the model has no such micro-batch
        return None
    staged = search_stages(planner, say, load_graph, known=chosen if chosen.fits else None)
    if staged is None:
        return None
    step_s, note = staged.plan.cost.step_time_s, "it fits"
    if chosen.fits:
        chosen_s = chosen.cost.step_time_s
        note = Sentence(
            "a step of ", time_amount(step_s), ", where the best plan of one stage takes ", time_amount(chosen_s)
        )
    return replace(staged, plan=replace(staged.plan, notes=(Note(note), *staged.plan.notes)))


def _add_note(staged: StagedPlan, sentence: str) -> StagedPlan:
    return replace(staged, plan=replace(staged.plan, notes=(*staged.plan.notes, Note(sentence))))
