"""A plan in the form of another program.

    export_plan(plan, "torchrun", Path("train.py"))      # writes the file whole or not at all, returns what to say
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner_core.errors import InputError
from planner_core.export.configs import deepspeed_text, hf_text, megatron_text, torchtitan_text
from planner_core.export.parallelize import parallelize_text
from planner_core.export.torchrun import torchrun_script
from planner_core.plan import Plan, to_json

__all__ = ["TARGETS", "Exported", "export_plan", "export_text"]


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of one file, and sentences for the user: how to run it, and what it cannot express."""

    text: str
    remarks: tuple[str, ...]


def _json(plan: Plan) -> Exported:
    return Exported(json.dumps(to_json(plan), indent=1) + "\n", ("The plan itself: the source of every other export.",))


def _torchrun(plan: Plan) -> Exported:
    n = plan.mesh.num_devices
    return Exported(
        torchrun_script(plan),
        (f"Run it on {n} GPUs: torchrun --nproc-per-node {min(n, 8)} --nnodes {max(1, n // 8)} FILE",
         "Try it on a laptop: torchrun --nproc-per-node 4 FILE --scale tiny --batch 8 --seq 32 --dtype float32"),
    )  # fmt: skip


def _made(text: Callable[[Plan], tuple[str, tuple[str, ...]]]) -> Callable[[Plan], Exported]:
    return lambda plan: Exported(*text(plan))


TARGETS: dict[str, Callable[[Plan], Exported]] = {
    "json": _json, "torchrun": _torchrun, "parallelize_module": _made(parallelize_text), "hf": _made(hf_text),
    "deepspeed": _made(deepspeed_text), "megatron": _made(megatron_text), "torchtitan": _made(torchtitan_text),
}  # fmt: skip


def export_text(plan: Plan, target: str) -> Exported:
    """The export as text; raises InputError for an unknown target or a plan that it cannot hold."""
    if target not in TARGETS:
        raise InputError(f"--to {target!r} is not one of {', '.join(TARGETS)}")
    return TARGETS[target](plan)


def export_plan(plan: Plan, target: str, path: Path) -> list[str]:
    """Write the export to `path`; lines that say how to use it and what it leaves out."""
    made = export_text(plan, target)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(made.text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    return [f"wrote {path}", *(r.replace("FILE", str(path)) for r in made.remarks)]
