"""The tensors that one GPU allocates while a block runs under its plan, and which of them autograd keeps.

Three kinds of tensors have a storage of their own: an operand that is redistributed before an operator, a result, and a result
that is redistributed after the operator. A view shares the storage of what it looks at. A `Key` names a storage.

Example: x @ w on 4 GPUs, where x of 8 MB is delivered in Shard(0) and the product takes it Replicate and gives y of 8 MB in
Shard(1). The input x has 2 MB, operand 0 of the product 8 MB, its result y 2 MB. Backward needs x as the product took it, so
autograd keeps the 8 MB, not the 2 MB. If y is then delivered Replicate, y as delivered has 8 MB beside the 2 MB of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from planner_core.core import ITEM_BYTES, Block, BlockPlan, Edge, Op, Placements, Step, local_shape, root
from planner_core.cost.memory.in_flight import UseMemory, uses_of
from planner_core.cost.memory.redistribution_buffers import RedistributionMemory, redistribution_memory
from planner_core.cost.memory.saved import viewed_operands
from planner_core.cost.model import CostModel
from planner_core.cost.resolved_ops import local_bytes, rows_at
from planner_core.cost.units import split_into_units
from planner_core.ops import (
    LocalBytes,
    backward_workspace_bytes,
    extra_saved_bytes,
    operator,
    splits_saved_tensor,
    writes_in_place,
)

EXCHANGED = -1
"""The number of an extra storage: the first operand, as the op has exchanged it (`Split.exchanged`). Others have -2, -3 and so on."""


class Key(NamedTuple):
    """The key of a storage: its kind, and by kind the value, the operator or the number that it belongs to.

    input      `value`: the caller gives it, or forward computed this constant of its inputs
    operand    `op`, `number` of the operand: as the operator takes it, if it is another tensor than the one delivered
    result     `value`: as its operator makes it
    delivered  `value`: a result as it is delivered, if it is another tensor than the one made
    extra      `op`, `number`: the operator saves it beside its operands and results
    call       `number` of the item: all that the called block keeps inside
    """

    kind: Literal["input", "operand", "result", "delivered", "extra", "call"]
    value: int = -1
    op: str = ""
    number: int = 0


@dataclass
class BlockStorages:
    """What each operator takes, makes and keeps. `add` fills it, one operator after the other in running order."""

    block: Block
    plan: BlockPlan
    model: CostModel
    size: dict[Key, int] = field(default_factory=dict)  # bytes
    # The storage of a delivered value; None: a view of a weight.
    at: dict[int, Key | None] = field(default_factory=dict)
    taken: dict[tuple[str, int], Key] = field(default_factory=dict)  # by op and operand
    result_keys: dict[int, Key] = field(default_factory=dict)  # by result
    saved: dict[str, tuple[Key, ...]] = field(default_factory=dict)  # by op
    computed: dict[int, Key] = field(default_factory=dict)  # by constant that forward computes of its inputs

    # By op and operand: weights that the whole unit brings.
    ahead: dict[tuple[str, int], UseMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._viewed = viewed_operands(self.block)
        self._add_computed_constants()
        # A copy of a repeated block is one unit; it alone has inputs.
        for items in [self.block.items] if self.block.inputs else split_into_units(self.block):
            ops = [item for item in items if isinstance(item, Op)]
            self.ahead.update(uses_of(self.block, self.plan, ops, self.model))

    def _add_computed_constants(self) -> None:
        """Add the constants that forward computes of its inputs before its first operator, as the operators of the top block take them."""
        if self.block.inputs:
            return
        for op in self.block.ops:
            for value, edge in zip(op.inputs, self.plan.sites[op.name].inputs, strict=True):
                base = root(self.block, value)
                if not self.block.values[base].computed:
                    continue
                key = self.computed[value] = Key("input", base)
                self.size[key] = max(self.size.get(key, 0), self.bytes_of(base, edge.dst.forward))

    def add(self, op: Op) -> None:
        """Add the operands and results of one operator, and what it keeps."""
        site = self.plan.sites[op.name]
        for position, (value, edge) in enumerate(zip(op.inputs, site.inputs, strict=True)):
            self._add_operand(op, position, value, edge)
        for value, edge in zip(op.outputs, site.outputs, strict=True):
            self._add_result(op, value, edge)
        saved, extras = self._saved_keys(op), self._extra_keys(op)
        # The op's kernel worked on what an all_to_all inside it had brought. So it keeps a tensor of that size, and not what it returns.
        for key in self._exchanged_results(op, saved):
            exchanged = Key("extra", op=op.name, number=len(extras))
            self.size[exchanged] = self.size[key]
            for i in self._exchanged_operands(op):
                key_exchanged = Key("extra", op=op.name, number=EXCHANGED - i)
                self.size[key_exchanged] = self.bytes_of(op.inputs[i], site.inputs[i].dst.forward)
            extras.append(exchanged)
            saved = [k for k in saved if k != key]
        self.saved[op.name] = tuple(dict.fromkeys([*saved, *extras]))

    def bytes_of_key(self, key: Key | None) -> int:
        """Return the bytes of a storage; 0 if the key names none."""
        return 0 if key is None else self.size.get(key, 0)

    def bytes_of(self, value: int, placements: Placements) -> int:
        """Return the bytes of a value on one GPU; of one that is made part by part, those of a part."""
        return local_bytes(self.block, value, placements, self.model) // self.block.values[value].parts

    def redistribution_bytes(
        self, value: int, start: Placements, steps: tuple[Step, ...], edge: Edge
    ) -> RedistributionMemory:
        """Return the bytes that it takes to redistribute a value, or its gradient, along an edge."""
        if not steps:
            return RedistributionMemory(0, 0)
        meta = self.block.values[value].meta
        return redistribution_memory(meta.shape, ITEM_BYTES[meta.dtype], start, steps, self.model.sizes, edge.segments)

    def bring_operand(self, op: Op, position: int) -> RedistributionMemory:
        """Return what it takes to bring an operand to its op: of a weight that came ahead what is left to do, or what autograd keeps of
        it."""
        value, edge = op.inputs[position], self.plan.sites[op.name].inputs[position]
        use = self.ahead.get((op.name, position))
        if use is None:
            return self.redistribution_bytes(value, edge.src.forward, edge.forward, edge)
        moved = self.redistribution_bytes(value, use.gathered_placements, use.op_steps, edge)
        # Autograd's view keeps the gathered weight alive, so it is counted with what is kept (`_list_gathers` leaves it out of the unit's).
        if use.lasting and not moved.result:
            whole = self.bytes_of(value, use.gathered_placements)
            return RedistributionMemory(whole, whole)
        return moved

    def return_gradient(self, op: Op, position: int) -> RedistributionMemory:
        """Return what it takes to bring an operand's gradient to where it is summed: of a weight to where it is packed."""
        value, edge = op.inputs[position], self.plan.sites[op.name].inputs[position]
        use = self.ahead.get((op.name, position))
        return self.redistribution_bytes(
            value, edge.dst.gradient, edge.backward if use is None else use.first_gradient_steps, edge
        )

    def _add_operand(self, op: Op, position: int, value: int, edge: Edge) -> None:
        kind = self.block.values[value].kind
        if kind == "constant":
            if value in self.computed:
                self.taken[op.name, position] = self.computed[value]
            return
        if kind == "activation" and value not in self.at:
            base = root(self.block, value)
            self.at[value] = key = Key("input", base)
            self.size.setdefault(key, self.bytes_of(value, edge.src.forward))
        # A redistributed operand is a tensor of its own, and backward needs that one; else the operator reads what was delivered.
        moved = self.bring_operand(op, position).result
        if moved:
            self.taken[op.name, position] = key = Key("operand", op=op.name, number=position)
            self.size[key] = moved
        elif kind == "activation" and (delivered := self.at[value]) is not None:
            self.taken[op.name, position] = delivered

    def _add_result(self, op: Op, value: int, edge: Edge) -> None:
        base = self.viewed_operand(op, value)
        # A view shares the storage of the operand as it was taken: of a redistributed operand the new tensor, not the delivered one.
        key = Key("result", value) if base is None else self.taken.get((op.name, base))
        if key is not None and base is None:
            self.size[key] = self.bytes_of(value, edge.src.forward)
        if key is not None:  # a view of a stored weight takes no memory
            self.result_keys[value] = key
        moved = self.redistribution_bytes(value, edge.src.forward, edge.forward, edge).result
        if moved:
            key = Key("delivered", value)
            self.size[key] = moved
        self.at[value] = key

    def viewed_operand(self, op: Op, value: int) -> int | None:
        """Return the position of the operand that a result is a view of; None for a new tensor, which in-place writes make too."""
        base = self._viewed.get(value)
        if base is None or writes_in_place(op.fn):
            return None
        return op.inputs.index(base)

    def _saved_keys(self, op: Op) -> list[Key]:
        """Return the operands and results that autograd keeps.

        `Op.saved` names memory: q, k and v that are views of one projection are one value there. They are three storages if each
        was redistributed by itself.
        """
        keys: list[Key | None] = []
        for value in op.saved:
            # k and v of one projection are two views of one memory. If each was redistributed by itself, each is kept by itself.
            same = [k for k, v in enumerate(op.inputs) if root(self.block, v) == root(self.block, value)]
            if value in op.outputs and value not in op.inputs:
                keys.append(self.result_keys.get(value))
            elif not same:
                keys.append(self.at.get(value))
            keys += [self._saved_operand_key(op, k) for k in same if op.inputs[k] == value or value not in op.outputs]
        return [key for key in keys if key is not None]

    def _saved_operand_key(self, op: Op, position: int) -> Key | None:
        """Return the storage of an operand that is kept, or None.

        A constant counts only if forward computes it of the inputs. A gathered weight is not kept: backward gathers it again. If the block
        is recomputed, the recomputation gathers it, and it stays until backward.
        """
        if self.plan.recompute == "none" and self.is_gathered_at_op(op, position):
            return None
        return self.taken.get((op.name, position))

    def is_gathered_at_op(self, op: Op, position: int) -> bool:
        """Return whether an operand is a weight that is gathered for this op alone."""
        if (op.name, position) in self.ahead:
            return False
        steps = self.plan.sites[op.name].inputs[position].forward
        return self.block.values[op.inputs[position]].kind == "parameter" and any(s.collective for s in steps)

    def _extra_keys(self, op: Op) -> list[Key]:
        """Storages that are not a value of the graph: the log-sum-exp, indices, and what a loss keeps."""
        formula = extra_saved_bytes(op)
        if formula is not None:
            key = Key("extra", op=op.name)
            self.size[key] = formula(self._local_bytes_of(op))
            return [key]
        if not op.saved_extra:
            return []
        axis_rows = rows_at(self.block, op, self.plan.sites[op.name])
        shapes = [self.block.values[v].meta.shape for v in op.inputs]
        keys = [Key("extra", op=op.name, number=k) for k in range(len(op.saved_extra))]
        for key, meta in zip(keys, op.saved_extra, strict=True):
            parts = [
                n
                for row, n in zip(axis_rows, self.model.sizes, strict=True)
                if row.splits_work and splits_saved_tensor(op, row.name, meta.shape, shapes)
            ]
            load = (
                self.model.fullest_load(axis_rows) if len(meta.shape) > 1 else 1.0
            )  # vectors lie where the tokens come from
            self.size[key] = int(load * (meta.num_bytes // int(np.prod(parts, dtype=int))))
        return keys

    def _exchanged_results(self, op: Op, saved: Sequence[Key]) -> list[Key]:
        """Return the results of which an operator keeps a tensor of its own, as large (`Split.exchanged`)."""
        keys = [k for v in op.outputs if (k := self.result_keys.get(v)) is not None and k in saved]
        # What receives a tensor from another stage has no operands, and no rule.
        return keys if keys and op.inputs and self._exchanged_operands(op) else []

    def _exchanged_operands(self, op: Op) -> list[int]:
        """Return the operands that an operator exchanges inside, on any axis of several ranks."""
        rows = zip(rows_at(self.block, op, self.plan.sites[op.name]), self.model.sizes, strict=True)
        return sorted({i for row, n in rows if n > 1 for i in row.exchanged})

    def keys_kept_for_recompute(self, op: Op) -> tuple[Key, ...]:
        """Return what is held of an operator until its block is recomputed: its delivered results, what it saves beside them, and what it
        has received inside. Nothing is held of an operator that the plan does not keep."""
        if op.name not in self.plan.kept:
            return ()
        saved = (
            k for k in self.saved[op.name] if k.kind == "extra" or k in {self.result_keys.get(v) for v in op.outputs}
        )
        received = (Key("extra", op=op.name, number=EXCHANGED - i) for i in range(len(op.inputs)))
        sent = [key for key in received if key in self.size]
        return tuple(dict.fromkeys([*(k for v in op.outputs if (k := self.at.get(v)) is not None), *saved, *sent]))

    def forward_workspace_bytes(self, op: Op) -> int:
        """Return the bytes that an operator uses for a moment in forward, beside its operands, results and what it keeps."""
        formula = operator(op.fn).forward_workspace_bytes
        return 0 if formula is None else formula(self._local_bytes_of(op))

    def backward_workspace_bytes(self, op: Op) -> int:
        """Return the bytes that the backward of an operator uses for a moment, beside the gradients that it takes and makes."""
        formula = backward_workspace_bytes(op)
        return 0 if formula is None else formula(self._local_bytes_of(op))

    def _local_bytes_of(self, op: Op) -> LocalBytes:
        """Return the operator's operands and results on one GPU, and the dims that its rows split."""
        site, values = self.plan.sites[op.name], self.block.values
        axis_rows = rows_at(self.block, op, site)
        return LocalBytes(
            tuple(self.bytes_of(v, e.dst.forward) for v, e in zip(op.inputs, site.inputs, strict=True)),
            tuple(self.bytes_of(v, e.src.forward) for v, e in zip(op.outputs, site.outputs, strict=True)),
            tuple(ITEM_BYTES[values[v].meta.dtype] for v in op.inputs),
            frozenset(row.name for row in axis_rows),
            tuple(values[v].grad for v in op.inputs),
            tuple(values[v].meta.shape for v in op.inputs),
            tuple(
                local_shape(values[v].meta.shape, e.dst.forward, self.model.sizes)
                for v, e in zip(op.inputs, site.inputs, strict=True)
            ),
            self.model.fullest_load(axis_rows),
        )
