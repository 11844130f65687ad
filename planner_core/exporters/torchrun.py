"""Export a training script in one file: the plan's blocks as functions that hold their collectives, and a training loop.

The script imports Shardscope and reads the plan from the file next to it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import planner_core.runtime.program as program
from planner_core.core import STANDIN_LOSS, InputError, Plan, params_by_pattern
from planner_core.exporters.configs.common import launch_sizes
from planner_core.exporters.remarks import FILE, Remark, RemarkKind, describe_launch
from planner_core.exporters.source import template_text
from planner_core.exporters.targets import WrittenForm
from planner_core.models import load_plan_graph
from planner_core.planning.methods import TORCHRUN
from planner_core.planning.pricing import count_model_flops
from planner_core.runtime.stages import check_schedule
from planner_core.runtime.training import Blocks, blocks_of
from planner_core.runtime.write import wrap_lines

WIDTH = 120
TEMPLATE_FUNCTIONS = ("options", "loss_of", "train_step", "evaluate", "main")
MAIN_GUARD = 'if __name__ == "__main__":\n    training.run(main)'
IMPORTS = """\
from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner_core as shardscope
from planner_core.runtime import training"""


def write_torchrun(plan: Plan) -> WrittenForm:
    """Write the script, with remarks about how to run it. Raises InputError for a model that the script could not build."""
    nodes, processes = launch_sizes(plan)
    source = plan.model.config.get("callable")
    tiny = Remark(
        "Try it without a GPU: torchrun --standalone --nproc-per-node 4 ",
        FILE,
        " --tiny --steps 20 --report-every 1",
        kind=RemarkKind.LAUNCH,
    )
    user_model = f"It imports {source}, builds the model whole on every rank, and trains on its example inputs: put your data loader there"
    run = describe_launch(
        TORCHRUN,
        plan,
        f"torchrun --nproc-per-node {processes} --nnodes {nodes}",
        before=f"Run it on {plan.num_gpus} GPUs: ",
    )
    plan_file = (
        "It imports Shardscope, and reads the plan from a file beside it, called as the script but ending in .plan.json"
    )
    return _write_script(plan), (run, user_model if source else tiny, plan_file), None


def _write_script(plan: Plan) -> str:
    """Write the script's source. Raises InputError for a model that the script could not build.

    An export never runs code that a plan file names, so the blocks of a user's own model are generated when the script runs.
    """
    config = plan.model.config
    user_code = str(config.get("callable", ""))
    if user_code.endswith(".pt2"):
        raise InputError(
            f"{plan.model.name} comes from {user_code}, an exported program, which a script of its own cannot hold; plan the code "
            "that it was exported from, as path.py:callable"
        )
    if plan.pipeline:
        check_schedule(plan.pipeline)
    # To write blocks the model has to run once: code that a plan file names is not run here, and stages record a step of their own.
    blocks = Blocks() if user_code or plan.pipeline else blocks_of(plan)
    flops = 0 if user_code else count_model_flops(load_plan_graph(plan)) * plan.accumulate
    parts = [f"{_write_docstring(plan)}\n\n{_write_imports(blocks)}\n\n{_write_constants(plan, blocks, flops)}"]
    if blocks.source:
        parts += [
            _section_comment(
                "one rank's program: a function for each unique block; edit them as you like, and the edit runs"
            ),
            blocks.source,
        ]
    of_stages = ("train_step", "evaluate") if plan.pipeline else ()
    parts += [_section_comment("training")]
    parts += [template_text("stages_template" if n in of_stages else "train_template", n) for n in TEMPLATE_FUNCTIONS]
    parts += [MAIN_GUARD]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _section_comment(title: str) -> str:
    return f"# --- {title} ".ljust(WIDTH, "-")


def _write_docstring(plan: Plan) -> str:
    nodes, processes = launch_sizes(plan)
    gathered = _gathered_weights(plan)
    rows = [
        f"    {name:56} {', '.join(_placement_words(p.stored, plan.mesh.axis_sizes)):14} {gathered.get(name, '')}".rstrip()
        for name, p in params_by_pattern(plan).items()
    ]
    traffic = [
        f"    {phase:10} {kind:15} {row['count']:6} x {row['bytes']:>18,} bytes"
        for phase, kinds in plan.cost.collectives().items()
        for kind, row in kinds.items()
        if row["count"]
    ]
    peak = plan.cost.memory_bytes.get("peak", 0) / 2**30
    counts = " of the rank that works longest" if plan.pipeline else " (--count counts them)"
    lines = [
        f'"""Train {plan.model.name} under the plan "{plan.name}" on {_describe_mesh(plan)}.',
        "",
        f"    torchrun --nproc-per-node {processes} --nnodes {nodes} --max-restarts 3 FILE{TORCHRUN.option(plan)} --save run",
        "    torchrun --standalone --nproc-per-node 4 FILE --tiny --steps 20 --report-every 1    # no GPU needed",
        "",
        "Written by Shardscope, which it needs (pip install '.[models]' in a checkout), with torch 2.6 or later and the plan",
        "beside this file, called the same but .plan.json. Weights are split (S) or replicated (R) on each mesh axis. Those that",
        "are gathered are whole in the blocks below: they come a block ahead, their gradients leave behind backward.",
        "",
        *rows,
        "",
        f"Predicted for one step of one GPU: {peak:.2f} GiB at the peak, and these collectives{counts}:",
        "",
        *traffic,
        "",
        *_script_remarks(plan),
        '"""',
    ]
    return "\n".join(lines)


def _describe_mesh(plan: Plan) -> str:
    """Describe the mesh, and the stages if there are any."""
    cut = plan.pipeline
    return (
        f"{len(cut.copies)} stages ({cut.schedule}) on {cut.ranks} meshes of {plan.mesh}"
        if cut
        else f"a mesh of {plan.mesh}"
    )


def _placement_words(placements: Sequence[object], sizes: Sequence[int]) -> list[str]:
    """Placements as words. On an axis of one rank a weight is whole."""
    return [str(p) if size > 1 else "R" for p, size in zip(placements, sizes, strict=True)]


def _gathered_weights(plan: Plan) -> dict[str, str]:
    """Return the axes over which each weight is gathered for use, by the pattern of its name, without axes of one rank."""
    words = {}
    for name, param in params_by_pattern(plan).items():
        axes = [plan.mesh.axis_names[a] for a in param.gathered if plan.mesh.axis_sizes[a] > 1]
        if axes:
            words[name] = f"gathered over {', '.join(axes)}"
    return words


def _script_remarks(plan: Plan) -> list[str]:
    """Remarks for the reader of the script."""
    user_code = plan.model.config.get("callable")
    lines = (
        [
            f"The model and its inputs come from {user_code}, which every rank runs whole; its blocks are written",
            "when the script runs, since an export runs no code that a plan names.",
        ]
        if user_code
        else ["The model is built without dropout."]
    )
    if plan.pipeline and not user_code:
        lines.append(
            "Its stages and their blocks are written when the script runs; each rank has the weights of its own stages."
        )
    if plan.model.loss == STANDIN_LOSS:
        lines.append(
            "The model returns no loss: put yours into loss_of; the plan is for the mean of its output to the fourth power."
        )
    return lines


def _write_imports(blocks: Blocks) -> str:
    # From the tree and not from the text, where a name may be part of a longer one.
    used = {node.id for node in ast.walk(ast.parse(blocks.source)) if isinstance(node, ast.Name)} - {"torch"}
    names = [n for n in program.__all__ if n in used]
    # Classes before functions, as formatters order what is imported.
    names = sorted(
        [*names, "Axis", "EditableFunctions"] if blocks.source else ["EditableFunctions"],
        key=lambda n: (n[0].islower(), n),
    )
    line = f"from planner_core.runtime.program import {', '.join(names)}"
    if len(line) > WIDTH:
        line = wrap_lines(f"from planner_core.runtime.program import ({', '.join(names)})")
    return f"{IMPORTS}\n{line}\nfrom planner_core.verification import scaled"


def _blocks_key(blocks: Blocks) -> list[str]:
    """Return the lines that say for which plan and inputs the blocks were written."""
    if not blocks.source:
        return ["WRITTEN_FOR = {}  # no blocks: they are made when the script runs"]
    shapes = ", ".join(f'"{name}": {shape}' for name, shape in blocks.inputs.items())
    return wrap_lines(f'WRITTEN_FOR = {{"plan": "{blocks.plan}", "inputs": {{{shapes}}}}}').split("\n")


def _write_constants(plan: Plan, blocks: Blocks, flops: int) -> str:
    lines = [
        *_blocks_key(blocks),
        f"FLOPS = {float(flops):.4g}  # of one step on all GPUs: products and attention, forward and backward",
    ]
    if blocks.source:
        axes = plan.mesh.axis_names
        values = ", ".join(f'Axis("{axis}")' for axis in axes)
        lines.append(f"{', '.join(a.upper() for a in axes)} = {values}  # apply puts this rank on them")
        lines.append("DEVICE = training.device()")
    lines += [f"# {name}: from the model's own code; apply puts it here" for name in blocks.foreign]
    return "\n".join(lines)
