"""The loss of a recording, and the tensors to which it sends a gradient. No gradient was planned for other tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.capture import returned_loss
from planner_core.runtime.record.tape import COMPUTED, PARAMETER, Ref, Tape


def find_loss(tape: Tape) -> int | None:
    """Return the number of the model's own loss, otherwise of the first computed result, from which a loss outside is usually
    computed."""
    shells: dict[int, int] = {}
    shells_alive: list[torch.Tensor] = []  # two of them must not have one id

    # `returned_loss` asks for shapes, dtypes and gradients alone, so a tensor on meta stands for each result.
    def make_shell(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        tensor = tape.tensors[leaf.number]
        grad = tensor.grad and tensor.dtype.is_floating_point
        shells_alive.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=grad))
        shells[id(shells_alive[-1])] = leaf.number
        return shells_alive[-1]

    def weights(result: torch.Tensor) -> set[int]:
        return {n for n in find_ancestors(tape, [shells[id(result)]]) if tape.tensors[n].kind == PARAMETER}

    loss = returned_loss(pytree.tree_map(make_shell, tape.result), weights)
    if loss is not None:
        return shells[id(loss)]
    leaves = [x.number for x in pytree.tree_leaves(tape.result) if isinstance(x, Ref)]
    return next(
        (n for n in leaves if tape.tensors[n].kind == COMPUTED and tape.tensors[n].dtype.is_floating_point), None
    )


def find_ancestors(tape: Tape, results: Iterable[int]) -> set[int]:
    """Return the tensors from which a path of calls leads to one of the results."""
    ancestors = set(results)
    for call in reversed(tape.calls):
        if call.kind in ("op", "dropout") and any(n in ancestors for n in call.outputs):
            ancestors.update(n for n in call.gives_gradient() if tape.tensors[n].grad)
    return ancestors
