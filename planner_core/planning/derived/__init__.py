"""Plans made from a given one: with other placements, or on a smaller model of the same architecture (for runs on few processes).

after_answer   the stages, and the proof, of an answer that is shown already
less_memory    plans that recompute, beside an answer without
edit           a plan with some weights placed by hand
small_config   a config with small sizes and few layers
scaled_down    a plan on another model and another mesh
comparison     the plan of every method, beside the best
"""

from planner_core.planning.derived.after_answer import add_stages, prove
from planner_core.planning.derived.comparison import compare_methods
from planner_core.planning.derived.less_memory import LESS_MEMORY, WITH_RECOMPUTATION, add_less_memory
from planner_core.planning.derived.scaled_down import retarget_plan, small_mesh
from planner_core.planning.derived.small_config import shrink_config, shrunk_configs
