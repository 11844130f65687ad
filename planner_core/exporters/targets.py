"""List the forms of an export, one entry each. A new form is an entry here, with its writer in a module.

The writer's module is imported only when the form is written, so the explorer reads this list without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from planner_core.core import Plan, plan_to_json
from planner_core.exporters.remarks import FILE, Remark, RemarkKind, data_option

if TYPE_CHECKING:
    from planner_core.planning.methods import TpLayout

TARGETS_WITH_STAGES = ("json", "torchrun", "megatron", "torchtitan")
"""The forms that hold pipeline stages."""
WrittenForm = tuple[str, tuple[str, ...], "TpLayout | None"]
"""The text of a file, remarks for the user, and the layout that it states."""


@dataclass(frozen=True, slots=True)
class Target:
    """One form of an export.

    Attributes:
        name: Its name for `--to`.
        title, description: Its title and text on a page.
        suffix: The suffix of its file.
        write: Writes a plan. Raises InputError for a plan that the form cannot hold.
        states_run: Whether the file states a whole run, which `price --config` reads: it is priced by what it says.
        states_ranks: Whether the file can be read so with options beside it for what it cannot state.
        shards_pairs_only: Whether the form only holds plans that shard matrices in pairs, by output features and then by input features.
        plan_suffix: The suffix of the plan file that the form reads and that is written next to it; empty if it reads none.
        runs_whole_plan: Whether the program that runs the form supports every feature of a plan, such as products in chunks.
        states_offload: Whether the form states that the optimizer's moments are in the host's memory.
        data_parallel: The kinds of data parallelism over all GPUs that the form states, which may take the place of a plan.
        why_no_stages: Why the form cannot hold pipeline stages, where its program does run them.
    """

    name: str
    title: str
    suffix: str
    description: str
    write: Callable[[Plan], WrittenForm]
    states_run: bool = False
    states_ranks: bool = False
    shards_pairs_only: bool = False
    plan_suffix: str = ""
    runs_whole_plan: bool = False
    states_offload: bool = False
    data_parallel: tuple[str, ...] = ()
    why_no_stages: str = ""

    @property
    def offers_nearest(self) -> bool:
        """Whether another plan may take the place of one that the form cannot hold."""
        return self.shards_pairs_only or bool(self.data_parallel)


def _write_json(plan: Plan) -> WrittenForm:
    text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    return text, ("The plan itself: the source of every other export.",), None


def _write_torchrun(plan: Plan) -> WrittenForm:
    from planner_core.exporters.configs.common import launch_sizes
    from planner_core.exporters.torchrun import write_torchrun_script

    nodes, processes = launch_sizes(plan)
    source = plan.model.config.get("callable")
    tiny = Remark(
        "Try it without a GPU: torchrun --standalone --nproc-per-node 4 ",
        FILE,
        " --tiny --steps 20 --report-every 1",
        kind=RemarkKind.LAUNCH,
    )
    user_model = f"It imports {source}, builds the model whole on every rank, and trains on its example inputs: put your data loader there"
    run = Remark(
        f"Run it on {plan.num_gpus} GPUs: torchrun --nproc-per-node {processes} --nnodes {nodes} ",
        FILE,
        f"{data_option(plan)} --save FOLDER",
        kind=RemarkKind.LAUNCH,
    )
    plan_file = (
        "It imports Shardscope, and reads the plan from a file beside it, called as the script but ending in .plan.json"
    )
    return write_torchrun_script(plan), (run, user_model if source else tiny, plan_file), None


def _import_writer(module: str, name: str) -> Callable[[Plan], WrittenForm]:
    """Return the function of a module of this package that writes a form."""

    def write(plan: Plan) -> WrittenForm:
        written: WrittenForm = getattr(import_module(f"planner_core.exporters.{module}"), name)(plan)
        return written

    return write


TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        Target(
            "json",
            "plan file",
            ".json",
            "The plan as data, versioned and checked when it is read.",
            _write_json,
            runs_whole_plan=True,
        ),
        Target(
            "torchrun",
            "torchrun script",
            ".py",
            "A training script in one file: the plan’s blocks as functions with their collectives in place, and a loop around them.",
            _write_torchrun,
            plan_suffix=".plan.json",
            runs_whole_plan=True,
        ),
        Target(
            "parallelize_module",
            "parallelize_module",
            ".py",
            "A Python module to import into your own trainer: stock PyTorch styles, for plans that split matrices in pairs.",
            _import_writer("parallelize_module", "write_parallelize_module"),
            shards_pairs_only=True,
        ),
        Target(
            "fsdp2",
            "FSDP2",
            ".py",
            "A Python module that shards a model by fully_shard, for plans that split the batch only (FSDP, HSDP).",
            _import_writer("data_parallel", "write_fsdp2"),
            data_parallel=("FSDP2",),
        ),
        Target(
            "accelerate",
            "accelerate",
            ".yaml",
            "A configuration for accelerate launch, for plans that split the batch only.",
            _import_writer("configs.accelerate", "write_accelerate"),
            states_ranks=True,
            data_parallel=("FSDP2",),
        ),
        Target(
            "hf",
            "Hugging Face",
            ".json",
            "A DistributedConfig for from_pretrained, for plans that split matrices in pairs.",
            _import_writer("configs.huggingface", "write_hf"),
            states_ranks=True,
            shards_pairs_only=True,
        ),
        Target(
            "deepspeed",
            "DeepSpeed",
            ".json",
            "A configuration for AutoTP or ZeRO, for plans that split matrices in pairs, or the batch only.",
            _import_writer("configs.deepspeed", "write_deepspeed"),
            states_ranks=True,
            shards_pairs_only=True,
            states_offload=True,
            data_parallel=("ZeRO-1", "ZeRO-2", "ZeRO-3"),
            why_no_stages="DeepSpeed's pipeline runs a model whose code lists its layers (PipelineModule), which no configuration says",
        ),
        Target(
            "megatron",
            "Megatron-LM",
            ".txt",
            "Arguments for the degrees and the architecture: Megatron-LM cannot be told where each weight goes.",
            _import_writer("configs.megatron", "write_megatron"),
            states_run=True,
            shards_pairs_only=True,
        ),
        Target(
            "torchtitan",
            "torchtitan",
            ".txt",
            "Degrees only, as options of torchtitan’s command line; its own parser takes them, no training was run.",
            _import_writer("configs.torchtitan", "write_torchtitan"),
            states_run=True,
            shards_pairs_only=True,
        ),
    )
}
"""The forms, by the name for `--to`."""
