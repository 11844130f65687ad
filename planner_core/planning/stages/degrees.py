"""The degrees of pipeline parallelism (stages, mesh of each stage, micro-batches), with bounds on the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner_core.core import Cluster, DeviceMesh, InputError, Pipeline, PipelineAxis, axis_names, divisors
from planner_core.cost import check_micro_batches

MICRO_BATCH_SAMPLES = (1, 2, 4)
"""Samples of a micro-batch on one data-parallel rank. Small micro-batches suit stages, since more of them make a smaller bubble."""
STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 7, 8)
MAX_RANKS = 64
ModelKey = tuple[int, int, int, int, int, str]
"""What a search of the whole model on the mesh of a rank depends on: ranks and their place, tensor degree, samples, ZeRO stage, and what
inner ranks share."""


@dataclass(frozen=True, slots=True)
class Breadth:
    """How many degrees a search of stages looks at.

    Attributes:
        bounded: Whole models that are bounded, beyond which only degrees that need no further one are tried.
        searched: Whole models of which cuts are searched.
        failures: The search ends for a ZeRO stage after cuts of this many degrees in a row of which none was quicker.
        samples: Samples of a micro-batch on one data-parallel rank; empty: any.
        least_gain: How many times as quick as the known plan of one stage a plan must be.
        counts_models: Whether failures of one whole model count once, as they always do for a tool, whose policies are few.
    """

    bounded: int
    searched: int
    failures: int
    samples: tuple[int, ...] = ()
    least_gain: float = 1.0
    counts_models: bool = True


# More cuts of one whole model cost little, except of thousands of layers: each of 16 cuts of a T5 of 2 x 1 001 layers took a second.
FIRST_SEARCH = (Breadth(bounded=3, searched=2, failures=2, samples=(1,), least_gain=1.2, counts_models=False),)
"""A search of about a second for a first answer, where stages are much quicker. Mostly it ends near the best plan: Llama-3-70B on 8 nodes
with 12.5 GB/s takes 27.9 s in one stage, 5.9 s by this search and 5.75 s by the whole one."""
WHOLE_SEARCH = (*FIRST_SEARCH, Breadth(bounded=20, searched=10, failures=5))
"""The whole search begins as the first one, so its plan is no worse than that of the first answer."""


@dataclass(frozen=True, slots=True)
class PipelineDegrees:
    """Ranks of the pipeline, stages of each rank, the data and tensor degrees of a rank's mesh, and the micro-batches of a step.

    `samples`: the samples of a micro-batch on one data-parallel rank. `zero`: the ZeRO stage that weights may have. `outer`: how many axes
    of a rank's mesh lie outside of the pipeline's (`PipelineAxis`). `inner`: what the tensor ranks share where a tool has to be told
    (`Inner`); empty if every operator may use them in its own way."""

    ranks: int
    virtual: int
    data: int
    tensor: int
    samples: int
    micro_batches: int
    zero: int = 1
    outer: int = 0
    inner: str = ""

    @property
    def whole_model(self) -> ModelKey:
        """The degrees on which a search of the whole model on the mesh of a rank depends."""
        return self.ranks, self.outer, self.tensor, self.samples, self.zero, self.inner

    @property
    def gpu_work(self) -> tuple[int, int, str]:
        """The degrees that have to be alike for the same work per GPU."""
        return self.tensor, self.samples, self.inner

    @property
    def pipe(self) -> PipelineAxis:
        """The axis of the pipeline in the mesh of all GPUs."""
        return PipelineAxis(self.ranks, self.outer)

    @property
    def schedule(self) -> str:
        """1F1B for one stage a rank, interleaved 1F1B for several."""
        return "1f1b" if self.virtual == 1 else "interleaved"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of one pipeline rank."""
        if self.tensor == 1 or self.data == 1:
            return DeviceMesh(axis_names(1), (max(self.data, self.tensor),))
        return DeviceMesh(axis_names(2), (self.data, self.tensor))

    def lower_bound_s(self, model_s: float) -> float:
        """Return a lower bound on the step of any cut without work once a step. `model_s`: seconds of the whole model on one rank's mesh,
        for all micro-batches.

        For 1F1B the head of `stages.search` derives the bound. Several stages a rank share the work evenly at best."""
        m, p = self.micro_batches, self.ranks
        return model_s / p if self.virtual > 1 else model_s / m / (1 - (1 - 1 / m) ** p)

    def mean_wait_s(self, copy_s: float, send_s: float) -> float:
        """Return the seconds that the ranks of any cut wait on average, for micro-batches that come and gradients that go back.

        Before rank r begins turn j, a micro-batch runs through all j p + r stages before, with as many sends, while r has run the p
        micro-batches of its own j stages. Over all ranks these stages are the same, so what is left are the sends, and in turn j the stages
        before r, of a copy each at least. So each turn bounds the waits, and the last one has the most sends. Gradients go back alike.

        Args:
            copy_s: Seconds of a copy's forward and backward.
            send_s: Seconds of a send and of its gradient's way back.
        """
        # Example: 4 ranks of two stages, copies of 1 s, sends of 0.1 s: 1.5 s for copies, and 4 + 1.5 sends take 0.55 s.
        # Rounds of more micro-batches than ranks give a rank more to do in the meantime: the first turn has no other before it.
        turn = 0 if self.micro_batches % self.ranks else self.virtual - 1
        behind_first = (self.ranks - 1) / 2
        return behind_first * copy_s + (turn * self.ranks + behind_first) * send_s

    def optimistic_s(self, micro_batch_s: float) -> float:
        """Optimistic seconds of a step. `micro_batch_s`: seconds of the whole model for one micro-batch.

        The search cuts interleaved stages into equally many copies, so for those the estimate for equal stages is close."""
        return (
            self.lower_bound_s(micro_batch_s * self.micro_batches)
            if self.virtual == 1
            else self.equal_stages_s(micro_batch_s)
        )

    @property
    def in_flight(self) -> float:
        """Micro-batches in flight on the first rank at most, counted over all stages of the rank."""
        # 1F1B: rank 0 runs one forward for each rank before its first backward. Interleaved: Megatron-LM's warm-up, in stages.
        # Example with 4 ranks: 4 in 1F1B; of 2 stages a rank (4 + 7) / 2 = 5.5.
        warm_up = self.ranks if self.virtual == 1 else (self.virtual - 1) * self.ranks + 2 * self.ranks - 1
        return min(warm_up / self.virtual, self.micro_batches)

    def equal_stages_s(self, micro_batch_s: float) -> float:
        """Return the seconds of a step with equal stages. `micro_batch_s`: seconds of the whole model for one micro-batch."""
        # Example: 4 s, 4 ranks, 8 micro-batches: 1 s * (8 + 3) = 11 s; of 2 stages a rank the bubble is half: 1 s * (8 + 1.5) = 9.5 s.
        return micro_batch_s / self.ranks * (self.micro_batches + (self.ranks - 1) / self.virtual)


def list_degrees(cluster: Cluster, batch: int, copies: int, *, deals: bool = False) -> Iterator[PipelineDegrees]:
    """Yield all degrees that suit a cluster, a batch of samples a step, and a model of this many copies of blocks. `deals`: also those with
    as many times the samples as there are tensor ranks, among which a tool may deal them out beside the experts."""
    # One rank is a plan without stages, which the other search finds.
    for ranks in divisors(cluster.num_gpus)[1:]:
        # Tensor ranks stay off the network between nodes, whose links are the slowest.
        for tensor in divisors(cluster.near_gpus):
            group = cluster.num_gpus // ranks
            if ranks > min(MAX_RANKS, copies) or group % tensor:
                continue
            more = tuple(n * tensor for n in MICRO_BATCH_SAMPLES) if deals else ()
            for samples in dict.fromkeys((*MICRO_BATCH_SAMPLES, *more)):
                yield from _degrees_on_mesh(ranks, group // tensor, tensor, samples, batch, copies)


def _degrees_on_mesh(
    ranks: int, data: int, tensor: int, samples: int, batch: int, copies: int
) -> Iterator[PipelineDegrees]:
    micro_batches, remainder = divmod(batch, data * samples)
    if remainder or micro_batches < ranks:
        return
    for virtual in STAGES_PER_RANK:
        degrees = PipelineDegrees(ranks, virtual, data, tensor, samples, micro_batches)
        try:
            check_micro_batches(Pipeline(ranks, degrees.schedule, (1,) * (ranks * virtual)), micro_batches)
        except InputError:
            continue
        # A stage has at least one copy of a repeated block.
        if copies >= ranks * virtual:
            yield degrees
