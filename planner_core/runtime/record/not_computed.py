"""What code outside of a model finds where forward keeps a computed tensor (`self.aux_loss = ...`): a refusal, and no stale value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner_core.models.hooks import MISSING, Absent, Noted, Place, set_or_delete
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


def refuse_kept(places: Iterable[Place], before: Noted) -> None:
    """Let attributes of what there was before, in which a recording has left computed tensors, refuse to be used."""
    known = {id(h.held) for h in before.holders}
    for at, key in places:
        while at.parent and (id(at.held) not in known or isinstance(at.held, list)):
            at, key = at.parent
        if isinstance(at.held, dict) and not isinstance(at.held.get(key), NotComputed):
            at.held[key] = NotComputed(at.path(key), at.held.get(key, MISSING))


def allow_kept(noted: Noted) -> None:
    """Undo `refuse_kept`, so that forward can be recorded again."""
    for held in [h.held for h in noted.holders]:
        for key, value in list(held.items()) if isinstance(held, dict) else ():
            if isinstance(value, NotComputed):
                set_or_delete(held, key, value.instead)
