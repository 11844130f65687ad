"""Runs on a fake process group of a plan's own size, on tensors without values.

group            one GPU of a plan of one stage
pipeline         one GPU of each rank of a plan with stages
program          a step of the rewritten program, and what it issues and holds
memory_tracker   the peak of what is allocated
"""
