"""Write a plan in a form by the form's own writer."""

from __future__ import annotations

import json
from importlib import import_module

from planner_core.core import Plan, plan_to_json
from planner_core.planning.methods import Target, TpLayout

WrittenForm = tuple[str, tuple[str, ...], TpLayout | None]
"""The text of a file, remarks for the user, and the layout that it states."""


def write_target(target: Target, plan: Plan) -> WrittenForm:
    """Write a plan in a form. Raises InputError for a plan that the form cannot hold."""
    module, _, name = target.writer.rpartition(".")
    written: WrittenForm = getattr(import_module(f"planner_core.exporters.{module}"), name)(plan)
    return written


def write_json(plan: Plan) -> WrittenForm:
    """Write the plan file."""
    text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    return text, ("The plan itself: the source of every other export.",), None
