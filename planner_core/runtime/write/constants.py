"""Write the constants of a forward pass: masks, positions and shifted labels, which are computed from the model's arguments.

Constants that do not depend on inputs (positions, rotary tables) are computed by `tables`, which runs once. The others are
computed by `constants`, in each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner_core.core import Placements
from planner_core.models.hooks import is_inplace
from planner_core.runtime.record import DEVICE, CannotRewrite, MixesSamples, Ref, TapeCall
from planner_core.runtime.record.tape import BUFFER, INPUT, LITERAL, refs
from planner_core.runtime.write.expressions import (
    RESERVED,
    NameScope,
    to_identifier,
    write_arguments,
    write_call,
    write_literal,
    write_subscript,
)
from planner_core.runtime.write.functions import local_constant
from planner_core.runtime.write.moves import MoveTable
from planner_core.runtime.write.placed_tape import PlannedTape, refuse_mixed_samples
from planner_core.runtime.write.source import used_names

Cut = tuple[int, Placements]


@dataclass
class ConstantsWriter:
    """Writes `tables` and `constants`, which make the constants that units need."""

    layout: PlannedTape
    moves: MoveTable
    name_object: Any
    inputs: dict[int, str]
    lines: dict[bool, list[str]] = field(default_factory=lambda: {False: [], True: []})
    names: dict[int, str] = field(default_factory=dict)
    cuts: dict[Cut, str] = field(default_factory=dict)
    cut_names: dict[str, str] = field(default_factory=dict)
    """The names of constants that were cut, by the expressions that cut them."""
    table_names: list[str] = field(default_factory=list)
    used_table_names: list[str] = field(default_factory=list)
    """The names that `tables` returns to `constants` and to the units."""
    constant_names: list[str] = field(default_factory=list)
    """The names that `constants` returns."""
    draws: bool = False
    """Whether it draws random numbers, which all ranks draw alike."""
    constant_arguments: list[str] = field(default_factory=list)
    tables: str = ""
    """The source of `tables`; "" if nothing is left to it."""

    def write(self, wanted: Sequence[Cut], plain: Sequence[int]) -> list[str]:
        """Write both functions. `plain`: constants that the model returns unchanged."""
        self.scope = NameScope(RESERVED | self.moves.taken | set(self.inputs.values()))
        self.names.update(self.inputs)
        self.restore_name = self.scope.keep("before")
        self.lasting_targets: dict[str, None] = {}  # written buffers and inputs
        self.restored: dict[str, None] = {}  # those that are written before a guard
        writes = [c for c in self._constant_calls() if self._is_in_place(c)]
        computed = (c for c in self.layout.ops if is_inplace(c.fn))
        self.written_roots = {self._root(c.inputs[0]) for c in (*writes, *computed)}
        self.per_step = self._find_per_step()
        needed = self._find_needed([n for n, _ in wanted] + [*plain])
        # a number decides shapes, which are those of all samples; a yes or no leaves out what would change nothing
        asked = [
            n for c in self._constant_calls() if c.kind == "guard" and not isinstance(c.answer, bool) for n in c.inputs
        ]
        self._refuse_lists()
        refuse_mixed_samples(
            self.layout, [n for n, _ in wanted] + [*plain] + asked + [n for c in writes for n in c.outputs]
        )
        known: dict[Any, tuple[int, ...]] = {}
        for call in self._constant_calls():
            if id(call) in needed:
                self._write_call(call, known)
        self._write_cuts(wanted)
        return self._write_functions(plain)

    def _refuse_lists(self) -> None:
        """Raise MixesSamples if the model's code makes a list of numbers of its samples: a rank would have a list of its own."""
        for call in self._constant_calls():
            samples = any(self.layout.samples[n] is not None for n in call.inputs)
            if call.kind == "guard" and isinstance(call.answer, list) and samples and self.layout.num_parts > 1:
                raise MixesSamples(f"it takes numbers of all samples as a list at {call.line.rpartition('/')[2]}")

    def _constant_calls(self) -> list[TapeCall]:
        return [c for c in self.layout.tape.calls if c.kind in ("constant", "guard")]

    def _root(self, number: int) -> int:
        return self.layout.tape.tensors[number].root

    @staticmethod
    def _is_in_place(call: TapeCall) -> bool:
        return (
            call.kind == "constant"
            and bool(call.outputs)
            and call.shape == Ref(call.outputs[0])
            and call.fn.endswith(("_", "setitem"))
        )

    def _find_needed(self, wanted: Iterable[int]) -> set[int]:
        """Return the calls that are needed: those that make what is wanted, that write buffers, and guards."""
        by_output = {n: c for c in self._constant_calls() for n in c.outputs}
        todo = list(wanted)
        keep = {id(c) for c in self._constant_calls() if c.kind == "guard" or self._is_in_place(c)}
        todo += [n for c in self._constant_calls() if id(c) in keep for n in c.inputs]
        while todo:
            call = by_output.get(todo.pop())
            if call is not None and id(call) not in keep:
                keep.add(id(call))
                todo += call.inputs
        return keep

    def _find_per_step(self) -> set[int]:
        """Return what each step computes: what depends on inputs, and what is made of memory that the step writes in place.

        The second must be read before or after the write, as in the model's code.
        """
        tensors = enumerate(self.layout.tape.tensors)
        per_step = {n for n, t in tensors if t.varies or t.root in self.written_roots}
        for call in self._constant_calls():
            if any(n in per_step for n in call.inputs):
                per_step.update(call.outputs)
        return per_step

    def _is_per_step(self, call: TapeCall) -> bool:
        return call.kind == "guard" or self._is_in_place(call) or any(n in self.per_step for n in call.outputs)

    def _write_call(self, call: TapeCall, known: dict[Any, tuple[int, ...]]) -> None:
        if call.answer == "random":
            if self.layout.num_parts > 1 and any(
                self.layout.samples[n] is not None for n in (*call.inputs, *call.outputs)
            ):
                raise MixesSamples(f"it draws numbers for its samples at {call.line.rpartition('/')[2]}")
            self.draws = True
        text = self._write_source(call)
        lines = self.lines[self._is_per_step(call)]
        if call.kind == "guard":
            self.restored |= self.lasting_targets
            undo = f", {self.restore_name}" if self.lasting_targets else ""
            lines.append(f"expect({_guard_source(call.fn, text)}, {call.answer!r}{undo})")
            return
        if self._is_in_place(call) and call.outputs[0] not in self.layout.tape.buffer_versions:
            if self.layout.tape.tensors[self._root(call.inputs[0])].kind in (BUFFER, INPUT, LITERAL):
                self.lasting_targets[self._first_name(self._root(call.inputs[0]))] = None
            lines.append(text)
            self.names[call.outputs[0]] = self._name_of(call.inputs[0])
            return
        if (
            text in known
            and call.answer != "random"
            and not any(self._root(n) in self.written_roots for n in call.outputs)
        ):
            for number, other in zip(call.outputs, known[text], strict=True):
                self.names[number] = self.names[other]
            return
        known[text] = call.outputs
        names_made = []
        for number in call.outputs:
            self.names[number] = self.scope.keep(self._wanted_name(call, number))
            names_made.append(self.names[number])
            if not self._is_per_step(call):
                self.table_names.append(self.names[number])
        is_one_tuple = len(names_made) == 1 and isinstance(
            call.shape, (tuple, list)
        )  # a tuple of one, as of `x.chunk(1)`
        lines.append(f"{', '.join(names_made)}{',' if is_one_tuple else ''} = {text}")

    def _wanted_name(self, call: TapeCall, number: int) -> str:
        if number in self.layout.tape.buffer_versions:
            return to_identifier(self.layout.tape.tensors[self._root(number)].name.rpartition(".")[2])
        index = call.outputs.index(number)
        if len(call.names) == len(call.outputs):
            return to_identifier(call.names[index] or call.fn)
        return to_identifier(call.fn)

    def _name_of(self, number: int) -> str:
        return self.names.get(number) or self._first_name(number)

    def _first_name(self, number: int) -> str:
        tensor = self.layout.tape.tensors[number]
        if tensor.kind == INPUT:
            return self.inputs[number]
        if tensor.kind == BUFFER:
            return f"buffers[{tensor.name!r}]"
        if tensor.kind == LITERAL:
            return str(self.name_object(tensor.value))
        raise CannotRewrite(f"a constant depends on a {tensor.kind} tensor")

    def _write_source(self, call: TapeCall) -> str:
        def leaf(item: Any) -> str:
            if isinstance(item, Ref):
                return self._name_of(item.number)
            return "DEVICE" if item is DEVICE else str(self.name_object(item))

        if call.kind == "guard":
            return ", ".join(self._name_of(n) for n in refs((call.args, call.kwargs)))
        if call.kind == "constant" and call.outputs[0] in self.layout.tape.buffer_versions:
            if call.fn == "setitem":
                target, index, value = call.args
                return f"with_item({leaf(target)}, {write_literal(index, leaf)}, {write_literal(value, leaf)})"
            return write_call(call.func, call.fn, call.args, call.kwargs, leaf)
        if self._is_in_place(call):
            if call.fn == "setitem":
                return (
                    f"{leaf(call.args[0])}[{write_subscript(call.args[1], leaf)}] = {write_literal(call.args[2], leaf)}"
                )
            target, named = leaf(call.args[0]), {k: v for k, v in call.kwargs.items() if k != "inplace"}
            if hasattr(torch.Tensor, call.fn):
                return f"{target}.{call.fn}({write_arguments(call.func, call.args[1:], named, leaf)})"
            return f"{target}.copy_({write_call(call.func, call.fn, call.args, named, leaf)})"
        return write_call(call.func, call.fn, call.args, call.kwargs, leaf)

    def _write_cuts(self, wanted: Sequence[Cut]) -> None:
        """Cut every constant once for each set of placements in which a unit needs it."""
        for number, placements in dict.fromkeys(wanted):
            tensor = self.layout.tape.tensors[number]
            name_of_whole = self._name_of(number)
            text = local_constant(name_of_whole, self.layout, self.moves, number, placements)
            if (
                text == name_of_whole and name_of_whole.isidentifier()
            ):  # a buffer that was written has no name of its own
                self.cuts[number, placements] = name_of_whole
                continue
            existing = self.cut_names.get(text)
            name = self.cut_names[text] = existing or self.scope.keep(
                f"own_{to_identifier(name_of_whole.rpartition('.')[2])}"
            )
            self.cuts[number, placements] = name
            varies = number in self.per_step or tensor.kind == INPUT
            if existing is None:
                self.lines[varies].append(f"{name} = {text}")
                if not varies:
                    self.table_names.append(name)

    def _write_functions(self, plain: Sequence[int]) -> list[str]:
        results = [*self.cuts.values(), *(self._name_of(n) for n in plain)]
        used = used_names([*self.lines[True], *results])
        self.used_table_names = [n for n in dict.fromkeys(self.table_names) if n in used]
        fixed, varying = self.lines[False], self.lines[True]
        if self.restored:
            varying.insert(0, f"{self.restore_name} = [(t, t.clone()) for t in ({', '.join(self.restored)},)]")
        known = {*self.inputs.values(), *self.used_table_names}
        self.constant_names = [n for n in dict.fromkeys(results) if n not in known and n.isidentifier()]
        self.constant_arguments = [
            "buffers",
            *self.inputs.values(),
            *(n for n in self.used_table_names if n in used_names(varying)),
        ]
        functions = []
        if self.used_table_names:
            self.tables = _function_source("tables(buffers)", fixed, self.used_table_names)
            functions.append(self.tables)
        if varying:
            head = f"constants({', '.join(self.constant_arguments)})"
            functions.append(_function_source(head, varying, self.constant_names))
        return functions


def _function_source(head: str, lines: Sequence[str], results: Sequence[str]) -> str:
    body = [*lines, *([f"return {', '.join(results)}{',' if len(results) == 1 else ''}"] if results else [])]
    return "\n    ".join([f"def {head}:", *body])


def _guard_source(name: str, text: str) -> str:
    spelled = {
        "__bool__": "bool",
        "__int__": "int",
        "__float__": "float",
        "__index__": "int",
        "equal": "torch.equal",
        "allclose": "torch.allclose",
    }
    return f"{spelled[name]}({text})" if name in spelled else f"{text}.{name}()"
