"""Write the lines of `forward` that call the units. A run of calls of one block becomes a loop."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner_core.runtime.write.expressions import NameScope, to_identifier
from planner_core.runtime.write.specs import UnitInstance


class ForwardWriter:
    """Writes the lines that call the units."""

    def __init__(
        self, instances: Sequence[UnitInstance], cuts: Mapping[Any, str], results: Sequence[int], taken: frozenset[str]
    ) -> None:
        self.instances, self.cuts = instances, cuts
        self.names = NameScope(taken)
        self.texts: dict[int, str] = {}
        self.groups: dict[str, list[int]] = {}
        self.group_names = NameScope(frozenset({"tables", "buffers"}))
        self.last: dict[int, int] = dict.fromkeys(results, 1 << 60)
        for at, instance in enumerate(instances):
            for number in instance.text.inputs:
                self.last[number] = max(self.last.get(number, at), at)

    def write(self) -> list[str]:
        """Return all lines, in order."""
        lines, at = [], 0
        while at < len(self.instances):
            end = self._run(at)
            lines += self._loop(at, end) if end - at > 1 else [self._single(at)]
            at = end
        return lines

    def _arguments(self, instance: UnitInstance) -> str:
        return ", ".join([*(self.texts[n] for n in instance.text.inputs), *(self.cuts[c] for c in instance.text.cuts)])

    def _outputs(self, at: int, last_of: int) -> str:
        """Name the outputs of instance `at`, each of which is used until instance `last_of` or later."""
        found = []
        for number in self.instances[at].text.outputs:
            wish = self._wish(at, number)
            name = self.names.take(wish, at, max(self.last.get(number, at), last_of, at + 1))
            self.texts[number] = name
            found.append(name)
        return ", ".join(found)

    def _wish(self, at: int, number: int) -> str:
        """Return the name by which the next unit takes the value, or by which this unit returns it."""
        for instance in self.instances[at + 1 :]:
            if number in instance.text.inputs:
                names = instance.text.lines[0].partition("(")[2].rstrip("):").split(", ")
                given = [n for n in names if n not in ("w", "seed")]
                return re.sub(r"_\d+$", "", given[instance.text.inputs.index(number)])
        returned = self.instances[at].text.lines[-1].removeprefix("    return ").split(", ")
        found = returned[self.instances[at].text.outputs.index(number)]
        return re.sub(r"_\d+$", "", found) if found.isidentifier() else "hidden"

    def _single(self, at: int) -> str:
        instance = self.instances[at]
        name = self.group_names.keep(
            instance.function if not instance.prefix else to_identifier(instance.prefix.replace(".", "_"))
        )
        self.groups[name] = [at]
        given = self._arguments(instance)
        made = self._outputs(at, at)
        return f"{made} = units.{name}({given})" if made else f"units.{name}({given})"

    # --- loops ----------------------------------------------------------------------------------------

    def _run(self, at: int) -> int:
        """Return the end of the run that one loop can call: each instance takes outputs of the one before, or values that stay
        the same."""
        first, end = self.instances[at], at + 1
        if not first.label:
            return end
        links: tuple[int | None, ...] | None = None
        while end < len(self.instances) and self.instances[end].function == first.function:
            found = self._links(end)
            if found is None or (links is not None and found != links):
                break
            links, end = found, end + 1
        return end

    def _links(self, at: int) -> tuple[int | None, ...] | None:
        """Return for each input of instance `at` the index of the output of the instance before, or None if that took the same
        value.

        Returns None if the two instances cannot be in one loop.
        """
        before, here = self.instances[at - 1].text, self.instances[at].text
        if [self.cuts[c] for c in before.cuts] != [self.cuts[c] for c in here.cuts]:
            return None
        links: list[int | None] = []
        for old, new in zip(before.inputs, here.inputs, strict=True):
            if new == old:
                links.append(None)
            elif new in before.outputs:
                links.append(before.outputs.index(new))
            else:
                return None
        carried = {before.outputs[i] for i in links if i is not None}
        if any(self.last.get(n, -1) > at for n in before.outputs) or set(before.outputs) != carried:
            return None
        return tuple(links)

    def _loop(self, at: int, end: int) -> list[str]:
        first, links = self.instances[at].text, self._links(at + 1)
        assert links is not None
        paths = [i.prefix.split(".") for i in self.instances[at:end]]
        common = [words[0] for words in itertools.takewhile(lambda w: len(set(w)) == 1, zip(*paths, strict=False))]
        name = self.group_names.keep(to_identifier(common[-1] if common else "blocks"))
        self.groups[name] = list(range(at, end))
        lines, carried, before = [], {}, dict(self.texts)
        for position, link in enumerate(links):
            number = first.inputs[position]
            if link is not None:
                old = self.texts[number]
                new = old if self.last.get(number, at) <= at else self.names.take(old, at, end)
                self.names.hold(new, end)
                if new != old:
                    lines.append(f"{new} = {old}")
                carried[link] = new
                self.texts[number] = new
        given = self._arguments(self.instances[at])
        self.texts = before  # a value that is used after the loop too keeps its own name
        made = ", ".join(carried[i] for i in range(len(first.outputs)))
        lines += [f"for layer in units.{name}:", f"    {made} = layer({given})"]
        final = self.instances[end - 1].text
        for i, number in enumerate(final.outputs):
            self.texts[number] = carried[i]
            self.names.hold(carried[i], self.last.get(number, end))
        return lines
