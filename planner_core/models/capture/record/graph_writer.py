"""Write the tree of module calls of a pass, of which the graph is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from planner_core.models.capture.recording import CHECKPOINT, Record, Recording, Replay, Scope
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
        with self._opened(scope):
            yield

    @contextmanager
    def checkpoint(self, frame: Frame, time: int) -> Iterator[None]:
        """Record what runs inside as what a checkpoint in the model's code runs. Its calls have the names of the surrounding module call
        until parts are named."""
        scope = Scope(frame.scope, frame.path, CHECKPOINT, start=time)
        self.scope.items.append(scope)
        with self._opened(scope):
            yield

    def run_at_root(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call that follows the model's own, e.g. the loss."""
        with self._opened(self.recording.root):
            return call(*args)

    @contextmanager
    def _opened(self, scope: Scope) -> Iterator[None]:
        self.open_scopes.append(scope)
        try:
            yield
        finally:
            self.open_scopes.pop()
