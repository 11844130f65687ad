"""The forms to which a plan can be exported, one entry each. A new one is added here, with its writer in a module of its own.

The module that writes a form is imported when the form is written. So the explorer reads this list without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner_core.core import Plan, plan_to_json

if TYPE_CHECKING:
    from planner_core.exporters.nearest import Nearest
    from planner_core.planning.methods import TpLayout

WITH_STAGES = ("json", "torchrun", "megatron", "torchtitan")
"""The forms that hold pipeline stages."""
WrittenForm = tuple[str, tuple[str, ...], "TpLayout | None"]
"""The text of one file, remarks for the user (FILE means its path), and the layout that it has."""
PricedForm = tuple[Plan, "Nearest"]


@dataclass(frozen=True, slots=True)
class Target:
    """One form: its name for `--to`, the text of a page about it, and the function that writes it.

    `write` raises InputError for a plan that the form cannot hold. `price` finds the cost of what the form does, for the plan and the
    layout that was written; None if the form is the plan itself.
    """

    name: str
    title: str
    suffix: str
    words: str
    write: Callable[[Plan], WrittenForm]
    price: Callable[[Plan, TpLayout], PricedForm | None] | None = None
    beside: str = ""
    """The ending of the plan file that the form reads, and that is written beside it; empty if it does not read one."""
    runs_all: bool = False
    """Whether the program that runs the form does all that a plan says: products in chunks, and states in the host's memory."""

    says_host: bool = False
    """Whether the form says that the host's memory keeps the optimizer's moments, if the plan does."""

    @property
    def in_pairs(self) -> bool:
        """Whether the form can hold only plans that shard matrices in pairs (by output features, then by input features)."""
        return self.price is not None


def _json(plan: Plan) -> WrittenForm:
    text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    return text, ("The plan itself: the source of every other export.",), None


def _torchrun(plan: Plan) -> WrittenForm:
    from planner_core.exporters.torchrun import torchrun_script

    n = plan.num_gpus
    source = (plan.model.get("config") or {}).get("callable")
    tiny = "Try it without a GPU: torchrun --standalone --nproc-per-node 4 FILE --tiny --steps 20 --report-every 1"
    own = f"It imports {source}, builds the model whole on every rank, and trains on its example inputs: put your data loader there"
    run = f"Run it on {n} GPUs: torchrun --nproc-per-node {min(n, 8)} --nnodes {max(1, n // 8)} FILE --data TOKENS --save FOLDER"
    beside = (
        "It imports Shardscope, and reads the plan from a file beside it, called as the script but ending in .plan.json"
    )
    return torchrun_script(plan), (run, own if source else tiny, beside), None


def _parallelize_module(plan: Plan) -> WrittenForm:
    from planner_core.exporters.parallelize_module import parallelize_text

    return parallelize_text(plan)


def _hf(plan: Plan) -> WrittenForm:
    from planner_core.exporters.configs import hf_text

    return hf_text(plan)


def _deepspeed(plan: Plan) -> WrittenForm:
    from planner_core.exporters.configs import deepspeed_text

    return deepspeed_text(plan)


def _megatron(plan: Plan) -> WrittenForm:
    from planner_core.exporters.configs import megatron_text

    return megatron_text(plan)


def _torchtitan(plan: Plan) -> WrittenForm:
    from planner_core.exporters.configs import torchtitan_text

    return torchtitan_text(plan)


def _fsdp2(plan: Plan) -> WrittenForm:
    from planner_core.exporters.data_parallel import fsdp2_text

    return fsdp2_text(plan)


def _accelerate(plan: Plan) -> WrittenForm:
    from planner_core.exporters.data_parallel import accelerate_text

    return accelerate_text(plan)


def _by_pairs(plan: Plan, layout: TpLayout) -> PricedForm | None:
    from planner_core.exporters.nearest import nearest

    return nearest(plan, layout, sequence=layout.sequence)


def _by_columns(plan: Plan, layout: TpLayout) -> PricedForm | None:
    from planner_core.exporters.nearest import nearest

    return nearest(plan, layout, each_column=True)


def _by_autotp(plan: Plan, layout: TpLayout) -> PricedForm | None:
    from planner_core.exporters.configs import autotp_stage
    from planner_core.exporters.nearest import nearest

    return nearest(plan, layout, each_column=True, stage=autotp_stage(plan))


def _by_degrees(plan: Plan, layout: TpLayout) -> PricedForm | None:
    from planner_core.exporters.nearest import by_degrees

    return by_degrees(plan, layout, sequence=layout.sequence, may_shard=1)


def _by_degrees_sharded(plan: Plan, layout: TpLayout) -> PricedForm | None:
    from planner_core.exporters.nearest import by_degrees

    return by_degrees(plan, layout, sequence=layout.sequence, may_shard=3)


TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target(
            "json",
            "plan file",
            ".json",
            "The plan as data, versioned and checked when it is read.",
            _json,
            runs_all=True,
        ),
        Target(
            "torchrun",
            "torchrun script",
            ".py",
            "A training script in one file: the plan’s blocks as functions with their collectives in place, and a loop around them.",
            _torchrun,
            beside=".plan.json",
            runs_all=True,
        ),
        Target(
            "parallelize_module",
            "parallelize_module",
            ".py",
            "A Python module to import into your own trainer: stock PyTorch styles, for plans that split matrices in pairs.",
            _parallelize_module,
            _by_pairs,
        ),
        Target(
            "fsdp2",
            "FSDP2",
            ".py",
            "A Python module that shards a model by fully_shard, for plans that split the batch only (FSDP, HSDP).",
            _fsdp2,
        ),
        Target(
            "accelerate",
            "accelerate",
            ".yaml",
            "A configuration for accelerate launch, for plans that split the batch only.",
            _accelerate,
        ),
        Target(
            "hf",
            "Hugging Face",
            ".json",
            "A DistributedConfig for from_pretrained, for plans that split matrices in pairs.",
            _hf,
            _by_columns,
        ),
        Target(
            "deepspeed",
            "DeepSpeed",
            ".json",
            "A configuration for AutoTP or ZeRO, for plans that split matrices in pairs, or the batch only.",
            _deepspeed,
            _by_autotp,
            says_host=True,
        ),
        Target(
            "megatron",
            "Megatron-LM",
            ".txt",
            "Arguments for the degrees and the architecture: Megatron-LM cannot be told where each weight goes.",
            _megatron,
            _by_degrees,
        ),
        Target(
            "torchtitan",
            "torchtitan",
            ".txt",
            "Degrees only, as options of torchtitan’s command line; its own parser takes them, no training was run.",
            _torchtitan,
            _by_degrees_sharded,
        ),
    )
}
"""The forms, by the name for `--to`."""
