"""Record a forward pass: a TorchFunctionMode that judges every call, in one order, and reports it.

*Tracked* tensors are the parameters and what is computed from them (`ValueTable`). A call on one is an operator: it runs on meta and
becomes a `Record` of the graph. Any other call makes a constant (a mask, positions): it runs on the CPU, so that the model's code
can ask for its values. Autograd is on, so `saved_tensors_hooks` says exactly which tensors each operator keeps for backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner_core.core import STANDIN_SCOPE, Attr, PlannerError
from planner_core.models.capture.attributes import describe
from planner_core.models.capture.checks import refusals
from planner_core.models.capture.checks.explain import CurrentCall, explain_error
from planner_core.models.capture.checks.input_sizes import InputSizes
from planner_core.models.capture.checks.random_constants import RandomConstants
from planner_core.models.capture.checks.writes import (
    OUTLIVES_STEP,
    InplaceWrites,
    RunningStatistics,
    WriteUndo,
    check_arguments_unwritten,
)
from planner_core.models.capture.constants import (
    MAX_COMPUTED_ELEMENTS,
    TAKES_SIZES,
    run_constant,
    stay_on_meta,
    to_meta,
    with_picked_indices,
    with_sizes,
)
from planner_core.models.capture.record.checkpoints import name_checkpoint_parts
from planner_core.models.capture.record.fused_kernels import OpaqueFunctions, attend_on_meta, saved_by_kernel
from planner_core.models.capture.record.graph_writer import GraphWriter
from planner_core.models.capture.record.listener import FunctionCall, PassListener
from planner_core.models.capture.recording import Record, Recording, Scope
from planner_core.models.capture.replay import Replayer
from planner_core.models.capture.values import BEFORE_PASS, ValueTable
from planner_core.models.hooks import AssumeFinite, meta_kernels, normalize_call, rewrite_call  # noqa: F401 - registers
from planner_core.models.hooks import callsites as sites
from planner_core.models.hooks import chance as chances
from planner_core.models.hooks.input_values import describe_arguments
from planner_core.models.hooks.torch_private import storage_id
from planner_core.ops import writes_in_place


@dataclass(frozen=True, slots=True)
class ForeignTensors:
    """Tensors that a pass may not read, by storage. `originals`: the names of those of which the model has copies. `leftovers`: the
    names of those that an earlier pass computed and the model still holds."""

    originals: Mapping[int, str] = field(default_factory=dict)
    leftovers: Mapping[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class PassFacts:
    """What a pass tells about itself, beside its graph.

    transcript         calls with their literal arguments: equal in two passes of a model without state
    finite_questions   lines that ask whether computed numbers are finite
    drew_outside       whether it drew random numbers of Python or numpy
    constant_bytes     of tensors without values that were computed from the inputs alone
    largest_unknown    elements of the largest constant that was not computed
    """

    transcript: list[Any] = field(default_factory=list)
    finite_questions: list[str] = field(default_factory=list)
    drew_outside: bool = False
    constant_bytes: int = 0
    largest_unknown: int = 0


class Writes:
    """What a pass writes in place, and which constants its operators have read before."""

    def __init__(self) -> None:
        self.inplace, self.undo, self.statistics = InplaceWrites(), WriteUndo(), RunningStatistics()
        self.read_constants: set[int] = set()  # storages


class Recorder(TorchFunctionMode):
    """Record the calls of one forward pass.

    Args:
        model: The model, on meta.
        replay: Whether to replay repeated module calls and not trace them.
        foreign: Tensors that the pass may not read.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replay: bool = True,
        foreign: ForeignTensors | None = None,
    ) -> None:
        super().__init__()
        self.model, self.foreign = model, foreign or ForeignTensors()
        self.recording = Recording([], {}, Scope("", "", type(model).__name__), {}, {})
        self.values, self.graph = ValueTable(self.recording, model), GraphWriter(self.recording)
        self.facts, self.writes, self.random = PassFacts(), Writes(), RandomConstants()
        self.sizes = InputSizes(self.values.from_inputs, self._redispatch)
        self.assume_finite = AssumeFinite(
            self.values.is_tracked,
            self._redispatch,
            lambda: self.facts.finite_questions.append(refusals.model_line()),
        )
        self.scopes = sites.Scopes(
            model, self._call_module, lambda: self.graph.checkpoint(self.scopes.frame, self.values.clock)
        )
        self.scopes.make_refusal = lambda *reason: refusals.refusal(self.scopes.frame.scope, *reason)
        self.replayer = Replayer(model, self.values, self.graph, self.scopes, self.trace_module) if replay else None
        self.opaque_functions, self.current = OpaqueFunctions(), CurrentCall()
        self._packed_tensors: list[torch.Tensor] = []  # by autograd, since the last operator
        self.listener = PassListener()
        """Listens to the pass. Another one takes its place before `run`."""

    # --- the order of a call ------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = self._dispatch(func, types, args, kwargs or {})
        if isinstance(answer, (bool, int, float, list)) and refusals.reads_values(func):
            operands = sites.tensors((args, kwargs))
            call = FunctionCall(func.__name__, func, args, kwargs or {}, operands, self.scopes.frame.scope)
            self.listener.after_question(call, self.graph.scope, answer)
        return answer

    def _dispatch(self, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Judge a call and run it. Each step may rely on those before it, so their order is part of what they do."""
        # 1. A question about finiteness is answered before anything is recorded of it: `isfinite(x).all()` must leave no operators.
        #    Where its mask is used otherwise, `resolve_arguments` makes the calls now, so that their results have numbers below.
        if (answer := self.assume_finite.answer_call(func, args, kwargs)) is not NotImplemented:
            return answer
        args, kwargs = self.assume_finite.resolve_arguments(args, kwargs)
        # 2. Other forms of a call come back to `__torch_function__`, so all that follows sees the recorded form alone.
        others = rewrite_call(
            lambda f, *given: self.__torch_function__(f, types, *given),
            func,
            args,
            kwargs,
            self._has_known_values,
            self.values.is_stored,
        )
        if others is not NotImplemented:
            return others
        func, args, kwargs = normalize_call(func, args, kwargs)
        operands, fn = sites.tensors((args, kwargs)), sites.canonical_name(func, kwargs)
        tracked, scope = any(map(self.values.is_tracked, operands)), self.scopes.frame.scope
        if fn is None:
            refusals.check_setting(scope, func, args, kwargs)
            refusals.check_arrays(scope, func, any(map(self.values.from_inputs.include, operands)))
            if not tracked:
                self.random.check(scope, func, fn, args, operands)
                return func(*args, **kwargs)
        # 3. A view that was written is put back before the read of its whole is checked, which would refuse an outdated whole.
        for whole, index, part in sites.pop_written_views(fn or "", args, operands):
            self.__torch_function__(torch.Tensor.__setitem__, types, (whole, index, part))
        # 4. Refusals compare numbers and times of operands, which a call in place changes.
        self._check_call(func, fn, args, operands, tracked)
        if fn is None:
            return func(*args, **kwargs)
        refusals.check_arguments(scope, func, fn, args, kwargs)
        # 5. A size that depends on the inputs is asked for by calls of its own, which precede this one in the transcript.
        if (sized := self.sizes.check_call(scope, fn, args, kwargs)) is not NotImplemented:
            return sized
        self.facts.transcript.append((fn, describe_arguments(args), describe_arguments(kwargs)))
        call = FunctionCall(fn, func, args, kwargs, operands, scope)
        if not tracked:
            return self._run_constant(call)
        if self.listener.draws_masks and fn in chances.DROPOUTS and chances.draws_dropout_mask(fn, args, kwargs):
            return self._run_dropout(call)
        return self._run_operator(call)

    def _redispatch(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call that replaces one in the model's code."""
        return self.__torch_function__(func, (), args, kwargs)

    def _has_known_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has values, in a run as when it was planned, that do not depend on the inputs."""
        is_constant = not self.values.is_tracked(tensor) and not self.values.from_inputs.include(tensor)
        return not tensor.is_meta and is_constant and self.listener.has_planned_value(tensor)

    def _check_call(
        self,
        func: Callable[..., Any],
        fn: str | None,
        args: tuple[Any, ...],
        operands: list[torch.Tensor],
        tracked: bool,
    ) -> None:
        """Refuse a call that the graph would miss, or hold wrongly."""
        scope, values = self.scopes.frame.scope, self.values
        for tensor in operands:
            # A part that the first pass makes (BigBird's other attention) draws first values, which the weights it is given replace.
            draws_first_values = getattr(func, "__module__", "") == "torch.nn.init"
            is_older = values.find(tensor) is None and values.birth_of(tensor) == BEFORE_PASS
            if is_older and not draws_first_values:
                refusals.check_origin(scope, tensor, self.foreign.originals, self.foreign.leftovers)
            self.writes.inplace.check(scope, fn or "", args, tensor, values.time_of(tensor))
        buffers = [t for t in operands if values.is_buffer(t)]
        self.writes.statistics.check(scope, fn or "", args, buffers)
        self.random.check(scope, func, fn, args, operands)
        if tracked:
            refusals.check_call(scope, func, fn, operands)
            if self.replayer:
                refusals.check_length(scope, len(self.graph.scope.items))

    # --- constants ----------------------------------------------------------------------------------

    def _run_constant(self, call: FunctionCall) -> Any:
        self.listener.before_call("constant", call, self.graph.scope)
        fn, operands, values = call.name, call.operands, self.values
        if writes_in_place(fn) and operands:
            self._check_constant_write(call)
        depends_on_chance = self.random.depends_on_chance(fn, call.args, operands)
        out = run_constant(call.func, call.args, dict(call.kwargs), operands)
        results = sites.tensors(out)
        if any(map(values.from_inputs.include, operands)):
            values.from_inputs.add(results)
        self.writes.undo.note_results(results, operands)
        shared = {storage_id(t) for t in operands}
        for result in results:
            if result.is_meta and storage_id(result) not in shared and values.from_inputs.include(result):
                self.facts.constant_bytes += result.nbytes
            if depends_on_chance:
                self.random.note(result, fn)
            if result.is_meta and not any(t.is_meta for t in operands) and result.numel() > MAX_COMPUTED_ELEMENTS:
                self.facts.largest_unknown = max(self.facts.largest_unknown, result.numel())
            if not any(result is t for t in operands):
                values.note_constant(result)
        self.listener.after_constant(call, out)
        return out

    def _check_constant_write(self, call: FunctionCall) -> None:
        target = call.operands[0]
        # An operator that has read the old values is recorded with the number of this constant, which would have the new ones.
        was_read = storage_id(target) in self.writes.read_constants and not self.values.is_buffer(target)
        refusals.check_constant_write(call.module, call.name, was_read)
        self.writes.undo.save(target)
        if self.replayer:
            self.replayer.note_write(target, self.values.birth_of(target))

    def _run_dropout(self, call: FunctionCall) -> Any:
        self.listener.before_call("dropout", call, self.graph.scope)
        out = call.func(*call.args, **call.kwargs)
        self.listener.after_dropout(call, self.values.add_computed(out))
        return out

    # --- operators ----------------------------------------------------------------------------------

    def _run_operator(self, call: FunctionCall) -> Any:
        """Run a call on meta, and record it."""
        self.listener.before_call("op", call, self.graph.scope)
        fn, args, kwargs, operands = call.name, call.args, dict(call.kwargs), call.operands
        refusals.check_lookup(call.module, fn, args, kwargs)
        # Numbered before the call: one in place binds its target to a new value (`rebind`), and the record must read the old one.
        inputs, self._packed_tensors = tuple(self.values.number(t) for t in operands), []
        self.writes.read_constants.update(storage_id(t) for t in operands if not self.values.is_tracked(t))
        if fn in TAKES_SIZES and len(operands) > 1:
            args, kwargs = with_sizes(args, kwargs)
            operands = sites.tensors((args, kwargs))
        # No mask: a plan takes dropout for the identity, and a run draws masks itself.
        if fn in chances.DROPOUTS and "p" in kwargs:
            kwargs = {**kwargs, "p": 0.0}
        written = writes_in_place(fn)
        if written and not args[0].is_meta and self.writes.inplace.meta_form(args[0]) is None:
            self.writes.inplace.add_meta_form(args[0])
        moved, moved_kwargs = self._on_meta(args, kwargs, operands)
        as_given = moved
        if fn == "getitem":
            moved = with_picked_indices(args, moved)
        if fn == "to" or "device" in moved_kwargs:
            moved, moved_kwargs = stay_on_meta(moved), stay_on_meta(moved_kwargs)
        out = self._run_on_meta(fn, call.func, moved, moved_kwargs)
        # Taken here, since what the recorder itself calls below (`view_as`) may make autograd pack more.
        packed, self._packed_tensors = [*self._packed_tensors, *saved_by_kernel(fn, moved)], []
        if fn == "contiguous" and out is moved[0]:
            out = out.view_as(out)  # it returned its operand: make a tensor that can be a value of its own
        results = self._results(fn, moved, out)
        if not results:
            return out
        attrs = describe(fn, call.func, as_given, moved_kwargs, results)
        self.opaque_functions.note_call(
            sites.tensors((moved, moved_kwargs)), results, attrs, is_of_model=hasattr(call.func, sites.OPAQUE_CALL)
        )
        if written:
            attrs.update(self._new_version_attrs(args[0], results[0], inputs[0]))
        record = self._record(fn, inputs, results, attrs, packed, args[0] if written else None)
        sites.note_view(fn, args, out)
        # A constant with values was written through its form on meta. The model's code goes on with its own tensor.
        out = args[0] if written and not args[0].is_meta else out
        self.listener.after_operator(call, record, out)
        return out

    def _record(
        self,
        fn: str,
        inputs: tuple[int, ...],
        results: list[torch.Tensor],
        attrs: dict[str, Attr],
        packed: list[torch.Tensor],
        target: torch.Tensor | None,
    ) -> Record:
        """Number the results of an operator and add it to the graph. `target`: the operand that it has written in place."""
        outputs = tuple(self.values.add_computed(t) for t in results)
        if target is not None:
            self.writes.inplace.note_write(target, self.values.rebind(target, outputs[0]))
            sites.note_write(target)
        # After the results have their numbers: softmax and many others save what they return.
        saved, extra = self.recording.match_saved(packed, self.values.first_in_storage, (*inputs, *outputs))
        module = type(self.scopes.frame.module).__name__
        record = Record(self.scopes.site(fn), fn, inputs, outputs, attrs, module, saved, extra)
        self.graph.add(record)
        return record

    def _run_on_meta(self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self.current.fn, self.current.args, self.current.part = fn, args, None
        if not hasattr(func, sites.OPAQUE_CALL):
            return (attend_on_meta if fn == "scaled_dot_product_attention" else func)(*args, **kwargs)
        given = [(t, t._version) for t in sites.tensors((args, kwargs))]
        out = func(*args, **kwargs)
        check_arguments_unwritten(self.scopes.frame.scope, fn, given)
        return out

    def _results(self, fn: str, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
        """Return the tensors that a call computed.

        A cast without effect computes none. It would in a run with another dtype, so it counts in the names of call sites.
        """
        results = sites.recorded_results(fn, args, out)
        if not results and fn == "to":
            self.scopes.site(fn)
        return results

    def _on_meta(self, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """Replace every constant with values by its form on meta."""
        if all(t.is_meta for t in operands):
            return args, kwargs
        meta_form = self.writes.inplace.meta_form
        moved, moved_kwargs = to_meta(args, meta_form), to_meta(kwargs, meta_form)
        for constant, form in zip(operands, sites.tensors((moved, moved_kwargs)), strict=True):
            if form is not constant:
                self.values.stand_in(form, constant)
        return moved, moved_kwargs

    def _new_version_attrs(self, target: torch.Tensor, written: torch.Tensor, number: int) -> dict[str, Attr]:
        """Check a write in place into the value `number`, and return the attributes that its op needs."""
        scope, values, buffers = self.scopes.frame.scope, self.recording.values, self.recording.buffer_names
        root = self.recording.storage_root(number)
        outlives = values[root].kind == "constant" and self.recording.birth_times[root] == BEFORE_PASS
        refusals.check_target(scope, values[root], outlives and root not in buffers, root in self.values.inputs)
        if self.replayer:
            when = number if values[number].kind == "activation" else BEFORE_PASS
            self.replayer.note_write(target, when, computed=True)
        if not outlives:
            return {}
        if written.requires_grad:
            raise refusals.gradient_write_refusal(scope, self.scopes.root, buffers.get(root, ""), target)
        return {OUTLIVES_STEP: True}

    def _note_packed(self, tensor: torch.Tensor) -> torch.Tensor:
        self._packed_tensors.append(tensor)
        return tensor

    # --- modules ------------------------------------------------------------------------------------

    def _call_module(
        self, frame: sites.Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.replayer is None:
            return self.trace_module(frame, call, args, kwargs)
        return self.replayer.call_module(frame, call, args, kwargs)

    def trace_module(
        self, frame: sites.Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one module call and record it as a scope."""
        with self.graph.module_call(frame, self.values.clock):
            try:
                return call(*args, **kwargs)
            except Exception:
                self.current.part = frame.scope if self.current.part is None else self.current.part
                raise

    def _call_without_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward without its own hooks, which torch runs around that of a plan."""
        frame = sites.Frame(self.model, "", "")
        self.scopes.frames.append(frame)
        try:
            return self.trace_module(frame, self.model.forward, args, kwargs)
        finally:
            self.scopes.frames.pop()

    def run(
        self,
        inputs: dict[str, Any],
        after: Callable[[Any], Any] | None = None,
        args: tuple[Any, ...] = (),
        *,
        with_hooks: bool = True,
    ) -> Any:
        """Run and record one forward pass.

        Args:
            inputs, args: Named and positional arguments of the model.
            after: Called with the result, e.g. a stand-in loss; recorded in `STANDIN_SCOPE`.
            with_hooks: Whether the model's own hooks run. Those of its parts do.
        """
        recorder = weakref.proxy(self)  # autograd's graph keeps the hooks alive, and would keep the whole recording
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: recorder._note_packed(t), lambda t: t)
        for name, tree in (*inputs.items(), *(("", a) for a in args)):
            self.values.from_inputs.add(sites.tensors(tree))
            for tensor in sites.tensors(tree):
                self.values.add_input(tensor, name)
        guards = self.replayer.watch_attributes() if self.replayer else None
        before = chances.host_state()
        try:
            with self.scopes, refusals.without_autocast(lambda: self.scopes.frame.scope), hooks, torch.enable_grad():
                with self, guards or contextlib.nullcontext():
                    out = (self.model if with_hooks else self._call_without_hooks)(*args, **inputs)
                    if after is not None:
                        with self.scopes.named(STANDIN_SCOPE):
                            out = self.graph.run_at_root(after, out)
                self.facts.drew_outside = chances.host_state() != before
                if name := self.opaque_functions.run_backward(self.scopes.root):
                    line = f"sets the gradient of {name} in the backward of an autograd function"
                    raise refusals.refusal("", line, "return the gradient")
                self.recording.checkpoint_parts = name_checkpoint_parts(self.recording)
                return out
        except PlannerError:
            raise
        except Exception as error:
            copied, model = bool(self.foreign.originals), type(self.model).__name__
            explained = explain_error(error, model, self.current, self.facts.largest_unknown, copied=copied)
            raise explained from error
        finally:
            # After a failed pass too: the next one, or the caller, must find inputs and buffers as they were.
            self.writes.undo.restore()
