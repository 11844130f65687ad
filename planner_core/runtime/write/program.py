"""Write the whole program of one rank: the functions of its units, its constants, and the forward pass that calls them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from planner_core.core import Edge, Shard, Step
from planner_core.models.hooks import draws_random_numbers, is_inplace
from planner_core.runtime.record import CannotRewrite, TapeCall
from planner_core.runtime.record.tape import BUFFER, COMPUTED, INPUT, PARAMETER
from planner_core.runtime.write.calls import ForwardWriter
from planner_core.runtime.write.constants import ConstantsWriter
from planner_core.runtime.write.expressions import RESERVED, NameScope, to_identifier, to_snake_case
from planner_core.runtime.write.functions import INSIDE, FunctionWriter, OuterSteps
from planner_core.runtime.write.moves import MoveTable, split_weight_steps
from planner_core.runtime.write.placed_tape import BlockCopy, PlannedTape
from planner_core.runtime.write.specs import BlockLine, Program, UnitBuffer, UnitInstance, UnitSpec, UnitUse
from planner_core.runtime.write.wrapping import wrap_lines


def write_program(
    layout: PlannedTape,
    title: str,
    recompute: Mapping[str, str] | None = None,
    *,
    kept: Collection[str] = (),
    name: str = "model",
) -> Program:
    """The program of a recording under a plan. `recompute`: how each block is recomputed, by label. `kept`: the call sites whose
    results are then kept. Raises CannotRewrite and PlanMismatch."""
    return _ProgramWriter(layout, title, dict(recompute or {}), kept, name).write()


class _ProgramWriter:
    def __init__(
        self, layout: PlannedTape, title: str, recompute: dict[str, str], kept: Collection[str], name: str
    ) -> None:
        self.layout, self.tape, self.title, self.recompute, self.name = layout, layout.tape, title, recompute, name
        self.kept = kept
        self.moves = MoveTable(layout.axis_names, layout.sizes)
        self.objects: dict[str, Any] = {}
        self.results = self.tape.results()

    def write(self) -> Program:
        self.instances = split_into_units(self.layout)
        self.writes = self._writes()
        self._share()
        self._functions()
        self._name_units()
        self.inputs = self._inputs()
        given = {n: name for n, name in self.inputs.items() if n not in self.tape.received}
        constants = ConstantsWriter(self.layout, self.moves, self._foreign, given)
        plain = [
            n for n in (*self.results, *self.writes, *self.writes.values()) if self.tape.tensors[n].kind != COMPUTED
        ]
        cuts = [cut for i in self.instances for cut in i.text.cuts]
        made = constants.write(cuts, plain)
        forward = self._forward(constants)
        functions = {i.function: i.lines() for i in self.instances}
        head = [f'"""{self.title}"""', "", *self.moves.definitions()]
        parts = [_block_lines("\n".join(head)), *map(_block_lines, made), *functions.values(), _block_lines(forward)]
        whole = [line for part in parts for line in (*part, BlockLine(""), BlockLine(""))][:-1]
        lines = tuple(line._replace(text=text) for line in whole for text in wrap_lines(line.text).split("\n"))
        program = self._program("\n".join(line.text for line in lines), bool(constants.given))
        program.lines = lines
        program.draws = constants.draws or any(draws_random_numbers(c.fn) for i in self.instances for c in i.calls)
        pattern = re.compile(r"buffers\[['\"]([^'\"]+)['\"]\]")
        program.buffers = tuple(dict.fromkeys(name for line in whole for name in pattern.findall(line.text)))
        program.table_buffers = tuple(dict.fromkeys(pattern.findall("\n".join(constants.lines[False]))))
        return program

    def _writes(self) -> dict[int, int]:
        """The last value of each buffer, or part of one, that forward writes in place: computed, or made of constants."""
        found: dict[int, int] = {}
        first: dict[int, int] = {}  # of each version: what it is a version of
        for call in (c for c in self.tape.calls if c.kind in ("op", "constant") and c.inputs and is_inplace(c.fn)):
            target, made = first.get(call.inputs[0], call.inputs[0]), call.outputs[0]
            if self.tape.tensors[self.tape.tensors[target].root].kind != BUFFER:
                continue
            if call.kind == "op" or made in self.tape.buffer_versions:
                found.pop(target, None)
                found[target], first[made] = made, target
        return found

    # --- units ----------------------------------------------------------------------------------------

    def _share(self) -> None:
        """Find for each use of a parameter the steps that are taken outside of the function (`FunctionWriter.shared`)."""
        reduces: dict[int, set[tuple[Step, ...]]] = {}
        self.shared: list[dict[tuple[int, str], OuterSteps]] = []
        for instance in self.instances:
            uses: dict[int, dict[str, set[OuterSteps]]] = {}
            passed_on = self._passed_on(instance)
            for number, call, edge in self._weight_edges(instance):
                lifted = split_weight_steps(edge, self.moves.real(edge.forward), self.moves.real(edge.backward))
                grad = self.tape.tensors[number].grad
                stays = number in passed_on and (not grad or self.tape.views(call, number))
                use = INSIDE if lifted[0] and stays else lifted
                uses.setdefault(number, {}).setdefault(call.site, set()).add(use)
                if not lifted[0]:
                    reduces.setdefault(number, set()).add(lifted[1])
            self.shared.append({(n, site): x for n, u in uses.items() for site, x in _outer_steps_by_site(u).items()})
        for shared in self.shared:  # a kept weight has one gradient for all units that use it
            for (number, site), (gather, _) in shared.items():
                if not gather and len(reduces.get(number, ())) > 1:
                    shared[number, site] = INSIDE

    def _weight_edges(self, instance: UnitInstance) -> list[tuple[int, TapeCall, Edge]]:
        return [
            (n, c, e)
            for c in instance.calls
            if c.kind == "op"
            for n, e in zip(c.inputs, self.layout.row(c).inputs, strict=True)
            if self.tape.tensors[n].kind == PARAMETER
        ]

    def _passed_on(self, instance: UnitInstance) -> set[int]:
        """The parameters of which the unit gives a view to another unit or to the caller, and those that are frozen, which stay for
        backward, as planned."""
        own = {n for c in instance.calls for n in c.outputs}
        later = {n for other in self.instances if other is not instance for c in other.calls for n in c.inputs}
        frozen = {n for c in instance.calls for n in c.saved if n not in own and not self.tape.tensors[n].grad}
        return {self.tape.tensors[n].root for n in (own & (later | set(self.results))) | frozen}

    def _functions(self) -> None:
        used_by: dict[int, set[int]] = {}
        for at, instance in enumerate(self.instances):
            for call in instance.calls:
                for number in call.inputs:
                    used_by.setdefault(number, set()).add(at)
        lasting = {*self.results, *self.writes.values()}
        texts: dict[str, str] = {}
        called: dict[str, list[str]] = {}  # label -> names of its inputs in the last copy
        taken = NameScope(RESERVED | self.moves.taken)
        for at in reversed(range(len(self.instances))):
            instance = self.instances[at]
            own = {n for c in instance.calls for n in c.outputs}
            wanted = {n for n in own if n in lasting or used_by.get(n, set()) - {at}}
            writer = FunctionWriter(
                self.layout,
                self.moves,
                instance.calls,
                instance.prefix,
                wanted,
                self._foreign,
                self.shared[at],
                self.recompute.get(instance.label, "none") != "none",
                self.kept,
                called.get(instance.label, ()),
            )
            instance.written = writer.write()
            if instance.label:
                called.setdefault(instance.label, [writer.texts[n] for n in instance.written.inputs])
        for at, instance in enumerate(self.instances):
            text = instance.text.source("FUNCTION")
            if text not in texts:
                texts[text] = taken.keep(self._function_name(at, instance))
            instance.function = texts[text]

    def _function_name(self, at: int, instance: UnitInstance) -> str:
        if instance.label:
            return to_snake_case(instance.label.partition("#")[0])
        if at == 0:
            return "start"
        return "end" if at == len(self.instances) - 1 else "between"

    def _foreign(self, item: Any) -> str:
        """A name for an object that cannot be written as a literal. The underscore ahead keeps it apart from the names of values."""
        base = getattr(item, "__qualname__", None) or getattr(item, "__name__", None) or type(item).__name__
        first = name = f"_{to_identifier(str(base).rpartition('>.')[2])}"
        count = 1
        while name in self.objects and not _same_object(self.objects[name], item):
            count += 1
            name = f"{first}_{count}"
        self.objects[name] = item
        return name

    # --- forward --------------------------------------------------------------------------------------

    def _name_units(self) -> None:
        taken = NameScope(frozenset({"tables", "buffers"}))
        for instance in self.instances:
            instance.name = instance.prefix or taken.keep(instance.function)

    def _inputs(self) -> dict[int, str]:
        taken = NameScope(RESERVED | self.moves.taken)
        given = {n: taken.keep(to_identifier(t.name)) for n, t in enumerate(self.tape.tensors) if t.kind == INPUT}
        return given | {n: taken.keep("received") for n in self.tape.received}

    def _forward(self, constants: ConstantsWriter) -> str:
        lines = []
        if constants.given:
            lines.append(f"{', '.join(constants.given)}{',' if len(constants.given) == 1 else ''} = units.tables")
        if constants.lines[True]:
            made = (
                f"{', '.join(constants.produced)}{',' if len(constants.produced) == 1 else ''} = "
                if constants.produced
                else ""
            )
            takes = ["units.buffers", *constants.taken_by_constants[1:]]
            lines.append(f"{made}constants({', '.join(takes)})")
        fixed = {*self.inputs.values(), *constants.given, *constants.produced}
        last = [*self.results, *self.writes.values()]
        calls = ForwardWriter(self.instances, constants.cuts, last, frozenset(fixed) | RESERVED | self.moves.taken)
        calls.texts.update({n: self.inputs[n] for n in self.tape.received})
        lines += calls.write()
        self.groups = calls.groups

        def text(number: int) -> str:
            if self.tape.tensors[number].kind == BUFFER:
                return f"units.buffers[{self.tape.tensors[number].name!r}]"
            found = calls.texts.get(number) or constants.names.get(number) or self.inputs[number]
            return found if found.isidentifier() else f"units.{found}"  # a buffer that constants have written

        lines += [f"write({text(buffer)}, {text(value)})" for buffer, value in self.writes.items()]
        names = [text(n) for n in self.results]
        lines.append(f"return {', '.join(names)}{',' if len(names) == 1 else ''}")
        return "\n    ".join([f"def forward({', '.join(['units', *self.inputs.values()])}):", *lines])

    def _program(self, source: str, has_tables: bool) -> Program:
        units = [self._unit(i) for i in self.instances]
        updated = {
            n for i in self.instances for c in i.calls if c.fn in ("batch_norm", "instance_norm") for n in c.inputs
        }
        split = {
            self.tape.tensors[b.number].name: b.placements
            for i in self.instances
            for b in i.text.buffers
            if b.number in updated and any(isinstance(p, Shard) for p in b.placements)
        }
        delivered = [(self.layout.delivered.get(n, self.layout.whole), self.layout.samples[n]) for n in self.results]
        samples = {name: self.layout.samples[n] for n, name in self.inputs.items()}
        return Program(
            source,
            units,
            self.groups,
            self.objects,
            list(self.inputs.values()),
            self.layout.data_axes,
            samples,
            self.results,
            self.tape.result,
            delivered,
            split,
            has_tables,
        )

    def _unit(self, instance: UnitInstance) -> UnitSpec:
        text = instance.text
        recompute = self.recompute.get(instance.label, "none")
        weights = [
            UnitUse(w.argument, self.layout.parameters[w.number], w.gather, w.reduce, w.again, w.lasting, w.trained)
            for w in text.weights
        ]
        buffers = [
            UnitBuffer(b.argument, self.tape.tensors[b.number].name, tuple(self.layout.slices(b.number, b.placements)))
            for b in text.buffers
        ]
        returns = any(n in self.layout.planned for call in instance.calls for n in call.outputs)
        name, function = instance.name, instance.function
        return UnitSpec(name, function, tuple(weights), tuple(buffers), recompute, text.seeds > 0, returns)


def split_into_units(layout: PlannedTape) -> list[UnitInstance]:
    """The units in order: calls of blocks, and what is between them. What the first copy makes for all copies goes before it."""
    calls = [c for c in layout.tape.calls if c.kind in ("op", "dropout")]
    where = [_find_block_copy(layout, c) for c in calls]
    last = {place: at for at, place in enumerate(where) if place[1]}
    found: list[UnitInstance] = []
    current: UnitInstance | None = None
    rest = UnitInstance("", "", [])
    for at, (call, place) in enumerate(zip(calls, where, strict=True)):
        if place[1]:
            if current is None or current.prefix != place[1]:
                found += [rest] if rest.calls else []
                rest, current = UnitInstance("", "", []), UnitInstance(*place, [])
                found.append(current)
            current.calls.append(call)
            if last[place] == at:
                current = None
        elif current is not None:  # it is moved out of the block that runs, to before it
            _move_before_block(found, call)
        else:
            rest.calls.append(call)
    return found + ([rest] if rest.calls else [])


def _find_block_copy(layout: PlannedTape, call: TapeCall) -> BlockCopy:
    if call.kind == "op":
        return layout.place(call)
    inner = [p for p in layout.block_copies.values() if (call.scope + ".").startswith(p[1] + ".")]
    return max(inner, key=lambda p: len(p[1]), default=("", ""))


def _move_before_block(found: list[UnitInstance], call: TapeCall) -> None:
    block = found[-1]
    if any(n in c.outputs for c in block.calls for n in call.inputs):
        raise CannotRewrite(f"{call.site} is between the operators of {block.prefix} and uses their results")
    if len(found) < 2 or found[-2].label:
        found.insert(len(found) - 1, UnitInstance("", "", []))
    found[-2].calls.append(call)


def _block_lines(text: str) -> list[BlockLine]:
    return [BlockLine(line) for line in text.split("\n")]


def _outer_steps_by_site(uses: Mapping[str, set[OuterSteps]]) -> dict[str, OuterSteps]:
    """For each operator that uses a weight, the steps that are taken outside.

    Each operator that takes a gathered weight has one of its own. A weight that is not gathered is one for all of them.
    """
    plain = {use for own in uses.values() for use in own if not use[0] or len(own) > 1}
    kept = next(iter(plain)) if len(plain) == 1 else INSIDE
    return {site: kept if own & plain else next(iter(own)) for site, own in uses.items()}


def _same_object(a: Any, b: Any) -> bool:
    """The same function, or the same method of modules of one class."""
    if a is b:
        return True
    here, there = getattr(a, "__self__", None), getattr(b, "__self__", None)
    return here is not None and type(here) is type(there) and getattr(a, "__func__", 0) is getattr(b, "__func__", 1)
