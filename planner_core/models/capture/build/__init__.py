"""From a recording to a graph: repeated calls become blocks, and what the loss does not reach has no gradient."""
