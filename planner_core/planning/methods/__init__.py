"""Methods and baselines, each a restriction of one space of plans. `registry` has one entry for each."""

from planner_core.planning.methods.hf_tp_plan import VendorRules, vendor_plan, vendor_plans, vendor_rules
from planner_core.planning.methods.layout import (
    CP_TYPES,
    EXAMPLE,
    PEERS_TYPES,
    Layout,
    Space,
    at_stage,
    check_layout,
    parse_layout,
)
from planner_core.planning.methods.legality import faults, may_state
from planner_core.planning.methods.method import Method, Restrict, free
from planner_core.planning.methods.registry import ALL, BASELINES, EXACT, METHODS
from planner_core.planning.methods.restrictions import (
    AxisRules,
    DataAxis,
    PairTest,
    anything,
    batch_split,
    sequence_split,
    sharded,
    summed,
    used_in_parts,
    whole,
)
from planner_core.planning.methods.tools import FREE, TOOLS, check_tool, spaces

__all__ = [
    "ALL",
    "BASELINES",
    "CP_TYPES",
    "EXACT",
    "EXAMPLE",
    "FREE",
    "METHODS",
    "PEERS_TYPES",
    "TOOLS",
    "AxisRules",
    "DataAxis",
    "Layout",
    "Method",
    "PairTest",
    "Restrict",
    "Space",
    "VendorRules",
    "anything",
    "at_stage",
    "batch_split",
    "check_layout",
    "check_tool",
    "faults",
    "free",
    "may_state",
    "parse_layout",
    "sequence_split",
    "sharded",
    "spaces",
    "summed",
    "used_in_parts",
    "vendor_plan",
    "vendor_plans",
    "vendor_rules",
    "whole",
]
