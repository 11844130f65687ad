"""If a model cannot be rewritten, its own code runs under the plan, on the parameters that are already sharded."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner_core.runtime.dispatch.dispatch_mode import Steering
from planner_core.runtime.dispatch.parallelize import hand_out, without_hooks
from planner_core.runtime.dispatch.parameters import Parameters
from planner_core.runtime.plan_reader import Stored
from planner_core.runtime.program.weights import Weight

Held = tuple[Weight, Stored]
"""A parameter and its placements."""


class Dispatched:
    """The dispatch mode for one model, which is slower. `reason` says why the model could not be rewritten."""

    def __init__(
        self, model: nn.Module, plain: Callable[..., Any], plan: Mapping[str, Any], mesh: DeviceMesh, held: Iterable[Held], reason: str
    ) -> None:  # fmt: skip
        self.model, self.plain, self.reason = model, plain, reason
        self.params = Parameters(mesh)
        for weight, stored in held:
            self.params.adopt(weight, stored)
        self.steering = Steering(model, plan, mesh, self.params)
        self.inside = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One forward pass, on the whole batch."""
        outer, self.inside = self.steering.active, True
        try:
            with self.steering.running():
                self.steering.written.clear()
                with without_hooks(self.model):
                    out = self.steering.current(self.model(*args, **kwargs))
            return out if outer else hand_out(out)
        finally:
            self.inside = False
