"""Open torch's wrappers, which would hide operators from a mode, while a model is captured or runs under a plan.

    checkpoint(f, x)            runs f: the plan says what is recomputed
    torch.jit.script(f)(x)      runs the Python function that was scripted
    torch.compile(f)(x)         runs f eagerly
    torch.distributions         do not check the values of their arguments, unless validate_args=True is given

Imports torch and nothing of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as recompute
from torch.distributions import Distribution

OURS = "_shardscope"
"""Attribute of functions that are ours: they are left as they are."""


@contextmanager
def opened(seen: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Inside, wrapped code runs as if it were not wrapped. `seen` gets the name of each wrapper that is met."""
    with ExitStack() as stack:
        for owner, name, value in _replacements(seen):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        checked = Distribution._validate_args
        stack.callback(Distribution.set_default_validate_args, checked)
        Distribution.set_default_validate_args(False)
        if "torch._dynamo" in sys.modules:  # else nothing can have been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _replacements(seen: Callable[[str], None]) -> list[tuple[Any, str, Any]]:
    without_reentry = recompute._checkpoint_without_reentrant_generator

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if getattr(function, OURS, False):
            yield from without_reentry(function, *args, **kwargs)
        else:
            seen("torch.utils.checkpoint")
            yield

    class Reentrant:
        """In place of the autograd function that runs with `use_reentrant=True`."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            """The function, once."""
            seen("torch.utils.checkpoint")
            return function(*args)

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(function, "_torchdynamo_inline", None)
        return called(function, *args, **kwargs) if plain is None else plain(*args, **kwargs)

    called = torch._C.ScriptFunction.__call__
    return [
        (recompute, "_checkpoint_without_reentrant_generator", generator),
        (recompute, "CheckpointFunction", Reentrant),
        (torch._C.ScriptFunction, "__call__", scripted),
    ]
