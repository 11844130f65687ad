"""The number of micro-batches of a step: what is known of each (`state`), the search of one (`one_number`), and the order (`choose`)."""

from planner_core.planning.fitting.micro_batches.choose import choose_micro_batches
from planner_core.planning.fitting.micro_batches.one_number import bound_on_mesh
from planner_core.planning.fitting.micro_batches.state import ShowFirst
