"""How planners think: folding, topology, two dimensions, experts, the choice."""
