"""Functions that torch renamed or changed between 2.6 and now. No other module asks for torch's version.

Where two names exist the newer one is taken, since the older one warns.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from planner_core.runtime.mismatch import PlanMismatch

OLDEST_TORCH = (2, 6)
"""The first torch with the public FSDP2, and the oldest with which plans are run in the tests."""


OLDEST_COMPILED = (2, 11)
"""In 2.6 and 2.8 torch.compile does not follow the moves of a program ("Unexpected type in sourceless builder"); 2.9, 2.10: untried."""


def release_of(version: str = torch.__version__) -> tuple[int, ...]:
    """Return the major and minor number of a release of torch: (2, 11) for "2.11.0+cu130"."""
    return tuple(int(n) for n in version.split(".")[:2])


BYPASSES_DTENSOR_SUBCLASSES = (2, 10) <= release_of() < (2, 12)
"""Whether torch runs its own rules for a subclass of DTensor and never asks the subclass (pytorch #177716: in 2.10 and 2.11)."""


def check_torch(version: str = torch.__version__, *, compiled: bool = False) -> None:
    """Raise PlanMismatch if this torch is too old to run a plan, or to compile one."""
    release = release_of(version)
    if release < OLDEST_TORCH:
        raise PlanMismatch(f"torch {version} is older than 2.6, the oldest that a plan runs with; install a later one")
    if compiled and release < OLDEST_COMPILED:
        raise PlanMismatch(
            f"torch {version} cannot compile the blocks of a plan; install 2.11 or later, or call apply without compile"
        )


def _first_available(module: Any, *names: str) -> Callable[..., Any]:
    """Return the function with the first of the names that this torch has."""
    function: Callable[..., Any] = next(getattr(module, name) for name in names if hasattr(module, name))
    return function


all_gather_into = _first_available(dist, "all_gather_single", "all_gather_into_tensor")
"""(output, input, group=, async_op=): the tensors of all ranks, along dim 0 of `output`. 2.13 renamed it."""
reduce_scatter_into = _first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor")
"""(output, input, op=, group=, async_op=): this rank's part of the sum. 2.13 renamed it."""
