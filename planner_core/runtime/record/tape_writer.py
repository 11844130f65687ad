"""Write the tape of a pass: what generated code needs beside the operators of the graph.

It listens to the recorder of the capture, which numbers tensors and names call sites, so that each call finds its row in the plan.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.core import CallSite
from planner_core.models.capture import CallKind, FunctionCall, PassListener, Record, Scope, ValueTable, describe
from planner_core.models.hooks import (
    draws_dropout_mask,
    draws_random_numbers,
    recorded_results,
    storage_id,
    tensors,
)
from planner_core.ops import operator, writes_in_place
from planner_core.runtime.mismatch import CannotRewrite
from planner_core.runtime.record.source_names import running_statement
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
    TapeCallKind,
    TapeTensor,
    map_leaves,
)


@dataclass(slots=True)
class _CallPlace:
    """Where a call stands. The module call may get its final name after the call: what a checkpoint runs is named at the end."""

    call: TapeCall
    scope: Scope
    name_then: str
    record: Record | None = None


class TapeWriter(PassListener):
    """Writes the tape of one pass. Tensors have the numbers of the capture."""

    draws_masks = True

    def __init__(self, values: ValueTable) -> None:
        self.values = values
        self.tape = Tape()
        self.origins: dict[int, tuple[str, str]] = {}  # number -> kind and name
        self.varying: set[int] = set()
        self._shared: set[int] = set()  # memory that several inputs share
        self._of_buffers: set[int] = set()  # constants that are made of buffers
        self._literals: dict[int, torch.Tensor] = {}  # number -> a tensor that the model's code holds
        self._places: list[_CallPlace] = []
        self._place: _CallPlace  # of the call that runs now: no call of torch runs within another one
        recording = values.recording
        for name, number in recording.params.items():
            self.origins.setdefault(number, (PARAMETER, name))
        for name, number in recording.buffers.items():
            self.origins[number] = BUFFER, name

    # --- arguments and result -------------------------------------------------------------------------

    def add_arguments(self, positional: list[str], args: Any, kwargs: Any) -> None:
        """Number the inputs by their names and paths. `positional`: the names of the model's positional parameters.

        To be called before the pass, which would number them without paths.
        """
        leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
        storages = {id(x): storage_id(x) for _, x in leaves if isinstance(x, torch.Tensor) and not x.is_meta}
        self._shared = {storage for storage, number in Counter(storages.values()).items() if number > 1}
        template_leaves = [
            self._number_input(path, x, positional) if isinstance(x, torch.Tensor) else x for path, x in leaves
        ]
        self.tape.arguments = pytree.tree_unflatten(template_leaves, spec)

    def _number_input(self, path: Any, x: torch.Tensor, positional: list[str]) -> Ref:
        """Number a tensor of the call, at `path` in its arguments and named arguments."""
        side, key, *rest = path
        number = self.values.find(x)
        if number is None:
            position = getattr(key, "idx", 0)
            named = positional[position] if position < len(positional) else f"input_{position}"
            first = named if side.idx == 0 else str(key.key)
            number = self.values.add(x, "constant", first)
            self.origins[number] = INPUT, first + pytree.keystr(tuple(rest))
            self.varying.add(number)
            self.tape.fed.add(number)
        return Ref(number)

    def finish(self, out: Any) -> Tape:
        """Return the tape of the pass, which returned `out`."""
        for place in self._places:
            call, scope = place.call, place.scope.scope
            if scope != place.name_then:
                call.scope, call.site = scope, place.record.site if place.record else str(CallSite(scope, call.fn))
        self.tape.result = self._result_template(out)
        self.tape.values = self.values.recording.values
        self.tape.tensors = [self._tape_tensor(number) for number in range(len(self.tape.values))]
        return self.tape

    def _result_template(self, out: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return Ref(self._number_operand(item))
            if item is None or isinstance(item, (bool, int, float, str)):
                return item
            raise CannotRewrite(
                f"forward returns a {type(item).__name__}, in which tensors cannot be found; return tensors, tuples or dicts of them"
            )

        return pytree.tree_map(leaf, out)

    # --- tensors --------------------------------------------------------------------------------------

    def _number_operand(self, tensor: torch.Tensor) -> int:
        """Return the number of an operand. A tensor that no call made and nobody gave is one that the model's code holds."""
        known = self.values.find(tensor)
        number = self.values.number(tensor)
        if known is None and number not in self.origins:
            self.origins[number] = LITERAL, ""
            self._literals[number] = tensor
        return number

    def _tape_tensor(self, number: int) -> TapeTensor:
        value = self.values.recording.values[number]
        kind, name = self.origins.get(number, (COMPUTED if value.kind == "activation" else CONSTANT, ""))
        return TapeTensor(
            kind,
            value.meta.shape,
            getattr(torch, value.meta.dtype),
            name,
            value.grad and kind in (PARAMETER, COMPUTED),
            number in self.varying,
            self.values.recording.storage_root(number),
            self._literals.get(number),
        )

    def _argument_template(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return Ref(self._number_operand(item))
            return DEVICE if isinstance(item, torch.device) else item

        return map_leaves(tree, leaf)

    def has_planned_value(self, constant: torch.Tensor) -> bool:
        """Return whether the constant is not made of buffers: these are on meta when a model is planned."""
        number = self.values.find(constant)
        return number is None or not self._of_buffer(number)

    def _of_buffer(self, number: int) -> bool:
        return number in self._of_buffers or self.origins.get(number, ("",))[0] == BUFFER

    # --- calls ----------------------------------------------------------------------------------------

    def before_call(self, kind: CallKind, call: FunctionCall, scope: Scope) -> None:
        """Note a call with its operands: one in place gives its operand a new number, and the tape must name the old one."""
        fn, args, kwargs = call.name, call.args, call.kwargs
        answer = None
        if kind == "constant":
            if writes_in_place(fn) and call.operands and storage_id(call.operands[0]) in self._shared:
                line = running_statement()[0].rpartition("/")[2]
                raise CannotRewrite(
                    f"forward writes in place into an input that shares its memory with another one at {line}; give it a copy"
                )
            answer = "random" if draws_random_numbers(fn) or draws_dropout_mask(fn, args, kwargs) else None
        self._place = self._note_call(kind, call, scope, answer)

    def _note_call(self, kind: TapeCallKind, call: FunctionCall, scope: Scope, answer: Any) -> _CallPlace:
        """Note a call with its operands, and where it stands."""
        line, names = running_statement()
        inputs = tuple(self._number_operand(t) for t in call.operands)
        reads_storage = call.name == "as_strided" and not call.operands[0].is_contiguous()
        noted = TapeCall(
            kind,
            call.name,
            call.func,
            self._argument_template(call.args),
            self._argument_template(dict(call.kwargs)),
            inputs,
            scope=call.module,
            names=names,
            line=line,
            stops=not torch.is_grad_enabled(),
            strides=tuple(call.operands[0].stride()) if reads_storage else (),
            answer=answer,
        )
        place = _CallPlace(noted, scope, scope.scope)
        self._places.append(place)
        return place

    def _close_call(self, call: TapeCall, results: list[torch.Tensor], out: Any) -> None:
        """Note the tensors that a call made, and their places in what it returned."""
        call.outputs = tuple(map(self.values.number, results))
        call.shape = map_leaves(out, lambda t: Ref(self.values.number(t)) if isinstance(t, torch.Tensor) else t)
        self.tape.calls.append(call)

    def after_constant(self, call: FunctionCall, out: Any) -> None:
        """Number what the call made."""
        noted, operands = self._place.call, call.operands
        if writes_in_place(call.name) and operands:
            number = self.values.add_version(operands[0])
            if self.values.is_buffer(operands[0]):
                self.tape.buffer_versions.add(number)
            self.varying.add(number)
            self.tape.fed.update({number} if self.tape.fed & {*noted.inputs} else ())
            self._close_call(noted, [operands[0]], operands[0])
            return
        fresh = [t for t in tensors(out) if not any(t is o for o in operands)]
        if not fresh:
            return
        picks = noted.inputs[1:]  # those of indices that are made of nothing (0, 1, 2, ...) are this rank's own
        if operator(call.name).is_known and (
            call.name != "getitem" or not picks or any(i in self.varying for i in picks)
        ):
            noted.attrs = describe(call.name, call.func, call.args, dict(call.kwargs), fresh)
        for tensor in fresh:
            self._add_constant(tensor, noted.inputs, noted.answer == "random")
        self._close_call(noted, fresh, out)

    def _add_constant(self, tensor: torch.Tensor, inputs: tuple[int, ...], chance: bool) -> None:
        number = self.values.number(tensor)
        self.origins[number] = CONSTANT, ""
        if chance or any(i in self.varying for i in inputs):
            self.varying.add(number)
        if any(map(self._of_buffer, inputs)):
            self._of_buffers.add(number)
        if chance or any(i in self.tape.fed for i in inputs):
            self.tape.fed.add(number)
        elif not tensor.is_meta:
            self.tape.fixed_values[number] = tensor

    def after_operator(self, call: FunctionCall, record: Record, out: Any) -> None:
        """Take the numbers of the results, and what the plan's row is found by, from the graph's record."""
        noted = self._place.call
        self._place.record = record
        noted.site, noted.outputs, noted.saved, noted.attrs = record.site, record.outputs, record.saved, record.attrs
        results = recorded_results(call.name, call.args, out)
        names = {id(t): n for t, n in zip(results, record.outputs, strict=False)}
        noted.shape = map_leaves(
            out, lambda t: Ref(names.get(id(t), record.outputs[0])) if isinstance(t, torch.Tensor) else t
        )
        self.tape.calls.append(noted)

    def after_dropout(self, call: FunctionCall, number: int) -> None:
        """Note a mask. Its site has no count: the capture takes dropout for the identity, so no row of the plan has its name."""
        noted = self._place.call
        noted.fn, noted.site = call.name.rstrip("_"), str(CallSite(call.module, call.name))
        noted.outputs, noted.shape = (number,), Ref(number)
        self.tape.calls.append(noted)

    def after_question(self, call: FunctionCall, scope: Scope, answer: Any) -> None:
        """Note a question about a constant, which a run asks too: another answer needs another program."""
        inputs = [self._number_operand(t) for t in call.operands if not self.values.is_tracked(t)]
        # A constant that is made of nothing that varies gives the same answer in every pass, so no code has to ask again.
        if any(i in self.varying for i in inputs):
            self.tape.calls.append(self._note_call("guard", call, scope, answer).call)
