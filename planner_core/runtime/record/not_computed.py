"""What code outside of a model finds where forward keeps a computed tensor (`self.aux_loss = ...`): a refusal, and no stale value."""

from __future__ import annotations

from typing import Any

from planner_core.models.hooks import Absent
from planner_core.runtime.plan_reader import PlanMismatch


class NotComputed(Absent):
    """Takes the place of a computed tensor in an attribute. Whatever is done with it raises PlanMismatch."""

    __slots__ = ("name",)

    def __init__(self, name: str, instead: Any) -> None:
        super().__init__(instead)
        self.name = name

    def __repr__(self) -> str:
        return f"<{self._why()}>"

    def _why(self) -> str:
        return (
            f"forward keeps a computed tensor in {self.name}, which a step under a plan does not compute for code outside; "
            "let forward return it, or add it to the loss there"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanMismatch(self._why())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and copy ask for these
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls))
        return found._refuse()

    __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
