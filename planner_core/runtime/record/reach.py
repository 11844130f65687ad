"""The tensors to which the planned loss sends a gradient. For other tensors a gradient was not planned."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.capture import returned_loss
from planner_core.runtime.record.tape import COMPUTED, PARAMETER, Ref, Tape


def find_loss(tape: Tape) -> int | None:
    """The number of the loss: the model's own, or else the first computed result, from which a loss outside is usually made."""
    shells: dict[int, int] = {}
    held: list[torch.Tensor] = []

    def shell(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        tensor = tape.tensors[leaf.number]
        grad = tensor.grad and tensor.dtype.is_floating_point
        held.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=grad))
        shells[id(held[-1])] = leaf.number
        return held[-1]

    def weights(result: torch.Tensor) -> set[int]:
        return {n for n in find_ancestors(tape, shells[id(result)]) if tape.tensors[n].kind == PARAMETER}

    own = returned_loss(pytree.tree_map(shell, tape.result), weights)
    if own is not None:
        return shells[id(own)]
    leaves = [x.number for x in pytree.tree_leaves(tape.result) if isinstance(x, Ref)]
    return next(
        (n for n in leaves if tape.tensors[n].kind == COMPUTED and tape.tensors[n].dtype.is_floating_point), None
    )


def find_ancestors(tape: Tape, result: int | None) -> set[int]:
    """Tensors from which a path of calls leads to a result."""
    found = set() if result is None else {result}
    for call in reversed(tape.calls):
        if call.kind in ("op", "dropout") and any(n in found for n in call.outputs):
            found.update(n for n in call.gives_gradient() if tape.tensors[n].grad)
    return found
