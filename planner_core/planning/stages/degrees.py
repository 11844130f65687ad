"""The degrees of pipeline stages: how many, on what mesh each, how many micro-batches; and how long their step takes at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner_core.core import Cluster, DeviceMesh, InputError, Pipeline, axis_names, divisors
from planner_core.cost import check_micro_batches

MICRO_BATCHES = (1, 2, 4)
"""Samples of a micro-batch on one data-parallel rank. With stages small ones are best: more of them make a smaller bubble."""
VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8)
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many stages, on what, and how many micro-batches. `samples`: of a micro-batch on one data-parallel rank."""

    ranks: int
    virtual: int
    data: int
    tensor: int
    samples: int
    micro_batches: int

    @property
    def schedule(self) -> str:
        """One stage a rank, or several in turn."""
        return "1f1b" if self.virtual == 1 else "interleaved"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of one rank's group."""
        if self.tensor == 1 or self.data == 1:
            return DeviceMesh(axis_names(1), (max(self.data, self.tensor),))
        return DeviceMesh(axis_names(2), (self.data, self.tensor))

    def least(self, whole_s: float) -> float:
        """Seconds that no cut is below, if the whole model takes `whole_s` on one rank's mesh for all micro-batches."""
        m, p = self.micro_batches, self.ranks
        return whole_s / p if self.virtual > 1 else whole_s / m / (1 - (1 - 1 / m) ** p)

    def hoped(self, one_s: float) -> float:
        """What a cut may take at least, if the whole model takes `one_s` for a micro-batch. Several stages a rank have equally many copies,
        so then the estimate is close."""
        return self.least(one_s * self.micro_batches) if self.virtual == 1 else self.about(one_s)

    @property
    def held(self) -> float:
        """Micro-batches of a whole rank that the first rank holds at most."""
        ahead = self.ranks if self.virtual == 1 else (self.virtual - 1) * self.ranks + 2 * self.ranks - 1
        return min(ahead / self.virtual, self.micro_batches)

    def about(self, one_s: float) -> float:
        """Seconds of a step with equal stages, if the whole model takes `one_s` for a micro-batch."""
        return one_s / self.ranks * (self.micro_batches + (self.ranks - 1) / self.virtual)


def every_degrees(cluster: Cluster, batch: int, calls: int) -> Iterator[Degrees]:
    """All degrees that suit a cluster, the samples of a step, and a model with so many copies of its blocks."""
    for ranks in divisors(cluster.num_gpus)[1:]:
        for tensor in divisors(cluster.levels[0].size):
            group = cluster.num_gpus // ranks
            if ranks > min(MOST_RANKS, calls) or group % tensor:
                continue
            for samples in MICRO_BATCHES:
                yield from _with_virtual(ranks, group // tensor, tensor, samples, batch, calls)


def _with_virtual(ranks: int, data: int, tensor: int, samples: int, batch: int, calls: int) -> Iterator[Degrees]:
    number, rest = divmod(batch, data * samples)
    if rest or number < ranks:
        return
    for virtual in VIRTUAL:
        d = Degrees(ranks, virtual, data, tensor, samples, number)
        try:
            check_micro_batches(Pipeline(ranks, d.schedule, (1,) * (ranks * virtual)), number)
        except InputError:
            continue
        if calls >= ranks * virtual:
            yield d
