"""A model as it was when a plan was applied: a copy on meta, of which each forward pass is recorded, and what may not change
since.

Generated code replaces the modules' own code. A later change of a model (a part, a hook, `model.beta = 0.1`) would be ignored
silently, so each call compares the model with what it was. docs/SUPPORT.md says which changes are not noticed.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import is_

import torch
from torch import nn

from planner_core.models.hooks import (
    ModuleState,
    WeightDtypes,
    scratch_tensors,
    storage_id,
)
from planner_core.models.sources import copy_module
from planner_core.runtime.mismatch import PlanMismatch


class FrozenModel:
    """A model before its parameters are sharded. `dtype_of(parameter)` is the dtype in which the plan computes with it."""

    def __init__(self, model: nn.Module, dtype_of: Callable[[nn.Parameter], torch.dtype]) -> None:
        self.model = model
        self.originals = {storage_id(p): n for n, p in model.named_parameters() if not p.is_meta}
        tensors: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=dtype_of(p), device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        # Buffers keep their values: constants are made of them, and a model's code may ask what they are.
        tensors |= {id(b): b if b.is_meta else b.detach().cpu().clone() for b in model.buffers()}
        self.twin = copy_module(model, tensors)
        self.types = WeightDtypes(self.twin)
        self.pairs = list(zip(model.modules(), self.twin.modules(), strict=True))
        self.names = {id(m): n for n, m in model.named_modules()}
        self.modules = list(model.modules())
        self.children = [tuple(m._modules.values()) for m in self.modules]
        self.forwards = [m.__dict__.get("forward") for m in self.modules]
        self.hooks = [_forward_hooks(m) for m in self.modules]
        if hooked := next((n for n, m in model.named_modules() if n and _forward_hooks(m)), ""):
            warnings.warn(
                f"{hooked} has hooks on forward: what they compute is part of the program, and their own Python code runs no more once a "
                "pass is recorded; let forward return what a loop looks at",
                stacklevel=6,
            )

    def remember_state(self) -> None:
        """Remember this rank's parameters, which may not be replaced, and the Python state, which may not change."""
        self.parameters = [
            (m._parameters, n, p) for m in self.modules for n, p in m._parameters.items() if p is not None
        ]
        self.state = ModuleState(self.model)

    @contextlib.contextmanager
    def with_current_buffers(self) -> Iterator[None]:
        """Inside, the copy has the values of the model's buffers, and its parts are in training mode where the model's are."""
        for original, twin in self.pairs:
            twin.training = original.training
            for name, buffer in original._buffers.items():
                if buffer is not None and not buffer.is_meta and (copy := twin._buffers.get(name)) is not None:
                    copy.detach().copy_(buffer)
        state = ModuleState(self.twin)
        yield
        self._adopt_buffers()
        self._drop_attributes(change.name for change in state.list_changes() if scratch_tensors(change.now))
        # Their classes are the same: a pass of the copy may fill a table in a class at its first call.
        self.state = ModuleState(self.model)

    def _drop_attributes(self, names: Iterable[str]) -> None:
        """Delete attributes that forward computes. Under a plan it does not, and a loop would read the old value."""
        for path, _, name in (n.rpartition(".") for n in names):
            with contextlib.suppress(AttributeError):
                self.model.get_submodule(path).__dict__.pop(name, None)

    def _adopt_buffers(self) -> None:
        """Give the model the buffers that the copy has registered (rotary angles at its first call), since the model's code
        reads them."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for original, twin in self.pairs:
            for name, value in twin._buffers.items():
                if value is not None and original._buffers.get(name) is None:
                    persistent = name not in twin._non_persistent_buffers_set
                    original._buffers.pop(name, None)
                    original.register_buffer(name, value.to(device), persistent=persistent)

    def training_modes(self) -> tuple[bool, ...]:
        """Return which modules are in training mode."""
        return tuple([m.training for m in self.modules])

    def describe_change(self) -> str:
        """Return a sentence about what has changed; "" if nothing has."""
        return self._describe_changed_parts() or self._describe_changed_code() or self._describe_changed_values()

    def _describe_changed_parts(self) -> str:
        for module, children in zip(self.modules, self.children, strict=True):
            # By identity: a part that was replaced by an equal one has other parameters.
            if len(module._modules) != len(children) or not all(map(is_, module._modules.values(), children)):
                return f"{self.names[id(module)] or 'the model'} has other parts than when the plan was applied"
        for table, name, param in self.parameters:
            if table.get(name) is not param:
                return f"the parameter {name} was replaced after the plan was applied"
        return ""

    def _describe_changed_code(self) -> str:
        # Not the model itself: `apply` has replaced its forward, and torch runs its hooks around the new one.
        for module, forward, hooks in zip(self.modules[1:], self.forwards[1:], self.hooks[1:], strict=True):
            if module.__dict__.get("forward") is not forward:
                return f"the forward of {self.names[id(module)]} was replaced after the plan was applied"
            if _forward_hooks(module) != hooks:
                return f"{self.names[id(module)]} has other hooks than when the plan was applied"
        return ""

    def _describe_changed_values(self) -> str:
        for change in self.state.list_changes():
            # A new attribute is the loop's (its optimizer). Hooks of parts were compared, and torch runs those of the model itself, whose
            # forward is the plan's.
            is_table = change.holder.rpartition(".")[2] in ("_buffers", "_forward_hooks", "_forward_pre_hooks")
            if not change.is_added and not is_table and change.name != "forward":
                return f"{change.name} was set after the plan was applied"
        return ""

    def module_with_backward_hook(self) -> str:
        """Return the name of a module, other than the model itself, with hooks for backward, which no code under a plan would
        run."""
        hooked = (m for m in self.modules[1:] if m.__dict__["_backward_hooks"] or m.__dict__["_backward_pre_hooks"])
        return next((str(self.names[id(m)]) for m in hooked), "")


def _forward_hooks(module: nn.Module) -> tuple[int, ...]:
    return *module._forward_hooks, *module._forward_pre_hooks


def find_gradient_hook(params: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Return the name of a parameter with a gradient hook, which would never run; "" if no parameter has one."""
    return next((name for name, param in params if param._backward_hooks), "")


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Raise PlanMismatch if a parameter has hooks on its gradient. Its part is another tensor, without them."""
    for name, param in module.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise PlanMismatch(
                f"{name} has a hook on its gradient, which apply would drop; register it after apply "
                "(register_post_accumulate_grad_hook), or change gradients in the loop"
            )
