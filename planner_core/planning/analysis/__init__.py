"""Answers to questions about plans: reports, sensitivity, scaling, ablation."""

from planner_core.planning.analysis import sensitivity
from planner_core.planning.analysis.ablation import SAYS, AblationStep, ablation_steps
from planner_core.planning.analysis.doubt import (
    MOST_DOUBT,
    SCENARIOS,
    Choice,
    Regret,
    Scenario,
    Tie,
    choice,
    doubt_between,
    regret,
)
from planner_core.planning.analysis.fold_graph import to_dot, to_graphml, to_networkx
from planner_core.planning.analysis.folding import fold_report, fold_text
from planner_core.planning.analysis.priced import price_report, price_text
from planner_core.planning.analysis.reporting import (
    front_report,
    front_text,
    regret_report,
    regret_text,
    report,
    simulated_s,
    table,
    text,
    unknown_ops,
)
from planner_core.planning.analysis.scaling import COUNTS, Size, grow, resized
from planner_core.planning.analysis.sensitivity import SAME, UNKNOWN, Crossover, MapAxis, RegionCell
from planner_core.planning.analysis.space_size import log10_size, space_sizes
from planner_core.planning.analysis.step_trace import STREAMS, TraceWork, chrome_trace, step_work, trace_of
from planner_core.planning.analysis.unfolded_network import network_json, unfold_problem

__all__ = [
    "COUNTS",
    "MOST_DOUBT",
    "SAME",
    "SAYS",
    "SCENARIOS",
    "STREAMS",
    "UNKNOWN",
    "AblationStep",
    "Choice",
    "Crossover",
    "MapAxis",
    "RegionCell",
    "Regret",
    "Scenario",
    "Size",
    "Tie",
    "TraceWork",
    "ablation_steps",
    "choice",
    "chrome_trace",
    "doubt_between",
    "fold_report",
    "fold_text",
    "front_report",
    "front_text",
    "grow",
    "log10_size",
    "network_json",
    "price_report",
    "price_text",
    "regret",
    "regret_report",
    "regret_text",
    "report",
    "resized",
    "sensitivity",
    "simulated_s",
    "space_sizes",
    "step_work",
    "table",
    "text",
    "to_dot",
    "to_graphml",
    "to_networkx",
    "trace_of",
    "unfold_problem",
    "unknown_ops",
]
