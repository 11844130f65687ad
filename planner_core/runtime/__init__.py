"""Runs a plan on stock PyTorch. It makes no choices: all of them are in the plan.

library     `apply`, the function that a training loop calls
parallel    a model under a plan: recorded, rewritten, and run as generated code
bound_call  one program as a call of the model
stages/     a model under a plan with pipeline stages
record/     one forward pass of the model, call by call
write/      Python code from a recording and a plan
program/    what generated code needs at run time: collectives, weights, gradients in buckets
loop/       agreement between ranks, and a stand-in loss
training/   data, optimizers, checkpoints and reports of a training loop
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner_core import lazy_exports

if TYPE_CHECKING:
    from planner_core.runtime.initialize import Init, initializer
    from planner_core.runtime.library import apply, mesh_of
    from planner_core.runtime.mismatch import CannotRewrite, PlanMismatch
    from planner_core.runtime.parallel import Parallel
    from planner_core.runtime.program.collectives import Trace
    from planner_core.runtime.program.collectives.counter import (
        CountCollectives,
        all_to_all_wire_bytes,
        collective_table,
        rows_to_json,
    )
    from planner_core.runtime.program.operators.dropout import seed_generators, unit_seed
    from planner_core.runtime.record.batch import map_marked_leaves, map_sample_leaves
    from planner_core.runtime.stages import StagedParallel
    from planner_core.runtime.training.checkpoints import load, save
    from planner_core.runtime.training.clipping import clip_grad_norm_
    from planner_core.runtime.training.host_states import HostStates
    from planner_core.runtime.training.optimizers import optimizer_for

__getattr__, __dir__ = lazy_exports(__name__)  # these modules import torch
