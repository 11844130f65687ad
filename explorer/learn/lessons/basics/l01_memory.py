"""1. Why split at all? Memory of a training step against the GPU's."""

from __future__ import annotations

from dataclasses import replace

from explorer.figures.palette import MEMORY_COLOURS, MEMORY_KINDS, MEMORY_NAMES
from explorer.figures.svg_tensors import svg
from explorer.learn import links, stacks
from explorer.learn.charts import Bar, Part, bars
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.text import units
from planner_core.core import Graph

BATCHES = (1, 2, 4, 8, 16)
MIXED = {"params": 2, "grads": 2, "optimizer": 12}
"""Bytes per parameter of mixed precision: weights and gradients in 16 bits; in fp32 a master copy of the weights and AdamW's
two averages (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)."""
CODE = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
saved = []  # the activations that autograd keeps for the backward pass
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
    loss = model(torch.randn(64, 512)).square().mean()
loss.backward()
optimizer.step()

def size(tensors):
    return sum(t.nbytes for t in tensors)

weights = size(model.parameters())
gradients = size(p.grad for p in model.parameters())
states = size(t for s in optimizer.state.values() for t in s.values() if t.dim())
own = {p.data_ptr() for p in model.parameters()}
activations = size({t.data_ptr(): t for t in saved if t.data_ptr() not in own}.values())
print(f"weights {weights}, gradients {gradients}, optimizer {states}, activations {activations} bytes")
"""


def memory(learner: Learner, batch: int, num_gpus: int) -> tuple[dict[str, int], bool]:
    """Bytes by kind on one of `num_gpus` GPUs of one node, and whether Megatron-LM splits this model so far."""
    one = Learner(replace(learner.request, batch=batch, mesh=None), learner.load)
    found = stacks.megatron(one, num_gpus) if num_gpus > 1 else None
    return (found, True) if found else (stacks.smallest(one, num_gpus), num_gpus == 1)


def sizes(learner: Learner) -> list[int]:
    """How many GPUs the stacks are for: powers of two within one node."""
    return [n for n in (1, 2, 4, 8) if n <= learner.cluster.levels[0].size]


def scene(learner: Learner, values: Values) -> Scene:
    """What stays, kind by kind; the fullest moment; then the fullest moment on more GPUs."""
    batch = int(values["batch"])
    room = learner.cluster.gpu.memory_bytes
    limit = (float(room), f"{learner.cluster.gpu.name}: {units.memory(room)}")
    whole, graph = memory(learner, batch, 1)[0], learner.graph
    numbers: dict[str, float] = {"room": room, "params": graph.num_params, "mixed": sum(mixed(graph).values())}
    steps = _one_gpu(learner.name, graph, whole, batch, limit)
    rows, uneven = [], []
    for n in sizes(learner):
        found, usual = memory(learner, batch, n)
        uneven += [] if usual else [str(n)]
        numbers |= {f"{n}_{k}": v for k, v in found.items()}
        rows.append((f"{n} GPU{'s' * (n > 1)}", _stack(found), _mark(found["peak"], room)))
    fits = [n for n in sizes(learner) if numbers[f"{n}_peak"] <= room]
    says = (
        "The fullest moment again, when each GPU holds a part of every weight. Activations shrink less: some are "
        "kept whole on every GPU (lesson 7 mends that). "
    )
    if fits:
        says += f"It fits from **{fits[0]} GPU{'s' * (fits[0] > 1)}** on."
    else:
        says += "Even a whole node is too small at this batch: take fewer samples, or split the batch too (lesson 8)."
    steps.append(Step("Split over GPUs", says, _picture(rows, limit)))
    numbers["fits_from"] = fits[0] if fits else 0
    return Scene(tuple(steps), numbers, reveal=4, note=_note(learner.name, uneven))


def mixed(graph: Graph) -> dict[str, int]:
    """Bytes at the end of a step by kind, in mixed precision."""
    return {kind: each * graph.num_params for kind, each in MIXED.items()}


def _one_gpu(name: str, graph: Graph, whole: dict[str, int], batch: int, limit: tuple[float, str]) -> list[Step]:
    """Weights, gradients, optimizer states, then the activations."""
    stays = {"params": whole["params"], "grads": whole["params"], "optimizer": whole["optimizer"]}
    each = f"{round(whole['params'] / graph.num_params, 2):g}"
    says = (
        f"{name} has {units.count(graph.num_params)} parameters. At {each} bytes each its weights take "
        f"{units.memory(whole['params'])}.",
        f"The backward pass gives every weight a gradient of the same size: {units.memory(stays['grads'])} more.",
        f"The optimizer remembers running averages for every weight: {units.memory(stays['optimizer'])} more. "
        "These three are there at the end of every step, whatever the batch." + _usual(graph, stays),
    )
    steps = []
    for k in range(3):
        shown = tuple(_part(stays, kind) for kind in list(stays)[: k + 1])
        told = sum(p.value for p in shown)
        fit = "" if told <= limit[0] else f" That is {units.memory(told - limit[0])} more than one GPU has."
        rows = [("end of a step", shown, _mark(told, limit[0]))]
        if k == 2 and _usual(graph, stays):
            kept = mixed(graph)
            rows.append(("mixed precision", tuple(_part(kept, x) for x in kept), _mark(sum(kept.values()), limit[0])))
        picture = _picture(rows, limit)
        steps.append(Step(MEMORY_NAMES[MEMORY_KINDS[k]].capitalize(), says[k] + fit, picture))
    end = ("end of a step", tuple(_part(stays, k) for k in stays), "")
    full = ("fullest moment", _stack(whole), _mark(whole["peak"], limit[0]))
    told_last = (
        f"Autograd keeps what forward computed: {units.memory(whole['activations'])} for a batch of {batch}. They "
        "grow with the batch. As the backward pass uses them up, gradients take their place. The GPU must have "
        "room for the fullest moment, and for the tensors in flight just then (buffers)."
    )
    return [*steps, Step("Activations", told_last, _picture([end, full], limit))]


def _usual(graph: Graph, stays: dict[str, int]) -> str:
    """What mixed precision would keep, where the settings keep less."""
    here, usual = sum(stays.values()), sum(mixed(graph).values())
    if here >= usual:
        return ""
    return (
        f" That is {round(here / graph.num_params, 2):g} bytes per parameter, all in 16 bits. **Mixed precision**, with which most "
        f"models are trained, takes {sum(MIXED.values())}: weights {MIXED['params']}, gradients {MIXED['grads']}, and in fp32 a master "
        f"copy of the weights and both averages, {MIXED['optimizer']}. That would be **{units.memory(usual)}**."
    )


def _note(model: str, uneven: list[str]) -> str:
    """Said where Megatron-LM's way is not open."""
    if not uneven:
        return ""
    return (
        f"The heads of {model} do not divide by {' or '.join(uneven)}, so the stack there is that of the smallest "
        "plan the planner finds."
    )


def _stack(found: dict[str, int]) -> tuple[Part, ...]:
    return tuple(_part(found, kind) for kind in MEMORY_KINDS if found[kind])


def _part(found: dict[str, int], kind: str) -> Part:
    return Part(MEMORY_NAMES[kind], float(found[kind]), MEMORY_COLOURS[kind], dotted=kind in ("grads", "activations"))


def _mark(total: float, room: float) -> str:
    return "fits" if total <= room else "does not fit"


def _picture(rows: list[tuple[str, tuple[Part, ...], str]], limit: tuple[float, str]) -> str:
    told = "; ".join(f"{label}: {units.memory(sum(p.value for p in parts))}, {mark}" for label, parts, mark in rows)
    return svg(bars([Bar(*r) for r in rows], units.memory, limit), f"Memory of one GPU. {told}. {limit[1]}")


def question(learner: Learner, values: Values) -> Question:
    """From how many GPUs on does it fit?"""
    numbers = scene(learner, values).numbers
    right = int(numbers["fits_from"])
    names = {0: "Not on one node at all", **{n: f"{n} GPU{'s' * (n > 1)}" for n in sizes(learner)}}
    total = {n: numbers[f"{n}_peak"] for n in sizes(learner)}
    room = units.memory(numbers["room"])

    def why(n: int) -> str:
        if n == 0:
            return f"On {max(total)} GPUs each one needs {units.memory(min(total.values()))}; a GPU has {room}."
        needs = (
            f"Each of {n} needs {units.memory(total[n])}" if n > 1 else f"One GPU would need {units.memory(total[1])}"
        )
        return f"{needs}; a GPU has {room}." + (" Fewer are enough." if right and n > right else "")

    options = [(names[n], why(n)) for n in names]
    wrong = tuple(o for n, o in zip(names, options, strict=True) if n != right)
    return asked(
        "From how many GPUs on does this training step fit, if they split every weight?",
        (names[right], why(right)),
        wrong,
        list(names).index(right),
    )


LESSON = Lesson(
    1, "Why split at all?", "Training needs several times the memory of the weights alone.",
    (
        "A model may be quick enough on one GPU and still not fit. Here is where the memory goes, for the model "
        "and the GPU in the sentence above: click its parts to change them. Only the batch has a slider of its own "
        "here, so that you can watch it.",),
    (
        ("Activation", "a tensor that forward computes; autograd keeps many of them for the backward pass"),
        ("Buffers", "tensors in flight: results that the next operation is about to use"),
        ("Batch", "the samples of one step; “batch 16 × 4 096 tokens” means 16 texts of 4 096 tokens each"),
        ("bf16", "a number in 2 bytes; fp32 takes 4"),
        ("GiB", "2^30 bytes, 7 % more than a GB. A GPU sold with 80 GB has a little less or more than 80 GiB: an H100 reports 79.6"),
        ("Mixed precision", "computing in 16 bits and keeping a copy of the weights in fp32, so that small updates are not lost"),
        ("Recomputation", "not keeping activations, and running forward again when the backward pass wants them"),
        ("Node", "one machine with several GPUs, joined by fast links such as NVLink"),
        ("Optimizer states", "what the optimizer keeps per weight; AdamW keeps two averages"),
    ),
    (Control("batch", "Batch, samples in one step", BATCHES, 4, kind="slider"),),
    scene, question, CODE, ("compare", "Memory of whole plans for this model"), uses_model=True,
    prefetch=True,
    focus=links.same_batch,
)  # fmt: skip
