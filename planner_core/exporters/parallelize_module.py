"""Export a Python module for a user's own trainer: `parallelize(model, mesh)`, with the styles of torch.distributed.tensor.parallel."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence

from planner_core.core import Plan
from planner_core.exporters.observe import Observed, Shared, observe, rules
from planner_core.exporters.sequence_parallel import STYLES as SEQUENCE_STYLES
from planner_core.exporters.sequence_parallel import on_tokens, runs
from planner_core.exporters.source import parallelize_template as template
from planner_core.planning.methods import (
    TOKENS_OR_GATHERED,
    Difference,
    DifferenceKind,
    TpLayout,
    by_hand,
    drop_summed,
    patterns,
    starred,
    tensor_layout,
)

STYLES = {
    "colwise": "ColwiseParallel()",
    "gathered": "ColwiseParallel(output_layouts=Replicate())",
    "rowwise": "RowwiseParallel()",
    "sliced": "RowwiseParallel(input_layouts=Replicate())",
    "vocabulary": "RowwiseParallel(input_layouts=Replicate())",
    "features": "ColwiseParallel(output_layouts=Replicate())",
}


def parallelize_text(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """The module's source, and remarks. Raises InputError for plans and models that stock styles cannot express."""
    layout = tensor_layout(plan)
    drop_summed(layout)
    seen = observe(plan, layout)
    found = rules(plan, layout)
    _name_experts(layout)
    if layout.sequence:
        told, layout.sequence = layout.differences, _may_split_tokens(layout, seen, found)
        layout.differences = [d for d in told if d.kind is not DifferenceKind.TOKENS] if layout.sequence else told
        text = _text(plan, layout, seen, found)
        why = runs(text, dict(plan.model["config"])) if layout.sequence else ""
        if layout.sequence and not why:
            return text, _remarks(plan, layout, seen), layout
        layout.sequence, layout.differences = (
            False,
            told + [Difference(f"with tokens split this model's code does not run: {why}")] * bool(why),
        )
    return _text(plan, layout, seen, found), _remarks(plan, layout, seen), layout


def _may_split_tokens(layout: TpLayout, seen: Observed, found: Mapping[str, str]) -> bool:
    """Whether every layer belongs to a group that gathers tokens before and scatters them after."""
    others = [d for d in layout.differences if d.kind not in TOKENS_OR_GATHERED]
    columns = [g.columns for g in layout.groups if len(g.columns) == 1]
    return not (others or seen.unshared or columns or "sliced" in found.values())


def _remarks(plan: Plan, layout: TpLayout, seen: Observed) -> tuple[str, ...]:
    use = "Import `parallelize` from FILE and call parallelize(model, mesh['tensor']) on a model with whole weights, equal on every rank"
    return use, *remarks_of(layout, _wiring(layout, seen), by_hand(plan))


def _text(plan: Plan, layout: TpLayout, seen: Observed, found: Mapping[str, str]) -> str:
    styles = dict(found) | (on_tokens(plan, layout) if layout.sequence else {})
    names = SEQUENCE_STYLES if layout.sequence else STYLES
    rows = [f'    "{s.module}": {_prepare(s, layout.sequence)},' for s in seen.shared]
    rows += [f'    "{name}": {names[style]},' for name, style in styles.items()]
    heads = "HEADS = (" + "".join(f'"{k}", ' for k in seen.heads) + ")"
    used = [
        n
        for n in ("ColwiseParallel", "PrepareModuleInput", "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel")
        if any(n in row for row in rows)
    ]
    placements = [n for n in ("Replicate", "Shard") if any(f"{n}(" in row for row in rows)]
    return (
        "\n".join(
            [
                _head(plan, layout, _remarks(plan, layout, seen)[1:]),
                "from fnmatch import fnmatchcase",
                "",
                "from torch import nn",
                "from torch.distributed.device_mesh import DeviceMesh",
                *([f"from torch.distributed.tensor import {', '.join(placements)}"] if placements else []),
                f"from torch.distributed.tensor.parallel import {', '.join([*used, 'parallelize_module'])}",
                "",
                f"MODEL = {json.dumps(str(plan.model['name']))}",
                heads,
                "PLAN = {",
                *rows,
                "}",
            ]
        )
        + "\n\n\n"
        + "\n\n".join(map(inspect.getsource, (template.parallelize, template.check)))
    )


def _prepare(s: Shared, tokens: bool) -> str:
    """One PrepareModuleInput, so that the gradients of all columns are summed (or `tokens` gathered) by one collective."""

    def layouts(placement: str) -> str:
        if s.position is None:
            return f'{{"{s.keyword}": {placement}}}'
        return f"({', '.join(placement if i == s.position else 'None' for i in range(s.num_args))},)"

    given, kind = layouts("Shard(1)" if tokens else "Replicate()"), "kwarg_" * (s.position is None)
    return f"PrepareModuleInput(input_{kind}layouts={given}, desired_input_{kind}layouts={layouts('Replicate()')}, use_local_output=False)"


def _name_experts(layout: TpLayout) -> None:
    if layout.experts:
        told = "experts split in the plan, whole here; no stock style splits fused experts"
        layout.differences.append(Difference.of(layout.experts, told))
        layout.experts = []


def _wiring(layout: TpLayout, seen: Observed) -> list[str]:
    lines = [
        "tokens are split between the blocks (SequenceParallel): gradients of norms are summed by the optimizer"
    ] * layout.sequence
    lines += [
        "AdamW needs foreach=False, or FSDP2 over the data axis: split parameters are DTensors, the others are not"
    ]
    if seen.unshared:
        lines.append(
            f"{patterns(seen.unshared)} and its neighbours share no module of their own: one backward all_reduce for each of them"
        )
    return lines


def remarks_of(layout: TpLayout, more: Sequence[str], left: Sequence[str] = (), stage: int = 0) -> tuple[str, ...]:
    """Remarks: what the trainer must do, and what differs from the plan; `left` differs beside the layout. `stage`: the stage of ZeRO
    that the form itself says."""
    lines = list(more)
    if layout.data > 1:
        way = "FSDP2, since the plan shards weights there" if layout.shards > 1 else "DDP"
        way = f"ZeRO-{stage}" if stage else way
        lines.insert(
            0,
            f"the data axis is the trainer's: data parallelism ({way}) over {layout.data}, tensor parallelism over {layout.size}"
            + (f", context parallelism over {layout.context}" if layout.context > 1 else ""),
        )
    return (*lines, *(f"differs from the plan: {d}" for d in (*layout.differences, *left)))


def _head(plan: Plan, layout: TpLayout, remarks: tuple[str, ...]) -> str:
    groups = list({starred(g.row): g for g in layout.groups}.values())
    pairs = [f"    {patterns(g.columns)} by output features, then {starred(g.row)} by input features" for g in groups]
    quoted = json.dumps(plan.name, ensure_ascii=False)
    lines = [
        f'"""Tensor parallelism of {plan.model["name"]} over {layout.size} devices: the plan {quoted}, written by Shardscope.',
        "",
        *pairs,
        "",
        "Each pair sums its output once in the forward pass and its input's gradient once in the backward pass.",
        "",
        *(f"- {r}" for r in remarks),
        '"""',
        "",
        "from __future__ import annotations",
        "",
    ]
    return "\n".join(lines)
