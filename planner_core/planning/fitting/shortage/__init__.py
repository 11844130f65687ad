"""Why no plan fits, what fills the memory of one, and which sizes the GPUs cannot share evenly."""

from planner_core.planning.fitting.shortage.least_memory import (
    least_state_bytes,
    needed_and_available,
    needs_buffers,
    note_meshes_left_out,
    note_oversized_states,
    refuse_or_least_memory,
    states_can_fit,
)
from planner_core.planning.fitting.shortage.memory_parts import (
    describe_memory,
    note_memory,
    note_uncounted_memory,
)
from planner_core.planning.fitting.shortage.uneven import (
    UnevenBatch,
    find_uneven_batch,
    note_repeated_work,
    note_small_batch,
    note_uneven_vocabulary,
    note_whole_batch,
    replicated_gpus,
)
