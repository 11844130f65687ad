"""16. ZeRO 0 to 3 and HSDP side by side: what every GPU keeps and sends, and what micro-batches make of it."""

from __future__ import annotations

from typing import Any

from explorer.address.settings import DTYPES
from explorer.figures.palette import (
    COMMUNICATION,
    COMPUTE,
    DEVICES,
    KIND_COLOURS,
    MEMORY_COLOURS,
    MEMORY_KINDS,
    MEMORY_NAMES,
)
from explorer.figures.svg_tensors import Drawing, amount
from explorer.learn import links
from explorer.learn.blocks import arranged
from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import kept_by_stage
from explorer.learn.lessons.times.l14_pays import cell
from explorer.learn.lessons.times.stated import WORKING, Stated, at_tokens, names, node, stated, texts
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.block import travels
from explorer.learn.pictures.charts import BarPiece, Line, StackedBar, bars, plot
from explorer.text import units
from planner_core.planning.methods import Layout

TOKENS = 2048
STORED, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter beside the copy that computes: the optimizer's own weights, its two averages and the gradient (fp32)."""
SHARDED = {"data parallel": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP (ZeRO-3)": 3, "HSDP": 3}


def kept(stage: int, n: int) -> dict[str, float]:
    """Bytes per parameter that one of n GPUs keeps through a step at a ZeRO stage, by kind."""
    owned = 1 / n
    return {
        "params": (WORKING + STORED, WORKING + STORED * owned, WORKING + STORED * owned, STORED * owned)[stage],
        "grads": GRADIENT * (1 if stage < 2 else owned),
        "optimizer": MOMENTS * (1 if stage < 1 else owned),
    }


def sent(name: str, n: int, inner: int, micro_batches: int) -> float:
    """Bytes per parameter that one GPU sends in a step; `inner` are the GPUs that share weights under HSDP."""
    part, m = (n - 1) / n, micro_batches
    if name == "HSDP":
        within, outer = (inner - 1) / inner, n // inner
        between = 2 * (outer - 1) / outer * GRADIENT / inner
        return m * within * (2 * WORKING + GRADIENT) + between
    return {
        0: 2 * part * GRADIENT,
        1: part * (WORKING + GRADIENT),
        2: part * (WORKING + m * GRADIENT),
        3: part * m * (2 * WORKING + GRADIENT),
    }[SHARDED[name]]


def cases(learner: Learner, micro_batches: int) -> dict[str, Stated]:
    """The planner's plan of each stage, each GPU with `TOKENS` in a micro-batch."""
    learner, samples, _ = texts(learner, TOKENS)
    found = {name: stated(learner, layout, samples, micro_batches) for name, layout in names(learner.cluster).items()}
    return {name: case for name, case in found.items() if case}


def sent_bytes(case: Stated) -> int:
    """Bytes that one GPU sends in a step of the planner's plan."""
    return sum(t.wire_bytes for t in case.plan.cost.traffic)


def live(learner: Learner, values: Values) -> Live:
    """What is kept, what is sent, what micro-batches make of it, and the planner's memory and time."""
    m = int(values["m"])
    found, (learner, _, note) = cases(learner, m), texts(learner, TOKENS)
    params, n = learner.graph.num_params, learner.cluster.num_gpus
    inner = names(learner.cluster)["HSDP"].fsdp
    rule, block = sent("FSDP (ZeRO-3)", n, inner, m) * params, around(learner, {"m": m})
    numbers: dict[str, float] = {"params": params, "gpus": n, "inner": inner}
    for name, case in found.items():
        numbers[f"{name} sent"] = sent_bytes(case)
        numbers[f"{name} formula"] = sent(name, n, inner, m) * params
        numbers[f"{name} peak"] = case.plan.cost.memory_bytes["peak"]
        numbers[f"{name} s"] = case.plan.cost.step_time_s
    late = [name for name, case in found.items() if (x := case.plan.cost.memory_bytes)["grads"] > x["activations"]]
    fits = any(case.plan.fits for case in found.values())
    facts: dict[str, Any] = {
        "model": learner.name,
        "gpus": n,
        "inner": inner,
        "each": WORKING + STORED + MOMENTS + GRADIENT,
        "working": WORKING,
        "stored": STORED,
        "moments": MOMENTS,
        "gradient": GRADIENT,
        "tokens": TOKENS,
        "dtype": DTYPES[learner.planner.workload.dtype],
        "fsdp_rule": rule,
        "fsdp_sent": sent_bytes(found["FSDP (ZeRO-3)"]),
        "ratio": _ratio(n, inner, m),
        "ratio_of_twice": _ratio(n, inner, 2 * m),
        "late": late,
        "early": [name for name in found if name not in late],
        "quickest": cell(found, next(iter(found.values())).planner.cluster) if fits else "",
        "block": _of_block(block),
        "uneven": [k for k in found if abs(numbers[f"{k} sent"] / numbers[f"{k} formula"] - 1) > 0.1],
        "stands_in": note,
    }
    pictures: dict[str, Picture] = {
        "sketch": _sketch(n, inner),
        "keeps": _keeps(learner, params, n, inner),
        "sends": _sends(found),
        "again": _again(n, inner, params, m),
        "memory": _memory(found, learner),
        "price": _price(found),
    }
    return Live(facts, pictures | ({"block": drawn(block)} if block else {}), numbers)


def _ratio(n: int, inner: int, micro_batches: int) -> float:
    """How many times what ZeRO-1 sends FSDP sends."""
    return sent("FSDP (ZeRO-3)", n, inner, micro_batches) / sent("ZeRO-1", n, inner, micro_batches)


def _of_block(block: Arranged | None) -> dict[str, int] | None:
    """Neighbours, groups, and the bytes of weights that a GPU gathers before a layer."""
    if block is None:
        return None
    weights = sum(x.sent.num_bytes for x in block.messages if travels(block, x) and x.sent.phase == "forward")
    return {"devices": block.devices, "groups": block.groups, "weights": weights}


def _sketch(n: int, inner: int) -> str:
    """A prediction to draw: bytes per parameter by stage."""
    each = {name: sum(kept(stage, inner if name == "HSDP" else n).values()) for name, stage in SHARDED.items()}
    whole = each.pop("data parallel")
    return kept_by_stage(whole, (WORKING, STORED, MOMENTS, GRADIENT), each, n, inner)


def _keeps(learner: Learner, params: int, n: int, inner: int) -> Drawing:
    room = learner.cluster.gpu.memory_bytes
    items = []
    for name, stage in SHARDED.items():
        each = kept(stage, inner if name == "HSDP" else n)
        parts = tuple(
            BarPiece(MEMORY_NAMES[k], v * params, MEMORY_COLOURS[k], dotted=k == "grads") for k, v in each.items()
        )
        items.append(StackedBar(name, parts, "" if sum(p.value for p in parts) <= room else "more than it has"))
    return bars(items, units.memory, (float(room), f"{learner.cluster.gpu.name}: {units.memory(room)}"))


def _sends(found: dict[str, Stated]) -> Drawing:
    items = []
    for name, case in found.items():
        by_kind: dict[str, float] = {}
        for t in case.plan.cost.traffic:
            by_kind[t.kind] = by_kind.get(t.kind, 0.0) + t.wire_bytes
        shown = [(kind, size) for kind, size in by_kind.items() if size > 1e-3 * sum(by_kind.values())]
        parts = tuple(BarPiece(kind, size, KIND_COLOURS[kind], dotted=kind == "all_gather") for kind, size in shown)
        items.append(StackedBar(name, parts))
    return bars(items, amount)


def _again(n: int, inner: int, params: int, m: int) -> Drawing:
    colours = (DEVICES[7], COMPUTE, DEVICES[2], COMMUNICATION, DEVICES[3])
    dashes = ("", "7 4", "2 3", "", "10 3 2 3")
    found = [
        Line(name, tuple((float(k), sent(name, n, inner, k) * params) for k in (1, 2, 4, 8, 16)), colour, dash)
        for name, colour, dash in zip(SHARDED, colours, dashes, strict=True)
    ]
    marks = [(float(m), f"yours: {m}")]
    return plot(found, "micro-batches of a step", "bytes that one GPU sends", units.whole, amount, marks)


def _memory(found: dict[str, Stated], learner: Learner) -> Drawing:
    room = learner.cluster.gpu.memory_bytes
    items = []
    for name, case in found.items():
        memory = case.plan.cost.memory_bytes
        parts = tuple(
            BarPiece(MEMORY_NAMES[k], float(memory[k]), MEMORY_COLOURS[k], dotted=k in ("grads", "activations"))
            for k in MEMORY_KINDS
            if memory[k]
        )
        items.append(StackedBar(name, parts, "" if memory["peak"] <= room else "does not fit"))
    return bars(items, units.memory, (float(room), f"{learner.cluster.gpu.name}: {units.memory(room)}"))


def _price(found: dict[str, Stated]) -> Drawing:
    items = []
    for name, case in found.items():
        c = case.plan.cost
        parts = (
            BarPiece("compute", c.compute_time_s, COMPUTE),
            BarPiece("communication that shows", c.exposed_comm_time_s, COMMUNICATION, True),
            BarPiece("optimizer", c.optimizer_time_s, DEVICES[2]),
        )
        items.append(StackedBar(name, parts, "" if case.plan.fits else "does not fit"))
    return bars(items, units.seconds)


def around(learner: Learner, values: Values) -> Arranged | None:
    """The block of lesson 7 with FSDP around it: tensor parallelism in groups of neighbours, weights dealt over the groups."""
    learner, _, _ = arranged.suited(texts(learner, TOKENS)[0])
    n, inside = learner.cluster.num_gpus, node(learner.cluster)
    inner = inside if inside < n else n // 2
    if inner < 2:
        return None
    _, samples, _ = texts(learner, TOKENS)
    case = stated(learner, Layout(fsdp=n // inner, tp=inner, sp=True), samples, int(values["m"]))
    return arranged.of_plan(learner, case.plan, case.planner) if case else None


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The usual plans side by side at the lesson's tokens and micro-batches."""
    return {**links.ways(learner, values), **at_tokens(learner, TOKENS, int(values["m"]))}


LESSON = read_lesson("16-zero", live, focus=focus, block=around)
