"""Find the dims that hold samples, by comparing two recordings, of which one has twice as many samples.

A plan has the samples of all ranks; a rank has its own. A size that doubles with the batch is a number of samples. A size that
stays the same is not. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.hooks import is_inplace
from planner_core.models.sources import spelled
from planner_core.ops import Kind, operator
from planner_core.runtime.record.recorder import CannotRewrite
from planner_core.runtime.record.tape import BUFFER, INPUT, LITERAL, PARAMETER, Ref, Tape, TapeCall, same_values


def hold_samples(
    args: Any, kwargs: Any, names: Sequence[str] = (), is_table: Callable[[str], bool] = lambda name: False
) -> list[bool]:
    """For each leaf of a call: whether it has samples. They are along dim 0 of each tensor whose dim 0 is as long as the first one's, but
    of those that had none when the model was planned (`is_table`, by name). `names`: those of positional parameters."""
    leaves = [(spelled(path, names), x) for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]]
    may = [isinstance(x, torch.Tensor) and x.dim() > 0 and not is_table(name) for name, x in leaves]
    lengths = [x.shape[0] for (_, x), own in zip(leaves, may, strict=True) if own]
    samples = next((n for n in lengths if n > 1), 1)  # one row may stand for all samples
    return [own and x.shape[0] == samples for (_, x), own in zip(leaves, may, strict=True)]


def changed(args: Any, held: Sequence[bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same inputs with other samples, where these are `held`."""
    leaves, spec = pytree.tree_flatten(args)
    return pytree.tree_unflatten([change(x) if own else x for x, own in zip(leaves, held, strict=True)], spec)


def with_samples(args: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same inputs with other samples, where the shapes alone say which hold some."""
    return changed(args, hold_samples((args,), {}), change)


def repeated(args: Any, held: Sequence[bool], times: int = 2) -> Any:
    """The same inputs with every sample several times."""

    def more(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * times) if not x.is_meta else x.new_empty((times * x.shape[0], *x.shape[1:]))

    return changed(args, held, more)


def batch_dims(once: Tape, twice: Tape) -> list[int | None]:
    """For each tensor of `once`: the dim that holds the samples, alone or merged with other dims; None if there is none."""
    pairs = _pairs(once, twice)
    if pairs is None:
        raise CannotRewrite("it does other operations on other numbers of samples")
    return [_grown(a.name or f"tensor {i}", a.shape, twice.tensors[pairs[i]].shape) for i, a in enumerate(once.tensors)]


def _pairs(once: Tape, twice: Tape) -> dict[int, int] | None:
    """The tensor of `twice` for each tensor of `once`; None if operations differ. Some constants are in `twice` alone, since only
    several samples need them (transformers expands positions for more than one)."""
    made = [{n for c in tape.calls for n in c.outputs} for tape in (once, twice)]
    given = [
        [n for n in range(len(tape.tensors)) if n not in own] for tape, own in zip((once, twice), made, strict=True)
    ]
    if [once.tensors[n].kind for n in given[0]] != [twice.tensors[n].kind for n in given[1]]:
        return None
    found = dict(zip(*given, strict=True))
    calls = _matched(once, twice)
    if calls is None:
        return None
    for call, other in calls:
        found.update(zip(call.outputs, other.outputs, strict=True))
    return found if len(found) == len(once.tensors) else None


def _matched(once: Tape, twice: Tape) -> list[tuple[TapeCall, TapeCall]] | None:
    """Each call of `once` with its call of `twice`; None if operations differ."""
    found = []
    calls = iter(twice.calls)
    for call in once.calls:
        other = next((c for c in calls if _same(call, c) or c.kind != "constant"), None)
        if other is None or not _same(call, other) or len(call.outputs) != len(other.outputs):
            return None
        found.append((call, other))
    return found if all(c.kind == "constant" for c in calls) else None


def _same(a: TapeCall, b: TapeCall) -> bool:
    return (a.kind, a.fn, a.site, a.scope, a.line) == (b.kind, b.fn, b.site, b.scope, b.line)


def _grown(name: str, once: tuple[int, ...], twice: tuple[int, ...]) -> int | None:
    if len(once) != len(twice):
        raise CannotRewrite(f"{name} has {len(once)} dims, and {len(twice)} with twice as many samples")
    grown = [d for d, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    if len(grown) > 1 or any(twice[d] != 2 * once[d] for d in grown):
        raise CannotRewrite(f"{name} of shape {once} becomes {twice} with twice as many samples")
    return grown[0] if grown else None


def alike(a: Tape, b: Tape) -> bool:
    """Whether two recordings of the same arguments are of the same calls."""
    return len(a.calls) == len(b.calls) and all(
        _same(x, y) and repr((x.args, x.kwargs, x.answer)) == repr((y.args, y.kwargs, y.answer))
        for x, y in zip(a.calls, b.calls, strict=True)
    )


def same_operators(a: Tape, b: Tape) -> bool:
    """Whether two recordings call the same operators of the plan, perhaps with other constants (a mask, or none)."""
    sites = [[c.site for c in tape.calls if c.kind == "op"] for tape in (a, b)]
    return sites[0] == sites[1]


def same_step(a: Tape, b: Tape) -> bool:
    """Whether two recordings of the same arguments do the same: the same operators on the same values, however constants are made. It may
    also be that this is not seen."""
    steps = [[c for c in tape.calls if c.kind != "constant"] for tape in (a, b)]
    writes = any(c.kind == "constant" and is_inplace(c.fn) and _outlives(t, c) for t in (a, b) for c in t.calls)
    if writes or len(steps[0]) != len(steps[1]) or plain_results(a) != plain_results(b):
        return False
    values = _SameValues(a, b)
    return all(map(values.call, *steps)) and values.tree(a.result, b.result)


def _outlives(tape: Tape, call: TapeCall) -> bool:
    """Whether a write in place is into what is there in the next step, or of what inputs say."""
    root = tape.tensors[tape.tensors[call.inputs[0]].root] if call.inputs else None
    return root is None or root.kind in (BUFFER, INPUT, LITERAL) or bool(tape.fed & {*call.outputs})


class _SameValues:
    """Which tensors of two recordings have the same values."""

    def __init__(self, a: Tape, b: Tape) -> None:
        self.a, self.b = a, b
        self.pairs: dict[int, int] = {}
        self.makers = [{n: (c, i) for c in t.calls for i, n in enumerate(c.outputs)} for t in (a, b)]

    def call(self, mine: TapeCall, other: TapeCall) -> bool:
        same = _same(mine, other) and repr(mine.answer) == repr(other.answer) and mine.stops == other.stops
        if not (same and mine.strides == other.strides and len(mine.outputs) == len(other.outputs)):
            return False
        self.pairs.update(zip(mine.outputs, other.outputs, strict=True))
        return self.tree((mine.args, mine.kwargs), (other.args, other.kwargs))

    def tree(self, mine: Any, other: Any) -> bool:
        (leaves, spec), (others, form) = pytree.tree_flatten(mine), pytree.tree_flatten(other)
        return spec == form and all(map(self._leaf, leaves, others))

    def _leaf(self, mine: Any, other: Any) -> bool:
        if isinstance(mine, Ref) and isinstance(other, Ref):
            return self._tensor(mine.number, other.number)
        return type(mine) is type(other) and repr(mine) == repr(other)

    def _tensor(self, n: int, m: int) -> bool:
        if n in self.pairs:
            return self.pairs[n] == m
        mine, other = self.a.tensors[n], self.b.tensors[m]
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return False
        values = self.a.made.get(n, mine.value), self.b.made.get(m, other.value)
        if values[0] is not None and values[1] is not None:
            return same_values(values[0], values[1])
        if (mine.kind, mine.name) != (other.kind, other.name) or mine.kind == LITERAL:
            return False
        (made, i), (by, j) = self.makers[0].get(n, (None, 0)), self.makers[1].get(m, (None, 0))
        if made is None or by is None:
            return mine.kind in (PARAMETER, INPUT, BUFFER)
        return i == j and self.call(made, by)


def plain_results(tape: Tape) -> list[Any]:
    """What a model returns beside tensors: numbers, words and flags."""
    leaves = pytree.tree_leaves(tape.result, is_leaf=lambda x: isinstance(x, Ref))
    return [leaf for leaf in leaves if not isinstance(leaf, Ref)]


# --- numbers ---------------------------------------------------------------------------------------------


TakesAll = Callable[[TapeCall], bool]
"""Whether a call takes all samples of the batch, and not a rank's own: then its sizes are those of all, too."""


def counts_samples(once: Tape, twice: Tape, takes_all: TakesAll) -> bool:
    """Whether a call computes with a number that depends on the number of samples, as in `loss.sum() / x.size(0)`."""
    return any(_changed(a, b, takes_all(a)) for a, b in _matched(once, twice) or ())


def numbers_samples(once: Tape, twice: Tape, dims: Sequence[int | None]) -> str:
    """The line at which the code makes a constant that tells samples apart by their places in the batch (`torch.arange(len(x))`), or says
    how many they are, and computes with it; empty if it does not. A rank would number its own samples from 0."""
    pairs = _pairs(once, twice) or {}
    lines = {n: c.line for c in once.calls for n in c.outputs}
    used = {n for c in once.calls if c.kind == "op" or once.fed & {*c.outputs} for n in c.inputs}
    for number, mine in once.made.items():
        dim, both = dims[number], twice.made.get(pairs.get(number, -1))
        if number not in used or both is None or both.is_meta:
            continue
        if not torch.equal(both, mine if dim is None else torch.cat([mine, mine], dim)):
            return lines.get(number) or "its code"
    return ""


def writes_input(tape: Tape) -> str:
    """The line that writes into an input in place; empty if none does."""
    kinds = [tape.tensors[tensor.root].kind for tensor in tape.tensors]
    writes = (c for c in tape.calls if c.kind == "constant" and is_inplace(c.fn) and c.inputs)
    return next((c.line for c in writes if kinds[c.inputs[0]] == INPUT), "")


def with_numbers_of(own: Tape, every: Tape, takes_all: TakesAll) -> None:
    """Let the calls of a rank's `own` recording compute with the numbers of the recording with `every` rank's samples."""
    calls = _matched(own, every)
    if calls is None:
        raise CannotRewrite("it does other operations on other numbers of samples")
    for call, other in calls:
        if _changed(call, other, whole := takes_all(call)):
            leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
            theirs = pytree.tree_leaves((other.args, other.kwargs))
            chosen = [b if _is_value(call, a, b, whole) else a for a, b in zip(leaves, theirs, strict=True)]
            call.args, call.kwargs = pytree.tree_unflatten(chosen, spec)


def _changed(a: TapeCall, b: TapeCall, whole: bool) -> bool:
    mine, theirs = (pytree.tree_leaves((c.args, c.kwargs)) for c in (a, b))
    if whole and len(mine) != len(theirs):
        raise CannotRewrite(f"it takes a list for each sample of the batch at {a.line.rpartition('/')[2]}")
    return len(mine) == len(theirs) and any(_is_value(a, x, y, whole) for x, y in zip(mine, theirs, strict=True))


def _is_value(call: TapeCall, mine: object, other: object, whole: bool) -> bool:
    """Whether these two are different numbers that a call computes with. Elsewhere whole numbers are sizes, which count if it takes the
    `whole` batch. A convolution may have a group for each sample."""
    if whole and isinstance(mine, (slice, range)) and isinstance(other, (slice, range)):
        return (mine.start, mine.stop, mine.step) != (other.start, other.stop, other.step)
    if isinstance(mine, bool) or not isinstance(mine, (int, float)) or not isinstance(other, (int, float)):
        return False
    counts = operator(call.fn).kind in (Kind.ELEMENTWISE, Kind.CONVOLUTION)
    return mine != other and (isinstance(mine, float) or counts or whole)
