"""Find before each call what a user has changed in the model since the recording, so that nothing is ignored silently.

Generated code takes the place of the modules' own code. So it would ignore hooks, adapters and patches that were added after the
recording, or that only a module's own call would run. This module notices them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from planner_core.runtime.record.attributes import Attributes
from planner_core.runtime.record.outside import Outside


class ModelWatch:
    """A model as it was when its parameters were sharded."""

    def __init__(self, model: nn.Module, outside: Outside) -> None:
        self.names = {id(m): n for n, m in model.named_modules()}
        self.modules = list(model.modules())
        self.root = model
        self.children = [tuple(m._modules.values()) for m in self.modules]
        self.params = [(m._parameters, n, p) for m in self.modules for n, p in m._parameters.items() if p is not None]
        self.forwards = [m.__dict__.get("forward") for m in self.modules]
        self.attributes = Attributes(((self.names[id(m)], m) for m in self.modules), outside)
        self.hooks = [_hooks(m) for m in self.modules]
        self.classes = {type(m): type(m).forward for m in self.modules}

    def hooked(self) -> str:
        """The name of a module, other than the model itself, with hooks that only its own call would run; empty if there is none."""
        return next((str(self.names[id(m)]) for m in self.modules[1:] if _hooks(m)), "")

    def hooked_since(self) -> str:
        """The name of a module with more hooks than when the plan was applied; empty if there is none."""
        return next(
            (str(self.names[id(m)]) for m, n in zip(self.modules, self.hooks, strict=True) if _hooks(m) > n), ""
        )

    def listening(self) -> str:
        """The name of a module, other than the model itself, with hooks for backward, which no code under a plan would run."""
        own = (m for m in self.modules[1:] if m.__dict__["_backward_hooks"] or m.__dict__["_backward_pre_hooks"])
        return next((str(self.names[id(m)]) for m in own), "")

    def changed(self) -> str:
        """A sentence about what has changed; empty if nothing has."""
        for module, children, forward in zip(self.modules, self.children, self.forwards, strict=True):
            if tuple(module._modules.values()) != children:
                return f"{self.names[id(module)] or 'the model'} has other parts than when the plan was applied"
            if module is not self.root and module.__dict__.get("forward") is not forward:
                return f"the forward of {self.names[id(module)]} was replaced after the plan was applied"
        for cls, forward in self.classes.items():
            if cls.forward is not forward:
                return f"{cls.__name__}.forward was replaced after the plan was applied"
        for table, name, param in self.params:
            if table.get(name) is not param:
                return f"the parameter {name} was replaced after the plan was applied"
        return ""


def _hooks(module: nn.Module) -> int:
    return len(module.__dict__["_forward_hooks"]) + len(module.__dict__["_forward_pre_hooks"])


def hooked_parameter(params: Iterable[tuple[str, nn.Parameter]]) -> str:
    """The name of a parameter with a gradient hook, which would never run; empty if there is none."""
    return next((name for name, param in params if param._backward_hooks), "")
