"""Every collective of one step, read off a plan operator by operator: its kind, bytes and count, and what waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from planner_core.core import (
    ITEM_BYTES,
    PASSES,
    Block,
    BlockPlan,
    CallSite,
    CollectiveKind,
    Edge,
    Graph,
    InputError,
    Op,
    P,
    ParamPlan,
    Phase,
    Placements,
    R,
    SitePlan,
    Step,
    group_sums,
    joint_axes,
)
from planner_core.cost.communication.collectives import collective_time
from planner_core.cost.communication.redistribution import step_bytes
from planner_core.cost.compute import kernel_seconds
from planner_core.cost.memory.saved import Rerun, rerun_ops
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import block_of, rows_at
from planner_core.cost.step_time import waited_seconds
from planner_core.cost.units import Buckets

WAIT, OVERLAPPED, ONCE = "wait", "overlapped", "once"
"""An operator waits for it; it is weight traffic beside the compute of every micro-batch; or beside that of one micro-batch."""


class MessageSource(Enum):
    """The tensor that a message moves, or whose gradient it moves."""

    WEIGHT = "weight"
    OPERAND = "operand"
    RESULT = "result"
    INSIDE = "inside"  # an operator sends it itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective, and where it comes from, so that a total can be opened to its parts.

    `source` is the tensor that it moves, or with `gradient` the tensor whose gradient it moves; `position` is the tensor's place among the
    operands or results. `count` is how often it runs in one step: once for each copy of the block, and for
    each micro-batch unless it runs once a step.
    `label` is the block's label in the plan. `weight` is the parameter that it moves, if it moves one. `share` is its part of the
    message (see `units.Buckets`). `load`: how many times its bytes the fullest GPU sends or gets. `behind_s` are the seconds of
    a kernel of the same operator that runs meanwhile. `in_chunks`: the next chunk of a product is made meanwhile.
    """

    site: str
    phase: Phase
    kind: CollectiveKind
    axes: tuple[int, ...]
    num_bytes: int
    count: int
    category: str
    label: str = ""
    weight: str = ""
    share: float = 1.0
    load: float = 1.0
    behind_s: float = 0.0
    in_chunks: bool = False
    source: MessageSource = MessageSource.INSIDE
    gradient: bool = False
    position: int = 0

    @property
    def what(self) -> str:
        """What it moves, in words: `operand 0`, `gradient of mlp.up_proj.weight`, `working copy`."""
        if self.source is MessageSource.INSIDE:
            return f"inside {CallSite.parse(self.site).call}"
        if self.category == ONCE:
            return "gradient" if self.gradient else "working copy"
        tensor = self.weight if self.source is MessageSource.WEIGHT else f"{self.source.value} {self.position}"
        return f"gradient of {tensor}" if self.gradient else tensor


def recomputed_ops(block: Block, bp: BlockPlan) -> Mapping[str, Rerun]:
    """Return the operators of a block that run again in backward, and which parts of them do."""
    return {} if bp.recompute == "none" else rerun_ops(block, bp.kept)


def message_time(m: Message, model: CostModel) -> float:
    """Return the seconds of all runs of a message in one step."""
    return m.count * collective_time(m.kind, m.load * m.num_bytes, model.link(m.axes), m.share)[0]


def waited_message_seconds(m: Message, model: CostModel) -> float:
    """Return the seconds by which all runs of a message in one step delay its operator, or the next one."""
    each = collective_time(m.kind, m.load * m.num_bytes, model.link(m.axes), m.share)[0]
    return m.count * float(waited_seconds(each, m.behind_s, model.contention))


def plan_messages(blocks: Mapping[str, BlockPlan], graph: Graph, model: CostModel) -> Iterator[Message]:
    """Yield every collective of one step. Those of a repeated block appear once, with the number of copies in `count`."""
    micro_batches = model.workload.accumulate
    for label, bp in blocks.items():
        block = block_of(graph, label)
        for m in micro_batch_messages(block, bp, model):
            yield replace(m, count=m.count * len(bp.prefixes) * micro_batches, label=label)
        # Once a step, however many micro-batches: the count has the copies alone.
        for m in once_per_step_messages(block, bp, model):
            yield replace(m, count=len(bp.prefixes), label=label)


def micro_batch_messages(block: Block, bp: BlockPlan, model: CostModel) -> Iterator[Message]:
    """Yield the collectives of one copy of a block in one micro-batch."""
    reruns, buckets = recomputed_ops(block, bp), Buckets.of_block(block)
    for op in block.ops:
        yield from _site_messages(buckets, op, bp.sites[op.name], reruns, model)


def once_per_step_messages(block: Block, bp: BlockPlan, model: CostModel) -> Iterator[Message]:
    """Yield the collectives of one copy's weights that run once a step: working copies are gathered, gradients are reduced."""
    buckets = Buckets.of_block(block)
    by_name = {v.name: i for i, v in block.own_parameters.items()}
    for name, param in bp.params.items():
        if name not in by_name:
            raise InputError(
                f"the plan places a parameter {name!r} that the model does not have; plan this model again"
            )
        if block.values[by_name[name]].grad:
            yield from _weight_messages(buckets, by_name[name], name, param, model)


def _weight_messages(buckets: Buckets, value: int, name: str, param: ParamPlan, model: CostModel) -> Iterator[Message]:
    block, share = buckets.block, buckets.share(value)
    # Gradients that are summed late come whole to every rank, which then keeps its part.
    late = tuple(Step(axis, P, R) for axis in param.reduced_axes)
    moves = (
        (param.stored, param.refresh_steps()),
        (param.gradient, late if model.late_sums else param.reduce_steps()),
    )
    for phase, (start, steps) in zip(PASSES, moves, strict=True):
        gradient = phase == "backward"
        item = weight_gradient_item_bytes(block, value, model) if gradient else None
        for kind, axes, n in collectives_of_steps(block, value, steps, start, model, item, joint=True):
            yield Message(
                site=name,
                phase=phase,
                kind=kind,
                axes=axes,
                num_bytes=n,
                count=1,
                category=ONCE,
                weight=name,
                share=share,
                source=MessageSource.WEIGHT,
                gradient=gradient,
            )


def weight_gradient_item_bytes(block: Block, value: int, model: CostModel) -> int:
    """Return the bytes per element of a weight's gradient, as it is reduced."""
    return model.summed_item(ITEM_BYTES[block.values[value].meta.dtype])


def _site_messages(
    buckets: Buckets, op: Op, site: SitePlan, reruns: Mapping[str, Rerun], model: CostModel
) -> Iterator[Message]:
    block, rerun = buckets.block, reruns.get(op.name)
    for position, (value, edge) in enumerate(zip(op.inputs, site.inputs, strict=True)):
        yield from _operand_messages(buckets, op, position, value, edge, rerun is not None, model)
    yield from result_messages(block, op, site, rerun, model)
    yield from _internal_messages(block, op, site, model, rerun is not None and rerun.sends)


def result_messages(block: Block, op: Op, site: SitePlan, rerun: Rerun | None, model: CostModel) -> Iterator[Message]:
    """Yield the collectives of an operator's results, and of their gradients. `rerun`: what of it runs again in backward."""
    for position, (value, edge) in enumerate(zip(op.outputs, site.outputs, strict=True)):
        delivery = list(collectives_of_steps(block, value, edge.forward, edge.src.forward, model))
        kernel = _chunk_seconds(block, op, site, edge.chunks, model) if edge.chunks > 1 else 0.0
        message = partial(Message, site=op.name, count=1, category=WAIT, source=MessageSource.RESULT, position=position)
        for phase, steps in zip(PASSES, (delivery, delivery if rerun and rerun.delivers else []), strict=True):
            for kind, axes, n in steps:
                last = message(phase=phase, kind=kind, axes=axes, num_bytes=n // edge.chunks)
                if edge.chunks > 1:
                    yield replace(last, count=edge.chunks - 1, behind_s=kernel, in_chunks=True)
                yield last
        for kind, axes, n in collectives_of_steps(block, value, edge.backward, edge.dst.gradient, model):
            yield message(phase="backward", kind=kind, axes=axes, num_bytes=n, gradient=True)


def _chunk_seconds(block: Block, op: Op, site: SitePlan, chunks: int, model: CostModel) -> float:
    """Return the seconds of one chunk of a product."""
    return kernel_seconds(op, block.values, rows_at(block, op, site), model, chunks)[0] / chunks


def _operand_messages(
    buckets: Buckets, op: Op, position: int, value: int, edge: Edge, recomputed: bool, model: CostModel
) -> Iterator[Message]:
    block, share = buckets.block, buckets.share(value)
    v = block.values[value]
    weight = v.kind == "parameter"
    category, source = (OVERLAPPED, MessageSource.WEIGHT) if weight else (WAIT, MessageSource.OPERAND)
    delivery = list(collectives_of_steps(block, value, edge.forward, edge.src.forward, model))
    # A gathered weight is freed after forward. Backward gathers it again only if its kernel reads the weight.
    regather = weight and value in op.saved
    message = partial(
        Message,
        site=op.name,
        count=1,
        category=category,
        weight=v.name,
        share=share,
        source=source,
        position=position,
    )
    for phase, steps in zip(PASSES, (delivery, delivery if regather or recomputed else []), strict=True):
        yield from (message(phase=phase, kind=kind, axes=axes, num_bytes=n) for kind, axes, n in steps)
    item = weight_gradient_item_bytes(block, value, model) if weight else None
    for kind, axes, n in collectives_of_steps(block, value, edge.backward, edge.dst.gradient, model, item):
        yield message(phase="backward", kind=kind, axes=axes, num_bytes=n, gradient=True)


def _internal_messages(block: Block, op: Op, site: SitePlan, model: CostModel, recomputed: bool) -> Iterator[Message]:
    axis_rows = rows_at(block, op, site)
    hides = any(c.share for row in axis_rows for c in row.internal)
    kernels = kernel_seconds(op, block.values, axis_rows, model) if hides else (0.0, 0.0)
    for axis, (row, n) in enumerate(zip(axis_rows, model.sizes, strict=True)):
        for c in row.internal if n > 1 else ():
            # Another axis that splits the tensor, as one of samples does the sums of a loss, leaves each message a part of it.
            others = math.prod(
                size
                for a, (r, size) in enumerate(zip(axis_rows, model.sizes, strict=True))
                if a != axis and r.name in c.shrinks
            )
            # A ring of n ranks computes n blocks, and each message runs beside the kernel of one.
            behind = c.share * kernels[c.phase != "forward"] / n
            phases = PASSES if recomputed and c.phase == "forward" else (c.phase,)
            for phase in phases:
                yield Message(
                    site=op.name,
                    phase=phase,
                    kind=c.kind,
                    axes=(axis,),
                    num_bytes=c.num_bytes // others,
                    count=c.runs(n),
                    category=WAIT,
                    load=model.load_of(row) if c.kind == "all_to_all" else 1.0,
                    behind_s=behind,
                    gradient=c.phase == "backward",
                )


def collectives_of_steps(
    block: Block,
    value: int,
    steps: tuple[Step, ...],
    start: Placements,
    model: CostModel,
    item_bytes: int | None = None,
    *,
    joint: bool = False,
) -> Iterator[tuple[CollectiveKind, tuple[int, ...], int]]:
    """(kind, axes, bytes) of the steps that communicate, in the value's own dtype or in one of `item_bytes`. `joint`: sums over several
    axes are one all_reduce."""
    meta = block.values[value].meta
    item = item_bytes or ITEM_BYTES[meta.dtype]
    here, real = list(start), [step for step in steps if model.sizes[step.axis] > 1]
    for move in group_sums(real) if joint else [(step,) for step in real]:
        if kind := move[0].collective:
            size = step_bytes(meta.shape, item, tuple(here), move[0], model.sizes)
            yield kind, joint_axes(move), size
        for step in move:
            here[step.axis] = step.dst
