"""11. Break it and debug it: a fault in a small parallel run, found from its losses, its weights and its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import Drawing
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import plot, timeline
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh
from planner_core.cost.communication import axis_links, collective_time

FAULTS = ("sum", "kv", "order")
NAMES = {
    "sum": "The gradients are not summed over the data groups",
    "kv": "One GPU uses the other's key-value head",
    "order": "The pieces are put together in the wrong rank order",
}
WIDTH, HEADS, KV, HEAD, SAMPLES, TURNS, RATE = 8, 4, 2, 4, 24, 60, 0.05
FLOAT_BYTES = 8
KERNELS = {"forward": 11, "backward": 22, "update": 8}
"""Launches of a step on one GPU: three products of the input, three kernels for each of two heads, their joining and the output's product;
twice as many in backward; two for each of four weights."""


def run_attention(x: Any, weights: list[Any], fault: str) -> Any:
    """Run attention over samples, heads dealt to two GPUs of a tensor group; the terms of the output are summed."""
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


@remember(8)
def train(fault: str) -> dict[str, Any]:
    """Return a run from a checkpoint near its goal, on two data groups: losses on all samples, how far the groups' weights lie apart after
    each step, and the bytes of its messages."""
    import torch

    gen = torch.Generator().manual_seed(5)
    sizes = ((WIDTH, HEADS * HEAD), (WIDTH, KV * HEAD), (WIDTH, KV * HEAD), (HEADS * HEAD, WIDTH))
    goal = [torch.randn(s, generator=gen, dtype=torch.float64) / s[0] ** 0.5 for s in sizes]
    x = torch.randn(SAMPLES, WIDTH, generator=gen, dtype=torch.float64)
    start = [w + 0.1 * torch.randn(w.shape, generator=gen, dtype=torch.float64) for w in goal]
    wanted = [run_attention(part, goal, "") for part in x.chunk(2)]
    groups = [[w.clone().requires_grad_() for w in start] for _ in range(2)]

    def loss(rank: int, weights: list[Any]) -> Any:
        return (run_attention(x.chunk(2)[rank], weights, fault) - wanted[rank]).square().mean()

    losses, distances = [], []
    for _ in range(TURNS):
        with torch.no_grad():
            losses.append(float(loss(0, groups[0]) + loss(1, groups[0])) / 2)
            distances.append(max(float((a - b).abs().max()) for a, b in zip(*groups, strict=True)))
        grads = [torch.autograd.grad(loss(rank, weights), weights) for rank, weights in enumerate(groups)]
        means = [sum(g) / 2 for g in zip(*grads, strict=True)]
        with torch.no_grad():
            for rank, weights in enumerate(groups):
                for w, g in zip(weights, grads[rank] if fault == "sum" else means, strict=True):
                    w -= RATE * g
    messages = list_messages(fault)
    return {"loss": losses, "apart": distances, "messages": messages, "bytes": sum(size for _, _, size in messages)}


def list_messages(fault: str) -> list[tuple[str, str, int]]:
    """Return what one GPU's trace of a step shows: phase, message, bytes."""
    tokens = SAMPLES // 2 * WIDTH * FLOAT_BYTES
    weights = WIDTH * (HEADS * HEAD // 2) + 2 * WIDTH * HEAD + HEADS * HEAD // 2 * WIDTH
    if fault == "kv":  # the second GPU has neither keys nor values of its own
        weights -= 2 * WIDTH * HEAD
    messages = [
        ("forward", "all_reduce of the output's terms, tensor group", tokens),
        ("backward", "all_reduce of the input's gradient, tensor group", tokens),
    ]
    if fault != "sum":
        messages.append(("backward", "all_reduce of gradients, data groups", weights * FLOAT_BYTES))
    return messages


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A piece of one GPU's trace: on its stream of compute or of messages, from `start` to `end` seconds."""

    stream: str
    start: float
    end: float
    words: str


def trace_step(cluster: Cluster, fault: str) -> list[TraceSpan]:
    """Trace one step of the second GPU of a tensor group, on four GPUs of a node like the learner's: every kernel of so small a layer takes
    its launch, and what follows a message waits for it."""
    data, tensor = axis_links(cluster.with_sizes(4), DeviceMesh(("data", "tensor"), (2, 2)))
    spans, now, sends = [], 0.0, list_messages(fault)

    def add(stream: str, seconds: float, words: str) -> None:
        nonlocal now
        spans.append(TraceSpan(stream, now, now + seconds, words))
        now += seconds

    for phase, kernels in KERNELS.items():
        add("compute", kernels * cluster.gpu.launch_s, phase)
        for _, what, size in (m for m in sends if m[0] == phase):
            add(
                "messages",
                collective_time("all_reduce", size, data if "data groups" in what else tensor)[0],
                f"{size} B",
            )
    return spans


def live(learner: Learner, values: Values) -> Live:
    """Return losses, weights, messages, a trace; then the fault, and how each shows."""
    fault = FAULTS[int(values["case"])]
    sick, well = train(fault), train("")
    numbers = {
        "first": sick["loss"][0],
        "last": sick["loss"][-1],
        "well_first": well["loss"][0],
        "well_last": well["loss"][-1],
        "apart": sick["apart"][-1],
        "bytes": sick["bytes"],
        "well_bytes": well["bytes"],
        "messages": len(sick["messages"]),
    }
    facts = {
        "fault": fault,
        "names": NAMES,
        "heads": HEADS,
        "kv": KV,
        "sick": sick,
        "well": well,
        "runs": {kind: train(kind) for kind in FAULTS},
        "apart_before": [(i, sick["apart"][i - 1]) for i in (1, 2, 10, 30, TURNS)],
        "time": trace_step(learner.cluster, fault)[-1].end,
        "planned_time": trace_step(learner.cluster, "")[-1].end,
    }
    pictures: dict[str, Picture] = {
        "losses": _losses_chart(sick, well),
        "trace": _trace_chart(learner.cluster, fault),
    }
    return Live(facts, pictures, numbers)


def _losses_chart(sick: dict[str, Any], well: dict[str, Any]) -> Drawing:
    curves = {
        name: lambda i, run=run: run["loss"][int(i) - 1] for name, run in (("one GPU", well), ("four GPUs", sick))
    }
    turns = [float(i) for i in range(1, TURNS + 1)]
    return plot(turns, curves, "step", "loss on all samples", units.whole, "{:.3g}".format)


def _trace_chart(cluster: Cluster, fault: str) -> Drawing:
    """Return the step in time, beside the plan's."""
    colours = {"forward": COMPUTE, "backward": DEVICES[4], "update": DEVICES[2]}
    tracks, end = [], 0.0
    for name, which in (("plan", ""), ("this run", fault)):
        spans = trace_step(cluster, which)
        end = max(end, spans[-1].end)
        for stream in ("compute", "messages"):
            here = [(s.start, s.end, s.words, colours.get(s.words, COMMUNICATION)) for s in spans if s.stream == stream]
            tracks.append((f"{name}: {stream}", here))
    return timeline(tracks, units.seconds, end)


LESSON = read_lesson("11-debug", live)
