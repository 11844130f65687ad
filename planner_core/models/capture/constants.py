"""Constants: values that do not depend on a parameter. Small ones are computed, so that control flow on them runs as in training.

The model is on `meta`, but its mask code asks masks and positions for their values. So a tensor that is computed from constants alone
lives on the CPU. It moves to `meta` where it meets a tensor of the model, or if it is too large to compute: then its
values are unknown, and a question about them is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MAX_COMPUTED_ELEMENTS = 1 << 23  # elements of the largest constant that is computed
TAKES_SIZES = frozenset(
    {"view", "reshape", "expand", "repeat", "unflatten", "new_zeros", "new_ones", "new_empty", "new_full", "as_strided"}
)
META = torch.device("meta")
CPU = torch.device("cpu")
_MOVES = (torch.Tensor.cpu, torch.Tensor.cuda)


def run_constant(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[torch.Tensor]
) -> Any:
    """Call a function whose operands are all constants: on the CPU if their values are known and the result is small."""
    # One operand without values makes a result without values. Elsewhere a constant is computed, however it is asked for: code that says
    # `device=x.device` means meta here, and would lose the values that it asks for next.
    if any(t.is_meta for t in operands):
        if func in _MOVES:
            return operands[0]
        moved = stay_on_meta(to_meta(args))
        if func is torch.Tensor.__getitem__:
            moved = with_picked_indices(args, moved)
        return func(*moved, **stay_on_meta(to_meta(kwargs)))
    # `repeat` of a small tensor may be a large one: ProphetNet's buckets of positions are repeated for each head, 67 M of them.
    is_large = func is torch.Tensor.repeat or _size_hint(operands) > MAX_COMPUTED_ELEMENTS
    if is_large or (not operands and _on_meta(args, kwargs)):
        sized = func(*to_meta(args), **to_meta(kwargs))
        leaves = [sized] if isinstance(sized, torch.Tensor) else []
        if any(t.numel() > MAX_COMPUTED_ELEMENTS for t in leaves):
            return sized
    return func(*_replace_device(args, "meta", CPU), **_replace_device(kwargs, "meta", CPU))


def with_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn sizes of a view that are one-element constants (`torch.div` of two sizes) into integers."""

    def plain(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and not item.is_meta and item.dim() == 0 and not item.is_floating_point():
            return int(item)
        return type(item)(plain(i) for i in item) if type(item) in (tuple, list) else item

    return (*args[:1], *(plain(a) for a in args[1:])), {k: plain(v) if args else v for k, v in kwargs.items()}


def with_picked_indices(args: tuple[Any, ...], moved: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace known masks in `moved`, the arguments of `x[...]` on meta, by index tensors.

    A mask that picks n elements becomes one index of n elements for each of its dims, since meta cannot count what a mask picks.
    """
    index, moved_index = args[1], moved[1]

    def picks(item: Any, moved_item: Any) -> tuple[Any, ...]:
        if isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.dim() > 0 and not item.is_meta:
            return (torch.empty(int(item.sum()), dtype=torch.long, device=META),) * item.dim()
        return (moved_item,)

    if isinstance(index, tuple):
        indices = tuple(p for i, m in zip(index, moved_index, strict=True) for p in picks(i, m))
        return (moved[0], indices, *moved[2:])
    indices = picks(index, moved_index)
    return (moved[0], indices if len(indices) > 1 else indices[0], *moved[2:])


def to_meta(tree: Any, known: Callable[[torch.Tensor], torch.Tensor | None] = lambda t: None) -> Any:
    """Move every CPU tensor in nested arguments to meta. `known(tensor)` returns a form that exists already, or None."""
    if isinstance(tree, torch.Tensor):
        if tree.is_meta:
            return tree
        form = known(tree)
        return torch.empty_strided(tree.shape, tree.stride(), dtype=tree.dtype, device=META) if form is None else form
    if isinstance(tree, dict):
        return {k: to_meta(v, known) for k, v in tree.items()}
    if isinstance(tree, slice):
        return tree
    if type(tree) in (tuple, list):
        return type(tree)(to_meta(v, known) for v in tree)
    return tree


def stay_on_meta(tree: Any) -> Any:
    """Replace the CPU as a target device by meta: an unknown value cannot be fetched."""
    return _replace_device(tree, "cpu", META)


def _size_hint(operands: list[torch.Tensor]) -> int:
    # The worst that broadcasting makes of two operands: positions [s, 1] and [1, s] give a mask [s, s].
    sizes = sorted((t.numel() for t in operands), reverse=True)
    return (sizes[0] * sizes[1] if len(sizes) > 1 else sizes[0]) if sizes else 0


def _on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(_names_device(a, "meta") for a in (*args, *kwargs.values()))


def _names_device(item: Any, kind: str) -> bool:
    return item.type == kind if isinstance(item, torch.device) else isinstance(item, str) and item == kind


def _replace_device(tree: Any, kind: str, device: torch.device) -> Any:
    if _names_device(tree, kind):
        return device
    if isinstance(tree, dict):
        return {k: _replace_device(v, kind, device) for k, v in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_replace_device(v, kind, device) for v in tree)
    return tree
