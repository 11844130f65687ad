"""Masks of the inputs that pick the same number of elements of each sample: the patches that an autoencoder sees, the end of each text.

seen = patches[~masked].reshape(len(patches), -1, width)

Such a pick has one size for all batches of its kind. It is recorded as `take_along_dim`, which each rank can run on its own
samples. The counts are compared by a recorded question, so a run checks them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[..., Any]
Ask = Callable[[torch.Tensor], bool]
"""Reads the truth value of a tensor with one element, by a recorded call."""
_UNIQUE = frozenset({"unique", "unique_consecutive"})
_EXTRA_RESULTS = ("return_inverse", "return_counts", "dim")
"""Arguments by which these functions return more results, or compare rows."""


def pick_per_sample(call: Call, ask: Ask, x: Any, index: Any, masks: list[torch.Tensor]) -> tuple[Any, int]:
    """Compute `x[index]` for a mask of the inputs [samples, n], perhaps followed by full slices.

    Returns: the result, and how many elements are picked of each sample; (NotImplemented, 0) for any other index, for a mask that
    picks all or none, and for one with different counts.
    """
    mask, *rest = index if isinstance(index, tuple) else (index,)
    whole = all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in rest)
    if len(masks) != 1 or mask is not masks[0] or not whole or mask.dim() != 2 or x.shape[:2] != mask.shape:
        return NotImplemented, 0
    counts = call(torch.sum, mask, 1)
    number = int(mask[:1].sum()) if len(mask) else 0
    if not 0 < number < mask.shape[1] or not ask(call(torch.all, call(torch.eq, counts, number))):
        return NotImplemented, 0
    # Stable, so that the picked elements of a sample stay in their order, as `x[mask]` gives them.
    order = call(torch.argsort, mask, dim=1, descending=True, stable=True)
    places = call(torch.narrow, order, 1, 0, number)
    places = call(torch.Tensor.reshape, places, (len(x), number, *[1] * (x.dim() - 2)))
    return call(torch.flatten, call(torch.take_along_dim, x, places, 1), 0, 1), number


def has_one_distinct_value(call: Call, ask: Ask, fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call asks for the distinct values of a tensor that has one: its result then has one element."""
    more = any(kwargs.get(name) not in (None, False) for name in _EXTRA_RESULTS) or any(
        a not in (None, False) for a in args[1:]
    )
    if fn not in _UNIQUE or more or not args[0].numel():
        return False
    return ask(call(torch.all, call(torch.eq, args[0], args[0].flatten()[0].item())))
