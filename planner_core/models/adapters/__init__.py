"""What transformers writes so that a graph cannot hold it, and what takes its place: one file a model, and three for many.

experts, scans    layers of experts and state-space scans as single torch functions
masks             attention masks without `torch.vmap`
"""

from __future__ import annotations

import sys

from planner_core.models.adapters import dbrx, griffin, jetmoe, longcat, nllb, step, switch
from planner_core.models.adapters.experts import register_experts
from planner_core.models.adapters.masks import register_masks
from planner_core.models.adapters.scans import register_scans

__all__ = ["LOOPS", "METHODS", "register"]
METHODS = {key: ours for model in (dbrx, jetmoe, longcat, nllb, step, switch) for key, ours in model.METHODS.items()}
"""Class and method of transformers, and the function that replaces it: loops over what a router chose, which a graph cannot hold."""


LOOPS = griffin.WRAPPED
"""Class and method of transformers with a loop over tokens for which it has no kernel, and what wraps it."""


def register() -> None:
    """Put our functions in place of theirs, in every model file of transformers that has been imported."""
    register_experts()
    register_scans()
    register_masks()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for (kind, method), ours in METHODS.items():
                if (owner := module.__dict__.get(kind)) is not None:
                    setattr(owner, method, ours)
            for (kind, method), wrap in LOOPS.items():
                owner = module.__dict__.get(kind)
                if owner is not None and not hasattr(owner.__dict__[method], "_shardscope"):
                    setattr(owner, method, wrap(owner.__dict__[method]))
