"""What a forward pass may do, checked in one place (docs/SUPPORT.md): the model is run, and then it is looked at what the pass has left.

A pass is a function of the model's parameters and buffers and of its inputs, which may write buffers in place. A plan runs it as generated
code, once recorded. So what else it sets, counts or draws would be lost without a word, or be another number on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from planner_core.core import CaptureError
from planner_core.models.capture.checks.refusals import model_line
from planner_core.models.hooks.module_state import ModuleState, WeightDtypes, scratch_tensors

EXTRA_PASSES = 8
"""So many more passes of a model of transformers, whose layers may be left out by random numbers of Python at a rate that is 0."""


class Pass(Protocol):
    """One forward pass, as far as it is compared with others."""

    @property
    def transcript(self) -> tuple[Any, ...]:
        """Every call of torch, with its arguments that are not tensors."""

    @property
    def operations(self) -> list[Any]:
        """What is called on which tensors, by block."""

    @property
    def is_computed(self) -> Callable[[torch.Tensor], bool]:
        """Whether a tensor of the pass depends on weights or inputs."""

    @property
    def drew_outside(self) -> bool:
        """Whether it drew random numbers of Python or numpy."""


Checked = TypeVar("Checked", bound=Pass)
Leftovers = Mapping[int, str]
"""The tensors that an earlier pass has left, by storage, and the names of what holds them."""


def run_checked(
    model: nn.Module, once: Callable[[Leftovers], Checked], *, library: bool = False
) -> tuple[Checked, str]:
    """A pass of `once`, which leaves no state and is like the next one; and the name of an attribute in which it keeps what it computes.

    A table that the first pass fills and later ones read (rotary angles) is no state: then the second pass is the one that counts. Nor is
    a computed tensor that each pass makes anew before it reads it. `once(left)` refuses to read the tensors of an earlier pass, whose names
    `left` has by storage. `library`: the code is that of transformers, of which less is asked. Raises CaptureError.
    """
    types = WeightDtypes(model)

    def run(left: Leftovers) -> Checked:
        types.restore()
        return once(left)

    found, set_by_first, kept, where = _run_watched(model, run, {})
    if set_by_first:
        first = found
        found, set_again, kept, _ = _run_watched(model, run, kept)
        if found.operations != first.operations:
            raise CaptureError(
                f"{type(model).__name__} does other operations at its next call, since forward sets {set_by_first}"
                f"{where.get(set_by_first, '')}; call the model once before it is planned and applied"
            )
        if set_again:
            raise CaptureError(
                f"forward sets {set_by_first}{where.get(set_by_first, '')}, so a step depends on those before; keep it in a buffer that "
                "forward writes in place (register_buffer), or return it"
            )
    if found.drew_outside and not library:
        raise CaptureError(
            f"{type(model).__name__} draws random numbers of Python or numpy, of which each rank would draw its own; draw them by torch "
            "(torch.rand)"
        )
    others = EXTRA_PASSES if found.drew_outside else int(not library or bool(set_by_first or kept))
    for _ in range(others):
        if run(kept).transcript != found.transcript:
            raise CaptureError(
                f"{type(model).__name__} does something else at its next call with the same inputs; let forward depend on parameters, "
                "buffers and inputs alone, and keep a state in a buffer"
            )
    return found, next(iter(kept.values()), "")


def _run_watched(
    model: nn.Module, run: Callable[[Leftovers], Checked], left: Leftovers
) -> tuple[Checked, str, Leftovers, dict[str, str]]:
    """A pass; the name of a value that it has set; what it keeps of what it has computed; and the lines at which attributes were set."""
    state, names = ModuleState(model), {id(m): n for n, m in model.named_modules()}
    with _note_assignments(names) as where:
        found = run(left)
    kept, named = dict[int, str](), ""
    for name, value in state.list_changes():
        is_computed = [t for t in scratch_tensors(value) if found.is_computed(t)]
        kept |= {t.untyped_storage()._cdata: name for t in is_computed}
        named = named or name * (not is_computed)
    return found, named, kept, where


@contextmanager
def _note_assignments(names: dict[int, str]) -> Iterator[dict[str, str]]:
    plain, where = nn.Module.__setattr__, dict[str, str]()

    def put(module: nn.Module, name: str, value: Any) -> None:
        where.setdefault(f"{names.get(id(module), '')}.{name}".strip("."), model_line())
        plain(module, name, value)

    nn.Module.__setattr__ = put  # type: ignore[method-assign, assignment]
    try:
        yield where
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]
