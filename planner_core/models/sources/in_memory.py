"""A module that a user has in Python. It is copied onto meta, so that the user's module is not changed, with its example inputs."""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError, InputError
from planner_core.models.capture.checks.refusals import check_gradient_hooks
from planner_core.models.hooks.model_parts import list_buffers, list_modules, list_parameters
from planner_core.models.sources.arguments import tables_of, unread_argument
from planner_core.models.sources.resolve import ModelSource

MODULE = "module"
"""Key of a plan's `config` that names the class of a module in memory, which cannot be built again from the plan."""


def module_source(module: nn.Module, inputs: Any, dtype: str | None = None) -> ModelSource:
    """The module on meta, and its inputs: floating-point inputs on meta; whole numbers and masks with values, on the CPU.

    `inputs` are a tuple of positional arguments, a mapping of named ones, or one tensor. `dtype` casts parameters, buffers
    and inputs of floating point, as `module.to(dtype)` does. Raises InputError or CaptureError.
    """
    name = type(module).__name__
    if inputs is None:
        raise InputError(
            f"{name} needs example inputs: inputs=(x, y) or inputs={{'x': x, 'y': y}}, as the model is called"
        )
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    _check_inputs(module, args, kwargs)
    on_meta = _on_meta(module)
    if dtype is not None:
        on_meta = on_meta.to(getattr(torch, dtype))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _input(t, dtype), (args, kwargs))
    config = {MODULE: f"{type(module).__module__}.{type(module).__qualname__}", **tables_of(module, args, kwargs)}
    originals = {
        tensor.untyped_storage()._cdata: key
        for key, tensor in (*list_parameters(module), *list_buffers(module))
        if tensor.layout == torch.strided
    }
    workload = _workload(name, (args, kwargs))
    return ModelSource(name, MODULE, on_meta.train(), kwargs, args, config, workload, originals=originals)


def _check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if unread := unread_argument(args, kwargs):
        raise InputError(f"the example inputs of {name} cannot be planned: {unread}")
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{name}.forward cannot be called with these inputs: {error}; give them as the model is called, inputs=(x, y) or "
            "inputs={'x': x}, and one dict that is itself an argument as inputs=(batch,)"
        ) from None


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on meta, where they take no memory."""
    check_gradient_hooks(module)
    tensors: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()
    }
    return copied(module, tensors | {id(b): b.detach().to("meta") for b in module.buffers()})


def copied(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """A copy of a module that has other `tensors`, by the id of those in whose place they are. Tied tensors stay tied.

    Raises CaptureError if no copy can be made.
    """
    memo: dict[int, Any] = dict(tensors)
    try:
        with _Computed():
            made: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied{_uncopied(module, tensors)} ({type(error).__name__}: {_first_words(error)}); let a "
            "function of a file build it, and give path/to/file.py:function"
        ) from None
    for part in made.modules():
        for held in (part.__dict__, *(v for v in part.__dict__.values() if isinstance(v, dict))):
            held.update({k: _of_copy(f, memo) for k, f in held.items() if isinstance(f, FunctionType)})
    return made


class _Computed(TorchFunctionMode):
    """Inside, a computed tensor is copied as one on meta that is computed as well, so that forward may make it anew (as the hooks of
    `torch.nn.utils.weight_norm` do), but not read it. Torch copies leaves alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__ or args[0].grad_fn is None:
            return func(*args, **(kwargs or {}))
        old, memo = args
        with torch.enable_grad():
            made = torch.empty_like(old.detach(), device="meta").requires_grad_().clone()
        return memo.setdefault(id(old), made)


def _uncopied(module: nn.Module, memo: Mapping[int, Any]) -> str:
    """`: net.lock is a lock` of the first attribute that no copy can be made of; empty if there is none alone."""
    apart = nn.Module().__dict__.keys() - {"training"}
    for name, part in list_modules(module):
        for key, value in part.__dict__.items():
            try:
                with _Computed():
                    copy.deepcopy(None if key in apart else value, dict(memo))
            except Exception:
                return f": {name}.{key}".replace(": .", ": ") + f" is a {type(value).__name__}"
    return ""


def _first_words(error: Exception) -> str:
    """What an error says, in whole words."""
    return textwrap.shorten(str(error), 150, placeholder=" ...")


def _of_copy(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A function (a hook, most often) that sees the copies where its variables are of the module: deepcopy leaves functions as they are."""
    if id(function) in memo:
        return memo[id(function)]  # type: ignore[no-any-return]
    memo[id(function)] = function  # it may know itself
    cells, defaults = function.__closure__ or (), function.__defaults__ or ()
    held = (*defaults, *(c.cell_contents for c in cells if _filled(c)))
    if not any(_copy_of(x, memo) is not x for x in held):
        return function
    for cell in cells:  # functions of one scope share its variables
        if id(cell) not in memo:
            memo[id(cell)] = CellType(_copy_of(cell.cell_contents, memo)) if _filled(cell) else cell
    given = tuple(_copy_of(x, memo) for x in defaults)
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, given, tuple(memo[id(c)] for c in cells)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    memo[id(function)] = made
    return made


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """What a copied module has in the place of a value; a method is that of the copy."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType) and value.__closure__:
        return _of_copy(value, memo)
    return memo.get(id(value), value)


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False


def _input(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=getattr(torch, dtype) if dtype else tensor.dtype, device="meta")
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def sizes_of(made: ModelSource) -> dict[str, int]:
    """Samples and tokens of example inputs; one of each if no input has a dim."""
    try:
        return _workload(made.name, (made.inputs, made.args))
    except InputError:
        return {"batch": 1, "seq": 1}


def _workload(name: str, inputs: Any) -> dict[str, int]:
    """Samples and tokens of a batch: the first dim of the first tensor, and its second dim if it holds token ids."""
    first = next((t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()), None)
    if first is None:
        raise InputError(f"the example inputs of {name} hold no tensor with a batch dim; give the inputs of one step")
    tokens = first.shape[1] if first.dim() > 1 and not first.is_floating_point() else 1
    return {"batch": int(first.shape[0]), "seq": int(tokens)}
