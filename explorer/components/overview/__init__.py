"""The first page: the graph, a few plans beside it, a node of it, and the way out."""
