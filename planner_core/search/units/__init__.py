"""One unit (a copy of a block, or the top block around the copies) under an objective: lower bounds, and its least true cost."""
