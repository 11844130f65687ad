"""Find sizes that depend on the values of a model's inputs: the number of elements that a mask picks (`x[labels != -100]`), of distinct
values, of repeats. They differ from batch to batch, and a plan holds one number."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_VALUE_SIZED = frozenset({"nonzero", "argwhere", "unique", "unique_consecutive"})


class InputValues:
    """The tensors whose values depend on the inputs alone."""

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add tensors."""
        self._tensors.update((id(t), weakref.ref(t)) for t in tensors)

    def include(self, tensor: Any) -> bool:
        """Return whether the values of a tensor depend on the inputs alone."""
        known = self._tensors.get(id(tensor))
        # The weak reference shows whether the id still belongs to the tensor that was added: a freed id is used again.
        return known is not None and known() is tensor

    def find_masks(self, fn: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the masks among the inputs by which a call picks elements."""
        if fn not in ("getitem", "masked_select"):
            return []
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return [
            m
            for m in index
            if isinstance(m, torch.Tensor) and m.dtype == torch.bool and m.dim() and self._has_input_values(m)
        ]

    def decide_size(self, fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the values of an operand decide the size of a call's result."""
        given = (*args, *kwargs.values())
        if fn in ("bincount", "one_hot"):  # an explicit minlength or num_classes fixes the size
            most = next((n for n in given[1:] if type(n) is int), -1)
            return bool(self._has_input_values(args[0]) and args[0].numel() and int(args[0].max()) >= most)
        if fn == "repeat_interleave":
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            repeats = tensors[1:] or (tensors if not any(type(n) is int for n in given) else [])
            return any(map(self._has_input_values, repeats))
        return fn in _VALUE_SIZED and self._has_input_values(args[0])

    def _has_input_values(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and not tensor.is_meta and self.include(tensor)


def describe_arguments(tree: Any) -> str:
    """Describe the arguments of a call as text, with a shape for each tensor."""
    if isinstance(tree, torch.Tensor):
        return str(tuple(tree.shape))
    if isinstance(tree, (tuple, list)):
        return f"[{', '.join(map(describe_arguments, tree))}]"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{k}: {describe_arguments(v)}' for k, v in tree.items())}}}"
    if isinstance(tree, slice):
        return describe_arguments((tree.start, tree.stop, tree.step))
    return (
        repr(tree)
        if isinstance(tree, (bool, int, float, complex, str, type(None), torch.dtype))
        else type(tree).__name__
    )
