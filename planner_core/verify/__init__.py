"""Plans are run, and held against what was predicted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_core.verify.api import scaled, verify, verify_text
    from planner_core.verify.build_models import materialise
    from planner_core.verify.fake_group import verify_fake_all
    from planner_core.verify.numerics import verify_all
    from planner_core.verify.processes import run_ranks
    from planner_core.verify.static import check_rules, verify_rules

__all__ = [
    "check_rules",
    "materialise",
    "run_ranks",
    "scaled",
    "verify",
    "verify_all",
    "verify_fake_all",
    "verify_rules",
    "verify_text",
]
_HOME = {
    "scaled": "planner_core.verify.api",
    "verify": "planner_core.verify.api",
    "verify_text": "planner_core.verify.api",
    "materialise": "planner_core.verify.build_models",
    "verify_fake_all": "planner_core.verify.fake_group",
    "verify_all": "planner_core.verify.numerics",
    "run_ranks": "planner_core.verify.processes",
    "check_rules": "planner_core.verify.static",
    "verify_rules": "planner_core.verify.static",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: these modules need torch."""
    if name not in _HOME:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(import_module(_HOME[name]), name)
