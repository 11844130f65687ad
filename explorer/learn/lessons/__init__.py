"""The lessons, in order."""

from explorer.learn.lesson import Lesson
from explorer.learn.lessons.basics import l01_memory, l02_cuts, l03_placements, l04_collectives
from explorer.learn.lessons.layers import l05_mlp, l06_heads, l07_sequence, l08_backward, l11_debug
from explorer.learn.lessons.planners import (
    l10_topology,
    l12_experts,
    l13_choose,
    l20_uneven,
    l21_long,
    l22_two_dims,
    l23_folding,
    l24_think,
)
from explorer.learn.lessons.times import (
    l09_algorithms,
    l14_pays,
    l15_step,
    l16_zero,
    l17_memory_walk,
    l18_micro_batches,
    l19_measured,
    l25_pipeline,
)

LESSONS: tuple[Lesson, ...] = tuple(
    module.LESSON
    for module in (
        l01_memory,
        l02_cuts,
        l03_placements,
        l04_collectives,
        l05_mlp,
        l06_heads,
        l07_sequence,
        l08_backward,
        l09_algorithms,
        l10_topology,
        l11_debug,
        l12_experts,
        l13_choose,
        l14_pays,
        l15_step,
        l16_zero,
        l17_memory_walk,
        l18_micro_batches,
        l19_measured,
        l20_uneven,
        l21_long,
        l22_two_dims,
        l23_folding,
        l24_think,
        l25_pipeline,
    )
)

CHAPTERS = {
    "One GPU, and what a cut sends": range(1, 5),
    "The parts of a layer": range(5, 9),
    "Links and groups": range(9, 12),
    "Experts, and a first choice": range(12, 14),
    "Time and memory of a step": range(14, 20),
    "Uneven experts, long texts": range(20, 22),
    "How planners think": range(22, 25),
    "Pipeline stages": range(25, 26),
}
"""The numbers of the lessons in each chapter."""

FORMER = [
    "memory",
    "cuts",
    "placements",
    "collectives",
    "mlp",
    "heads",
    "sequence",
    "backward",
    "folding",
    "topology",
    "two-dimensions",
    "experts",
    "choose",
    "pays",
    "step",
    "zero",
    "memory-walk",
    "micro-batches",
    "measured",
    "algorithms",
    "uneven-experts",
    "long-sequences",
    "debug",
    "planners",
]
"""Keys by the numbers that addresses and cookies once had: an old link still names the same lesson."""


def key_of(text: str) -> str:
    """The key that a text means: itself, or that of the lesson which once had this number; empty if no lesson has it."""
    if text.isascii() and text.isdecimal() and len(text) < 6:
        return FORMER[int(text) - 1] if 1 <= int(text) <= len(FORMER) else ""
    return text if any(x.key == text for x in LESSONS) else ""


def by_key(key: str) -> Lesson:
    """The lesson of a key that `key_of` gave."""
    return next(x for x in LESSONS if x.key == key)
