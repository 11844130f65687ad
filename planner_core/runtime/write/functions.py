"""Write one function for one unit: the model's own operators on local tensors, with the collectives of the plan."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import Edge, Placements, Step, module_path, numbered_names
from planner_core.runtime.program.units import UnitBuffer, UnitUse
from planner_core.runtime.record import DEVICE, TapeCall
from planner_core.runtime.record.tape import BUFFER, COMPUTED, PARAMETER, Ref
from planner_core.runtime.write import operators
from planner_core.runtime.write.expressions import RESERVED, NameScope, to_identifier
from planner_core.runtime.write.moves import MoveTable
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.specs import FunctionSource, PlacedConstant
from planner_core.runtime.write.syntax import (
    assign,
    attribute,
    literal,
    make_call,
    path,
    stored,
    subscript,
    with_block,
)

OuterSteps = tuple[tuple[Step, ...], tuple[Step, ...]]
"""Steps of a weight that are taken outside of the functions: those that gather it and those of its gradient."""
INSIDE: OuterSteps = ((), ())
LONGEST_INLINE = 48
"""An expression of at most this many characters may be written inside another one."""


class FunctionArguments:
    """What the function of a unit takes: values that other units make, constants, buffers, and weights with the steps of each use.

    `outer_steps`: for each parameter and call site that uses it the steps that are taken outside of the function. `recomputed`: whether
    the function runs again in backward.
    """

    def __init__(
        self,
        layout: PlannedTape,
        calls: Sequence[TapeCall],
        prefix: str,
        outer_steps: Mapping[tuple[int, str], OuterSteps],
        *,
        recomputed: bool,
    ) -> None:
        self.layout, self.calls, self.prefix, self.outer_steps = layout, calls, prefix, outer_steps
        self.tape, self.recomputed = layout.tape, recomputed
        saving = (now for now, call in enumerate(calls) if call.saved)
        # The last line that runs again in backward: a block runs again up to the last operator that saves something.
        self.last_recomputed = max(saving, default=-1) if recomputed else -1
        self.saved = {n for c in calls for n in c.saved}
        self.results = {n for c in calls for n in c.outputs}
        self.uses = list_uses(calls)
        self.inputs: list[int] = []
        self.cuts: list[PlacedConstant] = []
        self.weights: dict[tuple[int, int], UnitUse] = {}
        self.buffers: dict[PlacedConstant, UnitBuffer] = {}
        for now, call in enumerate(calls):
            edges = layout.row(call).inputs if call.kind == "op" else [None] * len(call.inputs)
            for number, edge in zip(call.inputs, edges, strict=True):
                self._add_operand(now, number, edge)

    def _add_operand(self, now: int, number: int, edge: Edge | None) -> None:
        kind = self.tape.tensors[number].kind
        if kind == PARAMETER:
            self._add_weight(now, number)
        elif kind != COMPUTED and edge is not None:
            self._add_constant(number, edge)
        elif number not in self.results and number not in self.inputs:
            self.inputs.append(number)

    def weight(self, now: int, number: int) -> UnitUse:
        """Return the use of a parameter by the call on line `now`."""
        return self.weights[self._use_key(now, number)]

    def _use_key(self, now: int, number: int) -> tuple[int, int]:
        # Each call that reads a gathered weight has a gather of its own, and so an argument of its own. Other weights have one in all.
        return number, now if self.outer_steps[number, self.calls[now].site][0] else -1

    def _add_weight(self, now: int, number: int) -> None:
        key = self._use_key(now, number)
        if key not in self.weights:
            gather, reduce = self.outer_steps[number, self.calls[now].site]
            lines = [now] if key[1] == now else self.uses[number]
            users = [self.calls[line] for line in lines]
            live_calls = [call for call in users if any(n in self.layout.with_gradient for n in call.outputs)]
            needed = bool(live_calls) and any(number in call.saved for call in users)
            regather = needed or lines[0] <= self.last_recomputed
            saved = not self.recomputed and any(self._autograd_keeps_view(call, number) for call in users)
            trained = self.tape.tensors[number].grad and any(number in call.gives_gradient() for call in live_calls)
            name = self.layout.parameters[number]
            argument = self._name_argument(name)
            self.weights[key] = UnitUse(argument, name, gather, reduce, regather and not saved, saved, trained)

    def _autograd_keeps_view(self, call: TapeCall, number: int) -> bool:
        """Return whether autograd keeps a view that `call` makes of a gathered parameter."""
        if not self.tape.views(call, number):
            return False
        root = self.tape.tensors[number].root
        views = {n for n in self.results if self.tape.tensors[n].root == root}
        # `mass @ mass.T` keeps both factors, which are one memory, so the view is not named there.
        is_saved = any(number in c.saved and not views.isdisjoint(c.inputs) for c in self.calls)
        return is_saved or not views.isdisjoint(self.saved)

    def _add_constant(self, number: int, edge: Edge) -> None:
        cut = (number, edge.dst.forward)
        if self.tape.tensors[number].kind != BUFFER:
            self.cuts += [cut] * (cut not in self.cuts)
        elif cut not in self.buffers:
            name, cuts = self.tape.tensors[number].name, self.layout.cuts(*cut)
            self.buffers[cut] = UnitBuffer(self._name_argument(name), name, edge.dst.forward, tuple(cuts))

    def _name_argument(self, name: str) -> str:
        """Return the name of a weight or buffer in the function."""
        local = name[len(self.prefix) + 1 :] if self.prefix and name.startswith(self.prefix + ".") else name
        names_taken = {w.argument for w in self.weights.values()} | {b.argument for b in self.buffers.values()}
        short, long = to_identifier("_".join(local.split(".")[-2:])), to_identifier(local.replace(".", "_"))
        wishes = itertools.chain((short, long), numbered_names(short, "_"))
        return next(name for name in wishes if name not in names_taken)


@dataclass
class FunctionWriter:
    """Writes the function of a unit that takes `arguments`. `wanted` are the values that other units use."""

    arguments: FunctionArguments
    moves: MoveTable
    wanted: set[int]
    name_object: Any
    kept_sites: Collection[str] = ()
    """The call sites whose results are kept when it is recomputed."""
    input_names: Sequence[str] = ()
    """The names of the inputs in the other copies."""
    values: dict[int, ast.expr] = field(default_factory=dict)
    seeds: int = 0

    def write(self) -> FunctionSource:
        """Write the function."""
        arguments = self.arguments
        self.layout, self.tape, self.calls, self.uses = (
            arguments.layout,
            arguments.tape,
            arguments.calls,
            arguments.uses,
        )
        self.makers = {n: c for c in self.tape.calls for n in c.outputs}
        self.names = NameScope(RESERVED | self.moves.taken)
        self.body: list[ast.stmt] = []
        self.inlined: dict[int, ast.expr] = {}  # expressions that will be written inside a later one
        self.operands_of_inlined: list[int] = []  # the values that these use
        self._name_arguments()
        stopped: list[bool] = []  # of each line of the body: whether the model's code ran it under torch.no_grad
        for now, call in enumerate(self.calls):
            self._write_call(now, call)
            # A call may write no line (it is inlined) or several (its `del`), so the flags are filled up to the lines that are there.
            stopped += [call.stops] * (len(self.body) - len(stopped))
        outputs = [n for c in self.calls for n in c.outputs if n in self.wanted]
        first = [*(["w"] if arguments.weights or arguments.buffers else []), *(["seed"] if self.seeds else [])]
        return FunctionSource(
            [*first, *self.named_inputs, *self.cut_names],
            wrap_no_grad(self.body, stopped),
            [self.values[n] for n in outputs],
            arguments.inputs,
            self.named_inputs,
            arguments.cuts,
            list(arguments.weights.values()),
            list(arguments.buffers.values()),
            outputs,
            self.seeds,
        )

    # --- names ----------------------------------------------------------------------------------------

    def _last_use(self, number: int, now: int) -> int:
        """Return the last line that uses a value."""
        return 1 << 60 if number in self.wanted else self.uses.get(number, [now])[-1]

    def _name_arguments(self) -> None:
        inputs = self.arguments.inputs
        named = self.input_names if len(self.input_names) == len(inputs) else [self.wanted_name(n) for n in inputs]
        self.named_inputs = [self.names.keep(name) for name in named]
        self.values.update(zip(inputs, map(path, self.named_inputs), strict=True))
        self.cut_names = [self.names.keep(self.wanted_name(n)) for n, _ in self.arguments.cuts]

    def wanted_name(self, number: int) -> str:
        """Return the name for a value: that of the model's statement that assigns it, or of the layer whose weight makes it."""
        maker = self.makers.get(number)
        if maker is None:
            other = "hidden" if number in self.tape.received else "constant"
            return self.tape.tensors[number].name.rpartition(".")[2] or other
        inner = any(self.tape.tensors[n].kind == PARAMETER for n in maker.inputs)
        module = module_path(maker.scope).rpartition(".")[2]
        layer = module if inner and module and not module.isdigit() else maker.fn
        if inner and self._uses_results_of(maker, maker):
            return layer
        if len(maker.names) == len(maker.outputs):
            return maker.names[maker.outputs.index(number)] or maker.fn
        return layer

    def _uses_results_of(self, maker: TapeCall, call: TapeCall) -> bool:
        """Return whether the statement of `maker` uses the results of `call`, at once or through other modules that it calls."""
        siblings = maker.scope.rpartition(".")[0] + "."
        users = [self.calls[line] for n in call.outputs for line in self.uses.get(n, ())]
        return any(
            c.line == maker.line
            or (c.scope.startswith(siblings) and c.scope != maker.scope and self._uses_results_of(maker, c))
            for c in users
        )

    # --- one call -------------------------------------------------------------------------------------

    def _write_call(self, now: int, call: TapeCall) -> None:
        start = len(self.body)
        expression = self._write_dropout(call) if call.kind == "dropout" else self._write_expression(now, call)
        moved = expression if call.kind == "dropout" else self._move_results(call, expression)
        if len(call.outputs) == 1:
            self._assign_result(now, call, moved, plain=moved is expression)
        else:
            self._unpack_results(now, call, expression)
        if self._is_kept_site(call):
            self.body[start:] = [with_block(_keep_results(call), self.body[start:])]
        self._delete_dead(now, call)

    def _is_kept_site(self, call: TapeCall) -> bool:
        return call.kind == "op" and call.site in self.kept_sites

    def _write_expression(self, now: int, call: TapeCall) -> ast.expr:
        row = self.layout.row(call)
        operands = [self._write_operand(now, n, e) for n, e in zip(call.inputs, row.inputs, strict=True)]
        local = operators.LocalCall(
            self.layout,
            call,
            row,
            operands,
            self.moves.axis,
            self._write_leaf,
            self._next_seed,
            self._chunked_product(call),
        )
        expression = operators.write_operator(local)
        if len(call.outputs) == 1 and isinstance(call.shape, (tuple, list)):  # the call also returns what is no tensor
            return subscript(expression, [isinstance(x, Ref) for x in call.shape].index(True))
        return expression

    def _next_seed(self) -> ast.expr:
        """Write the seed of a call that draws random numbers."""
        self.seeds += 1
        return ast.BinOp(path("seed"), ast.Add(), literal(self.seeds))

    def _chunked_product(self, call: TapeCall) -> str:
        """Return the name of the product in chunks that replaces `F.linear`; "" if the call is not chunked."""
        edge = self.layout.row(call).outputs[0]
        if len(call.outputs) != 1 or edge.chunks < 2:
            return ""
        grad = self.tape.tensors[call.outputs[0]].grad
        return self.moves.product(edge.forward, edge.backward if grad else (), edge.chunks)

    def _write_dropout(self, dropout: TapeCall) -> ast.expr:
        x = dropout.inputs[0]
        arguments = dict(zip(("input", "p", "training"), dropout.args, strict=False)) | dropout.kwargs
        split = [path(self.moves.axis(a)) for a in self.layout.axes(self.layout.delivered_placements[x])]
        options: dict[str, Any] = {} if dropout.fn == "dropout" else {"kind": dropout.fn}
        options |= {"split": split} if split else {}
        return make_call("dropout", self._read_value(x), arguments.get("p", 0.5), self._next_seed(), **options)

    def _write_leaf(self, item: Any) -> ast.expr:
        return path("DEVICE" if item is DEVICE else self.name_object(item))

    def _write_operand(self, now: int, number: int, edge: Edge) -> ast.expr:
        """Write an operand with the placements that the operator takes."""
        tensor = self.tape.tensors[number]
        if tensor.kind == PARAMETER:
            use = self.arguments.weight(now, number)
            forward_steps, backward_steps = self.moves.real(edge.forward), self.moves.real(edge.backward)
            forward, backward_steps = (
                forward_steps[len(use.gather) :],
                backward_steps[: len(backward_steps) - len(use.reduce)],
            )
            inner = replace(edge, forward=forward, backward=backward_steps)
            return self._move_operand(now, number, path(f"w.{use.argument}"), inner)
        if tensor.kind == BUFFER:
            part = path(f"w.{self.arguments.buffers[number, edge.dst.forward].argument}")
            return _divide_constant(part, self.layout, self.moves, edge.dst.forward)
        if tensor.kind != COMPUTED:
            return path(self.cut_names[self.arguments.cuts.index((number, edge.dst.forward))])
        return self._move_operand(now, number, self._read_value(number), edge)

    def _move_operand(self, now: int, number: int, value: ast.expr, edge: Edge) -> ast.expr:
        """Write an operand after its move. It is detached where the model's own backward sends no gradient, since autograd
        would send zeros."""
        stopped = number not in self.layout.with_gradient and number not in self.calls[now].gives_gradient()
        backward_steps = edge.backward if self.tape.tensors[number].grad and not stopped else ()
        value = make_call(attribute(value, "detach")) if stopped else value
        return self.moves.apply(value, edge.forward, backward_steps, edge.segments)

    def _read_value(self, number: int) -> ast.expr:
        return self.inlined.pop(number) if number in self.inlined else self.values[number]

    def _move_results(self, call: TapeCall, expression: ast.expr) -> ast.expr:
        if len(call.outputs) != 1:
            return expression
        edge = self.layout.row(call).outputs[0]
        grad = self.tape.tensors[call.outputs[0]].grad
        if edge.chunks > 1:  # the product takes the move itself
            return expression
        return self.moves.apply(expression, edge.forward, edge.backward if grad else (), edge.segments)

    def _assign_result(self, now: int, call: TapeCall, value: ast.expr, *, plain: bool) -> None:
        number = call.outputs[0]
        if plain and self._can_inline(now, call, value):
            self.inlined[number] = value
        elif isinstance(value, ast.Name):  # the same tensor under another name
            self.values[number] = value
            self.names.hold(value.id, self._last_use(number, now))
        else:
            name = self.names.take(self.wanted_name(number), now, self._last_use(number, now))
            self.values[number] = path(name)
            self.body.append(assign(name, value))

    def _can_inline(self, now: int, call: TapeCall, value: ast.expr) -> bool:
        """Return whether an expression may be written inside the next one: that alone uses it, in the same statement."""
        number = call.outputs[0]
        if number in self.wanted or self.uses.get(number) != [now + 1] or len(ast.unparse(value)) > LONGEST_INLINE:
            return False
        following = self.calls[now + 1]
        if self._is_kept_site(call) or self._is_kept_site(following) or call.stops != following.stops:
            return False
        if following.inputs.count(number) != 1 or following.kind != "op" or following.fn in operators.RESHAPES:
            return False
        edge = self.layout.row(following).inputs[following.inputs.index(number)]
        # The model's own statement is the limit: code reads as the model's, and a tensor that is moved between the two keeps its name.
        return following.line == call.line and not edge.forward and not edge.backward

    def _unpack_results(self, now: int, call: TapeCall, value: ast.expr) -> None:
        assert isinstance(call.shape, (tuple, list)), call
        names = {}
        for number in call.outputs:
            # At least to the next line: results of one call need distinct names, even those that nobody reads.
            until = max(now + 1, self._last_use(number, now))
            names[number] = self.names.take(self.wanted_name(number), now, until)
            self.values[number] = path(names[number])
        results = iter(names.values())
        targets = [next(results) if isinstance(x, Ref) else "_" for x in call.shape]
        self.body.append(assign(stored(targets), value))
        for number, edge in zip(call.outputs, self.layout.row(call).outputs, strict=True):
            backward = edge.backward if self.tape.tensors[number].grad else ()
            moved = self.moves.apply(self.values[number], edge.forward, backward, edge.segments)
            if moved is not self.values[number]:
                self.body.append(assign(names[number], moved))

    def _delete_dead(self, now: int, call: TapeCall) -> None:
        """Write `del` for values after their last use, so that their memory is free at once."""
        self.operands_of_inlined += call.inputs
        if now == len(self.calls) - 1 or any(n in self.inlined for n in call.outputs):
            return
        results = {self._name_of_value(n) for n in call.outputs}
        operands = (n for n in self.operands_of_inlined if n in self.arguments.results)
        dead = [name for n in operands if (name := self._name_of_value(n)) and self.names.free_after[name] <= now]
        dead = [name for name in dead if name not in results]
        dead += [
            self._name_of_value(n)
            for n in call.outputs
            if self._name_of_value(n) and n not in self.uses and n not in self.wanted
        ]
        self.operands_of_inlined = []
        if dead:
            self.body.append(ast.Delete([ast.Name(name, ast.Del()) for name in dict.fromkeys(dead)]))

    def _name_of_value(self, number: int) -> str:
        """Return the name of a value, "" if it has none."""
        value = self.values.get(number)
        return value.id if isinstance(value, ast.Name) else ""


def list_uses(calls: Sequence[TapeCall]) -> dict[int, list[int]]:
    """Return the lines, in order, of the calls that take each value."""
    uses: dict[int, list[int]] = {}
    for now, call in enumerate(calls):
        for number in call.inputs:
            uses.setdefault(number, []).append(now)
    return uses


def _keep_results(call: TapeCall) -> ast.expr:
    """Write the context in which the results of a call are kept while the rest is recomputed."""
    return make_call("keep", **({"whole": True} if call.fn == "scaled_dot_product_attention" else {}))


def wrap_no_grad(body: Sequence[ast.stmt], stopped: Sequence[bool]) -> list[ast.stmt]:
    """Return the statements, with those that are `stopped` in blocks of torch.no_grad."""
    lines: list[ast.stmt] = []
    for stops, group in itertools.groupby(zip(body, stopped, strict=True), key=lambda pair: pair[1]):
        block = [statement for statement, _ in group]
        lines += [with_block(make_call("torch.no_grad"), block)] if stops else block
    return lines


def local_constant(
    constant: ast.expr, layout: PlannedTape, moves: MoveTable, number: int, placements: Placements
) -> ast.expr:
    """Write a constant cut to this rank's part."""
    for axis, dim in layout.cuts(number, placements):
        constant = make_call(f"{moves.axis(axis)}.slice", constant, dim)
    return _divide_constant(constant, layout, moves, placements)


def _divide_constant(constant: ast.expr, layout: PlannedTape, moves: MoveTable, placements: Placements) -> ast.expr:
    """Write a constant as this rank's term of a sum."""
    for axis in layout.partial(placements):
        constant = make_call(f"{moves.axis(axis)}.divide", constant)
    return constant
