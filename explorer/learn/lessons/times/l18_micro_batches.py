"""18. Micro-batches: why the gradients add up, what each way to shard repeats in every one, and what they buy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing, amount, column, difference, matrix, replicated, row, sign, svg, table
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.times.l14_pays import beside, cell
from explorer.learn.lessons.times.l17_memory_walk import MICRO_BATCHES, TOKENS
from explorer.learn.lessons.times.stated import Stated, at_tokens, names, stated, texts, totals
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars, timeline
from explorer.text import units
from planner_core.cost import Component

WAYS = {"ZeRO-1": "ZeRO-1", "ZeRO-2": "ZeRO-2", "FSDP (ZeRO-3)": "FSDP"}
SAMPLES = 8
CODE = """\
import torch

gen = torch.Generator().manual_seed(3)  # the numbers of the picture
samples = torch.randint(-2, 3, (8, 2), generator=gen).double()
weight = torch.randint(-2, 3, (2, 3), generator=gen).double().requires_grad_()

def gradient(parts):  # of the mean over all samples
    weight.grad = None
    for part in parts:
        loss = (part @ weight).square().sum() / len(samples)
        loss.backward()  # adds to weight.grad
    return weight.grad

whole = gradient([samples])
for m in (2, 4, 8):
    print(f"micro-batches {m}: difference", (gradient(samples.chunk(m)) - whole).abs().max().item())
terms = [f"{gradient([part])[0, 0]:g}" for part in samples.chunk(4)]
print(f"top left: {' + '.join(terms)} = {whole[0, 0]:g}")
# under DDP: with model.no_sync() for all but the last, so that gradients are summed once a step
# under FSDP: set_requires_gradient_sync(False) keeps them whole, which takes the memory that FSDP saves
"""


@lru_cache(maxsize=8)
def gradients(micro_batches: int) -> dict[str, Any]:
    """The gradient of a mean over eight samples, from all at once and summed over micro-batches."""
    import torch

    gen = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (SAMPLES, 2), generator=gen).double()
    w = torch.randint(-2, 3, (2, 3), generator=gen).double()

    def gradient(part: Any) -> Any:  # of the sum of squares of part · w, over all samples
        return 2 * part.T @ part @ w / SAMPLES

    parts = [gradient(part) for part in x.chunk(micro_batches)]
    whole = gradient(x)
    return {"parts": parts, "whole": whole, "error": float((sum(parts) - whole).abs().max())}


def case(learner: Learner, way: str, micro_batches: int) -> Stated:
    """A way to shard over all GPUs, with `TOKENS` per GPU and step."""
    found, samples, _ = texts(learner, TOKENS // micro_batches)
    made = stated(found, names(found.cluster)[way], samples, micro_batches)
    assert made, "these split samples only"
    return made


def spent(made: Stated) -> dict[str, float]:
    """Seconds of all repeated layers in one micro-batch: compute, forward and backward, and the weight traffic beside each, split into what
    comes in every micro-batch and what comes once a step."""
    names_ = ("forward", "backward", "forward_again", "backward_again", "forward_once", "backward_once")
    found, c = dict.fromkeys(names_, 0.0), Component
    places = (c.FORWARD, c.BACKWARD, c.FORWARD_TRAFFIC, c.BACKWARD_TRAFFIC, c.FORWARD_ONCE, c.BACKWARD_ONCE)
    for unit in (u for u in made.units if u.label):
        sizes = totals(made, unit)
        for name, at in zip(names_, places, strict=True):
            found[name] += unit.copies * sizes[at]
    return found


def sent(made: Stated) -> int:
    """Bytes that one GPU sends in a step."""
    return sum(t.wire_bytes for t in made.plan.cost.traffic)


def split(learner: Learner, way: str) -> tuple[float, float]:
    """Bytes that one GPU sends once a step, and again in each micro-batch, from the planner's plans with one and with two."""
    one, two = sent(case(learner, way, 1)), sent(case(learner, way, 2))
    return float(2 * one - two), float(two - one)


def scene(learner: Learner, values: Values) -> Scene:
    """The same gradient, a step in time, what repeats, what it costs in bytes, and what it buys."""
    way, m = str(values["way"]), int(values["m"])
    found, _, note = texts(learner, TOKENS)
    made, c = case(learner, way, m), gradients(m)
    once, again = split(learner, way)
    time = spent(made)
    steps = (_same(c, m), _in_time(made, time, way, m), _repeats(learner, m), _buys(learner, way, m), _chosen(learner))
    cost = made.plan.cost
    numbers = {
        "error": c["error"], "sent": sent(made), "once": once, "again": again, "step_s": cost.step_time_s,
        "peak": cost.memory_bytes["peak"], "params": found.graph.num_params, "gpus": found.cluster.num_gpus, **{f"{k}_s": v for k, v in time.items()},
    }  # fmt: skip
    return Scene(steps, numbers, reveal=2, note=note)


def _plural(m: int) -> str:
    return f"{m} micro-batch{'es' * (m > 1)}"


def _same(c: dict[str, Any], m: int) -> Step:
    shown = [matrix(p, replicated, f"micro-batch {i + 1}", cell=52) for i, p in enumerate(c["parts"])]
    parts = [x for i, p in enumerate(shown) for x in ((sign("+"), p) if i else (p,))]
    rows = [row(*parts[i : i + 6], gap=8) for i in range(0, len(parts), 6)]
    picture: Drawing = column(
        *rows, row(sign("="), matrix(c["whole"], replicated, "the whole batch", cell=52), gap=8), gap=10
    )
    says = (
        f"A batch of {SAMPLES} samples, in {_plural(m)}. The gradient of a mean over samples is a sum over samples, so the micro-batches' "
        f"gradients, each divided by {SAMPLES}, add up to the batch's (a mean of each part, divided by the number of parts, is the same while all parts have as many tokens). Largest difference: **{difference(c['error'])}**. A step may run "
        "forward and backward in parts, keep one sum, and let the optimizer wait until the last."
    )
    return Step("The same gradient", says, svg(picture, f"Gradients of {m} micro-batches add up to the batch's"))


def _in_time(made: Stated, time: dict[str, float], way: str, m: int) -> Step:
    computing, weights, sums = [], [], []
    shown = min(m, 4)
    k, now = made.model.contention, 0.0
    for i in range(shown):
        last = i == shown - 1
        for phase, letter in (("forward", "F"), ("backward", "B")):
            again = time[f"{phase}_again"]
            once = time[f"{phase}_once"] if (last if phase == "backward" else i == 0) else 0.0
            length = max(time[phase] + k * (again + once), again + once)
            computing.append(
                (now, now + time[phase], f"{letter}{i + 1}", COMPUTE if phase == "forward" else DEVICES[4])
            )
            gather = time["forward_again"] if way == "FSDP (ZeRO-3)" else once if phase == "forward" else 0.0
            if gather:
                weights.append((now, now + gather, "gather", DEVICES[3]))
            if (rest := again + once - gather) > 1e-9:
                sums.append((now + gather, now + gather + rest, "sum", COMMUNICATION))
            now += length
    tracks = [
        ("compute", computing),
        *([("gathers", weights)] if weights else []),
        *([("gradient sums", sums)] if sums else []),
    ]
    does = {
        "ZeRO-1": "It keeps whole working weights and whole gradients: it gathers before the first micro-batch, and sums after the last.",
        "ZeRO-2": "It keeps whole working weights, but only a part of each gradient: so it must sum in every micro-batch.",
        "FSDP (ZeRO-3)": "It keeps nothing whole. A layer's weights are freed as soon as the layer is done with them, in each pass, and every micro-batch "
        "has two passes. A gather runs one layer ahead of the compute above it.",
    }[way]  # fmt: skip
    step_s = made.plan.cost.step_time_s
    beyond = f" The layers take {units.seconds(now)} of the step's {units.seconds(step_s)}; the rest lies around them, and is the optimizer's."
    first = f" The first {shown} of {m} micro-batches are shown." if shown < m else beyond
    says = f"{WAYS[way]} with {_plural(m)}, all layers together. {does}{first} How often would FSDP gather a layer's weights if it kept them until the layer's backward pass?"
    return Step(
        "A step in time", says, svg(timeline(tracks, units.seconds, now), f"{WAYS[way]}: {m} micro-batches in time")
    )


def _repeats(learner: Learner, m: int) -> Step:
    items = []
    for way, name in WAYS.items():
        once, again = split(learner, way)
        parts = (
            BarPiece("once a step", once, DEVICES[4]),
            BarPiece("again in each micro-batch", m * again, COMMUNICATION, True),
        )
        items.append(StackedBar(name, tuple(p for p in parts if p.value > 1e-3 * (once + m * again))))
    once, again = split(learner, "FSDP (ZeRO-3)")
    zero1 = sum(split(learner, "ZeRO-1"))
    says = (
        f"What one GPU sends in a step of {_plural(m)}, as the planner counts it. **FSDP sends {amount(again)} in each micro-batch**"
        f"{f' and {amount(once)} once' if once > 1e-3 * again else ''}; ZeRO-1 sends {amount(zero1)} in a step of any number of them. FSDP could keep the "
        "gathered weights for the next micro-batch, but then it would be ZeRO-2: keeping them takes the memory that it was chosen to save. "
        f"Kept only from a layer's forward to its backward, {m} of the {2 * m} gathers of a layer are left, and at the end of forward all weights are there."
    )
    return Step("What comes again", says, svg(bars(items, amount), "Bytes once a step and in each micro-batch"))


def _buys(learner: Learner, way: str, m: int) -> Step:
    rows = []
    for k in MICRO_BATCHES:
        made = case(learner, way, k)
        c = made.plan.cost
        rows.append((
            str(k), units.whole(TOKENS // k), units.memory(c.memory_bytes["peak"]), amount(sent(made)), units.seconds(c.exposed_comm_time_s),
            units.seconds(c.step_time_s), "fits" if made.plan.fits else "does not fit",
        ))  # fmt: skip
    says = (
        f"{WAYS[way]}, always {units.whole(TOKENS)} tokens per GPU and step. More micro-batches have fewer tokens each, so fewer activations are kept "
        "at once. The compute of a micro-batch shrinks, and what FSDP gathers beside it does not (lesson 14): more and more of it shows."
    )
    head = ("micro-batches", "tokens in each", "fullest moment", "sent per GPU", "communication that shows", "step", "")
    return Step("What they buy", says, table(head, rows, MICRO_BATCHES.index(m)))


def _chosen(learner: Learner) -> Step:
    found = {(way, k): case(learner, way, k).plan for way in WAYS for k in MICRO_BATCHES}
    fits = {at: plan for at, plan in found.items() if plan.fits}
    rows = []
    for way, name in WAYS.items():
        cells = [
            units.seconds(found[way, k].cost.step_time_s) if (way, k) in fits else "does not fit" for k in MICRO_BATCHES
        ]
        rows.append((name, *cells))
    quickest = cell({f"{WAYS[w]} with {_plural(k)}": case(learner, w, k) for w, k in found}, learner.cluster)
    says = "None of these fits. Fewer tokens per GPU, recomputation (lesson 17), or tensor parallelism would help."
    mark = None
    if fits:
        way, _ = min(fits, key=lambda at: fits[at].cost.step_time_s)
        mark = list(WAYS).index(way)
        says = (
            f"The planner's step times. Quickest that fits: **{quickest}**.{beside(quickest)} Compute differs by copies (lesson 16). The rule of thumb: as few micro-batches as memory "
            "allows. The planner's own search tries them all, together with recomputation (Plans)."
        )
    return Step("The planner's choice", says, table(("", *(_plural(k) for k in MICRO_BATCHES)), rows, mark))


def question(learner: Learner, values: Values) -> Question:
    """How many gathers are left if a layer's weights are kept until its backward pass?"""
    m = int(values["m"])
    whys = (
        (2.0 * m, "That is with the weights freed behind the layer in each pass. Kept until its backward, which of the two gathers of a micro-batch is left?"),
        (1.0, "That would keep them through the whole step, as ZeRO-2 does. Here they are freed behind backward, so the next micro-batch finds none."),
        (0.0, "Somebody has to gather them first: a GPU owns a part of each weight only."),
        (3.0 * m, "Those are all messages of a layer while weights are freed in each pass: two gathers and the gradients' sum. The sum is not an all_gather."),
        (m + 1.0, "Where would the one more come from? Every micro-batch is like the others."),
        (m / 2, "A gather cannot serve two micro-batches: behind the first one's backward the weights are freed."),
    )  # fmt: skip
    why = f"One in each of {_plural(m)}, forward: {m}. Backward finds the weights still there. It saves {m} gathers and takes the memory of all layers' weights at the end of forward."
    return typed(
        f"PyTorch's `reshard_after_forward=False` lets FSDP keep a layer's weights from its forward pass to its backward pass, and free them then. {_plural(m).capitalize()}: how many all_gathers of one layer's weights are left?",
        "all_gathers", (float(m), why), tuple(w for w in whys if w[0] != m), lambda value: f"{value:g}",
    )  # fmt: skip


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The planner with the lesson's tokens and micro-batches."""
    m = int(values["m"])
    return at_tokens(learner, TOKENS // m, m)


LESSON = Lesson(
    18, "micro-batches", "Micro-batches", "A step may go through its batch in parts: the sum of gradients is the same, the messages are not.",
    (
        "A batch that is too large for the memory is run in micro-batches whose gradients are added up (accumulation). Their number and "
        f"the way to shard decide what is sent again. Model and cluster are yours; each GPU has {TOKENS} tokens in a step, whatever their number.",),
    (("Accumulation", "adding the gradients of the micro-batches before the optimizer's step"),),
    (
        Control("way", "Shard by", tuple(WAYS), "FSDP (ZeRO-3)", dict(WAYS.items()), step=2),
        Control("m", "Micro-batches of a step", MICRO_BATCHES, 4, kind="slider"),
    ),
    scene, question, CODE, ("plans", "The planner's choice for your batch"), uses_model=True,
    focus=focus,
)  # fmt: skip
