"""Parts that several writers share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from planner_core.core import DEFAULT_PRECISION, SOFTWARE, InputError, Pipeline, Plan, named_form
from planner_core.models import VOCABULARY
from planner_core.planning.methods import TpLayout


def launch_sizes(plan: Plan) -> tuple[int, int]:
    """Return the number of nodes that run a plan, and the processes on each of them: one for each GPU of a node of its cluster."""
    node = plan.cluster.node_gpus
    # A plan that was scaled down for a few processes does not fill a node.
    processes = min(plan.num_gpus, node)
    return -(-plan.num_gpus // processes), processes


def list_remarks(layout: TpLayout, usage: Sequence[str], differences: Sequence[str], stage: int = 0) -> tuple[str, ...]:
    """List the trainer's duties and the differences from the plan.

    Args:
        layout: The written layout, with its own differences.
        usage: Remarks about use.
        differences: Further differences from the plan.
        stage: The ZeRO stage that the form itself states.
    """
    lines = list(usage)
    if layout.data > 1:
        trainer = "FSDP2, since the plan shards weights there" if layout.shards > 1 else "DDP"
        trainer = f"ZeRO-{stage}" if stage else trainer
        lines.insert(
            0,
            f"the trainer runs data parallelism ({trainer}) over {layout.data}, tensor parallelism over {layout.size}"
            + (f", context parallelism over {layout.context}" if layout.context > 1 else ""),
        )
    return (*lines, *(f"differs from the plan: {d}" for d in (*layout.differences, *differences)))


def column_remarks(layout: TpLayout) -> list[str]:
    """Return a remark on backward all_reduces, for tools that sum the gradient of a common input once for each layer that reads it."""
    columns, groups = sum(len(g.columns) for g in layout.groups), len(layout.groups)
    remark = f"every column-split layer sums its input's gradient by itself here: {columns} backward all_reduces a step, not {groups}"
    return [remark] if columns > groups else []


def micro_batch_samples(plan: Plan, layout: TpLayout) -> int:
    """Samples of one micro-batch of one data-parallel rank."""
    return max(1, plan.graph_batch // layout.data)


def count_recompute_policies(plan: Plan) -> Counter[str]:
    """Count the copies of repeated blocks under each recomputation policy."""
    copies: Counter[str] = Counter()
    for label, block in plan.blocks.items():
        if label:
            copies[block.recompute] += len(block.prefixes)
    return copies


def check_single_stack(plan: Plan, cut: Pipeline) -> None:
    """Raise InputError for stages that are not made of the model's layers in a row, such as an encoder and a decoder."""
    layers = plan.model.config.get("num_hidden_layers")
    if layers is not None and layers != sum(cut.copies):
        raise InputError(
            f"{plan.model.name} is {sum(cut.copies)} copies of blocks, not its {layers} layers in a row, and stages of this tool hold "
            "nothing else; give ",
            named_form("json"),
        )


def gathering_remarks(plan: Plan) -> list[str]:
    """Return a remark on traffic of once a step (ZeRO-1 and 2), for FSDP2 that keeps gathered weights through backward."""
    if plan.accumulate == 1:
        return []  # all of it is once a step there too
    return [
        "weights that the plan gathers once a step (ZeRO-1, ZeRO-2) are gathered here in every micro-batch, and gradients scattered in each"
    ]


def gradient_dtype(plan: Plan) -> str:
    """Return the dtype in which the gradients of a plan's weights are summed."""
    return plan.workload.summed_in(plan.workload.dtype)


def stated_tokens(plan: Plan) -> dict[str, int]:
    """Return the tokens of a sample as an option; none of a model without tokens, such as one of images, whose samples count as one."""
    seq, has_tokens = plan.workload.seq, VOCABULARY in plan.model.config
    return {"seq": seq} if seq > 1 or has_tokens else {}


def stated_run(plan: Plan) -> dict[str, Any]:
    """Return the options of a plan's run that `price` would assume otherwise: number formats, optimizer and kernels."""
    load = plan.workload
    # What `price` takes where nobody states it, which a plan that has the same need not state.
    assumed = {
        "dtype": plan.cluster.gpu.training_dtype,
        "optimizer": "adamw",
        "precision": DEFAULT_PRECISION,
        **dict.fromkeys(SOFTWARE),
    }
    stated = {name: getattr(load, name) for name in assumed}
    return {name: value for name, value in stated.items() if value and value != assumed[name]}


def dump_json(data: dict[str, Any]) -> str:
    """Format a configuration file."""
    return json.dumps(data, indent=1) + "\n"
