"""Find the nearest plan that a form of tensor parallelism can hold, and compare its price with the given plan.

The same search runs with a restriction: layers that the form shards are sharded its way, every other weight is Replicate on the tensor
axis, the residual stream is Replicate or sharded by tokens, and the other axes shard the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner_core.core import (
    ZERO,
    DeviceMesh,
    Graph,
    Plan,
    Sentence,
    axis_names,
    keeps_masters,
    memory_amount,
    time_amount,
)
from planner_core.cost import cost_model_of
from planner_core.exporters.configs.common import gradient_dtype, stated_run, stated_tokens
from planner_core.models import load_plan_graph
from planner_core.planning import (
    Planner,
    follow_tp_layout,
    note_unknown_host,
    prepare_planner,
    request_of,
    with_recompute,
)
from planner_core.planning.methods import (
    Layout,
    TpLayout,
    VendorRules,
    is_batch_split,
    is_unsplit,
    is_used_in_parts,
    parse_layout,
    recompute_by_hand,
    sums_gradient_whole,
)
from planner_core.planning.pricing import Pricer, Setup, check_statement, read_text
from planner_core.search import search_within_budget


@dataclass(frozen=True, slots=True)
class FormCost:
    """The cost of a form's execution and of the given plan: seconds a step, bytes sent per GPU, bytes at the peak."""

    name: str
    mesh: str
    step_time_s: float
    wire_bytes: int
    peak_bytes: int
    plan_step_time_s: float
    plan_wire_bytes: int
    plan_peak_bytes: int
    fits: bool
    is_host_unknown: bool = False
    """Whether the form's step has no waits for the host, since its pace is not known there."""
    plan_host_wait_s: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return the object that the command line and the explorer read."""
        return asdict(self)

    def compared_with(self, plan: Plan) -> FormCost:
        """Return the same cost, compared with another plan."""
        cost = plan.cost
        return replace(
            self,
            plan_step_time_s=cost.step_time_s,
            plan_wire_bytes=_sent_bytes(plan),
            plan_peak_bytes=cost.memory_bytes["peak"],
            plan_host_wait_s=cost.host_wait_s,
        )

    def sentence(self) -> Sentence:
        """Compare the two costs in a sentence."""
        rows = (
            (self.step_time_s, self.plan_step_time_s, time_amount, " a step"),
            (self.wire_bytes, self.plan_wire_bytes, lambda n: f"{n / 1e9:.4g} GB", " sent per GPU"),
            (self.peak_bytes, self.plan_peak_bytes, lambda n: memory_amount(n, ".4g"), " at the peak"),
        )
        parts = [
            Sentence(amount(of_form), f"{of}, the plan ", amount(of_plan), _percent_change(of_form, of_plan))
            for of_form, of_plan, amount, of in rows
        ]
        if self.is_host_unknown and self.plan_host_wait_s:  # a percentage compares both without waits
            gpu_s = self.plan_step_time_s - self.plan_host_wait_s
            parts[0] = Sentence(
                time_amount(self.step_time_s),
                " a step without waits for the host, the plan ",
                time_amount(gpu_s),
                _percent_change(self.step_time_s, gpu_s),
                ", or ",
                time_amount(self.plan_step_time_s),
                " with its waits",
            )
        return Sentence("" if self.fits else "it does not fit; ", Sentence.from_list("; ", parts))


def _percent_change(of_form: float, of_plan: float) -> str:
    if not of_plan:
        return ""
    change = 100 * (of_form / of_plan - 1)
    return " (the same)" if abs(change) < 0.05 else f" ({change:+.1f} %)"


def fills_cluster(plan: Plan) -> bool:
    """Return whether the plan's mesh and stages fill its cluster. A plan that was scaled down for a few processes has no links to price."""
    return plan.num_gpus == plan.cluster.num_gpus


def nearest_plan(plan: Plan, layout: TpLayout) -> tuple[Plan, FormCost] | None:
    """Return the best plan that shards the layers of `layout` on the given plan's mesh, and its price; None if the search finds none.

    The trainer uses FSDP2 on the data axes if the plan shards weights there, and DDP otherwise, as `configs.common.list_remarks` says."""
    planner = _planner_of(plan, layout.recompute)
    name, stage = f"{plan.name}, as this form holds it", 3 if layout.shards > 1 else 0
    nearest = follow_tp_layout(
        planner, plan.mesh, layout, False, stage=stage, sequence=layout.sequence, name=name, method="export"
    )
    if nearest is None:
        return None
    return nearest, _compare_costs(plan, nearest, planner)


def unstated_options(plan: Plan, text: str, shards: int = 1) -> dict[str, Any]:
    """Return the options of a plan's run that its file does not state: `price --config` takes them beside it.

    Example: DeepSpeed's file says nothing of recomputation, which is a call in the script. `shards`: over how many data-parallel ranks the
    plan shards weights, which a file of tensor ranks leaves to the trainer. Raises InputError."""
    setup = _read_written(plan, text)
    layout, stated = setup.layout, {"accumulate": 1, **setup.options}
    samples = max(1, plan.graph_batch // layout.data)
    run: dict[str, Any] = {"accumulate": plan.accumulate, **stated_tokens(plan), "micro_batch": samples}
    unstated = {name: value for name, value in run.items() if stated.get(name) != value}
    if shards > 1 and layout.zero == 0 and layout.fsdp == 1:
        unstated["layout"] = str(replace(layout, dp=1, fsdp=layout.dp))
    if recompute_by_hand(plan) and stated.get("recompute", "none") == "none":
        unstated["recompute"] = "full"
    # The script makes the optimizer, whatever a reader assumes, and kernels that the tool does not choose are those of the plan. Which
    # weights are stored is the tool's choice.
    of_script = {n: value for n, value in stated_run(plan).items() if n == "optimizer" or not stated.get(n)}
    of_script.pop("precision", None)
    if stated.get("stack") == "accelerate" and layout.data > 1 and shards == 1 and not layout.zero:
        of_script.pop("gradients", None)  # DDP sums those of weights in float32, whatever the plan does
    return unstated | of_script


def unstated_dtype(plan: Plan, text: str) -> dict[str, Any]:
    """Return the dtype of a plan as an option where its file states none, since the tool then computes in it."""
    dtype = plan.workload.dtype
    return {"dtype": dtype} if dtype == _read_written(plan, text).own_dtype else {}


def list_run_differences(plan: Plan, priced: Plan) -> list[str]:
    """Return what of a plan's run its form does otherwise: number formats, optimizer and compilation. `priced`: the run of the form."""
    of_form, of_plan = _describe_run(priced), _describe_run(plan)
    return [
        f"differs from the plan: it {does} {how} here and {of_plan[does]} there"
        for does, how in of_form.items()
        if how != of_plan[does]
    ]


def _describe_run(plan: Plan) -> dict[str, str]:
    load = plan.workload
    stored = "float32" if keeps_masters(load.optimizer, load.precision) else load.dtype
    return {
        "computes": f"in {load.dtype}",
        "stores weights": f"in {stored}",
        "sums gradients": f"in {gradient_dtype(plan)}",
        "updates weights": f"by {load.optimizer}",
        "runs blocks": "compiled" if load.compiled else "operator by operator",
    }


def _read_written(plan: Plan, text: str) -> Setup:
    # Without a name, since the content tells the tool, and without a folder, since a written file names no other.
    return read_text(text, "the written file", plan.cluster.num_gpus, Path())


def price_file(
    plan: Plan, text: str, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Plan, FormCost] | None:
    """Price a written file as `price --config` does, with `options` beside it: the run that they state, on the tool's own stack.

    Files of Megatron-LM and torchtitan state degrees, batch, tokens and recomputation. None: the model cannot follow the degrees. Raises
    InputError."""
    has_inputs = "callable" in plan.model.config

    def load(model: str, *, layers: int | None, **sizes: Any) -> Graph:
        # Example inputs fix the sizes of a graph, and a file names no depth: the graph has the plan's.
        stated = {} if has_inputs else {**sizes, "accumulate": 1}
        return load_plan_graph(replace(plan, workload=replace(plan.workload, **stated)))

    cluster = plan.cluster
    pricer = Pricer(plan.model.name, cluster, load=load, has_inputs=has_inputs)
    setup = _read_written(plan, text)
    layout = parse_layout(options["layout"]) if "layout" in options else setup.layout
    other_options = {name: value for name, value in options.items() if name != "layout"}
    stated, _ = pricer.stated_model.state_run(layout, setup.override_options(layout, other_options))
    stated = pricer.deal_stages(setup, stated)
    check_statement(stated, cluster)
    stated_plan = pricer.plan(stated, "by degrees")
    if stated_plan is None:
        return None
    planner = pricer.planner(stated)
    stated_plan = replace(stated_plan, notes=(*stated_plan.notes, *note_unknown_host(stated_plan, planner.graph)))
    return stated_plan, _compare_costs(plan, stated_plan, planner)


def megatron_alternatives(plan: Plan) -> list[tuple[Plan, FormCost]]:
    """Megatron-LM's plan on each mesh, the best first, for a form that cannot hold the given plan."""
    planner = _planner_of(plan)
    n, node = plan.mesh.num_devices, planner.cluster.near_gpus
    # Tensor parallelism sums activations in every layer, so its ranks stay on one node's links.
    sizes = [s for s in (2, 4, 8, 16) if s <= node and n % s == 0]
    meshes = [DeviceMesh(axis_names(2), (n // s, s)) if s < n else DeviceMesh(axis_names(1), (n,)) for s in sizes]
    plans = []
    for mesh in meshes:
        one_axis = len(mesh.axis_sizes) == 1
        rules = VendorRules(
            planner.graph,
            (is_unsplit,) if one_axis else (is_batch_split, is_unsplit),
            (is_used_in_parts,) if one_axis else (sums_gradient_whole, is_used_in_parts),
            ranks=1 if one_axis else mesh.axis_sizes[0],
        )
        problem = planner.problem(planner.cost_model(mesh, zero=0), rules)
        result = search_within_budget(problem, objective="time")
        if result.assignment is not None:
            plans.append(planner.plan(problem, result, "Megatron-LM", "export", "time"))
    # A plan that does not fit may be faster by its price; it comes behind every one that fits.
    plans.sort(key=lambda p: (not p.fits, p.cost.step_time_s))
    return [(p, _compare_costs(plan, p, planner)) for p in plans]


def data_parallel_plans(plan: Plan, names: Collection[str] = ("DDP", "FSDP2")) -> list[tuple[Plan, FormCost]]:
    """Data parallelism over all GPUs, with its price: by DDP and FSDP2, which every trainer runs, or by the stages of ZeRO.

    `names`: of DDP, FSDP2, ZeRO-1, ZeRO-2 and ZeRO-3, those that a form states."""
    planner, n = _planner_of(plan), plan.mesh.num_devices
    layouts = {
        "DDP": Layout(dp=n),
        "FSDP2": Layout(fsdp=n),
        "ZeRO-1": Layout(dp=n, zero=1),
        "ZeRO-2": Layout(dp=n, zero=2),
        "ZeRO-3": Layout(fsdp=n),
    }
    plans = []
    for name in names:
        layout = layouts[name]
        candidate = planner.of_layout(layout, name)
        # No trainer's switch recomputes some layers, or parts of one: where the fastest plan does, the run recomputes all of them.
        if candidate is not None and any(b.recompute != "none" for b in candidate.blocks.values()):
            candidate = with_recompute(planner, "full").of_layout(layout, name)
        if candidate is not None:
            plans.append((candidate, _compare_costs(plan, candidate, planner)))
    return plans


def _planner_of(plan: Plan, recompute: str | None = None) -> Planner:
    """Return the planner of the plan's workload: with the plan's own choice of recomputation, or with another policy in every layer."""
    request = request_of(plan.workload, plan.model.name, plan.cluster)
    planner = prepare_planner(request, load_plan_graph(plan)).changed(
        # The forms make each product at once (`api._unsupported_features`), so their price has no chunks. And each plan has the ZeRO stage
        # that its layout or its form states, not that of the given plan: a planner's own bounds it from above.
        workload=replace(plan.workload, chunks=1, zero=max(ZERO))
    )
    return planner if recompute is None else with_recompute(planner, recompute)


def _compare_costs(plan: Plan, nearest: Plan, planner: Planner) -> FormCost:
    """Return the cost of the form's plan beside the given one."""
    peak = nearest.cost.memory_bytes["peak"]
    return FormCost(
        nearest.name,
        str(nearest.mesh),
        nearest.cost.step_time_s,
        _sent_bytes(nearest),
        peak,
        plan.cost.step_time_s,
        _sent_bytes(plan),
        plan.cost.memory_bytes["peak"],
        peak <= planner.budget,
        not cost_model_of(nearest).software.call_s,
        plan.cost.host_wait_s,
    )


def _sent_bytes(plan: Plan) -> int:
    return sum(t.wire_bytes for t in plan.cost.traffic)
