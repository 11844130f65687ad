"""What ranks must bring alike, and a stand-in for a loss that a model does not return."""

from planner_core.runtime.loop.agreement import Agreement
