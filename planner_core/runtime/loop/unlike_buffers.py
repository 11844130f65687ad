"""Buffers that are not the same on all ranks. Those whose values forward never reads may differ: memory that was never written, of which
it asks the type and place alone (as of fairseq's `_float_tensor`)."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_FORMS = frozenset({
    "new", "new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device", "ndimension",
    "__len__", "is_floating_point", "is_complex", "is_contiguous",
})  # fmt: skip
"""Functions of the shape, type and place of their first operand."""
_ATTRIBUTES = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta", "is_sparse", "requires_grad", "itemsize", "nbytes", "is_leaf",
})  # fmt: skip
"""What a tensor says of itself without its values."""


def without(
    model: nn.Module, forward: Callable[..., Any], unlike: Callable[[], Collection[str]], refuse: Callable[[str], None]
) -> Callable[..., Any]:
    """As `forward`, the plain one of `model`; `refuse` is called with the name of a buffer among those `unlike` before it is used."""
    first = _memory(model, unlike())

    @functools.wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        names = unlike()
        if not names:
            return forward(*args, **kwargs)
        reads = _Reads({m: n for m, n in {**first, **_memory(model, names)}.items() if n in names}, refuse)
        with reads:
            out = forward(*args, **kwargs)
        reads.check(out)
        return out

    return checked


class _Reads(TorchFunctionMode):
    """Calls `refuse` with the name of a buffer whose memory is used inside. `names`: those of buffers, by their memory."""

    def __init__(self, names: Mapping[int, str], refuse: Callable[[str], None]) -> None:
        super().__init__()
        self.names, self.refuse = names, refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        form = name in _FORMS or (name == "__get__" and getattr(owner, "__name__", "") in _ATTRIBUTES)
        left = args[1:] if form else args[:1] if name == "type_as" else args
        self.check((left, kwargs))
        return func(*args, **(kwargs or {}))

    def check(self, tree: Any) -> None:
        """Refuse what is among some arguments or results."""
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and (memory := _place(tensor)) in self.names:
                self.refuse(self.names[memory])


def _memory(model: nn.Module, names: Collection[str]) -> dict[int, str]:
    return {_place(b): n for n, b in model.named_buffers() if n in names}


def _place(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return id(tensor)
        return int(tensor.untyped_storage()._cdata)
