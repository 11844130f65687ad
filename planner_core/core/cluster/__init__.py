"""Clusters, their GPUs, and the constants from which the time of a GPU's kernels follows."""
