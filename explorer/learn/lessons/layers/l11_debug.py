"""11. Break it and debug it: a fault in a small parallel run, found from its losses, its weights and its messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import svg, table
from explorer.learn.learner import Learner
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.charts import Line, plot, timeline
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh
from planner_core.cost.communication import axis_links, collective_time

FAULTS = ("sum", "kv", "order")
NAMES = {
    "sum": "The gradients are not summed over the data groups",
    "kv": "One GPU uses the other's key-value head",
    "order": "The pieces are put together in the wrong rank order",
    "none": "Nothing: it is rounding",
}
WIDTH, HEADS, KV, HEAD, SAMPLES, TURNS, RATE = 8, 4, 2, 4, 24, 60, 0.05
FLOAT_BYTES = 8
KERNELS = {"forward": 11, "backward": 22, "update": 8}
"""Launches of a step on one GPU: three products of the input, three kernels for each of two heads, their joining and the output's product;
twice as many in backward; two for each of four weights."""
CODE = """\
import torch

gen = torch.Generator().manual_seed(5)
sizes = ((8, 16), (8, 8), (8, 8), (16, 8))  # q, k, v, o: 4 heads and 2 key-value heads, of 4 numbers each
goal = [torch.randn(s, generator=gen, dtype=torch.float64) / s[0] ** 0.5 for s in sizes]
samples = torch.randn(24, 8, generator=gen, dtype=torch.float64)
checkpoint = [(w + 0.1 * torch.randn(w.shape, generator=gen, dtype=torch.float64)).requires_grad_() for w in goal]

def forward(x, q, k, v, o, key_value_heads=(0, 0, 1, 1), order=(0, 1, 2, 3)):
    heads = []
    for head, kv in enumerate(key_value_heads):
        mine, keys = slice(4 * head, 4 * head + 4), slice(4 * kv, 4 * kv + 4)
        scores = (x @ q[:, mine]) @ (x @ k[:, keys]).T / 4**0.5
        heads.append(torch.softmax(scores, dim=1) @ (x @ v[:, keys]))
    return torch.cat([heads[i] for i in order], dim=1) @ o

def loss(x, **fault):
    return (forward(x, *checkpoint, **fault) - forward(x, *goal)).square().mean()

groups = samples.chunk(2)  # two data groups
for name, fault in {"one GPU": {}, "kv": {"key_value_heads": (0, 0, 0, 0)}, "order": {"order": (2, 3, 0, 1)}}.items():
    print(f"{name}: first loss {sum(loss(x, **fault) for x in groups) / 2:.4f}")
grads = [torch.autograd.grad(loss(x), checkpoint) for x in groups]  # not summed: each group steps by its own
print(f"sum: groups apart by {max(0.05 * (a - b).abs().max() for a, b in zip(*grads)):.3g} before step 2")
"""


def forward(x: Any, weights: list[Any], fault: str) -> Any:
    """Attention over samples, heads dealt to two GPUs of a tensor group; the terms of the output are summed."""
    import torch

    q, k, v, o = weights
    per, group = HEADS // 2, HEADS // KV
    results = []
    for rank in range(2):
        for head in range(rank * per, (rank + 1) * per):
            kv = 0 if fault == "kv" else head // group  # the fault: the second GPU has no key-value head of its own
            mine, keys = (slice(i * HEAD, (i + 1) * HEAD) for i in (head, kv))
            scores = (x @ q[:, mine]) @ (x @ k[:, keys]).T / HEAD**0.5
            results.append(torch.softmax(scores, dim=1) @ (x @ v[:, keys]))
    if fault == "order":  # the fault: rank 1's heads first
        results = results[per:] + results[:per]
    return torch.cat(results, dim=1) @ o


@lru_cache(maxsize=8)
def trained(fault: str) -> dict[str, Any]:
    """A run from a checkpoint near its goal, on two data groups: losses on all samples, how far the groups' weights lie apart after each
    step, and the bytes of its messages."""
    import torch

    gen = torch.Generator().manual_seed(5)
    sizes = ((WIDTH, HEADS * HEAD), (WIDTH, KV * HEAD), (WIDTH, KV * HEAD), (HEADS * HEAD, WIDTH))
    goal = [torch.randn(s, generator=gen, dtype=torch.float64) / s[0] ** 0.5 for s in sizes]
    x = torch.randn(SAMPLES, WIDTH, generator=gen, dtype=torch.float64)
    start = [w + 0.1 * torch.randn(w.shape, generator=gen, dtype=torch.float64) for w in goal]
    wanted = [forward(part, goal, "") for part in x.chunk(2)]
    groups = [[w.clone().requires_grad_() for w in start] for _ in range(2)]

    def loss(rank: int, own: list[Any]) -> Any:
        return (forward(x.chunk(2)[rank], own, fault) - wanted[rank]).square().mean()

    losses, apart = [], []
    for _ in range(TURNS):
        with torch.no_grad():
            losses.append(float(loss(0, groups[0]) + loss(1, groups[0])) / 2)
            apart.append(max(float((a - b).abs().max()) for a, b in zip(*groups, strict=True)))
        grads = [torch.autograd.grad(loss(rank, own), own) for rank, own in enumerate(groups)]
        means = [sum(g) / 2 for g in zip(*grads, strict=True)]
        with torch.no_grad():
            for rank, own in enumerate(groups):
                for w, g in zip(own, grads[rank] if fault == "sum" else means, strict=True):
                    w -= RATE * g
    return {"loss": losses, "apart": apart, "messages": messages(fault)}


def messages(fault: str) -> list[tuple[str, str, int]]:
    """What one GPU's trace of a step shows: phase, message, bytes."""
    tokens = SAMPLES // 2 * WIDTH * FLOAT_BYTES
    weights = WIDTH * (HEADS * HEAD // 2) + 2 * WIDTH * HEAD + HEADS * HEAD // 2 * WIDTH
    if fault == "kv":  # the second GPU has neither keys nor values of its own
        weights -= 2 * WIDTH * HEAD
    found = [
        ("forward", "all_reduce of the output's terms, tensor group", tokens),
        ("backward", "all_reduce of the input's gradient, tensor group", tokens),
    ]
    return (
        found
        if fault == "sum"
        else [*found, ("backward", "all_reduce of gradients, data groups", weights * FLOAT_BYTES)]
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one GPU's trace: on its stream of compute or of messages, from `start` to `end` seconds."""

    stream: str
    start: float
    end: float
    words: str


def trace(cluster: Cluster, fault: str) -> list[Span]:
    """One step of the second GPU of a tensor group, on four GPUs of a node like the learner's: every kernel of so small a layer takes
    its launch, and what follows a message waits for it."""
    four = replace(cluster, levels=(replace(cluster.levels[0], size=4),))
    data, tensor = axis_links(four, DeviceMesh(("data", "tensor"), (2, 2)))
    found, now, sends = [], 0.0, messages(fault)

    def add(stream: str, seconds: float, words: str) -> None:
        nonlocal now
        found.append(Span(stream, now, now + seconds, words))
        now += seconds

    for phase, kernels in KERNELS.items():
        add("compute", kernels * cluster.gpu.launch_s, phase)
        for _, what, size in (m for m in sends if m[0] == phase):
            add(
                "messages",
                collective_time("all_reduce", size, data if "data groups" in what else tensor)[0],
                f"{size} B",
            )
    return found


def scene(learner: Learner, values: Values) -> Scene:
    """Losses, weights, messages, a trace; then the fault, and how each shows."""
    fault = FAULTS[int(values["case"])]
    sick, well = trained(fault), trained("")
    steps = (
        _losses(sick, well), _weights(sick), _messages(sick, well), _trace(learner.cluster, fault), _found(fault, sick, well), _signs(),
    )  # fmt: skip
    numbers = {
        "first": sick["loss"][0], "last": sick["loss"][-1], "well_first": well["loss"][0], "well_last": well["loss"][-1], "apart": sick["apart"][-1],
        "bytes": sum(m[2] for m in sick["messages"]), "well_bytes": sum(m[2] for m in well["messages"]), "messages": len(sick["messages"]),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=4)


def _losses(sick: dict[str, Any], well: dict[str, Any]) -> Step:
    lines = [
        Line("four GPUs", tuple((float(i + 1), v) for i, v in enumerate(sick["loss"])), COMMUNICATION),
        Line("one GPU", tuple((float(i + 1), v) for i, v in enumerate(well["loss"])), COMPUTE, "7 4"),
    ]
    says = (
        f"A small attention layer goes on training from a checkpoint: two data groups, in each the {HEADS} heads and {KV} key-value heads dealt to two GPUs. "
        f"Somebody changed a line, and no error came. First loss **{sick['loss'][0]:.4f}**, on one GPU {well['loss'][0]:.4f}; last {sick['loss'][-1]:.4f}, "
        f"on one GPU {well['loss'][-1]:.4f}. Both fall. What is wrong?"
    )
    picture = plot(lines, "step", "loss on all samples", units.whole, "{:.3g}".format)
    return Step("The losses", says, svg(picture, "Losses of the run and of one GPU"))


def _weights(sick: dict[str, Any]) -> Step:
    rows = [(units.whole(i + 1), f"{sick['apart'][i]:.3g}") for i in (0, 1, 9, 29, TURNS - 1)]
    says = "The two data groups must hold equal weights at every step. Here is how far they lie apart: the largest difference of any weight, before each step."
    return Step("The weights", says, table(("before step", "largest difference between the data groups"), rows))


def _trace(cluster: Cluster, fault: str) -> Step:
    """The step in time, beside the plan's."""
    colours = {"forward": COMPUTE, "backward": DEVICES[4], "update": DEVICES[2]}
    tracks, end = [], 0.0
    for name, which in (("plan", ""), ("this run", fault)):
        spans = trace(cluster, which)
        end = max(end, spans[-1].end)
        for stream in ("compute", "messages"):
            here = [(s.start, s.end, s.words, colours.get(s.words, COMMUNICATION)) for s in spans if s.stream == stream]
            tracks.append((f"{name}: {stream}", here))
    own, planned = (trace(cluster, which) for which in (fault, ""))
    says = (
        f"The same step in time, as four {cluster.gpu.name} of one node would run it, and the plan's above it. So small a layer is all launches and latency: {units.seconds(own[-1].end)}, planned "
        f"{units.seconds(planned[-1].end)}. In a real trace, too, look first for what is **missing**, then at the bytes of each message, and last at times. Losses, weights, messages, trace: you have seen all four. Decide."
    )
    picture = timeline(tracks, units.seconds, end)
    return Step("The trace", says, svg(picture, "A step of the plan and of this run on two streams"))


def _messages(sick: dict[str, Any], well: dict[str, Any]) -> Step:
    rows = [(phase, what, f"{size} B") for phase, what, size in sick["messages"]]
    planned = sum(m[2] for m in well["messages"])
    says = (
        f"What the second GPU of a tensor group sends in one step: {len(sick['messages'])} messages, {sum(m[2] for m in sick['messages'])} bytes. "
        f"The plan has {len(well['messages'])} messages and {planned} bytes."
    )
    return Step("The messages", says, table(("phase", "message", "bytes"), rows))


CURES = {
    "sum": "`loss.backward()` was called, and nobody summed the gradients over the data groups: a model not wrapped in DDP, or `no_sync()` in every part of the batch. Each group learns "
    "from its own samples only. The loss still falls, and the weights part.",
    "kv": "With 2 key-value heads on 2 GPUs each must have one. The second GPU took head 0: its queries meet keys that are not theirs, and head 1 is never trained. Check that the "
    "slice of k_proj and v_proj goes by the rank (lesson 6).",
    "order": "The heads of rank 1 were put before those of rank 0: every message has the right size, and every number is in the wrong place. It happens where a mesh is built by hand, or "
    "a checkpoint is cut in another order. Trained from nothing the model would learn it that way and nobody would see it; a loaded checkpoint shows it in its first loss.",
}  # fmt: skip


def _found(fault: str, sick: dict[str, Any], well: dict[str, Any]) -> Step:
    rows = [
        ("first loss", f"{sick['loss'][0]:.4f}", f"{well['loss'][0]:.4f}"), ("last loss", f"{sick['loss'][-1]:.4f}", f"{well['loss'][-1]:.4f}"),
        ("groups apart at the end", f"{sick['apart'][-1]:.3g}", f"{well['apart'][-1]:.3g}"),
        ("bytes of a step", f"{sum(m[2] for m in sick['messages'])}", f"{sum(m[2] for m in well['messages'])}"),
    ]  # fmt: skip
    return Step(
        f"The fault: {NAMES[fault][0].lower()}{NAMES[fault][1:]}",
        CURES[fault],
        table(("", "this run", "as it should be"), rows),
    )


def _signs() -> Step:
    well, rows = trained(""), []
    for fault in FAULTS:
        run = trained(fault)
        starts = "right" if _close(run["loss"][0], well["loss"][0]) else "wrong"
        sizes = [sum(m[2] for m in x["messages"]) for x in (run, well)]
        sent = (
            "as planned"
            if sizes[0] == sizes[1]
            else "one message missing"
            if len(run["messages"]) < len(well["messages"])
            else "too few bytes"
        )
        rows.append((NAMES[fault], starts, "they part" if run["apart"][-1] > 0 else "equal", sent))
    says = (
        "Three checks find most faults: the **first loss** of a checkpoint against one GPU, **weights that must be equal**, and the **messages** of a step against the plan. The planner exports "
        "a plan with every message and its bytes, and can hold a recorded run against it."
    )
    return Step("What each fault shows", says, table(("fault", "first loss", "copies of weights", "messages"), rows))


def _close(a: float, b: float) -> bool:
    return abs(a - b) < 1e-9 * max(a, b)


def question(learner: Learner, values: Values) -> Question:
    """Which fault is it?"""
    fault = FAULTS[int(values["case"])]
    run, well = trained(fault), trained("")
    first = f"The first loss is {run['loss'][0]:.4f} instead of {well['loss'][0]:.4f}"
    equal = "the copies of the weights stay equal, so their gradients are summed"
    against = {
        "sum": f"{first}, before any gradient was taken, and {equal}.",
        "kv": {
            "sum": f"Then the first loss would be off. It is right, {run['loss'][0]:.4f}: forward is what it should be.",
            "order": "Then the second GPU would have no gradients of keys and values, and send fewer bytes. Every message has its size.",
        }.get(fault, ""),
        "order": {
            "sum": "Then the first loss would be off. It is right: forward is what it should be.",
            "kv": "Then every message would have its size. The gradients are smaller than planned: some weights have none.",
        }.get(fault, ""),
        "none": f"Rounding changes the sixteenth figure of these 64-bit numbers (in bf16 it would be the third or fourth). {first}." if fault != "sum" else f"Rounding changes the sixteenth figure of these 64-bit numbers (in bf16 it would be the third or fourth). The groups' weights are {run['apart'][-1]:.2g} apart.",
    }  # fmt: skip
    signs = {
        "sum": "The first loss is right, so forward is; the groups part, and the trace has no message over the data groups.",
        "kv": "The first loss is wrong, the copies are equal, and the gradients have fewer bytes than planned: weights are missing.",
        "order": "The first loss is wrong, yet copies are equal and every message has its size: right pieces in the wrong places.",
    }
    wrong = tuple((NAMES[k], why) for k, why in against.items() if k != fault)
    return asked("Which fault is it?", (NAMES[fault], signs[fault]), wrong, int(values["case"]))


LESSON = Lesson(
    11, "debug", "Break it and debug it", "No error comes, and the loss falls: find the fault all the same.",
    (
        "A parallel run can be wrong without a crash. You get what an engineer gets: losses, weights, messages, a trace. Draw another case when you have found this one.",),
    (("Trace", "the list of what a GPU did in a step, with times and sizes"),),
    (Control("case", "Draw another fault", tuple(range(len(FAULTS))), 0, kind="draw"),),
    scene, question, CODE, ("export", "A plan with every message, to hold a run against"),
)  # fmt: skip
