"""Check in one place what a forward pass may do (docs/SUPPORT.md): run the model, then compare its Python state with that before.

A pass is a function of the model's parameters, buffers and inputs, and may write buffers in place. A plan runs it as generated code
that was recorded once. Anything else that a pass sets, counts or draws would be lost silently, or differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner_core.core import Block, CaptureError, Op
from planner_core.models.capture.checks.refusals import model_line
from planner_core.models.hooks.model_parts import list_modules
from planner_core.models.hooks.module_state import ModuleState, WeightDtypes, scratch_tensors
from planner_core.models.hooks.torch_private import storage_id

EXTRA_PASSES = 8
"""Extra passes of a model of transformers that draws from Python: LayerDrop does so even at rate 0, and then all passes are equal."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One recorded forward pass.

    top, blocks     its graph, and `loss`, the name of its loss
    notes           assumptions of the graph
    drew_outside    whether it drew random numbers of Python or numpy
    transcript      every call of torch with its arguments, tensors by shape
    is_computed     whether a tensor depends on weights or inputs
    constant_bytes  of tensors without values that were computed from the inputs alone
    """

    top: Block
    blocks: Mapping[str, Block]
    loss: str
    notes: tuple[str, ...]
    drew_outside: bool
    transcript: tuple[Any, ...]
    is_computed: Callable[[torch.Tensor], bool]
    constant_bytes: int

    @property
    def operations(self) -> list[Any]:
        """The functions, operands and tensors of each block, without attributes: literals may differ between passes."""
        blocks = {"": self.top, **self.blocks}
        return [
            (
                name,
                [(i.fn if isinstance(i, Op) else i.block, i.inputs, i.outputs) for i in b.items],
                [v.meta for v in b.values],
            )
            for name, b in blocks.items()
        ]


Leftovers = Mapping[int, str]
"""Computed tensors that an earlier pass left in the model: by storage, the name of the attribute."""


def run_checked(
    model: nn.Module, once: Callable[[Leftovers], ForwardPass], *, library: bool
) -> tuple[ForwardPass, str]:
    """Run passes until one is known to leave no state and to equal the next one.

    A table that the first pass fills and later ones read (rotary angles) is not state: then the second pass counts. Nor is
    a computed tensor that each pass replaces before it reads it.

    Args:
        once: Runs one pass. It refuses to read the leftovers of an earlier pass, which it gets.
        library: Whether the code is that of transformers, which gets fewer passes.

    Returns: the pass, and the name of an attribute in which it keeps a computed tensor; empty if none.
    Raises CaptureError.
    """
    types = WeightDtypes(model)

    def run(left: Leftovers) -> ForwardPass:
        # A weight that the pass before has converted would begin in another dtype, and no two passes would be equal.
        types.restore()
        return once(left)

    counted, set_by_first, leftovers, where = _run_watched(model, run, {})
    if set_by_first:
        first = counted
        counted, set_by_second, leftovers, _ = _run_watched(model, run, leftovers)
        if counted.operations != first.operations:
            raise CaptureError(
                f"{type(model).__name__} does other operations at its next call, since forward sets {set_by_first}"
                f"{where.get(set_by_first, '')}; call the model once before it is planned and applied"
            )
        if set_by_second:
            raise CaptureError(
                f"forward sets {set_by_first}{where.get(set_by_first, '')}, so a step depends on those before; keep it in a buffer that "
                "forward writes in place (register_buffer), or return it"
            )
    if counted.drew_outside and not library:
        raise CaptureError(
            f"{type(model).__name__} draws random numbers of Python or numpy, of which each rank would draw its own; draw them by torch "
            "(torch.rand)"
        )
    # Code of transformers is the same for all its users, so it is run once more only if its first pass left something behind.
    others = EXTRA_PASSES if counted.drew_outside else int(not library or bool(set_by_first or leftovers))
    for _ in range(others):
        if run(leftovers).transcript != counted.transcript:
            raise CaptureError(
                f"{type(model).__name__} does something else at its next call with the same inputs; let forward depend on parameters, "
                "buffers and inputs alone, and keep a state in a buffer"
            )
    return counted, next(iter(leftovers.values()), "")


def _run_watched(
    model: nn.Module, run: Callable[[Leftovers], ForwardPass], left: Leftovers
) -> tuple[ForwardPass, str, Leftovers, dict[str, str]]:
    """Run a pass. Returns it, the name of a value that it has set, its leftovers, and the lines that set attributes, by name."""
    state, names = ModuleState(model), {id(m): n for n, m in list_modules(model)}
    with _note_assignments(names) as where:
        forward = run(left)
    leftovers, named = dict[int, str](), ""
    for change in state.list_changes():
        is_computed = [t for t in scratch_tensors(change.now) if forward.is_computed(t)]
        leftovers |= {storage_id(t): change.name for t in is_computed}
        named = named or change.name * (not is_computed)
    return forward, named, leftovers, where


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
