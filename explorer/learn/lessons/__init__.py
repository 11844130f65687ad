"""The lessons, in order."""

from explorer.learn.lesson import Lesson
from explorer.learn.lessons.basics import l01_memory, l02_cuts, l03_placements, l04_collectives
from explorer.learn.lessons.layers import l05_mlp, l06_heads, l07_sequence, l08_backward, l23_debug
from explorer.learn.lessons.planners import (
    l09_folding,
    l10_topology,
    l11_two_dims,
    l12_experts,
    l13_choose,
    l21_uneven,
    l22_long,
    l24_think,
)
from explorer.learn.lessons.times import (
    l14_pays,
    l15_step,
    l16_zero,
    l17_memory_walk,
    l18_micro_batches,
    l19_measured,
    l20_algorithms,
)

LESSONS: tuple[Lesson, ...] = (
    l01_memory.LESSON, l02_cuts.LESSON, l03_placements.LESSON, l04_collectives.LESSON, l05_mlp.LESSON, l06_heads.LESSON,
    l07_sequence.LESSON, l08_backward.LESSON, l09_folding.LESSON, l10_topology.LESSON, l11_two_dims.LESSON,
    l12_experts.LESSON, l13_choose.LESSON, l14_pays.LESSON, l15_step.LESSON, l16_zero.LESSON, l17_memory_walk.LESSON,
    l18_micro_batches.LESSON, l19_measured.LESSON, l20_algorithms.LESSON, l21_uneven.LESSON, l22_long.LESSON, l23_debug.LESSON,
    l24_think.LESSON,
)  # fmt: skip
