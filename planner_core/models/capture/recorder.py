"""Record a forward pass: a TorchFunctionMode that numbers values and records every call on tracked tensors.

*Tracked* tensors are the parameters and what is computed from them. Autograd is on, so `saved_tensors_hooks` says exactly which
tensors each call keeps for backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner_core.core import Attr, PlannerError, TensorMeta, Value
from planner_core.models.capture.attributes import describe
from planner_core.models.capture.checkpoints import checkpoint_scope, name_checkpoint_parts
from planner_core.models.capture.checks import refusals
from planner_core.models.capture.checks.explain import CurrentCall, explain_error
from planner_core.models.capture.checks.input_sizes import InputSizes
from planner_core.models.capture.checks.writes import (
    OUTLIVES_STEP,
    InplaceWrites,
    RunningStatistics,
    WriteUndo,
    storage_id,
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
from planner_core.models.capture.fused_kernels import OpaqueFunctions, attend_on_meta, saved_by_kernel
from planner_core.models.capture.recording import BUFFER, Record, Recording, Scope
from planner_core.models.capture.replay import Replayer
from planner_core.models.hooks import AssumeFinite, meta_kernels, normalize_call, rewrite_call  # noqa: F401 - registers
from planner_core.models.hooks import callsites as sites
from planner_core.models.hooks import chance as chances
from planner_core.models.hooks.input_values import InputValues, describe_arguments
from planner_core.models.hooks.model_parts import list_buffers, list_parameters


class Recorder(TorchFunctionMode):
    """Record the calls of one forward pass.

    Args:
        model: The model, on meta.
        replay: Whether to replay repeated module calls and not trace them.
        originals: Names, by storage, of tensors of which `model` has copies.
        leftovers: Names, by storage, of tensors that an earlier pass computed and the model still holds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replay: bool = True,
        originals: Mapping[int, str] | None = None,
        leftovers: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self.originals, self.leftovers = originals or {}, leftovers or {}
        self.inputs = InputValues()
        self.sizes = InputSizes(self.inputs, self._redispatch)
        self.transcript: list[
            Any
        ] = []  # calls with their literal arguments: equal in two passes of a model without state
        self.read_constants: set[int] = set()  # storages of constants that operators have read
        self.recording = Recording([], {}, Scope("", "", type(model).__name__), {}, {})
        self.ids: dict[int, int] = {}  # id(tensor) -> value, for tensors that are kept alive
        self.keep_alive: list[torch.Tensor] = []
        self.storages: list[torch.UntypedStorage] = []
        self.tracked: set[int] = set()  # id(tensor) of parameters and of tensors computed from them
        self.first_in_storage: dict[int, int] = {}  # storage -> first value in it
        self.constant_births: dict[
            int, tuple[weakref.ref[torch.Tensor], int]
        ] = {}  # id(tensor) of a constant -> its creation time
        self.random_constants: dict[
            int, tuple[weakref.ref[torch.Tensor], str]
        ] = {}  # id(tensor) of a random constant -> the function that drew it
        self.drew_outside, self.clock = False, 0
        self.scope_stack: list[Scope] = []
        self.packed_tensors: list[torch.Tensor] = []
        self.writes, self.undo, self.statistics = InplaceWrites(), WriteUndo(), RunningStatistics()
        self.computed_at: dict[int, int] = {}  # id(tensor) of a computed tensor -> its creation time
        self.input_values: set[int] = set()  # values that are inputs of the model
        self.largest_unknown = 0  # elements of the largest constant that was not computed
        self.constant_bytes = 0  # of tensors without values that were computed from the inputs alone
        self.finite_questions: list[str] = []  # lines that ask whether computed numbers are finite
        self.assume_finite = AssumeFinite(
            lambda t: id(t) in self.tracked,
            self._redispatch,
            lambda: self.finite_questions.append(refusals.model_line()),
        )
        self.model = model
        self.replayer = Replayer(self, model) if replay else None
        self.scopes = sites.Scopes(
            model, self._call_module, lambda: checkpoint_scope(self.scopes.frame, self.scope_stack, self.clock)
        )
        self.scopes.make_refusal = lambda *reason: refusals.refusal(self.scopes.frame.scope, *reason)
        self.opaque_functions, self.current = OpaqueFunctions(), CurrentCall()
        self._number_parameters(model)

    def _number_parameters(self, model: nn.Module) -> None:
        for name, param in list_parameters(model):
            self.recording.params[name] = self._add_value(param, "parameter", name)
            self.tracked.add(id(param))
        for name, buffer in list_buffers(model):
            if (
                id(buffer) not in self.ids and buffer.layout == torch.strided
            ):  # another layout is refused at its first use
                self.recording.buffers[BUFFER + name] = self._add_value(buffer, "constant", BUFFER + name)
        aliases = model.named_parameters(remove_duplicate=False)
        self.recording.params.update({n: self.ids[id(p)] for n, p in aliases if n not in self.recording.params})
        self.buffers = frozenset(self.recording.buffers.values())

    # --- values ---------------------------------------------------------------------------------------

    def _add_value(
        self, tensor: torch.Tensor, kind: str, name: str = "", birth: int = -1, *, computed: bool = False
    ) -> int:
        key = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
        meta = TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        root = self.first_in_storage.get(key, -1)
        if root < 0 and tensor.layout == torch.strided:
            # A module that converts its weights frees the old ones. Keep the storage, so that its address is not reused.
            self.storages.append(tensor.untyped_storage())
        grad, new = tensor.requires_grad and kind != "constant", root < 0
        vid = self.recording.add(Value(meta, kind, name, root, grad, computed=computed and new), birth)
        self.first_in_storage.setdefault(key, vid)
        self.ids[id(tensor)] = vid
        self.keep_alive.append(tensor)
        return vid

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the value of an operand. A constant gets its number at its first use."""
        vid = self.ids.get(id(tensor))
        if vid is not None:
            return vid
        # Masks, positions and labels may have values here, or not where a child process captures: they never count. Real numbers that
        # have no values depend on real inputs, such as frames.
        computed = tensor.is_meta and tensor.is_floating_point() and self.inputs.include(tensor)
        return self._add_value(tensor, "constant", birth=self.birth_of(tensor), computed=computed)

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a whole buffer of the model, possibly written since, and not a view of one."""
        number = self.ids.get(id(tensor), -1)
        return number >= 0 and self.recording.values[number].name.startswith(BUFFER)

    def birth_of(self, tensor: torch.Tensor) -> int:
        """Return the creation time of a constant; -1 if it is older than this run. The weak reference detects a reused id."""
        made, when = self.constant_births.get(id(tensor), (None, -1))
        return when if made is not None and made() is tensor else -1

    def random_source(self, tensor: torch.Tensor) -> str | None:
        """Return the function that drew a random constant, "" for a constant computed from one, None for any other tensor."""
        made, fn = self.random_constants.get(id(tensor), (None, ""))
        return fn if made is not None and made() is tensor else None

    def add_activation(self, tensor: torch.Tensor) -> int:
        """Add the value of a tensor that was computed from tracked tensors."""
        self.tracked.add(id(tensor))
        self.clock += 1
        self.computed_at[id(tensor)] = self.clock
        return self._add_value(tensor, "activation")

    # --- calls --------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # The order matters. A question about finiteness is answered before anything is recorded of it. Other forms of a call come back
        # here, so what follows sees them alone. A view that was written is put back (`setitem`) before the read of its whole is checked.
        if (answer := self.assume_finite.answer_call(func, args, kwargs)) is not NotImplemented:
            return answer
        args, kwargs = self.assume_finite.resolve_arguments(args, kwargs)
        others = rewrite_call(
            lambda f, *given: self.__torch_function__(f, types, *given),
            func,
            args,
            kwargs,
            self._has_known_values,
            self._is_stored,
        )
        if others is not NotImplemented:
            return others
        func, args, kwargs = normalize_call(func, args, kwargs)
        operands = sites.tensors((args, kwargs))
        fn = sites.canonical_name(func, kwargs)
        tracked = any(id(t) in self.tracked for t in operands)
        if fn is None:
            refusals.check_setting(self.scopes.frame.scope, func, args, kwargs)
            refusals.check_arrays(self.scopes.frame.scope, func, any(map(self.inputs.include, operands)))
        if fn is None and not tracked:
            self._check_chance(func, fn, args, operands)
            return func(*args, **kwargs)
        for whole, index, part in sites.pop_written_views(fn or "", args, operands):
            self.__torch_function__(torch.Tensor.__setitem__, types, (whole, index, part))
        self._check_call(func, fn, args, operands, tracked)
        if fn is None:
            return func(*args, **kwargs)
        refusals.check_arguments(self.scopes.frame.scope, fn, args, kwargs)
        if (made := self.sizes.check_call(self.scopes.frame.scope, fn, args, kwargs)) is not NotImplemented:
            return made
        self.transcript.append((fn, describe_arguments(args), describe_arguments(kwargs)))
        run = self._record_call if tracked else self._run_constant
        return run(fn, func, args, kwargs, operands)

    def _redispatch(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call that replaces one in the model's code."""
        return self.__torch_function__(func, (), args, kwargs)

    def _has_known_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has values that do not depend on the inputs."""
        return not tensor.is_meta and id(tensor) not in self.tracked and not self.inputs.include(tensor)

    def _is_stored(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a constant, possibly written since, and neither a weight nor computed."""
        number = self.ids.get(id(tensor), -1)
        return number < 0 or self.recording.values[self.recording.storage_root(number)].kind == "constant"

    def _check_call(
        self,
        func: Callable[..., Any],
        fn: str | None,
        args: tuple[Any, ...],
        operands: list[torch.Tensor],
        tracked: bool,
    ) -> None:
        """Refuse a call that the graph would miss, or hold wrongly."""
        scope = self.scopes.frame.scope
        for tensor in operands:
            # A part that the first pass makes (BigBird's other attention) draws first values, which the weights it is given replace.
            draws_first_values = getattr(func, "__module__", "") == "torch.nn.init"
            if id(tensor) not in self.ids and self.birth_of(tensor) < 0 and not draws_first_values:
                refusals.check_origin(scope, tensor, self.originals, self.leftovers)
            self.writes.check(scope, fn or "", args, tensor, self.computed_at.get(id(tensor), self.birth_of(tensor)))
        buffers = [t for t in operands if self.ids.get(id(t)) in self.buffers]
        self.statistics.check(scope, fn or "", args, buffers)
        self._check_chance(func, fn, args, operands)
        if tracked:
            refusals.check_call(scope, func, fn, operands)
            if self.replayer:
                refusals.check_length(scope, len(self.scope_stack[-1].items))

    def _check_chance(
        self, func: Callable[..., Any], fn: str | None, args: tuple[Any, ...], operands: list[torch.Tensor]
    ) -> None:
        if self.random_constants:
            refusals.check_chance(
                self.scopes.frame.scope, func, fn, args, [t for t in operands if self.random_source(t) is not None]
            )

    def _run_constant(
        self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]
    ) -> Any:
        if sites.is_inplace(fn) and operands:
            refusals.check_constant_write(
                self.scopes.frame.scope,
                fn,
                storage_id(operands[0]) in self.read_constants and not self.is_buffer(operands[0]),
            )
            self.undo.save(operands[0])
            if self.replayer:
                self.replayer.note_write(operands[0], self.birth_of(operands[0]))
        drew = chances.draws_random_numbers(fn)
        origins = [by for t in operands if (by := self.random_source(t)) is not None]
        chance = drew or (bool(origins) and not ("rand" in origins and refusals.has_one_answer(fn, args)))
        out = run_constant(func, args, kwargs, operands)
        if any(self.inputs.include(t) for t in operands):
            self.inputs.add(sites.tensors(out))
        self.undo.note_results(sites.tensors(out), operands)
        shared = {storage_id(t) for t in operands}
        for made in sites.tensors(out):
            if made.is_meta and storage_id(made) not in shared and self.inputs.include(made):
                self.constant_bytes += made.nbytes
            if chance:
                self.random_constants[id(made)] = weakref.ref(made), fn if drew else ""
            if made.is_meta and not any(t.is_meta for t in operands) and made.numel() > MAX_COMPUTED_ELEMENTS:
                self.largest_unknown = max(self.largest_unknown, made.numel())
            if not any(made is t for t in operands):
                self.clock += 1
                self.constant_births[id(made)] = (weakref.ref(made), self.clock)
        return out

    def _record_call(
        self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]
    ) -> Any:
        refusals.check_lookup(self.scopes.frame.scope, fn, args, kwargs)
        # Numbered before the call: one in place binds its target to a new value (`_rebind`), and the record must read the old one.
        inputs, self.packed_tensors = tuple(self.value_of(t) for t in operands), []
        self.read_constants.update(storage_id(t) for t in operands if id(t) not in self.tracked)
        if fn in TAKES_SIZES and len(operands) > 1:
            args, kwargs = with_sizes(args, kwargs)
            operands = sites.tensors((args, kwargs))
        # No mask: a plan takes dropout for the identity, and a run draws masks itself.
        if fn in chances.DROPOUTS and "p" in kwargs:
            kwargs = {**kwargs, "p": 0.0}
        written = sites.is_inplace(fn)
        if written and not args[0].is_meta and self.writes.meta_form(args[0]) is None:
            self.writes.add_meta_form(args[0])
        moved, moved_kw = self._on_meta(args, kwargs, operands)
        as_given = moved
        if fn == "getitem":
            moved = with_picked_indices(args, moved)
        if fn == "to" or "device" in moved_kw:
            moved, moved_kw = stay_on_meta(moved), stay_on_meta(moved_kw)
        out = self._run_on_meta(fn, func, moved, moved_kw)
        # Taken here, since what the recorder itself calls below (`view_as`) may make autograd pack more.
        packed, self.packed_tensors = [*self.packed_tensors, *saved_by_kernel(fn, moved)], []
        if fn == "contiguous" and out is moved[0]:
            out = out.view_as(out)  # it returned its operand: make a tensor that can be a value of its own
        results = self._results(fn, moved, out)
        if not results:
            return out
        attrs = describe(fn, func, as_given, moved_kw, results)
        self.opaque_functions.note_call(
            sites.tensors((moved, moved_kw)), results, attrs, own=hasattr(func, sites.OPAQUE_CALL)
        )
        if written:
            attrs.update(self._new_version_attrs(args[0], results[0], inputs[0]))
        outputs = tuple(self.add_activation(t) for t in results)
        if written:
            self._rebind(args[0], outputs[0])
        # After the results have their numbers: softmax and many others save what they return.
        saved, extra = self.recording.match_saved(packed, self.first_in_storage, (*inputs, *outputs))
        frame = self.scopes.frame
        record = Record(self.scopes.site(fn), fn, inputs, outputs, attrs, type(frame.module).__name__, saved, extra)
        self.scope_stack[-1].items.append(record)
        sites.note_view(fn, args, out)
        # A constant with values was written through its form on meta. The model's code goes on with its own tensor.
        return args[0] if written and not args[0].is_meta else out

    def _run_on_meta(self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call on meta."""
        self.current.fn, self.current.args, self.current.part = fn, args, None
        if not hasattr(func, sites.OPAQUE_CALL):
            return (attend_on_meta if fn == "scaled_dot_product_attention" else func)(*args, **kwargs)
        given = [(t, t._version) for t in sites.tensors((args, kwargs))]
        out = func(*args, **kwargs)
        for scratch in self.writes.scratch_arguments(self.scopes.frame.scope, fn, given, sites.tensors(out)):
            self.clock += 1
            self.writes.note_write(scratch, self.clock)
        return out

    def _results(self, fn: str, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
        """Return the tensors that a call computed.

        A cast without effect computes none. It would in a run with another dtype, so it counts in the names of call sites.
        """
        made = sites.recorded_results(fn, args, out)
        if not made and fn == "to":
            self.scopes.site(fn)
        return made

    def _on_meta(self, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """Replace every constant with values by its form on meta."""
        if all(t.is_meta for t in operands):
            return args, kwargs
        moved, moved_kw = to_meta(args, self.writes.meta_form), to_meta(kwargs, self.writes.meta_form)
        for old, new in zip(operands, sites.tensors((moved, moved_kw)), strict=True):
            if new is not old:
                # The form on meta has a storage of its own. If autograd saves it, the saved tensor must still be matched with the constant.
                self.first_in_storage[new.untyped_storage()._cdata] = self.recording.values[self.ids[id(old)]].storage
                self.keep_alive.append(new)
        return moved, moved_kw

    def _new_version_attrs(self, target: torch.Tensor, written: torch.Tensor, vid: int) -> dict[str, Attr]:
        """Check a write in place into the value `vid`, and return the attributes that its op needs."""
        scope, values = self.scopes.frame.scope, self.recording.values
        root = self.recording.storage_root(vid)
        outlives = values[root].kind == "constant" and self.recording.birth_times[root] < 0
        refusals.check_target(
            scope, values[root], outlives and not values[root].name.startswith(BUFFER), root in self.input_values
        )
        if self.replayer:
            self.replayer.note_write(target, vid if values[vid].kind == "activation" else -1, computed=True)
        if not outlives:
            return {}
        if written.requires_grad:
            raise refusals.gradient_write_refusal(
                scope, self.scopes.root, values[root].name.removeprefix(BUFFER), target
            )
        return {OUTLIVES_STEP: True}

    def _rebind(self, target: torch.Tensor, version: int) -> None:
        """Let `target` stand for its new version."""
        self.clock += 1
        self.ids[id(target)] = version
        self.tracked.add(id(target))
        self.keep_alive.append(target)
        self.computed_at[id(target)] = self.clock
        self.writes.note_write(target, self.clock)
        sites.note_write(target)

    def _note_packed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed_tensors.append(tensor)
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
        if not self.scope_stack or frame.module is None:
            scope = self.recording.root
        else:
            scope = Scope(frame.scope, frame.path, type(frame.module).__name__, start=self.clock)
            self.scope_stack[-1].items.append(scope)
        self.scope_stack.append(scope)
        try:
            return call(*args, **kwargs)
        except Exception:
            self.current.part = frame.scope if self.current.part is None else self.current.part
            raise
        finally:
            self.scope_stack.pop()

    def run(self, inputs: dict[str, Any], after: Callable[[Any], Any] | None = None, args: tuple[Any, ...] = ()) -> Any:
        """Run and record one forward pass. `after(result)`, e.g. a stand-in loss, is recorded in scope "loss"."""
        recorder = weakref.proxy(self)  # autograd's graph keeps the hooks alive, and would keep the whole recording
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: recorder._note_packed(t), lambda t: t)
        for name, tree in (*inputs.items(), *(("", a) for a in args)):
            self.inputs.add(sites.tensors(tree))
            for tensor in sites.tensors(tree):
                if id(tensor) not in self.ids:
                    self.input_values.add(self._add_value(tensor, "constant", name))
        guards = self.replayer.watch_attributes() if self.replayer else None
        before = chances.host_state()
        try:
            with self.scopes, refusals.without_autocast(lambda: self.scopes.frame.scope), hooks, torch.enable_grad():
                with self, guards or contextlib.nullcontext():
                    out = self.model(*args, **inputs)
                    if after is not None:
                        out = self._run_after(after, out)
                self.drew_outside = chances.host_state() != before
                if name := self.opaque_functions.run_backward(self.scopes.root):
                    line = f"sets the gradient of {name} in the backward of an autograd function"
                    raise refusals.refusal("", line, "return the gradient")
                self.recording.checkpoint_parts = name_checkpoint_parts(self.recording)
                return out
        except PlannerError:
            raise
        except Exception as error:
            explained = explain_error(
                error, type(self.model).__name__, self.current, self.largest_unknown, copied=bool(self.originals)
            )
            raise explained from error
        finally:
            # After a failed pass too: the next one, or the caller, must find inputs and buffers as they were.
            self.undo.restore()

    def _run_after(self, after: Callable[[Any], Any], out: Any) -> Any:
        self.scope_stack.append(self.recording.root)
        with self.scopes.named("loss"):
            result = after(out)
        self.scope_stack.pop()
        return result
