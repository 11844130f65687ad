"""Count collectives as they are issued, by phase, kind and mesh axis, below autograd and DTensor."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner_core.core import axes_to_json
from planner_core.models.hooks import TorchDispatchMode
from planner_core.runtime.program.torch_private import resolve_group

KIND_OF_OPERATOR = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "allreduce_coalesced_": "all_reduce",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
RESULT_FIRST_SUFFIXES = ("_base_", "tensor_coalesced_")
"""Ends of the names of operators that take what they send second, after their result."""


CollectiveKey = tuple[str, str, tuple[int, ...]]
"""Phase, kind and mesh axes of collectives."""


class CountCollectives(TorchDispatchMode):
    """Counts the collectives of one rank: `rows[phase, kind, axes] = [count, bytes, wire_bytes]`. The caller sets `phase`.

    Bytes are those of the tensor that is whole along the axes. Wire bytes are what one rank sends by the ring formula. A group has one
    mesh axis, several (`joint`, by the names of groups), or none if it is not along the mesh. `packed` gives the number of tensors in
    a collective of a group, each of which counts. Collectives that gather the inputs of a call (`gathers_inputs`) are counted in `inputs`,
    since no operator of a plan issues them. `exchanges` has phase, axes and bytes of every all_to_all in order: bytes sent to experts
    depend on the rank.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        packed: Callable[[str], int] | None = None,
        gathers_inputs: Callable[[], bool] = lambda: False,
        joint: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.gathers_inputs, self.inputs = gathers_inputs, {"count": 0, "bytes": 0}
        self.packed = packed or (lambda group: 1)
        self.phase = "forward"
        self.rows: dict[CollectiveKey, list[int]] = {}
        self.exchanges: list[tuple[str, tuple[int, ...], int]] = []
        self.sent: list[tuple[int, int]] = []
        """The messages to single ranks between stages, in order: (rank in their group, bytes)."""
        self.received: list[tuple[int, int]] = []
        self._axes = {mesh.get_group(axis).group_name: (axis,) for axis in range(mesh.ndim)} | dict(joint or {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the same call comes again as operators on local tensors
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("_c10d_functional", "c10d") and not name.startswith(("wait", "_wrap", "barrier", "monitored")):
            kind = KIND_OF_OPERATOR.get(name, name)
            if name in ("send", "recv_"):
                (self.sent if name == "send" else self.received).append((int(args[2]), _num_bytes(args[0])))
                return out
            self._count_collective(
                "send_recv" if kind == "all_to_all" and _is_ring_exchange(args) else kind, func, args
            )
        return out

    def _count_collective(self, kind: str, func: Any, args: Any) -> None:
        group = _process_group(args)
        n = group.size()
        num_bytes = _num_bytes(args[1] if func._schema.name.endswith(RESULT_FIRST_SUFFIXES) else args[0])
        if kind in ("all_gather", "all_to_all", "send_recv"):
            num_bytes *= n
        if self.gathers_inputs():
            self.inputs = {"count": self.inputs["count"] + 1, "bytes": self.inputs["bytes"] + num_bytes}
            return
        axes = self._axes.get(group.group_name, ())
        if kind == "all_to_all":
            self.exchanges.append((self.phase, axes, num_bytes))
        row = self.rows.setdefault((self.phase, kind, axes), [0, 0, 0])
        row[0] += self.packed(group.group_name)
        row[1] += num_bytes
        total = row[1]  # rounded down once: how the tensors were packed makes no difference
        wire = {
            "all_reduce": 2 * (n - 1) * total // n,
            "all_to_all": all_to_all_wire_bytes(total, n),
            "send_recv": total // n,
        }
        row[2] = wire.get(kind, (n - 1) * total // n)

    def table(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return phase -> kind -> count, bytes, wire_bytes, over all axes."""
        return collective_table(self.rows)


def rows_to_json(rows: Mapping[CollectiveKey, Sequence[int]]) -> list[list[Any]]:
    """Return the rows as plain data, in order: phase, kind, axis (or a list of axes), count, bytes, wire bytes."""
    return [[phase, kind, axes_to_json(axes), *row] for (phase, kind, axes), row in sorted(rows.items())]


def collective_table(rows: Mapping[CollectiveKey, Sequence[int]]) -> dict[str, dict[str, dict[str, int]]]:
    """Sum rows over axes: phase -> kind -> count, bytes, wire_bytes."""
    table: dict[str, dict[str, dict[str, int]]] = {"forward": {}, "backward": {}, "optimizer": {}}
    for (phase, kind, _), amounts in sorted(rows.items()):
        row = table[phase].setdefault(kind, {"count": 0, "bytes": 0, "wire_bytes": 0})
        for name, amount in zip(row, amounts, strict=True):
            row[name] += amount
    return table


def all_to_all_wire_bytes(num_bytes: int, n: int) -> int:
    """Return the bytes that one of n ranks sends in an all_to_all of `num_bytes`, if every rank sends equally many."""
    # Example: 2 ranks and 8 bytes in all: each rank has 4, keeps 2 and sends 2.
    return (n - 1) * num_bytes // (n * n)


def _process_group(args: Any) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
    # The last text: functional collectives such as all_reduce have the kind of reduction before the name of the group.
    name = [a for a in args if isinstance(a, str)][-1]
    return resolve_group(name)


def _is_ring_exchange(args: Any) -> bool:
    """Return whether an all_to_all of a flat tensor sends everything to the next rank of its group, and receives everything
    from the one before.

    Tokens that a router distributes have rows, so theirs are not flat.
    """
    if any(isinstance(a, torch.Tensor) and a.dim() != 1 for a in args):
        return False
    splits = [a for a in args if isinstance(a, (list, tuple)) and a and all(isinstance(n, int) for n in a)]
    if len(splits) != 2:
        return False
    group = _process_group(args)
    size, rank = group.size(), dist.get_rank(group)
    sources, targets = ([r for r, count in enumerate(s) if count] for s in splits)
    return size > 1 and (sources, targets) == ([(rank - 1) % size], [(rank + 1) % size])


def _num_bytes(item: Any) -> int:
    if isinstance(item, (list, tuple)):
        return sum(map(_num_bytes, item))
    return int(item.nbytes)
