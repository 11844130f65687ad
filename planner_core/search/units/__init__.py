"""One unit (a copy of a block, or the block around them) under an objective: bounds, and its least true cost."""
