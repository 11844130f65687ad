"""14. When does it pay? Compute against wires: the roofline, tokens per GPU, link speed, and the planner's own prices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import amount, svg, table
from explorer.learn.learner import Layer, Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.predictions import waits_by_tokens
from explorer.learn.lessons.times.stated import Stated, at_tokens, names, node, stated, texts
from explorer.learn.pictures.charts import BarPiece, Line, StackedBar, bars, plot
from explorer.text import units
from planner_core.core import Cluster, DeviceMesh, Gpu
from planner_core.cost.communication import axis_links, collective_time
from planner_core.planning.analysis import doubt_between
from planner_core.planning.methods import Layout

TOKENS = (512, 1024, 2048, 4096, 8192)
SPEEDS = (1, 2, 4, 8, 16)
"""Eighths of the links' own speed."""
SPEED_NAMES: dict[Choice, str] = {1: "1/8", 2: "1/4", 4: "1/2", 8: "as it is", 16: "twice"}
ITEM_BYTES = 2
CODE = """\
import torch
from torch.utils.flop_counter import FlopCounterMode

tokens, hidden, inner, keys = 1024, 4096, 14336, 1024  # the lesson's tokens, a layer of Llama-3-8B
x, w = torch.empty(tokens, hidden, device="meta"), torch.empty(hidden, inner, device="meta")
with FlopCounterMode(display=False) as counted:  # PyTorch's own counter; it needs shapes only
    y = x @ w
moved = 2 * (x.numel() + w.numel() + y.numel())  # 2 bytes a number in bf16
print(f"intensity {counted.get_total_flops() / moved:.0f} FLOP per byte")

weights = hidden * (2 * hidden + 2 * keys + 3 * inner)  # q and o, k and v, gate, up and down
flops_per_s, gather = 626.2e12, 1.340e-3  # what training reaches on an H100; seconds of the gather over 16 of them
compute = 2 * weights * tokens / flops_per_s
print(f"weights {weights}: gather {1e3 * gather:.2f} ms, compute {1e3 * compute:.3f} ms")
print(f"crossing at {gather / compute * tokens:.0f} tokens per GPU")
"""


@dataclass(frozen=True, slots=True)
class Wires:
    """One layer, forward, on one GPU: seconds per token of compute, of one gather of its weights, per token of its two sums."""

    weights: int
    compute_s: float
    gather_s: float
    sums_s: float
    degree: int

    @property
    def crossing(self) -> float:
        """Tokens per GPU from which on compute is longer than the gather."""
        return self.gather_s / self.compute_s


def layer_weights(layer: Layer) -> int:
    """Parameters of a layer's products: q, k, v, o, and two or three of the feed-forward part."""
    heads, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return layer.hidden * (2 * heads + 2 * keys + (2 + layer.gated) * layer.inner)


def scaled(cluster: Cluster, eighths: int) -> Cluster:
    """The cluster with its outermost links at so many eighths of their speed."""
    return cluster.with_bandwidth(eighths / 8, len(cluster.levels) - 1)


def wires(learner: Learner, tokens: int, speed: int) -> Wires:
    """What a layer computes and sends: gathered over all GPUs (FSDP), or summed inside a node (tensor parallelism)."""
    layer, cluster = learner.layer(), scaled(learner.cluster, speed)
    weights, n, t = layer_weights(layer), cluster.num_gpus, node(cluster)
    compute = 2 * weights / cluster.gpu.flops_per_s(learner.planner.workload.dtype)
    everyone = axis_links(cluster, DeviceMesh(("shard",), (n,)))[0]
    gather = collective_time("all_gather", ITEM_BYTES * weights, everyone)[0]
    return Wires(weights, compute, gather, sums_s(layer, cluster, t, tokens) / tokens, t)


def sums_s(layer: Layer, cluster: Cluster, degree: int, tokens: int) -> float:
    """Seconds of a layer's two all_reduces forward over `degree` neighbours with `tokens` for each GPU of the group."""
    if degree == 1:
        return 0.0
    mesh = DeviceMesh(("data", "tensor"), (cluster.num_gpus // degree, degree))
    num_bytes = tokens * degree * layer.hidden * ITEM_BYTES
    return 2 * collective_time("all_reduce", num_bytes, axis_links(cluster, mesh)[1])[0]


def contenders(cluster: Cluster) -> dict[str, Layout]:
    """Four ways to use all GPUs, by name."""
    usual, t = names(cluster), node(cluster)
    rest = cluster.num_gpus // t
    tensor = Layout(fsdp=rest, tp=t, sp=True) if rest > 1 else Layout(tp=t, sp=True)
    hybrid = {"HSDP": usual["HSDP"]} if rest > 1 else {}
    return {
        "ZeRO-1": usual["ZeRO-1"], "FSDP": usual["FSDP (ZeRO-3)"], **hybrid,
        f"tensor parallel {t}": tensor,
    }  # fmt: skip


@lru_cache(maxsize=64)
def priced(learner: Learner, tokens: int) -> dict[str, Stated]:
    """The planner's plan of each contender that the model can follow, with so many tokens per GPU."""
    learner, samples, _ = texts(learner, tokens)
    found = {name: stated(learner, layout, samples) for name, layout in contenders(learner.cluster).items()}
    return {name: case for name, case in found.items() if case}


def winner(cases: dict[str, Stated], cluster: Cluster) -> str:
    """The quickest contender that fits, else the one that needs the least memory."""
    quickest = ranking(cases, cluster)
    return quickest[0] if quickest else min(cases, key=lambda name: cases[name].plan.cost.memory_bytes["peak"])


def ranking(cases: dict[str, Stated], cluster: Cluster) -> list[str]:
    """The contenders that fit, the quickest first."""
    took = {name: sum(case.seconds(cluster)) for name, case in cases.items() if case.plan.fits}
    return sorted(took, key=lambda name: took[name])


def cell(cases: dict[str, Stated], cluster: Cluster) -> str:
    """The quickest that fits, and every other that ties with it."""
    order = ranking(cases, cluster)
    if not order:
        return "none fits"
    first = cases[order[0]]
    limits = {
        name: (1 + doubt_between(first.plan, cases[name].plan, cluster)) * sum(first.seconds(cluster)) for name in order
    }
    return " ≈ ".join(name for name in order if sum(cases[name].seconds(cluster)) <= limits[name])


def beside(named: str) -> str:
    """What the sign of a tie means, where there is one among what is named."""
    return " Behind a ≈ stands what the prediction does not tell from the first." if "≈" in named else ""


def scene(learner: Learner, values: Values) -> Scene:
    """The roofline, a gather against compute, the crossing, sums by degree, the planner's prices, and the map."""
    tokens, speed = int(values["tokens"]), int(values["speed"])
    learner, _, note = texts(learner, max(TOKENS))
    layer, cluster, gpu = learner.layer(), scaled(learner.cluster, speed), learner.cluster.gpu
    w, cases, dtype = wires(learner, tokens, speed), priced(learner, tokens), learner.planner.workload.dtype
    best = winner(cases, cluster)
    steps = (
        _roofline(layer, gpu, dtype, tokens),
        _gather(learner, w, tokens),
        _waits(learner, speed),
        _crossing(w, tokens),
        _degrees(layer, cluster, w, tokens),
        _prices(cases, cluster, best, tokens),
        _map(learner),
    )
    numbers = {
        "tokens": tokens, "gather_s": w.gather_s, "compute_s": w.compute_s * tokens, "sums_s": w.sums_s * tokens,
        "crossing": w.crossing, "weights": w.weights, "ridge": ridge(gpu, dtype), "intensity": intensity(layer, tokens, 1),
        **{f"{name}_s": sum(case.seconds(cluster)) for name, case in cases.items()},
    }  # fmt: skip
    return Scene(steps, numbers, reveal=2, note=note)


def ridge(gpu: Gpu, dtype: str) -> float:
    """FLOPs per byte from which on a GPU is limited by its arithmetic in `dtype`."""
    return gpu.flops_per_s(dtype) / gpu.bytes_per_s


def intensity(layer: Layer, tokens: int, degree: int) -> float:
    """FLOPs per byte of memory traffic of the first product of the feed-forward part, its outputs split over `degree`."""
    m, k, n = tokens, layer.hidden, layer.inner / degree
    return 2 * m * k * n / (ITEM_BYTES * (m * k + k * n + m * n))


def _sheet(gpu: Gpu, dtype: str) -> str:
    peaks = dict(gpu.peak_flops)
    return units.significant(peaks.get(dtype, min(peaks.values())) / gpu.memory_bytes_per_s)


def _roofline(layer: Layer, gpu: Gpu, dtype: str, tokens: int) -> Step:
    peak, memory, top = gpu.flops_per_s(dtype), gpu.bytes_per_s, ridge(gpu, dtype)
    at, one = intensity(layer, tokens, 1), intensity(layer, 1, 1)
    xs = [0.5, 1, top, 1e4]
    line = Line("what the GPU can reach", tuple((x, min(peak, x * memory)) for x in xs), COMPUTE)
    picture = plot(
        [line], "FLOP per byte of memory traffic (intensity)", "reachable FLOP per second", "{:g}".format, units.count,
        [(one, f"1 token: {one:.2g}"), (top, f"ridge: {units.significant(top)}"), (at, f"yours: {units.significant(at)}")],
    )  # fmt: skip
    bound = "arithmetic" if at >= top else "memory: most of its arithmetic waits"
    says = (
        f"The first product of the feed-forward part: {units.whole(tokens)} tokens times a weight of {layer.hidden} × {layer.inner}. "
        f"It does {units.significant(at)} FLOP for each byte that it reads or writes. The {gpu.name} keeps its arithmetic busy from "
        f"**{units.significant(top)} FLOP per byte** on (at the rates that training runs reach; its data sheet gives {_sheet(gpu, dtype)}), so this product is limited by {bound}. A single token would give "
        f"{one:.2g}: the whole weight is read for one row."
    )
    return Step("A product on one GPU", says, svg(picture, "Roofline of the GPU with the layer's product"))


def _gather(learner: Learner, w: Wires, tokens: int) -> Step:
    rows = [
        StackedBar("compute", (BarPiece("compute of the layer, forward", w.compute_s * tokens, COMPUTE),)),
        StackedBar("gather", (BarPiece("all_gather of the layer's weights", w.gather_s, COMMUNICATION, True),)),
    ]
    says = (
        f"FSDP gathers each layer's weights before it computes: {amount(ITEM_BYTES * w.weights)} for {units.count(w.weights)} "
        f"parameters, **{units.seconds(w.gather_s)}** over {learner.cluster.num_gpus} GPUs. The gather is the same for any number of "
        f"tokens. Compute is not: 2 FLOP per parameter and token for the products alone, {units.seconds(1000 * w.compute_s)} for a thousand tokens. "
        "The next layer's gather runs beside this layer's compute, so it costs hardly anything while it is the shorter one."
    )
    return Step("Weights on the wires", says, svg(bars(rows, units.seconds), "Compute and gather of one layer"))


def _waits(learner: Learner, speed: int) -> Step:
    """A prediction to draw: what a layer waits for at few and at many tokens."""
    shown = (TOKENS[0], TOKENS[2], TOKENS[-1])
    found = {t: wires(learner, t, speed) for t in shown}
    w = found[shown[0]]
    compute, sums = {t: t * w.compute_s for t in shown}, {t: t * found[t].sums_s for t in shown}
    return waits_by_tokens(shown, w.gather_s, compute, sums, w.degree)


def _crossing(w: Wires, tokens: int) -> Step:
    xs = [2.0**k for k in range(6, 18)]
    found = [
        Line("compute", tuple((x, x * w.compute_s) for x in xs), COMPUTE),
        Line("gather of the weights (FSDP)", tuple((x, w.gather_s) for x in xs), COMMUNICATION, "7 4"),
    ]
    if w.sums_s:
        found.append(
            Line(f"two sums over {w.degree} GPUs (tensor)", tuple((x, x * w.sums_s) for x in xs), DEVICES[2], "2 3")
        )
    marks = [(float(tokens), f"yours: {units.whole(tokens)} tokens")]
    if xs[0] <= w.crossing <= xs[-1]:
        marks.append((w.crossing, f"crossing: {units.whole(w.crossing)} tokens"))
    side = (
        "above it: the gather hides" if tokens > w.crossing else "below it: the products alone do not hide the gather"
    )
    says = (
        f"Compute catches up with the gather at **{units.whole(w.crossing)} tokens per GPU**. You are {side}. Slower links "
        "between the nodes move the crossing to the right. Attention and norms, which lesson 15 counts too, move it to the left: they give the "
        "gather more to hide behind. The sums of tensor parallelism rise with the tokens as compute does: more tokens do not hide them, and the "
        "layer waits for them, unless its products are cut into chunks (lesson 22)."
    )
    picture = plot(found, "tokens per GPU", "time of one layer, forward", units.whole, units.seconds, marks)
    return Step("The crossing", says, svg(picture, "Time of a layer against tokens per GPU"))


def _degrees(layer: Layer, cluster: Cluster, w: Wires, tokens: int) -> Step:
    degrees = [t for t in (2, 4, 8, 16, 32) if cluster.num_gpus % t == 0 and layer.heads % t == 0]
    rows = []
    for t in degrees:
        sums, compute = sums_s(layer, cluster, t, tokens), w.compute_s * tokens
        where = "inside a node" if t <= node(cluster) else "leaves the node"
        rows.append((str(t), units.seconds(compute), units.seconds(sums), units.percent(sums / compute), where))
    says = (
        "Tensor parallelism of degree t: the group has t times the tokens and each GPU a t-th of every weight, so compute stays. "
        "What a layer waits for grows with the degree, and jumps where the group leaves the node. It pays where nothing else fits, or "
        "where there are too few samples for the GPUs."
    )
    head = ("degree", "compute", "two sums", "sums / compute", "")
    return Step("Up to which degree?", says, table(head, rows))


def _prices(cases: dict[str, Stated], cluster: Cluster, best: str, tokens: int) -> Step:
    items = []
    for name, case in cases.items():
        compute, shown, optimizer = case.seconds(cluster)
        parts = (
            BarPiece("compute", compute, COMPUTE),
            BarPiece("communication that shows", shown, COMMUNICATION, True),
            BarPiece("optimizer", optimizer, DEVICES[2]),
        )
        items.append(StackedBar(name, parts, "" if case.plan.fits else "does not fit", name == best))
    first = cell(cases, cluster)
    says = (
        f"Now the planner prices whole steps, {units.whole(tokens)} tokens per GPU, in mixed precision: every operator, every "
        f"collective, forward, backward and optimizer. Quickest of those that fit: **{first}**.{beside(first)} ZeRO-1 is data parallelism with the optimizer's "
        "states dealt out. Compute differs because FSDP copies each layer that it gathers, and ZeRO-1 adds up whole gradients; tensor "
        "parallelism reads a part of each weight for as many times the tokens. The optimizer takes longest where a "
        "GPU has most weights to update."
    )
    if "HSDP" in cases:
        says += " HSDP sums gradients twice, in the node and then over the nodes: more than the compute of few tokens hides."
    if not any(case.plan.fits for case in cases.values()):
        says = f"None of the four fits with {units.whole(tokens)} tokens per GPU; **{best}** needs the least memory. Take fewer tokens."
    return Step("The planner's prices", says, svg(bars(items, units.seconds), "Time of a step by layout"))


def _map(learner: Learner) -> Step:
    rows = []
    for count in TOKENS:
        cases, tokens = priced(learner, count), units.whole(count)
        rows.append((tokens, *(cell(cases, scaled(learner.cluster, speed)) for speed in SPEEDS)))
    outer = learner.cluster.levels[-1].name
    sends = [name for name in contenders(learner.cluster) if "tensor" not in name and name in " ".join(rows[-1][1:])]
    winners = f" (here {' and '.join(sends)})" if sends else ""
    says = (
        f"The quickest of the four that fits, by tokens per GPU and the speed of {outer}. Each cell is priced by the planner. "
        "Those that the prediction does not tell from it stand behind a ≈. Few tokens and slow links favour tensor parallelism "
        f"inside a node. With many tokens the ways that send weights win{winners}, as far as they fit."
    )
    return Step("The map", says, table(("tokens per GPU", *(f"{outer}: {SPEED_NAMES[s]}" for s in SPEEDS)), rows))


def question(learner: Learner, values: Values) -> Question:
    """From how many tokens per GPU on does compute hide the gather?"""
    tokens = int(values["tokens"])
    learner, _, _ = texts(learner, max(TOKENS))
    w = wires(learner, tokens, int(values["speed"]))
    right = w.crossing
    why = (
        f"{units.seconds(w.gather_s)} ÷ {units.seconds(w.compute_s)} per token = {units.whole(right)} tokens. Below that, "
        "each layer waits for its weights."
    )
    wrong = (
        (right / 1000, "That is in thousands of tokens: the compute given is that of a thousand."),
        (
            1e6 / right,
            "That is compute divided by the gather, the other way round: how many times does a thousand tokens' compute go into the gather?",
        ),
        (right / 2, "At half as many, compute is half as long as the gather, so half of the gather shows."),
        (right * 2, "That is safe, but too many: compute would be twice as long as the gather."),
        (right / w.degree, "A GPU's own tokens count here; nothing is divided by the GPUs of a node."),
        (
            1e3 * w.gather_s,
            "That is the gather's time in ms. Tokens are asked for: how many of them are computed in that time?",
        ),
        (
            1e6 * w.compute_s,
            "That is the time of a thousand tokens in ms. Tokens are asked for: how many of them does the gather last?",
        ),
        (float(tokens), "That is where you are, not where the two are equal."),
    )
    return typed(
        f"A layer's gather takes {units.seconds(w.gather_s)}, its compute {units.seconds(1000 * w.compute_s)} per thousand tokens. "
        "From how many tokens per GPU on is compute the longer one?",
        "tokens", (right, why), wrong, lambda value: f"about {units.significant(value, 2)} tokens",
    )  # fmt: skip


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The planner with the lesson's tokens and speed of links."""
    speed, outer = int(values["speed"]), learner.cluster.levels[-1]
    found = at_tokens(learner, int(values["tokens"]))
    place = dict(enumerate(("intra", "inter"))).get(len(learner.cluster.levels) - 1)
    if place and speed != 8:
        found[place] = f"{speed / 8 * outer.unit_bytes_per_s / 1e9:g}"
    return found


LESSON = Lesson(
    14, "pays", "When does it pay?", "Wires cost the same for weights whatever the batch; compute does not.",
    (
        "Which way to split is a matter of two speeds, of arithmetic and of wires, and of how many tokens each GPU has: another number of either, "
        "another winner. Model and cluster are yours; the tokens per GPU are this lesson's own.",),
    (
        ("FLOP", "one addition or multiplication of floating-point numbers"),
        ("Intensity", "FLOP per byte that is moved; the more, the less the wires matter"),
        ("Roofline", "what a GPU can reach: limited by memory below the ridge, by arithmetic above it"),
        ("ZeRO-1", "data parallelism that deals the optimizer's states out over the GPUs (lesson 16)"),
        ("HSDP", "FSDP inside each node, data parallelism between the nodes"),
    ),
    (
        Control("tokens", "Tokens per GPU", TOKENS, 1024, kind="slider"),
        Control("speed", "Speed of the outermost links", SPEEDS, 8, SPEED_NAMES, "slider", step=2),
    ),
    scene, question, CODE, ("plans", "Plan this model on your cluster"), uses_model=True,
    focus=focus,
)  # fmt: skip
