"""Masks of transformers that combine several patterns: by broadcasting, where transformers uses `torch.vmap`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def register_masks() -> None:
    """Let `transformers.masking_utils` broadcast indices, as it does for single patterns."""
    module = sys.modules.get("transformers.masking_utils")
    if module is None or not hasattr(module, "_vmap_expansion_sdpa"):
        return

    # Operators inside a vmap cannot be seen one by one (docs/SUPPORT.md).
    def broadcast(mask_function: Callable[..., Any]) -> Callable[..., Any]:
        def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
            allowed = mask_function(*module._non_vmap_expansion_sdpa(batch, head, query, key))
            return allowed.expand(len(batch), -1, len(query), len(key))

        return mask

    module.__dict__["_vmap_expansion_sdpa"] = broadcast
