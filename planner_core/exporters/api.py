"""A plan in the form of another program.

export_plan(plan, "torchrun", Path("train.py"))      # writes the file whole or not at all, returns what to say
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner_core.core import InputError, Plan, plan_to_json
from planner_core.exporters.configs import deepspeed_text, hf_text, megatron_text, torchtitan_text
from planner_core.exporters.nearest import Nearest, by_degrees, instead, nearest, on_cluster, without_file
from planner_core.exporters.parallelize_module import parallelize_text
from planner_core.exporters.torchrun import torchrun_script
from planner_core.exporters.tp_layout import Layout

__all__ = ["TARGETS", "Exported", "export_plan", "export_text", "nearest_text", "write_export"]


@dataclass(frozen=True, slots=True)
class Exported:
    """The text of one file, and sentences for the user: how to run it, and what it cannot express. `nearest` prices what the
    form does beside the plan (see `exporters.nearest.Nearest`), where the form is not the plan itself."""

    text: str
    remarks: tuple[str, ...]
    nearest: Nearest | None = None


def _json(plan: Plan) -> Exported:
    return Exported(
        json.dumps(plan_to_json(plan), indent=1) + "\n", ("The plan itself: the source of every other export.",)
    )


def _torchrun(plan: Plan) -> Exported:
    n = plan.mesh.num_devices
    source = (plan.model.get("config") or {}).get("callable")
    tiny = "Try it on a laptop: torchrun --nproc-per-node 4 FILE --scale tiny --batch 8 --seq 32 --dtype float32"
    own = f"It imports {source}, builds the model whole on every rank, and trains on its example inputs: put your data loader there"
    return Exported(
        torchrun_script(plan),
        (
            f"Run it on {n} GPUs: torchrun --nproc-per-node {min(n, 8)} --nnodes {max(1, n // 8)} FILE",
            own if source else tiny,
        ),
    )


Form = Callable[[Plan], tuple[str, tuple[str, ...], Layout]]
Pricing = Callable[[Plan, Layout], tuple[Plan, Nearest] | None]


def _made(text: Form, pricing: Pricing) -> Callable[[Plan], Exported]:
    def export(plan: Plan) -> Exported:
        made, remarks, layout = text(plan)
        found = pricing(plan, layout) if on_cluster(plan) else None
        if found is None:
            return Exported(made, (*remarks, "what this form does could not be priced on the plan's mesh"))
        return Exported(made, (*remarks, f"in this form: {found[1].sentence()}"), found[1])

    return export


def _columns(plan: Plan, layout: Layout) -> tuple[Plan, Nearest] | None:
    return nearest(plan, layout, each_column=True)


TARGETS: dict[str, Callable[[Plan], Exported]] = {
    "json": _json, "torchrun": _torchrun,
    "parallelize_module": _made(parallelize_text, lambda p, layout: nearest(p, layout, sequence=layout.sequence)),
    "hf": _made(hf_text, _columns), "deepspeed": _made(deepspeed_text, _columns),
    "megatron": _made(megatron_text, lambda p, layout: by_degrees(p, layout, sequence=layout.sequence)),
    "torchtitan": _made(torchtitan_text, lambda p, layout: by_degrees(p, layout, sequence=layout.sequence, may_shard=True)),
}  # fmt: skip


def export_text(plan: Plan, target: str) -> Exported:
    """The export as text; raises InputError for an unknown target, or for a plan that it cannot hold, with the nearest that
    it can and what that costs."""
    if target not in TARGETS:
        raise InputError(f"--to {target!r} is not one of {', '.join(TARGETS)}")
    try:
        return TARGETS[target](plan)
    except InputError as error:
        way = _way(plan, target)
        if way is None:
            raise
        why = str(error).removesuffix("; use --to torchrun").removesuffix(", or --to torchrun")
        raise InputError(f"{why}; {way}; or use --to torchrun") from None


def _way(plan: Plan, target: str) -> str | None:
    """The nearest that a form holds of a plan that it cannot hold, in words, with its price."""
    if target not in PAIRED or not _priceable(plan):
        return None
    if (other := _other(plan, target)) is not None:
        return f"{other.name} is the nearest that it holds (--nearest): {other.priced.sentence()}"
    plain = without_file(plan)
    return f"{plain[0]} over all GPUs is the nearest, and needs no file: {plain[1].sentence()}" if plain else None


def nearest_text(plan: Plan, target: str) -> Exported:
    """The plan where the form holds it, else Megatron-LM's in its place, with its price; raises InputError."""
    try:
        return TARGETS[target](plan) if target in PAIRED else export_text(plan, target)
    except InputError as error:
        other = _other(plan, target)
        if other is None:
            raise
        said = f'{other.name} in place of "{plan.name}": {error}'
        return Exported(
            other.made.text, (said, *other.made.remarks[:-1], f"in this form: {other.priced.sentence()}"), other.priced
        )


PAIRED = ("parallelize_module", "hf", "deepspeed", "megatron", "torchtitan")
"""Forms that hold plans which split matrices in pairs, and no others."""


@dataclass(frozen=True, slots=True)
class _Other:
    name: str
    made: Exported
    priced: Nearest


def _priceable(plan: Plan) -> bool:
    return on_cluster(plan) and "callable" not in plan.model["config"]


def _other(plan: Plan, target: str) -> _Other | None:
    """Megatron-LM's plan in a form that cannot hold `plan`, priced beside it; None where it cannot hold that either."""
    found = instead(plan) if target in PAIRED and _priceable(plan) else None
    if found is None:
        return None
    try:
        made = TARGETS[target](found[0])
    except InputError:
        return None
    priced = (made.nearest or found[1]).beside(plan)
    return _Other(f"Megatron-LM's plan on {found[1].mesh}", made, priced)


def export_plan(plan: Plan, target: str, path: Path, *, near: bool = False) -> list[str]:
    """Write the export to `path`; lines that say how to use it, what it leaves out and what that costs. With `near` a plan
    that the form cannot hold is replaced by the nearest that it can."""
    made = nearest_text(plan, target) if near else export_text(plan, target)
    return write_export(made, path)


def write_export(made: Exported, path: Path) -> list[str]:
    """Write the file whole or not at all; raises InputError."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(made.text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    return [f"wrote {path}", *(r.replace("FILE", str(path)) for r in made.remarks)]
