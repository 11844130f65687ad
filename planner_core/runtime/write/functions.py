"""Write one function for one unit: the model's own operators on local tensors, with the collectives of the plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner_core.core import Edge, Placements, Shard, Step
from planner_core.runtime.record import DEVICE, TapeCall
from planner_core.runtime.record.tape import BUFFER, COMPUTED, PARAMETER, Ref
from planner_core.runtime.write import operators
from planner_core.runtime.write.expressions import RESERVED, NameScope, to_identifier
from planner_core.runtime.write.moves import MoveTable
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.source import normalize, parenthesize
from planner_core.runtime.write.specs import BufferUse, FunctionSource, PlacedConstant, WeightUse

OuterSteps = tuple[tuple[Step, ...], tuple[Step, ...]]
"""Steps of a weight that are taken outside of the functions: those that gather it and those of its gradient."""
INSIDE: OuterSteps = ((), ())
LONGEST_INLINE = 48
"""An expression of at most this many characters may be written inside another one."""


@dataclass
class FunctionWriter:
    """Writes the calls of one unit. `wanted` are the values that other units use."""

    layout: PlannedTape
    moves: MoveTable
    calls: Sequence[TapeCall]
    prefix: str
    wanted: set[int]
    name_object: Any
    outer_steps: Mapping[tuple[int, str], OuterSteps]
    """For each parameter and call site that uses it: the steps that are taken outside of the function."""
    recomputed: bool = False
    """Whether the function runs again in backward."""
    kept: Collection[str] = ()
    """The call sites whose results are kept when it is recomputed."""
    input_names: Sequence[str] = ()
    """The names of the inputs in the other copies."""
    inputs: list[int] = field(default_factory=list)
    cuts: list[PlacedConstant] = field(default_factory=list)
    weights: dict[tuple[int, int], WeightUse] = field(default_factory=dict)
    buffers: dict[PlacedConstant, BufferUse] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    seeds: int = 0

    def write(self) -> FunctionSource:
        """Write the function."""
        self.tape = self.layout.tape
        self.made = {n for c in self.calls for n in c.outputs}
        self.saved = {n for c in self.calls for n in c.saved}
        self.makers = {n: c for c in self.tape.calls for n in c.outputs}
        saving = (now for now, call in enumerate(self.calls) if call.saved)
        self.last_recomputed = (
            max(saving, default=-1) if self.recomputed else -1
        )  # the last line that runs again in backward
        self._find_uses()
        self.names = NameScope(RESERVED | self.moves.taken)
        self.body: list[str] = []
        self.sites: list[tuple[str, ...]] = []  # of each line of the body
        self.sites_of_inlined: list[str] = []  # the call sites of expressions that will be written inside a later one
        self.inlined: dict[int, str] = {}  # expressions that will be written inside a later one
        self.operands_of_inlined: list[int] = []  # the values that these use
        self._collect_arguments()
        stopped: list[bool] = []  # of each line of the body: whether the model's code ran it under torch.no_grad
        for now, call in enumerate(self.calls):
            self._write_call(now, call)
            stopped += [call.stops] * (len(self.body) - len(stopped))
        body, sites = wrap_no_grad(self.body, self.sites, stopped)
        outputs = [n for c in self.calls for n in c.outputs if n in self.wanted]
        input_names = [self.texts[n] for n in self.inputs]
        first = [*(["w"] if self.weights or self.buffers else []), *(["seed"] if self.seeds else [])]
        return FunctionSource(
            [*first, *input_names, *self.cut_names],
            body,
            [self.texts[n] for n in outputs],
            self.inputs,
            input_names,
            self.cuts,
            list(self.weights.values()),
            list(self.buffers.values()),
            outputs,
            self.seeds,
            sites,
        )

    # --- arguments ------------------------------------------------------------------------------------

    def _find_uses(self) -> None:
        self.uses: dict[int, list[int]] = {}
        self.users: dict[int, list[TapeCall]] = {}
        for now, call in enumerate(self.calls):
            for number in call.inputs:
                self.uses.setdefault(number, []).append(now)
                self.users.setdefault(number, []).append(call)

    def _last_use(self, number: int, now: int) -> int:
        """Return the last line that uses a value."""
        return 1 << 60 if number in self.wanted else max(self.uses.get(number, [now]))

    def _collect_arguments(self) -> None:
        for now, call in enumerate(self.calls):
            edges = self.layout.row(call).inputs if call.kind == "op" else [None] * len(call.inputs)
            for number, edge in zip(call.inputs, edges, strict=True):
                kind = self.tape.tensors[number].kind
                if kind == PARAMETER:
                    self._add_weight(now, number)
                elif kind != COMPUTED and edge is not None:
                    self._add_constant(number, edge)
                elif number not in self.made and number not in self.inputs:
                    self.inputs.append(number)
        named = (
            self.input_names
            if len(self.input_names) == len(self.inputs)
            else [self.wanted_name(n) for n in self.inputs]
        )
        for number, name in zip(self.inputs, named, strict=True):
            self.texts[number] = self.names.keep(name)
        self.cut_names = [self.names.keep(self.wanted_name(n)) for n, _ in self.cuts]

    def _use_key(self, now: int, number: int) -> tuple[int, int]:
        """Return the key of the use of a parameter by the call on line `now`."""
        return number, now if self.outer_steps[number, self.calls[now].site][0] else -1

    def _add_weight(self, now: int, number: int) -> None:
        key = self._use_key(now, number)
        if key not in self.weights:
            gather, reduce = self.outer_steps[number, self.calls[now].site]
            users = [self.calls[now]] if key[1] == now else self.users[number]
            live_calls = [call for call in users if any(n in self.layout.with_gradient for n in call.outputs)]
            first = now if key[1] == now else min(self.uses[number])
            regather = (
                bool(live_calls) and any(number in call.saved for call in users)
            ) or first <= self.last_recomputed
            saved = not self.recomputed and any(self._autograd_keeps_view(call, number) for call in users)
            trained = self.tape.tensors[number].grad and any(number in call.gives_gradient() for call in live_calls)
            argument = self._name_argument(self.layout.parameters[number])
            self.weights[key] = WeightUse(argument, number, gather, reduce, regather and not saved, saved, trained)

    def _autograd_keeps_view(self, call: TapeCall, number: int) -> bool:
        """Return whether autograd keeps a view that `call` makes of a gathered parameter."""
        if not self.tape.views(call, number):
            return False
        root = self.tape.tensors[number].root
        views = {n for n in self.made if self.tape.tensors[n].root == root}
        # `mass @ mass.T` keeps both factors, which are one memory, so the view is not named there.
        kept = any(number in c.saved and not views.isdisjoint(c.inputs) for c in self.calls)
        return kept or not views.isdisjoint(self.saved)

    def _add_constant(self, number: int, edge: Edge) -> None:
        cut = (number, edge.dst.forward)
        if self.tape.tensors[number].kind != BUFFER:
            self.cuts += [cut] * (cut not in self.cuts)
        elif cut not in self.buffers:
            self.buffers[cut] = BufferUse(self._name_argument(self.tape.tensors[number].name), *cut)

    def _name_argument(self, name: str) -> str:
        """Return the name of a weight or buffer in the function."""
        local = name[len(self.prefix) + 1 :] if self.prefix and name.startswith(self.prefix + ".") else name
        names_taken = {w.argument for w in self.weights.values()} | {b.argument for b in self.buffers.values()}
        short, long = to_identifier("_".join(local.split(".")[-2:])), to_identifier(local.replace(".", "_"))
        wishes = itertools.chain((short, long), (f"{short}_{count}" for count in itertools.count(2)))
        return next(name for name in wishes if name not in names_taken)

    def wanted_name(self, number: int) -> str:
        """Return the name for a value: that of the model's statement that assigns it, or of the layer whose weight makes it."""
        maker = self.makers.get(number)
        if maker is None:
            other = "hidden" if number in self.tape.received else "constant"
            return self.tape.tensors[number].name.rpartition(".")[2] or other
        inner = any(self.tape.tensors[n].kind == PARAMETER for n in maker.inputs)
        module = maker.scope.rpartition(".")[2].partition("@")[0]
        layer = module if inner and module and not module.isdigit() else maker.fn
        if inner and self._continues(maker, maker):
            return layer
        if len(maker.names) == len(maker.outputs):
            return maker.names[maker.outputs.index(number)] or maker.fn
        return layer

    def _continues(self, maker: TapeCall, call: TapeCall) -> bool:
        """Return whether the statement of `maker` uses the results of `call`, at once or through other modules that it calls."""
        siblings = maker.scope.rpartition(".")[0] + "."
        users = [c for n in call.outputs for c in self.users.get(n, ())]
        return any(
            c.line == maker.line
            or (c.scope.startswith(siblings) and c.scope != maker.scope and self._continues(maker, c))
            for c in users
        )

    # --- one call -------------------------------------------------------------------------------------

    def _write_call(self, now: int, call: TapeCall) -> None:
        start = len(self.body)
        expression = self._write_dropout(call) if call.kind == "dropout" else self._write_expression(now, call)
        moved = expression if call.kind == "dropout" else self._move_results(call, expression)
        if len(call.outputs) == 1:
            self._assign(now, call, moved, plain=moved == expression)
        else:
            self._unpack(now, call, expression)
        if self._is_kept(call):
            keep_all = "whole=True" if call.fn == "scaled_dot_product_attention" else ""
            self.body[start:] = [f"with keep({keep_all}):", *(f"    {line}" for line in self.body[start:])]
        self.sites_of_inlined.append(call.site)
        if len(self.body) > start:
            self.sites += [tuple(self.sites_of_inlined)] * (len(self.body) - start)
        if call.outputs[0] not in self.inlined:
            self.sites_of_inlined = []
        self._delete_dead(now, call)

    def _is_kept(self, call: TapeCall) -> bool:
        return call.kind == "op" and call.site in self.kept

    def _write_expression(self, now: int, call: TapeCall) -> str:
        row = self.layout.row(call)
        texts = [self._write_operand(now, n, e) for n, e in zip(call.inputs, row.inputs, strict=True)]
        local = operators.LocalCall(
            self.layout, call, row, texts, self.moves.axis, self._leaf, self._next_seed, self._product(call)
        )
        text = operators.write_operator(local)
        if len(call.outputs) == 1 and isinstance(call.shape, (tuple, list)):  # the call also returns what is no tensor
            text += f"[{[isinstance(x, Ref) for x in call.shape].index(True)}]"
        return text

    def _next_seed(self) -> str:
        """Write the seed of a call that draws random numbers."""
        self.seeds += 1
        return f"seed + {self.seeds}"

    def _product(self, call: TapeCall) -> str:
        """Return the name of the product in chunks that replaces `F.linear`; "" if the call is not chunked."""
        edge = self.layout.row(call).outputs[0]
        if len(call.outputs) != 1 or edge.chunks < 2:
            return ""
        grad = self.tape.tensors[call.outputs[0]].grad
        return self.moves.product(edge.forward, edge.backward if grad else (), edge.chunks)

    def _write_dropout(self, call: TapeCall) -> str:
        x = call.inputs[0]
        arguments = dict(zip(("input", "p", "training"), call.args, strict=False)) | call.kwargs
        split = [
            self.moves.axis(a)
            for a, p in enumerate(self.layout.delivered_placements[x])
            if isinstance(p, Shard) and self.layout.sizes[a] > 1
        ]
        kind = "" if call.fn == "dropout" else f", kind={call.fn!r}"
        where = f", split=[{', '.join(split)}]" if split else ""
        return f"dropout({self._read_value(x)}, {arguments.get('p', 0.5)}, {self._next_seed()}{kind}{where})"

    def _leaf(self, item: Any) -> str:
        return "DEVICE" if item is DEVICE else str(self.name_object(item))

    def _write_operand(self, now: int, number: int, edge: Edge) -> str:
        """Write an operand with the placements that the operator takes."""
        tensor = self.tape.tensors[number]
        if tensor.kind == PARAMETER:
            use = self.weights[self._use_key(now, number)]
            forward_steps, backward_steps = self.moves.real(edge.forward), self.moves.real(edge.backward)
            forward, backward_steps = (
                forward_steps[len(use.gather) :],
                backward_steps[: len(backward_steps) - len(use.reduce)],
            )
            return self._move_operand(
                now, number, f"w.{use.argument}", replace(edge, forward=forward, backward=backward_steps)
            )
        if tensor.kind == BUFFER:
            return _divide_constant(
                f"w.{self.buffers[number, edge.dst.forward].argument}", self.layout, self.moves, edge.dst.forward
            )
        if tensor.kind != COMPUTED:
            return self.cut_names[self.cuts.index((number, edge.dst.forward))]
        return self._move_operand(now, number, self._read_value(number), edge)

    def _move_operand(self, now: int, number: int, text: str, edge: Edge) -> str:
        """Write an operand after its move. It is detached where the model's own backward sends no gradient, since autograd
        would send zeros."""
        stopped = number not in self.layout.with_gradient and number not in self.calls[now].gives_gradient()
        backward_steps = edge.backward if self.tape.tensors[number].grad and not stopped else ()
        return self.moves.apply(f"{text}.detach()" if stopped else text, edge.forward, backward_steps, edge.segments)

    def _read_value(self, number: int) -> str:
        return self.inlined.pop(number) if number in self.inlined else self.texts[number]

    def _move_results(self, call: TapeCall, expression: str) -> str:
        if len(call.outputs) != 1:
            return expression
        edge = self.layout.row(call).outputs[0]
        grad = self.tape.tensors[call.outputs[0]].grad
        if edge.chunks > 1:  # the product takes the move itself
            return expression
        return self.moves.apply(expression, edge.forward, edge.backward if grad else (), edge.segments)

    def _assign(self, now: int, call: TapeCall, text: str, *, plain: bool) -> None:
        number = call.outputs[0]
        if plain and self._can_inline(now, call, text):
            self.inlined[number] = parenthesize(text)
        elif text.isidentifier():  # the same tensor under another name
            self.texts[number] = text
            self.names.hold(text, self._last_use(number, now))
        else:
            self.texts[number] = self.names.take(self.wanted_name(number), now, self._last_use(number, now))
            self.body.append(f"{self.texts[number]} = {normalize(text)}")

    def _can_inline(self, now: int, call: TapeCall, text: str) -> bool:
        """Return whether an expression may be written inside the next one: that alone uses it, in the same statement."""
        number = call.outputs[0]
        if number in self.wanted or self.uses.get(number) != [now + 1] or len(text) > LONGEST_INLINE:
            return False
        following = self.calls[now + 1]
        if self._is_kept(call) or self._is_kept(following) or call.stops != following.stops:
            return False
        if following.inputs.count(number) != 1 or following.kind != "op" or following.fn in operators.RESHAPES:
            return False
        edge = self.layout.row(following).inputs[following.inputs.index(number)]
        return following.line == call.line and not edge.forward and not edge.backward

    def _unpack(self, now: int, call: TapeCall, text: str) -> None:
        assert isinstance(call.shape, (tuple, list)), call
        names = []
        for number in call.outputs:
            name = self.names.take(self.wanted_name(number), now, max(now + 1, self._last_use(number, now)))
            self.texts[number] = name
            names.append(name)
        results = iter(names)
        targets = [next(results) if isinstance(x, Ref) else "_" for x in call.shape]
        self.body.append(f"{', '.join(targets)} = {normalize(text)}")
        for number, edge in zip(call.outputs, self.layout.row(call).outputs, strict=True):
            moved = self.moves.apply(
                self.texts[number], edge.forward, edge.backward if self.tape.tensors[number].grad else (), edge.segments
            )
            if moved != self.texts[number]:
                self.body.append(f"{self.texts[number]} = {moved}")

    def _delete_dead(self, now: int, call: TapeCall) -> None:
        """Write `del` for values after their last use, so that their memory is free at once."""
        self.operands_of_inlined += call.inputs
        if now == len(self.calls) - 1 or any(n in self.inlined for n in call.outputs):
            return
        results = {self.texts.get(n) for n in call.outputs}
        dead = [
            self.texts[n]
            for n in dict.fromkeys(self.operands_of_inlined)
            if n in self.made
            and n in self.texts
            and self.names.free_after[self.texts[n]] <= now
            and self.texts[n] not in results
        ]
        dead += [self.texts[n] for n in call.outputs if n in self.texts and n not in self.uses and n not in self.wanted]
        self.operands_of_inlined = []
        if dead:
            self.body.append(f"del {', '.join(dict.fromkeys(dead))}")
            self.sites.append(())


LineSites = tuple[str, ...]
"""The call sites of one line."""


def wrap_no_grad(
    body: Sequence[str], sites: Sequence[LineSites], stopped: Sequence[bool]
) -> tuple[list[str], list[LineSites]]:
    """The lines, and their call sites, with those that are `stopped` in blocks of torch.no_grad."""
    lines: list[str] = []
    line_sites: list[LineSites] = []
    for stops, numbers in itertools.groupby(range(len(body)), key=stopped.__getitem__):
        if stops:
            lines.append("with torch.no_grad():")
            line_sites.append(())
        for number in numbers:
            lines.append(f"    {body[number]}" if stops else body[number])
            line_sites.append(sites[number])
    return lines, line_sites


def local_constant(name: str, layout: PlannedTape, moves: MoveTable, number: int, placements: Placements) -> str:
    """A constant cut to this rank's part."""
    for axis, dim in layout.cuts(number, placements):
        name = f"{moves.axis(axis)}.slice({name}, {dim})"
    return _divide_constant(name, layout, moves, placements)


def _divide_constant(name: str, layout: PlannedTape, moves: MoveTable, placements: Placements) -> str:
    """A constant as this rank's term of a sum."""
    for axis in layout.partial(placements):
        name = f"{moves.axis(axis)}.divide({name})"
    return name
