"""The private parts of torch.distributed and of autograd on which a run relies (see `models/hooks/torch_private.py`)."""

# mypy: allow-untyped-calls, disable-error-code=attr-defined
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import optimizer
from torch.utils import _foreach_utils

__all__ = ["compute_local_shape_and_global_offset"]
"""(shape, mesh, placements): the shape of this rank's piece, and where it begins. Test: tests/runtime/test_own_state.py."""

NormPartial = _NormPartial
"""The placement of a norm of which each rank has that of its part: 3 and 4 make 5. Test: tests/runtime/test_own_state.py."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself. Test: tests/runtime/test_own_state.py.

    torch's `to_local()` is an operation of autograd: it makes another tensor, and not the one that the rank holds.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# --- process groups ---------------------------------------------------------------------------------------


def coalesce(group: Any) -> AbstractContextManager[Any]:
    """Collectives that are issued inside leave in one launch. Test: tests/runtime/test_launches.py.

    torch has no public name for it.
    """
    return dist._coalescing_manager(group, async_ops=True)


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the group by the name that functional collectives take. Test: tests/verification/test_verify.py, by_axis."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def flattened_group(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[dist.ProcessGroup, int]:
    """Return the group of several axes of a mesh as one, and this rank's place in it. torch makes it once for a mesh.

    torchtitan sums gradients over such a group too. Test: tests/runtime/test_joint_sums.py.
    """
    flat = mesh[tuple(axes)]._flatten()
    return flat.get_group(), flat.get_local_rank()


def default_store() -> Any:
    """Return the store of the default group, in which ranks meet without a collective. Test: tests/runtime/test_agreement.py."""
    return distributed_c10d._get_default_store()


def group_timeout_s(device: str) -> float:
    """Return the seconds after which a collective of the default group on a device fails.

    Raises RuntimeError or AttributeError if it has no backend for the device. Test: tests/runtime/test_agreement.py.
    """
    backend = dist.group.WORLD._get_backend(torch.device(device))  # type: ignore[union-attr]
    return float(backend.options._timeout.total_seconds())


def fake_store() -> Any:
    """Return a store for a group of backend "fake", whose collectives move nothing. Test: tests/verification/test_verify.py."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    return FakeStore()


def supports_meta(collective: Any) -> bool:
    """Return whether an operator of the namespace `c10d` takes tensors on meta. None does before 2.7.

    Test: tests/verification/test_verify.py, with the oldest torch.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(collective.name(), "Meta"))


# --- autograd ---------------------------------------------------------------------------------------------


def queue_after_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now has finished. FSDP2 does it so. Test: tests/runtime/test_own_loop.py."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def will_run(node: Any) -> bool:
    """Return whether the backward pass that runs now reaches a node of autograd's graph. Test: tests/runtime/test_own_state.py."""
    return bool(torch._C._will_engine_execute_node(node))


# --- lists of tensors -------------------------------------------------------------------------------------


def update_in_lists(kind: Any) -> None:
    """Let optimizers update lists of parameters of a class at once, as torch.distributed.tensor does for DTensor.

    Test: tests/runtime/test_own_loop.py.
    """
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        known.append(kind)


multiply_in_place = torch._foreach_mul_
copy_lists = torch._foreach_copy_
norms_of = torch._foreach_norm
join_chunks = torch._chunk_cat
"""Kernels that take lists of tensors: one launch for all. torch clips by the same, and FSDP2 packs by the last.
Test: tests/runtime/test_own_loop.py, tests/runtime/test_buckets.py."""
