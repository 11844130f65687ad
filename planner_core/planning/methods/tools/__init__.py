"""The tools that plans are made for, one module each: what its settings state, and the file that states it.

A new tool is a module with a `Tool`, a place in `TOOLS`, and a writer in `planner_core.exporters`.

tool     the values `Tool` and `Target`
own      the project's own forms
table    all of them by name, and what a tool can be told
spaces   the layouts among which plans are searched
"""

from planner_core.planning.methods.tools.megatron import MEGATRON, linear_biases, megatron_fault
from planner_core.planning.methods.tools.own import TORCHRUN
from planner_core.planning.methods.tools.spaces import list_layouts, tool_spaces
from planner_core.planning.methods.tools.table import (
    FREE,
    TARGETS,
    TOOL_SWITCHES,
    TOOLS,
    bounding_tool,
    describe_tool_space,
    find_tool,
    note_recompute,
    tool_stages,
    tool_term,
)
from planner_core.planning.methods.tools.tool import SWITCHES, Inner, PairForm, Target, Tool, ToolStages
