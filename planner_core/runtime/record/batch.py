"""Find the dims that hold samples, by comparing the recordings of one rank's samples and of those of all ranks.

A size that grows with the batch is a number of samples. A size that stays the same is not. Anything else mixes samples
(MixesSamples).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.models.sources import argument_name
from planner_core.ops import Kind, operator, writes_in_place
from planner_core.runtime.mismatch import MixesSamples
from planner_core.runtime.record.tape import INPUT, Ref, Tape, TapeCall


def find_sample_leaves(
    args: Any, kwargs: Any, names: Sequence[str] = (), is_table: Callable[[str], bool] = lambda name: False
) -> list[bool]:
    """Return for each leaf of a call whether it has samples.

    Samples are along dim 0 of each tensor whose dim 0 is as long as the first one's. Tensors that had no samples when the model
    was planned have none (`is_table`, by name). `names`: those of positional_names parameters.
    """
    leaves = [(argument_name(path, names), x) for path, x in pytree.tree_flatten_with_path((args, kwargs))[0]]
    may_have = [isinstance(x, torch.Tensor) and x.dim() > 0 and not is_table(name) for name, x in leaves]
    lengths = [x.shape[0] for (_, x), may in zip(leaves, may_have, strict=True) if may]
    samples = next((n for n in lengths if n > 1), 1)  # one row may stand for all samples
    return [may and x.shape[0] == samples for (_, x), may in zip(leaves, may_have, strict=True)]


def map_marked_leaves(args: Any, marks: Sequence[bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to the leaves with a mark."""
    leaves, spec = pytree.tree_flatten(args)
    return pytree.tree_unflatten([change(x) if marked else x for x, marked in zip(leaves, marks, strict=True)], spec)


def map_sample_leaves(args: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to the inputs that hold samples, as far as shapes tell which do."""
    return map_marked_leaves(args, find_sample_leaves((args,), {}), change)


def repeat_samples(args: Any, has_samples: Sequence[bool], times: int) -> Any:
    """Return the inputs with every sample `times` times."""

    def repeat_tensor(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * times) if not x.is_meta else x.new_empty((times * x.shape[0], *x.shape[1:]))

    return map_marked_leaves(args, has_samples, repeat_tensor)


def find_batch_dims(
    tape_of_rank: Tape, tape_of_all: Tape, num_parts: int
) -> tuple[dict[int, int], list[int | None], str]:
    """Match two recordings, of which `tape_of_all` has `num_parts` times as many samples.

    Returns the tensor of `tape_of_all` for each tensor of `tape_of_rank`; the dim of each that holds samples, alone or merged
    with other dims, None if none does; and what is wrong with a tensor that holds them otherwise (similarities of all pairs),
    "" if none does. Raises MixesSamples if operations differ.
    """
    matched = _match_tensors(tape_of_rank, tape_of_all)
    if matched is None:
        raise MixesSamples("it does other operations on other numbers of samples")
    dims: list[int | None] = []
    mixed = ""
    for number, tensor in enumerate(tape_of_rank.tensors):
        dim, wrong = _find_batch_dim(tensor.shape, tape_of_all.tensors[matched[number]].shape, num_parts)
        dims.append(dim)
        mixed = mixed or wrong
    return matched, dims, mixed


def _match_tensors(tape_of_rank: Tape, tape_of_all: Tape) -> dict[int, int] | None:
    """Return the tensor of `tape_of_all` for each tensor of `tape_of_rank`; None if operations differ.

    Some constants are in `tape_of_all` only, since several samples need them (transformers expands positions for more than
    one).
    """
    outputs = [{n for c in tape.calls for n in c.outputs} for tape in (tape_of_rank, tape_of_all)]
    given = [
        [n for n in range(len(t.tensors)) if n not in numbers]
        for t, numbers in zip((tape_of_rank, tape_of_all), outputs, strict=True)
    ]
    if [tape_of_rank.tensors[n].kind for n in given[0]] != [tape_of_all.tensors[n].kind for n in given[1]]:
        return None
    matched = dict(zip(*given, strict=True))
    calls = _match_calls(tape_of_rank, tape_of_all)
    if calls is None:
        return None
    # Numbers differ between the tapes as soon as one has a constant more, so tensors are matched by the calls that made them.
    for call, other in calls:
        matched.update(zip(call.outputs, other.outputs, strict=True))
    return matched if len(matched) == len(tape_of_rank.tensors) else None


def _match_calls(tape_of_rank: Tape, tape_of_all: Tape) -> list[tuple[TapeCall, TapeCall]] | None:
    """Return each call of `tape_of_rank` with its call of `tape_of_all`; None if operations differ."""
    matched = []
    calls = iter(tape_of_all.calls)
    for call in tape_of_rank.calls:
        # Only constants are passed over: an operator that one recording alone has is other work, which no plan of the other fits.
        other = next((c for c in calls if _is_same_call(call, c) or c.kind != "constant"), None)
        if other is None or not _is_same_call(call, other) or len(call.outputs) != len(other.outputs):
            return None
        matched.append((call, other))
    return matched if all(c.kind == "constant" for c in calls) else None


def _is_same_call(a: TapeCall, b: TapeCall) -> bool:
    return (a.kind, a.fn, a.site, a.scope, a.line) == (b.kind, b.fn, b.site, b.scope, b.line)


def _find_batch_dim(
    shape_of_rank: tuple[int, ...], shape_of_all: tuple[int, ...], num_parts: int
) -> tuple[int | None, str]:
    """Return the dim that is `num_parts` times as long in `shape_of_all`, and what is wrong if another one is longer."""
    grown = [d for d, (a, b) in enumerate(zip(shape_of_rank, shape_of_all, strict=False)) if a != b]
    if (
        len(shape_of_rank) != len(shape_of_all)
        or len(grown) > 1
        or any(shape_of_all[d] != num_parts * shape_of_rank[d] for d in grown)
    ):
        return (
            None,
            f"a tensor of shape {shape_of_rank} becomes one of {shape_of_all} with {num_parts} times as many samples",
        )
    return (grown[0] if grown else None), ""


def results_without_tensors(tape: Tape) -> list[Any]:
    """Return the numbers, words and flags that a model returns."""
    leaves = pytree.tree_leaves(tape.result, is_leaf=lambda x: isinstance(x, Ref))
    return [leaf for leaf in leaves if not isinstance(leaf, Ref)]


# --- numbers ---------------------------------------------------------------------------------------------


TakesAll = Callable[[TapeCall], bool]
"""Whether a call takes all samples of the batch, and not a rank's own: then its sizes are those of all, too."""


def uses_sample_count(tape_of_rank: Tape, tape_of_all: Tape, takes_all: TakesAll) -> bool:
    """Return whether a call computes with a number that depends on the number of samples, as in `loss.sum() / x.size(0)`."""
    return any(_has_other_numbers(a, b, takes_all(a)) for a, b in _match_calls(tape_of_rank, tape_of_all) or ())


def find_sample_numbering(tape_of_rank: Tape, tape_of_all: Tape, dims: Sequence[int | None], num_parts: int) -> str:
    """Return the line at which the code numbers samples by their places in the batch (`torch.arange(len(x))`) or counts them,
    and computes with that.

    "" if no line does. A rank would number its own samples from 0.
    """
    matched = _match_tensors(tape_of_rank, tape_of_all) or {}
    lines = {n: c.line for c in tape_of_rank.calls for n in c.outputs}
    used = {n for c in tape_of_rank.calls if c.kind == "op" or tape_of_rank.fed & {*c.outputs} for n in c.inputs}
    for number, values_of_rank in tape_of_rank.fixed_values.items():
        dim, value_of_all = dims[number], tape_of_all.fixed_values.get(matched.get(number, -1))
        if number not in used or value_of_all is None or value_of_all.is_meta:
            continue
        if not torch.equal(
            value_of_all, values_of_rank if dim is None else torch.cat([values_of_rank] * num_parts, dim)
        ):
            return lines.get(number) or "its code"
    return ""


def find_input_write(tape: Tape) -> str:
    """Return the line that writes into an input in place; "" if no line does."""
    kinds = [tape.tensors[tensor.root].kind for tensor in tape.tensors]
    writes = (c for c in tape.calls if c.kind == "constant" and writes_in_place(c.fn) and c.inputs)
    return next((c.line for c in writes if kinds[c.inputs[0]] == INPUT), "")


def adopt_numbers(tape_of_rank: Tape, tape_of_all: Tape, takes_all: TakesAll) -> None:
    """Let the calls of a rank's recording compute with the numbers of the recording with all samples."""
    calls = _match_calls(tape_of_rank, tape_of_all)
    if calls is None:
        raise MixesSamples("it does other operations on other numbers of samples")
    for call, other in calls:
        if _has_other_numbers(call, other, whole := takes_all(call)):
            leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
            values_of_all = pytree.tree_leaves((other.args, other.kwargs))
            chosen = [
                b if _is_other_number(call, a, b, whole) else a for a, b in zip(leaves, values_of_all, strict=True)
            ]
            call.args, call.kwargs = pytree.tree_unflatten(chosen, spec)


def _has_other_numbers(a: TapeCall, b: TapeCall, whole: bool) -> bool:
    mine, theirs = (pytree.tree_leaves((c.args, c.kwargs)) for c in (a, b))
    if whole and len(mine) != len(theirs):
        raise MixesSamples(f"it takes a list for each sample of the batch at {a.line.rpartition('/')[2]}")
    return len(mine) == len(theirs) and any(_is_other_number(a, x, y, whole) for x, y in zip(mine, theirs, strict=True))


def _is_other_number(call: TapeCall, value_of_rank: object, other: object, whole: bool) -> bool:
    """Return whether these are different numbers with which a call computes.

    Elsewhere whole numbers are sizes, which count only if the call takes the `whole` batch. A convolution may have a group for
    each sample.
    """
    if whole and isinstance(value_of_rank, (slice, range)) and isinstance(other, (slice, range)):
        return (value_of_rank.start, value_of_rank.stop, value_of_rank.step) != (other.start, other.stop, other.step)
    if (
        isinstance(value_of_rank, bool)
        or not isinstance(value_of_rank, (int, float))
        or not isinstance(other, (int, float))
    ):
        return False
    counts = operator(call.fn).kind in (Kind.ELEMENTWISE, Kind.CONVOLUTION)
    return value_of_rank != other and (isinstance(value_of_rank, float) or counts or whole)
