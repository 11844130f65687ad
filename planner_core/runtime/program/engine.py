"""Runs generated programs: it binds their code to this rank's axes and weights, and calls it.

One model may have several programs (training, evaluation, other shapes). They share weights and units.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program import names
from planner_core.runtime.program.collectives import Axis, Trace
from planner_core.runtime.program.collectives.counter import CountCollectives
from planner_core.runtime.program.operators.dropout import unit_seed
from planner_core.runtime.program.setup import make_moves
from planner_core.runtime.program.units import BackwardPass, RuntimeUnit, UnitCall, UnitWeight
from planner_core.runtime.program.weights import Weight

_PROGRAM_NUMBERS = itertools.count()


class Engine:
    """Weights, axes and the state of backward that all programs of one model share."""

    def __init__(
        self,
        axes: Sequence[Axis],
        weights: Mapping[str, Weight],
        buffer: Callable[[str], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.axes, self.weights, self.buffer, self.device = list(axes), weights, buffer, device
        self.by_name = {name: w for w in weights.values() for name in w.names}
        self.backward = BackwardPass()
        self.units: dict[object, RuntimeUnit] = {}
        self.seed = self.forwards = 0
        self.joins_inputs = False
        """Whether the collective that is being issued gathers the inputs of a call, which no operator of the plan does."""
        self.compile: Mapping[str, Any] | None = None
        self.written: names.EditableFunctions | None = None

    def unit(self, spec: Any) -> RuntimeUnit:
        """The unit of a specification. Programs with equal specifications share it."""
        uses = [self._use(u) for u in spec.uses]
        key = (
            spec.name,
            tuple((id(u.weight), u.gather, u.reduce, u.again, u.lasting, u.trained, u.copied) for u in uses),
        )
        if key not in self.units:
            self.units[key] = RuntimeUnit(spec.name, uses, self.backward)
        return self.units[key]

    def _use(self, u: Any) -> UnitWeight:
        weight, gather = self.by_name[u.parameter], make_moves(u.gather, self.axes)
        copied = bool(gather) or weight.casts
        return UnitWeight(
            u.argument, weight, gather, make_moves(u.reduce, self.axes), u.again, u.lasting, u.trained, copied
        )

    def share(self, name: str, cuts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """This rank's part of a buffer, as a view."""
        found = self.buffer(name)
        for axis, dim in cuts:
            found = self.axes[axis].view(found, dim)
        return found

    def names(self) -> dict[str, Any]:
        """The names that generated code may use, with their objects."""
        own = {a.name.upper(): a for a in self.axes}
        return {**{n: getattr(names, n) for n in names.__all__}, "DEVICE": self.device, **own}

    def seed_of(self, unit: str) -> int:
        """The seed of a unit in this forward pass."""
        return unit_seed(self.seed, self.forwards, unit)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not sum those gradients that are summed once a step."""
        before, self.backward.sync = self.backward.sync, False
        try:
            yield
        finally:
            self.backward.sync = before

    def counting(self, mesh: DeviceMesh) -> CountCollectives:
        """A mode that counts this model's collectives, those that gather inputs apart."""
        return CountCollectives(mesh, self.packed, lambda: self.joins_inputs)

    def packed(self, group: str) -> int:
        """Number of tensors that the collective carries which is being issued on a group."""
        return next((a.packed for a in self.axes if a.group_name == group), 1)

    @contextlib.contextmanager
    def joining_inputs(self) -> Iterator[None]:
        """Collectives inside gather the inputs of a call. They are not events of the planned step."""
        trace, self.joins_inputs = self.backward.trace, True
        self.trace(None)
        try:
            yield
        finally:
            self.trace(trace)
            self.joins_inputs = False

    def trace(self, trace: Trace | None) -> None:
        """Record every collective in `trace` from now on; None stops it."""
        self.backward.trace = trace
        for axis in self.axes:
            axis.trace = trace


@functools.cache
def _weights_class(names: tuple[str, ...]) -> Callable[..., Any]:
    """One class for the weights of all copies of a block, so that a compiler sees one case."""
    return collections.namedtuple("Weights", names)


def read_buffers(source: str) -> tuple[str, ...]:
    """The buffers that a piece of generated code reads."""
    return tuple(dict.fromkeys(re.findall(r"buffers\[['\"]([^'\"]+)['\"]\]", source)))


class BoundProgram:
    """One program, ready to run on this rank."""

    def __init__(self, program: Any, engine: Engine, script: names.EditableFunctions | None = None) -> None:
        """`script`: its functions run instead of the generated ones."""
        self.program, self.engine, self.script = program, engine, script
        own = {n: x.to(engine.device) if isinstance(x, torch.Tensor) else x for n, x in program.foreign.items()}
        self.names = {**engine.names(), **own}
        self.filename = f"<shardscope program {next(_PROGRAM_NUMBERS)}>"
        source = program.source
        linecache.cache[self.filename] = (
            len(source),
            None,
            source.splitlines(True),
            self.filename,
        )  # tracebacks show the line
        exec(compile(source, self.filename, "exec"), self.names)
        self.has_tables, self.buffers, self.table_buffers = program.has_tables, program.buffers, program.table_buffers
        if script is not None:
            self._take_over(script)
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.calls = [self._call(spec) for spec in program.units]
        self._chain()
        self.units = SimpleNamespace(
            buffers={},
            **{
                name: [self.calls[i] for i in members] if len(members) > 1 else self.calls[members[0]]
                for name, members in program.groups.items()
            },
        )
        self.tables: tuple[object, Any] = (None, None)

    def _take_over(self, script: names.EditableFunctions) -> None:
        """Use the script's functions instead of the generated ones. Their global names are those of the script. Raises PlanMismatch if
        they are not of such units and inputs."""
        own = {n: f for n, f in script.names.items() if inspect.isfunction(f) and f.__globals__ is script.names}
        lacks = next((u for u in self.program.units if u.function not in own), None)
        if lacks is not None:
            raise PlanMismatch(
                f"{lacks.name or 'the model'} runs as a function {lacks.function} here, which the script does not have: its model is built "
                "otherwise with what is installed; export the script again, or leave its blocks out (--no-blocks)"
            )
        takes = list(inspect.signature(own["forward"]).parameters)[1:] if "forward" in own else []
        if takes != list(self.program.inputs):
            raise PlanMismatch(
                f"the script's forward takes {', '.join(takes)}, and the model here {', '.join(self.program.inputs)}; export the script "
                "again, or leave its blocks out (--no-blocks)"
            )
        # Constants may be made another way here than where the script was written, so the script says which buffers they need.
        texts = {n: inspect.getsource(own[n]) for n in ("tables", "constants", "forward") if n in own}
        self.has_tables = "tables" in own
        self.buffers = read_buffers("".join(texts.values()))
        self.table_buffers = read_buffers(texts.get("tables", ""))
        self.names |= {n: own[n] for n in texts}
        for name, value in self.names.items():
            own = script.names.setdefault(name, value)
            if getattr(value, "__code__", None) and value.__code__.co_filename == self.filename:
                self.names[name] = own

    def _call(self, spec: Any) -> UnitCall:
        unit = self.engine.unit(spec)
        function = self.names[spec.function]
        if self.engine.compile is not None:
            if spec.recompute not in ("none", "full"):
                raise PlanMismatch(
                    f"{spec.name} keeps some results and computes the rest again, which a compiled function cannot; call apply "
                    "without compile, or plan with --recompute none or full"
                )
            function = self.compiled.setdefault(spec.function, torch.compile(function, **self.engine.compile))
        arguments = [u.argument for u in (*spec.uses, *spec.buffers)]
        weights = _weights_class(tuple(arguments)) if arguments else None
        call = UnitCall(unit, function, weights, spec.recompute, self.engine.seed_of if spec.seeded else None)
        call.buffers = [(b.buffer, b.cuts) for b in spec.buffers]
        call.buffer = self.engine.share
        return call

    def _chain(self) -> None:
        units = [call.unit for call in self.calls]
        reach = 1 + max((bucket.stages + bucket.earlier for unit in units for bucket in unit.buckets), default=0)
        returning: list[RuntimeUnit] = []
        for at, (call, spec) in enumerate(zip(self.calls, self.program.units, strict=True)):
            call.onward = units[at : at + reach]
            call.back = [call.unit, *returning[:-reach:-1]]  # the last `reach - 1` of them, the latest first
            if spec.returns:
                returning.append(call.unit)

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """This rank's parts of the tensors that the model returns."""
        units, engine = self.units, self.engine
        if self.buffers:
            units.buffers = {name: engine.buffer(name) for name in self.buffers}
        if self.has_tables:
            key = tuple((b.data_ptr(), b._version) for b in (units.buffers[n] for n in self.table_buffers))
            if self.tables[0] != key:
                with torch.no_grad():
                    self.tables = (key, self.names["tables"](units.buffers))
            units.tables = self.tables[1]
        out: tuple[torch.Tensor, ...] = self.names["forward"](units, *inputs)
        if torch.is_grad_enabled():
            engine.forwards += 1
        return out
