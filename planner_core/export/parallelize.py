"""A Python module for one's own trainer: `parallelize(model, mesh)` by the styles of torch.distributed.tensor.parallel."""

from __future__ import annotations

import json

from planner_core.export.observe import Observed, Shared, observe, rules
from planner_core.export.tensor import Layout, patterns, starred, tensor_layout
from planner_core.plan import Plan

STYLES = {
    "colwise": "ColwiseParallel()", "gathered": "ColwiseParallel(output_layouts=Replicate())", "rowwise": "RowwiseParallel()",
    "sliced": "RowwiseParallel(input_layouts=Replicate())", "vocabulary": "RowwiseParallel(input_layouts=Replicate())",
    "features": "ColwiseParallel(output_layouts=Replicate())",
}  # fmt: skip
BODY = '''

def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split `model` in place over the one-dimensional `mesh`, e.g. `init_device_mesh("cuda", (D, T), mesh_dim_names=("data",
    "tensor"))["tensor"]`; raises ValueError where model or mesh do not suit the plan. Every rank of `mesh` gets the same batch."""
    check(model, mesh)
    tied: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(param), []).append(name)
    parallelize_module(model, mesh, PLAN)
    for first, *others in tied.values():  # splitting replaces parameters, which unties them
        module, _, short = first.rpartition(".")
        param = model.get_submodule(module)._parameters[short]
        for other in others:
            module, _, short = other.rpartition(".")
            model.get_submodule(module)._parameters[short] = param
    return model


def check(model: nn.Module, mesh: DeviceMesh) -> None:
    """Heads that do not divide would be wrong without a word, and patterns that match nothing would split nothing."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh has {mesh.ndim} axes; pass the tensor axis alone, e.g. mesh['tensor']")
    config = getattr(model, "config", None)
    for source in (config, getattr(config, "text_config", None)):
        for key in HEADS:
            heads = getattr(source, key, None)
            if isinstance(heads, int) and heads % mesh.size():
                raise ValueError(f"{key} = {heads} is not divisible by the {mesh.size()} devices of the tensor axis")
    names = [name for name, _ in model.named_modules()]
    for pattern in PLAN:
        if not any(fnmatchcase(name, pattern) and name.count(".") == pattern.count(".") for name in names):
            raise ValueError(f"the model has no module {pattern}; this plan is for MODEL_NAME")
'''


def parallelize_text(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The module's source and remarks; raises InputError for plans and models that stock styles cannot split."""
    layout = tensor_layout(plan)
    drop_summed(layout)
    seen = observe(plan, layout)
    found = rules(plan, layout)
    _name_experts(layout)
    rows = [f'    "{s.module}": {_prepare(s)},' for s in seen.shared]
    rows += [f'    "{name}": {STYLES[style]},' for name, style in found.items()]
    remarks = remarks_of(layout, _wiring(layout, seen))
    body = BODY.replace("MODEL_NAME", str(plan.model["name"]))
    heads = "HEADS = (" + "".join(f'"{k}", ' for k in seen.heads) + ")\n"
    imports = ["ColwiseParallel", *(["PrepareModuleInput"] if seen.shared else []), "RowwiseParallel", "parallelize_module"]
    text = "\n".join([
        _head(plan, layout, remarks), "from fnmatch import fnmatchcase", "", "from torch import nn",
        "from torch.distributed.device_mesh import DeviceMesh", "from torch.distributed.tensor import Replicate",
        f"from torch.distributed.tensor.parallel import {', '.join(imports)}", "", heads.rstrip(), "PLAN = {", *rows, "}",
    ])  # fmt: skip
    use = "Import `parallelize` from FILE and call parallelize(model, mesh['tensor']) on a model with whole weights, equal on every rank"
    return text + "\n" + body, (use, *remarks)


def _prepare(s: Shared) -> str:
    """One PrepareModuleInput, so that the gradients of all columns are summed by one all_reduce."""
    if s.position is None:
        layouts = f'{{"{s.keyword}": Replicate()}}'
        return f"PrepareModuleInput(input_kwarg_layouts={layouts}, desired_input_kwarg_layouts={layouts}, use_local_output=False)"
    places = ["Replicate()" if i == s.position else "None" for i in range(s.num_args)]
    layouts = f"({', '.join(places)},)"
    return f"PrepareModuleInput(input_layouts={layouts}, desired_input_layouts={layouts}, use_local_output=False)"


def drop_summed(layout: Layout) -> None:
    """Stock styles sum no gradient of a whole parameter between column and row."""
    bad = [g for g in layout.groups if g.summed]
    for group in bad:
        for name in (*group.columns, group.row):
            layout.styles.pop(name, None)
    if bad:
        layout.groups = [g for g in layout.groups if not g.summed]
        layout.differences.append(
            f"{patterns(n for g in bad for n in (*g.columns, g.row))}: split in the plan, whole here, because the gradients of "
            f"{patterns(n for g in bad for n in g.summed)} between them would need a sum that no stock style makes"
        )


def _name_experts(layout: Layout) -> None:
    if layout.experts:
        layout.differences.append(f"{patterns(layout.experts)}: experts split in the plan, whole here; no stock style splits fused experts")


def _wiring(layout: Layout, seen: Observed) -> list[str]:
    lines = ["AdamW needs foreach=False, or FSDP2 over the data axis: split parameters are DTensors, the others are not"]
    if seen.unshared:
        lines.append(f"{patterns(seen.unshared)} and its neighbours share no module of their own: one backward all_reduce for each of them")
    return lines


def remarks_of(layout: Layout, more: list[str]) -> tuple[str, ...]:
    """What the trainer must do, and what differs from the plan."""
    lines = list(more)
    if layout.data > 1:
        lines.insert(
            0, f"the data axis is the trainer's: data parallelism (DDP or FSDP2) over {layout.data}, tensor parallelism over {layout.size}"
        )
    return (*lines, *(f"differs from the plan: {d}" for d in layout.differences))


def _head(plan: Plan, layout: Layout, remarks: tuple[str, ...]) -> str:
    groups = list({starred(g.row): g for g in layout.groups}.values())
    pairs = [f"    {patterns(g.columns)} by output features, then {starred(g.row)} by input features" for g in groups]
    quoted = json.dumps(plan.name, ensure_ascii=False)
    lines = [
        f'"""Tensor parallelism of {plan.model["name"]} over {layout.size} devices: the plan {quoted}, written by Shardscope.', "",
        *pairs, "", "Each pair sums its output once in the forward pass and its input's gradient once in the backward pass.", "",
        *(f"- {r}" for r in remarks), '"""', "", "from __future__ import annotations", "",
    ]  # fmt: skip
    return "\n".join(lines)
