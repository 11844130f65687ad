"""Every method and every baseline: one entry each. A new one is added here and nowhere else.

If the method forbids something, its entry has a function from graph and mesh to a restriction of `restrictions`, `papers` or
`hf_tp_plan`. All methods search the same space, so their plans can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner_core.core import Note, NoteKind, Workload
from planner_core.planning.methods.hf_tp_plan import vendor_plan, vendor_rules
from planner_core.planning.methods.method import Method
from planner_core.planning.methods.papers import SplitWeights, SplitWork
from planner_core.planning.methods.restrictions import (
    data_parallel_rules,
    is_sequence_split,
    is_sharded_matrix,
    is_unsplit,
    megatron_rules,
    sums_gradient_whole,
)

EXACT = Method(
    name="exact",
    title="exact search",
    words="the best plan of one pipeline stage under the stated cost model",
    plan_title="Best plan",
)

METHODS: Mapping[str, Method] = {
    m.name: m
    for m in (
        EXACT,
        Method(
            name="tap",
            title="TAP",
            words="least volume, weights kept, one plan per unique block",
            objective="communication",
            zero=0,
            uniform=True,
            by_volume=True,
        ),
        Method(
            name="taps",
            title="TAPS",
            words="least communication time, weights kept, one plan per unique block",
            objective="communication",
            zero=0,
            uniform=True,
        ),
        Method(
            name="atp",
            title="ATP",
            words="every matrix split over a 2-D mesh, row- or column-first",
            restrict=lambda graph, _: SplitWeights(graph),
            objective="communication",
            zero=0,
            uniform=True,
            chunks=True,
            space="splits every matrix of a block on every mesh axis, and no product by samples",
        ),
        Method(
            name="alpa",
            title="Alpa-like",
            restrict=lambda graph, _: SplitWork(graph),
            objective="communication",
            zero=0,
            words="least communication time, hidden or not, weights kept, no product done twice, copies of a block apart, "
            "as Alpa plans operators",
            space="never does a product twice",
        ),
    )
}
"""The methods of `--method`, by name. The first is the default."""

BASELINES: Mapping[str, Method] = {
    m.name: m
    for m in (
        Method(
            name="data-parallel",
            title="data parallel",
            plan_title="Data parallel",
            restrict=data_parallel_rules(sums_gradient_whole),
            zero=0,
            words="every GPU holds all weights and takes its share of the batch",
        ),
        Method(
            name="fsdp",
            title="FSDP",
            restrict=data_parallel_rules(is_sharded_matrix),
            words="data parallel with weights sharded over the GPUs and gathered at use, as ZeRO-3",
        ),
        Method(
            name="megatron",
            title="Megatron-LM",
            restrict=megatron_rules(is_unsplit),
            zero=0,
            usual_stage=1,
            one_switch=True,
            words="attention heads and feed-forward split over neighbouring GPUs, joined by an all_reduce after each",
        ),
        Method(
            name="megatron-sp",
            title="Megatron-LM + sequence parallel",
            plan_title="Megatron-LM + SP",
            restrict=megatron_rules(is_sequence_split),
            zero=0,
            usual_stage=1,
            one_switch=True,
            words="as Megatron-LM, and what lies between those is split by tokens, which turns each all_reduce into two cheaper halves",
        ),
        Method(
            name="hf-expert",
            title="hf-expert",
            plan_title="hf-expert",
            restrict=vendor_rules,
            zero=0,
            suits=lambda graph: vendor_plan(graph.config) is not None,
            words="the tensor-parallel plan that comes with the model in transformers",
        ),
    )
}
"""Usual layouts by name: every report shows their best plans beside the chosen one."""

OF_MEGATRON = ("megatron", "megatron-sp")
"""The baselines that Megatron-LM runs."""

ALL: Mapping[str, Method] = {**METHODS, **BASELINES}
"""Methods and baselines by the name that plan files keep."""


def find_method(text: str) -> str:
    """Return the name in `METHODS` of a method as a user writes it: its name or its title, in any case. What is neither is returned as it
    is."""
    asked = str(text).casefold()
    return next((m.name for m in METHODS.values() if asked in (m.name.casefold(), m.title.casefold())), text)


def describe_least(method: str, objective: str) -> str:
    """Return what the bound of a plan by `method` is the least of: `best there is`, of a search among all plans for the least step; else
    of the method's own space at the plan's micro-batches and recomputation, which a plan of another row may be below."""
    at_its_workload = "with its micro-batches and recomputation"
    if method in BASELINES:
        return f"best that {BASELINES[method].title} admits on its mesh {at_its_workload}"
    how = METHODS.get(method, EXACT)
    aim = how.describe_aim(objective)
    if aim is None:
        return "best there is"
    return f"{aim} that {how.title} admits {at_its_workload}" if how.objective else f"{aim} {at_its_workload}"


def note_shared_workload(workload: Workload, title: str | None = None) -> Note:
    """Return a note on the micro-batches and the recomputation with which a method is searched (None: every method of a comparison)."""
    papers = ", ".join(m.title for m in METHODS.values() if m.objective)
    subject = f"{papers} and the least communication are" if title is None else f"{title} is"
    many = "one micro-batch" if workload.accumulate == 1 else f"{workload.accumulate} micro-batches"
    recomputed = {"none": "no recomputation", "auto": "any recomputation"}.get(
        workload.recompute, f"recomputation {workload.recompute}"
    )
    return Note(
        f"{subject} searched with {many} a step and {recomputed}, as the best plan of one stage has them; baselines have numbers and "
        "recomputation of their own",
        NoteKind.WORKLOAD,
    )


def note_own_workload(title: str) -> Note:
    """Return a note on why the micro-batches and the recomputation of a method's plan are not those of the best plan."""
    return Note(
        f"the micro-batches and the recomputation of {title} are searched with its plan, since none of its plans fits with those of the "
        "best plan of one stage, which compare gives all methods",
        NoteKind.WORKLOAD,
    )
