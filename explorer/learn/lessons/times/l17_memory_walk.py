"""17. Memory through a step: the planner's walk as a curve, and how recomputation and micro-batches shape it."""

from __future__ import annotations

from functools import lru_cache

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES, MEMORY_COLOURS, MEMORY_NAMES
from explorer.figures.svg_tensors import amount, svg, table
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.lessons.predictions import way_back
from explorer.learn.lessons.times.stated import Stated, at_tokens, names, stated, texts
from explorer.learn.pictures.area import Stratum, area
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars
from explorer.text import units
from planner_core.cost.memory import Moment, walk

TOKENS = 8192
"""Tokens of one GPU in a step."""
MICRO_BATCHES = (1, 2, 4, 8)
GRADIENT = 4
"""Bytes of a parameter's gradient (fp32)."""
NOTABLE = 0.01
"""A share of what forward keeps that is told."""
WHEN = ("on the way forward", "where forward turns into backward", "on the way back", "in the optimizer's step")
CODE = """\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def kept(again, batch):  # bytes that autograd keeps of four layers
    layers, saved = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)], {}
    own = {p.data_ptr() for layer in layers for p in layer.parameters()}
    x = torch.randn(batch, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    return sum(t.nbytes for place, t in saved.items() if place not in own)
print(f"kept for backward: {kept(False, 64)} bytes, with recomputation {kept(True, 64)}, of a quarter batch {kept(False, 16)}")

from explorer.learn.learner import Learner  # what follows asks the planner, so it needs Shardscope
from explorer.learn.lessons.times.l17_memory_walk import case, moments
from planner_core.planning import Request

made = case(Learner(Request("llama-3-8b")), "none", 1)  # FSDP on 16 GPUs, nothing recomputed, one micro-batch
found, turn, step = moments(made)  # everything that is taken beside what stands, at every operation
cost, at = made.plan.cost, max(range(len(found)), key=lambda i: found[i].total)
standing = cost.memory_bytes["params"] + cost.memory_bytes["optimizer"]
print(f"fullest moment: {(standing + found[at].total) / 2**30:.1f} GiB, operation {at} (backward begins at {turn}, the optimizer at {step})")
print(f"standing: {standing / 2**30:.2f} GiB; activations kept: {max(x.kept for x in found) / 2**30:.1f} GiB; step {cost.step_time_s:.3f} s")
"""


def case(learner: Learner, recompute: str, micro_batches: int) -> Stated:
    """FSDP over all GPUs with `TOKENS` per GPU and step."""
    found, samples, _ = texts(learner, TOKENS // micro_batches)
    made = stated(found, names(found.cluster)["FSDP (ZeRO-3)"], samples, micro_batches, recompute)
    assert made, "FSDP splits samples only"
    return made


@lru_cache(maxsize=64)
def moments(made: Stated) -> tuple[tuple[Moment, ...], int, int]:
    """Every moment of the last micro-batch and of the optimizer, where backward begins, and where the optimizer's step is."""
    found = walk(made.plan.blocks, made.planner.graph, made.model)
    turn = len(found.forward)
    return (*found.forward, *found.backward, found.step), turn, turn + len(found.backward)


def standing(made: Stated) -> int:
    """Bytes that are there all the time: weights and optimizer states."""
    memory = made.plan.cost.memory_bytes
    return memory["params"] + memory["optimizer"]


def fullest(made: Stated) -> tuple[int, int]:
    """The moment with the most memory, and its bytes."""
    found, _, _ = moments(made)
    at = max(range(len(found)), key=lambda i: found[i].total)
    return at, standing(made) + found[at].total


def when(made: Stated) -> int:
    """Which of `WHEN` the fullest moment is."""
    _, turn, step = moments(made)
    at, _ = fullest(made)
    if at >= step:
        return 3
    near = max(2, turn // 20)
    return 1 if turn - near <= at < turn + near else 0 if at < turn else 2


def scene(learner: Learner, values: Values) -> Scene:
    """Forward, the whole curve, its fullest moment, recomputation, and micro-batches."""
    recompute, m = str(values["recompute"]), int(values["m"])
    _, _, note = texts(learner, TOKENS)
    made = case(learner, recompute, m)
    found, turn, step = moments(made)
    at, peak = fullest(made)
    steps = (
        _curve(made, "Forward", turn),
        _way_back(made),
        _curve(made, "There and back", None),
        _stack(made),
        _recomputed(learner, m),
        _cut(learner, recompute),
    )
    cost = made.plan.cost
    numbers = {
        "peak": peak, "walk": cost.memory_bytes["peak"], "kept": max(x.kept for x in found), "standing": standing(made), "step_s": cost.step_time_s,
        "when": when(made), "turn": turn, "at": at, "optimizer": step,
    }  # fmt: skip
    return Scene(steps, numbers, reveal=1, note=note)


def _way_back(made: Stated) -> Step:
    """A prediction to draw: what is kept on the way back."""
    found, turn, step = moments(made)
    base, params = standing(made), made.planner.graph.num_params
    without = [float(base + x.kept + x.grads) for x in found]
    return way_back(without[:turn], without[turn:step], base, GRADIENT * params, made.planner.cluster.num_gpus)


def _curve(made: Stated, title: str, upto: int | None) -> Step:
    found, turn, step = moments(made)
    room = made.planner.cluster.gpu.memory_bytes
    at, peak = fullest(made)
    memory = made.plan.cost.memory_bytes
    kinds = (
        ("params", [memory["params"]] * len(found)), ("optimizer", [memory["optimizer"]] * len(found)),
        ("grads", [x.grads for x in found]), ("activations", [x.kept for x in found]), ("buffers", [x.flying + x.ahead for x in found]),
    )  # fmt: skip
    bands = [
        Stratum(MEMORY_NAMES[k], tuple(map(float, h)), MEMORY_COLOURS[k], k in ("grads", "activations"))
        for k, h in kinds
    ]
    limit = (float(room), f"{made.planner.cluster.gpu.name}: {units.memory(room)}")
    mark = (at, f"fullest: {units.memory(peak)}") if upto is None else None
    picture = area(bands, units.memory, limit, ((0, "forward"), (turn, "backward"), (step, "")), mark, upto)
    load = made.model.workload
    loss = found[turn - 1].kept - found[turn - 2].kept
    kept = units.memory(max(x.kept for x in found))
    if loss > NOTABLE * found[turn - 1].kept:
        kept += f" with the {units.memory(loss)} that the loss keeps last"
    if upto is not None:
        says = (
            f"FSDP over {made.planner.cluster.num_gpus} GPUs, {units.whole(TOKENS)} tokens per GPU in {load.accumulate} micro-batch"
            f"{'es' * (load.accumulate > 1)}. Weights and optimizer states stand all the time: {units.memory(standing(made))}. Layer by layer "
            f"forward adds what autograd keeps, {kept}. When will memory be fullest?"
        )
    else:
        says = (
            f"Backward frees a layer's activations as it uses them, and leaves gradients. The fullest moment is **{WHEN[when(made)]}**: "
            f"{units.memory(peak)}. The spikes are buffers: weights gathered for a layer, and what its operations work on."
        )
    return Step(title, says, svg(picture, f"Memory of one GPU through a step. Fullest: {units.memory(peak)}"))


def _stack(made: Stated) -> Step:
    found, _, _ = moments(made)
    at, peak = fullest(made)
    memory, moment = made.plan.cost.memory_bytes, found[at]
    sizes = {
        "params": memory["params"],
        "optimizer": memory["optimizer"],
        "grads": moment.grads,
        "activations": moment.kept,
        "buffers": moment.flying + moment.ahead,
    }
    items = [
        StackedBar(
            MEMORY_NAMES[k],
            (BarPiece(MEMORY_NAMES[k], float(size), MEMORY_COLOURS[k], dotted=k in ("grads", "activations")),),
        )
        for k, size in sizes.items()
    ]
    says = (
        f"At that moment {units.memory(peak)} are taken. This sum is what decides whether a plan fits. The average through the step does "
        "not matter: a GPU that is full for a moment fails."
    )
    return Step("The fullest moment", says, svg(bars(items, units.memory), "Kinds of memory at the fullest moment"))


def _recomputed(learner: Learner, m: int) -> Step:
    plain, again = case(learner, "none", m), case(learner, "full", m)
    items = []
    for name, made in (("keep all", plain), ("recompute all", again)):
        c = made.plan.cost
        parts = (
            BarPiece("compute", c.compute_time_s, COMPUTE),
            BarPiece("communication that shows", c.exposed_comm_time_s, COMMUNICATION, True),
            BarPiece("optimizer", c.optimizer_time_s, DEVICES[2]),
        )
        items.append(StackedBar(name, parts, units.memory(c.memory_bytes["peak"])))
    longer = again.plan.cost.compute_time_s / plain.plan.cost.compute_time_s - 1
    says = (
        f"With recomputation a layer keeps only its input and runs forward again in backward. Compute takes {units.percent(longer)} longer: "
        "a third would be a whole forward pass, but what lies outside the layers, and what backward does not ask for, is not run again. "
        f"The fullest moment falls from {units.memory(plain.plan.cost.memory_bytes['peak'])} to "
        f"**{units.memory(again.plan.cost.memory_bytes['peak'])}**."
    )
    return Step(
        "Recomputation", says, svg(bars(items, units.seconds), "Time and memory with and without recomputation")
    )


def _cut(learner: Learner, recompute: str) -> Step:
    rows = []
    for m in MICRO_BATCHES:
        made = case(learner, recompute, m)
        c = made.plan.cost
        found, _, _ = moments(made)
        sent = sum(t.wire_bytes for t in c.traffic)
        fits = "fits" if made.plan.fits else "does not fit"
        rows.append(
            (
                str(m),
                units.memory(max(x.kept for x in found)),
                units.memory(c.memory_bytes["peak"]),
                amount(sent),
                units.seconds(c.step_time_s),
                fits,
            )
        )
    says = (
        f"The same {units.whole(TOKENS)} tokens per GPU, cut into micro-batches. What autograd keeps shrinks with each cut. The price: FSDP "
        "gathers the weights again in each micro-batch, small products use a GPU less well, and gradients wait to be added up. "
        "Cut as little as the memory allows."
    )
    head = ("micro-batches", "activations", "fullest moment", "sent per GPU", "step", "")
    return Step("Micro-batches", says, table(head, rows))


def question(learner: Learner, values: Values) -> Question:
    """When is memory fullest?"""
    made = case(learner, str(values["recompute"]), int(values["m"]))
    found, turn, _ = moments(made)
    base = standing(made)
    first, last = units.memory(base + found[turn - 1].total), units.memory(base + found[-1].total)
    peak = units.memory(fullest(made)[1])
    right = when(made)
    told = (
        f"{first} are taken at the end of forward, buffers included. Forward only adds, so in its middle it is less.",
        f"All activations are kept there, and the logits and their gradient come on top. It has {first} at the end of forward.",
        "On the way back activations are freed. Gradients take their place, but a GPU keeps a part of them.",
        f"Activations are gone by then: {last} with the optimizer's buffers.",
    )
    whys = tuple(f"{peak}. {_reason(i)}" if i == right else t for i, t in enumerate(told))
    rows = tuple(zip((w.capitalize() for w in WHEN), whys, strict=True))
    return asked("When is memory fullest?", rows[right], tuple(r for i, r in enumerate(rows) if i != right), right)


def _reason(which: int) -> str:
    return (
        "Of a model with small layers at its end, the fullest moment may come before the end.",
        "All layers have kept their activations, and the logits and the loss's gradient are the largest tensors in flight.",
        "A layer that runs forward again, or its gradients, need more room than what has been freed.",
        "The optimizer's copies of the largest weight need more room than the activations took.",
    )[which]


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The usual plans side by side at the lesson's tokens, micro-batches and recomputation."""
    m = int(values["m"])
    return {**links.ways(learner, values), **at_tokens(learner, TOKENS // m, m, str(values["recompute"]))}


LESSON = Lesson(
    17, "memory-walk", "Memory through a step", "What counts is the fullest moment, and you can move it.",
    (
        "A run fails at its fullest moment, however empty the rest of the step is. So the planner walks through a step and adds up what is there at "
        f"every operation; recomputation and micro-batches change the curve. Model and cluster are yours; each GPU has {TOKENS} tokens in a step.",),
    (("Fullest moment, peak", "the point of a step at which the most memory is taken; it must fit"),),
    (
        Control("recompute", "In backward", ("none", "full"), "none", {"none": "keep all", "full": "recompute all"}),
        Control("m", "Micro-batches", MICRO_BATCHES, 1, kind="slider"),
    ),
    scene, question, CODE, ("compare", "Memory of whole plans for this model"), uses_model=True, focus=focus,
)  # fmt: skip
