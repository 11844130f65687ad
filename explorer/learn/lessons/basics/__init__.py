"""First steps: memory, cuts, placements, collectives."""
