"""The memory of weights and gradients on their way, unit by unit.

uses        how the operators of a unit use its weights
reductions  which gradients of a unit are reduced together
overlap     what a unit holds so that weight traffic hides behind compute
"""

from planner_core.cost.memory.in_flight.overlap import UnitMemory, brought_by_caller, unit_memory, units_of_top
from planner_core.cost.memory.in_flight.reductions import ReductionMemory, SentMemory
from planner_core.cost.memory.in_flight.uses import UseMemory, uses_of
