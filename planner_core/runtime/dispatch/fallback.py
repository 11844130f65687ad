"""If a model cannot be rewritten, its own code runs under the plan, on the parameters that are already sharded."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner_core.runtime.dispatch.dispatch_mode import Steering
from planner_core.runtime.dispatch.parallelize import hand_out
from planner_core.runtime.dispatch.parameters import Parameters
from planner_core.runtime.plan_reader import Stored
from planner_core.runtime.program.weights import Weight

Held = tuple[Weight, Stored]
"""A parameter and its placements."""


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, the model itself has no hooks: torch runs them around its `forward`, from which this is called."""
    tables = [model._forward_hooks, model._forward_pre_hooks]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            added = dict(table)
            table.clear()
            table.update(hooks | added)


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

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], finish: Callable[[Any], Any] | None = None
    ) -> Any:
        """One forward pass, on the whole batch."""
        outer, self.inside = self.steering.active, True
        try:
            with self.steering.running() as scopes:
                self.steering.written.clear()
                with _without_hooks(self.model):
                    out = self.steering.current(self.model(*args, **kwargs))
                if finish is not None:
                    with scopes.named("loss"):
                        out = finish(out)
            return out if outer else hand_out(out)
        finally:
            self.inside = False
