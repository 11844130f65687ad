"""Shardscope: see, search, prove and export parallel plans for real models on real clusters."""

__version__ = "0.2.0"
