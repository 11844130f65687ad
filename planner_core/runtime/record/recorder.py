"""Run a model's own forward once, with parameters on meta, and keep every call with its arguments.

The recorder of the capture numbers the values and names the call sites, so that each call finds its row in the plan. This module
adds what the writing of code needs: functions, templates of arguments, the calls that make constants, and active dropout.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import inspect
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError
from planner_core.models.capture import Recorder, describe, memory
from planner_core.models.hooks import (
    DROPOUTS,
    Frame,
    Replacement,
    canonical,
    draws,
    drops,
    host_state,
    is_inplace,
    outputs,
    set_host_state,
    tensors,
)
from planner_core.ops import operator
from planner_core.runtime.plan_reader import PlanMismatch, check_current
from planner_core.runtime.record.results import know
from planner_core.runtime.record.source_names import no_own_collectives, running_statement
from planner_core.runtime.record.tape import (
    BUFFER,
    COMPUTED,
    CONSTANT,
    DEVICE,
    INPUT,
    LITERAL,
    PARAMETER,
    Cache,
    Ref,
    Tape,
    TapeCall,
    Tensor,
    mapped,
)

QUESTIONS = frozenset(
    {"__bool__", "item", "__int__", "__float__", "__index__", "tolist", "equal", "allclose", "is_nonzero"}
)

MERGING = frozenset({"view", "reshape", "flatten", "view_as", "reshape_as", "ravel"})
"""Functions that merge dims."""
AS_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__"})


class CannotRewrite(RuntimeError):
    """This model cannot be rewritten as generated code. The message says why."""


def record(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *,
    twins: Mapping[int, nn.Parameter], other_way: str = "", fewer: bool = False,
) -> Tape:  # fmt: skip
    """The tape of `forward(*args, **kwargs)`, the plain forward of `model`.

    `twins`: a parameter on meta with the global shape, for each parameter of the model (by its id). Constants are computed on
    the CPU. At the line `other_way`, questions with a yes or no get the other answer. `fewer`: masks of the inputs pick one element
    less. Raises CannotRewrite.
    """
    for name, key, value in [(n, k, v) for n, m in model.named_modules() for k, v in vars(m).items()]:
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise CannotRewrite(
                f"it holds an iterator, {f'{name}.{key}'.strip('.')}, of which a recording would take items"
            )
    before = host_state()
    with _swapped(model, twins) as rebound, torch.random.fork_rng(), no_own_collectives():
        tape = TapeRecorder(model, other_way, fewer)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: t if t.is_meta else t.detach().cpu(), (args, dict(kwargs))
        )
        recorded = tape.record(forward, args, dict(kwargs))
    recorded.rebound = rebound
    if tape.drew_from:
        raise CannotRewrite(f"it draws random numbers from {tape.drew_from}, which generated code would not do")
    if host_state() != before:
        set_host_state(before)
        raise CannotRewrite("it draws random numbers from Python or numpy, which ranks would not agree on")
    return recorded


@contextlib.contextmanager
def _swapped(model: nn.Module, twins: Mapping[int, nn.Parameter]) -> Iterator[list[Cache]]:
    """The model with every parameter replaced by its twin, and every buffer by a copy on the CPU that may be written. Afterwards the list
    has the buffers whose names are those of other tensors by then."""
    rebound: list[Cache] = []
    own = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    held = [(m._buffers, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    copies = {id(b): b if b.is_meta else b.detach().cpu().clone() for _, _, b in held}
    try:
        for table, name, param in own:
            table[name] = twins[id(param)]
        Replacement(model, twins)
        for buffers, name, buffer in held:
            buffers[name] = copies[id(buffer)]
        yield rebound
    finally:
        for table, name, param in own:
            table[name] = param
        Replacement(model, {id(twins[id(param)]): param for _, _, param in own})
        for buffers, name, buffer in held:
            if (now := buffers.get(name)) is not copies[id(buffer)]:
                rebound.append((buffers, name, now))
            buffers[name] = buffer


class TapeRecorder(Recorder):
    """Writes the tape of one forward pass. Numbers of tensors are those of the capture."""

    def __init__(self, model: nn.Module, other_way: str = "", fewer: bool = False) -> None:
        super().__init__(model, replay=False, fewer=fewer)
        self.other_way = other_way
        self.tape = Tape()
        self.shared: set[int] = set()  # memory that several inputs share
        self.origins: dict[int, tuple[str, str]] = {}  # number -> kind and name
        self.varying: set[int] = set()
        self.of_buffers: set[int] = set()  # constants that are made of buffers
        self.used: set[int] = set()  # memory of what operators have used
        self.held: dict[int, torch.Tensor] = {}  # number -> a tensor that the model's code holds
        for name, number in self.recording.params.items():
            self.origins.setdefault(number, (PARAMETER, name))
        for name, number in self.recording.buffers.items():
            self.origins[number] = BUFFER, name.partition(":")[2]

    def record(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tape:
        """One forward pass."""
        self.tape.arguments = self._inputs(_positional(forward), args, kwargs)
        self.forward = forward
        try:
            out = self._forward(args, kwargs)
        except CaptureError as error:
            own = error.__cause__  # that of this recorder needs no words around it
            if isinstance(own, PlanMismatch):
                raise own from None
            said = str(error).replace(
                "_Called could not be run on example inputs", "its forward cannot be recorded, perhaps on more samples,"
            )
            raise CannotRewrite(
                str(own) if isinstance(own, CannotRewrite) else said.partition("; if it needs")[0]
            ) from error
        self.tape.result = self._result(out)
        self.tape.values = self.recording.values
        self.tape.picks = next(iter(self.picks.where), "")
        self.tape.tensors = [self._tensor(number) for number in range(len(self.recording.values))]
        others = {
            t.root for n, t in enumerate(self.tape.tensors) if n in self.tape.fed or t.kind in (PARAMETER, BUFFER)
        }
        known = [(t, self.ids[id(t)]) for t in self.keep if id(t) in self.ids]
        self.tape.moving = [t for t, number in known if self.recording.memory(number) in others]
        return self.tape

    def _forward(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """As `run` of the capture, but through the plain forward, since `model.forward` is replaced by now."""
        plain, self.model = self.model, _Called(self.model, self.forward, self)  # type: ignore[assignment]
        try:
            return self.run(kwargs, args=args)
        finally:
            self.model = plain

    def _inputs(self, positional: list[str], args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
        given = {id(x): memory(x) for _, x in leaves if isinstance(x, torch.Tensor) and not x.is_meta}
        self.shared = {at for at, number in Counter(given.values()).items() if number > 1}
        found = [self._input(path, x, positional) if isinstance(x, torch.Tensor) else x for path, x in leaves]
        return pytree.tree_unflatten(found, spec)

    def _input(self, path: Any, x: torch.Tensor, positional: list[str]) -> Ref:
        """A tensor of the call, at `path` in its arguments and named arguments."""
        side, key, *rest = path
        number = self.ids.get(id(x))
        if number is None:
            at = getattr(key, "idx", 0)
            named = positional[at] if at < len(positional) else f"input_{at}"
            first = named if side.idx == 0 else str(key.key)
            number = self._new(x, "constant", first)
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
            raise CannotRewrite(f"it returns a {type(item).__name__}, in which tensors cannot be found")

        return pytree.tree_map(leaf, know(out))

    # --- tensors --------------------------------------------------------------------------------------

    def check_unseen(self, scope: str, tensor: torch.Tensor) -> None:
        """As the capture does; and refuse a weight that a part has taken the place of."""
        check_current((tensor,), f" at {running_statement()[0].rpartition('/')[2]}")
        super().check_unseen(scope, tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of an operand. A tensor that was not seen before is one that the model's code holds."""
        known = self.ids.get(id(tensor))
        number = self.use(tensor)
        if known is None and number not in self.origins:
            self.origins[number] = LITERAL, ""
            self.held[number] = tensor
        return number

    def _tensor(self, number: int) -> Tensor:
        value = self.recording.values[number]
        kind, name = self.origins.get(number, (COMPUTED if value.kind == "activation" else CONSTANT, ""))
        return Tensor(
            kind, value.meta.shape, getattr(torch, value.meta.dtype), name, value.grad and kind in (PARAMETER, COMPUTED),
            number in self.varying, self.recording.memory(number), self.held.get(number),
        )  # fmt: skip

    def _template(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return Ref(self.number(item))
            return DEVICE if isinstance(item, torch.device) else item

        return mapped(tree, leaf)

    # --- calls ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") in AS_ARRAYS and any(
            self.ids.get(id(t)) in self.varying for t in tensors(args)
        ):
            line = running_statement()[0].rpartition("/")[2]
            raise CannotRewrite(f"its code takes the values of its inputs as arrays of numpy at {line}")
        out = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in QUESTIONS and isinstance(out, (bool, int, float, list)):
            self._guard(func, args, kwargs or {}, out)
            if self.other_way and isinstance(out, bool) and running_statement()[0] == self.other_way:
                return not out
        return out

    def _known(self, tensor: torch.Tensor) -> bool:
        """As when the model was planned, where buffers have no values."""
        number = self.ids.get(id(tensor), -1)
        return super()._known(tensor) and not self._of_buffer(number)

    def _of_buffer(self, number: int) -> bool:
        return number in self.of_buffers or self.origins.get(number, ("",))[0] == BUFFER

    def _call_of(
        self, kind: str, fn: str, func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor], **more: Any
    ) -> TapeCall:
        line, names = running_statement()
        inputs = tuple(self.number(t) for t in operands)
        apart = fn == "as_strided" and not operands[0].is_contiguous()
        return TapeCall(
            kind, fn, func, self._template(args), self._template(kwargs), inputs, scope=self.scopes.frame.scope, names=names,
            line=line, stops=not torch.is_grad_enabled(), strides=tuple(operands[0].stride()) if apart else (), **more,
        )  # fmt: skip

    def _close(self, call: TapeCall, made: list[torch.Tensor], out: Any) -> None:
        """Note the tensors that a call made, and their places in what the call returned."""
        call.outputs = tuple(self.ids[id(t)] for t in made)
        call.shape = mapped(out, lambda t: Ref(self.ids[id(t)]) if isinstance(t, torch.Tensor) else t)
        self.tape.calls.append(call)

    def _guard(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The model's code asks for the value of a constant: note the question and its answer."""
        operands = tensors((args, kwargs))
        inputs = [self.number(t) for t in operands if id(t) not in self.tracked]
        if any(i in self.varying for i in inputs):
            self.tape.calls.append(self._call_of("guard", func.__name__, func, args, kwargs, operands, answer=out))

    def _constant(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        if any(_wrapped(t) for t in operands):
            raise CannotRewrite(
                f"{self.scopes.frame.scope or 'it'} makes constants inside a transform of torch.func ({fn})"
            )
        chance = draws(fn) or drops(fn, args, kwargs)
        if is_inplace(fn) and operands and memory(operands[0]) in self.shared:
            raise CannotRewrite("it writes in place into an input that shares its memory with another one")
        call = self._call_of("constant", fn, func, args, kwargs, operands, answer="random" if chance else None)
        if is_inplace(fn) and operands and self.recording.memory(call.inputs[0]) in self.used:
            raise CannotRewrite(
                f"{self.scopes.frame.scope or 'it'} writes in place into a constant that it has used before ({fn}), and generated code "
                "makes constants first"
            )
        out = super()._constant(fn, func, args, kwargs, operands)
        if is_inplace(fn) and operands:
            self.ids[id(operands[0])] = number = self.recording.add(self.recording.values[call.inputs[0]])
            self.varying.add(number)
            self.tape.fed.update({number} if self.tape.fed & {*call.inputs} else ())
            self._close(call, [operands[0]], operands[0])
            return out
        fresh = [t for t in tensors(out) if not any(t is o for o in operands)]
        if fresh:
            picks = call.inputs[1:]  # those of indices that are made of nothing (0, 1, 2, ...) are this rank's own
            if operator(fn).known and (fn != "getitem" or not picks or any(i in self.varying for i in picks)):
                call.attrs = describe(fn, func, args, kwargs, fresh)
            for tensor in fresh:
                self._fresh_constant(tensor, call.inputs, chance)
            self._close(call, fresh, out)
        return out

    def _fresh_constant(self, tensor: torch.Tensor, inputs: tuple[int, ...], chance: bool) -> None:
        number = self.use(tensor)
        self.origins[number] = CONSTANT, ""
        if chance or any(i in self.varying for i in inputs):
            self.varying.add(number)
        if any(map(self._of_buffer, inputs)):
            self.of_buffers.add(number)
        if chance or any(i in self.tape.fed for i in inputs):
            self.tape.fed.add(number)
        elif not tensor.is_meta:
            self.tape.made[number] = tensor

    def _record(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        if fn in DROPOUTS and drops(fn, args, kwargs):
            return self._dropout(fn, func, args, kwargs, operands)
        if draws(fn):
            raise CannotRewrite(
                f"{self.scopes.frame.scope or 'it'} draws random numbers that ranks would not agree on ({fn})"
            )
        if is_inplace(fn) and self.recording.values[self.use(args[0])].kind != "activation":
            raise CannotRewrite(
                f"{self.scopes.frame.scope or 'it'} writes computed values in place into a tensor that it did not compute ({fn})"
            )
        call = self._call_of("op", fn, func, args, kwargs, operands)
        self.used.update(map(self.recording.memory, call.inputs))
        items = self.scope_stack[-1].items
        before = len(items)
        out = super()._record(fn, func, args, kwargs, operands)
        if len(items) > before:
            record: Any = items[-1]
            call.site, call.outputs, call.saved, call.attrs = record.site, record.outputs, record.saved, record.attrs
            made = [args[0]] if is_inplace(fn) else outputs(fn, args, out)
            names = {id(t): n for t, n in zip(made, record.outputs, strict=False)}
            call.shape = mapped(
                out, lambda t: Ref(names.get(id(t), record.outputs[0])) if isinstance(t, torch.Tensor) else t
            )
            self.tape.calls.append(call)
        return out

    def _dropout(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> Any:
        call = self._call_of("dropout", fn.rstrip("_"), func, args, kwargs, operands)
        call.site = f"{self.scopes.frame.scope}/{fn}"
        out = func(*args, **kwargs)
        call.outputs = (self.produce(out),)
        self.tracked.add(id(out))
        call.shape = Ref(call.outputs[0])
        self.tape.calls.append(call)
        return out


class _Called:
    """Takes the place of the model in `Recorder.run`: its plain forward, within the frame of the model."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], recorder: TapeRecorder) -> None:
        self.model, self.forward, self.recorder = model, forward, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = Frame(self.model, "", "")
        self.recorder.scopes.frames.append(frame)
        try:
            return self.recorder.trace(frame, self.forward, args, kwargs)
        finally:
            self.recorder.scopes.frames.pop()


def _positional(forward: Callable[..., Any]) -> list[str]:
    """Names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(forward).parameters.items() if p.kind in kinds]


def _wrapped(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


__all__ = ["QUESTIONS", "CannotRewrite", "TapeRecorder", "canonical", "record"]
