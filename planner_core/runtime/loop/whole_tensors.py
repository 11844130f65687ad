"""torch's functions of whole DTensors, for weights of several parts (q, k and v) whose rows the plan keeps in another order.

A loop takes a weight, its gradient or an average of it as a whole (`full_tensor`), and gives whole updates back (`distribute_tensor`). Both
speak of the model's order. A piece of such a tensor would be other rows than the loop means, so it is refused.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as loading
from torch.distributed.tensor import DTensor, Shard

from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.model_order import LOADS, orders_of, part_like

_ATEN = torch.ops.aten
_PIECES = (_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int, _ATEN.view.default,
           _ATEN.index_select.default, _ATEN.index.Tensor, _ATEN.index_put_.default)  # fmt: skip
_IN_ORDER = {_ATEN.flip.default: 1, _ATEN.roll.default: 2, _ATEN.cumsum.default: 1, _ATEN.cumprod.default: 1, _ATEN.logcumsumexp.default: 1,
             _ATEN._cummax_helper.default: 3, _ATEN._cummin_helper.default: 3, _ATEN.tril.default: 0, _ATEN.triu.default: 0}  # fmt: skip
"""Operators that depend on the order of a dim, with the place of that among their arguments; 0: on that of all."""


def keep_model_order() -> None:
    """Let torch's functions of whole DTensors speak of the model's order, and refuse those of pieces, for weights with such dims, their
    gradients, and what is made of either elementwise (optimizer states, averages)."""
    loading._load_model_state_dict = _noted(loading._load_model_state_dict)
    DTensor.redistribute = _gathering(DTensor.redistribute)  # type: ignore[method-assign]
    distribute = torch.distributed.tensor.distribute_tensor
    dealing = _dealing(distribute)
    for module in list(sys.modules.values()):  # scripts have imported it by name
        if vars(module).get("distribute_tensor") is distribute:
            vars(module)["distribute_tensor"] = dealing
    # torch has no public way: an operator's own rule would not see whose rows these are
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update({op: functools.partial(_piece, handlers) for op in (*_PIECES, *_IN_ORDER)})


def _noted(load: Callable[..., Any]) -> Callable[..., Any]:
    """What `set_model_state_dict` calls, which cuts whole values by itself."""

    @functools.wraps(load)
    def loads(*args: Any, **kwargs: Any) -> Any:
        token = LOADS.set(True)
        try:
            return load(*args, **kwargs)
        finally:
            LOADS.reset(token)

    return loads


def _gathering(redistribute: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """`DTensor.redistribute`, of which `full_tensor` is made."""

    @functools.wraps(redistribute)
    def ordered(self: DTensor, *args: Any, **options: Any) -> DTensor:
        made, orders = redistribute(self, *args, **options), orders_of(self)
        for dim, order in orders.items():
            before, after = ([p if p == Shard(dim) else None for p in x.placements] for x in (self, made))
            if any(after) and after != before:
                raise PlanMismatch(_out_of_order("redistribute() to other shards"))
            if not any(after):
                made = part_like(made, made.to_local().index_select(dim, order.to(made.device)))
        return made

    return ordered


def _dealing(distribute: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """`distribute_tensor`, which gives a whole tensor in the form of such a weight the plan's order, as the weight has it."""

    @functools.wraps(distribute)
    def dealing(tensor: torch.Tensor, *args: Any, **options: Any) -> DTensor:
        made = distribute(tensor, *args, **options)
        whole = tensor.detach()
        orders = {} if isinstance(tensor, DTensor) else orders_of(made)
        for dim, order in orders.items():
            whole = whole.index_select(dim, order.argsort().to(whole.device))
        return distribute(whole.requires_grad_(tensor.requires_grad), *args, **options) if orders else made

    return dealing


def _piece(handlers: dict[Any, Any], op: Any, args: Any, kwargs: Any) -> Any:
    """An operator that takes a piece of a DTensor, writes one, or gives it another shape: what it makes does not show the order."""
    if isinstance(args[0], DTensor):
        cut = _takes(op, args) & {p.dim for p in args[0].placements if isinstance(p, Shard)}
        if cut and cut & orders_of(args[0]).keys():
            raise PlanMismatch(_out_of_order(op._schema.name.removeprefix("aten::")))
    handler = handlers.pop(op)  # torch's own rule, once
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _takes(op: Any, args: Any) -> set[int]:
    """The dims of whose order or parts an operator makes use."""
    at = _IN_ORDER.get(op, 0)
    dims = args[at] if 0 < at < len(args) else ()
    return {d % args[0].dim() for d in ([dims] if isinstance(dims, int) else dims)} or {*range(args[0].dim())}


def _out_of_order(what: str) -> str:
    return (
        f"{what} was called on a weight or gradient of which several parts are one tensor (q, k and v), sharded over ranks; each rank has "
        "rows of every part, so a piece of it would be other rows than in the model; take .full_tensor() first"
    )
