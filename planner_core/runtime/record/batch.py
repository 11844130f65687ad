"""Find the dims that hold samples, by comparing two recordings, of which one has twice as many samples.

A plan has the samples of all ranks; a rank has its own. A size that doubles with the batch is a number of samples. A size that
stays the same is not. Anything else is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.runtime.record.recorder import CannotRewrite
from planner_core.runtime.record.tape import Tape, TapeCall


def doubled(args: Any, dims: dict[str, int] | None = None) -> Any:
    """The same inputs with every sample twice. Samples are along dim 0 of each tensor whose dim 0 is as long as the first one's."""
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.dim()]
    samples = tensors[0].shape[0] if tensors else 0

    def twice(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dim() and item.shape[0] == samples:
            return torch.cat((item, item)) if not item.is_meta else item.new_empty((2 * samples, *item.shape[1:]))
        return item

    return pytree.tree_map(twice, args)


def batch_dims(once: Tape, twice: Tape) -> list[int | None]:
    """For each tensor of `once`: the dim that holds the samples, alone or merged with other dims; None if there is none."""
    pairs = _pairs(once, twice)
    if pairs is None:
        raise CannotRewrite("it does other operations on other numbers of samples")
    return [_grown(a.name or f"tensor {i}", a.shape, twice.tensors[pairs[i]].shape) for i, a in enumerate(once.tensors)]


def _pairs(once: Tape, twice: Tape) -> dict[int, int] | None:
    """The tensor of `twice` for each tensor of `once`; None if operations differ. Some constants are in `twice` alone, since only
    several samples need them (transformers expands positions for more than one)."""
    made = [{n for c in tape.calls for n in c.outputs} for tape in (once, twice)]
    given = [
        [n for n in range(len(tape.tensors)) if n not in own] for tape, own in zip((once, twice), made, strict=True)
    ]
    if [once.tensors[n].kind for n in given[0]] != [twice.tensors[n].kind for n in given[1]]:
        return None
    found = dict(zip(*given, strict=True))
    calls = iter(twice.calls)
    for call in once.calls:
        other = next((c for c in calls if _same(call, c) or c.kind != "constant"), None)
        if other is None or not _same(call, other) or len(call.outputs) != len(other.outputs):
            return None
        found.update(zip(call.outputs, other.outputs, strict=True))
    return found if all(c.kind == "constant" for c in calls) and len(found) == len(once.tensors) else None


def _same(a: TapeCall, b: TapeCall) -> bool:
    return (a.kind, a.fn, a.site, a.scope, a.line) == (b.kind, b.fn, b.site, b.scope, b.line)


def _grown(name: str, once: tuple[int, ...], twice: tuple[int, ...]) -> int | None:
    if len(once) != len(twice):
        raise CannotRewrite(f"{name} has {len(once)} dims, and {len(twice)} with twice as many samples")
    grown = [d for d, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    if len(grown) > 1 or any(twice[d] != 2 * once[d] for d in grown):
        raise CannotRewrite(f"{name} of shape {once} becomes {twice} with twice as many samples")
    return grown[0] if grown else None
