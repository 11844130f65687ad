"""The private parts of torch on which capture and runtime rely."""

# mypy: allow-untyped-calls, disable-error-code=attr-defined
from __future__ import annotations

import torch


def storage_id(tensor: torch.Tensor | None) -> int:
    """Return a number for the storage of a tensor, equal for its views; id(tensor) if it has no plain storage."""
    if tensor is None or tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


disable_torch_functions = torch._C.DisableTorchFunction
