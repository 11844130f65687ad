"""The loss at the end of a captured step: the model's own, or a stand-in, which the graph names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner_core.core import CaptureError

OWN_LOSS = "the model's own loss"
FIRST_LOSS = "the first of the model's results, a number"
STANDIN_LOSS = "stand-in: mean of the output to the fourth power, in float32"


def own_loss(out: Any) -> torch.Tensor | None:
    """The loss that a model's output holds: its `loss`, itself if it is a scalar, or the first of a tuple if that is one."""
    found = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if found is None:
        found = out[0] if is_first(out) else out
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 and found.is_floating_point() else None


def is_first(out: Any) -> bool:
    """Whether results are a tuple or a list whose first may be a loss."""
    return isinstance(out, (tuple, list)) and len(out) > 0 and getattr(out, "loss", None) is None


def standin_loss(out: Any, tracked: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.Tensor:
    """The mean of the first output to the fourth power in float32, for models that do not return a loss.

    Not of its square: that of a normalised output is 1, so the weights before a last norm would get gradients of rounding errors only,
    and a fault in their backward would not be seen.
    """
    for tensor in _outputs(out):
        if tracked(tensor) and tensor.is_floating_point():
            return tensor.float().pow(4).mean()
    raise CaptureError(f"the model returns {type(out).__name__}, in which no computed tensor was found to train on")


def _outputs(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, Mapping):
        return [t for v in out.values() for t in _outputs(v)]
    if isinstance(out, (tuple, list)):
        return [t for v in out for t in _outputs(v)]
    return [t for v in vars(out).values() for t in _outputs(v)] if hasattr(out, "__dict__") else []
