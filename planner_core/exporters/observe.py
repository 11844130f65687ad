"""Run a tiny model of the same architecture once, to learn what a plan does not say: how modules are called, and which parameters
are tied."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner_core.core import InputError, Plan
from planner_core.models.sources import build_from_config, make_training_inputs, text_config
from planner_core.planning import shrink
from planner_core.planning.methods import CannotHold, Difference, TensorParallelGroup, TpLayout, compress, starred
from planner_core.runtime import initializer
from planner_core.verification import materialise

HEADS = ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, slots=True)
class Shared:
    """A module whose tensor input goes to several column-sharded layers: the input's position among the arguments, or its name."""

    module: str
    position: int | None
    num_args: int
    keyword: str


@dataclass(frozen=True, slots=True)
class Observed:
    """`tied`: names of parameters (with `*`) that are one tensor. `heads`: counts in the config that the degree must divide."""

    shared: tuple[Shared, ...]
    tied: tuple[tuple[str, ...], ...]
    heads: Mapping[str, int]
    built_in: Mapping[str, str]
    unshared: tuple[str, ...]


def observe(plan: Plan, layout: TpLayout) -> Observed:
    """Run a tiny model. Raises InputError if it cannot be built from a config."""
    config = plan.model.get("config") or {}
    if "callable" in config:
        raise InputError(
            f"{plan.model['name']} comes from {config['callable']}, whose modules this form cannot look at; "
            "call planner_core.apply(module, plan) in your trainer instead"
        )
    model, parsed, _ = build_from_config(shrink(config), "float32")
    inputs = make_training_inputs(model, parsed, 2, 8, "float32")
    materialise(model, initializer(model, 0))
    _stock_only(layout, model)
    shared, unshared = _shared_inputs(model, inputs, layout.groups)
    _agree(layout, tied := _tied(model))
    text = text_config(parsed)
    heads = {k: int(n) for k in HEADS if isinstance(n := getattr(text, k, None), int)}
    return Observed(shared, tied, heads, dict(getattr(model, "tp_plan", None) or {}), unshared)


def _stock_only(layout: TpLayout, model: nn.Module) -> None:
    """Remove groups with a layer that styles cannot shard, which is any other than nn.Linear and nn.Embedding (a router, say)."""
    stock = {starred(n) for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Embedding)}
    others = {n for n in layout.styles if starred(n) not in stock}
    for group in layout.groups:
        if others & {*group.columns, group.row}:
            others |= {*group.columns, group.row}
    layout.groups = [g for g in layout.groups if g.row not in others]
    for name in others:
        del layout.styles[name]
    if others:
        told = "split in the plan, whole here; this form splits plain nn.Linear and nn.Embedding only"
        layout.differences.append(Difference.of(sorted(others), told))


def _shared_inputs(
    model: nn.Module, inputs: dict[str, Any], groups: Sequence[TensorParallelGroup]
) -> tuple[tuple[Shared, ...], tuple[str, ...]]:
    """For every group with several columns: the module that gets their common input, if there is one."""
    modules, seen = dict(model.named_modules()), dict[str, Any]()
    parents = {starred(g.columns[0]): _parent(g.columns) for g in groups if len(g.columns) > 1}
    hooks = []
    for name in {n for n in modules if starred(n) in {*parents, *map(starred, parents.values())}}:
        keep = lambda _, args, kwargs, name=name: seen.setdefault(name, (args, kwargs)) and None  # noqa: E731
        hooks.append(modules[name].register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(**{k: _real(v) for k, v in inputs.items()})
    for hook in hooks:
        hook.remove()
    shared: dict[str, Shared] = {}
    alone = []
    for column, parent in parents.items():
        first = next((n for n in seen if starred(n) == column), None)
        under = next((n for n in seen if starred(n) == starred(parent)), None) if parent else None
        place = _place(seen[first][0][0], *seen[under]) if first and under else None
        if place is None or under is None:
            alone.append(column)
        else:
            shared[starred(under)] = Shared(starred(under), *place)
    return tuple(shared.values()), tuple(alone)


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape, dtype=value.dtype)


def _parent(names: Sequence[str]) -> str:
    """The innermost module that contains all of them."""
    rows = [n.split(".")[:-1] for n in names]
    kept = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        kept.append(column[0])
    return ".".join(kept)


def _place(wanted: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, int, str] | None:
    for i, value in enumerate(args):
        if value is wanted:
            return i, len(args), ""
    return next(((None, len(args), k) for k, v in kwargs.items() if v is wanted), None)


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return tuple(tuple(n) for n in names.values() if len(n) > 1)


def _agree(layout: TpLayout, tied: tuple[tuple[str, ...], ...]) -> None:
    """Layers that share a parameter must shard it in the same way; else none of them shards it."""
    for group in tied:
        modules = [n.rpartition(".")[0] for n in group]
        styles = {layout.styles.get(m) for m in modules}
        vocabulary = styles <= {"vocabulary", "gathered"} and not group[0].endswith("bias")
        if styles != {None} and not vocabulary:
            for m in modules:
                layout.styles.pop(m, None)
            layout.differences.append(
                Difference.of(modules, "one weight in several roles, split in the plan, whole here")
            )


def rules(plan: Plan, layout: TpLayout) -> dict[str, str]:
    """Styles by pattern. Raises InputError if layers of one pattern run differently."""
    found = compress(layout.styles)
    if found is None:
        raise CannotHold(
            f'the layers of the plan "{plan.name}" run differently from one another, which this form cannot express'
        )
    return found
