"""Write `DistributedConfig` of transformers."""

from __future__ import annotations

from planner_core.core import Plan, Sentence
from planner_core.exporters.configs.common import column_remarks, dump_json, list_remarks
from planner_core.exporters.observe import inspect_model, styles_by_pattern
from planner_core.exporters.remarks import FILE
from planner_core.planning.methods import TpLayout, describe_modules, recompute_by_hand, star_numbers, tensor_layout
from planner_core.planning.methods.tools import pairs


def write_hf(plan: Plan) -> tuple[str, tuple[str, ...], TpLayout]:
    """Write `DistributedConfig` as JSON. transformers merges its keys over the model's own plan, so other rules are disabled."""
    layout = tensor_layout(plan)
    facts = inspect_model(plan, layout)
    tp_plan = {name: pairs.STYLES[style] for name, style in styles_by_pattern(plan, layout).items()}
    tp_plan.update(
        {star_numbers(n.rpartition(".")[0]): "replicated_with_grad_allreduce" for g in layout.groups for n in g.summed}
    )
    for name in dict.fromkeys(map(star_numbers, layout.experts)):
        tp_plan.update(
            {f"{name}.gate_up_proj": "packed_colwise", f"{name}.down_proj": "rowwise", name: pairs.EXPERT_STYLE}
        )
    disabled = [key for key in facts.built_in if key not in tp_plan]
    tp_plan.update(dict.fromkeys(disabled, "replicate"))
    remarks = [
        Sentence(
            "Call from_pretrained(NAME, distributed_config=DistributedConfig(**json.load(open('",
            FILE,
            "')))) under torchrun; needs accelerate",
        ),
        *column_remarks(layout),
        *([f"switched off, as the plan does not split them: {describe_modules(disabled)}"] if disabled else []),
    ]
    return (
        dump_json({"tp_size": layout.size, "tp_plan": tp_plan}),
        list_remarks(layout, remarks, recompute_by_hand(plan)),
        layout,
    )
