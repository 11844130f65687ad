"""16. ZeRO 0 to 3 and HSDP side by side: what every GPU keeps and sends, and what micro-batches make of it."""

from __future__ import annotations

from typing import Any

from explorer.address.settings import DTYPE_NAMES
from explorer.figures.svg_tensors import Drawing, amount
from explorer.learn.blocks import arranged
from explorer.learn.blocks.arranged import ArrangedBlock
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import sketch_zero_stages
from explorer.learn.lessons.times.l14_pays import fastest_with_ties
from explorer.learn.lessons.times.stated import (
    WORKING_BYTES,
    PricedLayout,
    price_layout,
    token_settings,
    usual_layouts,
    with_samples,
)
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.block import carries_weight, draw_block
from explorer.learn.pictures.charts import plot
from explorer.learn.pictures.sketch import Prediction
from explorer.text import units
from planner_core.planning.methods import Layout

TOKENS = 2048
STORED, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter beside the copy that computes: the optimizer's own weights, its two averages and the gradient (fp32)."""
ZERO_STAGE_OF = {"data parallel": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP (ZeRO-3)": 3, "HSDP": 3}


def kept_per_parameter(stage: int, n: int) -> dict[str, float]:
    """Return the bytes per parameter that one of n GPUs keeps through a step at a ZeRO stage, by kind."""
    owned = 1 / n
    # At stage 3 the copy that computes is gathered for a layer and freed behind it: nobody keeps it.
    return {
        "params": (
            WORKING_BYTES + STORED,
            WORKING_BYTES + STORED * owned,
            WORKING_BYTES + STORED * owned,
            STORED * owned,
        )[stage],
        "grads": GRADIENT * (1 if stage < 2 else owned),
        "optimizer": MOMENTS * (1 if stage < 1 else owned),
    }


def sent_per_parameter(name: str, n: int, inner: int, micro_batches: int) -> float:
    """Return the bytes per parameter that one GPU sends in a step; `inner` are the GPUs that share weights under HSDP."""
    # A gather, or a scatter of sums, sends (n - 1) / n of its tensor; an all_reduce is both. Weights are gathered forward and backward.
    part, m = (n - 1) / n, micro_batches
    if name == "HSDP":
        within, outer = (inner - 1) / inner, n // inner
        between = 2 * (outer - 1) / outer * GRADIENT / inner
        return m * within * (2 * WORKING_BYTES + GRADIENT) + between
    # Up to stage 1 gradients are added up first, and summed once a step. From stage 2 on nobody keeps them whole, so each micro-batch's
    # are scattered at once.
    return {
        0: 2 * part * GRADIENT,
        1: part * (WORKING_BYTES + GRADIENT),
        2: part * (WORKING_BYTES + m * GRADIENT),
        3: part * m * (2 * WORKING_BYTES + GRADIENT),
    }[ZERO_STAGE_OF[name]]


def price_stages(learner: Learner, micro_batches: int) -> dict[str, PricedLayout]:
    """Return the planner's plan of each stage, each GPU with `TOKENS` in a micro-batch."""
    learner, samples, _ = with_samples(learner, TOKENS)
    cases = {
        name: price_layout(learner, layout, samples, micro_batches)
        for name, layout in usual_layouts(learner.cluster).items()
    }
    return {name: case for name, case in cases.items() if case}


def live(learner: Learner, values: Values) -> Live:
    """Return what is kept, what is sent, what micro-batches make of it, and the planner's memory and time."""
    m = int(values["m"])
    cases, (learner, _, note) = price_stages(learner, m), with_samples(learner, TOKENS)
    params, n = learner.graph.num_params, learner.cluster.num_gpus
    inner = usual_layouts(learner.cluster)["HSDP"].fsdp
    rule, block = sent_per_parameter("FSDP (ZeRO-3)", n, inner, m) * params, arrange_block(learner, {"m": m})
    numbers: dict[str, float] = {"params": params, "gpus": n, "inner": inner}
    for name, case in cases.items():
        numbers[f"{name} sent"] = case.sent_bytes
        numbers[f"{name} formula"] = sent_per_parameter(name, n, inner, m) * params
        numbers[f"{name} peak"] = case.plan.cost.memory_bytes["peak"]
        numbers[f"{name} s"] = case.plan.cost.step_time_s
    # Where gradients outweigh activations at the fullest moment, that is near the end of backward.
    late = [name for name, case in cases.items() if (x := case.plan.cost.memory_bytes)["grads"] > x["activations"]]
    fits = any(case.plan.fits for case in cases.values())
    facts: dict[str, Any] = {
        "each": WORKING_BYTES + STORED + MOMENTS + GRADIENT,
        "working": WORKING_BYTES,
        "stored": STORED,
        "moments": MOMENTS,
        "gradient": GRADIENT,
        "tokens": TOKENS,
        "dtype": DTYPE_NAMES[learner.planner.workload.dtype],
        "fsdp_rule": rule,
        "fsdp_sent": cases["FSDP (ZeRO-3)"].sent_bytes,
        "ratio": _fsdp_over_zero1(n, inner, m),
        "ratio_of_twice": _fsdp_over_zero1(n, inner, 2 * m),
        "late": late,
        "early": [name for name in cases if name not in late],
        "quickest": fastest_with_ties(cases, next(iter(cases.values())).planner.cluster) if fits else "",
        "block": _block_facts(block),
        "uneven": [k for k in cases if abs(numbers[f"{k} sent"] / numbers[f"{k} formula"] - 1) > 0.1],
        "keeps": {
            name: {kind: v * params for kind, v in kept_per_parameter(stage, inner if name == "HSDP" else n).items()}
            for name, stage in ZERO_STAGE_OF.items()
        },
        "sends": {name: _sent_by_kind(case) for name, case in cases.items()},
        "plans": {name: case.plan for name, case in cases.items()},
    }
    pictures: dict[str, Picture] = {
        "sketch": _make_sketch(n, inner),
        "again": _micro_batches_chart(n, inner, params, m),
    }
    return Live(facts, pictures | ({"block": draw_block(block)} if block else {}), numbers, learner, note)


def _sent_by_kind(case: PricedLayout) -> dict[str, int]:
    """Return the bytes that one GPU sends by collective, without kinds of less than a thousandth."""
    bytes_by_kind: dict[str, int] = {}
    for t in case.plan.cost.traffic:
        bytes_by_kind[t.kind] = bytes_by_kind.get(t.kind, 0) + t.wire_bytes
    return {kind: size for kind, size in bytes_by_kind.items() if size > 1e-3 * case.sent_bytes}


def _fsdp_over_zero1(n: int, inner: int, micro_batches: int) -> float:
    """Return how many times what ZeRO-1 sends FSDP sends."""
    return sent_per_parameter("FSDP (ZeRO-3)", n, inner, micro_batches) / sent_per_parameter(
        "ZeRO-1", n, inner, micro_batches
    )


def _block_facts(block: ArrangedBlock | None) -> dict[str, int] | None:
    """Return neighbours, groups, and the bytes of weights that a GPU gathers before a layer."""
    if block is None:
        return None
    weights = sum(x.sent.num_bytes for x in block.messages if carries_weight(block, x) and x.sent.phase == "forward")
    return {"devices": block.devices, "groups": block.groups, "weights": weights}


def _make_sketch(n: int, inner: int) -> Prediction:
    """Return a prediction to draw: bytes per parameter by stage."""
    each = {
        name: sum(kept_per_parameter(stage, inner if name == "HSDP" else n).values())
        for name, stage in ZERO_STAGE_OF.items()
    }
    whole = each.pop("data parallel")
    return sketch_zero_stages(whole, (WORKING_BYTES, STORED, MOMENTS, GRADIENT), each, n, inner)


def _micro_batches_chart(n: int, inner: int, params: int, m: int) -> Drawing:
    curves = {name: lambda k, name=name: sent_per_parameter(name, n, inner, int(k)) * params for name in ZERO_STAGE_OF}
    marks = [(float(m), f"yours: {m}")]
    below, beside = "micro-batches of a step", "bytes that one GPU sends"
    return plot((1, 2, 4, 8, 16), curves, below, beside, units.whole, amount, marks)


def arrange_block(learner: Learner, values: Values) -> ArrangedBlock | None:
    """Return the block of lesson 7 with FSDP around it: tensor parallelism in groups of neighbours, weights dealt over the groups."""
    learner, _, _ = arranged.with_llama_block(with_samples(learner, TOKENS)[0])
    inner = usual_layouts(learner.cluster)["HSDP"].fsdp
    if inner < 2:
        return None
    _, samples, _ = with_samples(learner, TOKENS)
    case = price_layout(
        learner, Layout(fsdp=learner.cluster.num_gpus // inner, tp=inner, sp=True), samples, int(values["m"])
    )
    return arranged.arrange_plan(learner, case.plan, case.planner) if case else None


LESSON = read_lesson("16-zero", live, focus=lambda learner, v: token_settings(learner, TOKENS, int(v["m"])))
