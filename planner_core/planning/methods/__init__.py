"""Baselines and the papers' methods as restrictions of one space."""

from planner_core.planning.methods.baselines import BASELINES, Baseline
from planner_core.planning.methods.hf_tp_plan import EXPERT, ExpertRules, expert_plans, expert_rules
from planner_core.planning.methods.papers import LENSES, Lens
from planner_core.planning.methods.restrictions import (
    AxisRules,
    PairTest,
    batch_split,
    sequence_split,
    sharded,
    split_weight,
    summed,
    whole,
)

__all__ = [
    "BASELINES",
    "EXPERT",
    "LENSES",
    "AxisRules",
    "Baseline",
    "ExpertRules",
    "Lens",
    "PairTest",
    "batch_split",
    "expert_plans",
    "expert_rules",
    "sequence_split",
    "sharded",
    "split_weight",
    "summed",
    "whole",
]
