"""1. Why split at all? A run that does not fit, and memory of a training step against the GPU's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from explorer.figures.palette import MEMORY_COLOURS, MEMORY_KINDS, MEMORY_NAMES
from explorer.figures.svg_tensors import svg
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.lessons.predictions import memory_by_gpus
from explorer.learn.lessons.stacks import Keeping, before_gradients, megatron, smallest
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars
from explorer.learn.pictures.vessels import vessels
from explorer.text import units

BATCHES = (1, 2, 4, 8, 16)
GPUS = (1, 2, 4, 8)
BYTES = {4: ("sgd", "pure"), 8: ("adamw", "pure"), 18: ("adamw", "mixed")}
"""Optimizer and precision by the bytes per parameter that they take: weights, gradients, optimizer states."""
BYTE_NAMES: dict[Choice, str] = {4: "4: SGD, 16 bits", 8: "8: AdamW, 16 bits", 18: "18: AdamW, mixed precision"}
SHARES = {4: (2, 2, 0), 8: (2, 2, 4), 18: (6, 4, 8)}
"""The same bytes by kind. Mixed precision: weights in 16 bits to compute with and in fp32 to keep, gradients and AdamW's two averages in fp32."""
SIXTEEN = 16
"""Where gradients stay in 16 bits (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)."""
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
each = (weights + gradients + states) // sum(p.numel() for p in model.parameters())
each += 2  # mixed precision keeps a copy in bf16 to compute with
print(f"kept {each} bytes per parameter: of the 8 030 261 248 of Llama-3-8B {each * 8_030_261_248 / 2**30:.0f} GiB")
"""


def keeping(values: Values) -> Keeping:
    """What the learner chose to keep."""
    optimizer, precision = BYTES[int(values["bytes"])]
    return Keeping(optimizer, precision, str(values["recompute"]))


def memory(learner: Learner, batch: int, num_gpus: int, keeps: Keeping) -> tuple[dict[str, int], bool]:
    """Bytes by kind on one of `num_gpus` GPUs of one node, and whether Megatron-LM splits this model so far. "early" is the fullest
    moment before the first gradient, of which "early_activations" are activations."""
    one = Learner(replace(learner.request, batch=batch, mesh=None, dtype="bfloat16"), learner.load)
    found = megatron(one, num_gpus, keeping=keeps) if num_gpus > 1 else None
    early, activations = before_gradients(one, num_gpus, bool(found), keeps)
    sizes_ = found or smallest(one, num_gpus, keeps)
    return {**sizes_, "early": early, "early_activations": activations}, bool(found) or num_gpus == 1


def sizes(learner: Learner) -> list[int]:
    """How many GPUs the stacks are for: powers of two within one node."""
    return [n for n in GPUS if n <= learner.cluster.levels[0].size]


@lru_cache(maxsize=128)
def on_each(learner: Learner, batch: int, keeps: Keeping) -> dict[int, tuple[dict[str, int], bool]]:
    """`memory` by the number of GPUs."""
    return {n: memory(learner, batch, n, keeps) for n in sizes(learner)}


def scene(learner: Learner, values: Values) -> Scene:
    """The run as it stands; what stays, kind by kind; the fullest moment; then the fullest moment on more GPUs."""
    batch, each = int(values["batch"]), int(values["bytes"])
    room = learner.cluster.gpu.memory_bytes
    limit = (float(room), f"{learner.cluster.gpu.name}: {units.memory(room)}")
    found = on_each(learner, batch, keeping(values))
    n = min(int(values["gpus"]), max(found))
    params = learner.graph.num_params
    steps = [_run(learner, n, found[n][0], limit), *_one_gpu(learner, params, found, values, limit)]
    numbers: dict[str, float] = {"room": room, "params": params, "kept": each * params, "n": n}
    numbers["shared_whole"] = kept_whole(found)
    rows, uneven = [], []
    for k, (sizes_, usual) in found.items():
        uneven += [] if usual else [str(k)]
        numbers |= {f"{k}_{kind}": v for kind, v in sizes_.items()}
        rows.append((_gpus(k), _stack(sizes_), _mark(sizes_["peak"], room)))
    fits = [k for k in found if numbers[f"{k}_peak"] <= room]
    says = (
        "The fullest moment again, when each GPU holds a part of every weight. Activations shrink less, since some are "
        "kept whole on every GPU. "
    )
    if fits:
        says += f"It fits from **{_gpus(fits[0])}** on."
    else:
        says += "Even a whole node is too small at this batch: take fewer samples, or split the batch too (lesson 8)."
    peaks = {k: numbers[f"{k}_peak"] for k in found}
    steps += memory_by_gpus(
        peaks, limit, _shares(numbers, max(found)), numbers["shared_whole"], numbers["1_early_activations"]
    )
    steps.append(Step("Split over GPUs", says, _picture(rows, limit)))
    numbers["fits_from"] = fits[0] if fits else 0
    return Scene(tuple(steps), numbers, reveal=5, note=_note(learner.name, uneven, int(values["gpus"]), n))


def kept_whole(found: Mapping[int, tuple[Mapping[str, int], bool]]) -> float:
    """Bytes of activations that every GPU keeps whole: `whole + split / n` are those of n GPUs before the first gradient, read off one and
    the most GPUs. 0 where the GPUs do not share as Megatron-LM does."""
    n = max(found)
    one, most = (found[k][0]["early_activations"] for k in (1, n))
    return (n * most - one) / (n - 1) if n > 1 and found[n][1] and one and most else 0.0


def _gpus(n: int) -> str:
    return f"{n} GPU{'s' * (n > 1)}"


def _run(learner: Learner, n: int, found: dict[str, int], limit: tuple[float, str]) -> Step:
    """The learner's run, as it bursts or fits."""
    peak, room = found["peak"], limit[0]
    over = peak - room
    if over > 0:
        title = "CUDA out of memory"
        says = (
            f"You start to train {learner.name} on {_gpus(n)}, and the run stops. Its fullest moment takes {units.memory(peak)} "
            f"{'on each' if n > 1 else 'of memory'}; the GPU has {units.memory(room)}. That is **{units.memory(over)} too much**. "
            f"{_made_of(found)} **Make it fit**: move the GPUs, the bytes per parameter, recomputation and the batch."
        )
    else:
        title = "It runs"
        again = " Does it run on fewer?" if n > 1 else ""
        says = (
            f"{learner.name} trains on {_gpus(n)}: the fullest moment takes {units.memory(peak)} of {units.memory(room)}"
            f"{' on each' if n > 1 else ''}, **{units.memory(-over)} are free**. {_made_of(found)}{again} What did each thing that you moved cost, and what did it save? "
            "The next steps take the bar apart."
        )
    told = f"{_gpus(n)}, each needs {units.memory(peak)} of {units.memory(room)}: {_mark(peak, room)}"
    return Step(title, says, svg(vessels(n, _stack(found), limit, units.memory), told))


def _made_of(found: Mapping[str, int]) -> str:
    """The parts of the fullest moment, with their numbers."""
    parts = [f"{units.memory(found[kind])} {MEMORY_NAMES[kind].lower()}" for kind in MEMORY_KINDS if found.get(kind)]
    none = " Gradients come only as the backward pass uses activations up." if not found.get("grads") else ""
    return f"The {units.memory(found['peak'])} are {', '.join(parts)}.{none}"


def _shape(learner: Learner) -> str:
    """The sizes of the model's layers, where it has transformer layers."""
    if learner.transformer()[1]:
        return ""
    layer, words = learner.layer(), learner.graph.config.get("vocab_size")
    told = f", in {layer.layers} layers of width {units.whole(layer.hidden)} with an inner width of {units.whole(layer.inner)}"
    return told + (f" and in tables of {units.whole(words)} words" if words else "")


def _one_gpu(
    learner: Learner,
    params: int,
    found: dict[int, tuple[dict[str, int], bool]],
    values: Values,
    limit: tuple[float, str],
) -> list[Step]:
    """Weights, gradients, optimizer states, then the activations."""
    each = int(values["bytes"])
    stays = {kind: float(share * params) for kind, share in zip(MEMORY_KINDS, SHARES[each], strict=False)}
    mixed = each == max(BYTES)
    why = ": 2 to compute with, and a copy of 4 to which each update is added" if mixed else ""
    remembers = "SGD remembers nothing."
    if SHARES[each][2]:
        remembers = f"AdamW remembers two running averages for every weight, {SHARES[each][2] // 2} bytes each: {units.memory(stays['optimizer'])} more."
    says = (
        f"{learner.name} has {units.count(params)} parameters{_shape(learner)}. Each weight takes {SHARES[each][0]} bytes{why}. Together: {units.memory(stays['params'])}.",
        f"The backward pass gives every weight a gradient of {SHARES[each][1]} bytes: {units.memory(stays['grads'])} more.",
        f"{remembers} Weights, gradients and optimizer states are there at the end of every step, whatever "
        f"the batch: **{each} bytes per parameter**, {units.memory(each * params)}.",
    )
    steps = []
    for k in range(3):
        shown = tuple(_part(stays, kind) for kind in list(stays)[: k + 1] if stays[kind])
        told = sum(p.value for p in shown)
        fit = "" if told <= limit[0] else f" That is {units.memory(told - limit[0])} more than one GPU has."
        rows = [("end of a step", shown, _mark(told, limit[0]))]
        if k == 2:
            rows = [_kept(e, params, limit[0]) for e in BYTES]
            fit += _others(each, params)
        steps.append(Step(MEMORY_NAMES[MEMORY_KINDS[k]].capitalize(), says[k] + fit, _picture(rows, limit)))
    return [*steps, _activations(stays, found, values, limit)]


def _others(each: int, params: int) -> str:
    """What the other ways to keep weights would take."""
    if each == max(BYTES):
        return f" Where gradients stay in 16 bits it is {SIXTEEN}, {units.memory(SIXTEEN * params)}."
    most = max(BYTES)
    return f" **Mixed precision**, with which most models are trained, takes {SIXTEEN} to {most}: {units.memory(most * params)}."


def _kept(each: int, params: int, room: float) -> tuple[str, tuple[BarPiece, ...], str]:
    sizes_ = {kind: share * params for kind, share in zip(MEMORY_KINDS, SHARES[each], strict=False)}
    parts = tuple(_part(sizes_, kind) for kind in sizes_ if sizes_[kind])
    return f"{each} bytes", parts, _mark(each * params, room)


def _activations(
    stays: dict[str, float], found: dict[int, tuple[dict[str, int], bool]], values: Values, limit: tuple[float, str]
) -> Step:
    again, whole = values["recompute"] == "full", found[1][0]
    n = min(int(values["gpus"]), max(found))
    end = ("end of a step", tuple(_part(stays, k) for k in stays if stays[k]), "")
    full = ("fullest moment", _stack(whole), _mark(whole["peak"], limit[0]))
    keeps = (
        "With recomputation autograd keeps only each layer's input" if again else "Autograd keeps what forward computed"
    )
    kept = f": {units.memory(whole['activations'])} for a batch of {values['batch']}"
    if not whole["activations"]:  # the fullest moment is at the end of backward or in the optimizer's step
        kept = (
            f": {units.memory(whole['early_activations'])} for a batch of {values['batch']}, {units.memory(whole['early'])} in all before the first gradient. "
            "But memory is fullest when they are freed already: all gradients are there by then"
        )
    says = (
        f"{keeps}{kept}. Activations grow with the batch. As the backward pass uses them up, gradients take their place. The GPU must have "
        f"room for the fullest moment, {units.memory(whole['peak'])} here, with the tensors in flight just then (buffers)."
    )
    if shared := kept_whole(found):
        says += (
            f" GPUs that share the weights share everything else as well, but **{units.memory(shared)}** of the activations: these "
            f"stay whole on every GPU (lesson 7 mends that){'' if whole['activations'] else ', so on several GPUs the moment before the first gradient may be the fuller one'}."
        )
    rows = [end, full]
    if n > 1:
        rows.append((f"of {_gpus(n)}, each", _stack(found[n][0]), _mark(found[n][0]["peak"], limit[0])))
    return Step("Activations", says, _picture(rows, limit))


def _note(model: str, uneven: list[str], wanted: int, n: int) -> str:
    """Said where Megatron-LM's way is not open, and where a node has fewer GPUs."""
    if wanted > n:
        return f"A node of this cluster has {n} GPUs, so the first picture shows {n}."
    if not uneven:
        return ""
    return (
        f"The heads of {model} do not divide by {' or '.join(uneven)}, so the stack there is that of the smallest "
        "plan the planner finds."
    )


def _stack(found: dict[str, int]) -> tuple[BarPiece, ...]:
    return tuple(_part(found, kind) for kind in MEMORY_KINDS if found[kind])


def _part(found: Mapping[str, float], kind: str) -> BarPiece:
    return BarPiece(
        MEMORY_NAMES[kind], float(found[kind]), MEMORY_COLOURS[kind], dotted=kind in ("grads", "activations")
    )


def _mark(total: float, room: float) -> str:
    return "fits" if total <= room else "does not fit"


def _picture(rows: list[tuple[str, tuple[BarPiece, ...], str]], limit: tuple[float, str]) -> str:
    told = "; ".join(f"{label}: {units.memory(sum(p.value for p in parts))}, {mark}" for label, parts, mark in rows)
    return svg(bars([StackedBar(*r) for r in rows], units.memory, limit), f"Memory of one GPU. {told}. {limit[1]}")


def question(learner: Learner, values: Values) -> Question:
    """From how many GPUs on does it fit?"""
    numbers = scene(learner, values).numbers
    right = int(numbers["fits_from"])
    names = {0: "Not on one node at all", **{n: _gpus(n) for n in sizes(learner)}}
    total = {n: numbers[f"{n}_peak"] for n in sizes(learner)}
    room = units.memory(numbers["room"])

    def why(n: int) -> str:
        if n == 0:
            return f"On {max(total)} GPUs each one needs {units.memory(min(total.values()))}; a GPU has {room}."
        if n == 1:
            return f"One GPU would need {units.memory(total[1])}; a GPU has {room}." + _fewer(right, n)
        shared = numbers["shared_whole"]
        needs = f"Each of {n} needs {units.memory(total[n])}"
        if shared:
            needs = f"Each of {n} needs about {_shares(numbers, n)}, {units.memory(total[n])} in all"
        return f"{needs}; a GPU has {room}." + _fewer(right, n)

    options = [(names[n], why(n)) for n in names]
    wrong = tuple(o for n, o in zip(names, options, strict=True) if n != right)
    return asked(
        f"From how many GPUs on does this training step fit, at batch {values['batch']}, if they split every weight?",
        (names[right], why(right)),
        wrong,
        list(names).index(right),
    )


def _shares(numbers: Mapping[str, float], n: int) -> str:
    """What each of n GPUs holds at its fullest moment, from what the lesson shows of one: before the first gradient, or with all of them."""
    shared, early, peak = (numbers[name] for name in ("shared_whole", "1_early", "1_peak"))
    if shared + (early - shared) / n < peak / n:
        return f"1/{n} of {units.memory(peak)}"
    return f"{units.memory(shared)} whole and 1/{n} of the other {units.memory(early - shared)}"


def _fewer(right: int, n: int) -> str:
    return " Fewer are enough." if right and n > right else ""


LESSON = Lesson(
    1, "memory", "Why split at all?", "Training needs several times the memory of the weights alone.",
    (
        "One bar is what each GPU needs, the frame is what it has. The model and the kind of GPU are those of the sentence at the top; the "
        "number of GPUs and the batch are those of the sliders here.",),
    (
        ("Activation", "a tensor that forward computes; autograd keeps many of them for the backward pass"),
        ("Buffers", "tensors in flight: results that the next operation is about to use"),
        ("Batch", "the samples of one step; “batch 16 × 4 096 tokens” means 16 texts of 4 096 tokens each"),
        ("bf16", "a number in 2 bytes; fp32 takes 4"),
        ("AdamW, SGD", "two optimizers; SGD keeps nothing, AdamW two running averages per weight"),
        ("GiB", "2^30 bytes, 7 % more than a GB. A GPU sold with 80 GB has a little less or more than 80 GiB: an H100 reports 79.6"),
        ("Mixed precision", "computing in 16 bits and keeping a copy of the weights in fp32, so that small updates are not lost"),
        ("Recomputation", "not keeping activations, and running forward again when the backward pass wants them"),
        ("Node", "one machine with several GPUs, joined by fast links such as NVLink"),
        ("Optimizer states", "what the optimizer remembers of each weight: AdamW's two averages"),
    ),
    (
        Control("gpus", "GPUs that share the weights", GPUS, 1, kind="slider"),
        Control("bytes", "Bytes per parameter", tuple(BYTES), 18, BYTE_NAMES, "slider"),
        Control("recompute", "Recomputation", ("none", "full"), "none", {"none": "keep activations", "full": "run forward again"}),
        Control("batch", "Batch, samples in one step", BATCHES, 2, kind="slider"),
    ),
    scene, question, CODE, ("compare", "Memory of whole plans for this model"), uses_model=True,
    prefetch=True,
    focus=links.same_batch,
)  # fmt: skip
