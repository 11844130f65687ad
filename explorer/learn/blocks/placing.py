"""The collectives that a placement of a block's weights causes: which one, where, and between which placements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from explorer.learn.learner import Learner
from planner_core.core import Block, BlockPlan, CallSite, Edge, Graph, Plan
from planner_core.cost import CostModel, Message, MessageSource, cost_model, message_time, plan_messages
from planner_core.planning import Planner
from planner_core.search.network import Network, Restriction, allow_only

OPERATOR_NAMES = {"scaled_dot_product_attention": "attention", "mul": "multiply"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMessage:
    """One collective of one copy of a block: `moved` is what it puts right, e.g. "result: P to R".

    `site`, `source` and `weight` say where it comes from in the plan (`planner_core.cost.Message`), `axes` are its mesh axes.
    """

    phase: str
    where: str
    moved: str
    kind: str
    num_bytes: int
    seconds: float
    site: str = ""
    source: MessageSource = MessageSource.INSIDE
    weight: str = ""
    axes: tuple[int, ...] = (0,)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The same message in another plan."""
        return self.phase, self.where, self.moved, self.kind


@dataclass
class PlacedBlock(Restriction):
    """The weights of one block as somebody placed them on the last axis, by name: "R", "S(0)" or "S(1)"."""

    name: str
    block: Block
    letters: dict[str, str]

    def apply(self, block: str, net: Network) -> None:
        """Forbid every other state of these weights."""
        for name, states in net.tensors.items() if block == self.name else ():
            value = self.block.values[int(name[1:])]
            if value.kind == "parameter" and value.name in self.letters:
                good = [str(pair[0]) == self.letters[value.name] for pair in states.axis_states]
                ok = np.array(good, dtype=bool)[states.index[:, -1]]
                net.factors.append(allow_only(name, ok))


def on_neighbours(learner: Learner, devices: int) -> Planner:
    """Return the learner's planner on `devices` GPUs of one node."""
    planner = learner.planner
    return planner.changed(cluster=planner.cluster.with_sizes(devices))


def list_messages(plan: Plan, planner: Planner, name: str) -> tuple[BlockMessage, ...]:
    """Return every collective of one copy of a block under a plan, in one micro-batch and once a step."""
    model = replace(
        cost_model(planner.cluster, plan.mesh, planner.workload), workload=replace(planner.workload, accumulate=1)
    )
    return _list_messages(model, planner.graph, plan.blocks[name], name)


MOVED_NAMES = {MessageSource.RESULT: "result", MessageSource.OPERAND: "input", MessageSource.WEIGHT: "weight"}
"""What a message moves, as a lesson calls it."""


def _list_messages(model: CostModel, graph: Graph, plan: BlockPlan, name: str) -> tuple[BlockMessage, ...]:
    block = graph.blocks[name]
    ops = {op.name for op in block.ops}
    # Messages are counted over all copies of a block: of a plan with one copy they are one copy's.
    one = replace(plan, prefixes=plan.prefixes[:1])
    rows = []
    for m in plan_messages({name: one}, graph, model):
        seconds = message_time(m, model)
        if m.site in ops:
            place = _place_name(CallSite.parse(m.site))
            moved = _describe_move(m, plan.sites[m.site].inputs, plan.sites[m.site].outputs)
        else:
            place, moved = short_name(m.site), f"{m.what}: P to R"
        size = m.count * m.num_bytes
        rows.append(
            BlockMessage(
                phase=m.phase,
                where=place,
                moved=moved,
                kind=m.kind,
                num_bytes=size,
                seconds=seconds,
                site=m.site,
                source=m.source,
                weight=m.weight,
                axes=m.axes,
            )
        )
    return tuple(rows)


def _describe_move(m: Message, inputs: tuple[Edge, ...], outputs: tuple[Edge, ...]) -> str:
    """Return what a message puts right, with the placements it goes between."""
    if m.source is MessageSource.INSIDE:
        return m.what
    edge = (outputs if m.source is MessageSource.RESULT else inputs)[m.position]
    name = MOVED_NAMES[m.source]
    steps = edge.backward if m.gradient else edge.forward
    step = next(s for s in steps if s.collective == m.kind)
    return f"{'gradient of ' * m.gradient}{name}: {step.src} to {step.dst}"


def short_name(weight: str) -> str:
    """Return `q_proj` of `self_attn.q_proj.weight`."""
    return weight.removesuffix(".weight").rpartition(".")[2]


def _place_name(site: CallSite) -> str:
    """Return a short name for a place in a block: its module where it has a weight of its own, else the operation."""
    module = (site.scope or site.fn).rpartition(".")[2]
    return module if site.fn == "linear" or "norm" in module else OPERATOR_NAMES.get(site.fn, site.fn)


def compare_messages(
    mine: tuple[BlockMessage, ...], best: tuple[BlockMessage, ...]
) -> tuple[list[BlockMessage], list[BlockMessage]]:
    """Return what only the first sends and what only the second, the slowest first."""
    return _only_in_first(mine, best), _only_in_first(best, mine)


def _only_in_first(these: tuple[BlockMessage, ...], those: tuple[BlockMessage, ...]) -> list[BlockMessage]:
    left = Counter(x.key for x in those)
    only = []
    for x in these:
        if left[x.key]:
            left[x.key] -= 1
        else:
            only.append(x)
    return sorted(only, key=lambda x: -x.seconds)
