"""Write the constants of a forward pass: masks, positions and shifted labels, which are computed from the model's arguments.

Constants that do not depend on inputs (positions, rotary tables) are computed by `tables`, which runs once. The others are
computed by `constants`, in each pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner_core.core import Placements
from planner_core.ops import writes_in_place
from planner_core.runtime.mismatch import CannotRewrite, MixesSamples
from planner_core.runtime.record import DEVICE, Ref, TapeCall
from planner_core.runtime.record.tape import BUFFER, INPUT, LITERAL, refs
from planner_core.runtime.write.expressions import (
    RESERVED_IN_FORWARD,
    NameScope,
    to_identifier,
    write_call,
    write_method,
)
from planner_core.runtime.write.functions import local_constant
from planner_core.runtime.write.moves import MoveTable
from planner_core.runtime.write.placed_tape import PlannedTape, refuse_mixed_samples
from planner_core.runtime.write.syntax import (
    assign,
    attribute,
    function,
    literal,
    make_call,
    path,
    stored,
    subscript,
    used_names,
)

Cut = tuple[int, Placements]


@dataclass
class ConstantsWriter:
    """Writes `tables` and `constants`, which make the constants that units need."""

    layout: PlannedTape
    moves: MoveTable
    name_object: Any
    inputs: dict[int, str]
    lines: dict[bool, list[ast.stmt]] = field(default_factory=lambda: {False: [], True: []})
    names: dict[int, ast.expr] = field(default_factory=dict)
    cuts: dict[Cut, str] = field(default_factory=dict)
    cut_names: dict[str, str] = field(default_factory=dict)
    """The names of constants that were cut, by the expressions that cut them (`ast.dump`)."""
    table_names: list[str] = field(default_factory=list)
    used_table_names: list[str] = field(default_factory=list)
    """The names that `tables` returns to `constants` and to the units."""
    constant_names: list[str] = field(default_factory=list)
    """The names that `constants` returns."""
    draws: bool = False
    """Whether it draws random numbers, which all ranks draw alike."""
    constant_arguments: list[str] = field(default_factory=list)
    tables: ast.FunctionDef | None = None
    """None if nothing is left to it."""

    def write(self, wanted: Sequence[Cut], plain: Sequence[int]) -> list[ast.FunctionDef]:
        """Write both functions. `plain`: constants that the model returns unchanged."""
        self.scope = NameScope(RESERVED_IN_FORWARD | self.moves.taken | set(self.inputs.values()))
        self.names.update({n: path(name) for n, name in self.inputs.items()})
        self.restore_name = self.scope.keep("before")
        self.lasting_targets: dict[int, None] = {}  # written buffers and inputs
        self.restored: dict[int, None] = {}  # those that are written before a guard
        writes = [c for c in self._constant_calls() if self._is_in_place(c)]
        computed = (c for c in self.layout.ops if writes_in_place(c.fn))
        self.written_roots = {self._storage_root(c.inputs[0]) for c in (*writes, *computed)}
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
        known: dict[str, tuple[int, ...]] = {}
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

    def _storage_root(self, number: int) -> int:
        return self.layout.tape.tensors[number].root

    @staticmethod
    def _is_in_place(call: TapeCall) -> bool:
        return call.kind == "constant" and writes_in_place(call.fn) and call.shape in map(Ref, call.outputs)

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

    def _write_call(self, call: TapeCall, known: dict[str, tuple[int, ...]]) -> None:
        if call.answer == "random":
            if self.layout.num_parts > 1 and any(
                self.layout.samples[n] is not None for n in (*call.inputs, *call.outputs)
            ):
                raise MixesSamples(f"it draws numbers for its samples at {call.line.rpartition('/')[2]}")
            self.draws = True
        lines = self.lines[self._is_per_step(call)]
        if call.kind == "guard":
            self.restored |= self.lasting_targets
            # If the guard fails, another program runs the pass from its beginning and writes these tensors again.
            undo = [path(self.restore_name)] if self.lasting_targets else []
            answer = literal(call.answer, lambda item: path(repr(item)))
            lines.append(ast.Expr(make_call("expect", self._write_guard(call), answer, *undo)))
            return
        if self._is_in_place(call) and call.outputs[0] not in self.layout.tape.buffer_versions:
            root = self._storage_root(call.inputs[0])
            if self.layout.tape.tensors[root].kind in (BUFFER, INPUT, LITERAL):
                self.lasting_targets[root] = None
            lines.append(self._write_in_place(call))
            # The new version is the same object in memory, so the code goes on under the old name.
            self.names[call.outputs[0]] = self._name_of(call.inputs[0])
            return
        value = self._write_value(call)
        key = ast.dump(value)
        if (
            # Equal code makes an equal constant, so it is computed once. Not if it draws numbers, or if its memory is written later.
            key in known
            and call.answer != "random"
            and not any(self._storage_root(n) in self.written_roots for n in call.outputs)
        ):
            for number, other in zip(call.outputs, known[key], strict=True):
                self.names[number] = self.names[other]
            return
        known[key] = call.outputs
        names = [self.scope.keep(self._wanted_name(call, number)) for number in call.outputs]
        self.names.update(zip(call.outputs, map(path, names), strict=True))
        self.table_names += [] if self._is_per_step(call) else names
        # A call may return a tuple of one, as `x.chunk(1)` does.
        lines.append(assign(stored(names, unpack=isinstance(call.shape, (tuple, list))), value))

    def _wanted_name(self, call: TapeCall, number: int) -> str:
        if number in self.layout.tape.buffer_versions:
            return to_identifier(self.layout.tape.tensors[self._storage_root(number)].name.rpartition(".")[2])
        index = call.outputs.index(number)
        if len(call.names) == len(call.outputs):
            return to_identifier(call.names[index] or call.fn)
        return to_identifier(call.fn)

    def _name_of(self, number: int) -> ast.expr:
        return self.names.get(number) or self._first_name(number)

    def _first_name(self, number: int) -> ast.expr:
        tensor = self.layout.tape.tensors[number]
        if tensor.kind == INPUT:
            return path(self.inputs[number])
        if tensor.kind == BUFFER:
            return subscript(path("buffers"), tensor.name)
        if tensor.kind == LITERAL:
            return path(self.name_object(tensor.value))
        raise CannotRewrite(f"a constant depends on a {tensor.kind} tensor")

    def _write_leaf(self, item: Any) -> ast.expr:
        if isinstance(item, Ref):
            return self._name_of(item.number)
        return path("DEVICE" if item is DEVICE else self.name_object(item))

    def _write_guard(self, guard: TapeCall) -> ast.expr:
        """Write the value of which the model's code has asked."""
        values = [self._name_of(n) for n in refs((guard.args, guard.kwargs))]
        if guard.fn in GUARDS:
            return make_call(GUARDS[guard.fn], *values)
        return make_call(attribute(values[0], guard.fn))

    def _write_value(self, call: TapeCall) -> ast.expr:
        """Write the value of a constant. A new version of a buffer is a tensor of its own."""
        if call.fn == "setitem":
            return make_call("with_item", *(literal(item, self._write_leaf) for item in call.args))
        return write_call(call.func, call.fn, call.args, call.kwargs, self._write_leaf)

    def _write_in_place(self, call: TapeCall) -> ast.stmt:
        """Write a call that changes a constant in place."""
        target = self._write_leaf(call.args[0])
        if call.fn == "setitem":
            item = subscript(target, call.args[1], self._write_leaf)
            return assign(ast.Subscript(item.value, item.slice, ast.Store()), literal(call.args[2], self._write_leaf))
        named = {k: v for k, v in call.kwargs.items() if k != "inplace"}
        if hasattr(torch.Tensor, call.fn):
            return ast.Expr(write_method(target, call.fn, call.func, call.args[1:], named, self._write_leaf))
        return ast.Expr(
            make_call(attribute(target, "copy_"), write_call(call.func, call.fn, call.args, named, self._write_leaf))
        )

    def _write_cuts(self, wanted: Sequence[Cut]) -> None:
        """Cut every constant once for each set of placements in which a unit needs it."""
        for number, placements in dict.fromkeys(wanted):
            tensor = self.layout.tape.tensors[number]
            constant = self._name_of(number)
            part = local_constant(constant, self.layout, self.moves, number, placements)
            if part is constant and isinstance(constant, ast.Name):  # a buffer that was written has no name of its own
                self.cuts[number, placements] = constant.id
                continue
            key, base = ast.dump(part), constant.id if isinstance(constant, ast.Name) else tensor.name
            existing = self.cut_names.get(key)
            name = self.cut_names[key] = existing or self.scope.keep(f"own_{to_identifier(base.rpartition('.')[2])}")
            self.cuts[number, placements] = name
            varies = number in self.per_step or tensor.kind == INPUT
            if existing is None:
                self.lines[varies].append(assign(name, part))
                if not varies:
                    self.table_names.append(name)

    def _write_functions(self, plain: Sequence[int]) -> list[ast.FunctionDef]:
        results = [*map(path, self.cuts.values()), *(self._name_of(n) for n in plain)]
        fixed, varying = self.lines[False], self.lines[True]
        used = used_names([*varying, *results])
        self.used_table_names = [n for n in dict.fromkeys(self.table_names) if n in used]
        if self.restored:
            varying.insert(0, self._write_restored())
        known = {*self.inputs.values(), *self.used_table_names}
        names = dict.fromkeys(value.id for value in results if isinstance(value, ast.Name))
        self.constant_names = [n for n in names if n not in known]
        used = used_names(varying)
        self.constant_arguments = ["buffers", *self.inputs.values(), *(n for n in self.used_table_names if n in used)]
        functions = []
        if self.used_table_names:
            self.tables = function("tables", ["buffers"], [*fixed, *_return_statement(self.used_table_names)])
            functions.append(self.tables)
        if varying:
            body = [*varying, *_return_statement(self.constant_names)]
            functions.append(function("constants", self.constant_arguments, body))
        return functions

    def _write_restored(self) -> ast.stmt:
        """Write the list of written tensors and their values before: `before = [(t, t.clone()) for t in (x, y)]`."""
        pair = literal((path("t"), make_call("t.clone")))
        targets = literal(tuple(self._first_name(root) for root in self.restored))
        return assign(self.restore_name, ast.ListComp(pair, [ast.comprehension(stored(["t"]), targets, [], 0)]))


GUARDS = {
    "__bool__": "bool",
    "__int__": "int",
    "__float__": "float",
    "__index__": "int",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
}
"""What asks a tensor for a value, as functions; all else are methods."""


def _return_statement(names: Sequence[str]) -> list[ast.stmt]:
    """Return the statement that returns names as a tuple, if there are any."""
    return [ast.Return(literal(tuple(map(path, names))))] if names else []
