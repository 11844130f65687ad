"""Which sizes stand for samples: two recordings, one with twice as many samples, told apart size by size.

A plan speaks of the samples of all ranks, a rank holds its own. What grows with the samples is found by comparing, not
by guessing: a size that doubles with the batch is samples, one that stays is not, and anything else is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.runtime.record.recorder import CannotRewrite
from planner_core.runtime.record.tape import Tape


def doubled(args: Any, dims: dict[str, int] | None = None) -> Any:
    """The same inputs with every sample twice. Samples lie along dim 0 of each tensor that is as long there as the first."""
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.dim()]
    samples = tensors[0].shape[0] if tensors else 0

    def twice(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dim() and item.shape[0] == samples:
            return torch.cat((item, item)) if not item.is_meta else item.new_empty((2 * samples, *item.shape[1:]))
        return item

    return pytree.tree_map(twice, args)


def batch_dims(once: Tape, twice: Tape) -> list[int | None]:
    """For each tensor of `once` the dim that holds the samples (alone or merged with others), None without one."""
    same = len(once.tensors) == len(twice.tensors) and len(once.calls) == len(twice.calls)
    if not same or any(a.fn != b.fn or a.outputs != b.outputs for a, b in zip(once.calls, twice.calls, strict=True)):
        raise CannotRewrite("it does other operations on other numbers of samples")
    return [
        _grown(a.name or f"tensor {i}", a.shape, b.shape)
        for i, (a, b) in enumerate(zip(once.tensors, twice.tensors, strict=True))
    ]


def _grown(name: str, once: tuple[int, ...], twice: tuple[int, ...]) -> int | None:
    if len(once) != len(twice):
        raise CannotRewrite(f"{name} has {len(once)} dims, and {len(twice)} with twice as many samples")
    grown = [d for d, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    if len(grown) > 1 or any(twice[d] != 2 * once[d] for d in grown):
        raise CannotRewrite(f"{name} of shape {once} becomes {twice} with twice as many samples")
    return grown[0] if grown else None
