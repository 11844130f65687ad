"""Memory of one GPU through a step, simulated operator by operator along forward and backward.

terms                    every term of the memory of weights, defined once
standing                 what weights take all through a step
saved                    which tensors autograd saves for backward
storages                 the tensors that one GPU allocates while a block runs
redistribution_buffers   what a redistribution needs on its way
in_flight                weights that are gathered ahead, and gradients on their way
forward, backward        the highest memory at every item of a block
peak                     the whole step; `walk` is the simulation
deep                     the peak alone, without the middle of many equal copies
at_peak                  the single tensors at the highest moment
"""

from planner_core.cost.memory.at_peak import PeakTensor, tensors_at_peak
from planner_core.cost.memory.deep import StageMoments, peak_memory, stage_moments
from planner_core.cost.memory.forward import BlockMemory, Moment
from planner_core.cost.memory.peak import block_memories, num_update_tensors, walk
from planner_core.cost.memory.saved import Rerun, is_recomputed, rerun_ops, results_saved_by_readers, viewed_operands
from planner_core.cost.memory.standing import StandingMemory, param_bytes
from planner_core.cost.memory.terms import WeightBytes, has_working_copy, weight_bytes
