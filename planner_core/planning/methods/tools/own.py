"""The project's own forms, which hold every plan: the plan file, and the training script."""

from __future__ import annotations

from planner_core.core import Plan
from planner_core.models import trains_on_tokens
from planner_core.planning.methods.tools.tool import Target

PLAN_FILE = Target(
    name="json",
    title="plan file",
    description="The plan as data, versioned and checked when it is read.",
    suffix=".json",
    writer="targets.write_json",
    runs_whole_plan=True,
)


def data_option(plan: Plan) -> str:
    """Return the option of the torchrun script for samples: a file of tokens trains causal language models only, the others take a folder
    of a Hugging Face dataset. A user's own code brings its samples, so it has none."""
    config = plan.model.config
    if "callable" in config:
        return ""
    classes = config.get("architectures")
    if not classes:  # transformers chooses the class when the script runs
        return " --data TOKENS_OR_DATASET"
    name = classes[0] if isinstance(classes, (list, tuple)) else classes
    return f" --data {'TOKENS' if trains_on_tokens(str(name)) else 'DATASET'}"


TORCHRUN = Target(
    name="torchrun",
    title="torchrun script",
    description="A training script in one file: the plan’s blocks as functions with their collectives in place, and a loop around them.",
    suffix=".py",
    writer="torchrun.write_torchrun",
    launch="{torchrun} {file}{option} --save FOLDER",
    option=data_option,
    plan_suffix=".plan.json",
    runs_whole_plan=True,
)
