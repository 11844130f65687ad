"""Runs a plan with stock PyTorch: decides nothing, knows no model by name, imports torch and `sites` only.

Read `reading` (a plan's JSON) -> `moves` (placements change) -> `local_ops` (ops on one rank's tensors) -> `steering`
(the model runs under the plan) -> `traffic` (collectives are counted). Exported scripts contain these files as text.
"""
