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
from planner_core.models.capture.checkpoints import named_parts, recomputed
from planner_core.models.capture.checks import refusals
from planner_core.models.capture.checks.explain import Running, explain
from planner_core.models.capture.checks.input_sizes import InputSizes
from planner_core.models.capture.checks.writes import KEPT, RunningStatistics, Undo, Writes, memory
from planner_core.models.capture.constants import (
    LIMIT,
    SHAPES,
    run_constant,
    stay_on_meta,
    to_meta,
    with_picks,
    with_sizes,
)
from planner_core.models.capture.fused_kernels import OpaqueFunctions, attention, kept_by_kernel
from planner_core.models.capture.recording import BUFFER, Record, Recording, Scope
from planner_core.models.capture.replay import Replayer
from planner_core.models.hooks import TakenFinite, as_others, meta_kernels, plain_form  # noqa: F401 - registers
from planner_core.models.hooks import callsites as sites
from planner_core.models.hooks import chance as chances
from planner_core.models.hooks.callsites import buffers_of, weights_of
from planner_core.models.hooks.input_values import InputValues, spelled


class Recorder(TorchFunctionMode):
    """Records the calls of one forward pass of `model`; `replay=False` traces every module call. `originals`: the names of tensors of
    which `model` has copies, by storage. `left`: those of tensors that an earlier pass has left."""

    def __init__(
        self,
        model: nn.Module,
        *,
        replay: bool = True,
        originals: Mapping[int, str] | None = None,
        left: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self.originals, self.left = originals or {}, left or {}
        self.inputs = InputValues()
        self.sizes = InputSizes(self.inputs, self._anew)
        self.transcript: list[Any] = []  # calls and their literal arguments, to compare one pass with another
        self.used: set[int] = set()  # memory of constants that operators have read
        self.recording = Recording([], {}, Scope("", "", type(model).__name__), {}, {})
        self.ids: dict[int, int] = {}  # id(tensor) -> value, for tensors that are kept alive
        self.keep: list[torch.Tensor] = []
        self.stores: list[torch.UntypedStorage] = []
        self.tracked: set[int] = set()  # id(tensor) of parameters and what was computed from them
        self.roots: dict[int, int] = {}  # storage -> first value in it
        self.born: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # id(tensor) of a constant -> when it was made
        self.drawn: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # id of a random constant -> what drew it
        self.drew_outside, self.clock = False, 0
        self.scope_stack: list[Scope] = []
        self.packed: list[torch.Tensor] = []
        self.writes, self.undo, self.statistics = Writes(), Undo(), RunningStatistics()
        self.made: dict[int, int] = {}  # id(tensor) of a computed tensor -> when
        self.given: set[int] = set()  # values that are inputs of the model
        self.unknown = 0  # elements of the largest constant that was too large to be computed
        self.taken_finite: list[str] = []  # where the model asks whether computed numbers are finite
        self.finite = TakenFinite(
            lambda t: id(t) in self.tracked,
            self._anew,
            lambda: self.taken_finite.append(refusals.line()),
        )
        self.model = model
        self.replayer = Replayer(self, model) if replay else None
        self.scopes = sites.Scopes(
            model, self._call, lambda: recomputed(self.scopes.frame, self.scope_stack, self.clock)
        )
        self.scopes.refused = lambda *told: refusals.refuse(self.scopes.frame.scope, *told)
        self.opaque, self.running = OpaqueFunctions(), Running()
        self._number(model)

    def _number(self, model: nn.Module) -> None:
        for name, param in weights_of(model):
            self.recording.params[name] = self._new(param, "parameter", name)
            self.tracked.add(id(param))
        for name, buffer in buffers_of(model):
            if id(buffer) not in self.ids and buffer.layout == torch.strided:  # any other is refused where it is used
                self.recording.buffers[BUFFER + name] = self._new(buffer, "constant", BUFFER + name)
        aliases = model.named_parameters(remove_duplicate=False)
        self.recording.params.update({n: self.ids[id(p)] for n, p in aliases if n not in self.recording.params})
        self.buffers = frozenset(self.recording.buffers.values())

    # --- values ---------------------------------------------------------------------------------------

    def _new(self, tensor: torch.Tensor, kind: str, name: str = "", birth: int = -1) -> int:
        key = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
        meta = TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        root = self.roots.get(key, -1)
        if root < 0 and tensor.layout == torch.strided:
            # a module that converts its weights frees the old ones, and their addresses may be used again
            self.stores.append(tensor.untyped_storage())
        vid = self.recording.add(Value(meta, kind, name, root, tensor.requires_grad and kind != "constant"), birth)
        self.roots.setdefault(key, vid)
        self.ids[id(tensor)] = vid
        self.keep.append(tensor)
        return vid

    def use(self, tensor: torch.Tensor) -> int:
        """The value of an operand; a constant gets its number when it is first used."""
        vid = self.ids.get(id(tensor))
        return vid if vid is not None else self._new(tensor, "constant", birth=self.birth(tensor))

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether it is a whole buffer of the model, perhaps with other values by now, and not a view of one."""
        number = self.ids.get(id(tensor), -1)
        return number >= 0 and self.recording.values[number].name.startswith(BUFFER)

    def birth(self, tensor: torch.Tensor) -> int:
        """The time at which a constant was made; -1 if not in this run. An id may belong to another tensor by now: that is checked."""
        made, when = self.born.get(id(tensor), (None, -1))
        return when if made is not None and made() is tensor else -1

    def drawn_by(self, tensor: torch.Tensor) -> str | None:
        """The function that drew a random constant, "" for one that was computed from such; None for any other tensor."""
        made, fn = self.drawn.get(id(tensor), (None, ""))
        return fn if made is not None and made() is tensor else None

    def produce(self, tensor: torch.Tensor) -> int:
        """A new value made from tracked tensors."""
        self.tracked.add(id(tensor))
        self.clock += 1
        self.made[id(tensor)] = self.clock
        return self._new(tensor, "activation")

    # --- calls --------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (answer := self.finite.answer(func, args, kwargs)) is not NotImplemented:
            return answer
        args, kwargs = self.finite.made(args, kwargs)
        others = as_others(
            lambda f, *given: self.__torch_function__(f, types, *given), func, args, kwargs, self._known, self._is_held
        )
        if others is not NotImplemented:
            return others
        func, args, kwargs = plain_form(func, args, kwargs)
        operands = sites.tensors((args, kwargs))
        fn = sites.canonical(func, kwargs)
        tracked = any(id(t) in self.tracked for t in operands)
        if fn is None:
            refusals.check_setting(self.scopes.frame.scope, func, args, kwargs)
            refusals.check_arrays(self.scopes.frame.scope, func, any(map(self.inputs.say, operands)))
        if fn is None and not tracked:
            self._check_chance(func, fn, args, operands)
            return func(*args, **kwargs)
        for whole, index, part in sites.parts_to_put_back(fn or "", args, operands):
            self.__torch_function__(torch.Tensor.__setitem__, types, (whole, index, part))
        self._check(func, fn, args, operands, tracked)
        if fn is None:
            return func(*args, **kwargs)
        refusals.check_arguments(self.scopes.frame.scope, fn, args, kwargs)
        if (made := self.sizes.checked(self.scopes.frame.scope, fn, args, kwargs)) is not NotImplemented:
            return made
        self.transcript.append((fn, spelled(args), spelled(kwargs)))
        run = self._record if tracked else self._constant
        return run(fn, func, args, kwargs, operands)

    def _anew(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call that takes the place of one of the model's code."""
        return self.__torch_function__(func, (), args, kwargs)

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether it has values, and no input says them."""
        return not tensor.is_meta and id(tensor) not in self.tracked and not self.inputs.say(tensor)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        """Whether it is a constant, perhaps with other values by now, and not a weight or a computed tensor."""
        number = self.ids.get(id(tensor), -1)
        return number < 0 or self.recording.values[self.recording.memory(number)].kind == "constant"

    def _check(
        self,
        func: Callable[..., Any],
        fn: str | None,
        args: tuple[Any, ...],
        operands: list[torch.Tensor],
        tracked: bool,
    ) -> None:
        """Refuse a call that would be missing from the graph, or wrong in it."""
        scope = self.scopes.frame.scope
        for tensor in operands:
            if id(tensor) not in self.ids and self.birth(tensor) < 0:
                refusals.check_origin(scope, tensor, self.originals, self.left)
            self.writes.check(scope, fn or "", args, tensor, self.made.get(id(tensor), self.birth(tensor)))
        held = [t for t in operands if self.ids.get(id(t)) in self.buffers]
        self.statistics.check(scope, fn or "", args, held)
        self._check_chance(func, fn, args, operands)
        if tracked:
            refusals.check_call(scope, func, fn, operands)
            if self.replayer:
                refusals.check_length(scope, len(self.scope_stack[-1].items))

    def _check_chance(
        self, func: Callable[..., Any], fn: str | None, args: tuple[Any, ...], operands: list[torch.Tensor]
    ) -> None:
        if self.drawn:
            refusals.check_chance(
                self.scopes.frame.scope, func, fn, args, [t for t in operands if self.drawn_by(t) is not None]
            )

    def _constant(
        self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]
    ) -> Any:
        if sites.is_inplace(fn) and operands:
            refusals.check_used(
                self.scopes.frame.scope, fn, memory(operands[0]) in self.used and not self.is_buffer(operands[0])
            )
            self.undo.before_write(operands[0])
            if self.replayer:
                self.replayer.wrote(operands[0], self.birth(operands[0]))
        drew = chances.draws(fn)
        origins = [by for t in operands if (by := self.drawn_by(t)) is not None]
        chance = drew or (bool(origins) and not ("rand" in origins and refusals.never_or_always(fn, args)))
        out = run_constant(func, args, kwargs, operands)
        if any(self.inputs.say(t) for t in operands):
            self.inputs.follow(sites.tensors(out))
        self.undo.made(sites.tensors(out), operands)
        for made in sites.tensors(out):
            if chance:
                self.drawn[id(made)] = weakref.ref(made), fn if drew else ""
            if made.is_meta and not any(t.is_meta for t in operands) and made.numel() > LIMIT:
                self.unknown = max(self.unknown, made.numel())
            if not any(made is t for t in operands):
                self.clock += 1
                self.born[id(made)] = (weakref.ref(made), self.clock)
        return out

    def _record(
        self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]
    ) -> Any:
        refusals.check_lookup(self.scopes.frame.scope, fn, args, kwargs)
        inputs, self.packed = tuple(self.use(t) for t in operands), []
        self.used.update(memory(t) for t in operands if id(t) not in self.tracked)
        if fn in SHAPES and len(operands) > 1:
            args, kwargs = with_sizes(args, kwargs)
            operands = sites.tensors((args, kwargs))
        if fn in chances.DROPOUTS and "p" in kwargs:
            kwargs = {**kwargs, "p": 0.0}
        written = sites.is_inplace(fn)
        if written and not args[0].is_meta and self.writes.twin(args[0]) is None:
            self.writes.made_twin(args[0])
        moved, moved_kw = self._on_meta(args, kwargs, operands)
        as_given = moved
        if fn == "getitem":
            moved = with_picks(args, moved)
        if fn == "to" or "device" in moved_kw:
            moved, moved_kw = stay_on_meta(moved), stay_on_meta(moved_kw)
        out = self._ran(fn, func, moved, moved_kw)
        packed, self.packed = [*self.packed, *kept_by_kernel(fn, moved)], []
        if fn == "contiguous" and out is moved[0]:
            out = out.view_as(out)  # a value of its own
        results = self._results(fn, moved, out)
        if not results:
            return out
        attrs = describe(fn, func, as_given, moved_kw, results)
        self.opaque.ran(sites.tensors((moved, moved_kw)), results, attrs, own=hasattr(func, sites.OWN))
        if written:
            attrs.update(self._version(args[0], results[0], inputs[0]))
        outputs = tuple(self.produce(t) for t in results)
        if written:
            self._rename(args[0], outputs[0])
        saved, extra = self.recording.saved(packed, self.roots, (*inputs, *outputs))
        frame = self.scopes.frame
        record = Record(self.scopes.site(fn), fn, inputs, outputs, attrs, type(frame.module).__name__, saved, extra)
        self.scope_stack[-1].items.append(record)
        sites.took_part(fn, args, out)
        return args[0] if written and not args[0].is_meta else out

    def _ran(self, fn: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call on meta."""
        self.running.fn, self.running.args, self.running.part = fn, args, None
        if not hasattr(func, sites.OWN):
            return (attention if fn == "scaled_dot_product_attention" else func)(*args, **kwargs)
        given = [(t, t._version) for t in sites.tensors((args, kwargs))]
        out = func(*args, **kwargs)
        for scratch in self.writes.scratch(self.scopes.frame.scope, fn, given, sites.tensors(out)):
            self.clock += 1
            self.writes.wrote(scratch, self.clock)
        return out

    def _results(self, fn: str, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
        """The tensors that a call made. A cast without effect made none, but has one in another dtype, so it counts in the names."""
        made = sites.outputs(fn, args, out)
        if not made and fn == "to":
            self.scopes.site(fn)
        return made

    def _on_meta(self, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with every constant that has values replaced by its form on meta."""
        if all(t.is_meta for t in operands):
            return args, kwargs
        moved, moved_kw = to_meta(args, self.writes.twin), to_meta(kwargs, self.writes.twin)
        for old, new in zip(operands, sites.tensors((moved, moved_kw)), strict=True):
            if new is not old:
                self.roots[new.untyped_storage()._cdata] = self.recording.values[self.ids[id(old)]].storage
                self.keep.append(new)
        return moved, moved_kw

    def _version(self, target: torch.Tensor, written: torch.Tensor, vid: int) -> dict[str, Attr]:
        """Check a write in place of the value `vid`; the attributes that it needs."""
        scope, values = self.scopes.frame.scope, self.recording.values
        root = self.recording.memory(vid)
        outlives = values[root].kind == "constant" and self.recording.births[root] < 0
        refusals.check_target(
            scope, values[root], outlives and not values[root].name.startswith(BUFFER), root in self.given
        )
        if self.replayer:
            self.replayer.wrote(target, vid if values[vid].kind == "activation" else -1, computed=True)
        if not outlives:
            return {}
        if written.requires_grad:
            raise refusals.attached(scope, self.scopes.root, values[root].name.removeprefix(BUFFER), target)
        return {KEPT: True}

    def _rename(self, target: torch.Tensor, version: int) -> None:
        """From now on, `target` means its new version."""
        self.clock += 1
        self.ids[id(target)] = version
        self.tracked.add(id(target))
        self.keep.append(target)
        self.made[id(target)] = self.clock
        self.writes.wrote(target, self.clock)
        sites.wrote_part(target)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor)
        return tensor

    # --- modules ------------------------------------------------------------------------------------

    def _call(self, frame: sites.Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replayer is None:
            return self.trace(frame, call, args, kwargs)
        return self.replayer.call(frame, call, args, kwargs)

    def trace(self, frame: sites.Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one module call, recording it as a scope of its own."""
        if not self.scope_stack or frame.module is None:
            scope = self.recording.root
        else:
            scope = Scope(frame.scope, frame.path, type(frame.module).__name__, start=self.clock)
            self.scope_stack[-1].items.append(scope)
        self.scope_stack.append(scope)
        try:
            return call(*args, **kwargs)
        except Exception:
            self.running.part = frame.scope if self.running.part is None else self.running.part
            raise
        finally:
            self.scope_stack.pop()

    def run(self, inputs: dict[str, Any], after: Callable[[Any], Any] | None = None, args: tuple[Any, ...] = ()) -> Any:
        """One forward pass; `after(result)` (a stand-in loss) is recorded in scope "loss"."""
        own = weakref.proxy(self)  # autograd keeps the hooks, and would keep all that is recorded
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: own._pack(t), lambda t: t)
        for name, tree in (*inputs.items(), *(("", a) for a in args)):
            self.inputs.follow(sites.tensors(tree))
            for tensor in sites.tensors(tree):
                if id(tensor) not in self.ids:
                    self.given.add(self._new(tensor, "constant", name))
        guards = self.replayer.watching() if self.replayer else None
        before = chances.host_state()
        try:
            with self.scopes, refusals.without_autocast(lambda: self.scopes.frame.scope), hooks, torch.enable_grad():
                with self, guards or contextlib.nullcontext():
                    out = self.model(*args, **inputs)
                    if after is not None:
                        out = self._after(after, out)
                self.drew_outside = chances.host_state() != before
                if name := self.opaque.run_backward(self.scopes.root):
                    line = f"sets the gradient of {name} in the backward of an autograd function"
                    raise refusals.refuse("", line, "return the gradient")
                self.recording.parts = named_parts(self.recording)
                return out
        except PlannerError:
            raise
        except Exception as error:
            told = explain(error, type(self.model).__name__, self.running, self.unknown, copied=bool(self.originals))
            raise told from error
        finally:
            self.undo.put_back()

    def _after(self, after: Callable[[Any], Any], out: Any) -> Any:
        self.scope_stack.append(self.recording.root)
        with self.scopes.named("loss"):
            result = after(out)
        self.scope_stack.pop()
        return result
