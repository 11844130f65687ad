"""Find the dims that hold samples, by comparing the recordings of one rank's samples and of those of all ranks.

A size that grows with the batch is a number of samples. A size that stays the same is not. Anything else mixes samples (MixesSamples).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.hooks import is_inplace
from planner_core.models.sources import spelled
from planner_core.ops import Kind, operator
from planner_core.runtime.record.recorder import MixesSamples
from planner_core.runtime.record.tape import INPUT, Ref, Tape, TapeCall


def find_sample_leaves(
    args: Any, kwargs: Any, names: Sequence[str] = (), is_table: Callable[[str], bool] = lambda name: False
) -> list[bool]:
    """For each leaf of a call: whether it has samples. They are along dim 0 of each tensor whose dim 0 is as long as the first one's, but
    of those that had none when the model was planned (`is_table`, by name). `names`: those of positional parameters."""
    leaves = [(spelled(path, names), x) for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]]
    may = [isinstance(x, torch.Tensor) and x.dim() > 0 and not is_table(name) for name, x in leaves]
    lengths = [x.shape[0] for (_, x), own in zip(leaves, may, strict=True) if own]
    samples = next((n for n in lengths if n > 1), 1)  # one row may stand for all samples
    return [own and x.shape[0] == samples for (_, x), own in zip(leaves, may, strict=True)]


def map_marked_leaves(args: Any, held: Sequence[bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same inputs with other samples, where these are `held`."""
    leaves, spec = pytree.tree_flatten(args)
    return pytree.tree_unflatten([change(x) if own else x for x, own in zip(leaves, held, strict=True)], spec)


def map_sample_leaves(args: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same inputs with other samples, where the shapes alone say which hold some."""
    return map_marked_leaves(args, find_sample_leaves((args,), {}), change)


def repeat_samples(args: Any, held: Sequence[bool], times: int = 2) -> Any:
    """The same inputs with every sample several times."""

    def more(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * times) if not x.is_meta else x.new_empty((times * x.shape[0], *x.shape[1:]))

    return map_marked_leaves(args, held, more)


def find_batch_dims(own: Tape, every: Tape, parts: int) -> tuple[dict[int, int], list[int | None], str]:
    """The tensor of `every` for each tensor of `own`; the dim of each that holds samples, alone or merged with other dims, None if none
    does; and what is wrong with one that holds them otherwise (similarities of all pairs), empty if none does. `every` has `parts`
    times as many samples. Raises MixesSamples if operations differ."""
    pairs = _match_tensors(own, every)
    if pairs is None:
        raise MixesSamples("it does other operations on other numbers of samples")
    dims: list[int | None] = []
    mixed = ""
    for number, tensor in enumerate(own.tensors):
        dim, wrong = _find_batch_dim(tensor.shape, every.tensors[pairs[number]].shape, parts)
        dims.append(dim)
        mixed = mixed or wrong
    return pairs, dims, mixed


def _match_tensors(own: Tape, every: Tape) -> dict[int, int] | None:
    """The tensor of `every` for each tensor of `own`; None if operations differ. Some constants are in `every` alone, since only
    several samples need them (transformers expands positions for more than one)."""
    made = [{n for c in tape.calls for n in c.outputs} for tape in (own, every)]
    given = [
        [n for n in range(len(t.tensors)) if n not in numbers] for t, numbers in zip((own, every), made, strict=True)
    ]
    if [own.tensors[n].kind for n in given[0]] != [every.tensors[n].kind for n in given[1]]:
        return None
    found = dict(zip(*given, strict=True))
    calls = _match_calls(own, every)
    if calls is None:
        return None
    for call, other in calls:
        found.update(zip(call.outputs, other.outputs, strict=True))
    return found if len(found) == len(own.tensors) else None


def _match_calls(own: Tape, every: Tape) -> list[tuple[TapeCall, TapeCall]] | None:
    """Each call of `own` with its call of `every`; None if operations differ."""
    found = []
    calls = iter(every.calls)
    for call in own.calls:
        other = next((c for c in calls if _is_same_call(call, c) or c.kind != "constant"), None)
        if other is None or not _is_same_call(call, other) or len(call.outputs) != len(other.outputs):
            return None
        found.append((call, other))
    return found if all(c.kind == "constant" for c in calls) else None


def _is_same_call(a: TapeCall, b: TapeCall) -> bool:
    return (a.kind, a.fn, a.site, a.scope, a.line) == (b.kind, b.fn, b.site, b.scope, b.line)


def _find_batch_dim(own: tuple[int, ...], every: tuple[int, ...], parts: int) -> tuple[int | None, str]:
    """The dim that is `parts` times as long in `every`, and what is wrong if something else is longer."""
    grown = [d for d, (a, b) in enumerate(zip(own, every, strict=False)) if a != b]
    if len(own) != len(every) or len(grown) > 1 or any(every[d] != parts * own[d] for d in grown):
        return None, f"a tensor of shape {own} becomes one of {every} with {parts} times as many samples"
    return (grown[0] if grown else None), ""


def results_without_tensors(tape: Tape) -> list[Any]:
    """What a model returns beside tensors: numbers, words and flags."""
    leaves = pytree.tree_leaves(tape.result, is_leaf=lambda x: isinstance(x, Ref))
    return [leaf for leaf in leaves if not isinstance(leaf, Ref)]


# --- numbers ---------------------------------------------------------------------------------------------


TakesAll = Callable[[TapeCall], bool]
"""Whether a call takes all samples of the batch, and not a rank's own: then its sizes are those of all, too."""


def uses_sample_count(own: Tape, every: Tape, takes_all: TakesAll) -> bool:
    """Whether a call computes with a number that depends on the number of samples, as in `loss.sum() / x.size(0)`."""
    return any(_has_other_numbers(a, b, takes_all(a)) for a, b in _match_calls(own, every) or ())


def find_sample_numbering(own: Tape, every: Tape, dims: Sequence[int | None], parts: int) -> str:
    """The line at which the code makes a constant that tells samples apart by their places in the batch (`torch.arange(len(x))`), or says
    how many they are, and computes with it; empty if it does not. A rank would number its own samples from 0."""
    pairs = _match_tensors(own, every) or {}
    lines = {n: c.line for c in own.calls for n in c.outputs}
    used = {n for c in own.calls if c.kind == "op" or own.fed & {*c.outputs} for n in c.inputs}
    for number, mine in own.made.items():
        dim, both = dims[number], every.made.get(pairs.get(number, -1))
        if number not in used or both is None or both.is_meta:
            continue
        if not torch.equal(both, mine if dim is None else torch.cat([mine] * parts, dim)):
            return lines.get(number) or "its code"
    return ""


def find_input_write(tape: Tape) -> str:
    """The line that writes into an input in place; empty if none does."""
    kinds = [tape.tensors[tensor.root].kind for tensor in tape.tensors]
    writes = (c for c in tape.calls if c.kind == "constant" and is_inplace(c.fn) and c.inputs)
    return next((c.line for c in writes if kinds[c.inputs[0]] == INPUT), "")


def adopt_numbers(own: Tape, every: Tape, takes_all: TakesAll) -> None:
    """Let the calls of a rank's `own` recording compute with the numbers of the recording with `every` rank's samples."""
    calls = _match_calls(own, every)
    if calls is None:
        raise MixesSamples("it does other operations on other numbers of samples")
    for call, other in calls:
        if _has_other_numbers(call, other, whole := takes_all(call)):
            leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
            theirs = pytree.tree_leaves((other.args, other.kwargs))
            chosen = [b if _is_other_number(call, a, b, whole) else a for a, b in zip(leaves, theirs, strict=True)]
            call.args, call.kwargs = pytree.tree_unflatten(chosen, spec)


def _has_other_numbers(a: TapeCall, b: TapeCall, whole: bool) -> bool:
    mine, theirs = (pytree.tree_leaves((c.args, c.kwargs)) for c in (a, b))
    if whole and len(mine) != len(theirs):
        raise MixesSamples(f"it takes a list for each sample of the batch at {a.line.rpartition('/')[2]}")
    return len(mine) == len(theirs) and any(_is_other_number(a, x, y, whole) for x, y in zip(mine, theirs, strict=True))


def _is_other_number(call: TapeCall, mine: object, other: object, whole: bool) -> bool:
    """Whether these two are different numbers that a call computes with. Elsewhere whole numbers are sizes, which count if it takes the
    `whole` batch. A convolution may have a group for each sample."""
    if whole and isinstance(mine, (slice, range)) and isinstance(other, (slice, range)):
        return (mine.start, mine.stop, mine.step) != (other.start, other.stop, other.step)
    if isinstance(mine, bool) or not isinstance(mine, (int, float)) or not isinstance(other, (int, float)):
        return False
    counts = operator(call.fn).kind in (Kind.ELEMENTWISE, Kind.CONVOLUTION)
    return mine != other and (isinstance(mine, float) or counts or whole)
