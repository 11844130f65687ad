"""Memory of one GPU through a step, simulated operator by operator along forward and backward.

terms                    every term of the memory of weights, defined once
standing                 what weights take all through a step
saved                    which tensors autograd keeps for backward
storages                 the tensors that one GPU allocates while a block runs
redistribution_buffers   what a redistribution needs on its way
in_flight                weights that are gathered ahead, and gradients on their way
forward, backward        the highest memory at every item of a block
peak                     the whole step; `walk` is the simulation
deep                     the peak alone, without the middle of many equal copies
at_peak                  the single tensors at the highest moment
"""

from planner_core.cost.memory.at_peak import Held, tensors_at_peak
from planner_core.cost.memory.deep import peak_memory, stage_moments
from planner_core.cost.memory.forward import BlockMemory, Moment
from planner_core.cost.memory.peak import Walk, at_work, block_memories, walk
from planner_core.cost.memory.saved import Rerun, computes_again, kept_results, run_again, viewed
from planner_core.cost.memory.standing import Standing, param_bytes
from planner_core.cost.memory.terms import has_working_copy, weight_bytes

__all__ = [
    "BlockMemory",
    "Held",
    "Moment",
    "Rerun",
    "Standing",
    "Walk",
    "at_work",
    "block_memories",
    "computes_again",
    "has_working_copy",
    "kept_results",
    "param_bytes",
    "peak_memory",
    "run_again",
    "stage_moments",
    "tensors_at_peak",
    "viewed",
    "walk",
    "weight_bytes",
]
