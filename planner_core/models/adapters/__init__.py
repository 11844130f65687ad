"""Replacements of code of transformers that a graph cannot hold: one file for each model, and three for several models.

experts, scans    layers of experts and state-space scans as single torch functions
masks             attention masks without `torch.vmap`
"""

from __future__ import annotations

import sys

from planner_core.models.adapters import dbrx, griffin, jetmoe, longcat, nllb, switch
from planner_core.models.adapters.experts import experts_forward, register_experts
from planner_core.models.adapters.masks import register_masks
from planner_core.models.adapters.scans import register_scans

__all__ = ["LOOPS", "METHODS", "register"]
METHODS = {key: ours for model in (dbrx, jetmoe, longcat, nllb, switch) for key, ours in model.METHODS.items()} | {
    # Step-3.7's experts are those of transformers, without the decorator by which these let an implementation be chosen.
    ("Step3p7Experts", "forward"): experts_forward
}
"""(Class, method) of transformers, and the function that replaces it: loops over experts that a router chose."""


LOOPS = griffin.WRAPPED
"""(Class, method) of transformers with a loop over tokens for which it has no kernel, and the wrapper."""


def register() -> None:
    """Replace these methods in every model file of transformers that has been imported."""
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
