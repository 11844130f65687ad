"""Write the tree of module calls of a pass, of which the graph is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from planner_core.models.capture.record.checkpoints import checkpoint_scope
from planner_core.models.capture.recording import Record, Recording, Replay, Scope
from planner_core.models.hooks.callsites import Frame


class GraphWriter:
    """Adds calls to the module call that is in progress: `open_scopes[-1]`."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.open_scopes: list[Scope] = []

    @property
    def scope(self) -> Scope:
        """The module call in progress."""
        return self.open_scopes[-1] if self.open_scopes else self.recording.root

    def add(self, item: Record | Replay) -> None:
        """Add an operator, or a replayed module call."""
        self.scope.items.append(item)

    @contextmanager
    def module_call(self, frame: Frame, time: int) -> Iterator[None]:
        """Record what runs inside as one module call."""
        if not self.open_scopes or frame.module is None:
            scope = self.recording.root
        else:
            scope = Scope(frame.scope, frame.path, type(frame.module).__name__, start=time)
            self.scope.items.append(scope)
        self.open_scopes.append(scope)
        try:
            yield
        finally:
            self.open_scopes.pop()

    def checkpoint(self, frame: Frame, time: int) -> AbstractContextManager[None]:
        """Record what runs inside as what a checkpoint in the model's code runs."""
        return checkpoint_scope(frame, self.open_scopes, time)

    def run_at_root(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call that follows the model's own, e.g. the loss."""
        self.open_scopes.append(self.recording.root)
        result = call(*args)
        self.open_scopes.pop()
        return result
