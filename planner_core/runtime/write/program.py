"""Write the whole program of one rank: the functions of its units, its constants, and the forward pass that calls them."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from planner_core.core import BlockLabel, Edge, Shard, Step, numbered_names
from planner_core.cost import unit_starts
from planner_core.models.hooks import draws_random_numbers
from planner_core.ops import writes_in_place
from planner_core.runtime.mismatch import CannotRewrite
from planner_core.runtime.program.engine import read_buffers
from planner_core.runtime.program.units import UnitSpec
from planner_core.runtime.record import TapeCall
from planner_core.runtime.record.tape import BUFFER, COMPUTED, INPUT, PARAMETER, Tape
from planner_core.runtime.write.calls import ForwardWriter
from planner_core.runtime.write.constants import ConstantsWriter
from planner_core.runtime.write.expressions import (
    RESERVED,
    RESERVED_IN_FORWARD,
    NameScope,
    to_identifier,
    to_snake_case,
)
from planner_core.runtime.write.functions import INSIDE, FunctionArguments, FunctionWriter, OuterSteps
from planner_core.runtime.write.moves import MoveTable, split_weight_steps
from planner_core.runtime.write.placed_tape import BlockCopy, PlannedTape
from planner_core.runtime.write.specs import Program, UnitInstance
from planner_core.runtime.write.syntax import (
    assign,
    function,
    literal,
    make_call,
    path,
    print_function,
    stored,
    subscript,
    wrap_lines,
)


def write_program(
    layout: PlannedTape,
    title: str,
    recompute: Mapping[str, str],
    *,
    kept_sites: Collection[str],
) -> Program:
    """Write the program of a recording under a plan.

    `recompute`: how each block is recomputed, by label. `kept_sites`: the call sites whose results are then kept. Raises
    CannotRewrite and PlanMismatch.
    """
    return _ProgramWriter(layout, title, recompute, kept_sites).write()


class _ProgramWriter:
    def __init__(
        self, layout: PlannedTape, title: str, recompute: Mapping[str, str], kept_sites: Collection[str]
    ) -> None:
        self.layout, self.tape, self.title = layout, layout.tape, title
        self.recompute, self.kept_sites = recompute, kept_sites
        self.moves = MoveTable(layout.axis_names, layout.sizes)
        self.objects: dict[str, Any] = {}
        self.results = self.tape.results()

    def write(self) -> Program:
        self.instances = split_into_units(self.layout)
        self.buffer_writes = self._find_buffer_writes()
        self._choose_outer_steps()
        self._write_functions()
        self._name_units()
        self.inputs = self._name_inputs()
        named_inputs = {n: name for n, name in self.inputs.items() if n not in self.tape.received}
        constants = ConstantsWriter(self.layout, self.moves, self._name_object, named_inputs)
        plain = [
            n
            for n in (*self.results, *self.buffer_writes, *self.buffer_writes.values())
            if self.tape.tensors[n].kind != COMPUTED
        ]
        cuts = [cut for i in self.instances for cut in i.source.cuts]
        constant_functions = constants.write(cuts, plain)
        forward = self._write_forward(constants)
        functions = {i.function: i for i in self.instances}
        definitions = [ast.unparse(ast.fix_missing_locations(line)) for line in self.moves.definitions()]
        parts = [
            "\n".join([f'"""{self.title}"""', "", *definitions]),
            *map(print_function, constant_functions),
            *(print_function(i.source.tree(name)) for name, i in functions.items()),
            print_function(forward),
        ]
        source = wrap_lines("\n\n\n".join(parts) + "\n")
        program = self._make_program(source, bool(constants.used_table_names))
        program.draws = constants.draws or any(draws_random_numbers(c.fn) for i in self.instances for c in i.calls)
        program.buffers = read_buffers([*constant_functions, forward])
        program.table_buffers = read_buffers([constants.tables] if constants.tables else [])
        return program

    def _find_buffer_writes(self) -> dict[int, int]:
        """Return for each buffer, or part of one, that forward writes in place: its last value, computed or made of constants."""
        last_values: dict[int, int] = {}
        version_of: dict[int, int] = {}  # of each version: what it is a version of
        for call in (c for c in self.tape.calls if c.kind in ("op", "constant") and c.inputs and writes_in_place(c.fn)):
            target, version = version_of.get(call.inputs[0], call.inputs[0]), call.outputs[0]
            if self.tape.tensors[self.tape.tensors[target].root].kind != BUFFER:
                continue
            if call.kind == "op" or version in self.tape.buffer_versions:
                # Taken out first, so that the order of the dict is that of the last writes and not of the first ones.
                last_values.pop(target, None)
                last_values[target], version_of[version] = version, target
        return last_values

    # --- units ----------------------------------------------------------------------------------------

    def _choose_outer_steps(self) -> None:
        """Choose for each use of a parameter the steps that are taken outside of the function (`FunctionArguments`)."""
        reduces: dict[int, set[tuple[Step, ...]]] = {}
        self.outer_steps: list[dict[tuple[int, str], OuterSteps]] = []
        for instance in self.instances:
            uses: dict[int, dict[str, set[OuterSteps]]] = {}
            passed_on = self._weights_passed_on(instance)
            for number, call, edge in self._weight_edges(instance):
                outer = split_weight_steps(edge, self.moves.real(edge.forward), self.moves.real(edge.backward))
                stays = number in passed_on and self.tape.views(call, number)
                use = INSIDE if outer[0] and stays else outer
                uses.setdefault(number, {}).setdefault(call.site, set()).add(use)
                if not outer[0]:
                    reduces.setdefault(number, set()).add(outer[1])
            self.outer_steps.append(
                {(n, site): x for n, u in uses.items() for site, x in _outer_steps_by_site(u).items()}
            )
        for outer_steps in self.outer_steps:  # a kept weight has one gradient for all units that use it
            for (number, site), (gather, _) in outer_steps.items():
                if not gather and len(reduces.get(number, ())) > 1:
                    outer_steps[number, site] = INSIDE

    def _weight_edges(self, instance: UnitInstance) -> list[tuple[int, TapeCall, Edge]]:
        return [
            (n, c, e)
            for c in instance.calls
            if c.kind == "op"
            for n, e in zip(c.inputs, self.layout.row(c).inputs, strict=True)
            if self.tape.tensors[n].kind == PARAMETER
        ]

    def _weights_passed_on(self, instance: UnitInstance) -> set[int]:
        """Return the parameters of which the unit passes a view to another unit or to the caller."""
        results = {n for c in instance.calls for n in c.outputs}
        later = {n for other in self.instances if other is not instance for c in other.calls for n in c.inputs}
        return {self.tape.tensors[n].root for n in results & (later | set(self.results))}

    def _write_functions(self) -> None:
        used_by: dict[int, set[int]] = {}
        for index, instance in enumerate(self.instances):
            for call in instance.calls:
                for number in call.inputs:
                    used_by.setdefault(number, set()).add(index)
        lasting = {*self.results, *self.buffer_writes.values()}
        function_names: dict[str, str] = {}  # by the syntax tree
        input_names: dict[str, list[str]] = {}  # label -> names of its inputs in the last copy
        scope = NameScope(RESERVED | self.moves.taken)
        # All copies of a block take the names of inputs of one of them: with other names they would be other functions. It is the last one,
        # whose inputs a copy of the block has made and named; those of the first come from the embedding.
        for index in reversed(range(len(self.instances))):
            instance = self.instances[index]
            version = {n for c in instance.calls for n in c.outputs}
            outputs_wanted = {n for n in version if n in lasting or used_by.get(n, set()) - {index}}
            arguments = FunctionArguments(
                self.layout,
                instance.calls,
                instance.prefix,
                self.outer_steps[index],
                recomputed=self.recompute.get(instance.label, "none") != "none",
            )
            writer = FunctionWriter(
                arguments,
                self.moves,
                outputs_wanted,
                self._name_object,
                self.kept_sites,
                input_names.get(instance.label, ()),
            )
            instance.written = writer.write()
            if instance.label:
                input_names.setdefault(instance.label, instance.written.input_names)
        for index, instance in enumerate(self.instances):
            # Copies whose syntax trees are equal run as one function, whatever they are called in the plan.
            tree = ast.dump(instance.source.tree(""))
            if tree not in function_names:
                function_names[tree] = scope.keep(self._function_name(index, instance))
            instance.function = function_names[tree]

    def _function_name(self, index: int, instance: UnitInstance) -> str:
        if instance.label:
            return to_snake_case(BlockLabel.parse(instance.label).block)
        if index == 0:
            return "start"
        return "end" if index == len(self.instances) - 1 else "between"

    def _name_object(self, item: Any) -> str:
        """Return a name for an object that cannot be written as a literal. Its leading underscore keeps it distinct from names
        of values."""
        qualified_name = getattr(item, "__qualname__", None) or getattr(item, "__name__", None) or type(item).__name__
        wishes = numbered_names(f"_{to_identifier(str(qualified_name).rpartition('>.')[2])}", "_")
        name = next(n for n in wishes if n not in self.objects or _same_object(self.objects[n], item))
        self.objects[name] = item
        return name

    # --- forward --------------------------------------------------------------------------------------

    def _name_units(self) -> None:
        scope = NameScope(frozenset({"tables", "buffers"}))
        for instance in self.instances:
            instance.name = instance.prefix or scope.keep(instance.function)

    def _name_inputs(self) -> dict[int, str]:
        scope = NameScope(RESERVED_IN_FORWARD | self.moves.taken)
        named_inputs = {
            n: scope.keep(to_identifier(t.name)) for n, t in enumerate(self.tape.tensors) if t.kind == INPUT
        }
        return named_inputs | {n: scope.keep("received") for n in self.tape.received}

    def _write_forward(self, constants: ConstantsWriter) -> ast.FunctionDef:
        body: list[ast.stmt] = []
        if constants.used_table_names:
            body.append(assign(stored(constants.used_table_names, unpack=True), path("units.tables")))
        if constants.lines[True]:
            value = make_call("constants", path("units.buffers"), *map(path, constants.constant_arguments[1:]))
            names = constants.constant_names
            body.append(assign(stored(names, unpack=True), value) if names else ast.Expr(value))
        fixed = {*self.inputs.values(), *constants.used_table_names, *constants.constant_names}
        last = [*self.results, *self.buffer_writes.values()]
        calls = ForwardWriter(
            self.instances, constants.cuts, last, frozenset(fixed) | RESERVED_IN_FORWARD | self.moves.taken
        )
        calls.value_names.update({n: self.inputs[n] for n in self.tape.received})
        body += calls.write()
        self.groups = calls.groups

        def value_of(number: int) -> ast.expr:
            buffer = subscript(path("units.buffers"), self.tape.tensors[self.tape.tensors[number].root].name)
            if self.tape.tensors[number].kind == BUFFER:
                return buffer
            if number in calls.value_names:
                return path(calls.value_names[number])
            value = constants.names.get(number) or path(self.inputs[number])
            return value if isinstance(value, ast.Name) else buffer  # a buffer that constants have written

        body += [
            ast.Expr(make_call("write", value_of(buffer), value_of(value)))
            for buffer, value in self.buffer_writes.items()
        ]
        body.append(ast.Return(literal(tuple(value_of(n) for n in self.results))))
        return function("forward", ["units", *self.inputs.values()], body)

    def _make_program(self, source: str, has_tables: bool) -> Program:
        units = [self._unit_spec(i) for i in self.instances]
        norms = [c for i in self.instances for c in i.calls if c.fn in ("batch_norm", "instance_norm")]
        updated = {self.tape.tensors[n].name for c in norms for n in c.inputs}
        split = {
            b.buffer: b.placements
            for i in self.instances
            for b in i.source.buffers
            if b.buffer in updated and any(isinstance(p, Shard) for p in b.placements)
        }
        return Program(
            source,
            units,
            self.groups,
            self.objects,
            list(self.inputs.values()),
            self.layout.data_axes,
            self.results,
            self.tape.result,
            split,
            has_tables,
        )

    def _unit_spec(self, instance: UnitInstance) -> UnitSpec:
        source = instance.source
        recompute = self.recompute.get(instance.label, "none")
        returns = any(n in self.layout.with_gradient for call in instance.calls for n in call.outputs)
        name, function = instance.name, instance.function
        return UnitSpec(name, function, tuple(source.uses), tuple(source.buffers), recompute, source.seeds > 0, returns)


def split_into_units(layout: PlannedTape) -> list[UnitInstance]:
    """Return the units in order: calls of blocks, and what is between them.

    A call that belongs to no block may run inside the first copy and serve all copies. It is moved to before that copy.
    """
    calls = [c for c in layout.tape.calls if c.kind in ("op", "dropout")]
    copies = [_find_block_copy(layout, c) for c in calls]
    last_call = {copy: index for index, copy in enumerate(copies) if copy[1]}
    units: list[UnitInstance] = []
    current: UnitInstance | None = None
    between = UnitInstance("", "", [])
    for index, (call, copy) in enumerate(zip(calls, copies, strict=True)):
        if copy[1]:
            if current is None or current.prefix != copy[1]:
                units += [between] if between.calls else []
                between, current = UnitInstance("", "", []), UnitInstance(*copy, [])
                units.append(current)
            current.calls.append(call)
            # A copy is over with its last call. Until then a call that belongs to no block is moved to before the copy.
            if last_call[copy] == index:
                current = None
        elif current is not None:  # it is moved out of the block that runs, to before it
            _move_before_block(units, call)
        else:
            between.calls.append(call)
    units += [between] if between.calls else []
    return [part for unit in units for part in ([unit] if unit.label else _split_by_weights(unit, layout.tape))]


def _split_by_weights(between: UnitInstance, tape: Tape) -> list[UnitInstance]:
    """Split calls that belong to no block where their weights make several units, as the plan's price does."""
    weights = [
        {n: math.prod(tape.tensors[n].shape) for n in call.inputs if tape.tensors[n].kind == PARAMETER}
        for call in between.calls
    ]
    starts = unit_starts(weights)
    return [UnitInstance("", "", between.calls[a:b]) for a, b in pairwise([*starts, len(between.calls)])]


def _find_block_copy(layout: PlannedTape, call: TapeCall) -> BlockCopy:
    if call.kind == "op":
        return layout.place(call)
    copies_around = [p for p in layout.block_copies.values() if (call.scope + ".").startswith(p[1] + ".")]
    return max(copies_around, key=lambda p: len(p[1]), default=("", ""))


def _move_before_block(units: list[UnitInstance], call: TapeCall) -> None:
    block = units[-1]
    if any(n in c.outputs for c in block.calls for n in call.inputs):
        raise CannotRewrite(f"{call.site} is between the operators of {block.prefix} and uses their results")
    if len(units) < 2 or units[-2].label:
        units.insert(len(units) - 1, UnitInstance("", "", []))
    units[-2].calls.append(call)


def _outer_steps_by_site(uses: Mapping[str, set[OuterSteps]]) -> dict[str, OuterSteps]:
    """Choose for each operator that uses a weight the steps that are taken outside.

    Each operator that takes a gathered weight has its own gather. A weight that is not gathered is one for all operators.
    """
    shared_steps = {use for steps in uses.values() for use in steps if not use[0] or len(steps) > 1}
    chosen = next(iter(shared_steps)) if len(shared_steps) == 1 else INSIDE
    return {site: chosen if steps & shared_steps else next(iter(steps)) for site, steps in uses.items()}


def _same_object(a: Any, b: Any) -> bool:
    """Return whether these are the same function, or the same method of modules of one class."""
    if a is b:
        return True
    first_owner, second_owner = getattr(a, "__self__", None), getattr(b, "__self__", None)
    return (
        first_owner is not None
        and type(first_owner) is type(second_owner)
        and getattr(a, "__func__", 0) is getattr(b, "__func__", 1)
    )
