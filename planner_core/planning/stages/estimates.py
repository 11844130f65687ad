"""Rough seconds of a step for any degrees of a pipeline. They only order the degrees, so that those that may win are searched first.

    equal stages + recomputation in proportion to the missing memory + traffic of weights that compute does not hide + sends

The place of the pipeline's axis decides which traffic crosses nodes. Example: 2 nodes of 4 GPUs, 2 ranks, each with 4 data-parallel GPUs.
If the pipeline's axis is the outer one, every stage is a node: gradients stay inside it, and stages send between nodes. If it is the inner
one, each node has two GPUs of every stage: stages send inside a node, and gradients are summed between nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner_core.core import ITEM_BYTES, Plan
from planner_core.cost import cost_model_of, least_boundary_bytes, least_host_seconds
from planner_core.cost.communication import AxisLink, collective_time, pipe_link, rank_links
from planner_core.cost.memory import WeightBytes, has_working_copy, weight_bytes
from planner_core.planning.methods import Inner, ToolStages
from planner_core.planning.planner import Planner
from planner_core.planning.stages.degrees import PipelineDegrees
from planner_core.planning.stages.tool_forms import layout_of_tool

MIN_ACTIVATION_SHARE, RECOMPUTE_OVERHEAD = 0.04, 0.33
"""The least share of activations under recomputation, and the most that it adds to a step."""
COMPUTE_SHARE, COMPUTE_SHARE_WITHOUT_RECOMPUTE = 0.85, 0.75
"""The least compute of other degrees, as a share of the compute of the plan of one stage: products have other shapes, and that plan
may compute its forward pass twice."""
FORWARD_SHARE = 1 / 3
"""The forward's share of a micro-batch: the backward of a product has two products."""


@dataclass(frozen=True)
class DegreeEstimates:
    """The estimates of one request. `planner`: its planner. `zero_stages`: the ZeRO stages that it allows, the lowest first. `form`: what
    the request's tool can be told."""

    planner: Planner
    zero_stages: tuple[int, ...]
    form: ToolStages | None = None

    def estimate(
        self, d: PipelineDegrees, micro_batch_s: float, activation_bytes: float
    ) -> Iterator[tuple[float, PipelineDegrees]]:
        """Estimate the degrees at each ZeRO stage that they may need, each with the pipeline's axis in its best place.

        Args:
            d: The degrees.
            micro_batch_s: Seconds of a micro-batch of the whole model on the mesh of a rank.
            activation_bytes: What a GPU keeps of such a micro-batch.
        """
        # A rank keeps 1 / ranks of a micro-batch's activations, `in_flight` times. Example: in 1F1B with 4 ranks the first one keeps
        # 4 quarters, as much as the whole model keeps of one micro-batch.
        need = activation_bytes * d.in_flight / d.ranks
        for zero in self.zero_stages:
            free_bytes = self.planner.budget - self._state_bytes(replace(d, zero=zero))
            if free_bytes >= MIN_ACTIVATION_SHARE * need:
                recompute = RECOMPUTE_OVERHEAD * max(0.0, 1 - free_bytes / need) if need else 0.0
                seconds = micro_batch_s * (1 + recompute)
                yield min(
                    ((self._step_s(at, seconds), at) for at in self.places(replace(d, zero=zero))),
                    key=lambda pair: pair[0],
                )
            if free_bytes >= need or d.data == 1:
                break  # a higher stage has nothing to gain

    def places(self, d: PipelineDegrees) -> Iterator[PipelineDegrees]:
        """Yield the degrees with the pipeline's axis in each place whose links differ from those of all earlier places."""
        seen: list[tuple[AxisLink, ...]] = []
        # The outermost place comes first, whatever place `d` has: what the tensor ranks have there is the measure for the others.
        for outer in range(len(d.mesh.axis_sizes) + 1):
            at = replace(d, outer=outer)
            if self.form and layout_of_tool(self.form, at) is None:
                continue
            links = (*rank_links(self.planner.cluster, d.mesh, at.pipe), self._pipe_link(at))
            # Tensor ranks send most, so they stay on the links that they have where nothing lies between them.
            if links not in seen and not (seen and d.tensor > 1 and links[-2].levels != seen[0][-2].levels):
                seen.append(links)
                yield at

    def _step_s(self, d: PipelineDegrees, micro_batch_s: float) -> float:
        stage_s = micro_batch_s / d.ranks
        scatter_s, gather_s = self._weight_traffic_s(d)
        # ZeRO-3 gathers weights for forward and again for backward, in every micro-batch; ZeRO-2 scatters gradients in each.
        every = (scatter_s if d.zero > 1 else 0.0) + (2 * gather_s if d.zero > 2 else 0.0)
        # What comes once a step lies beside one pass. Gradients of stage 1 leave beside the last backward, weights come beside the
        # first forward.
        once = max(0.0, scatter_s - (1 - FORWARD_SHARE) * stage_s) if d.zero < 2 else 0.0
        once += max(0.0, gather_s - FORWARD_SHARE * stage_s) if d.zero < 3 else 0.0
        return d.equal_stages_s(max(micro_batch_s, every * d.ranks)) + once + self._exposed_sends_s(d, micro_batch_s)

    def _exposed_sends_s(self, d: PipelineDegrees, micro_batch_s: float) -> float:
        """Return the seconds of sends between stages that a step waits for."""
        send_s = self.least_send_s(d)
        # A rank has at most `in_flight` micro-batches on their way through all stages and back, so as many take one trip. Example: 4 ranks
        # in 1F1B, 1 s of work for a micro-batch and 0.1 s a send: a trip of 1 + 6 * 0.1 = 1.6 s for 4 micro-batches, each of which is
        # 0.25 s of work for a rank. So 0.15 s of 0.4 s are waits.
        trip_s = micro_batch_s + 2 * (d.ranks * d.virtual - 1) * send_s
        return d.micro_batches * max(0.0, trip_s / d.in_flight - micro_batch_s / d.ranks)

    def least_send_s(self, d: PipelineDegrees) -> float:
        """Return the seconds that no plan sends a micro-batch from one stage to the next in less than."""
        # Long sequences and wide models shard the residual stream over the tensor ranks, for memory's sake, so each sends its part.
        sent = int(d.ranks * d.samples * self._sample_bytes / d.tensor)
        return collective_time("send_recv", sent, self._pipe_link(d))[0]

    def _weight_traffic_s(self, d: PipelineDegrees) -> tuple[float, float]:
        """Return the seconds to scatter all gradients of a rank once over the data axis, and those to gather all of its weights once."""
        if d.data == 1:
            return 0.0, 0.0
        params = self._params_of_rank(d)
        link = rank_links(self.planner.cluster, d.mesh, d.pipe)[0]
        scatter_s = collective_time("reduce_scatter", int(params * self._weight_bytes.gradient), link)[0]
        return scatter_s, collective_time("all_gather", int(params * self._weight_bytes.working), link)[0]

    def _state_bytes(self, d: PipelineDegrees) -> float:
        """Return the bytes of weights, gradients and optimizer states that a GPU holds."""
        of, load = self._weight_bytes, self.planner.workload
        shards = d.data if d.zero else 1
        gathered = d.zero > 2 and shards > 1
        stored = (of.stored + of.moments) / shards
        copied = has_working_copy(ITEM_BYTES[load.dtype], True, load, gathered or shards == 1, gathered)
        gradients = of.gradient / (shards if d.zero > 1 else 1)
        return self._params_of_rank(d) * (stored + (of.working if copied else 0) + gradients)

    def _params_of_rank(self, d: PipelineDegrees) -> float:
        """Return the parameters of a GPU's part of a rank's stages, before they are sharded over the data axis."""
        # Context ranks hold the same weights. Where every operator chooses, most products are sharded; and most weights are experts'.
        return self._num_params / (d.ranks * (d.tensor if d.inner in ("", Inner.TENSOR, Inner.EXPERT) else 1))

    @functools.cached_property
    def _weight_bytes(self) -> WeightBytes:
        load = self.planner.workload
        return weight_bytes(ITEM_BYTES[load.dtype], True, load)

    def _pipe_link(self, d: PipelineDegrees) -> AxisLink:
        return pipe_link(self.planner.cluster, d.mesh, d.pipe)

    @functools.cached_property
    def _num_params(self) -> int:
        return self.planner.graph.num_params

    @functools.cached_property
    def _sample_bytes(self) -> float:
        """Bytes that pass between two stages for one sample, where the fewest do."""
        return least_boundary_bytes(self.planner.graph.top) / self.planner.workload.batch


def least_host_s(planner: Planner, plan: Plan) -> tuple[float, float]:
    """Return the least seconds in which a host issues a micro-batch of the whole model, and what comes once a step, on a plan's
    software."""
    one, two = (least_host_seconds(planner.graph, cost_model_of(plan), n) for n in (1, 2))
    return two - one, 2 * one - two


def least_compute_s(plan: Plan) -> float:
    """Return the least compute of a step that degrees of stages are taken to have beside a plan of one stage."""
    without_recompute = COMPUTE_SHARE_WITHOUT_RECOMPUTE if plan.workload.recompute != "none" else 1.0
    return COMPUTE_SHARE * without_recompute * plan.cost.gpu_compute_s
