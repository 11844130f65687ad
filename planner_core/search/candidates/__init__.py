"""Every candidate of one block, scored at once or generated best first."""

from planner_core.search.candidates.scoring import Candidates, matrices, pareto, score

__all__ = ["Candidates", "matrices", "pareto", "score"]
