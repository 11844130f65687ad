"""16. ZeRO 0 to 3 and HSDP side by side: what every GPU keeps and sends, and what micro-batches make of it."""

from __future__ import annotations

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
from explorer.figures.svg_tensors import amount, svg
from explorer.learn import links
from explorer.learn.blocks import arranged
from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.predictions import kept_by_stage
from explorer.learn.lessons.times.l14_pays import beside, cell
from explorer.learn.lessons.times.stated import WORKING, Stated, at_tokens, names, node, stated, texts
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.block import travels
from explorer.learn.pictures.charts import BarPiece, Line, StackedBar, bars, plot
from explorer.text import units
from planner_core.planning.methods import Layout

MICRO_BATCHES = (1, 2, 4, 8)
TOKENS = 2048
STORED, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter beside the copy that computes: the optimizer's own weights, its two averages and the gradient (fp32)."""
SHARDED = {"data parallel": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP (ZeRO-3)": 3, "HSDP": 3}
CODE = """\
n, m, params = 16, 1, 8_030_261_248  # GPUs, micro-batches, parameters of Llama-3-8B
working, stored, moments, gradient = 2, 4, 8, 4  # bytes per parameter: bf16 to compute, fp32 to keep
part = (n - 1) / n  # what one GPU sends in an all_gather or a reduce_scatter of one byte

keeps = {
    "data parallel": working + stored + moments + gradient,
    "ZeRO-1": working + (stored + moments) / n + gradient,
    "ZeRO-2": working + (stored + moments) / n + gradient / n,
    "FSDP": (stored + moments + gradient) / n,
}
sends = {
    "data parallel": 2 * part * gradient,
    "ZeRO-1": part * working + part * gradient,
    "ZeRO-2": part * working + m * part * gradient,
    "FSDP": m * (2 * part * working + part * gradient),
}
for name in keeps:
    print(f"with {name}: keeps {keeps[name] * params / 2**30:.1f} GiB, sends {sends[name] * params / 1e9:.1f} GB in a step of {m}")
print(f"times what ZeRO-1 sends, FSDP: {sends['FSDP'] / sends['ZeRO-1']:.2f}")
"""


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


def scene(learner: Learner, values: Values) -> Scene:
    """What is kept, what is sent, what micro-batches make of it, and the planner's memory and time."""
    m = int(values["m"])
    found, (learner, _, note) = cases(learner, m), texts(learner, TOKENS)
    params, n = learner.graph.num_params, learner.cluster.num_gpus
    inner = names(learner.cluster)["HSDP"].fsdp
    steps = (
        _drawn(n, inner),
        _keeps(learner, params, n, inner),
        _sends(found, m, sent("FSDP (ZeRO-3)", n, inner, m) * params),
        _again(n, inner, params, m),
        _memory(found, learner, m),
        _time(found, m),
        *_around(learner, m),
    )
    numbers: dict[str, float] = {"params": params, "gpus": n, "inner": inner}
    for name, case in found.items():
        numbers |= {
            f"{name} sent": sent_bytes(case), f"{name} formula": sent(name, n, inner, m) * params,
            f"{name} peak": case.plan.cost.memory_bytes["peak"], f"{name} s": case.plan.cost.step_time_s,
        }  # fmt: skip
    uneven = [name for name in found if abs(numbers[f"{name} sent"] / numbers[f"{name} formula"] - 1) > 0.1]
    if uneven:
        note += f" Some weights of {learner.name} cannot be dealt out evenly to {n} GPUs and stay whole, so {', '.join(uneven)} send other bytes than the rule says."
    return Scene(steps, numbers, reveal=3, note=note.strip())


def _drawn(n: int, inner: int) -> Step:
    """A prediction to draw: bytes per parameter by stage."""
    each = {name: sum(kept(stage, inner if name == "HSDP" else n).values()) for name, stage in SHARDED.items()}
    whole = each.pop("data parallel")
    return kept_by_stage(whole, (WORKING, STORED, MOMENTS, GRADIENT), each, n, inner)


def _keeps(learner: Learner, params: int, n: int, inner: int) -> Step:
    room = learner.cluster.gpu.memory_bytes
    items = []
    for name, stage in SHARDED.items():
        each = kept(stage, inner if name == "HSDP" else n)
        parts = tuple(
            BarPiece(MEMORY_NAMES[k], v * params, MEMORY_COLOURS[k], dotted=k == "grads") for k, v in each.items()
        )
        items.append(StackedBar(name, parts, "" if sum(p.value for p in parts) <= room else "more than it has"))
    says = (
        f"Mixed precision keeps {WORKING + STORED + MOMENTS + GRADIENT} bytes per parameter: a copy in {DTYPES[learner.planner.workload.dtype]} to compute with, and in fp32 "
        f"the optimizer's own weights, two averages and the gradient. **Each stage deals one kind more to the {n} GPUs**: first the optimizer's, "
        f"then the gradients, then the weights themselves. HSDP deals to the {inner} GPUs of a group and repeats the groups. Where weights "
        "are dealt out, the copy to compute with is there for a layer at a time, and not counted here."
    )
    picture = bars(items, units.memory, (float(room), f"{learner.cluster.gpu.name}: {units.memory(room)}"))
    return Step("What every GPU keeps", says, svg(picture, "Bytes kept by ZeRO stage"))


def _less(found: dict[str, Stated], rule: float) -> str:
    """What FSDP sends less than the rule says."""
    less = rule - sent_bytes(found["FSDP (ZeRO-3)"])
    if less < 0.005 * rule:
        return ""
    return (
        f" FSDP's {amount(rule - less)} are {amount(less)} less than its bytes per parameter make ({amount(rule)}): what backward does not need, "
        "such as the embedding's table, is not gathered again."
    )


def _sends(found: dict[str, Stated], m: int, rule: float) -> Step:
    items = []
    for name, case in found.items():
        by_kind: dict[str, float] = {}
        for t in case.plan.cost.traffic:
            by_kind[t.kind] = by_kind.get(t.kind, 0.0) + t.wire_bytes
        shown = [(kind, size) for kind, size in by_kind.items() if size > 1e-3 * sum(by_kind.values())]
        parts = tuple(BarPiece(kind, size, KIND_COLOURS[kind], dotted=kind == "all_gather") for kind, size in shown)
        items.append(StackedBar(name, parts))
    says = (
        f"A step of {_batches(m)}, as the planner counts its messages. Data parallelism sums gradients once a step, with one all_reduce. "
        "ZeRO-1 scatters that sum, updates its part and gathers the new weights in 2 bytes each, which is less than gathering sums in 4. "
        "ZeRO-2 scatters in every micro-batch. FSDP also gathers in every micro-batch, forward and backward, since it keeps no whole weights."
        + _less(found, rule)
    )
    return Step("What every GPU sends", says, svg(bars(items, amount), "Bytes sent by ZeRO stage and collective"))


def _batches(m: int) -> str:
    return f"{m} micro-batch{'es' * (m > 1)}"


def _again(n: int, inner: int, params: int, m: int) -> Step:
    colours = (DEVICES[7], COMPUTE, DEVICES[2], COMMUNICATION, DEVICES[3])
    dashes = ("", "7 4", "2 3", "", "10 3 2 3")
    found = [
        Line(name, tuple((float(k), sent(name, n, inner, k) * params) for k in (1, 2, 4, 8, 16)), colour, dash)
        for name, colour, dash in zip(SHARDED, colours, dashes, strict=True)
    ]
    ratio = sent("FSDP (ZeRO-3)", n, inner, m) / sent("ZeRO-1", n, inner, m)
    says = (
        "A batch too large for the memory is cut into micro-batches whose gradients are added up. What comes once a step stays; what comes "
        f"in every micro-batch is multiplied. **With {_batches(m)} FSDP sends {units.significant(ratio, 2)} times what ZeRO-1 sends.** "
        "FSDP gathers again in each because keeping the gathered weights would take the memory that it saved."
    )
    picture = plot(
        found, "micro-batches of a step", "bytes that one GPU sends", units.whole, amount, [(float(m), f"yours: {m}")]
    )
    return Step("Why FSDP gathers again", says, svg(picture, "Bytes sent against micro-batches"))


def _memory(found: dict[str, Stated], learner: Learner, m: int) -> Step:
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
    says = (
        f"The fullest moment of a step, walked through by the planner, with activations of {units.whole(TOKENS)} tokens per GPU. "
        + (
            _moments(found)
            if m == 1
            else "From the second micro-batch on the summed gradients are there all the time, whole under ZeRO-1 and in parts from ZeRO-2 on."
        )
    )
    picture = bars(items, units.memory, (float(room), f"{learner.cluster.gpu.name}: {units.memory(room)}"))
    return Step("The fullest moment", says, svg(picture, "Memory at the peak by ZeRO stage"))


def _moments(found: dict[str, Stated]) -> str:
    """Which ways are fullest once all gradients are there, and which before."""
    late = [name for name, case in found.items() if (x := case.plan.cost.memory_bytes)["grads"] > x["activations"]]
    early = [name for name in found if name not in late]
    told = (
        [f"With {_listed(late)} memory is fullest when all gradients are there and the activations are gone."]
        if late
        else []
    )
    if early:
        told.append(f"With {_listed(early)} it is fullest before, when activations are most and few gradients stand.")
    return " ".join(told)


def _listed(names_: list[str]) -> str:
    return " and ".join([", ".join(names_[:-1]), names_[-1]] if len(names_) > 1 else names_)


def _time(found: dict[str, Stated], m: int) -> Step:
    items = []
    for name, case in found.items():
        c = case.plan.cost
        parts = (
            BarPiece("compute", c.compute_time_s, COMPUTE),
            BarPiece("communication that shows", c.exposed_comm_time_s, COMMUNICATION, True),
            BarPiece("optimizer", c.optimizer_time_s, DEVICES[2]),
        )
        items.append(StackedBar(name, parts, "" if case.plan.fits else "does not fit"))
    some = next(iter(found.values()))
    best = cell(found, some.planner.cluster) if any(case.plan.fits for case in found.values()) else ""
    says = (
        f"A step of {_batches(m)}, {units.whole(TOKENS)} tokens per GPU in each. Compute is the same products everywhere; what differs are copies: "
        f"whole gradients are added up by data parallelism and ZeRO-1, gathered layers are written by FSDP and HSDP. Most of what FSDP sends hides beside compute (lesson 15). The optimizer is quicker where each GPU updates "
        "only its part: it waits for memory alone, and moves many times its weights' bytes (lesson 15). "
        + (f"Quickest of those that fit: **{best}**.{beside(best)}" if best else "None of them fits here.")
    )
    return Step("The price", says, svg(bars(items, units.seconds), "Time of a step by ZeRO stage"))


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


def _around(learner: Learner, m: int) -> list[Step]:
    """FSDP and tensor parallelism together, in the picture of the block."""
    case = around(learner, {"m": m})
    if case is None:
        return []
    weights = sum(x.sent.num_bytes for x in case.messages if travels(case, x) and x.sent.phase == "forward")
    says = (
        f"FSDP goes around what lessons 5 to 7 built. {case.devices} neighbours share each layer's products; {case.groups} such groups "
        f"see different samples, and deal every weight once more. Before a layer runs, a GPU gathers {amount(weights)}: only its own "
        "slices of the seven weights, from the GPUs in its place in the other groups. Behind the layer its gradients leave the same way."
    )
    return [
        Step(
            "Around the block",
            says,
            svg(drawn(case), "A block under tensor and sequence parallelism with FSDP around it"),
        )
    ]


def question(learner: Learner, values: Values) -> Question:
    """How many times as much as ZeRO-1 does FSDP send, with twice the micro-batches?"""
    m = 2 * int(values["m"])
    learner, _, _ = texts(learner, TOKENS)
    n, inner = learner.cluster.num_gpus, names(learner.cluster)["HSDP"].fsdp
    ratio = sent("FSDP (ZeRO-3)", n, inner, m) / sent("ZeRO-1", n, inner, m)

    why = (
        f"ZeRO-1: weights {WORKING} + gradients {GRADIENT} = 6 bytes per parameter, once, whatever the number. FSDP: weights {WORKING} forward and {WORKING} "
        f"backward + gradients {GRADIENT} = 8, in each of {_batches(m)}: {8 * m}. {8 * m} / 6 = {units.significant(ratio)}."
    )
    wrong = (
        (ratio / 2, f"That is with {_batches(m // 2)}, as in the picture. Which of the two sends more when there are twice as many?"),
        (1.5 * m, "That is for gradients in 2 bytes: (2 + 2 + 2) / (2 + 2) = 1.5 in each micro-batch. Here they travel in fp32: (2 + 2 + 4) / (2 + 4)."),
        (1.5, "1.5 is one micro-batch's with gradients in 2 bytes, as in many papers. Here they travel in fp32, and FSDP sends again in every micro-batch."),
        (1.0, "FSDP keeps no whole weights: it must gather them forward, and again backward, in every micro-batch."),
        (float(m), "That leaves out the backward pass. It wants the same weights again, and they were freed."),
        (4 / 3, "That is one micro-batch's."),
        (2 * ratio, "Twice too much: only FSDP's side doubles with the micro-batches, and once."),
        (m * 3.0, "Gradients do not triple: in each micro-batch weights travel twice in 2 bytes, gradients once in 4."),
        (m * 2.0, "Only the weights travel twice in each micro-batch; the gradients travel once."),
        (8.0 * m, "Those are FSDP's bytes per parameter. Divide by ZeRO-1's."),
    )  # fmt: skip
    return typed(
        f"Now cut the same step into twice as many micro-batches, {m}. Weights travel in {WORKING} bytes, gradients in {GRADIENT}. How many times as much as ZeRO-1 does FSDP send then?",
        "times", (ratio, why), wrong, lambda value: f"{units.significant(value, 2)} times",
    )  # fmt: skip


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The usual plans side by side at the lesson's tokens and micro-batches."""
    return {**links.ways(learner, values), **at_tokens(learner, TOKENS, int(values["m"]))}


LESSON = Lesson(
    16, "zero", "ZeRO 0 to 3", "What all GPUs keep whole, each could keep a part of: every stage deals out one kind more.",
    (
        "Data parallelism keeps everything on every GPU. ZeRO's stages deal it out, and pay with messages; micro-batches decide who pays each "
        f"time. Model and cluster are yours; each GPU has {TOKENS} tokens in a micro-batch.",),
    (
        ("ZeRO-2, ZeRO-3", "besides the optimizer's states gradients are dealt out over the GPUs; and weights too, which is FSDP"),
        ("Micro-batch", "a part of the batch that goes forward and backward by itself; the gradients of all are added up"),
    ),
    (Control("m", "Micro-batches of a step", MICRO_BATCHES, 1, kind="slider", step=3),),
    scene, question, CODE, ("compare", "Data parallelism, FSDP and others for this model"), uses_model=True, focus=focus,
    block=around,
)  # fmt: skip
