"""Runs generated programs: binds their code to this rank's axes and weights, and calls it.

One model may have several programs (training, evaluation, other shapes). They share weights and units.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import ast
import collections
import contextlib
import functools
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from planner_core.core import named
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.program import names
from planner_core.runtime.program.collectives import Axis, Trace
from planner_core.runtime.program.collectives.counter import CountCollectives
from planner_core.runtime.program.operators.dropout import unit_seed
from planner_core.runtime.program.setup import JointAxes, make_moves
from planner_core.runtime.program.units import BackwardPass, RuntimeUnit, UnitCall, UnitSpec, UnitWeight
from planner_core.runtime.program.weights import Weight

_PROGRAM_NUMBERS = itertools.count()


class Engine:
    """The weights, the axes and the state of backward that all programs of one model share."""

    def __init__(
        self,
        axes: Sequence[Axis],
        joint: JointAxes,
        weights: Mapping[str, Weight],
        buffer: Callable[[str], torch.Tensor],
        device: torch.device,
        *,
        seed: int,
        compile: Mapping[str, Any] | None,
    ) -> None:
        """`seed`: that of dropout. `compile`: options of `torch.compile` for the functions of units; None does not compile them."""
        self.axes, self.joint = list(axes), joint
        self.weights, self.buffer, self.device = weights, buffer, device
        self.by_name = {name: w for w in weights.values() for name in w.names}
        self.backward = BackwardPass()
        self.units: dict[object, RuntimeUnit] = {}
        self.seed, self.compile = seed, compile
        self.forwards = 0
        self.gathers_inputs = False
        """Whether the collective that is being issued gathers the inputs of a call. No operator of the plan does."""

    def unit(self, spec: UnitSpec) -> RuntimeUnit:
        """Return the unit of a specification. Programs with equal specifications share it."""
        uses = tuple(
            UnitWeight(u, self.by_name[u.parameter], make_moves(u.gather, self.axes), make_moves(u.reduce, self.axes))
            for u in spec.uses
        )
        key = spec.name, uses
        if key not in self.units:
            self.units[key] = RuntimeUnit(spec.name, uses, self.backward)
        return self.units[key]

    def local_buffer(self, name: str, cuts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return this rank's part of a buffer, as a view."""
        local = self.buffer(name)
        for axis, dim in cuts:
            local = self.axes[axis].view(local, dim)
        return local

    def names(self) -> dict[str, Any]:
        """Return the objects that generated code may use, by name."""
        axes = {a.name.upper(): a for a in self.axes}
        return {**{n: getattr(names, n) for n in names.__all__}, "DEVICE": self.device, **axes}

    def unit_seed(self, unit: str) -> int:
        """Return the seed of a unit in this forward pass."""
        return unit_seed(self.seed, self.forwards, unit)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes do not reduce gradients that are reduced once a step."""
        before, self.backward.sync = self.backward.sync, False
        try:
            yield
        finally:
            self.backward.sync = before

    def count_collectives(self, mesh: DeviceMesh) -> CountCollectives:
        """Return a mode that counts this model's collectives, and those that gather inputs separately."""
        joint = {axis.group_name: axes for axes, axis in self.joint.items()}
        return CountCollectives(mesh, self.packed, lambda: self.gathers_inputs, joint)

    def packed(self, group: str) -> int:
        """Return the number of tensors in the collective that is being issued on a group."""
        return next((a.packed for a in (*self.axes, *self.joint.values()) if a.group_name == group), 1)

    @contextlib.contextmanager
    def gathering_inputs(self) -> Iterator[None]:
        """Inside, collectives gather the inputs of a call. They are not traced, since they are no events of the planned step."""
        trace, self.gathers_inputs = self.backward.trace, True
        self.trace(None)
        try:
            yield
        finally:
            self.trace(trace)
            self.gathers_inputs = False

    def trace(self, trace: Trace | None) -> None:
        """Record every collective in `trace` from now on; None stops it."""
        self.backward.trace = trace
        for axis in (*self.axes, *self.joint.values()):
            axis.trace = trace


@functools.cache
def _weights_class(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return one class for the weights of all copies of a block, so that a compiler sees one case."""
    return collections.namedtuple("Weights", names)


def read_buffers(functions: Iterable[ast.AST]) -> tuple[str, ...]:
    """Return the names of the buffers that functions read."""
    nodes = (n for function in functions for n in ast.walk(function) if isinstance(n, ast.Subscript))
    # `buffers["name"]` in tables and constants, `units.buffers["name"]` in forward
    read = (n.slice for n in nodes if "buffers" in (getattr(n.value, "id", ""), getattr(n.value, "attr", "")))
    return tuple(dict.fromkeys(str(key.value) for key in read if isinstance(key, ast.Constant)))


class BoundProgram:
    """One program with this rank's weights and axes."""

    def __init__(self, program: Any, engine: Engine, script: names.EditableFunctions | None = None) -> None:
        """Bind a program. `script`: functions that run in place of the generated ones."""
        self.program, self.engine, self.script = program, engine, script
        foreign = {n: x.to(engine.device) if isinstance(x, torch.Tensor) else x for n, x in program.foreign.items()}
        self.names = {**engine.names(), **foreign}
        self.filename = f"<shardscope program {next(_PROGRAM_NUMBERS)}>"
        source = program.source
        # So that tracebacks show the line of generated code.
        linecache.cache[self.filename] = len(source), None, source.splitlines(True), self.filename
        exec(compile(source, self.filename, "exec"), self.names)
        self.has_tables, self.buffers, self.table_buffers = program.has_tables, program.buffers, program.table_buffers
        if script is not None:
            self._take_over(script)
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.calls = self._make_calls()
        self.units = SimpleNamespace(
            buffers={},
            **{
                name: [self.calls[i] for i in members] if len(members) > 1 else self.calls[members[0]]
                for name, members in program.groups.items()
            },
        )
        self.tables: tuple[object, Any] = (None, None)

    def _take_over(self, script: names.EditableFunctions) -> None:
        """Replace the generated functions by those of a script, whose globals are the script's. Raise PlanMismatch if they do
        not fit."""
        # A function that the script imports has other globals, and is no function of the program.
        functions = {n: f for n, f in script.names.items() if inspect.isfunction(f) and f.__globals__ is script.names}
        missing = next((u for u in self.program.units if u.function not in functions), None)
        if missing is not None:
            raise PlanMismatch(
                f"{missing.name or 'the model'} runs as a function {missing.function} here, which the script does not have: its model is "
                "built otherwise with what is installed; export the script again, or leave its blocks out (--no-blocks)"
            )
        parameters = list(inspect.signature(functions["forward"]).parameters)[1:] if "forward" in functions else []
        if parameters != list(self.program.inputs):
            raise PlanMismatch(
                f"the script's forward takes {', '.join(parameters)}, and the model here {', '.join(self.program.inputs)}; export the "
                "script again, or leave its blocks out (--no-blocks)"
            )
        # Constants may be made another way here than where the script was written, so the script says which buffers they need.
        trees = {
            n: ast.parse(textwrap.dedent(inspect.getsource(functions[n])))
            for n in ("tables", "constants", "forward")
            if n in functions
        }
        self.has_tables = "tables" in functions
        self.buffers = read_buffers(trees.values())
        self.table_buffers = read_buffers([trees["tables"]] if self.has_tables else [])
        self.names |= {n: functions[n] for n in trees}
        for name, value in self.names.items():
            # The script's functions look names up in the script's globals: what it lacks comes from here, and what it has stays.
            existing = script.names.setdefault(name, value)
            if getattr(value, "__code__", None) and value.__code__.co_filename == self.filename:
                self.names[name] = existing

    def _make_calls(self) -> list[UnitCall]:
        """Make the calls of all units, each with the units after it in forward and in backward whose weights come while it runs."""
        specs: Sequence[UnitSpec] = self.program.units
        units = [self.engine.unit(spec) for spec in specs]
        # Example: a refresh of 1 collective, and a gather of 2 that reads it: reach is 1 + (1 + 2) = 4. The refresh leaves 3 units ahead,
        # the first collective of the gather 2 units ahead, and its last one 1 unit ahead.
        reach = 1 + max(
            (bucket.num_collectives + bucket.reader_collectives for unit in units for bucket in unit.buckets), default=0
        )
        calls: list[UnitCall] = []
        run_backward: list[RuntimeUnit] = []
        for at, (unit, spec) in enumerate(zip(units, specs, strict=True)):
            before = run_backward[:-reach:-1]  # the last `reach - 1` of them, the latest first
            calls.append(self._make_call(spec, unit, units[at : at + reach], [unit, *before]))
            if spec.returns:
                run_backward.append(unit)
        return calls

    def _make_call(
        self,
        spec: UnitSpec,
        unit: RuntimeUnit,
        forward_units: Sequence[RuntimeUnit],
        backward_units: Sequence[RuntimeUnit],
    ) -> UnitCall:
        arguments = [*(u.argument for u in spec.uses), *(b.argument for b in spec.buffers)]
        return UnitCall(
            unit,
            self._function_of(spec),
            _weights_class(tuple(arguments)) if arguments else None,
            spec.recompute,
            self.engine.unit_seed if spec.seeded else None,
            [functools.partial(self.engine.local_buffer, b.buffer, b.cuts) for b in spec.buffers],
            forward_units,
            backward_units,
        )

    def _function_of(self, spec: UnitSpec) -> Callable[..., Any]:
        """Return the function of a unit, compiled if the engine says so."""
        function: Callable[..., Any] = self.names[spec.function]
        if self.engine.compile is None:
            return function
        if spec.recompute not in ("none", "full"):
            raise PlanMismatch(
                f"{spec.name} keeps some results and computes the rest again, which a compiled function cannot; call apply ",
                "without compile, or plan with ",
                named("recompute", "none"),
                " or ",
                named("recompute", "full"),
            )
        # How many tokens each rank sends is known from values alone, so the compiler leaves this operator to Python. A decorator
        # would do that too, and would import the compiler, as long as torch itself, for every run and export.
        function.__globals__["dispatched_experts"] = torch.compiler.disable(names.dispatched_experts)
        return self.compiled.setdefault(spec.function, torch.compile(function, **self.engine.compile))

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run forward, and return this rank's parts of the tensors that the model returns."""
        units, engine = self.units, self.engine
        if self.buffers:
            units.buffers = {name: engine.buffer(name) for name in self.buffers}
        if self.has_tables:
            # Tables are computed again when a buffer that they read was moved or written, as by load_state_dict.
            key = tuple((b.data_ptr(), b._version) for b in (units.buffers[n] for n in self.table_buffers))
            if self.tables[0] != key:
                with torch.no_grad():
                    self.tables = (key, self.names["tables"](units.buffers))
            units.tables = self.tables[1]
        out: tuple[torch.Tensor, ...] = self.names["forward"](units, *inputs)
        if torch.is_grad_enabled():
            # Evaluation does not count: the number is part of the seeds of masks, which a pass without gradients must not change.
            engine.forwards += 1
        return out
