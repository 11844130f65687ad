"""Masks of the inputs that pick as many elements of each sample: the patches that an autoencoder sees, the end of each text.

seen = patches[~masked].reshape(len(patches), -1, width)

Such a pick has one size for all batches of that kind, so it is recorded as `take_along_dim` of places, which each rank can do for its own
samples. The numbers are asked for, so that a run asks for them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[..., Any]
Ask = Callable[[torch.Tensor], bool]
"""Makes the call that takes the yes or no out of a tensor of one."""
_UNIQUE = frozenset({"unique", "unique_consecutive"})
_EXTRA_RESULTS = ("return_inverse", "return_counts", "dim")
"""Arguments by which those return more, or look at rows."""


def pick_per_sample(call: Call, ask: Ask, x: Any, index: Any, masks: list[torch.Tensor]) -> tuple[Any, int]:
    """`x[index]`, where `index` is a mask of the inputs [samples, n], perhaps beside dims that are taken whole; and how many elements
    it picks of each sample. NotImplemented if it is another index, picks all or none, or not as many of each."""
    mask, *rest = index if isinstance(index, tuple) else (index,)
    whole = all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in rest)
    if len(masks) != 1 or mask is not masks[0] or not whole or mask.dim() != 2 or x.shape[:2] != mask.shape:
        return NotImplemented, 0
    counts = call(torch.sum, mask, 1)
    number = int(mask[:1].sum()) if len(mask) else 0
    if not 0 < number < mask.shape[1] or not ask(call(torch.all, call(torch.eq, counts, number))):
        return NotImplemented, 0
    order = call(torch.argsort, mask, dim=1, descending=True, stable=True)
    places = call(torch.narrow, order, 1, 0, number)
    places = call(torch.Tensor.reshape, places, (len(x), number, *[1] * (x.dim() - 2)))
    return call(torch.flatten, call(torch.take_along_dim, x, places, 1), 0, 1), number


def has_one_distinct_value(call: Call, ask: Ask, fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call looks for the different values of a tensor that has one: then its result has one element, too."""
    more = any(kwargs.get(name) not in (None, False) for name in _EXTRA_RESULTS) or any(
        a not in (None, False) for a in args[1:]
    )
    if fn not in _UNIQUE or more or not args[0].numel():
        return False
    return ask(call(torch.all, call(torch.eq, args[0], args[0].flatten()[0].item())))
