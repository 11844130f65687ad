"""Refuse calls that a plan cannot hold. Each message has the module, the line of the model's code, and what would help.

A recording sees calls of torch functions on tensors. Code may use a parameter in another way: a transform of `torch.func`, the
autograd engine called inside forward, compiled code. That would silently be missing from the plan, so it is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError, NeedsValues, Sentence, Value, named
from planner_core.models.hooks.callsites import is_library_file
from planner_core.models.hooks.chance import SHIFTING_DROPOUTS, draws_dropout_mask
from planner_core.models.hooks.model_parts import list_buffers, list_modules, list_parameters
from planner_core.models.hooks.torch_private import storage_id, without_transforms

_ENGINE = {
    "grad": "differentiates inside forward (torch.autograd.grad)",
    "backward": "runs a backward pass inside forward",
    "register_hook": "puts a hook on the gradient of a computed tensor",
    "register_post_accumulate_grad_hook": "puts a hook on a gradient",
}
_ENGINE_HELP = {
    "grad": "write the derivative out, since the operators of that backward pass have no placement",
    "backward": "return the loss, and call backward on it outside",
    "register_hook": "change gradients in a torch.autograd.Function, which a plan runs as one operator",
    "register_post_accumulate_grad_hook": "change gradients in the training loop",
}
_VALUE_READERS = frozenset(
    {"bool", "int", "float", "complex", "index", "item", "tolist", "numpy", "is_nonzero", "equal", "allclose"}
)


MAX_CALLS = 10_000
"""One call of a module may run at most this many operators, without those of the modules that it calls."""
TRANSFORM = "runs its operators inside a transform of torch.func (vmap, grad, jvp, ...)"
TRANSFORM_HELP = "they cannot be seen one by one: write the batch of the transform as a dim (torch.bmm, torch.einsum)"


def refusal(scope: str, what: str, help_: str) -> CaptureError:
    """Return an error with one sentence: the module, what it does, the line of its code, and what would help."""
    return CaptureError(f"{scope or 'the model'} {what}{model_line()}; ", help_)


def model_line() -> str:
    """Return ` at file:line (code)` of the innermost frame in the model's code; empty if none is on the stack."""
    return format_line(traceback.extract_stack())


def format_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Format the innermost frame of a stack that belongs to the model's code, as the end of a sentence."""
    theirs = [f for f in stack if not is_library_file(f.filename)]
    if not theirs:
        return ""
    last = theirs[-1]
    return f" at {last.filename.rpartition('site-packages/')[2]}:{last.lineno} ({last.line})"


def reads_values(func: Callable[..., Any]) -> bool:
    """Return whether a function asks what a tensor holds: `bool(x)`, `x.item()`; also by name `x.bool()`, which returns a tensor."""
    return getattr(func, "__name__", "").strip("_") in _VALUE_READERS


def check_call(scope: str, func: Callable[..., Any], fn: str | None, operands: Iterable[torch.Tensor]) -> None:
    """Refuse a call on tracked tensors that is not an operator of a graph."""
    name = getattr(func, "__name__", "")
    if name in _ENGINE and getattr(func, "__module__", "") in ("torch.autograd", "torch._tensor"):
        raise refusal(scope, _ENGINE[name], _ENGINE_HELP[name])
    # Asked of tensors on meta alone, torch fails by itself, and `explain_error` says where.
    if fn is None and reads_values(func) and not all(t.is_meta for t in operands):
        what = f"{scope or 'the model'} decides by the values of computed tensors{model_line()}"
        raise NeedsValues(
            f"{what}; no graph can hold that; use a form of the model without data-dependent control flow", what=what
        )


def check_setting(scope: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to set a tensor's `data`, and to change in forward whether a weight is trained.

    The loss of a GAN's generator does the latter to the discriminator; a graph has one answer for the whole step.
    """
    sets = getattr(func, "__name__", "") == "__set__"
    name = str(getattr(getattr(func, "__self__", None) if sets else func, "__name__", "")).rstrip("_")
    if sets and name == "data" and not _is_converting():
        raise refusal(
            scope,
            "gives a tensor other memory in forward (.data = ...)",
            "write into a buffer (self.mean.copy_(...)), and change weights after the optimizer's step, or by a parametrization",
        )
    if name == "requires_grad" and isinstance(args[0], nn.Parameter):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if bool(wanted) != args[0].requires_grad:
            raise refusal(
                scope,
                "changes in forward which weights are trained",
                "set that before it is planned, or call the part with weights that are detached (torch.func.functional_call)",
            )


_AS_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__"})


def check_arrays(scope: str, func: Callable[..., Any], of_inputs: bool) -> None:
    """Refuse to read values of the inputs as numpy arrays: that code would run once, when the pass is recorded."""
    if of_inputs and getattr(func, "__name__", "") in _AS_ARRAYS:
        raise refusal(
            scope, "takes the values of its inputs as arrays of numpy", "compute with them in torch, or before forward"
        )


def check_arguments(scope: str, func: Callable[..., Any], fn: str, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a generator of random numbers, which each rank would have for itself, dropout that is more than a mask, tensors inside a
    transform of torch.func, and types by their names, which differ between devices."""
    if func is torch.Tensor.type and not isinstance((*args[1:], *kwargs.values(), None)[0], torch.dtype):
        raise refusal(
            scope,
            "asks for the type of a tensor, or gives it, by a name that is another one on another device (.type)",
            "use dtypes: x.dtype, x.to(torch.float32)",
        )
    if fn in SHIFTING_DROPOUTS and draws_dropout_mask(fn, args, kwargs):
        raise refusal(
            scope,
            f"drops elements by {fn}, which also shifts and scales those that stay",
            "set its rate to 0, or use torch.nn.Dropout",
        )
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise refusal(
            scope,
            f"draws random numbers from a generator of its own ({fn})",
            "draw them from torch's default generator",
        )
    if any(isinstance(x, torch.Tensor) and without_transforms(x) is not x for x in leaves):
        raise refusal(scope, TRANSFORM, TRANSFORM_HELP)


def _is_converting() -> bool:
    """Return whether `nn.Module.to` sets the data of the weights."""
    frames = traceback.extract_stack(limit=8)
    return any(f.name == "_apply" and f.filename.endswith("/torch/nn/modules/module.py") for f in frames)


class TooManyPositions(CaptureError):
    """A lookup beyond the end of a table. `excess` is the number of missing rows."""

    def __init__(self, message: str, excess: int) -> None:
        super().__init__(message)
        self.excess = excess


_LOOKUP = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")


def check_lookup(scope: str, fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a lookup beyond the end of a table, which meta tensors would not notice, one that writes the table, and one that counts
    the ids of the batch."""
    if fn not in ("embedding", "embedding_bag"):
        return
    options = {**(dict(zip(_LOOKUP, args, strict=False)) if fn == "embedding" else {}), **kwargs}
    if options.get("scale_grad_by_freq"):
        raise refusal(
            scope,
            "divides gradients by how often an id occurs in the whole batch (scale_grad_by_freq), of which each rank has a part",
            "build the embedding without it",
        )
    if options.get("max_norm"):
        raise refusal(
            scope,
            "looks up a table with max_norm, which writes the table in forward",
            "a plan keeps parameters in parts: scale the rows after the optimizer's step, or the result of the lookup",
        )
    # A kernel fails on such an id. The table is on meta, where nothing looks at ids, and the plan would be one of a model that cannot run.
    if fn != "embedding" or len(args) < 2 or args[0].is_meta or not args[0].numel():
        return
    most, rows = int(args[0].max()), args[1].shape[0]
    if most >= rows:
        raise TooManyPositions(
            f"{scope or 'the model'} looks up row {most} of a table that has {rows}{model_line()}; "
            "give shorter sequences or ids within the table",
            most + 1 - rows,
        )


def check_length(scope: str, calls: int) -> None:
    """Refuse a module call with more operators of its own than a plan can follow."""
    if calls > MAX_CALLS:
        raise refusal(
            scope,
            f"runs more than {MAX_CALLS:,} operators in one call, as a loop over tokens does",
            Sentence(
                "write the loop as one operator (torch.nn.LSTM, a product, a cumulative sum), or give a smaller ",
                named("seq"),
            ),
        )


def check_origin(scope: str, tensor: torch.Tensor, originals: Mapping[int, str], left: Mapping[int, str]) -> None:
    """Refuse an operand of unknown origin.

    It is nested or sparse, so its sizes depend on values; one of the `originals`, of which the model has copies; a leftover of an
    earlier pass (`left`); or it needs a gradient and is neither a parameter nor computed by recorded calls.
    """
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise refusal(
            scope,
            f"computes with a {kind} tensor, whose sizes depend on its values",
            f"use a dense tensor{' with a mask, or padding' if tensor.is_nested else ', or indices with index_add'}",
        )
    if name := originals.get(storage_id(without_transforms(tensor))):
        raise refusal(
            scope,
            f"reaches {name} by a way that a copy of the model does not have (a weak reference, a global, a class attribute)",
            "hand the layer over as an attribute or an argument, or let a function of a file build the model, and give path.py:function",
        )
    if name := left.get(storage_id(without_transforms(tensor))):
        raise refusal(
            scope,
            f"reads what the step before has left in {name}",
            "write it into a buffer (register_buffer), or give it to forward as an input and return the next one",
        )
    if tensor.grad_fn is not None:
        how = type(tensor.grad_fn).__name__
        raise refusal(
            scope,
            f"uses a tensor that was made from parameters out of sight ({how})",
            "compute it in forward, by functions of torch that a plan can follow",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise refusal(
            scope,
            f"uses a tensor of shape {list(tensor.shape)} that needs a gradient and is no parameter of the model: each rank "
            "would have the gradient of its own samples alone",
            "make it an nn.Parameter of a module, or freeze it: requires_grad_(False)",
        )


def check_module(model: nn.Module) -> None:
    """Refuse hooks on gradients, which a plan would drop, and modules without Python code."""
    for name, module in list_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a TorchScript module, whose operators cannot be seen; give the Python module that it "
                "was made from"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name or 'the model'} has a hook on its backward pass, which a plan would not run; remove it, or change "
                "gradients in a torch.autograd.Function"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CaptureError(
                f"{name or 'the model'} makes sparse gradients (sparse=True), whose sizes depend on a batch; build it with sparse=False"
            )
    for name, param in list_parameters(model):
        if param.layout != torch.strided:
            raise CaptureError(
                f"{name} is a sparse tensor ({str(param.layout).removeprefix('torch.')}), whose sizes depend on its values; use a dense "
                "one, or indices with index_add"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"{name} has no size before its module (a Lazy one of torch.nn) is called; run the model once, then hand it over"
            )
    check_gradient_hooks(model)


def check_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of weights. A copy of a weight does not have them, so call this before a copy is made."""
    for name, param in list_parameters(model):
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise CaptureError(
                f"the parameter {name} has a hook on its gradient, which a plan would drop; change gradients in the training loop, or "
                "register it after apply (register_post_accumulate_grad_hook)"
            )


def check_buffers(model: nn.Module, before: Mapping[str, torch.Tensor], tracked: Container[int]) -> None:
    """Refuse a forward that replaces a buffer by a computed tensor, since the next step would read it."""
    for name, buffer in list_buffers(model):
        if buffer is not before.get(name) and id(buffer) in tracked:
            raise CaptureError(
                f"forward gives the name of the buffer {name} to a computed tensor, which the next step could not use; write into the "
                f"buffer (self.{name.rpartition('.')[2]}.copy_(...)), with what is detached"
            )


def check_result(out: Any) -> None:
    """Refuse objects of the model's own among its results: a loop takes tensors out of tuples and dicts, and so does a plan."""
    for leaf in pytree.tree_leaves(out):
        if dataclasses.is_dataclass(leaf) or isinstance(leaf, SimpleNamespace):
            raise CaptureError(
                f"forward returns a {type(leaf).__name__}, in which tensors cannot be found; return tensors, tuples or dicts of them"
            )


@contextmanager
def without_autocast(scope: Callable[[], str]) -> Iterator[None]:
    """Refuse autocast regions while entered, also for devices that this machine does not have.

    Model code passes the device of its tensors, which is meta. Autocast does not know meta, so it is asked as for the CPU.
    """
    plain_init, plain_enter = torch.autocast.__init__, torch.autocast.__enter__

    @functools.wraps(plain_init)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **named: Any) -> None:
        plain_init(self, _supported_device(device_type), dtype, enabled, *rest, **named)
        self._asked = enabled

    @functools.wraps(plain_enter)
    def enter(self: Any) -> Any:
        if getattr(self, "_asked", self._enabled):
            raise refusal(
                scope(),
                f"opens an autocast region ({str(self.fast_dtype).removeprefix('torch.')}), whose casts depend on the device",
                Sentence("take it out of forward, and give the type of the whole step with ", named("dtype")),
            )
        return plain_enter(self)  # type: ignore[no-untyped-call]

    def asking(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *device_type: function(*map(_supported_device, device_type))

    with (
        mock.patch.multiple(torch.autocast, __init__=init, __enter__=enter),
        mock.patch.object(torch, "is_autocast_enabled", asking(torch.is_autocast_enabled)),
        mock.patch.object(torch, "get_autocast_dtype", asking(torch.get_autocast_dtype)),
    ):
        yield


def _supported_device(device_type: str) -> str:
    return "cpu" if device_type == "meta" else device_type


def gradient_write_refusal(scope: str, model: nn.Module, buffer: str, target: torch.Tensor) -> CaptureError:
    """Return the error for writing a tensor with a gradient into `target`, which outlives the step.

    `target` is memory of the buffer `buffer`, or, if that is empty, a tensor in an attribute of the model.
    """
    keys = [f"{n}.{k}".lstrip(".") for n, part in list_modules(model) for k, v in vars(part).items() if v is target]
    what = (
        f"the buffer {buffer}" if buffer else f"the attribute {keys[0]}" if keys else "a tensor that outlives the step"
    )
    help_ = "detach it, since the next step would need the graph of this one"
    if buffer and not any(value is target for _, value in list_buffers(model)):  # a view, perhaps
        short = buffer.rpartition(".")[2]
        help_ = f"detach it, and write into the buffer itself, not a view of it: self.{short}.copy_(new.detach())"
    return refusal(scope, f"writes a tensor with a gradient into {what}", help_)


def check_target(scope: str, value: Value, no_buffer: bool, given: bool) -> None:
    """Refuse to write computed values into a weight, or into a tensor that outlives the step and is no buffer, e.g. an input (`given`)."""
    if value.kind == "parameter":
        raise refusal(
            scope,
            f"writes into the parameter {value.name} in place",
            "a plan keeps parameters in parts: update it after the optimizer's step, outside forward",
        )
    if no_buffer:
        what = f"the input {value.name}" if given else "a tensor that is no buffer"
        raise refusal(
            scope,
            f"writes what it computes in place into {what}",
            "write into a copy, or into a buffer (register_buffer), which the next step reads",
        )


def check_constant_write(scope: str, fn: str, used: bool) -> None:
    """Refuse to write into a constant that an operator has read before (`used`)."""
    if used:
        raise refusal(
            scope,
            f"writes in place into a constant that it has used before ({fn})",
            "write first, or into a copy: a step makes its constants before it runs its operators",
        )
