"""The schedule: the order of one rank's work in a step, and what follows from it.

units           the parts of a forward pass, and the buckets of their weights and gradients
events          what a rank issues and waits for, in order
simulation      the seconds of that order, on two streams
exposed         the parts of a step's exposed communication, by the form that the search minimises
chunks          products in parts, each summed over GPUs beside the next (ATP)
"""

from planner_core.cost.schedule.chunks import cuttable, in_chunks, seconds_in_chunks
from planner_core.cost.schedule.events import Event, scheduled
from planner_core.cost.schedule.exposed import (
    CONTENTION,
    ENDS,
    NOT_HIDDEN,
    WAITED,
    Exposed,
    beyond_compute,
    exposed_parts,
    weight_traffic,
)
from planner_core.cost.schedule.simulation import simulated

__all__ = [
    "CONTENTION",
    "ENDS",
    "NOT_HIDDEN",
    "WAITED",
    "Event",
    "Exposed",
    "beyond_compute",
    "cuttable",
    "exposed_parts",
    "in_chunks",
    "scheduled",
    "seconds_in_chunks",
    "simulated",
    "weight_traffic",
]
