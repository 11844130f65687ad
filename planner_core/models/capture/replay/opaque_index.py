"""Prove that a module makes no use of an integer, so that layers which differ in it alone are copies.

    def forward(self, x, cache=None):              # no cache in training
        if cache is not None:
            x = cache.update(x, self.number)
        return self.compress(x, cache, self.number)

Every layer reads another number here, and none computes with it. Two equal graphs would prove little: `number < 3` answers alike
for the layers 0 and 1, and not for 3. So the second layer is traced with an `OpaqueIndex` in place of its integer, of which no code can
learn anything: it may be handed on, and any operation on it raises `IndexIsUsed`. A layer that ran to its end has asked nothing, so it
does the same whatever the integer is. Python tells nobody of `type(index)`, so a layer whose code could ask it counts as if it had. If a
layer asked, the pass is made once more, without a trial of that attribute.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NoReturn

from torch import nn

from planner_core.models.capture.recording import BUFFER, Record, Recording, Scope
from planner_core.models.capture.replay.outside import is_library

IndexName = tuple[type[nn.Module], str]
"""The class of a module and its attribute."""


class IndexIsUsed(BaseException):
    """Code has used an index, or may have. Not an `Exception`, which the model's code could catch and go on."""

    def __init__(self, names: Iterable[IndexName]) -> None:
        super().__init__("an index on trial is used")
        self.names = frozenset(names)


class OpaqueIndex:
    """Stands for an integer on trial. It is not an `int`: C code, as that of `list.__getitem__`, would read the value of one unseen."""

    __slots__ = ("_name", "_trials")

    def __init__(self, trials: IndexTrials, name: IndexName) -> None:
        object.__setattr__(self, "_trials", trials)
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, name: str) -> Any:
        # `isinstance` asks this too, and answers as it does for each integer, so it learns nothing.
        return int if name == "__class__" else _refuse_use(self)


def _refuse_use(index: OpaqueIndex, *_: Any, **__: Any) -> NoReturn:
    name: IndexName = object.__getattribute__(index, "_name")
    used: set[IndexName] = object.__getattribute__(index, "_trials").used
    used.add(name)
    raise IndexIsUsed([name])


for _operation in {n for n in dir(int) if n[:2] == "__"} - {
    *("__class__", "__doc__", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__getattribute__"),
}:
    setattr(OpaqueIndex, _operation, _refuse_use)


@functools.cache
def _find_type_calls(code: CodeType) -> str:
    """Say of what code asks the type: "first", of its first parameter alone (`type(self)`), "any", or "" if of nothing."""
    if "type" not in code.co_names:
        return ""
    steps = [(step.opname, step.argval) for step in dis.Bytecode(code)]
    own = ("LOAD_FAST", code.co_varnames[0] if code.co_argcount else None)
    following = [after for (op, value), after in pairwise(steps) if (op, value) == ("LOAD_GLOBAL", "type")]
    rebound = ("STORE_FAST", own[1]) in steps
    return "" if not following else "first" if not rebound and all(after == own for after in following) else "any"


def _is_of_model(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return not (is_library(name) or name.startswith("planner_core."))


class IndexTrials:
    """The integers of modules that are on trial in one pass.

    excluded    attributes that an earlier pass has used: they get no trial
    handed_out  attributes that code has got as an `OpaqueIndex`
    used        those of them on which it made an operation
    """

    def __init__(self, excluded: Iterable[IndexName] = ()) -> None:
        self.excluded = frozenset(excluded)
        self.handed_out: set[IndexName] = set()
        self.used: set[IndexName] = set()
        self._hidden: dict[tuple[int, str], OpaqueIndex] = {}
        self._asks_types = False  # whether code of the outermost trial may have asked for the type of an index

    def may_hide(self, module: nn.Module, name: str, value: Any) -> bool:
        """Return whether an attribute is an integer that can be, or is, on trial."""
        if sys.getprofile() not in (None, self._note_call):  # a profiler is at work, in whose place this one would be
            return False
        return type(value) is OpaqueIndex or (type(value) is int and (type(module), name) not in self.excluded)

    @contextmanager
    def hide(self, attributes: Iterable[tuple[nn.Module, str]]) -> Iterator[None]:
        """Put attributes on trial while entered. Raises IndexIsUsed if code has run that can ask for the type of an object."""
        names = {(id(module), name): (type(module), name) for module, name in attributes}
        if not names:
            yield
            return
        before, profiler = self._hidden, sys.getprofile()
        self._asks_types = self._asks_types and bool(before)
        self._hidden = before | {attribute: OpaqueIndex(self, name) for attribute, name in names.items()}
        sys.setprofile(self._note_call)
        try:
            yield
        finally:
            sys.setprofile(profiler)
            self._hidden = before
        if self._asks_types:
            raise IndexIsUsed(names.values())

    def _note_call(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not _is_of_model(frame):
            return
        asked = _find_type_calls(frame.f_code)
        if asked == "any" or (asked and type(frame.f_locals[frame.f_code.co_varnames[0]]) is OpaqueIndex):
            self._asks_types = True

    def find(self, module: nn.Module, name: str) -> OpaqueIndex | None:
        """Return what code gets in place of an attribute on trial; None for any other attribute."""
        if not self._hidden:
            return None
        if name == "__dict__" and _is_of_model(sys._getframe(2)):
            # Whatever `vars(self)` is asked for next is seen by nobody. torch's own modules ask it all the time, for their weights.
            hidden = [(type(module), other) for part, other in self._hidden if part == id(module)]
            self.used.update(hidden)
            if hidden:
                raise IndexIsUsed(hidden)
        index = self._hidden.get((id(module), name))
        if index is not None:
            self.handed_out.add((type(module), name))
        return index

    @contextmanager
    def watch_pass(self) -> Iterator[None]:
        """Raise `IndexIsUsed` if a pass asks something of an index, or fails after it has got one: torch refuses what is not an `int`."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            if self.handed_out:
                raise IndexIsUsed(self.handed_out) from error
            raise
        if self.used:  # and the code has caught it
            raise IndexIsUsed(self.used)


def have_same_records(
    recording: Recording, first: Scope, second: Scope, ports: Iterable[tuple[int, int]], outs: Iterable[tuple[int, int]]
) -> bool:
    """Return whether two module calls did the same, each with its own parameters, arguments and buffers.

    `ports`: the values of the arguments of both; `outs`: those of their results.
    """
    # Two calls have no numbers in common, so what is compared is which operands are one value. Example: mul(7, 7) -> 9 and mul(4, 4) -> 5
    # do the same, mul(4, 6) -> 8 does not, since 7 has the counterpart 4 when it comes again.
    values, counterparts = recording.values, dict(ports)

    def name_within(vid: int, scope: Scope) -> str | None:
        name, under = values[vid].name.removeprefix(BUFFER), scope.path + "."
        return name[len(under) :] if name.startswith(under) else None

    def correspond(x: int, y: int) -> bool:
        if x in counterparts:
            return counterparts[x] == y
        counterparts[x] = y
        one, other = values[x], values[y]
        if (one.kind, one.meta, one.grad) != (other.kind, other.meta, other.grad):
            return False
        if one.kind == "parameter" or one.name.startswith(BUFFER):
            local = name_within(x, first)
            return x == y if local is None else local == name_within(y, second)
        if one.kind == "constant" and recording.birth_times[x] <= first.start:
            return x == y  # made before its call, a mask for all layers: a replay would read this very one
        # Of a view in a replayed call `storage` may be another view, so only roots can be compared.
        roots = recording.storage_root(x), recording.storage_root(y)
        return roots[0] == x if roots[1] == y else correspond(*roots)

    def same(x: Record, y: Record) -> bool:
        pairs = ((x.inputs, y.inputs), (x.outputs, y.outputs), (x.saved, y.saved))
        if any(len(a) != len(b) for a, b in pairs):
            return False
        alike = (x.fn, x.attrs, x.module, x.extra, x.site[len(first.scope) :]) == (
            *(y.fn, y.attrs, y.module, y.extra, y.site[len(second.scope) :]),
        )
        return alike and all(correspond(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))

    records = recording.flatten(first), recording.flatten(second)
    if len(records[0]) != len(records[1]) or not all(same(x, y) for x, y in zip(*records, strict=True)):
        return False
    return all(correspond(x, y) for x, y in outs)
