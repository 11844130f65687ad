"""Run a tiny model of the same architecture once, to learn facts that a plan does not hold: calls of modules and tied parameters."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner_core.core import InputError, Plan
from planner_core.models.hooks import names_by_parameter
from planner_core.models.sources import build_from_config, make_training_inputs, text_config
from planner_core.planning import shrink_config
from planner_core.planning.methods import (
    CannotHold,
    Difference,
    TensorParallelGroup,
    TpLayout,
    star_numbers,
)

HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class SharedInput:
    """A module whose tensor input feeds several column-sharded layers, with the position or keyword of that argument."""

    module: str
    position: int | None
    num_args: int
    keyword: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model.

    Attributes:
        shared: Modules whose input feeds several column-sharded layers.
        tied: Names of parameters that are one tensor.
        heads: Counts in the config that the degree must divide.
        built_in: The model's own `tp_plan`.
        unshared: First columns of groups without such a module.
    """

    shared: tuple[SharedInput, ...]
    tied: tuple[tuple[str, ...], ...]
    heads: Mapping[str, int]
    built_in: Mapping[str, str]
    unshared: tuple[str, ...]


def inspect_model(plan: Plan, layout: TpLayout) -> ModelFacts:
    """Run a tiny model, and drop from `layout` the layers that the form cannot shard. Raises InputError for a model without a config."""
    config = plan.model.config
    if "callable" in config:
        raise InputError(
            f"{plan.model.name} comes from {config['callable']}, whose modules this form cannot inspect; "
            "call planner_core.apply(module, plan) in your trainer instead"
        )
    model, parsed, _ = build_from_config(shrink_config(config), "float32")
    inputs = make_training_inputs(model, parsed, 2, 8, "float32")
    _drop_custom_layers(layout, model)
    # Before weights are made: each name of a tied weight then gets a tensor of its own.
    _drop_conflicting_ties(layout, tied := _find_tied_parameters(model))
    _fill_with_zeros(model)
    shared, unshared = _find_shared_inputs(model, inputs, layout.groups)
    text = text_config(parsed)
    heads = {k: int(n) for k in HEAD_COUNTS if isinstance(n := getattr(text, k, None), int)}
    return ModelFacts(shared, tied, heads, dict(getattr(model, "tp_plan", None) or {}), unshared)


def _fill_with_zeros(model: nn.Module) -> None:
    """Give the weights and buffers of a model on meta values, so that code which reads them runs. Which tensor goes where is all that
    counts here."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                module._parameters[name] = nn.Parameter(torch.zeros_like(weight, device="cpu"), requires_grad=False)


def _drop_custom_layers(layout: TpLayout, model: nn.Module) -> None:
    """Drop groups with a layer that stock styles cannot shard: any layer other than nn.Linear and nn.Embedding, such as a router."""
    # By the exact type: the forward of a subclass may use its weight otherwise than the style assumes.
    stock = {star_numbers(n) for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Embedding)}
    custom = {n for n in layout.styles if star_numbers(n) not in stock}
    for group in layout.groups:
        if custom & {*group.columns, group.row}:
            custom |= {*group.columns, group.row}
    layout.groups = [g for g in layout.groups if g.row not in custom]
    for name in custom:
        del layout.styles[name]
    if custom:
        difference = "split in the plan, whole here; this form splits plain nn.Linear and nn.Embedding only"
        layout.differences.append(Difference.of(sorted(custom), difference))


def _find_shared_inputs(
    model: nn.Module, inputs: dict[str, Any], groups: Sequence[TensorParallelGroup]
) -> tuple[tuple[SharedInput, ...], tuple[str, ...]]:
    """Return the modules that receive the common input of a group of columns, and the first column of each group without one."""
    modules, calls = dict(model.named_modules()), dict[str, Any]()
    parents = {star_numbers(g.columns[0]): _common_parent(g.columns) for g in groups if len(g.columns) > 1}
    hooks = []
    for name in {n for n in modules if star_numbers(n) in {*parents, *map(star_numbers, parents.values())}}:
        record = lambda _, args, kwargs, name=name: calls.setdefault(name, (args, kwargs)) and None  # noqa: E731
        hooks.append(modules[name].register_forward_pre_hook(record, with_kwargs=True))
    # Zeros for ids, since a smaller vocabulary holds 0 for sure; the tensors are compared by identity, never by value.
    with torch.no_grad():
        model(**{k: _zeros_for(v) for k, v in inputs.items()})
    for hook in hooks:
        hook.remove()
    shared: dict[str, SharedInput] = {}
    unshared = []
    for column, parent in parents.items():
        called_column = next((n for n in calls if star_numbers(n) == column), None)
        called_parent = next((n for n in calls if star_numbers(n) == star_numbers(parent)), None) if parent else None
        position = (
            _argument_position(calls[called_column][0][0], *calls[called_parent])
            if called_column and called_parent
            else None
        )
        if position is None or called_parent is None:
            unshared.append(column)
        else:
            shared[star_numbers(called_parent)] = SharedInput(star_numbers(called_parent), *position)
    return tuple(shared.values()), tuple(unshared)


def _zeros_for(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape, dtype=value.dtype)


def _common_parent(names: Sequence[str]) -> str:
    """Return the innermost module that contains all of the named ones."""
    paths = [n.split(".")[:-1] for n in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _argument_position(
    wanted: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | None, int, str] | None:
    # By identity: the layer was given this very tensor, so all columns of the group read it.
    for i, value in enumerate(args):
        if value is wanted:
            return i, len(args), ""
    return next(((None, len(args), k) for k, v in kwargs.items() if v is wanted), None)


def _find_tied_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(n) for n in names_by_parameter(model).values() if len(n) > 1)


def _drop_conflicting_ties(layout: TpLayout, tied: tuple[tuple[str, ...], ...]) -> None:
    """Drop layers that share a parameter and would shard it in different ways, and those that share another one with them.

    Example: BERT's decoder shares its bias with the head and its weight with the word embedding. The head is whole, so all three are.
    """
    for group in tied:
        modules = [n.rpartition(".")[0] for n in group]
        styles = {layout.styles.get(m) for m in modules}
        agrees = styles <= {"vocabulary", "gathered"} and not group[0].endswith("bias")
        if styles != {None} and not agrees:
            for m in modules:
                layout.styles.pop(m, None)
            layout.differences.append(
                Difference.of(modules, "one weight in several roles, split in the plan, whole here")
            )
            _drop_conflicting_ties(layout, tied)
            return


def styles_by_pattern(plan: Plan, layout: TpLayout) -> dict[str, str]:
    """Return the styles by pattern of names. Raises InputError if layers of one pattern run differently."""
    styles: dict[str, str] = {}
    for name, style in layout.styles.items():
        if styles.setdefault(star_numbers(name), style) != style:
            raise CannotHold(
                f'the layers of the plan "{plan.name}" run differently from one another, which this form cannot express'
            )
    return styles
