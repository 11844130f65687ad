"""Spare a process that captures, and compiles nothing, the import of torch's compiler."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def spare_compiler() -> None:
    """Let torch's kernels in Python run without `torch._dynamo`, whose import takes as long as that of torch.

    They are marked so that the compiler leaves them alone, and the first call of one imports it to ask how (`torch._compile`, which
    keeps the answer as the function's `__dynamo_disable`). The answer here is the function itself.
    """
    import torch._decomp.decompositions
    import torch._refs.nn.functional
    import torch._refs.special
    from torch._compile import _disable_dynamo

    asks = _disable_dynamo(lambda: None).__code__
    for module in (torch._decomp.decompositions, torch._refs, torch._refs.nn.functional, torch._refs.special):
        for function in list(vars(module).values()):
            layer: Any = function
            while isinstance(layer, FunctionType) and (inside := getattr(layer, "__wrapped__", None)) is not None:
                if layer.__code__ is asks and layer.__closure__:
                    marked = layer.__closure__[layer.__code__.co_freevars.index("fn")].cell_contents
                    vars(marked).setdefault("__dynamo_disable", marked)
                layer = inside
