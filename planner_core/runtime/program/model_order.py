"""What `state_dict` gives and `load_state_dict` takes: fused weights in the model's own order, and buffers of parts.

If a fused dim (q, k and v in one projection) is sharded, a rank holds a part of each of its segments. So its part is not one piece of the
model's tensor. Outside of a step such a weight is shown in the model's order, also by `full_tensor()` of it and of its gradient.

A buffer of which a rank updates its own part (running statistics of sharded channels) is whole on each rank, but only that part is new.
So it is shown as a DTensor of these parts.

A DTensor does not say in which order its rows are. What is in the form of a fused weight (shape, placements, mesh) has the plan's; what is
shown is on a mesh of other names, so that torch itself refuses to mix them.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from planner_core.core import Shard
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program.collectives import own_share
from planner_core.runtime.program.setup import place, torch_placements
from planner_core.runtime.program.weights import OWNERS, Weight

if TYPE_CHECKING:
    from planner_core.runtime.parallel import Parallel


def part_like(like: DTensor, own: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """A DTensor of which this rank holds `own`, in the form of another; `mesh`: on this mesh."""
    return DTensor.from_local(
        own, mesh or like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def dealt(parallel: Parallel, weight: Weight) -> bool:
    """Whether a fused dim of a parameter is sharded, so that a rank's part is not one piece of the model's tensor."""
    return any(
        isinstance(p, Shard) and a.size > 1 and len(weight.segments.get(p.dim, ())) > 1
        for p, a in zip(parallel.stored_as(weight), parallel.axes, strict=True)
    )


@torch.no_grad()
def portable(
    parallel: Parallel, weight: Weight, tensor: torch.Tensor, here: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
) -> torch.Tensor:  # fmt: skip
    """A parameter, or a tensor with its placements, as a DTensor in the model's order. It is a view unless a fused dim is sharded; then
    all ranks must call it. What has the form of such a weight is on the same mesh as that. `here` moves a tensor to where ranks
    exchange it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if dealt(parallel, weight):
        own = place(parallel.full(weight, here(tensor)), parallel.stored_as(weight), parallel.axes).contiguous().clone()
    elif any(_form(w.parameter) == _form(weight.parameter) for w in _ORDERS):
        own = tensor.to_local()
    else:
        return tensor
    return part_like(tensor, own, parallel.shown_mesh)


@torch.no_grad()
def deal(parallel: Parallel, weight: Weight, loaded: torch.Tensor, into: torch.Tensor) -> None:
    """The inverse of `portable`: from the model's order to the plan's."""
    assert isinstance(loaded, DTensor) and isinstance(into, DTensor)
    if not dealt(parallel, weight):
        into.to_local().copy_(loaded.to_local())
    else:
        into.to_local().copy_(place(loaded.full_tensor(), parallel.stored_as(weight), parallel.axes, weight.segments))


def show_in_model_order(parallel: Parallel) -> None:
    """Let the module's `state_dict` and `load_state_dict` speak of the model's own order. `load_state_dict` also takes whole tensors."""

    def shown(module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        if any(weight in _ORDERS for weight in parallel.engine.weights.values()):  # whose parts ranks exchange
            parallel.agreement.meet(parallel.agreement.STATE)
        for weight, name in _named(parallel, prefix, state):
            first = prefix + weight.names[0]
            done = name != first and first in state
            state[name] = state[first] if done else portable(parallel, weight, state[name])
        _show_buffers(parallel, state, prefix)

    def taken(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        parallel.agreement.loaded({n.removeprefix(prefix): value for n, value in state.items()})
        _take_buffers(parallel, state, prefix)
        for weight, name in _named(parallel, prefix, state):
            held, given = weight.parameter.detach(), state[name]
            if not isinstance(held, DTensor) or not isinstance(given, torch.Tensor) or given.shape != held.shape:
                continue  # the module says what is wrong with a shape
            if isinstance(given, DTensor) and given.device_mesh == held.device_mesh and not dealt(parallel, weight):
                continue
            whole = given.full_tensor() if isinstance(given, DTensor) else given.to(held.device)
            own = place(whole, parallel.stored_as(weight), parallel.axes, weight.segments).contiguous()
            state[name] = part_like(held, own)

    for weight in parallel.engine.weights.values():
        OF[weight] = weakref.ref(parallel)
        if dealt(parallel, weight):
            _ORDERS[weight] = _orders(parallel, weight)
    parallel.model.register_state_dict_post_hook(shown)
    parallel.model.register_load_state_dict_pre_hook(taken)


OF: WeakKeyDictionary[Weight, weakref.ref[Parallel]] = WeakKeyDictionary()
"""The model under a plan to which each weight belongs."""
LOADS = contextvars.ContextVar("loads", default=False)
"""Whether torch loads whole values into a module: what it cuts for that has the model's order, on the plan's mesh."""
_ORDERS: WeakKeyDictionary[Weight, dict[int, torch.Tensor]] = WeakKeyDictionary()
"""Of each weight with a fused dim that is sharded: where each element of the model's dim lies in the plan's, by dim."""


def orders_of(tensor: DTensor) -> dict[int, torch.Tensor]:
    """Where each element of the model's dims lies in those of a weight, a gradient, or a tensor in the form of one. Raises PlanMismatch
    if weights of this form have other orders."""
    if not _ORDERS or LOADS.get() or not any(isinstance(p, TorchShard) for p in tensor.placements):
        return {}
    alike, where = [], _where(tensor._local_tensor)
    for weight in filter(None, (reference() for reference in OWNERS.values())):
        if _form(weight.parameter) == _form(tensor):
            if any(t is not None and _where(t) == where for t in (weight.local, weight.gradient)):
                return _ORDERS.get(weight, {})
            alike.append(weight)
    found = {str([(dim, order.tolist()) for dim, order in _ORDERS.get(w, {}).items()]): w for w in alike}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise PlanMismatch(
            f"a tensor in the form of {one.names[0]} and of {other.names[0]} was made whole or cut, but the plan keeps their rows in "
            "different orders, and this is neither weight nor gradient itself; go through state_dict() and load_state_dict() of the "
            "model or the optimizer"
        )
    if not alike and (weight := next((w for w in _ORDERS if _along(tensor, w)), None)):
        raise PlanMismatch(
            f"a tensor whose rows are sharded as those of {weight.names[0]} (sums or norms of its rows) was made whole or cut, but the "
            "plan keeps those rows in another order than the model; take .full_tensor() of the weight first, and reduce that"
        )
    return _ORDERS.get(alike[0], {}) if alike else {}


def _along(tensor: DTensor, weight: Weight) -> bool:
    """Whether a tensor may be made of a weight by reducing dims of it, and has one that is in the plan's order still."""
    form = weight.parameter
    return (
        isinstance(form, DTensor)
        and tensor.device_mesh == form.device_mesh
        and all(size in (1, *form.shape) for size in tensor.shape)
        and any(
            isinstance(p, TorchShard)
            and isinstance(q, TorchShard)
            and q.dim in _ORDERS[weight]
            and tensor.shape[p.dim] == form.shape[q.dim]
            for p, q in zip(tensor.placements, form.placements, strict=True)
        )
    )


def _form(tensor: torch.Tensor) -> object:
    """What tells that tensors may have one order."""
    return (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None


def _where(local: torch.Tensor) -> tuple[int, int]:
    """The memory of a rank's part, and the place in it: gradients of one bucket are views of one memory."""
    return local.untyped_storage()._cdata, int(local.storage_offset())


def _orders(parallel: Parallel, weight: Weight) -> dict[int, torch.Tensor]:
    placements, found = parallel.stored_as(weight), {}
    for dim, sizes in weight.segments.items():
        if len(sizes) < 2:
            continue
        split = [
            a.size for a, p in zip(parallel.axes, placements, strict=True) if isinstance(p, Shard) and p.dim == dim
        ]
        parts = []
        for ranks in itertools.product(*map(range, split)):
            part = torch.arange(weight.parameter.shape[dim])
            for size, rank in zip(split, ranks, strict=True):
                part = own_share(part, 0, size, rank, {0: sizes})
            parts.append(part)
        found[dim] = torch.cat(parts).argsort()
    return found


def _show_buffers(parallel: Parallel, state: MutableMapping[str, Any], prefix: str) -> None:
    for name, placements in parallel.split_buffers().items():
        if prefix + name in state:
            own = place(state[prefix + name], placements, parallel.axes).contiguous().clone()
            state[prefix + name] = DTensor.from_local(own, parallel.mesh, torch_placements(placements), run_check=False)


def _take_buffers(parallel: Parallel, state: MutableMapping[str, Any], prefix: str) -> None:
    for name, _ in parallel.model.named_buffers(remove_duplicate=False):
        given = state.get(prefix + name)
        if isinstance(given, DTensor):
            state[prefix + name] = given.full_tensor()


def _named(parallel: Parallel, prefix: str, state: MutableMapping[str, Any]) -> Iterator[tuple[Weight, str]]:
    """Weights with each of their names in a state, the first name first."""
    weights: Iterable[Weight] = parallel.engine.weights.values()
    yield from ((w, prefix + n) for w in weights for n in w.names if prefix + n in state)
