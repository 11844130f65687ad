"""Write a plan in the form of another program, or say why that form cannot hold it.

export(plan, "torchrun", "train.py")      # writes the file whole or not at all, returns what to say
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner_core.core import InputError, Plan, plan_to_json, refuse_stages, write_file
from planner_core.exporters.nearest import Nearest, instead, on_cluster, without_file
from planner_core.exporters.targets import TARGETS, WITH_STAGES, Target
from planner_core.planning.methods import CannotHold


@dataclass(frozen=True, slots=True)
class ExportedPlan:
    """The text of one file, and remarks for the user: how to run it, and what it cannot express. If the form is not the plan itself,
    `nearest` compares the price of what the form does with the plan (see `exporters.nearest.Nearest`)."""

    text: str
    remarks: tuple[str, ...]
    nearest: Nearest | None = None
    beside: tuple[str, str] | None = None
    """The ending of a second file, which is written beside the first, and its text."""


def _written(plan: Plan, target: Target) -> ExportedPlan:
    """The plan in a form that can hold it, with the price of what the form does. Raises InputError."""
    text, remarks, layout = target.write(plan)
    beside = (target.beside, json.dumps(plan_to_json(plan), indent=1) + "\n") if target.beside else None
    loss = str(plan.model.get("loss", ""))
    if loss.startswith("stand-in"):
        remarks = (
            *remarks,
            f"the model returns no loss, so the plan is for a {loss}; train on your own loss in its place",
        )
    if not target.runs_all:
        remarks = (*remarks, *_left_out(plan, target))
    if target.price is None or layout is None:
        return ExportedPlan(text, remarks, beside=beside)
    found = target.price(plan, layout) if on_cluster(plan) else None
    if found is None:
        return ExportedPlan(text, (*remarks, "what this form does could not be priced on the plan's mesh"))
    return ExportedPlan(text, (*remarks, f"in this form: {found[1].sentence()}"), found[1])


def _left_out(plan: Plan, target: Target) -> Iterator[str]:
    """Remarks about the parts of a plan that only the project's own runtime carries out."""
    if plan.chunks > 1:
        yield "the plan makes products in chunks; what runs this form makes each at once"
    if plan.workload.get("offload"):
        other = (
            "what runs this form updates there too, so its step takes another time than the plan says"
            if target.says_host
            else "what runs this form keeps them on the GPU, which takes more memory than the plan says, unless you tell it otherwise"
        )
        yield f"the plan keeps the optimizer's moments in the host's memory, and updates on the GPU; {other}"


def target_of(name: str) -> Target:
    """The form of this name. Raises InputError."""
    if name not in TARGETS:
        raise InputError(f"--to {name!r} is not one of {', '.join(TARGETS)}")
    return TARGETS[name]


def _form_of(plan: Plan, name: str) -> Target:
    """The form of this name, if it can hold the plan's stages. Raises InputError."""
    form = target_of(name)
    if name not in WITH_STAGES:
        refuse_stages(plan, f"--to {name}", f"give --to {' or '.join(WITH_STAGES)}")
    return form


def export_text(plan: Plan, target: str) -> ExportedPlan:
    """The export as text. Raises InputError for an unknown target, or for a plan that it cannot hold; the message then names the
    nearest plan that it can hold, and its price."""
    form = _form_of(plan, target)
    try:
        return _written(plan, form)
    except InputError as error:
        way = _way(plan, form)
        if way is None:
            raise
        why = error.why if isinstance(error, CannotHold) else str(error)
        raise InputError(f"{why}; {way}; or use --to torchrun") from None


def _way(plan: Plan, form: Target) -> str | None:
    """Text about the nearest plan that a form can hold, with its price."""
    if not form.in_pairs or not _priceable(plan):
        return None
    if (other := _other(plan, form)) is not None:
        return f"{other.name} is the nearest that it holds (--nearest): {other.priced.sentence()}"
    plain = without_file(plan)
    return f"{plain[0]} over all GPUs is the nearest, and needs no file: {plain[1].sentence()}" if plain else None


def nearest_text(plan: Plan, target: str) -> ExportedPlan:
    """The plan if the form can hold it, else Megatron-LM's plan instead, with its price. Raises InputError."""
    form = _form_of(plan, target)
    try:
        return _written(plan, form)
    except InputError as error:
        other = _other(plan, form)
        if other is None:
            raise
        said = f'{other.name} in place of "{plan.name}": {error}'
        return ExportedPlan(
            other.made.text, (said, *other.made.remarks[:-1], f"in this form: {other.priced.sentence()}"), other.priced
        )


@dataclass(frozen=True, slots=True)
class _Other:
    name: str
    made: ExportedPlan
    priced: Nearest


def _priceable(plan: Plan) -> bool:
    return on_cluster(plan) and not {"callable", "module"} & set(plan.model["config"])


def _other(plan: Plan, form: Target) -> _Other | None:
    """Megatron-LM's plan in a form that cannot hold `plan`, with the prices of both; None if the form cannot hold that one either."""
    found = instead(plan) if form.in_pairs and _priceable(plan) else None
    if found is None:
        return None
    try:
        made = _written(found[0], form)
    except InputError:
        return None
    priced = (made.nearest or found[1]).beside(plan)
    return _Other(f"Megatron-LM's plan on {found[1].mesh}", made, priced)


def export(plan: Plan, target: str, path: str | Path, *, nearest: bool = False) -> list[str]:
    """Write a plan in the form of another program.

    Args:
        plan: The plan, of a search, a baseline or a file.
        target: The name of a form: `json`, `torchrun`, `parallelize_module`, `fsdp2`, `accelerate`, `hf`, `deepspeed`,
            `megatron` or `torchtitan`.
        path: The file to write. If writing fails, an old file stays as it was. `torchrun` also writes the plan, as `.plan.json`.
        nearest: Whether a plan that the form cannot hold is replaced by the nearest plan that it can hold.

    Returns:
        Lines of text: how to use the file, which parts of the plan it leaves out, and what that costs.

    Raises:
        InputError: The form does not exist, it cannot hold the plan, or the file cannot be written. The message names the
            nearest plan that the form can hold and its price.

    Example:
        >>> plan = shardscope.plan("gpt2-xl", cluster="1x8-h100", layers=2).best
        >>> shardscope.export(plan, "torchrun", "train.py")[0]
        'wrote train.py'
    """
    made = nearest_text(plan, target) if nearest else export_text(plan, target)
    return write_export(made, Path(path))


def write_export(made: ExportedPlan, path: Path) -> list[str]:
    """Write the file, and the second file beside it if there is one. Raises InputError."""
    write_file(path, made.text)
    said = [f"wrote {path}"]
    if made.beside:
        other = path.with_suffix(made.beside[0])
        try:
            write_file(other, made.beside[1])
        except InputError:
            path.unlink()
            raise
        said.append(f"wrote {other}")
    return [*said, *(r.replace("FILE", str(path)) for r in made.remarks)]
