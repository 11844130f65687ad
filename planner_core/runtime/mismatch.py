"""The error of a model that is not the one that was planned, and the sentences that several modules raise it with."""

from __future__ import annotations

import sys

import torch

from planner_core.core import Plan, PlannerError


class PlanMismatch(PlannerError, RuntimeError):
    """The running model is not the one for which the plan was made. The message names the operator."""


def other_model_error(site: str, what: str, versions: str, line: str = "") -> PlanMismatch:
    """The error for an operator that differs from the plan. `line`: where it is in the model's code; `versions`: which libraries differ."""
    at = f" at {line.rpartition('/')[2]}" if line else ""
    return PlanMismatch(
        f"{site}{at} {what}: the model does other operations than when it was planned (in eval mode, with other attributes, lengths, "
        f"inputs or values); set it as it was, or plan it again{versions}"
    )


def refuse_planned_gradient(name: str) -> None:
    """Raise PlanMismatch: nothing would sum the gradient over ranks."""
    raise PlanMismatch(
        f"the loss sends {name} a gradient, which it did not when it was planned (it ran under torch.no_grad then, or detached); plan "
        "it again"
    )


def unplanned_gradient_error(name: str) -> PlanMismatch:
    """The error for a gradient of a weight in a unit that has no use for it."""
    return PlanMismatch(
        f"{name} gets a gradient that the plan does not expect: the planned loss does not depend on it; "
        "plan the model with the loss that is trained on"
    )


def describe_other_versions(plan: Plan) -> str:
    """The end of a sentence: which libraries have another version now than when the plan was made. Empty if none has."""
    planned = plan.model.get("versions", {})
    here = {"torch": torch.__version__, "transformers": getattr(sys.modules.get("transformers"), "__version__", None)}
    changed = [
        f"{name} {planned[name]}, here is {version}"
        for name, version in here.items()
        if version and name in planned and planned[name].partition("+")[0] != version.partition("+")[0]
    ]
    return f" (it was planned with {' and '.join(changed)}: plan it again)" if changed else ""
