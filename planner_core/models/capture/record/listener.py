"""What a recorder reports while a pass runs, and what it asks: the contract between the capture and the rewriting of a run.

The graph holds operators alone. A program also needs the calls that make constants, the questions that the model's code asks of them,
and active dropout. A listener gets these from the same pass, with the same numbers and the same names of call sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from planner_core.models.capture.recording import Record, Scope

CallKind: TypeAlias = Literal["op", "constant", "dropout"]
"""What a recorder does with a call. "op": an operand is a parameter or computed from one, so the call is an operator of the graph.
"constant": it makes a constant, which the graph does not hold. "dropout": it draws a mask of dropout, and the listener `draws_masks`."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function of torch, in the form in which it is recorded.

    name      its canonical name
    operands  the tensors among its arguments, in order, with duplicates
    module    the name of the module call that makes it
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: list[torch.Tensor]
    module: str


class PassListener:
    """Listens to a recorder. Every method may number further tensors in the recorder's `values`; here they do nothing.

    The events of one call come in this order, and no other call comes between them:

        before_call, the call runs, then at most one of after_constant | after_operator | after_dropout

    An operator of which nothing is recorded (`x.to(x.dtype)` returns x) and a call that raises end without the second event.
    """

    draws_masks = False
    """Whether active dropout is run and reported as a call of its own. If not, it is the identity, as in a graph."""

    def has_planned_value(self, constant: torch.Tensor) -> bool:
        """Return whether a constant with values had them when the model was planned, so that code may go another way by them."""
        return True

    def before_call(self, kind: CallKind, call: FunctionCall, scope: Scope) -> None:
        """A call in `scope` is about to run. A call in place has not yet given its operand a new number."""

    def after_constant(self, call: FunctionCall, out: Any) -> None:
        """The call returned `out`, which holds constants only."""

    def after_operator(self, call: FunctionCall, record: Record, out: Any) -> None:
        """The call returned `out`, and the graph has got `record` of it."""

    def after_dropout(self, call: FunctionCall, number: int) -> None:
        """The call returned the computed tensor `number`."""

    def after_question(self, call: FunctionCall, scope: Scope, answer: Any) -> None:
        """The model's code asked tensors for a Python value, e.g. `bool(mask.all())`, and got `answer`."""
