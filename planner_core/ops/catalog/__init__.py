"""Every operator that torch code meets, by kind. Importing this package registers them all."""

from planner_core.ops.catalog import elementwise, indexing, matmul, nn, scans, spectral, views
from planner_core.ops.catalog.scans import SCANS
from planner_core.ops.catalog.work import backward_factor, forward_flops, is_view, loss_bytes, shrinks_kept

__all__ = [
    "SCANS",
    "backward_factor",
    "elementwise",
    "forward_flops",
    "indexing",
    "is_view",
    "loss_bytes",
    "matmul",
    "nn",
    "scans",
    "shrinks_kept",
    "spectral",
    "views",
]
