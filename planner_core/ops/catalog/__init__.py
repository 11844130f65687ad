"""Every operator that torch code meets, by kind. Importing this package registers them all."""

from planner_core.ops.catalog import indexing, nn, scans, spectral

__all__ = ["indexing", "nn", "scans", "spectral"]
