"""Every operator that torch code meets, by kind. Importing this package registers them all."""

from planner_core.ops.catalog import indexing, nn, scans, spectral
from planner_core.ops.catalog.nn import backward_factor, forward_flops, is_view, loss_bytes, shrinks_kept
from planner_core.ops.catalog.scans import SCANS

__all__ = [
    "SCANS",
    "backward_factor",
    "forward_flops",
    "indexing",
    "is_view",
    "loss_bytes",
    "nn",
    "scans",
    "shrinks_kept",
    "spectral",
]
