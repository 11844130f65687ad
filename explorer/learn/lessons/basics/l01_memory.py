"""1. Why split at all? A run that does not fit, and memory of a training step against the GPU's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from explorer.figures.palette import MEMORY_KINDS, MEMORY_NAMES
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import sketch_memory_by_gpus
from explorer.learn.lessons.stacks import StepSettings, megatron_memory, peak_before_gradients, smallest_memory
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.charts import memory_pieces
from explorer.learn.pictures.vessels import draw_vessels
from explorer.text import units

GPUS = (1, 2, 4, 8)
BYTES = {4: ("sgd", "pure"), 8: ("adamw", "pure"), 18: ("adamw", "mixed")}
"""Optimizer and precision by the bytes per parameter that they take: weights, gradients, optimizer states."""
SHARES = {4: (2, 2, 0), 8: (2, 2, 4), 18: (6, 4, 8)}
"""The same bytes by kind. Mixed precision: weights in 16 bits to compute with and in fp32 to keep, gradients and AdamW's two averages in fp32."""
BYTES_WITH_16_BIT_GRADIENTS = 16
"""Where gradients stay in 16 bits (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020)."""


def step_settings(values: Values) -> StepSettings:
    """Return what the learner chose to keep."""
    optimizer, precision = BYTES[int(values["bytes"])]
    return StepSettings(optimizer, precision, str(values["recompute"]))


def memory_of_gpu(learner: Learner, batch: int, num_gpus: int, keeps: StepSettings) -> tuple[dict[str, int], bool]:
    """Return the bytes by kind on one of `num_gpus` GPUs of one node, and whether Megatron-LM splits this model so far. "early" is the
    fullest moment before the first gradient, of which "early_activations" are activations."""
    one = Learner(replace(learner.request, batch=batch, mesh=None, dtype="bfloat16"), learner.load)
    megatron = megatron_memory(one, num_gpus, keeping=keeps) if num_gpus > 1 else None
    early, activations = peak_before_gradients(one, num_gpus, bool(megatron), keeps)
    sizes_ = megatron or smallest_memory(one, num_gpus, keeps)
    return {**sizes_, "early": early, "early_activations": activations}, bool(megatron) or num_gpus == 1


def gpu_counts(learner: Learner) -> list[int]:
    """Return how many GPUs the stacks are for: powers of two within one node."""
    return [n for n in GPUS if n <= learner.cluster.levels[0].size]


@remember(128)
def memory_by_gpus(learner: Learner, batch: int, keeps: StepSettings) -> dict[int, tuple[dict[str, int], bool]]:
    """Return `memory_of_gpu` by the number of GPUs."""
    return {n: memory_of_gpu(learner, batch, n, keeps) for n in gpu_counts(learner)}


def live(learner: Learner, values: Values) -> Live:
    """Return the run as it stands; what stays, kind by kind; the fullest moment; then the fullest moment on more GPUs."""
    each, room, params = int(values["bytes"]), learner.usable_bytes, learner.graph.num_params
    limit = (float(room), f"a plan may fill {units.memory(room)}")
    memories = memory_by_gpus(learner, int(values["batch"]), step_settings(values))
    n = min(int(values["gpus"]), max(memories))
    stacks = {k: sizes_ for k, (sizes_, _) in memories.items()}
    numbers: dict[str, float] = {"room": room, "params": params, "kept": each * params, "n": n}
    numbers |= {"shared_whole": whole_activation_bytes(memories)}
    numbers |= {f"{k}_{kind}": v for k, sizes_ in stacks.items() for kind, v in sizes_.items()}
    numbers["fits_from"] = next((k for k, sizes_ in stacks.items() if sizes_["peak"] <= room), 0)
    pictures: dict[str, Picture] = {"run": draw_vessels(n, memory_pieces(stacks[n]), limit)}
    peaks = {k: numbers[f"{k}_peak"] for k in memories}
    shares = {k: _describe_share(numbers, k) for k in memories}
    sketch = sketch_memory_by_gpus(peaks, limit, numbers["shared_whole"], numbers["1_early_activations"])
    weights, gradients, averages = SHARES[each]
    facts = {
        "stacks": stacks,
        "by_bytes": {
            e: {kind: share * params for kind, share in zip(MEMORY_KINDS, SHARES[e], strict=False)} for e in BYTES
        },
        "parts": [(MEMORY_NAMES[k].lower(), stacks[n][k]) for k in MEMORY_KINDS if stacks[n].get(k)],
        "weights": weights,
        "gradients": gradients,
        "averages": averages,
        "sixteen": BYTES_WITH_16_BIT_GRADIENTS,
        "words": learner.graph.config.get("vocab_size"),
        "sketch": bool(sketch),
        "shares": shares,
        "uneven": [k for k, (_, usual) in memories.items() if not usual],
    }
    return Live(facts, pictures | ({"sketch": sketch} if sketch else {}), numbers)


def whole_activation_bytes(memories: Mapping[int, tuple[Mapping[str, int], bool]]) -> float:
    """Return the bytes of activations that every GPU keeps whole: `whole + split / n` are those of n GPUs before the first gradient, read
    off one and the most GPUs. 0 where the GPUs do not share as Megatron-LM does."""
    n = max(memories)
    one, most = (memories[k][0]["early_activations"] for k in (1, n))
    return (n * most - one) / (n - 1) if n > 1 and memories[n][1] and one and most else 0.0


def _describe_share(numbers: Mapping[str, float], n: int) -> str:
    """Return what each of n GPUs holds at its fullest moment, from what the lesson shows of one: before the first gradient, or with all of
    them."""
    shared, early, peak = (numbers[name] for name in ("shared_whole", "1_early", "1_peak"))
    if shared + (early - shared) / n < peak / n:
        return f"1/{n} of {units.memory(peak)}"
    return f"{units.memory(shared)} whole and 1/{n} of the other {units.memory(early - shared)}"


LESSON = read_lesson("01-memory", live)
