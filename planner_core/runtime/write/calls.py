"""Write the lines of `forward` that call the units. A run of calls of one block becomes a loop."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from planner_core.runtime.write.expressions import NameScope, to_identifier
from planner_core.runtime.write.specs import UnitInstance
from planner_core.runtime.write.syntax import assign, make_call, path, stored


class ForwardWriter:
    """Writes the lines that call the units."""

    def __init__(
        self, instances: Sequence[UnitInstance], cuts: Mapping[Any, str], results: Sequence[int], taken: frozenset[str]
    ) -> None:
        self.instances, self.cuts = instances, cuts
        self.names = NameScope(taken)
        self.value_names: dict[int, str] = {}
        self.groups: dict[str, list[int]] = {}
        self.group_names = NameScope(frozenset({"tables", "buffers"}))
        self.last: dict[int, int] = dict.fromkeys(results, 1 << 60)
        for index, instance in enumerate(instances):
            for number in instance.source.inputs:
                self.last[number] = max(self.last.get(number, index), index)

    def write(self) -> list[ast.stmt]:
        """Return all statements, in order."""
        lines: list[ast.stmt] = []
        index = 0
        while index < len(self.instances):
            end = self._find_run_end(index)
            lines += self._write_loop(index, end) if end - index > 1 else [self._write_single_call(index)]
            index = end
        return lines

    def _write_call(self, function: str, instance: UnitInstance) -> ast.expr:
        cuts = (self.cuts[c] for c in instance.source.cuts)
        return make_call(function, *map(path, [*(self.value_names[n] for n in instance.source.inputs), *cuts]))

    def _name_outputs(self, index: int, last_of: int) -> list[str]:
        """Name the outputs of instance `index`, each of which is used until instance `last_of` or later."""
        names = []
        for number in self.instances[index].source.outputs:
            wish = self._wanted_name(index, number)
            name = self.names.take(wish, index, max(self.last.get(number, index), last_of, index + 1))
            self.value_names[number] = name
            names.append(name)
        return names

    def _wanted_name(self, index: int, number: int) -> str:
        """Return the name by which the next unit takes the value, or by which this unit returns it."""
        for instance in self.instances[index + 1 :]:
            if number in instance.source.inputs:
                return NameScope.base(instance.source.input_names[instance.source.inputs.index(number)])
        source = self.instances[index].source
        value = source.returned[source.outputs.index(number)]
        return NameScope.base(value.id) if isinstance(value, ast.Name) else "hidden"

    def _write_single_call(self, index: int) -> ast.stmt:
        instance = self.instances[index]
        name = self.group_names.keep(
            instance.function if not instance.prefix else to_identifier(instance.prefix.replace(".", "_"))
        )
        self.groups[name] = [index]
        value = self._write_call(f"units.{name}", instance)
        # Arguments are read before results are named, since a result may take the name of an argument that is used for the last time.
        outputs = self._name_outputs(index, index)
        return assign(stored(outputs), value) if outputs else ast.Expr(value)

    # --- loops ----------------------------------------------------------------------------------------

    def _find_run_end(self, index: int) -> int:
        """Return the end of the run that one loop can call: each instance takes outputs of the one before, or values that stay
        the same."""
        first, end = self.instances[index], index + 1
        if not first.label:
            return end
        links: tuple[int | None, ...] | None = None
        while end < len(self.instances) and self.instances[end].function == first.function:
            names = self._link_inputs(end)
            if names is None or (links is not None and names != links):
                break
            links, end = names, end + 1
        return end

    def _link_inputs(self, index: int) -> tuple[int | None, ...] | None:
        """Return for each input of instance `index` the index of the output of the instance before, or None if that took the same
        value.

        Returns None if the two instances cannot be in one loop.
        """
        previous, new_unit = self.instances[index - 1].source, self.instances[index].source
        if [self.cuts[c] for c in previous.cuts] != [self.cuts[c] for c in new_unit.cuts]:
            return None
        links: list[int | None] = []
        for old, new in zip(previous.inputs, new_unit.inputs, strict=True):
            if new == old:
                links.append(None)
            elif new in previous.outputs:
                links.append(previous.outputs.index(new))
            else:
                return None
        carried = {previous.outputs[i] for i in links if i is not None}
        if any(self.last.get(n, -1) > index for n in previous.outputs) or set(previous.outputs) != carried:
            return None
        return tuple(links)

    def _write_loop(self, index: int, end: int) -> list[ast.stmt]:
        first, links = self.instances[index].source, self._link_inputs(index + 1)
        assert links is not None
        paths = [i.prefix.split(".") for i in self.instances[index:end]]
        common = [words[0] for words in itertools.takewhile(lambda w: len(set(w)) == 1, zip(*paths, strict=False))]
        name = self.group_names.keep(to_identifier(common[-1] if common else "blocks"))
        self.groups[name] = list(range(index, end))
        lines: list[ast.stmt] = []
        carried, previous_names = {}, dict(self.value_names)
        for position, link in enumerate(links):
            number = first.inputs[position]
            if link is not None:
                old = self.value_names[number]
                new = old if self.last.get(number, index) <= index else self.names.take(old, index, end)
                self.names.hold(new, end)
                if new != old:
                    lines.append(assign(new, path(old)))
                carried[link] = new
                self.value_names[number] = new
        value = self._write_call("layer", self.instances[index])
        self.value_names = previous_names  # a value that is used after the loop too keeps its own name
        outputs = stored([carried[i] for i in range(len(first.outputs))])
        lines.append(ast.For(stored(["layer"]), path(f"units.{name}"), [assign(outputs, value)], []))
        final = self.instances[end - 1].source
        for i, number in enumerate(final.outputs):
            self.value_names[number] = carried[i]
            self.names.hold(carried[i], self.last.get(number, end))
        return lines
