"""The candidates of one block: all scored at once, or only the undominated ones generated."""

from planner_core.search.candidates.scoring import Candidates, score_candidates, undominated_pairs, weight_matrices
