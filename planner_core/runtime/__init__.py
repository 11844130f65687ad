"""Runs a plan on stock PyTorch. To apply a plan decides nothing: all choices are in the plan.

library     `apply`, the function that a training loop calls
parallel    a model under a plan: recorded, rewritten, and run as generated code
stages/     a model under a plan with pipeline stages
record/     one forward pass of the model, call by call
write/      Python code from a recording and a plan
program/    what generated code needs at run time: collectives, weights, gradients in buckets
training/   data, optimizers, checkpoints and reports of a training loop
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.runtime.initialize import Init, initializer
    from planner_core.runtime.library import apply, mesh_of
    from planner_core.runtime.mismatch import PlanMismatch
    from planner_core.runtime.parallel import Parallel
    from planner_core.runtime.program.collectives import Trace
    from planner_core.runtime.program.collectives.counter import CountCollectives, sent_in_exchange, table_of
    from planner_core.runtime.program.operators.chances import drawing, seed_of
    from planner_core.runtime.record import CannotRewrite
    from planner_core.runtime.record.batch import changed, with_samples
    from planner_core.runtime.stages import StagedParallel
    from planner_core.runtime.training.checkpoints import load, save
    from planner_core.runtime.training.clipping import clip_grad_norm_
    from planner_core.runtime.training.host_states import HostStates
    from planner_core.runtime.training.optimizers import make_optimizer

__all__ = [
    "CannotRewrite",
    "CountCollectives",
    "HostStates",
    "Init",
    "Parallel",
    "PlanMismatch",
    "StagedParallel",
    "Trace",
    "apply",
    "changed",
    "clip_grad_norm_",
    "drawing",
    "initializer",
    "load",
    "make_optimizer",
    "mesh_of",
    "save",
    "seed_of",
    "sent_in_exchange",
    "table_of",
    "with_samples",
]
_HOME = {
    "CannotRewrite": "planner_core.runtime.record",
    "changed": "planner_core.runtime.record.batch",
    "with_samples": "planner_core.runtime.record.batch",
    "clip_grad_norm_": "planner_core.runtime.training.clipping",
    "HostStates": "planner_core.runtime.training.host_states",
    "load": "planner_core.runtime.training.checkpoints",
    "save": "planner_core.runtime.training.checkpoints",
    "Trace": "planner_core.runtime.program.collectives",
    "drawing": "planner_core.runtime.program.operators.chances",
    "seed_of": "planner_core.runtime.program.operators.chances",
    "Parallel": "planner_core.runtime.parallel",
    "apply": "planner_core.runtime.library",
    "mesh_of": "planner_core.runtime.library",
    "StagedParallel": "planner_core.runtime.stages",
    "CountCollectives": "planner_core.runtime.program.collectives.counter",
    "sent_in_exchange": "planner_core.runtime.program.collectives.counter",
    "table_of": "planner_core.runtime.program.collectives.counter",
    "initializer": "planner_core.runtime.initialize",
    "make_optimizer": "planner_core.runtime.training.optimizers",
    "Init": "planner_core.runtime.initialize",
    "PlanMismatch": "planner_core.runtime.mismatch",
}


def __getattr__(name: str) -> Any:
    """Import a module when a name of it is used for the first time, since these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
