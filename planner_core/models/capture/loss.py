"""The loss at the end of a captured step: the model's own, or a stand-in, which the graph names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from planner_core.core import CaptureError

OWN_LOSS = "the model's own loss"
FIRST_LOSS = "the first of the model's results, a number"
ONLY_LOSS = "the only number among the model's results"

Weights = Callable[[torch.Tensor], Collection[Any]]
"""Returns the weights on which a tensor depends."""


def returned_loss(out: Any, weights: Weights | None = None) -> torch.Tensor | None:
    """Return the loss in a model's output, or None.

    It is the output's `loss`; the output if it is a scalar; of several results the first if it is a scalar, otherwise the only scalar,
    provided that it depends on all weights on which other results depend. (CLIP's temperature is a scalar too, and no loss.)
    `weights(tensor)` returns these weights; by default the leaves of autograd's graph.
    """
    return named_loss(out, weights)[1]


def named_loss(out: Any, weights: Weights | None = None) -> tuple[str, torch.Tensor | None]:
    """Return what a report calls the loss, and the loss as `returned_loss` finds it."""
    named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if named is None and isinstance(out, torch.Tensor):
        named = out
    if named is not None:
        return OWN_LOSS, named if _is_scalar(named) else None
    several = list(out.values()) if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else []
    if len(several) and _is_scalar(several[0]) and not isinstance(out, Mapping):
        return FIRST_LOSS, several[0]
    return ONLY_LOSS, _only_number(several, weights or _leaf_nodes)


def _only_number(results: Sequence[Any], weights: Weights) -> torch.Tensor | None:
    numbers = [x for x in results if _is_scalar(x)]
    number = numbers[0] if len(numbers) == 1 else None
    # Under `no_grad` there is no graph that says what a number depends on.
    if number is None or not torch.is_grad_enabled():
        return number
    if not number.requires_grad:
        return None
    needed = {*weights(number)}
    others = (x for x in _output_tensors(results) if x is not number and x.requires_grad)
    return number if all(needed.issuperset(weights(x)) for x in others) else None


def _leaf_nodes(tensor: torch.Tensor) -> set[Any]:
    """Return the leaves of autograd's graph under a tensor."""
    seen: set[Any] = set()
    open_ = [tensor.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_ += [n for n, _ in node.next_functions]
    return {node for node in seen if hasattr(node, "variable")}


def _is_scalar(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.is_floating_point()


def standin_loss(out: Any, tracked: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.Tensor:
    """Return a loss for a model that does not return one: the mean of the output to the fourth power in float32.

    Of several outputs it is the sum of these means, so the gradients of a later loss on any of them are planned.
    Why not the square: the mean square of a normalised output is 1, so weights before a last norm would get gradients of rounding
    errors alone, and a fault in their backward would go unseen.
    """
    outputs = [t for t in {id(t): t for t in _output_tensors(out)}.values() if tracked(t) and t.is_floating_point()]
    terms = [t.float().pow(4).mean() for t in [t for t in outputs if t.requires_grad] or outputs[:1]]
    if not terms:
        raise CaptureError(f"the model returns {type(out).__name__}, in which no computed tensor was found to train on")
    return functools.reduce(torch.add, terms)


def _output_tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, Mapping):
        return [t for v in out.values() for t in _output_tensors(v)]
    if isinstance(out, (tuple, list)):
        return [t for v in out for t in _output_tensors(v)]
    return [t for v in vars(out).values() for t in _output_tensors(v)] if hasattr(out, "__dict__") else []
