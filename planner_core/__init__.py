"""Shardscope: see, search, prove and export parallel plans for real models on real clusters.

    import planner_core as shardscope

    result = shardscope.plan("llama-3-8b", cluster="2x8-h100")
    shardscope.save_plan(result.recommended, "plan.json")
    shardscope.verify(result.recommended, ranks=2)
    shardscope.export(result.recommended, "torchrun", "train.py")

The names here are documented in docs/API.md, and they are stable. Each is imported when it is first used. Before that neither
torch nor transformers nor numpy is loaded.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
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


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports a module when a name of it is first used.

    The names are those that the package imports under `if TYPE_CHECKING:`. The block is read as text, so type checkers, readers and the
    program go by the same lines. A value is not kept in the package: a test that replaces it at its home replaces it here too.
    """

    @cache
    def module_of() -> dict[str, str]:
        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        blocks = [node for node in tree.body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        # a submodule (`from package import module`) is left to the import system, which looks for one after AttributeError
        return {name.name: str(i.module) for i in imports if i.module != package for name in i.names}

    def load(name: str) -> Any:
        if name not in module_of():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with import_module("planner_core.core").naming_extras():
            return getattr(import_module(module_of()[name]), name)

    return load, lambda: sorted({*vars(sys.modules[package]), *module_of()})


__getattr__, __dir__ = lazy_exports(__name__)
