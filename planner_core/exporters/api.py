"""Write a plan in the form of another program, or say why that form cannot hold it.

export(plan, "torchrun", "train.py")      # writes the file whole or not at all, returns what to say
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_core.core import (
    STANDIN_LOSS,
    InputError,
    NoteKind,
    Pipeline,
    Plan,
    Sentence,
    memory_amount,
    named,
    named_form,
    plan_to_json,
    refuse_stages,
    write_file,
)
from planner_core.exporters.configs.common import check_single_stack
from planner_core.exporters.nearest import (
    FormCost,
    data_parallel_plans,
    fills_cluster,
    list_run_differences,
    megatron_alternatives,
    nearest_plan,
    price_file,
    unstated_dtype,
    unstated_options,
)
from planner_core.exporters.remarks import PRICE_FILE, Remark, RemarkKind, name_file
from planner_core.exporters.targets import write_target
from planner_core.planning.methods import TARGETS, WHOLE_PLANS, CannotHold, Target, Tool, TpLayout
from planner_core.planning.pricing import FORMATS

UNPRICED = "what this form does could not be priced on the plan's mesh"


@dataclass(frozen=True, slots=True)
class ExportedPlan:
    """A written form.

    Attributes:
        text: The text of the file.
        remarks: Remarks for the user: how to run it, and what it cannot express.
        nearest: The cost of the form's execution compared with the plan's; None if the form is the plan itself. The remarks do not have it.
        companion: Suffix and text of a second file that the first one reads.
    """

    text: str
    remarks: tuple[str, ...]
    nearest: FormCost | None = None
    companion: tuple[str, str] | None = None

    @property
    def shortage(self) -> tuple[str, ...]:
        """The remark that the plan does not fit; none where it does."""
        return tuple(r for r in self.remarks if Remark.of(r).kind is RemarkKind.SHORTAGE)

    @property
    def lines(self) -> tuple[str, ...]:
        """The remarks, and the price of the form as the last one."""
        price = () if self.nearest is None else (Sentence("in this form: ", self.nearest.sentence()),)
        return (*self.remarks, *price)


def write_form(plan: Plan, target: Target) -> ExportedPlan:
    """Write a plan in a form that can hold it, and price the form's execution. Raises InputError."""
    text, remarks, layout = write_target(target, plan)
    if not plan.fits:
        remarks = (_shortage(plan), *remarks)
    companion = (target.plan_suffix, json.dumps(plan_to_json(plan), indent=1) + "\n") if target.plan_suffix else None
    if plan.model.loss == STANDIN_LOSS:
        loss_remark = (
            f"the model returns no loss, so the plan is for a {STANDIN_LOSS}; train on your own loss in its place"
        )
        remarks = (*remarks, loss_remark)
    if not target.runs_whole_plan:
        remarks = (*remarks, *_unsupported_features(plan, target))
    if layout is None and not (target.states_ranks and fills_cluster(plan)):
        return ExportedPlan(text, remarks, companion=companion)
    if layout is not None and layout.recompute is None:
        remark = "it has no price in this form: the planner does not price which layers are recomputed here"
        return ExportedPlan(text, (*remarks, remark))
    try:
        priced, unstated = _price_form(plan, target, text, layout)
    except InputError as error:
        # The file is what was asked for, so it is written; only its price is lacking.
        return ExportedPlan(text, (*remarks, Sentence("it has no price in this form: ", error.sentence)))
    if priced is None:
        return ExportedPlan(text, (*remarks, UNPRICED))
    run, cost = priced
    if target.states_run or target.states_ranks:
        remarks = (*remarks, *list_run_differences(plan, run))
    if target.states_run:
        stack = f"its price is that of the written file: a run on {target.title}'s own kernels and buffers"
        host = (note.sentence for note in run.notes if note.kind is NoteKind.UNKNOWN_HOST)
        remarks = (*remarks, stack, *host)
    return ExportedPlan(text, (*remarks, *_read_back(unstated)), cost)


def _shortage(plan: Plan) -> Remark:
    """Return that a plan does not fit: its file is what was asked for, so it is written."""
    needed, capacity = plan.cost.memory_bytes["peak"], plan.cluster.gpu.memory_bytes
    needs, has = map(memory_amount, (needed, capacity))
    does_not_fit = "the plan does not fit in the memory that it was planned for: it takes "
    return Remark(does_not_fit, needs, " a GPU, which has ", has, kind=RemarkKind.SHORTAGE)


def _read_back(unstated: Mapping[str, Any]) -> tuple[Remark, ...]:
    """Return a remark on the options that a written file does not state; none where it states all."""
    stated = Sentence.from_list(" ", (named(name, value) for name, value in unstated.items()))
    remark = Remark(PRICE_FILE, " reads it back with what it does not state: ", stated, kind=RemarkKind.READ_BACK)
    return (remark,) if unstated else ()


def _price_form(
    plan: Plan, target: Target, text: str, layout: TpLayout | None
) -> tuple[tuple[Plan, FormCost] | None, Mapping[str, Any]]:
    """Return the run of a written form with its cost, None where it has none on the plan's mesh, and the options that `price --config`
    needs beside the file. Raises InputError."""
    # A plan that was scaled down for a few processes fills no cluster, so its links have no bandwidth to price.
    if not fills_cluster(plan):
        return None, {}
    if target.states_ranks:
        # Ranks that share the tokens of a sample in the plan have samples of their own here, and there may be too few.
        if (samples := plan.graph_batch) % (ranks := layout.data if layout else plan.num_gpus):
            raise InputError(f"{samples} samples of a micro-batch cannot be dealt to its {ranks} data-parallel ranks")
        unstated = unstated_options(plan, text, layout.shards if layout else 1)
        return price_file(plan, text, unstated), unstated
    assert layout is not None
    if not target.states_run:
        return nearest_plan(plan, layout), {}
    unstated = unstated_dtype(plan, text)
    return price_file(plan, text, unstated), unstated


def _unsupported_features(plan: Plan, target: Target) -> Iterator[str]:
    """Remarks about features of a plan that only the project's own runtime has."""
    if plan.chunks > 1:
        yield "the plan makes products in chunks; what runs this form makes each at once"
    if plan.workload.offload:
        consequence = (
            "what runs this form updates there too, so its step takes another time than the plan says"
            if target.states_offload
            else "what runs this form keeps them on the GPU, which takes more memory than the plan says, unless you tell it otherwise"
        )
        yield f"the plan keeps the optimizer's moments in the host's memory, and updates on the GPU; {consequence}"


def find_target(name: str) -> Target:
    """Return the form of this name. Raises InputError."""
    if name not in TARGETS:
        raise InputError(named_form(name), f" is not one of {', '.join(TARGETS)}")
    return TARGETS[name]


def _find_target_for(plan: Plan, name: str) -> Target:
    """Return the form of this name, if it can hold the plan's stages. Raises InputError."""
    form = find_target(name)
    if plan.pipeline and not form.holds_stages:
        why = f"{form.why_no_stages}; " if form.why_no_stages else ""
        refuse_stages(plan, named_form(name), Sentence(why, _suggest_for_stages(plan)))
    return form


def _suggest_for_stages(plan: Plan) -> Sentence:
    """Name the forms that hold this plan's stages, why the others do not, and how to plan for these if none of a tool does."""
    targets = [target for target in TARGETS.values() if target.holds_stages]
    holding, refusals, tools = [], [], []
    for target in targets:
        # The plan file and the script hold every plan; a tool's own pipeline may not, which only its writer knows.
        if not target.runs_whole_plan:
            try:
                write_target(target, plan)
            except InputError as error:
                refusals.append(Sentence(f"; {target.name} does not hold it: ", error.sentence))
                continue
            tools.append(target)
        holding.append(target.name)
    hint = Sentence() if tools else _suggest_tools(plan, targets)
    return Sentence("give ", Sentence.from_list(" or ", map(named_form, holding)), *refusals, hint)


def _suggest_tools(plan: Plan, targets: Iterable[Target]) -> Sentence:
    """Say how to plan for those of the tools whose settings state stages of the plan's model; empty where none of them does."""
    tools = [named("tool", t.name) for t in targets if plan.pipeline and _may_have_stages(t, plan, plan.pipeline)]
    return Sentence("; ", Sentence.from_list(" or ", tools), " plans what it can be told") if tools else Sentence()


def _may_have_stages(target: Target, plan: Plan, cut: Pipeline) -> bool:
    if not isinstance(target, Tool) or target.stages is None or (target.find_fault and target.find_fault(plan)):
        return False
    with suppress(InputError):
        check_single_stack(plan, cut)
        return True
    return False


def export_text(plan: Plan, target: str, *, nearest: bool = False) -> ExportedPlan:
    """Export a plan as text. `nearest`: as for `export`.

    Raises InputError for an unknown target, or for a plan that it cannot hold; the message then names the nearest plan that it can hold,
    and its price; with `nearest` if none that it can hold fits."""
    form = _find_target_for(plan, target)
    try:
        return write_form(plan, form)
    except InputError as error:
        if nearest:
            return _write_alternative(plan, form, error)
        alternative = _describe_alternative(plan, form)
        if alternative is None and (hint := _suggest_tools(plan, [form])):
            raise InputError(error.sentence, hint) from None
        if alternative is None:
            raise
        why = error.why if isinstance(error, CannotHold) else error.sentence
        raise InputError(why, "; ", alternative, "; or use ", WHOLE_PLANS) from None


def _describe_alternative(plan: Plan, form: Target) -> Sentence | None:
    """Describe the nearest plan that a form can hold, with its price; None if there is none."""
    if not form.offers_nearest or not _can_be_priced(plan):
        return None
    if (other := _find_alternative(plan, form)) is not None:
        return Sentence(
            f"{other.name} is the nearest that it holds (", named("nearest", True), "): ", other.cost.sentence()
        )
    plain = min(data_parallel_plans(plan), key=lambda p: _preference_of(p[1]), default=None)
    if plain is None:
        return None
    return Sentence(f"{plain[0].name} over all GPUs is the nearest, and needs no file: ", plain[1].sentence())


def _write_alternative(plan: Plan, form: Target, error: InputError) -> ExportedPlan:
    """Export the nearest plan that a form can hold, with its price; `error`: why it cannot hold the given one.

    Raises InputError if the form holds none that fits."""
    other = _find_alternative(plan, form)
    if other is None:
        raise error
    if not other.cost.fits:
        raise InputError(
            error.sentence,
            f"; nothing is written, since {other.name}, the nearest that it holds, does not fit either: ",
            other.cost.sentence(),
        ) from None
    remark = Sentence(f'{other.name} in place of "{plan.name}": ', error.sentence)
    # The price of its export is beside the other plan; the user compares with the given one.
    return ExportedPlan(other.export.text, (remark, *other.export.remarks), other.cost)


@dataclass(frozen=True, slots=True)
class _Alternative:
    name: str
    export: ExportedPlan
    cost: FormCost


def _can_be_priced(plan: Plan) -> bool:
    # The nearest plans lie on the plan's mesh without stages, which alone does not fill the cluster.
    return not plan.pipeline and fills_cluster(plan) and not {"callable", "module"} & set(plan.model.config)


def _find_alternative(plan: Plan, form: Target) -> _Alternative | None:
    """Return the fastest plan that fits in a form that cannot hold `plan`, with the prices of both; None if the form holds none.

    It is one of Megatron-LM's, or data parallel."""
    if not (form.offers_nearest and _can_be_priced(plan)):
        return None
    alternatives: list[_Alternative] = []
    # A form that shards no pairs holds data parallelism alone.
    for megatron_plan, cost in megatron_alternatives(plan) if form.shards_pairs_only else ():
        try:
            export = write_form(megatron_plan, form)
        except InputError:
            continue
        name = f"Megatron-LM's plan on {cost.mesh}"
        alternatives.append(_Alternative(name, export, (export.nearest or cost).compared_with(plan)))
        # A form may take more memory than Megatron-LM does, so the next mesh is tried where the best one does not fit.
        if alternatives[-1].cost.fits:
            break
    for whole_plan, cost in data_parallel_plans(plan, form.data_parallel):
        alternatives.append(_Alternative(f"{whole_plan.name} over all GPUs", write_form(whole_plan, form), cost))
    return min(alternatives, key=lambda a: _preference_of(a.cost), default=None)


def _preference_of(cost: FormCost) -> tuple[bool, float]:
    """Return the key of an order: what fits comes first, the fastest of it; what does not fit comes by its memory."""
    return not cost.fits, cost.step_time_s if cost.fits else cost.peak_bytes


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
        InputError: The form does not exist, it cannot hold the plan, or the file cannot be written or has the suffix of another
            format. The message names the nearest plan that the form can hold and its price.

    Example:
        >>> plan = shardscope.plan("gpt2-xl", cluster="1x8-h100", layers=2).best
        >>> shardscope.export(plan, "torchrun", "train.py")[0]
        'wrote train.py'
    """
    check_file_name(target, Path(path))
    return write_export(export_text(plan, target, nearest=nearest), Path(path))


def check_file_name(target: str, path: Path) -> None:
    """Raise InputError for a file that `price --config` would read in another format than is written, which its suffix names.

    Example: options of a command line in a file called tt.toml.
    """
    form = find_target(target)
    written, read_as = FORMATS.get(form.suffix), FORMATS.get(path.suffix.lower())
    is_read_back = form.states_run or form.states_ranks
    if not is_read_back or read_as in (None, written) or (written, read_as) == ("JSON", "YAML"):  # YAML holds JSON
        return
    names = form.suffix if written else f"{form.suffix} or .sh"
    raise InputError(
        named_form(target),
        f" writes {written or 'command-line options'}, and ",
        PRICE_FILE,
        f" would read {path.name} as {read_as}; give the file a name that ends in {names}",
    )


def write_export(exported: ExportedPlan, path: Path) -> list[str]:
    """Write the file and its companion, or neither. Returns lines for the user. Raises InputError."""
    write_file(path, exported.text)
    lines = [f"wrote {path}"]
    if exported.companion:
        other = path.with_suffix(exported.companion[0])
        try:
            write_file(other, exported.companion[1])
        except InputError:
            # A script without its plan would fail only where it is to run.
            path.unlink()
            raise
        lines.append(f"wrote {other}")
    return [*lines, *(name_file(line, str(path)) for line in exported.lines)]
