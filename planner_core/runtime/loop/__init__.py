"""What torch's own functions do to parameters under a plan when a user's loop calls them, and what ranks must bring alike."""

from planner_core.runtime.loop.agreement import Agreement
from planner_core.runtime.loop.refusals import refuse_gradient_hooks, refuse_silent_faults

__all__ = ["Agreement", "refuse_gradient_hooks", "refuse_silent_faults"]
