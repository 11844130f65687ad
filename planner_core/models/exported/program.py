"""Turn an exported program into a module that capture can run: shells replace the model's modules, and steps their code.

Every module call of the export is a call of a shell with the same path and class name. So call sites, parameter names and repeated
blocks are those of the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner_core.core import CaptureError, InputError, shorten_error
from planner_core.models.capture.constants import MAX_COMPUTED_ELEMENTS
from planner_core.models.exported import aten
from planner_core.models.exported.archive import ExportedOp, ExportedProgram, TorchConstant, ValueName, read_exported

_SIZE_OPERATORS: dict[str, Callable[..., Any]] = {
    "_operator.add": operator.add,
    "_operator.sub": operator.sub,
    "_operator.mul": operator.mul,
    "_operator.floordiv": operator.floordiv,
    "_operator.mod": operator.mod,
    "_operator.neg": operator.neg,
    "_operator.truediv": operator.truediv,
    "_operator.eq": operator.eq,
    "_operator.ne": operator.ne,
    "_operator.lt": operator.lt,
    "_operator.le": operator.le,
    "_operator.gt": operator.gt,
    "_operator.ge": operator.ge,
    "_operator.and_": operator.and_,
    "_operator.or_": operator.or_,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "math.ceil": lambda x: -int(-x // 1),
    "math.floor": lambda x: int(x // 1),
    "math.trunc": int,
    "torch.sym_int": int,
    "torch.sym_float": float,
    "torch.sym_not": operator.not_,
    "torch.ops.aten.sym_size.int": lambda t, d: t.shape[d],
    "torch.ops.aten.sym_stride.int": lambda t, d: t.stride(d),
    "torch.ops.aten.sym_numel.default": torch.Tensor.numel,
    "torch.ops.aten.sym_storage_offset.default": lambda t: t.storage_offset(),
}
"""Operators that compute sizes from sizes."""
_ASSERTIONS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym")
_VALUE_READERS = (
    "aten.item.",
    "aten._local_scalar_dense.",
    "aten.nonzero",
    "aten.masked_select.",
    "aten.unique",
    "aten.is_nonzero.",
    "aten.equal.",
)
_INDEXING = ("slice.Tensor", "select.int", "unsqueeze.default", "alias.default", "index.Tensor")


class Shell(nn.Module):
    """A module of the exported model. A call runs the program's next steps."""

    program: ProgramRunner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results if this is the whole model, otherwise None: inner results are values of the program."""
        return self.program.run_call(self, args)


class ProgramRunner:
    """Run the steps of an exported program through a tree of shells."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.shells: dict[str, Shell] = {}
        self.owners: dict[
            str, tuple[dict[str, Any], str]
        ] = {}  # value of a parameter or buffer -> where its module keeps it
        kinds = {path: kind for step in exported.steps for _, path, kind in step.stack}
        self.root = self._shell("", kinds)
        self._add_tensors(kinds)
        for path in kinds:
            self._shell(path, kinds)
        self.values: dict[str, Any] = {}
        self.position = 0
        self.device = "cpu"
        self.open_calls: list[tuple[str, str, str]] = []
        self.last_uses = _last_uses(exported)
        self._complete_stacks()

    # --- modules ------------------------------------------------------------------------------------

    def _shell(self, path: str, kinds: dict[str, str]) -> Shell:
        if path not in self.shells:
            if path.count(".") > 50 or (path and "" in path.split(".")):
                raise InputError(
                    f"the program names a module {path[:60]!r}, which is not a path of names: the file is damaged"
                )
            kind = kinds.get(path, "")
            shell: Shell = type(kind if kind.isidentifier() else "Module", (Shell,), {})()
            object.__setattr__(shell, "program", self)
            self.shells[path] = shell
            if path:
                parent, _, name = path.rpartition(".")
                self._shell(parent, kinds)._modules[name] = shell
        return self.shells[path]

    def _add_tensors(self, kinds: dict[str, str]) -> None:
        """Make parameters and buffers on meta. Two names of one stored tensor become one parameter."""
        by_storage: dict[str, nn.Parameter] = {}
        for name, value in self.exported.parameters.items():
            form = self.exported.tensors[value]
            key = f"{self.exported.ties.get(name, name)} {form.shape}"
            if key not in by_storage:
                empty = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="meta")
                by_storage[key] = nn.Parameter(empty, form.grad)
            path, _, last = name.rpartition(".")
            table: dict[str, Any] = self._shell(path, kinds)._parameters
            table[last] = by_storage[key]
            self.owners[value] = table, last
        for name, value in self.exported.buffers.items():
            path, _, last = name.rpartition(".")
            form = self.exported.tensors[value]
            table = self._shell(path, kinds)._buffers
            table[last] = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="meta")
            self.owners[value] = table, last

    def _complete_stacks(self) -> None:
        """Give steps without a stack (sizes of inputs) that of the step before them."""
        before: tuple[tuple[str, str, str], ...] = ()
        for step in self.exported.steps:
            if not step.stack or step.target == "same":
                step.stack = before
            else:
                step.stack = before = tuple(s for s in step.stack if s[1])

    # --- running ------------------------------------------------------------------------------------

    def run_call(self, shell: Shell, args: tuple[Any, ...]) -> Any:
        """Run one call of a shell: all steps until the program leaves it."""
        if shell is self.root:
            self.position, self.open_calls = 0, []
            self.values = dict(zip(self.exported.inputs, args, strict=True))
            self.values.update((value, table[name]) for value, (table, name) in self.owners.items())
            for name in self.exported.constants:
                self.values[name] = example_input(self.exported, name)
        steps = self.exported.steps
        # The stack of a step says which calls are around it. One that is deeper opens the next call; another one ends this call.
        depth = len(self.open_calls)
        while self.position < len(steps) and list(steps[self.position].stack[:depth]) == self.open_calls:
            step = steps[self.position]
            if len(step.stack) == depth:
                before = self.position
                self._run_step(step)
                self._free_values(before)
                continue
            self.open_calls.append(step.stack[depth])
            self.shells[step.stack[depth][1]]()
            self.open_calls.pop()
        return self._collect_results() if shell is self.root else None

    def _free_values(self, before: int) -> None:
        """Free the values that no later step uses, as the model's code would."""
        for step in range(before, self.position):
            for name in self.last_uses.get(step, ()):
                self.values.pop(name, None)

    def _collect_results(self) -> Any:
        results = [self._resolve_value(o) for o in self.exported.outputs]
        self.values = {}
        first = results[0] if results else None
        if isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point():
            return {"loss": first}
        return results

    def _run_step(self, step: ExportedOp) -> None:
        group = self._index_group_size()
        if group > 1 and (items := self._chained_index(group)) is not None:
            source = self._resolve_value(self.exported.steps[self.position].args[0][2])
            last = self.exported.steps[self.position + group - 1]
            self.position += group
            with torch.set_grad_enabled(step.grad):
                self._bind_results(last, aten.index_tensor(source, items))
            return
        self.position += 1
        if any(word in step.target for word in _ASSERTIONS):
            return
        try:
            with torch.set_grad_enabled(step.grad):
                self._bind_results(step, self._compute_results(step))
        except (CaptureError, InputError):
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {shorten_error(error, 160)}"
            raise CaptureError(
                f"step {self.position} of the program ({step.target[:80]}{step.line}) cannot be run: {words}"
            ) from error

    def _compute_results(self, step: ExportedOp) -> Any:
        # The device of tensors that the program makes from nothing.
        self.device = "cpu" if all(_is_computed(self._shape_of(r)) for r in _find_references(step.outputs)) else "meta"
        args = {name: self._resolve_value(value) for name, _, value in step.args}
        if step.target == "same":
            return args["self"]
        if step.target in _SIZE_OPERATORS:
            return _SIZE_OPERATORS[step.target](*(self._resolve_value(value) for _, _, value in step.args))
        if any(word in step.target for word in _VALUE_READERS):
            raise CaptureError(
                f"the program decides by the values of computed tensors{step.line}, which no graph can hold; export a form without it"
            )
        return aten.run_op(step.target, args, frozenset(name for name, by_keyword, _ in step.args if by_keyword))

    def _shape_of(self, ref: ValueName) -> tuple[int, ...]:
        form = self.exported.tensors.get(ref.name)
        return form.shape if form else ()

    def _resolve_value(self, value: Any) -> Any:
        if isinstance(value, ValueName):
            if value.name not in self.values:
                raise InputError(f"the program uses {value.name[:80]!r} before it is made")
            return self.values[value.name]
        if isinstance(value, list):
            return [self._resolve_value(v) for v in value]
        if isinstance(value, TorchConstant):
            return torch.device(self.device) if value.kind == "device" else getattr(torch, value.name)
        return value

    def _bind_results(self, step: ExportedOp, out: Any) -> None:
        """Bind the results of a step, and check their shapes against the file."""
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        targets = [r for o in step.outputs for r in (o if isinstance(o, list) else [o])]
        for ref, result in zip(targets, results, strict=len(targets) > 1):
            if not isinstance(ref, ValueName):
                continue
            form = self.exported.tensors.get(ref.name)
            if form is not None and isinstance(result, torch.Tensor) and tuple(result.shape) != form.shape:
                raise InputError(
                    f"the program says that {ref.name[:60]!r} has sizes {form.shape}, but {step.target[:60]} makes {tuple(result.shape)}: "
                    "the file is damaged"
                )
            self.values[ref.name] = result

    # --- indexing -----------------------------------------------------------------------------------

    def _index_group_size(self) -> int:
        """Count the steps, from the current one, that belong to one `x[...]` of the model's code."""
        steps = self.exported.steps
        first = steps[self.position]
        if not first.call.startswith("__getitem___"):
            return 1
        end = self.position
        while end < len(steps) and steps[end].call == first.call and steps[end].stack == first.stack:
            end += 1
        return end - self.position

    def _chained_index(self, count: int) -> tuple[Any, ...] | None:
        """Return the index that a chain of views computes: x[:, 0:4] is slice, slice. None if the steps are not such a chain."""
        steps = self.exported.steps[self.position : self.position + count]
        names = [s.target.removeprefix("torch.ops.aten.") for s in steps]
        source = self._resolve_value(steps[0].args[0][2])
        linked = all(b.args[0][2] == a.outputs[0] for a, b in pairwise(steps))
        if (
            not linked
            or any(n not in _INDEXING for n in names)
            or "index.Tensor" in names[:-1]
            or not isinstance(source, torch.Tensor)
        ):
            return None
        # Example: x[:, 0:4, None, 2] of [b, 8, 3] is exported as slice, unsqueeze and select, and becomes (:, 0:4, None, 2) again.
        items: list[Any] = [slice(None)] * source.dim()
        dims = list(range(source.dim()))  # for each dim of the current view, its position in items
        for name, step in zip(names, steps, strict=True):
            args = {n: self._resolve_value(v) for n, _, v in step.args[1:]}
            dim = args.get("dim", 0)
            if name in ("slice.Tensor", "select.int") and items[dims[dim]] != slice(None):
                return None
            if name == "slice.Tensor":
                items[dims[dim]] = slice(args.get("start"), aten.slice_end(args), args.get("step", 1))
            elif name == "select.int":
                items[dims.pop(dim)] = args["index"]
            elif name == "unsqueeze.default":
                at = dims[dim] if 0 <= dim < len(dims) else len(items)
                items.insert(at, None)
                dims = [d + (d >= at) for d in dims]
                dims.insert(dim if dim >= 0 else len(dims) + 1 + dim, at)
            elif name == "index.Tensor":
                for i, tensor in enumerate(args["indices"]):
                    if tensor is not None:
                        items[dims[i]] = tensor
        return tuple(items)


def _find_references(tree: Any) -> list[ValueName]:
    """List all references in nested lists and tuples, in order."""
    if isinstance(tree, ValueName):
        return [tree]
    return [r for t in tree for r in _find_references(t)] if isinstance(tree, (list, tuple)) else []


def _is_computed(shape: tuple[int, ...]) -> bool:
    """Return whether a constant of this shape is computed on the CPU. A larger one stays on meta."""
    return math.prod(shape) <= MAX_COMPUTED_ELEMENTS


def _last_uses(exported: ExportedProgram) -> dict[int, list[str]]:
    """Return by step the values that it is the last to use or make. Results of the program are left out."""
    returned = {r.name for r in _find_references(exported.outputs)}
    last = {
        r.name: k for k, s in enumerate(exported.steps) for r in _find_references([[a for *_, a in s.args], s.outputs])
    }
    by_step: dict[int, list[str]] = {}
    for name, step in last.items():
        if name not in returned:
            by_step.setdefault(step, []).append(name)
    return by_step


def example_input(exported: ExportedProgram, name: str) -> torch.Tensor:
    """Return an example of an input: zeros for integers and constants if they are small, otherwise a tensor on meta."""
    form = exported.tensors[name]
    dtype = getattr(torch, form.dtype)
    # Zeros are ids of every table, and false in every mask. Real numbers never matter.
    plain = not dtype.is_floating_point or name in exported.constants
    return (
        torch.zeros(form.shape, dtype=dtype)
        if plain and _is_computed(form.shape)
        else torch.empty(form.shape, dtype=dtype, device="meta")
    )


def example_workload(exported: ExportedProgram) -> dict[str, int]:
    """Return batch and seq of the example inputs: the first dim, and the second one of an integer input."""
    forms = [exported.tensors[n] for n in exported.inputs if n in exported.tensors]
    ids = next((f for f in forms if f.dtype in ("int64", "int32") and len(f.shape) == 2), None)
    first = ids or next((f for f in forms if f.shape), None)
    return {"batch": max(first.shape[0], 1) if first else 1, "seq": max(ids.shape[1], 1) if ids else 1}


def load_program(path: Path) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, int], tuple[str, ...]]:
    """Load a program: its module, inputs, workload, and notes about its sizes."""
    exported = read_exported(path)
    program = ProgramRunner(exported)
    size = example_workload(exported)
    notes = [
        f"batch {size['batch']} and sequence length {size['seq']} are those of the inputs that the program was exported with"
    ]
    if exported.symbols:
        sizes = ", ".join(f"{k} = {v}" for k, v in sorted(exported.symbols.items()))
        notes.append(f"symbolic sizes are taken as in the export's example: {sizes}")
    return program.root, tuple(example_input(exported, n) for n in exported.inputs), size, tuple(notes)
