"""Export a Python module for a user's trainer: `parallelize(model, mesh)`, in the styles of torch.distributed.tensor.parallel."""

from __future__ import annotations

import json
from collections.abc import Mapping

from planner_core.core import Plan, Sentence
from planner_core.exporters.configs.common import list_remarks
from planner_core.exporters.observe import ModelFacts, SharedInput, inspect_model, styles_by_pattern
from planner_core.exporters.remarks import FILE
from planner_core.exporters.sequence_parallel import STYLES as SEQUENCE_STYLES
from planner_core.exporters.sequence_parallel import token_styles, why_not_runnable
from planner_core.exporters.source import template_text
from planner_core.planning.methods import (
    TOKENS_OR_GATHERED,
    Difference,
    DifferenceKind,
    TpLayout,
    describe_modules,
    drop_summed,
    recompute_by_hand,
    star_numbers,
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


def write_parallelize_module(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """Write the module's source, with remarks. Raises InputError for plans and models that stock styles cannot express."""
    layout = tensor_layout(plan)
    # Before the model is inspected, which looks up the inputs of the groups that are left.
    drop_summed(layout)
    facts = inspect_model(plan, layout)
    styles = styles_by_pattern(plan, layout)
    _drop_experts(layout)
    if layout.sequence:
        # Tokens are split in the plan. The text is written with split tokens first, and tried: some models' code reshapes by the number of
        # tokens, which fails on tensors of a part of them. Then it is written with whole tokens, and the remarks say so.
        differences, layout.sequence = layout.differences, _can_split_tokens(layout, facts, styles)
        layout.differences = (
            [d for d in differences if d.kind is not DifferenceKind.TOKENS] if layout.sequence else differences
        )
        text = _module_source(plan, layout, facts, styles)
        why = why_not_runnable(text, plan.model.config) if layout.sequence else ""
        if layout.sequence and not why:
            return text, _list_form_remarks(plan, layout, facts), layout
        layout.sequence = False
        layout.differences = [*differences]
        if why:
            layout.differences.append(Difference(f"with tokens split this model's code does not run: {why}"))
    return _module_source(plan, layout, facts, styles), _list_form_remarks(plan, layout, facts), layout


def _can_split_tokens(layout: TpLayout, facts: ModelFacts, styles: Mapping[str, str]) -> bool:
    """Return whether every layer belongs to a group that gathers tokens before and scatters them after."""
    others = [d for d in layout.differences if d.kind not in TOKENS_OR_GATHERED]
    columns = [g.columns for g in layout.groups if len(g.columns) == 1]
    return not (others or facts.unshared or columns or "sliced" in styles.values())


def _list_form_remarks(plan: Plan, layout: TpLayout, facts: ModelFacts) -> tuple[str, ...]:
    use = Sentence(
        "Import `parallelize` from ",
        FILE,
        " and call parallelize(model, mesh['tensor']) on a model with whole weights, equal on every rank",
    )
    return use, *list_remarks(layout, _usage_remarks(layout, facts), recompute_by_hand(plan))


def _module_source(plan: Plan, layout: TpLayout, facts: ModelFacts, styles: Mapping[str, str]) -> str:
    styles = dict(styles) | (token_styles(plan, layout) if layout.sequence else {})
    names = SEQUENCE_STYLES if layout.sequence else STYLES
    rows = [f'    "{s.module}": {_input_style(s, layout.sequence)},' for s in facts.shared]
    rows += [f'    "{name}": {names[style]},' for name, style in styles.items()]
    heads = "HEADS = (" + "".join(f'"{k}", ' for k in facts.heads) + ")"
    used = [
        n
        for n in ("ColwiseParallel", "PrepareModuleInput", "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel")
        if any(n in row for row in rows)
    ]
    placements = [n for n in ("Replicate", "Shard") if any(f"{n}(" in row for row in rows)]
    return (
        "\n".join(
            [
                _module_head(plan, layout, _list_form_remarks(plan, layout, facts)[1:]),
                "from fnmatch import fnmatchcase",
                "",
                "from torch import nn",
                "from torch.distributed.device_mesh import DeviceMesh",
                *([f"from torch.distributed.tensor import {', '.join(placements)}"] if placements else []),
                f"from torch.distributed.tensor.parallel import {', '.join([*used, 'parallelize_module'])}",
                "",
                f"MODEL = {json.dumps(plan.model.name)}",
                heads,
                "PLAN = {",
                *rows,
                "}",
            ]
        )
        + "\n\n\n"
        + "\n\n".join(template_text("parallelize_template", name) for name in ("parallelize", "check"))
    )


def _input_style(s: SharedInput, tokens: bool) -> str:
    """Return a PrepareModuleInput for the common input of several columns: one collective sums their gradients, or gathers `tokens`."""

    def layouts(placement: str) -> str:
        if s.position is None:
            return f'{{"{s.keyword}": {placement}}}'
        return f"({', '.join(placement if i == s.position else 'None' for i in range(s.num_args))},)"

    input_layouts, kind = layouts("Shard(1)" if tokens else "Replicate()"), "kwarg_" * (s.position is None)
    desired = layouts("Replicate()")
    return f"PrepareModuleInput(input_{kind}layouts={input_layouts}, desired_input_{kind}layouts={desired}, use_local_output=False)"


def _drop_experts(layout: TpLayout) -> None:
    if layout.experts:
        difference = "experts split in the plan, whole here; no stock style splits fused experts"
        layout.differences.append(Difference.of(layout.experts, difference))
        layout.experts = []


def _usage_remarks(layout: TpLayout, facts: ModelFacts) -> list[str]:
    lines = [
        "tokens are split between the blocks (SequenceParallel): gradients of norms are summed by the optimizer"
    ] * layout.sequence
    lines += [
        # torch's foreach kernels take lists of one kind of tensor.
        "AdamW needs foreach=False, or FSDP2 over the data axis: split parameters are DTensors, the others are not"
    ]
    if facts.unshared:
        lines.append(
            f"{describe_modules(facts.unshared)} and its neighbours share no module of their own: one backward all_reduce for each of them"
        )
    return lines


def _module_head(plan: Plan, layout: TpLayout, remarks: tuple[str, ...]) -> str:
    groups = list({star_numbers(g.row): g for g in layout.groups}.values())
    pairs = [
        f"    {describe_modules(g.columns)} by output features, then {star_numbers(g.row)} by input features"
        for g in groups
    ]
    quoted = json.dumps(plan.name, ensure_ascii=False)
    lines = [
        f'"""Tensor parallelism of {plan.model.name} over {layout.size} devices: the plan {quoted}, written by Shardscope.',
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
