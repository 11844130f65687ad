"""Meta kernels of ATen ops for which torch has none. They are registered when this module is imported.

A model is captured on tensors without values, and its traffic and memory are counted the same way, so every op needs a meta kernel.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from planner_core.models.hooks.torch_private import TorchDispatchMode

_META = torch.library.Library("aten", "IMPL", "Meta")
"""Lives as long as the process: torch drops the registered kernels with this object."""


def _ctc_loss(log_p: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and saved sums of log_p [steps, batch, classes] (or [steps, classes]) and targets, [batch, length] or joined."""
    steps, batch = log_p.shape[0], log_p.shape[1] if log_p.dim() == 3 else 1
    longest = targets.shape[1] if targets.dim() == 2 else _longest_target(rest[1], targets)
    return log_p.new_empty(batch), log_p.new_empty(batch, steps, 2 * longest + 1)


def _longest_target(lengths: Any, targets: torch.Tensor) -> int:
    """Return the length of the longest target; on meta, where lengths have no values, that of all targets joined."""
    if isinstance(lengths, torch.Tensor):
        return targets.shape[0] if lengths.is_meta else int(lengths.max())
    return int(max(lengths))


def _fake_quantize(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded tensor, and a mask of the elements in range."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _like_operand(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return a gradient of the shape of the operand."""
    return torch.empty_like(x)


_KERNELS: Sequence[tuple[str, Any]] = (
    ("_ctc_loss", _ctc_loss),
    ("_ctc_loss.Tensor", _ctc_loss),
    ("_ctc_loss_backward", _like_operand),
    ("_ctc_loss_backward.Tensor", _like_operand),
    ("multi_margin_loss_backward", _like_operand),
    ("multilabel_margin_loss_backward", _like_operand),
    ("fractional_max_pool3d_backward", _like_operand),
    ("fake_quantize_per_channel_affine_cachemask", _fake_quantize),
)
for _name, _kernel in _KERNELS:
    _META.impl(_name, _kernel)


class _ConstantsOnMeta(TorchDispatchMode):
    """Move CPU operands (a number, a table of constants in the model's code) to meta where another operand is on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on moved operands."""
        given = tree_leaves((args, kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in given):
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def constants_on_meta() -> AbstractContextManager[Any]:
    """Move CPU operands to meta beside operands on meta, while entered."""
    return _ConstantsOnMeta()
