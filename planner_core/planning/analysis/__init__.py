"""Answers to questions about plans: reports, regret, ablation."""

from planner_core.planning.analysis.ablation import AblationStep, ablation_steps, exact_step
from planner_core.planning.analysis.fold_graph import to_dot, to_graphml, to_networkx
from planner_core.planning.analysis.folding import fold_report, fold_text
from planner_core.planning.analysis.legend import fits_mark, list_notes, step_proof
from planner_core.planning.analysis.priced import price_report, price_text
from planner_core.planning.analysis.regret import SCENARIOS, plan_regrets, regret_report, regret_text
from planner_core.planning.analysis.reporting import (
    describe_recomputation,
    first_plan_text,
    format_table,
    front_report,
    front_text,
    plan_report,
    simulate_steps,
    text,
    unknown_ops,
)
from planner_core.planning.analysis.space_size import count_spaces, log10_size
from planner_core.planning.analysis.step_trace import STREAMS, TraceWork, chrome_trace, step_work, trace_of
from planner_core.planning.analysis.unfolded_network import network_json, unfold_problem
