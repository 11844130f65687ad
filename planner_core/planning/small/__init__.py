"""A smaller model of the same architecture, and a plan of the large one on it (for runs on few processes).

small_config   a config with small sizes and few layers
scaled_down    a plan on another model and another mesh
"""

from planner_core.planning.small.scaled_down import retarget_plan, small_mesh
from planner_core.planning.small.small_config import shrink_config, shrunk_configs

__all__ = ["retarget_plan", "shrink_config", "shrunk_configs", "small_mesh"]
