"""The error for a model that differs from the planned one, and the sentences that several modules raise it with."""

from __future__ import annotations

import sys

import torch

from planner_core.core import Plan, PlannerError


class PlanMismatch(PlannerError, RuntimeError):
    """The running model differs from the one that was planned. The message names the operator."""


class CannotRewrite(PlanMismatch):
    """This model cannot become generated code. The message says why, and what would help."""


class MixesSamples(CannotRewrite):
    """A rank cannot make its part of the constants from its own samples, but it can from those of all ranks."""


def other_model_error(site: str, what: str, versions: str, line: str = "") -> PlanMismatch:
    """Return the error for an operator that differs from the plan. `line`: where it is in the model's code; `versions`: which libraries
    differ."""
    at = f" at {line.rpartition('/')[2]}" if line else ""
    return PlanMismatch(
        f"{site}{at} {what}: the model does other operations than when it was planned (in eval mode, with other attributes, lengths, "
        f"inputs or values); set it as it was, or plan it again{versions}"
    )


def unplanned_gradient_error(name: str) -> PlanMismatch:
    """Return the error for a gradient of a weight that the planned loss does not depend on."""
    return PlanMismatch(
        f"{name} gets a gradient that the plan does not expect: the planned loss does not depend on it; "
        "plan the model with the loss that is trained on"
    )


def describe_other_versions(plan: Plan) -> str:
    """Return the end of a sentence about libraries whose version has changed since the plan was made; "" if none has."""
    planned = plan.model.versions
    here = {"torch": torch.__version__, "transformers": getattr(sys.modules.get("transformers"), "__version__", None)}
    changed = [
        f"{name} {planned[name]}, here is {version}"
        for name, version in here.items()
        if version and name in planned and planned[name].partition("+")[0] != version.partition("+")[0]
    ]
    return f" (it was planned with {' and '.join(changed)}: plan it again)" if changed else ""
