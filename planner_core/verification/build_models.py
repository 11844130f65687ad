"""Build models for verification from a plan's config, with weights and inputs that depend only on a seed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner_core.core import InputError, Workload, named_check
from planner_core.models.capture import returned_loss, standin_loss
from planner_core.models.hooks import DROPOUTS, canonical_name, draws_dropout_mask, without_dropout_masks
from planner_core.models.sources import (
    ModelSource,
    build_from_config,
    make_training_inputs,
    python_source,
    text_config,
    value_limits,
)
from planner_core.runtime import Init, Parallel, PlanMismatch, initializer, map_marked_leaves
from planner_core.runtime.training import call, has_hooks, join_arguments, position_along, split_arguments

SEED = 0
"""The seed of the weights and inputs of every verification, so that all ranks have the same."""
MAX_STD = 0.05
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


def build_model(config: Mapping[str, Any], dtype: str) -> tuple[nn.Module, Any]:
    """Build the module on meta. Returns it with its config object, or with the ModelSource of a user's callable."""
    if "callable" in config:
        source = python_source(config["callable"])
        return source.module, source
    module, parsed, _ = build_from_config(config, dtype, to_run=True)
    return module, parsed


def build_whole_model(config: Mapping[str, Any], dtype: str, seed: int) -> tuple[nn.Module, Any]:
    """Build the module with whole weights on the CPU, equal for equal seeds. Returns it with what `make_example_inputs` needs.

    A user's callable sets its own values, which become float64 if `dtype` is that. For a config, `gentle_initializer` sets them.
    """
    if "callable" not in config:
        module, parsed = build_model(config, dtype)
        return materialise(module, gentle_initializer(module, seed)), parsed
    _check_has_values(str(config["callable"]))
    torch.manual_seed(seed)
    source = python_source(config["callable"], "cpu")
    if dtype == "float64":
        widen_to_float64(source.module)
        source.inputs, source.args = _tree_to_double(source.inputs), _tree_to_double(source.args)
    return source.module, source


def widen_to_float64(module: nn.Module) -> None:
    """Convert real and complex parameters, buffers and tensors in attributes to double precision."""
    module._apply(_to_double)  # type: ignore[no-untyped-call]
    for part in module.modules():
        plain = {n: v for n, v in part.__dict__.items() if isinstance(v, torch.Tensor)}
        part.__dict__.update({n: _to_double(v) for n, v in plain.items()})


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _tree_to_double(tree: Any) -> Any:
    return pytree.tree_map(lambda x: _to_double(x) if isinstance(x, torch.Tensor) else x, tree)


def gentle_initializer(model: nn.Module, seed: int) -> Init:
    """Return an initializer with the model's own values, matrices scaled down to a standard deviation of at most `MAX_STD`.

    T5's own values are so large that a rounding error in one weight changes gradients by a percent, which would hide real faults.
    """
    init = initializer(model, seed)

    def scale_down(name: str, param: torch.Tensor) -> torch.Tensor:
        value = init(name, param)
        return value * min(1.0, MAX_STD / float(value.std())) if value.dim() > 1 and float(value.std()) > 0 else value

    return scale_down


def materialise(model: nn.Module, init: Init) -> nn.Module:
    """Replace the weights of a module by whole ones on the CPU. Tied weights stay tied."""
    replacements: dict[int, nn.Parameter] = {}
    values = {id(p): (p, init(name, p).clone()) for name, p in model.named_parameters()}
    for module in model.modules():
        for short, old in module._parameters.items():
            if old is not None and id(old) in values:
                replacements.setdefault(id(old), nn.Parameter(values[id(old)][1], requires_grad=old.requires_grad))
                module._parameters[short] = replacements[id(old)]
    return model


def call_as_in_a_loop(parallel: Parallel, inputs: Mapping[str, Any], rank: int) -> Any:
    """Call a model under a plan as a training loop on this rank does."""
    args, kwargs = loop_arguments(parallel, inputs, rank)
    return parallel.model(*args, **kwargs)


def loop_arguments(parallel: Parallel, inputs: Mapping[str, Any], rank: int) -> Arguments:
    """Return the arguments that a loop on this rank gives: the rank's samples of a global batch, or all of them if it must pass them."""
    args, kwargs = split_arguments(inputs)
    return rank_call(parallel, inputs, rank) or (args, {**kwargs, "global_batch": True})


def rank_call(parallel: Parallel, inputs: Mapping[str, Any], rank: int) -> Arguments | None:
    """Return this rank's arguments for its samples of a global batch, as a training loop reads them.

    None if a loop must pass the whole batch (`global_batch=True`): samples do not lie along dim 0, do not divide evenly, it is unknown
    which inputs have samples, or hooks of the model itself read what forward returns.
    """
    if has_hooks(parallel.model):
        return None
    args, kwargs = split_arguments(inputs)
    place, places = position_along(parallel.mesh.shape, parallel.data_axes, rank)
    try:
        sample_leaves = parallel.planned.sample_leaves(args, kwargs, global_batch=False)
    except PlanMismatch:
        return None
    leaves = [x for x, is_marked in zip(pytree.tree_leaves((args, kwargs)), sample_leaves, strict=True) if is_marked]
    if any(len(x) % places for x in leaves) or (places > 1 and not leaves):
        return None
    arguments: Arguments = map_marked_leaves((args, kwargs), sample_leaves, lambda x: x.chunk(places)[place])
    return arguments


def make_example_inputs(
    model: nn.Module, config: Any, workload: Workload, seed: int, *, meta_signals: bool = False
) -> dict[str, torch.Tensor]:
    """Make one global batch: random tokens, labels of which some are ignored, and images (on meta with `meta_signals`)."""
    if isinstance(config, ModelSource):
        return _callable_inputs(config, meta_signals)
    inputs = make_training_inputs(model, config, workload.batch, workload.seq, workload.dtype)
    random = torch.Generator().manual_seed(seed)
    below = value_limits(type(model).__name__, config, inputs)
    padding = getattr(text_config(config), "pad_token_id", None)
    for name, value in inputs.items():
        if value.is_floating_point():
            if not meta_signals:
                inputs[name] = torch.randn(value.shape, generator=random).to(value.dtype)
            continue
        if name not in below:
            continue  # positions, masks and sizes have the values that the model needs
        drawn = torch.randint(0, below[name], value.shape, generator=random)
        if value.dim() > 1 and padding is not None:  # the planned batch has no padding, and some models search for it
            drawn = torch.where(drawn == int(padding), value, drawn)
        inputs[name] = drawn
        if name == "labels" and value.dim() == 2:
            inputs[name][:, : max(1, value.shape[1] // 8)] = -100
    return inputs


def _callable_inputs(source: ModelSource, meta_signals: bool) -> dict[str, Any]:
    """Return the example inputs of a user's callable by name (`join_arguments`).

    Without values, integers are zeros and masks are all true, since a model may count what a mask keeps.
    """
    if not meta_signals:
        _check_has_values(source.source)

    def value(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_meta:
            return x
        if x.is_floating_point() or x.is_complex():
            return x
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)

    named, placed = pytree.tree_map(value, (source.inputs, source.args))
    return join_arguments(placed, named)


def _check_has_values(source: str) -> None:
    if source.endswith(".pt2"):
        raise InputError("an exported program holds no values to run on; verify its plan with ", named_check("fake"))


def single_process_loss(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss of the graph in one process."""
    return extract_loss(call(model, inputs))


def extract_loss(out: Any) -> torch.Tensor:
    """Return the loss in a model's output, or the stand-in if the output has none."""
    loss = returned_loss(out)
    return standin_loss(out) if loss is None else loss


# --- modes of a run that is compared ------------------------------------------------------------------


class Float64Casts(TorchFunctionMode):
    """Turn casts to float32 into casts to float64 while entered.

    A cast without effect in the float32 model, which the plan describes, then has no effect in the float64 model either.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class WithoutDropout(TorchFunctionMode):
    """Let every call of dropout in the model's code (`F.dropout(x, self.rate)`) return its operand while entered.

    Under a plan each rank draws the mask of its own part, so one process has other masks than the ranks, and a comparison would be
    meaningless. Dropout of modules is off from the start. `dropped`: whether a call would have dropped something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:  # torch's own code, whose calls no mode sees
            given = inspect.signature(func).bind(*args, **kwargs)
            self.dropped |= bool(given.arguments["dropout_p"] and given.arguments.get("training", True))
            given.arguments["training"] = False  # which it asks for its dropout alone
            return func(*given.args, **given.kwargs)
        fn = canonical_name(func, kwargs)
        dropped = draws_dropout_mask(fn, args, kwargs)
        self.dropped |= dropped
        if fn in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if dropped:
            args, kwargs = without_dropout_masks(fn, args, kwargs)
        return func(*args, **kwargs)

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward pass so that it drops nothing, even while it is recorded."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run
