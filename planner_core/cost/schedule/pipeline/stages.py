"""A stage as a model of its own: the calls of its range and what stands around them, with the tensors that come from the stage before.

    whole      embedding  block 0  block 1  block 2  block 3  norm  head  loss
    stage 0    embedding  block 0  block 1                                          gives h
    stage 1    takes h                      block 2  block 3  norm  head  loss

A stage has the graph's own values, by their numbers, so a plan's blocks and sites stay as they are. An operator `receive` makes each
tensor that comes from the stage before. What a later stage needs is handed on by every stage between (an encoder's output, for example):
only neighbours talk.

A weight that several stages use (tied embeddings) is in each of them, and its gradient is summed between their ranks once a step. Stages
of one rank have one such weight: the first of them holds it, sums its gradient in its own last backward, which is the rank's last one that
makes a term of it, and updates it. The plan of the others does not place it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from planner_core.core import Block, BlockPlan, Call, Edge, Graph, InputError, Op, ParamPlan, Pipeline, SitePlan, State
from planner_core.cost.resolved_ops import RECEIVE, block_of
from planner_core.cost.schedule.pipeline.received import received_operands, without_copies


@dataclass(frozen=True)
class StagePlan:
    """One stage: its graph, its part of the plan's blocks by label, and the tensors that it takes from the stage before and hands on to the
    next one (by their numbers in the top block). `borrowed`: how weights lie that it reads and an earlier stage of its rank holds."""

    graph: Graph
    blocks: Mapping[str, BlockPlan]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    borrowed: Mapping[str, ParamPlan]

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for stages of one plan that cost the same: as many copies of each kind, the same operators around them, as much to send."""
        copies = tuple((label, len(block.prefixes)) for label, block in self.blocks.items())
        return (
            copies,
            tuple(op.name for op in self.computed_graph.top.ops),
            len(self.takes),
            len(self.gives),
            self.graph.buffer_bytes,
        )

    @functools.cached_property
    def computed_graph(self) -> Graph:
        """The stage's graph without what receives: the operators that have kernels, and collectives in the stage's mesh."""
        top = self.graph.top
        items = tuple(i for i in top.items if not (isinstance(i, Op) and i.fn == RECEIVE))
        return replace(self.graph, top=replace(top, items=items))


def stage_plans(blocks: Mapping[str, BlockPlan], graph: Graph, pipeline: Pipeline) -> tuple[StagePlan, ...]:
    """Return every stage of a plan of the whole model, in order. Raises InputError if a cut is where the model has none."""
    states = _DeliveredStates(blocks, graph)
    items = graph.top.items
    cuts = cut_items(graph, pipeline)
    # Boundary k is what stage k takes and what stage k - 1 gives, so the two always agree.
    crossing = _crossing_values(graph.top, cuts)
    labels = {prefix: label for label, block in blocks.items() for prefix in block.prefixes}
    plans = []
    known: dict[tuple[str, frozenset[int]], Block] = {}
    held: dict[int, set[str]] = {}  # by rank: the weights of the top block that its stages so far hold
    for stage in range(len(pipeline.copies)):
        stage_items = items[cuts[stage] : cuts[stage + 1]]
        takes, gives = crossing[stage], crossing[stage + 1]
        # Buffers are few bytes, and most are those of the whole model, so a rank counts all of them once.
        buffers = graph.buffer_bytes if stage < pipeline.ranks else 0
        stage_graph = replace(graph, top=_stage_top(graph.top, stage_items, takes, gives), buffer_bytes=buffers)
        stage_graph = _without_copies_of_received(stage_graph, takes, known)
        of_rank = held.setdefault(pipeline.rank_of(stage), set())
        stage_blocks, borrowed = _stage_blocks(blocks, stage_graph, states, labels, of_rank)
        of_rank.update(stage_blocks[""].params)
        plans.append(StagePlan(stage_graph, stage_blocks, takes, gives, borrowed))
    return tuple(plans)


def cut_items(graph: Graph, pipeline: Pipeline) -> tuple[int, ...]:
    """Return the first item of each stage in the top block, and the number of all items. Raises InputError if the calls are not as many."""
    at = graph.top.call_positions
    if sum(pipeline.copies) != len(at):
        raise InputError(
            f"the stages run {sum(pipeline.copies)} copies of blocks, and {graph.name} has {len(at)}; plan this model again"
        )
    begins = [pipeline.call_range(stage)[0] for stage in range(1, len(pipeline.copies))]
    inner = [at[first] if first < len(at) else at[-1] + 1 for first in begins]
    return (0, *inner, len(graph.top.items))


def with_parts(pipeline: Pipeline, graph: Graph) -> Pipeline:
    """Return the pipeline with the calls and the outer weights of each stage by name, as a run needs them."""
    items, cuts, values = graph.top.items, cut_items(graph, pipeline), graph.top.values
    parts = []
    for stage in range(len(pipeline.copies)):
        stage_items = items[cuts[stage] : cuts[stage + 1]]
        read = dict.fromkeys(values[v].name for i in stage_items for v in i.inputs if values[v].kind == "parameter")
        parts.append((*(i.prefix for i in stage_items if isinstance(i, Call)), *read))
    return replace(pipeline, parts=tuple(parts))


def even_copies(calls: int, stages: int) -> tuple[int, ...]:
    """Copies of each stage where all have as many, or one more: the first stages have more, since the last one has the model's head.
    Example: 7 calls in 2 stages are 4 and 3."""
    few, more = divmod(calls, stages)
    return (few + 1,) * more + (few,) * (stages - more)


def tied_weights(stages: Sequence[StagePlan]) -> dict[str, tuple[int, ...]]:
    """Return the weights of the top block that stages of several ranks use, by name: of each rank the stage that holds it."""
    users: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name in stage.blocks[""].params:
            users.setdefault(name, []).append(number)
    return {name: tuple(numbers) for name, numbers in users.items() if len(numbers) > 1}


def boundary_states(stage: StagePlan) -> dict[int, State]:
    """Return how each tensor that a stage takes lies on the mesh of its rank."""
    sites = stage.blocks[""].sites
    return {value: sites[f"{RECEIVE}.{value}"].outputs[0].dst for value in stage.takes}


def least_boundary_bytes(top: Block) -> int:
    """Return the bytes of the whole tensors that pass from one stage to the next, where the fewest do: between two copies of blocks."""
    cuts = top.call_positions[1:]
    return min(
        (sum(top.values[v].meta.num_bytes for v in crossing) for crossing in _crossing_values(top, cuts)), default=0
    )


def _crossing_values(top: Block, cuts: Sequence[int]) -> list[tuple[int, ...]]:
    """For each cut before an item: the activations that are made before it and used by it or behind it, in the order of these uses."""
    uses: dict[int, list[tuple[int, int]]] = {}  # (item, operand), ascending
    for k, item in enumerate(top.items):
        for operand, v in enumerate(item.inputs):
            uses.setdefault(v, []).append((k, operand))
    next_uses: list[list[tuple[tuple[int, int], int]]] = [[] for _ in cuts]
    for k, item in enumerate(top.items):
        for v in item.outputs:
            if top.values[v].kind != "activation" or v not in uses:
                continue
            # Used anywhere behind, not by the next stage alone: a tensor for a later stage is handed on by those between.
            for cut in range(bisect.bisect_right(cuts, k), bisect.bisect_right(cuts, uses[v][-1][0])):
                following = bisect.bisect_left(uses[v], (cuts[cut], 0))
                next_uses[cut].append((uses[v][following], v))
    return [tuple(v for _, v in sorted(of_cut)) for of_cut in next_uses]


def _stage_top(top: Block, items: Sequence[Op | Call], takes: Sequence[int], gives: tuple[int, ...]) -> Block:
    values = list(top.values)
    for v in takes:
        values[v] = replace(values[v], storage=v)  # what arrives is a tensor of its own
    # A stage keeps what it received until its backward is over, whether or not an operator needs it there.
    received = tuple(Op(f"{RECEIVE}.{v}", RECEIVE, (), (v,), {}, saved=(v,)) for v in takes)
    # The last stage hands nothing on: it returns the loss.
    outputs = gives or top.outputs
    return replace(top, values=tuple(values), items=(*received, *items), outputs=outputs)


def _without_copies_of_received(
    stage: Graph, takes: Sequence[int], known: dict[tuple[str, frozenset[int]], Block]
) -> Graph:
    """`known`: the blocks of stages before, by name and by the operands that they receive."""
    blocks = {}
    for name, received in received_operands(stage, takes).items():
        if (key := (name, received)) not in known:
            known[key] = without_copies(stage.blocks[name], received)
        blocks[name] = known[key]
    return replace(stage, blocks={**stage.blocks, **blocks})


def _stage_blocks(
    blocks: Mapping[str, BlockPlan],
    stage: Graph,
    states: _DeliveredStates,
    labels: Mapping[str, str],
    held: Collection[str],
) -> tuple[dict[str, BlockPlan], dict[str, ParamPlan]]:
    """Return the plan's blocks with the copies, sites and weights of one stage, and how the weights lie that it borrows. `labels`: of each
    copy, by its prefix. `held`: the weights that earlier stages of its rank hold."""
    top = stage.top
    read = {top.values[v].name for item in top.items for v in item.inputs if top.values[v].kind == "parameter"}
    whole = blocks[""]
    sites = {
        op.name: SitePlan((), (_receive_op(states.state_of(op.outputs[0])),))
        if op.fn == RECEIVE
        else whole.sites[op.name]
        for op in top.ops
    }
    params = {n: p for n, p in whole.params.items() if n in read}
    own = {n: p for n, p in params.items() if n not in held}
    stage_blocks = {"": replace(whole, sites=sites, params=own)}
    # Of the copies of this stage alone: a model of a thousand layers has a thousand stages of one copy each in `policy_from_plan`.
    prefixes: dict[str, list[str]] = {}
    for call in stage.calls():
        prefixes.setdefault(labels[call.prefix], []).append(call.prefix)
    for label in (label for label in blocks if label in prefixes):
        stage_blocks[label] = replace(blocks[label], prefixes=tuple(prefixes[label]))
    return stage_blocks, {n: p for n, p in params.items() if n in held}


def _receive_op(state: State) -> Edge:
    return Edge(state, state)


class _DeliveredStates:
    """The states in which activations of the top block are delivered."""

    def __init__(self, blocks: Mapping[str, BlockPlan], graph: Graph) -> None:
        self.blocks, self.graph = blocks, graph
        self.labels = {prefix: label for label, block in blocks.items() for prefix in block.prefixes}
        self.makers = {v: item for item in graph.top.items for v in item.outputs}
        self.known: dict[tuple[str, int], State] = {}

    def state_of(self, value: int) -> State:
        maker = self.makers[value]
        if isinstance(maker, Op):
            return self.blocks[""].sites[maker.name].outputs[maker.outputs.index(value)].dst
        # All copies of a label deliver alike, so the operators of each block are looked through once, at any depth.
        key = label, position = self.labels[maker.prefix], maker.outputs.index(value)
        if key not in self.known:
            block, plan = block_of(self.graph, label), self.blocks[label]
            inner = block.outputs[position]
            makers = [op for op in block.ops if inner in op.outputs]
            if not makers:
                return self.state_of(maker.inputs[block.inputs.index(inner)])  # the block hands on what it was given
            self.known[key] = plan.sites[makers[0].name].outputs[makers[0].outputs.index(inner)].dst
        return self.known[key]
