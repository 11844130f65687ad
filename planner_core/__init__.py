"""Shardscope: see, search, prove and export parallel plans for real models on real clusters.

    import planner_core as shardscope

    result = shardscope.plan("llama-3-8b", cluster="2x8-h100")
    shardscope.save_plan(result.best, "plan.json")
    shardscope.verify(result.best, ranks=2)
    shardscope.export(result.best, "torchrun", "train.py")

The names here are documented in docs/API.md, and they are stable. Each is imported when it is first used. Before that neither
torch nor transformers nor numpy is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from planner_core.core import (
        CaptureError,
        Cluster,
        Gpu,
        Graph,
        InputError,
        Level,
        NoPlanFits,
        Plan,
        PlannerError,
        ShardingError,
        VerificationFailed,
        load_cluster,
        load_gpu,
        load_plan,
        save_plan,
    )
    from planner_core.exporters import export
    from planner_core.models import load_model
    from planner_core.planning import (
        Folded,
        Front,
        FrontPoint,
        Request,
        Result,
        compare,
        fold,
        front,
        plan,
        price,
    )
    from planner_core.planning.analysis import to_dot, to_graphml, to_networkx
    from planner_core.runtime import HostStates, PlanMismatch, apply, clip_grad_norm_, load, save
    from planner_core.verification import verify

__all__ = [
    "CaptureError",
    "Cluster",
    "Folded",
    "Front",
    "FrontPoint",
    "Gpu",
    "Graph",
    "HostStates",
    "InputError",
    "Level",
    "NoPlanFits",
    "Plan",
    "PlanMismatch",
    "PlannerError",
    "Request",
    "Result",
    "ShardingError",
    "VerificationFailed",
    "apply",
    "clip_grad_norm_",
    "compare",
    "export",
    "fold",
    "front",
    "load",
    "load_cluster",
    "load_gpu",
    "load_model",
    "load_plan",
    "plan",
    "price",
    "save",
    "save_plan",
    "to_dot",
    "to_graphml",
    "to_networkx",
    "verify",
]
_HOME = {
    "planner_core.core": (
        "CaptureError",
        "Cluster",
        "Gpu",
        "Graph",
        "InputError",
        "Level",
        "NoPlanFits",
        "Plan",
        "PlannerError",
        "ShardingError",
        "VerificationFailed",
        "load_cluster",
        "load_gpu",
        "load_plan",
        "save_plan",
    ),
    "planner_core.models": ("load_model",),
    "planner_core.planning": (
        "Folded",
        "Front",
        "FrontPoint",
        "Request",
        "Result",
        "compare",
        "fold",
        "front",
        "plan",
        "price",
    ),
    "planner_core.planning.analysis": ("to_dot", "to_graphml", "to_networkx"),
    "planner_core.runtime": ("HostStates", "PlanMismatch", "apply", "clip_grad_norm_", "load", "save"),
    "planner_core.verification": ("verify",),
    "planner_core.exporters": ("export",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is used for the first time, and keep it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with import_module("planner_core.core").naming_extras():
        found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
