"""Every operator that torch code meets, one file for each kind and one entry for each operator."""

from planner_core.ops.catalog import (
    along,
    attention,
    convolution,
    elementwise,
    indexing,
    linear_algebra,
    losses,
    norms,
    products,
    scans,
    views,
)

OPERATORS = (
    *products.OPERATORS,
    *convolution.OPERATORS,
    *attention.OPERATORS,
    *scans.OPERATORS,
    *norms.OPERATORS,
    *losses.OPERATORS,
    *elementwise.OPERATORS,
    *along.OPERATORS,
    *views.OPERATORS,
    *indexing.OPERATORS,
    *linear_algebra.OPERATORS,
)
