"""20. Experts, uneven: the hottest expert, capacity and dropped tokens, and what of it the planner prices."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES
from explorer.figures.svg_tensors import amount, svg, table
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.times.stated import halved, names, stated, texts
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars, columns
from explorer.text import units
from planner_core.planning.methods import Layout

EXPERTS, TOKENS, GPU_TOKENS = 8, 256, 2048
SKEWS: dict[Choice, str] = {0: "none", 1: "a little", 2: "much", 3: "very much"}
FACTORS: dict[Choice, str] = {0: "no limit", 100: "1", 125: "1.25", 200: "2"}
CODE = """\
import torch

tokens, experts, factor = 256, 8, 1.25
gen = torch.Generator().manual_seed(0)
liked = torch.linspace(1, 0, experts)[torch.randperm(experts, generator=gen)]  # the router likes some more
chosen = (torch.randn(tokens, experts, generator=gen) + 2 * liked).argmax(1)
load = torch.bincount(chosen, minlength=experts)
capacity = int(factor * tokens / experts)
kept = load.clamp(max=capacity)
hottest, mean = int(load.max()), tokens / experts
print("tokens of each expert", load.tolist())
print(f"hottest {hottest} of a mean of {mean:g}: {hottest / mean:.2f} times as long, {1 - mean / hottest:.0%} of the time waiting")
print(f"capacity {capacity}: dropped {int((load - kept).sum())}, empty places {int((capacity - kept).sum())}")
"""


@lru_cache(maxsize=64)
def chosen(skew: int, seed: int) -> tuple[int, ...]:
    """The expert of each of `TOKENS` tokens, when the router likes some experts more."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    liked = torch.linspace(1, 0, EXPERTS)[torch.randperm(EXPERTS, generator=gen)]
    scores = torch.randn(TOKENS, EXPERTS, generator=gen) + skew * liked
    return tuple(int(x) for x in scores.argmax(1))


def routed(skew: int, seed: int) -> tuple[int, ...]:
    """How many tokens go to each expert."""
    experts = chosen(skew, seed)
    return tuple(experts.count(i) for i in range(EXPERTS))


def at_home(skew: int, seed: int) -> tuple[int, ...]:
    """How many of each expert's tokens live on its GPU already; an eighth of all tokens lives on each, in order."""
    experts, each = chosen(skew, seed), TOKENS // EXPERTS
    return tuple(experts[i * each : (i + 1) * each].count(i) for i in range(EXPERTS))


def limited(load: tuple[int, ...], factor: int) -> tuple[int, int, int]:
    """Places of each expert at a capacity factor in hundredths, tokens dropped, places left empty. Without a limit (0) experts
    compute just their tokens, so nothing is empty."""
    if factor == 0:
        return max(load), 0, 0
    capacity = factor * TOKENS // (100 * EXPERTS)
    dropped = sum(max(0, x - capacity) for x in load)
    return capacity, dropped, EXPERTS * capacity - (TOKENS - dropped)


def experts_s(learner: Learner) -> float:
    """Seconds of all layers' experts forward on one GPU with `GPU_TOKENS` tokens, if all are equally busy."""
    return learner.experts().flops * GPU_TOKENS / learner.cluster.gpu.flops_per_s(learner.planner.workload.dtype)


@lru_cache(maxsize=16)
def planned(learner: Learner) -> float:
    """Seconds of a step of the learner's model under FSDP on the learner's cluster, as the planner prices it."""
    found, samples, _ = texts(learner, GPU_TOKENS)
    made = stated(found, names(found.cluster)["FSDP (ZeRO-3)"], samples)
    assert made, "FSDP splits samples only"
    return made.plan.cost.step_time_s


def dealt_to(learner: Learner) -> int:
    """The number of GPUs that share the model's experts, each with as many; 1 where they cannot be dealt out evenly. At most as many as
    experts are drawn, whose loads the prices take."""
    return math.gcd(learner.cluster.num_gpus, learner.experts().count, EXPERTS)


def fullest(load: tuple[int, ...], devices: int) -> float:
    """The load of the fullest of `devices` GPUs over the mean, if the experts are dealt out to them in order."""
    each = EXPERTS // devices
    return max(sum(load[i * each : (i + 1) * each]) for i in range(devices)) * devices / sum(load)


@lru_cache(maxsize=64)
def dealt(learner: Learner, imbalance: float) -> float:
    """The same with experts dealt out, where the fullest GPU has `imbalance` times the mean of the tokens; 0 where they cannot be dealt out."""
    fair, samples, _ = texts(learner, GPU_TOKENS)
    devices, n = dealt_to(learner), fair.cluster.num_gpus
    found = Learner(replace(fair.request, expert_imbalance=imbalance), fair.load)
    made = stated(found, Layout(fsdp=n, ep=devices), samples) if devices > 1 else None
    return made.plan.cost.step_time_s if made else 0.0


def scene(learner: Learner, values: Values) -> Scene:
    """Loads, the hottest, capacity, messages, and what the planner prices."""
    learner, stands_in = learner.routed()
    learner, numbers_note = halved(learner)
    load, home = (f(int(values["skew"]), int(values["seed"])) for f in (routed, at_home))
    factor, hidden = int(values["factor"]), learner.experts().hidden
    hottest, mean = max(load), TOKENS / EXPERTS
    capacity, dropped, empty = limited(load, factor)
    balanced, uneven = experts_s(learner), fullest(load, dealt_to(learner))
    prices = planned(learner), dealt(learner, 1.0), dealt(learner, uneven)
    steps = (
        _loads(load, mean),
        _hottest(hottest, mean),
        _waiting(load, mean, balanced, learner),
        _capacity(load, factor),
        _messages(load, home, hidden),
        _planner(prices, learner, uneven),
    )
    numbers = {
        "hottest": hottest, "mean": mean, "ratio": hottest / mean, "capacity": capacity, "dropped": dropped, "empty": empty,
        "most_arrive": 2 * hidden * max(x - y for x, y in zip(load, home, strict=True)), "experts_s": balanced, "step_s": prices[0], "dealt_s": prices[1], "uneven_s": prices[2], "tokens": sum(load),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=2, note=f"{stands_in} {numbers_note}".strip())


def _loads(load: tuple[int, ...], mean: float) -> Step:
    says = (
        f"{TOKENS} tokens, {EXPERTS} experts, one expert on each of {EXPERTS} GPUs (lesson 12). The router sends each token to one expert. Routers are learned, "
        f"and learn to like some experts more; even a fair one is not even. The mean is {mean:g} tokens. No expert turns a token away yet: capacity comes in step 4."
    )
    items = [(f"expert {i}", float(x)) for i, x in enumerate(load)]
    return Step(
        "Who is asked",
        says,
        svg(
            columns(items, "tokens", COMPUTE, load.index(max(load)), (mean, f"mean {mean:g}")), "Tokens of each expert"
        ),
    )


def _hottest(hottest: int, mean: float) -> Step:
    rows = [
        StackedBar("mean", (BarPiece("tokens", mean, COMPUTE),)),
        StackedBar("hottest", (BarPiece("tokens", float(hottest), COMMUNICATION, True),)),
    ]
    says = (
        f"The hottest expert has {hottest} tokens, the mean is {mean:g}. All GPUs compute at the same time, each its own expert's tokens, and then exchange "
        "results. How much of their time do they wait for the hottest?"
    )
    return Step("The hottest", says, svg(bars(rows, units.significant), "Tokens of the hottest expert and the mean"))


def _waiting(load: tuple[int, ...], mean: float, balanced: float, learner: Learner) -> Step:
    hottest, used = max(load), learner.experts().used
    items = [
        StackedBar(f"GPU {i}", (BarPiece("computes", x / mean * balanced, COMPUTE), BarPiece("waits", (hottest - x) / mean * balanced, DEVICES[7], True)))
        for i, x in enumerate(load)
    ]  # fmt: skip
    idle = 1 - mean / hottest
    says = (
        f"**{units.significant(hottest / mean)} times**: everybody waits for the hottest. {units.percent(idle)} of the GPUs' time is spent waiting. The bars are all "
        f"experts of {learner.name} forward, {units.whole(GPU_TOKENS)} tokens per GPU and {used} expert{'s' * (used > 1)} a token, if every choice were spread like these; equal loads take {units.seconds(balanced)}."
    )
    return Step(
        "Everybody waits",
        says,
        svg(
            bars(items, units.seconds, (balanced, f"equal loads: {units.seconds(balanced)}")),
            "Compute and waiting of each GPU",
        ),
    )


def _capacity(load: tuple[int, ...], factor: int) -> Step:
    rows = []
    for f, name in FACTORS.items():
        capacity, dropped, empty = limited(load, int(f))
        slow = capacity * EXPERTS / TOKENS
        rows.append(
            (name, str(capacity), f"{dropped} ({units.percent(dropped / TOKENS)})", str(empty), units.significant(slow))
        )
    says = (
        f"A **capacity factor** gives each expert so many times the mean as places ({TOKENS} / {EXPERTS} = {TOKENS // EXPERTS}). What comes beyond is dropped: the token passes the "
        "layer unchanged. Places nobody takes are filled with zeros and computed all the same. A small factor is quick and loses tokens; a large one computes zeros. Others "
        "drop nothing and wait, and teach the router to be fair with a loss of its own."
    )
    head = ("capacity factor", "places each", "tokens dropped", "empty places", "times the even time")
    return Step("Capacity", says, table(head, rows, list(FACTORS).index(factor)))


def _messages(load: tuple[int, ...], home: tuple[int, ...], hidden: int) -> Step:
    came = [x - y for x, y in zip(load, home, strict=True)]
    items = [
        StackedBar(f"GPU {i}", (BarPiece("arrives", 2.0 * x * hidden, COMMUNICATION),)) for i, x in enumerate(came)
    ]
    most, least = came.index(max(came)), came.index(min(came))
    says = (
        f"The all_to_all is uneven too. {TOKENS // EXPERTS} of the {TOKENS} tokens live on each GPU, {units.whole(hidden)} numbers of 2 bytes each. GPU {most} works on {load[most]} tokens; "
        f"{home[most]} are at home there, so {came[most]} arrive: {amount(2 * came[most] * hidden)}. At GPU {least} {amount(2 * came[least] * hidden)} arrive. The exchange ends when the fullest link is done. How much each one gets is known only when the "
        "router has run: the GPUs first tell each other the numbers, which is one more small message."
    )
    return Step("Messages", says, svg(bars(items, amount), "Bytes that arrive at each GPU"))


def _planner(prices: tuple[float, float, float], learner: Learner, uneven: float) -> Step:
    fsdp, fair, unfair = map(units.seconds, prices)
    devices = dealt_to(learner)
    rows = [("FSDP: each GPU gathers all experts", fsdp)]
    says = (
        f"A step of {learner.name} on your cluster, as the planner prices it. It knows neither capacity nor dropped tokens: what a router does depends on the data, "
        "not on the plan. Under FSDP each GPU computes all experts for its own tokens, so their loads do not matter to it. "
    )
    if prices[1]:
        rows += [
            (f"experts dealt out to {devices} GPUs (ep={devices}), a fair router", fair),
            (f"the same, the fullest GPU with {uneven:.2f} times the mean", unfair),
        ]
        says += (
            f"With whole experts dealt out, tokens travel to them (lesson 12), and all wait for the fullest GPU. **The planner takes routing to be fair** unless "
            f"`--expert-imbalance` says how full the fullest GPU is: the last line is with your router's {uneven:.2f} in every layer."
        )
    else:
        says += "Your GPUs cannot share the experts evenly, so they are not dealt out here."
    return Step("What the planner prices", says, table(("", "step"), rows))


def question(learner: Learner, values: Values) -> Question:
    """What share of the GPUs' time is spent waiting?"""
    load = routed(int(values["skew"]), int(values["seed"]))
    hottest, least, mean = max(load), min(load), TOKENS / EXPERTS
    right = 100 * (1 - mean / hottest)
    why = (
        f"All {EXPERTS} GPUs take the time of {hottest} tokens, {EXPERTS} · {hottest} in all, and compute {TOKENS}: {TOKENS} / {EXPERTS * hottest} = {units.percent(mean / hottest)} is work, "
        f"the rest waiting. The layer takes {hottest} / {mean:g} = {units.significant(hottest / mean)} times as long as with equal loads."
    )
    wrong = (
        (100 * (hottest / mean - 1), "That is how much longer the layer takes than with equal loads. Compare the waiting with the time that it does take."),
        (100 * mean / hottest, "That is the share in which they compute. What is the rest?"),
        (100 * (1 - least / hottest), f"That is the least busy GPU's, with {least} token{'s' * (least != 1)}. Take all {EXPERTS} together."),
        (100 * hottest / TOKENS, "That is the share of the tokens that the hottest expert has."),
        (100 * (EXPERTS - 1) / EXPERTS, "That would be so if one expert had all the tokens."),
        (0.0, "The others are done sooner, but the layer waits for the last one: that is idle time."),
    )  # fmt: skip
    return typed(
        f"The hottest of {EXPERTS} experts has {hottest} of {TOKENS} tokens, and the layer is done when its last GPU is. What share of all GPUs' time is spent waiting?",
        "per cent", (right, why), wrong, lambda value: f"{units.significant(value, 2)} %",
    )  # fmt: skip


LESSON = Lesson(
    20, "uneven-experts", "Experts, uneven", "A layer of experts is as slow as its hottest expert.",
    (
        "Lesson 12 had a fair router. Real ones are not. Choose how unfair it is and how many places each expert has.",),
    (
        ("Hottest expert", "the one with the most tokens; the others wait for it"),
        ("Capacity factor", "how many times its fair share of tokens an expert takes before it drops them"),
    ),
    (
        Control("skew", "How unfair the router is", tuple(SKEWS), 2, SKEWS, "slider"),
        Control("factor", "Capacity factor", tuple(FACTORS), 125, FACTORS, "slider", step=4),
        Control("seed", "Other tokens", tuple(range(6)), 0, kind="draw"),
    ),
    scene, question, CODE, ("fold", "The experts of this model (Mixtral-8x7B if it has none)"), uses_model=True, focus=links.experts,
)  # fmt: skip
