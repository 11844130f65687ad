"""20. Experts, uneven: the hottest expert, capacity and dropped tokens, and what of it the planner prices."""

from __future__ import annotations

import math
from dataclasses import replace

from explorer.figures.palette import COMPUTE
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.times.stated import price_layout, price_usual, with_16_bit_products, with_samples
from explorer.learn.markdown import Live, read_lesson
from explorer.learn.pictures.charts import columns
from planner_core.planning.methods import Layout

EXPERTS, TOKENS, GPU_TOKENS = 8, 256, 2048


@remember(64)
def choose_experts(skew: int, seed: int) -> tuple[int, ...]:
    """Return the expert of each of `TOKENS` tokens, when the router likes some experts more."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    # Which expert is liked most is drawn too.
    liked = torch.linspace(1, 0, EXPERTS)[torch.randperm(EXPERTS, generator=gen)]
    scores = torch.randn(TOKENS, EXPERTS, generator=gen) + skew * liked
    return tuple(int(x) for x in scores.argmax(1))


def tokens_by_expert(skew: int, seed: int) -> tuple[int, ...]:
    """Return how many tokens go to each expert."""
    experts = choose_experts(skew, seed)
    return tuple(experts.count(i) for i in range(EXPERTS))


def tokens_at_home(skew: int, seed: int) -> tuple[int, ...]:
    """Return how many of each expert's tokens live on its GPU already; an eighth of all tokens lives on each, in order."""
    experts, each = choose_experts(skew, seed), TOKENS // EXPERTS
    return tuple(experts[i * each : (i + 1) * each].count(i) for i in range(EXPERTS))


def apply_capacity(load: tuple[int, ...], factor: int) -> tuple[int, int, int]:
    """Return the places of each expert at a capacity factor in hundredths, tokens dropped, places left empty. Without a limit (0) experts
    compute just their tokens, so nothing is empty."""
    if factor == 0:
        return max(load), 0, 0
    capacity = factor * TOKENS // (100 * EXPERTS)
    dropped = sum(max(0, x - capacity) for x in load)
    return capacity, dropped, EXPERTS * capacity - (TOKENS - dropped)


def expert_compute_s(learner: Learner) -> float:
    """Return the seconds of all layers' experts forward on one GPU with `GPU_TOKENS` tokens, if all are equally busy."""
    return learner.experts().flops * GPU_TOKENS / learner.cluster.gpu.flops_per_s(learner.planner.workload.dtype)


@remember(16)
def fsdp_step_s(learner: Learner) -> float:
    """Return the seconds of a step of the learner's model under FSDP on the learner's cluster, as the planner prices it."""
    return price_usual(learner, "FSDP (ZeRO-3)", GPU_TOKENS).plan.cost.step_time_s


def expert_parallel_size(learner: Learner) -> int:
    """Return the number of GPUs that share the model's experts, each with as many; 1 where they cannot be dealt out evenly. At most as many
    as experts are drawn, whose loads the prices take."""
    # An even share for each GPU: the number must divide the GPUs, the model's experts, and the loads that are drawn.
    return math.gcd(learner.cluster.num_gpus, learner.experts().count, EXPERTS)


def fullest_over_mean(load: tuple[int, ...], devices: int) -> float:
    """Return the load of the fullest of `devices` GPUs over the mean, if the experts are dealt out to them in order."""
    each = EXPERTS // devices
    return max(sum(load[i * each : (i + 1) * each]) for i in range(devices)) * devices / sum(load)


@remember(64)
def expert_parallel_step_s(learner: Learner, imbalance: float) -> float:
    """Return the same with experts dealt out, where the fullest GPU has `imbalance` times the mean of the tokens; 0 where they cannot be
    dealt out."""
    fair, samples, _ = with_samples(learner, GPU_TOKENS)
    devices, n = expert_parallel_size(learner), fair.cluster.num_gpus
    uneven = Learner(replace(fair.request, expert_imbalance=imbalance), fair.load)
    priced = price_layout(uneven, Layout(fsdp=n, ep=devices), samples) if devices > 1 else None
    return priced.plan.cost.step_time_s if priced else 0.0


def live(learner: Learner, values: Values) -> Live:
    """Return loads, the hottest, capacity, messages, and what the planner prices."""
    learner, stands_in = learner.routed()
    learner, numbers_note = with_16_bit_products(learner)
    load, home = (f(int(values["skew"]), int(values["seed"])) for f in (tokens_by_expert, tokens_at_home))
    factors, hidden = LESSON.controls[1], learner.experts().hidden
    hottest, mean = max(load), TOKENS / EXPERTS
    capacity, dropped, empty = apply_capacity(load, int(values["factor"]))
    balanced, uneven = expert_compute_s(learner), fullest_over_mean(load, expert_parallel_size(learner))
    prices = fsdp_step_s(learner), expert_parallel_step_s(learner, 1.0), expert_parallel_step_s(learner, uneven)
    came = [x - y for x, y in zip(load, home, strict=True)]
    numbers = {
        "hottest": hottest,
        "mean": mean,
        "ratio": hottest / mean,
        "capacity": capacity,
        "dropped": dropped,
        "empty": empty,
        "most_arrive": 2 * hidden * max(came),
        "experts_s": balanced,
        "step_s": prices[0],
        "dealt_s": prices[1],
        "uneven_s": prices[2],
        "tokens": sum(load),
    }
    facts = {
        "fair": mean,
        "experts": EXPERTS,
        "gpu_tokens": GPU_TOKENS,
        "used": learner.experts().used,
        "hidden": hidden,
        "arrivals": [{"gpu": i, "load": load[i], "home": home[i], "came": came[i]} for i in range(EXPERTS)],
        "uneven": uneven,
        "deals_to": expert_parallel_size(learner),
        "factors": [(f, factors.name(f), *apply_capacity(load, int(f))) for f in factors.options],
        "halved": numbers_note,
    }
    loads = [(f"expert {i}", float(x)) for i, x in enumerate(load)]
    chart = columns(loads, "tokens", COMPUTE, load.index(hottest), (mean, f"mean {mean:g}"))
    return Live(facts, {"loads": chart}, numbers, learner, stands_in)


LESSON = read_lesson("20-uneven-experts", live)
