"""A module that a user has built in Python: copied onto meta with its example inputs, so the user's module does not change."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError, InputError, shorten_error
from planner_core.models.capture.checks.refusals import check_gradient_hooks
from planner_core.models.hooks.model_parts import list_buffers, list_modules, list_parameters
from planner_core.models.hooks.torch_private import storage_id
from planner_core.models.sources.arguments import as_arguments, explain_unsupported, list_inputs_by_samples
from planner_core.models.sources.resolve import ModelSource

MODULE_KEY = "module"
"""Key of a plan's `config` that names the class of a module in memory, which cannot be built again from the plan."""


def module_source(module: nn.Module, inputs: Any, dtype: str | None = None) -> ModelSource:
    """Copy a module onto meta, and prepare its inputs: floating-point ones on meta, integers and masks with values on the CPU.

    `inputs` are a tuple of positional arguments, a mapping of named ones, or one tensor. `dtype` casts parameters, buffers
    and inputs of floating point, as `module.to(dtype)` does. Raises InputError or CaptureError.
    """
    name = type(module).__name__
    if inputs is None:
        raise InputError(
            f"{name} needs example inputs: inputs=(x, y) or inputs={{'x': x, 'y': y}}, as the model is called"
        )
    args, kwargs = as_arguments(inputs)
    _check_inputs(module, args, kwargs)
    on_meta = _copy_onto_meta(module)
    if dtype is not None:
        on_meta = on_meta.to(getattr(torch, dtype))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _planned_input(t, dtype), (args, kwargs))
    config = {
        MODULE_KEY: f"{type(module).__module__}.{type(module).__qualname__}",
        **list_inputs_by_samples(module, args, kwargs),
    }
    originals = {
        storage_id(tensor): key
        for key, tensor in (*list_parameters(module), *list_buffers(module))
        if tensor.layout == torch.strided
    }
    workload = _read_workload(name, (args, kwargs))
    return ModelSource(name, MODULE_KEY, on_meta.train(), kwargs, args, config, workload, originals=originals)


def _check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if unread := explain_unsupported(args, kwargs):
        raise InputError(f"the example inputs of {name} cannot be planned: {unread}")
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{name}.forward cannot be called with these inputs: {error}; give them as the model is called, inputs=(x, y) or "
            "inputs={'x': x}, and one dict that is itself an argument as inputs=(batch,)"
        ) from None


def _copy_onto_meta(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters and buffers on meta, where they take no memory."""
    check_gradient_hooks(module)
    tensors: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()
    }
    return copy_module(module, tensors | {id(b): b.detach().to("meta") for b in module.buffers()})


def copy_module(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """Copy a module, with `tensors` in place of its own, by id. Tied tensors stay tied.

    Raises CaptureError if no copy can be made.
    """
    memo: dict[int, Any] = dict(tensors)
    try:
        with _CopyComputedTensors():
            copied: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        what = f"{type(module).__name__} cannot be copied{_find_uncopyable(module, tensors)}"
        raise CaptureError(
            f"{what} ({type(error).__name__}: {shorten_error(error, 150)}); "
            "let a function of a file build it, and give path/to/file.py:function"
        ) from None
    for part in copied.modules():
        for values in (part.__dict__, *(v for v in part.__dict__.values() if isinstance(v, dict))):
            values.update({k: _rebind_function(f, memo) for k, f in values.items() if isinstance(f, FunctionType)})
    return copied


class _CopyComputedTensors(TorchFunctionMode):
    """Let deepcopy copy computed tensors, which torch refuses, as computed tensors on meta.

    Forward may then replace such an attribute (as hooks of `torch.nn.utils.weight_norm` do), but not read it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__ or args[0].grad_fn is None:
            return func(*args, **(kwargs or {}))
        old, memo = args
        with torch.enable_grad():
            copied = torch.empty_like(old.detach(), device="meta").requires_grad_().clone()
        return memo.setdefault(id(old), copied)


def _find_uncopyable(module: nn.Module, memo: Mapping[int, Any]) -> str:
    """Return `: net.lock is a lock` for the first attribute that cannot be copied; empty if each one alone can be."""
    internals = nn.Module().__dict__.keys() - {"training"}
    for name, part in list_modules(module):
        for key, value in part.__dict__.items():
            try:
                with _CopyComputedTensors():
                    copy.deepcopy(None if key in internals else value, dict(memo))
            except Exception:
                return f": {name}.{key}".replace(": .", ": ") + f" is a {type(value).__name__}"
    return ""


def _rebind_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Bind a function (often a hook) to copies of the module's parts in its closure and defaults: deepcopy does not copy functions."""
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    memo[id(function)] = function  # a function may refer to itself
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    captured = (*defaults, *(c.cell_contents for c in cells if _has_value(c)))
    if not any(_rebind_value(x, memo) is not x for x in captured):
        return function
    for cell in cells:  # functions of one scope share cells
        if id(cell) not in memo:
            memo[id(cell)] = CellType(_rebind_value(cell.cell_contents, memo)) if _has_value(cell) else cell
    given = tuple(_rebind_value(x, memo) for x in defaults)
    rebound = FunctionType(
        function.__code__, function.__globals__, function.__name__, given, tuple(memo[id(c)] for c in cells)
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    rebound.__dict__.update(function.__dict__)
    memo[id(function)] = rebound
    return rebound


def _has_value(cell: CellType) -> bool:
    """Return whether a variable of a closure has a value: reading an empty one raises ValueError."""
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not cell
    return False


def _rebind_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of a value; a method becomes that of the copied object."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType) and value.__closure__:
        return _rebind_function(value, memo)
    return memo.get(id(value), value)


def _planned_input(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    # The model's code may ask masks and ids what they hold, and real numbers never choose its path.
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=getattr(torch, dtype) if dtype else tensor.dtype, device="meta")
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def infer_workload(source: ModelSource) -> dict[str, int]:
    """Return batch and seq of example inputs; 1 and 1 if no input has a dim."""
    try:
        return _read_workload(source.name, (source.inputs, source.args))
    except InputError:
        return {"batch": 1, "seq": 1}


def _read_workload(name: str, inputs: Any) -> dict[str, int]:
    """Return batch and seq: the first dim of the first tensor, and its second dim if it holds token ids."""
    first = next((t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()), None)
    if first is None:
        raise InputError(f"the example inputs of {name} hold no tensor with a batch dim; give the inputs of one step")
    tokens = first.shape[1] if first.dim() > 1 and not first.is_floating_point() else 1
    return {"batch": int(first.shape[0]), "seq": int(tokens)}
