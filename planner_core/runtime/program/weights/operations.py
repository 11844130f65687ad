"""What torch's operators do with tensors of a plan that have an order: elementwise in the plan's order, otherwise in the
model's."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.torch_private import NormPartial, compute_local_shape_and_global_offset, local_part
from planner_core.runtime.program.weights.orders import (
    FusedOrder,
    as_plain_dtensor,
    in_model_order,
    model_rows,
    order_of,
    out_of_order_error,
    permute_rows,
    redistribute_like,
    sharding_axes,
    with_local,
)

_ATEN = torch.ops.aten
_RANDOM = (
    _ATEN.uniform_.default,
    _ATEN.normal_.default,
    _ATEN.bernoulli_.float,
    _ATEN.rand_like.default,
    _ATEN.randn_like.default,
    _ATEN.randint_like.default,
    _ATEN.randint_like.low_dtype,
)
_ELEMENTWISE = frozenset(
    {
        "detach",
        "alias",
        "clone",
        "_to_copy",
        "copy_",
        "zero_",
        "fill_",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
        "lift_fresh",
        "equal",
        "is_same_size",
        "is_pinned",
        "_pin_memory",
        "lerp",
        "lerp_",
        "isnan",
        "isfinite",
        "native_dropout",
    }
)
"""Elementwise operators without torch's tag `pointwise` that are no `_foreach_` or `_fused_` operators."""
_REDUCTIONS = frozenset(
    {"sum", "mean", "prod", "norm", "linalg_vector_norm", "max", "min", "amax", "amin", "any", "all", "std", "var"}
)
_DIM_PERMUTATIONS = frozenset({"t", "transpose", "permute", "unsqueeze"})
"""Views that move the dims of a tensor."""


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operator writes in place: index and name of each."""
    arguments = enumerate(func._schema.arguments)
    return tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write)


class PlanTensorOp:
    """One operator of torch on tensors of which some are PlanTensors.

    `operands`: its DTensors, each with its index in the list that holds it, or 0. Operators of lists compute index by index, so
    operands of one index belong together. `order_sources`: at each index the tensor whose order the result has. `substitutes`:
    what replaces an operand, by the operand's id.
    """

    def __init__(self, kind: Any, func: Any, args: Any, kwargs: Any) -> None:
        self.kind, self.func, self.args, self.kwargs = kind, func, args, kwargs
        self.name = func._schema.name.rpartition("::")[2]
        self.computes_lists = self.name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.is_elementwise = self.computes_lists or self.name in _ELEMENTWISE or torch.Tag.pointwise in func.tags
        self.substitutes: dict[int, DTensor] = {}
        self.order_sources: dict[int, DTensor] = {}
        self.view_order: FusedOrder = ()
        self.operands: list[tuple[int, DTensor]] = []
        self.plain_tensors: list[torch.Tensor] = []
        for item in (*args, *kwargs.values()):
            for k, x in enumerate(item) if isinstance(item, (list, tuple)) else [(0, item)]:
                if isinstance(x, DTensor):
                    self.operands.append((k, x))
                elif isinstance(x, torch.Tensor):
                    self.plain_tensors.append(x)
        arguments = ((k, args[k] if k < len(args) else kwargs.get(name)) for k, name in _written_arguments(func))
        written = (x for _, item in arguments for x in (item if isinstance(item, (list, tuple)) else [item]))
        self.written_operands = [x for x in written if isinstance(x, DTensor)]

    def run(self) -> Any:
        """Return the result, in the order of its operands."""
        if self.func in _RANDOM and isinstance(self.args[0], DTensor) and self.args[0].device.type == "cpu":
            return self._draw_whole()
        if self.func is _ATEN._local_scalar_dense.default:
            return self._read_scalar()
        self._refuse_whole_tensors()
        if self._updates_alike_parts():
            # Arguments of torch's operators are values and lists of them, and torch's walk over trees takes longer than the operator.
            self.func(*map(_local_parts, self.args), **{name: _local_parts(x) for name, x in self.kwargs.items()})
            self._count_writes()
            return None if self.computes_lists else self.written_operands[0]
        self._sum_norms()
        if any(order_of(x) for _, x in self.operands):
            self._align_orders()
        out = self.func(
            *pytree.tree_map(self._unwrap_operand, self.args), **pytree.tree_map(self._unwrap_operand, self.kwargs)
        )
        self._count_writes()
        # In place: the caller's own tensor is returned, with its order, and not a new one on the same memory.
        if self.written_operands and isinstance(out, DTensor):
            return self.written_operands[0]
        if isinstance(out, (list, tuple)):
            lists = any(isinstance(a, (list, tuple)) for a in self.args)
            return type(out)([self._wrap_result(k if lists else 0, x) for k, x in enumerate(out)])
        return self._wrap_result(0, out)

    def _updates_alike_parts(self) -> bool:
        """Return whether the operator writes elements in place, and all that it takes for one is cut and ordered alike.

        Then each rank computes with its parts, as in an optimizer's step. torch would first derive placements for each weight, which
        takes longer than to update a small one.
        """
        # A scaler of gradients also tells whether all are finite, and draws are those of the whole tensor.
        special = self.name.startswith("_amp_") or torch.Tag.nondeterministic_seeded in self.func.tags
        if not self.written_operands or not self.is_elementwise or special:
            return False
        forms = {k: (x.shape, x.placements, x.device_mesh, order_of(x)) for k, x in self.operands}
        return all(
            (x.shape, x.placements, x.device_mesh, order_of(x)) == forms[k]
            and not any(p.is_partial() for p in x.placements)
            for k, x in self.operands
        )

    def _count_writes(self) -> None:
        """Count the writes to local parts. torch counts them on DTensors only, and working copies follow the local parts."""
        for x in self.written_operands:
            if not x._local_tensor.is_inference():
                increment_version(x._local_tensor)

    def _unwrap_operand(self, x: Any) -> Any:
        x = self.substitutes.get(id(x), x)
        return as_plain_dtensor(x) if isinstance(x, self.kind) else x

    def _wrap_result(self, k: int, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        order, form = self.view_order, self.order_sources.get(k)
        if form is not None and x.dim() == form.dim():
            same = (
                x.shape[d] == form.shape[d] and sharding_axes(x, d) == sharding_axes(form, d) for d, _ in order_of(form)
            )
            order = order_of(form) if all(same) else ()
        return self.kind.of(x._local_tensor, x._spec, order)

    # --- what torch would do wrong --------------------------------------------------------------------

    def _draw_whole(self) -> Any:
        """Draw the numbers of the whole tensor and take this rank's part, so that ranks whose generators agree have what one
        process has.

        On the CPU torch would draw the same numbers for each part.
        """
        target = self.args[0]
        drawn = self.func(torch.empty(target.shape, dtype=target.dtype), *self.args[1:], **self.kwargs)
        for dim, rows in model_rows(target):
            # The numbers come in the model's order, and are brought to the plan's before this rank's piece is cut.
            drawn = drawn.index_select(dim, rows)
        shape, begin = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        local = drawn[tuple(slice(first, first + n) for first, n in zip(begin, shape, strict=True))].contiguous()
        if not self.written_operands:
            return self.kind.of(local, with_local(local, target)._spec, order_of(target))
        target._local_tensor.copy_(local)
        self._count_writes()
        return target

    def _read_scalar(self) -> Any:
        """Return the number of a DTensor for `.item()`, `float()` and conditions. torch would return this rank's term of a sum."""
        x = self.args[0]
        if any(p.is_partial() and n > 1 for p, n in zip(x.placements, x.device_mesh.shape, strict=True)):
            raise PlanMismatch(
                "this number (.item(), float() or a condition) was made of a weight, a gradient or a result that is sharded over ranks, "
                "and each rank has its own term of it; let all ranks call .full_tensor() first, as in grad.norm().full_tensor().item()"
            )
        return self.func(x._local_tensor)

    def _refuse_whole_tensors(self) -> None:
        for x in self.plain_tensors:
            if x.dim() and x.numel() > 1:
                raise PlanMismatch(
                    f"a whole tensor of shape {tuple(x.shape)} meets a weight or gradient that is sharded over ranks, as a state that an "
                    "optimizer has loaded from one process; load states by set_optimizer_state_dict of torch.distributed.checkpoint with "
                    "full_state_dict=True, or by shardscope.load, and make a DTensor of any other tensor (distribute_tensor)"
                )

    def _sum_norms(self) -> None:
        """Redistribute terms of norms before they are reduced (`w.norm(dim=0).sum()`). torch's rule of sums would add norms of
        parts."""
        # Example: two ranks have the norms 3 and 4 of their parts of a row. The norm is 5, where a plain sum of terms gives 7.
        if self.name in _REDUCTIONS and "norm" not in self.name:
            for _, x in self.operands:
                if any(isinstance(p, NormPartial) for p in x.placements):
                    whole = [Replicate() if isinstance(p, NormPartial) else p for p in x.placements]
                    self.substitutes[id(x)] = as_plain_dtensor(x).redistribute(placements=whole)

    # --- orders ---------------------------------------------------------------------------------------

    def _align_orders(self) -> None:
        """Bring the operands to one order: for elementwise operators that of the first ordered one, otherwise the model's."""
        ordered = [(k, x) for k, x in self.operands if order_of(x)]
        if self.name in _DIM_PERMUTATIONS:
            self._permute_order(ordered[0][1])
        elif self.is_elementwise:
            for k, x in ordered:
                self.order_sources.setdefault(k, x)
            for k, operand in self.operands:
                if k in self.order_sources:
                    self._align_operand(operand, self.order_sources[k])
        elif not (self.name in _REDUCTIONS and len(self.operands) == 1 and self._reduces_ordered_dims(ordered[0][1])):
            if self.func.is_view or any(x is y for _, x in ordered for y in self.written_operands):
                raise out_of_order_error(self.name)
            self.substitutes |= {id(x): in_model_order(x) for _, x in ordered}

    def _reduces_ordered_dims(self, x: DTensor) -> bool:
        """Return whether the operator reduces all ordered dims, so that the order does not matter."""
        names = [a.name for a in self.func._schema.arguments]
        at = names.index("dim") if "dim" in names else len(self.args)
        dims = self.kwargs.get("dim", self.args[at] if at < len(self.args) else None)
        reduced = {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims or range(x.dim()))}
        return len(self.func._schema.returns) == 1 and reduced >= {d for d, _ in order_of(x)}

    def _permute_order(self, x: DTensor) -> None:
        """Move the order to the dims of the view's result. A probe whose sizes all differ shows where each dim goes."""
        probe = self.func(torch.empty([*range(2, 2 + x.dim())], device="meta"), *self.args[1:], **self.kwargs).shape
        # Example: the transpose of a probe [2, 3] is [3, 2], so dim 0, whose size is 2, is dim 1 of the result.
        self.view_order = tuple((probe.index(d + 2), parts) for d, parts in order_of(x))

    def _align_operand(self, x: DTensor, form: DTensor) -> None:
        """Bring an operand to the order of another one, to whose shape it is broadcast."""
        shift, order = form.dim() - x.dim(), order_of(x)
        same_order = tuple((d + shift, parts) for d, parts in order) == order_of(form) and all(
            sharding_axes(x, d - shift) == sharding_axes(form, d) for d, _ in order_of(form)
        )
        dims = [(d - shift, rows) for d, rows in model_rows(form) if d >= shift and x.shape[d - shift] == form.shape[d]]
        if same_order or not (dims or order):
            return
        if not any(x is y for y in self.written_operands):
            self.substitutes[id(x)] = permute_rows(in_model_order(x), dims, x.placements)
        # A written operand cannot be replaced by a copy in another order: the write would be lost.
        elif order or x.placements != form.placements or x.shape != form.shape:
            raise out_of_order_error(self.name)
        else:  # a state that torch has cut by its placements has this order from now on
            x._local_tensor.copy_(redistribute_like(x, form)._local_tensor)
            x.__class__ = self.kind
            x.order = order_of(form)  # type: ignore[attr-defined]


def _local_parts(x: Any) -> Any:
    """Return the local parts of an operator's argument."""
    if isinstance(x, (list, tuple)):
        return [_local_parts(member) for member in x]
    return local_part(x)
