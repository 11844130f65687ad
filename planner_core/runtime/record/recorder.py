"""Run a model's own forward once, with parameters on meta, and keep every call with its arguments.

The recorder of the capture numbers the values and names the call sites, so that each call finds its row in the plan. This
module adds what generated code needs: functions, templates of arguments, the calls that make constants, and active dropout.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.models.capture import Recorder, describe, storage_id
from planner_core.models.hooks import (
    DROPOUTS,
    Frame,
    draws_dropout_mask,
    draws_random_numbers,
    host_state,
    is_inplace,
    recorded_results,
    set_host_state,
    tensors,
)
from planner_core.ops import operator
from planner_core.runtime.mismatch import PlanMismatch
from planner_core.runtime.record.frozen import FrozenModel
from planner_core.runtime.record.results import register_result_types
from planner_core.runtime.record.source_names import refuse_model_collectives, running_statement
from planner_core.runtime.record.tape import (
    BUFFER,
    COMPUTED,
    CONSTANT,
    DEVICE,
    INPUT,
    LITERAL,
    PARAMETER,
    Ref,
    Tape,
    TapeCall,
    TapeTensor,
    map_leaves,
)

VALUE_READS = frozenset(
    {"__bool__", "item", "__int__", "__float__", "__index__", "tolist", "equal", "allclose", "is_nonzero"}
)

DIM_MERGING = frozenset({"view", "reshape", "flatten", "view_as", "reshape_as", "ravel"})
"""Functions that merge dims."""


class CannotRewrite(PlanMismatch):
    """This model cannot become generated code. The message says why, and what would help."""


class MixesSamples(CannotRewrite):
    """A rank cannot make its part of the constants from its own samples, but it can from those of all ranks."""


def record(frozen: FrozenModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tape:
    """Record one forward pass of a model's copy. Constants are computed on the CPU.

    Raises CaptureError and PlanMismatch.
    """
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.is_meta else t.detach().cpu(), (args, dict(kwargs))
    )
    before = host_state()
    tape, calls = _record_once(frozen, args, kwargs)
    if host_state() != before:  # a layer may be left out at a rate of 0
        repeated = _record_once(frozen, args, kwargs)[1]
        set_host_state(before)
        if repeated != calls:
            raise CannotRewrite(
                "forward draws random numbers of Python or numpy, of which each rank would draw its own; draw them by torch (torch.rand)"
            )
    return tape


def _record_once(frozen: FrozenModel, args: Any, kwargs: Any) -> tuple[Tape, Any]:
    frozen.types.restore()
    with torch.random.fork_rng(), refuse_model_collectives():
        recorder = TapeRecorder(frozen)
        return recorder.record(args, dict(kwargs)), recorder.transcript


class TapeRecorder(Recorder):
    """Writes the tape of one forward pass. Numbers of tensors are those of the capture."""

    def __init__(self, frozen: FrozenModel) -> None:
        super().__init__(frozen.twin, replay=False, originals=frozen.originals)
        self.tape = Tape()
        self.shared: set[int] = set()  # memory that several inputs share
        self.origins: dict[int, tuple[str, str]] = {}  # number -> kind and name
        self.varying: set[int] = set()
        self.of_buffers: set[int] = set()  # constants that are made of buffers
        self.literal_values: dict[int, torch.Tensor] = {}  # number -> a tensor that the model's code holds
        self.scopes_of: list[tuple[TapeCall, Any, str]] = []  # each call, and its module call as it was named then
        self.records: dict[int, Any] = {}  # by the id of a call: the capture's record of it
        for name, number in self.recording.params.items():
            self.origins.setdefault(number, (PARAMETER, name))
        for name, number in self.recording.buffers.items():
            self.origins[number] = BUFFER, name.partition(":")[2]

    def record(self, args: Any, kwargs: dict[str, Any]) -> Tape:
        """Record one forward pass."""
        forward = self.model.forward
        # Before `run`, which would number the inputs without their names and paths.
        self.tape.arguments = self._inputs(_positional_names(forward), args, kwargs)
        plain, self.model = self.model, _ModelWithoutHooks(self.model, self)  # type: ignore[assignment]
        try:
            out = self.run(kwargs, args=args)
        finally:
            self.model = plain
        for call, scope, name in self.scopes_of:
            if scope.scope != name:  # what a checkpoint runs is named when all has run
                record = self.records.get(id(call))
                call.scope, call.site = scope.scope, record.site if record else f"{scope.scope}/{call.fn}"
        self.tape.result = self._result(out)
        self.tape.values = self.recording.values
        self.tape.tensors = [self._tensor(number) for number in range(len(self.recording.values))]
        return self.tape

    def _inputs(self, positional: list[str], args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
        storages = {id(x): storage_id(x) for _, x in leaves if isinstance(x, torch.Tensor) and not x.is_meta}
        self.shared = {storage for storage, number in Counter(storages.values()).items() if number > 1}
        template_leaves = [self._input(path, x, positional) if isinstance(x, torch.Tensor) else x for path, x in leaves]
        return pytree.tree_unflatten(template_leaves, spec)

    def _input(self, path: Any, x: torch.Tensor, positional: list[str]) -> Ref:
        """Number a tensor of the call, at `path` in its arguments and named arguments."""
        side, key, *rest = path
        number = self.ids.get(id(x))
        if number is None:
            position = getattr(key, "idx", 0)
            named = positional[position] if position < len(positional) else f"input_{position}"
            first = named if side.idx == 0 else str(key.key)
            number = self._add_value(x, "constant", first)
            self.origins[number] = INPUT, first + pytree.keystr(tuple(rest))
            self.varying.add(number)
            self.tape.fed.add(number)
        return Ref(number)

    def _result(self, out: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return Ref(self.number(item))
            if item is None or isinstance(item, (bool, int, float, str)):
                return item
            raise CannotRewrite(
                f"forward returns a {type(item).__name__}, in which tensors cannot be found; return tensors, tuples or dicts of them"
            )

        return pytree.tree_map(leaf, register_result_types(out))

    # --- tensors --------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of an operand. A tensor that no call made and nobody gave is one that the model's code holds."""
        known = self.ids.get(id(tensor))
        number = self.value_of(tensor)
        if known is None and number not in self.origins:
            self.origins[number] = LITERAL, ""
            self.literal_values[number] = tensor
        return number

    def _tensor(self, number: int) -> TapeTensor:
        value = self.recording.values[number]
        kind, name = self.origins.get(number, (COMPUTED if value.kind == "activation" else CONSTANT, ""))
        return TapeTensor(
            kind,
            value.meta.shape,
            getattr(torch, value.meta.dtype),
            name,
            value.grad and kind in (PARAMETER, COMPUTED),
            number in self.varying,
            self.recording.storage_root(number),
            self.literal_values.get(number),
        )

    def _template(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return Ref(self.number(item))
            return DEVICE if isinstance(item, torch.device) else item

        return map_leaves(tree, leaf)

    # --- calls ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in VALUE_READS and isinstance(out, (bool, int, float, list)):
            self._guard(func, args, kwargs or {}, out)
        return out

    def _has_known_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a value is known, as when the model was planned: buffers have no values there."""
        number = self.ids.get(id(tensor), -1)
        return super()._has_known_values(tensor) and not self._of_buffer(number)

    def _of_buffer(self, number: int) -> bool:
        return number in self.of_buffers or self.origins.get(number, ("",))[0] == BUFFER

    def _call_of(
        self, kind: str, fn: str, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], **more: Any
    ) -> TapeCall:
        line, names = running_statement()
        inputs = tuple(self.number(t) for t in operands)
        reads_storage = fn == "as_strided" and not operands[0].is_contiguous()
        call = TapeCall(
            kind,
            fn,
            func,
            self._template(args),
            self._template(kwargs),
            inputs,
            scope=self.scopes.frame.scope,
            names=names,
            line=line,
            stops=not torch.is_grad_enabled(),
            strides=tuple(operands[0].stride()) if reads_storage else (),
            **more,
        )
        self.scopes_of.append((call, self.scope_stack[-1], self.scope_stack[-1].scope))
        return call

    def _close(self, call: TapeCall, results: list[torch.Tensor], out: Any) -> None:
        """Note the tensors that a call made, and their places in what it returned."""
        call.outputs = tuple(self.ids[id(t)] for t in results)
        call.shape = map_leaves(out, lambda t: Ref(self.ids[id(t)]) if isinstance(t, torch.Tensor) else t)
        self.tape.calls.append(call)

    def _guard(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a question of the model's code about a constant, and its answer."""
        operands = tensors((args, kwargs))
        inputs = [self.number(t) for t in operands if id(t) not in self.tracked]
        # A constant that is made of nothing that varies gives the same answer in every pass, so no code has to ask again.
        if any(i in self.varying for i in inputs):
            self.tape.calls.append(self._call_of("guard", func.__name__, func, args, kwargs, operands, answer=out))

    def _run_constant(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        chance = draws_random_numbers(fn) or draws_dropout_mask(fn, args, kwargs)
        if is_inplace(fn) and operands and storage_id(operands[0]) in self.shared:
            raise CannotRewrite(
                f"forward writes in place into an input that shares its memory with another one at {_running_line()}; give it a copy"
            )
        # Before it runs: a call in place gives its operand a new number, and the tape must name the old one as what it reads.
        call = self._call_of("constant", fn, func, args, kwargs, operands, answer="random" if chance else None)
        out = super()._run_constant(fn, func, args, kwargs, operands)
        if is_inplace(fn) and operands:
            self.ids[id(operands[0])] = number = self.recording.add(self.recording.values[call.inputs[0]])
            # A new number for each version, so that operators which were recorded before the write go on reading the old one.
            if self.is_buffer(operands[0]):
                self.tape.buffer_versions.add(number)
            self.varying.add(number)
            self.tape.fed.update({number} if self.tape.fed & {*call.inputs} else ())
            self._close(call, [operands[0]], operands[0])
            return out
        fresh = [t for t in tensors(out) if not any(t is o for o in operands)]
        if fresh:
            picks = call.inputs[1:]  # those of indices that are made of nothing (0, 1, 2, ...) are this rank's own
            if operator(fn).is_known and (fn != "getitem" or not picks or any(i in self.varying for i in picks)):
                call.attrs = describe(fn, func, args, kwargs, fresh)
            for tensor in fresh:
                self._fresh_constant(tensor, call.inputs, chance)
            self._close(call, fresh, out)
        return out

    def _fresh_constant(self, tensor: torch.Tensor, inputs: tuple[int, ...], chance: bool) -> None:
        number = self.value_of(tensor)
        self.origins[number] = CONSTANT, ""
        if chance or any(i in self.varying for i in inputs):
            self.varying.add(number)
        if any(map(self._of_buffer, inputs)):
            self.of_buffers.add(number)
        if chance or any(i in self.tape.fed for i in inputs):
            self.tape.fed.add(number)
        elif not tensor.is_meta:
            self.tape.made[number] = tensor

    def _record_call(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        if fn in DROPOUTS and draws_dropout_mask(fn, args, kwargs):
            return self._dropout(fn, func, args, kwargs, operands)
        call = self._call_of("op", fn, func, args, kwargs, operands)
        items = self.scope_stack[-1].items
        before = len(items)
        out = super()._record_call(fn, func, args, kwargs, operands)
        if len(items) > before:
            record: Any = items[-1]
            self.records[id(call)] = record
            call.site, call.outputs, call.saved, call.attrs = record.site, record.outputs, record.saved, record.attrs
            results = [args[0]] if is_inplace(fn) else recorded_results(fn, args, out)
            names = {id(t): n for t, n in zip(results, record.outputs, strict=False)}
            call.shape = map_leaves(
                out, lambda t: Ref(names.get(id(t), record.outputs[0])) if isinstance(t, torch.Tensor) else t
            )
            self.tape.calls.append(call)
        return out

    def _dropout(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        call = self._call_of("dropout", fn.rstrip("_"), func, args, kwargs, operands)
        # Without the count that `site()` keeps: the capture takes dropout for the identity, so no row of the plan has its name.
        call.site = f"{self.scopes.frame.scope}/{fn}"
        out = func(*args, **kwargs)
        call.outputs = (self.add_activation(out),)
        self.tracked.add(id(out))
        call.shape = Ref(call.outputs[0])
        self.tape.calls.append(call)
        return out


class _ModelWithoutHooks:
    """Replaces the model in `Recorder.run`: its forward without its own hooks, which torch runs around that of the plan."""

    def __init__(self, model: nn.Module, recorder: TapeRecorder) -> None:
        self.model, self.recorder = model, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = Frame(self.model, "", "")
        self.recorder.scopes.frames.append(frame)
        try:
            return self.recorder.trace_module(frame, self.model.forward, args, kwargs)
        finally:
            self.recorder.scopes.frames.pop()


def _running_line() -> str:
    return running_statement()[0].rpartition("/")[2]


def _positional_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(forward).parameters.items() if p.kind in kinds]
