"""The plans of baselines: the search for each (`search`), the layout that a request states, and both beside the chosen plan."""

from planner_core.planning.fitting.baselines.comparison import better_of_baselines, describe_restriction_cost
from planner_core.planning.fitting.baselines.missing import note_missing_baselines
from planner_core.planning.fitting.baselines.search import find_faster_baseline, plan_baselines
from planner_core.planning.fitting.baselines.stated_layout import plan_stated_layout
