"""An exported program as a module that capture can run. Shells take the place of the model's modules, steps that of their code.

Every module call of the export is a call of a shell with the same path and class name. So call sites, parameter names and repeated
blocks are the same as for the model itself.
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

from planner_core.core import CaptureError, InputError
from planner_core.models.capture.constants import MAX_COMPUTED_ELEMENTS
from planner_core.models.exported import aten
from planner_core.models.exported.archive import ExportedOp, ExportedProgram, TorchConstant, ValueName, read_exported
from planner_core.models.exported.grouped_mm import experts_call, refs

_SIZES: dict[str, Callable[..., Any]] = {
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
_CHECKS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym")
_ASKS = (
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
    """A module of the exported model. A call of it runs the program's next steps."""

    program: ProgramRunner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The results, if this is the whole model."""
        return self.program.enter(self, args)


class ProgramRunner:
    """Runs the steps of an exported program through a tree of shells."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.parts: dict[str, Shell] = {}
        self.homes: dict[
            str, tuple[dict[str, Any], str]
        ] = {}  # value of a parameter or buffer -> where its module keeps it
        kinds = {path: kind for step in exported.steps for _, path, kind in step.stack}
        self.root = self._part("", kinds)
        self._fill(kinds)
        for path in kinds:
            self._part(path, kinds)
        self.env: dict[str, Any] = {}
        self.at = 0
        self.device = "cpu"
        self.inside: list[tuple[str, str, str]] = []
        self.spent = _last_uses(exported)
        self._settle()

    # --- modules ------------------------------------------------------------------------------------

    def _part(self, path: str, kinds: dict[str, str]) -> Shell:
        if path not in self.parts:
            if path.count(".") > 50 or (path and "" in path.split(".")):
                raise InputError(
                    f"the program names a module {path[:60]!r}, which is not a path of names: the file is damaged"
                )
            kind = kinds.get(path, "")
            shell: Shell = type(kind if kind.isidentifier() else "Module", (Shell,), {})()
            object.__setattr__(shell, "program", self)
            self.parts[path] = shell
            if path:
                parent, _, name = path.rpartition(".")
                self._part(parent, kinds)._modules[name] = shell
        return self.parts[path]

    def _fill(self, kinds: dict[str, str]) -> None:
        """Parameters and buffers, on meta; two names of one stored tensor are one parameter."""
        made: dict[str, nn.Parameter] = {}
        for name, value in self.exported.parameters.items():
            form = self.exported.tensors[value]
            key = f"{self.exported.ties.get(name, name)} {form.shape}"
            if key not in made:
                empty = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="meta")
                made[key] = nn.Parameter(empty, form.grad)
            path, _, last = name.rpartition(".")
            table: dict[str, Any] = self._part(path, kinds)._parameters
            table[last] = made[key]
            self.homes[value] = table, last
        for name, value in self.exported.buffers.items():
            path, _, last = name.rpartition(".")
            form = self.exported.tensors[value]
            table = self._part(path, kinds)._buffers
            table[last] = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="meta")
            self.homes[value] = table, last

    def _settle(self) -> None:
        """Give a place to steps without a known one (sizes of inputs): the module in which the program is when they come."""
        before: tuple[tuple[str, str, str], ...] = ()
        for step in self.exported.steps:
            if not step.stack or step.target == "same":
                step.stack = before
            else:
                step.stack = before = tuple(s for s in step.stack if s[1])

    # --- running ------------------------------------------------------------------------------------

    def enter(self, shell: Shell, args: tuple[Any, ...]) -> Any:
        """One call of a shell: all steps up to where the program leaves it."""
        if shell is self.root:
            self.at, self.inside = 0, []
            self.env = dict(zip(self.exported.inputs, args, strict=True))
            self.env.update((value, table[name]) for value, (table, name) in self.homes.items())
            for name in self.exported.constants:
                self.env[name] = example(self.exported, name)
        steps = self.exported.steps
        depth = len(self.inside)
        if depth and self._experts(shell, depth):
            return None
        while self.at < len(steps) and list(steps[self.at].stack[:depth]) == self.inside:
            step = steps[self.at]
            if len(step.stack) == depth:
                before = self.at
                self._take(step)
                self._forget(before)
                continue
            self.inside.append(step.stack[depth])
            self.parts[step.stack[depth][1]]()
            self.inside.pop()
        return self._results() if shell is self.root else None

    def _experts(self, shell: Shell, depth: int) -> bool:
        """Whether this call is one of experts; then it has been made, as one op."""
        if not any(p is not None and p.dim() == 3 for p in shell._parameters.values()):
            return False
        steps, end = self.exported.steps, self.at
        while end < len(steps) and list(steps[end].stack[:depth]) == self.inside:
            end += 1
        found = experts_call(self.exported, steps[self.at : end], end, shell, self.env)
        if found is None:
            return False
        before, self.at = self.at, end
        self.env[found[0]] = found[1]
        self._forget(before)
        return True

    def _forget(self, before: int) -> None:
        """Free the values that no later step uses, as the model's own code would have."""
        for step in range(before, self.at):
            for name in self.spent.get(step, ()):
                self.env.pop(name, None)

    def _results(self) -> Any:
        found = [self._value(o) for o in self.exported.outputs]
        self.env = {}
        first = found[0] if found else None
        if isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point():
            return {"loss": first}
        return found

    def _take(self, step: ExportedOp) -> None:
        group = self._group()
        if group > 1 and (items := self._chained(group)) is not None:
            source = self._value(self.exported.steps[self.at].args[0][2])
            last = self.exported.steps[self.at + group - 1]
            self.at += group
            with torch.set_grad_enabled(False) if not step.grad else torch.enable_grad():
                self._give(last, aten.index(source, items))
            return
        self.at += 1
        if any(word in step.target for word in _CHECKS):
            return
        try:
            if step.grad:
                self._give(step, self._run(step))
            else:
                with torch.set_grad_enabled(False):
                    self._give(step, self._run(step))
        except (CaptureError, InputError):
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            raise CaptureError(
                f"step {self.at} of the program ({step.target[:80]}{step.line}) cannot be run: {words}"
            ) from error

    def _run(self, step: ExportedOp) -> Any:
        self.device = (
            "cpu" if all(_small(self._form(r)) for r in refs(step.outputs)) else "meta"
        )  # of what is made from nothing
        args = {name: self._value(value) for name, _, value in step.args}
        if step.target == "same":
            return args["self"]
        if step.target in _SIZES:
            return _SIZES[step.target](*(self._value(value) for _, _, value in step.args))
        if any(word in step.target for word in _ASKS):
            raise CaptureError(
                f"the program decides by the values of computed tensors{step.line}, which no graph can hold; export a form without it"
            )
        return aten.call(step.target, args, frozenset(name for name, by_keyword, _ in step.args if by_keyword))

    def _form(self, ref: ValueName) -> tuple[int, ...]:
        form = self.exported.tensors.get(ref.name)
        return form.shape if form else ()

    def _value(self, value: Any) -> Any:
        if isinstance(value, ValueName):
            if value.name not in self.env:
                raise InputError(f"the program uses {value.name[:80]!r} before it is made")
            return self.env[value.name]
        if isinstance(value, list):
            return [self._value(v) for v in value]
        if isinstance(value, TorchConstant):
            return torch.device(self.device) if value.kind == "device" else getattr(torch, value.name)
        return value

    def _give(self, step: ExportedOp, out: Any) -> None:
        """Bind the results, and check that they have the form that the file says."""
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        targets = [r for o in step.outputs for r in (o if isinstance(o, list) else [o])]
        for ref, made in zip(targets, results, strict=len(targets) > 1):
            if not isinstance(ref, ValueName):
                continue
            form = self.exported.tensors.get(ref.name)
            if form is not None and isinstance(made, torch.Tensor) and tuple(made.shape) != form.shape:
                raise InputError(
                    f"the program says that {ref.name[:60]!r} has sizes {form.shape}, but {step.target[:60]} makes {tuple(made.shape)}: "
                    "the file is damaged"
                )
            self.env[ref.name] = made

    # --- indexing -----------------------------------------------------------------------------------

    def _group(self) -> int:
        """How many steps from here on belong to one `x[...]` of the model's code."""
        steps = self.exported.steps
        first = steps[self.at]
        if not first.call.startswith("__getitem___"):
            return 1
        end = self.at
        while end < len(steps) and steps[end].call == first.call and steps[end].stack == first.stack:
            end += 1
        return end - self.at

    def _chained(self, count: int) -> tuple[Any, ...] | None:
        """The index that a chain of views stands for; None if the steps are no chain."""
        steps = self.exported.steps[self.at : self.at + count]
        names = [s.target.removeprefix("torch.ops.aten.") for s in steps]
        source = self._value(steps[0].args[0][2])
        linked = all(b.args[0][2] == a.outputs[0] for a, b in pairwise(steps))
        if (
            not linked
            or any(n not in _INDEXING for n in names)
            or "index.Tensor" in names[:-1]
            or not isinstance(source, torch.Tensor)
        ):
            return None
        items: list[Any] = [slice(None)] * source.dim()
        dims = list(range(source.dim()))  # for each dim of the view so far, its place in items
        for name, step in zip(names, steps, strict=True):
            args = {n: self._value(v) for n, _, v in step.args[1:]}
            dim = args.get("dim", 0)
            if name in ("slice.Tensor", "select.int") and items[dims[dim]] != slice(None):
                return None
            if name == "slice.Tensor":
                items[dims[dim]] = slice(args.get("start"), aten._end(args), args.get("step", 1))
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


def _small(shape: tuple[int, ...]) -> bool:
    """Whether a constant of this shape may have values; a larger one stays on meta."""
    return math.prod(shape) <= MAX_COMPUTED_ELEMENTS


def _last_uses(exported: ExportedProgram) -> dict[int, list[str]]:
    """Names that are last used, or made for nothing, by the step of a number; what the program returns is in none."""
    kept = {r.name for r in refs(exported.outputs)}
    last = {r.name: k for k, s in enumerate(exported.steps) for r in refs([[a for *_, a in s.args], s.outputs])}
    found: dict[int, list[str]] = {}
    for name, step in last.items():
        if name not in kept:
            found.setdefault(step, []).append(name)
    return found


def example(exported: ExportedProgram, name: str) -> torch.Tensor:
    """An example of an input: zeros for whole numbers and constants if they are small; for all else a tensor on meta."""
    form = exported.tensors[name]
    dtype = getattr(torch, form.dtype)
    plain = not dtype.is_floating_point or name in exported.constants
    return (
        torch.zeros(form.shape, dtype=dtype)
        if plain and _small(form.shape)
        else torch.empty(form.shape, dtype=dtype, device="meta")
    )


def workload(exported: ExportedProgram) -> dict[str, int]:
    """Samples and tokens of the example inputs, by their first two dims (an input of whole numbers tells the tokens)."""
    forms = [exported.tensors[n] for n in exported.inputs if n in exported.tensors]
    ids = next((f for f in forms if f.dtype in ("int64", "int32") and len(f.shape) == 2), None)
    first = ids or next((f for f in forms if f.shape), None)
    return {"batch": max(first.shape[0], 1) if first else 1, "seq": max(ids.shape[1], 1) if ids else 1}


def load(path: Path) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, int], tuple[str, ...]]:
    """The program as a module, its inputs, its workload, and notes about sizes that were symbolic."""
    exported = read_exported(path)
    program = ProgramRunner(exported)
    size = workload(exported)
    said = [
        f"batch {size['batch']} and sequence length {size['seq']} are those of the inputs that the program was exported with"
    ]
    if exported.symbols:
        told = ", ".join(f"{k} = {v}" for k, v in sorted(exported.symbols.items()))
        said.append(f"symbolic sizes are taken as in the export's example: {told}")
    return program.root, tuple(example(exported, n) for n in exported.inputs), size, tuple(said)
