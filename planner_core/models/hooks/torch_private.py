"""The private parts of torch on which planning, runs and checks rely: the one place to look at when torch has a new release.

Each has what it is, why no public name does, and the test that fails without it. All are in torch 2.6 to 2.13; `make test-torch
VERSION=...` runs the tests with another release. `runtime/program/torch_private.py` has those that need torch.distributed, and
`tests/models/test_torch_private.py` lists the few private attributes that are used elsewhere, and fails at any other.

Some names are replaced while a pass is recorded, and put back. A release that takes another way around one of these hides operators:

    nn.Module.__call__                      names module calls                                  callsites.Scopes
    nn.Module.__getattribute__, __setattr__ note what equal modules may differ in               replay.Replayer, checks.policy
    Function.apply                          an autograd function is one call                    callsites.Scopes
    F.multi_head_attention_forward          the batch first, and its parts as calls             wrappers.batch_first_attention
    checkpoint, jit.script, SyncBatchNorm, Variable, Distribution, autocast                     wrappers.unwrap_torch, checks.refusals
"""

# mypy: allow-untyped-calls, disable-error-code=attr-defined
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as recompute
from torch.autograd import grad_mode
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
"""`torch.utils._python_dispatch.TorchDispatchMode`: sees each ATen operator. torch documents it and has no public path to it.
Test: tests/verification/test_verify.py, whose memory and traffic are counted by it."""


# --- storages ---------------------------------------------------------------------------------------------


def storage_id(tensor: torch.Tensor | None) -> int:
    """Return a number for the storage of a tensor, equal for its views; id(tensor) if it has no plain storage.

    `UntypedStorage._cdata`, the address of the storage itself: each access to a storage makes another Python object, and the public
    `data_ptr()` is 0 for all tensors on meta. `_functorch` says what has no storage of its own: a tensor inside torch.func.
    Test: tests/models/test_torch_private.py.
    """
    if tensor is None or tensor.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor)
    return storage_key(tensor.untyped_storage())


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the number of a storage (`storage_id`)."""
    return int(storage._cdata)


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside wrappers of torch.func; the tensor itself if it has none.

    torch.func has no public way to look inside. Test: tests/models/test_refusals.py, models that use vmap.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


# --- dispatch ---------------------------------------------------------------------------------------------

disable_torch_functions = torch._C.DisableTorchFunction
"""Inside, neither modes nor subclasses see a call: what the planner itself asks of tensors is not recorded as the model's.
Test: tests/models/test_capture.py."""

disable_subclass_functions = torch._C.DisableTorchFunctionSubclass
"""Inside, subclasses do not see a call, e.g. to read an attribute of a tensor in the `__torch_function__` of its class; torch's own
guide to subclasses names it. Test: tests/runtime/test_own_state.py."""

preserve_version = grad_mode._unsafe_preserve_version_counter
"""Inside, a write in place leaves a tensor's version as it was, as a write through `.data` does, so that backward reads the new values
and does not raise. Test: tests/runtime/test_own_writes.py."""

RECORDED_FUNCTION = _SingleLevelFunction
"""The base class of every `autograd.Function`, whose `apply` is replaced during a pass: a mode does not see calls of it otherwise. A
model may have taken the bound method before (`square = Square.apply`), which ends in this one. Test: tests/models/test_own_functions.py."""

apply_function = torch._C._FunctionBase.__dict__["apply"]
"""`apply` as the C++ base class defines it. Test: tests/models/test_own_functions.py."""


def without_dispatch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function of torch such that it does not dispatch itself to a TorchFunctionMode.

    Its products and its softmax are then separate calls for the mode. The code of the function is run with other globals, in which
    `has_torch_function` says no. Test: tests/models/test_hooks.py, rare options of attention.
    """
    plain: Any = function
    names = {**plain.__globals__, "has_torch_function": lambda operands: False}
    return types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)


# --- what hides operators from a mode ---------------------------------------------------------------------

CHECKPOINT_GENERATOR = (recompute, "_checkpoint_without_reentrant_generator")
"""Where `checkpoint(f, use_reentrant=False)` looks up what it does around f. Models import `checkpoint` by name, so to replace that
name would reach none of them. Test: tests/verification/test_own_checkpoints.py."""

ScriptFunction = torch._C.ScriptFunction
"""The class of what `torch.jit.script` makes. Test: tests/models/test_refusals.py."""


def scripted_function(scripted: Any) -> Callable[..., Any] | None:
    """Return the Python function that was scripted; None if torch has not kept it.

    torch keeps it for its compiler, as `_torchdynamo_inline`. Test: tests/models/test_refusals.py.
    """
    return getattr(scripted, "_torchdynamo_inline", None)


# --- attention --------------------------------------------------------------------------------------------

check_attention_shapes = F._mha_shape_check
project_attention = F._in_projection
project_packed_attention = F._in_projection_packed
canonical_mask = F._canonical_mask
none_or_dtype = F._none_or_dtype
"""The parts of `F.multi_head_attention_forward`, of which `hooks/wrappers.py` puts the batch first. Its own parts, so that what they
check and how they join masks is torch's. Test: tests/models/test_hooks.py, which compares every option with torch's own."""
