"""Build the models for verification from a plan's config, with weights and inputs that depend on a seed alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner_core.core import InputError
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
from planner_core.runtime.training import has_hooks, position_along

SPREAD = 0.05
ARGS = "*"
"""The key of positional inputs among the named ones."""


def build_model(config: Mapping[str, Any], dtype: str) -> tuple[nn.Module, Any]:
    """The module on meta, and its config object; for a user's own callable, what it returned."""
    if "callable" in config:
        made = python_source(config["callable"])
        return made.module, made
    module, parsed, _ = build_from_config(config, dtype, to_run=True)
    return module, parsed


def whole_model(config: Mapping[str, Any], dtype: str, seed: int) -> tuple[nn.Module, Any]:
    """The module with whole weights on the CPU, equal for equal seeds; and what `example_inputs` needs.

    A user's callable gives its own values, which are cast to float64 if `dtype` says so. For a config, `gentle_initializer` makes them.
    """
    if "callable" not in config:
        module, parsed = build_model(config, dtype)
        return materialise(module, gentle_initializer(module, seed)), parsed
    _with_values(str(config["callable"]))
    torch.manual_seed(seed)
    made = python_source(config["callable"], "cpu")
    if dtype == "float64":
        widen(made.module)
        made.inputs, made.args = _widened(made.inputs), _widened(made.args)
    return made.module, made


def widen(module: nn.Module) -> None:
    """Double the precision of every real and complex parameter and buffer, and of tensors that modules hold as attributes."""
    module._apply(_wide)  # type: ignore[no-untyped-call]
    for part in module.modules():
        plain = {n: v for n, v in part.__dict__.items() if isinstance(v, torch.Tensor)}
        part.__dict__.update({n: _wide(v) for n, v in plain.items()})


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _widened(tree: Any) -> Any:
    return pytree.tree_map(lambda x: _wide(x) if isinstance(x, torch.Tensor) else x, tree)


def gentle_initializer(model: nn.Module, seed: int) -> Init:
    """The model's own initial values, with matrices scaled down to a standard deviation of at most `SPREAD`.

    T5's own values are so large that a rounding error in one weight changes gradients by a percent, which would hide real faults.
    """
    init = initializer(model, seed)

    def gentle(name: str, param: torch.Tensor) -> torch.Tensor:
        value = init(name, param)
        return value * min(1.0, SPREAD / float(value.std())) if value.dim() > 1 and float(value.std()) > 0 else value

    return gentle


def materialise(model: nn.Module, init: Init) -> nn.Module:
    """The same module with whole weights on the CPU. Tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    values = {id(p): (p, init(name, p).clone()) for name, p in model.named_parameters()}
    for module in model.modules():
        for short, old in module._parameters.items():
            if old is not None and id(old) in values:
                made.setdefault(id(old), nn.Parameter(values[id(old)][1], requires_grad=old.requires_grad))
                module._parameters[short] = made[id(old)]
    return model


def called_as_in_a_loop(parallel: Parallel, inputs: Mapping[str, Any], rank: int) -> Any:
    """What a model under a plan returns to a training loop on this rank, which gives it the rank's own samples of a global batch."""
    call = None if has_hooks(parallel.model) else own_call(parallel, inputs, rank)
    if call is None:
        return call_model(functools.partial(parallel.model, global_batch=True), inputs)
    return parallel.model(*call[0], **call[1])


def own_call(parallel: Parallel, inputs: Mapping[str, Any], rank: int) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A global batch as this rank's call of the model: its own samples, as a training loop reads them. None if the samples are not along
    dim 0 of the inputs, do not divide, or nothing says what has some, so that a loop has to give the whole batch (`global_batch=True`)."""
    args, kwargs = tuple(inputs.get(ARGS, ())), {k: v for k, v in inputs.items() if k != ARGS}
    place, places = position_along(parallel.mesh.shape, parallel.data_axes, rank)
    try:
        held = parallel.planned.sample_leaves(args, kwargs, global_batch=False)
    except PlanMismatch:
        return None
    leaves = [x for x, own in zip(pytree.tree_leaves((args, kwargs)), held, strict=True) if own]
    if any(len(x) % places for x in leaves) or (places > 1 and not leaves):
        return None
    own: tuple[tuple[Any, ...], dict[str, Any]] = map_marked_leaves(
        (args, kwargs), held, lambda x: x.chunk(places)[place]
    )
    return own


def example_inputs(
    model: nn.Module, config: Any, workload: Mapping[str, Any], seed: int, *, meta_signals: bool = False
) -> dict[str, torch.Tensor]:
    """One global batch: random tokens, labels (some of them ignored), images (left on meta with `meta_signals`)."""
    if isinstance(config, ModelSource):
        return _own_inputs(config, seed, meta_signals)
    inputs = make_training_inputs(model, config, int(workload["batch"]), int(workload["seq"]), str(workload["dtype"]))
    random = torch.Generator().manual_seed(seed)
    below = value_limits(type(model).__name__, config, inputs)
    padding = getattr(text_config(config), "pad_token_id", None)
    for name, value in inputs.items():
        if value.is_floating_point():
            if not meta_signals:
                inputs[name] = torch.randn(value.shape, generator=random).to(value.dtype)
            continue
        if name not in below:
            continue  # places, masks and sizes have the values that the model needs
        drawn = torch.randint(0, below[name], value.shape, generator=random)
        if value.dim() > 1 and padding is not None:  # the batch that is planned has no padding; some models look for it
            drawn = torch.where(drawn == int(padding), value, drawn)
        inputs[name] = drawn
        if name == "labels" and value.dim() == 2:
            inputs[name][:, : max(1, value.shape[1] // 8)] = -100
    return inputs


def _own_inputs(made: ModelSource, seed: int, meta_signals: bool) -> dict[str, Any]:
    """The example inputs of a user's callable; positional ones under `ARGS`. Where they have no values, integers are zeros and masks
    are full, since a model may count what a mask leaves."""
    if not meta_signals:
        _with_values(made.source)

    def value(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_meta:
            return x
        if x.is_floating_point() or x.is_complex():
            return x
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)

    named, placed = pytree.tree_map(value, (made.inputs, made.args))
    return {ARGS: placed, **named} if placed else named


def _with_values(source: str) -> None:
    if source.endswith(".pt2"):
        raise InputError("an exported program holds no values to run on; verify its plan with --fake")


def call_model(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """The model on `example_inputs`."""
    return model(*inputs.get(ARGS, ()), **{k: v for k, v in inputs.items() if k != ARGS})


def single_loss(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss that the graph trains on, in one process."""
    return loss_of(call_model(model, inputs))


def loss_of(out: Any) -> torch.Tensor:
    """The loss of what a model returned; outside of it the stand-in, if it returned none."""
    own = returned_loss(out)
    return standin_loss(out) if own is None else own


# --- dropout ------------------------------------------------------------------------------------------


class Widened(TorchFunctionMode):
    """Inside, code that asks for float32 gets float64. So a cast of a model in float64 does nothing where that of the same model in
    float32, which the plan describes, does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = pytree.tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class DropNothing(TorchFunctionMode):
    """Inside, every call of dropout in the model's own code (`F.dropout(x, self.rate)`) returns its operand.

    Under a plan each rank draws the mask of its own part. One process has other masks than the ranks together, so a difference
    would tell nothing. Dropout of modules is off from the start. `seen`: whether a call would have dropped something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.multi_head_attention_forward:  # torch's own code, whose calls no mode sees
            given = inspect.signature(func).bind(*args, **kwargs)
            self.seen |= bool(given.arguments["dropout_p"] and given.arguments.get("training", True))
            given.arguments["training"] = False  # which it asks for its dropout alone
            return func(*given.args, **given.kwargs)
        fn = canonical_name(func, kwargs)
        dropped = draws_dropout_mask(fn, args, kwargs)
        self.seen |= dropped
        if fn in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if dropped:
            args, kwargs = without_dropout_masks(fn, args, kwargs)
        return func(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pass that drops nothing, also where it is recorded."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run
