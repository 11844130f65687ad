"""Answer a model's check whether its numbers are finite, as T5 and Switch make it:

if self.training and not torch.isfinite(hidden_states).all(): hidden_states = torch.clamp(hidden_states, ...)

A graph holds one path through the model's code, and computed values cannot choose it. In a healthy run the answer is always the
same. So the check is answered at once and not computed, and the plan states this assumption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

ANSWERS = {"isfinite": True, "isinf": False, "isnan": False}
REDUCTIONS = frozenset({"all", "any"})
QUESTIONS = frozenset({"__bool__", "item", "is_nonzero"})


@dataclass(slots=True)
class DeferredCheck:
    """A call that was not made.

    placeholder  the constant that the model gets as its result; while it is here, no other tensor has its id
    value        the value of all its elements
    func         the function, e.g. torch.isfinite
    operand      its operand, which may be the placeholder of another deferred call
    result       the computed result, once something other than a question reads it
    """

    placeholder: torch.Tensor
    value: bool
    func: Callable[[torch.Tensor], Any]
    operand: torch.Tensor
    result: Any = None


class AssumeFinite:
    """Answer questions about finiteness (`isfinite`, `isinf`, `isnan`, reduced by `all` or `any`) as for finite numbers.

    `torch.isfinite(x)` returns a placeholder and is not computed. If it is used for anything but a question, e.g. as a mask, the call
    is made then, once. `deferred` keeps operands alive: clear it after a pass.

    Args:
        is_computed: Whether a tensor has no values yet.
        make_call: Makes the call `func(tensor)`.
        on_question: Called at each answered question.
    """

    def __init__(
        self,
        is_computed: Callable[[torch.Tensor], bool],
        make_call: Callable[[Any, Any], Any],
        on_question: Callable[[], None],
    ) -> None:
        self.is_computed, self.make_call, self.on_question = is_computed, make_call, on_question
        self.deferred: dict[int, DeferredCheck] = {}
        self.is_calling = False  # while a deferred call is made, it must not be deferred again

    def answer_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call that need not be made; NotImplemented for any other."""
        name = getattr(func, "__name__", "")
        if self.is_calling or len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        x = args[0]
        if name in ANSWERS and self.is_computed(x):
            return self._defer_check(ANSWERS[name], tuple(x.shape), func, x)
        check = self.deferred.get(id(x))
        if check is not None and name in REDUCTIONS:
            return self._defer_check(check.value, (), func, x)
        if check is not None and name in QUESTIONS:
            del self.deferred[id(x)]
            self.deferred.pop(id(check.operand), None)
            self.on_question()
            return check.value
        return NotImplemented

    def resolve_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace placeholders among the arguments by computed results: this call reads them."""
        if not self.deferred:
            return args, kwargs
        return pytree.tree_map_only(torch.Tensor, self._resolve_check, (args, kwargs))  # type: ignore[no-any-return]

    def _resolve_check(self, tensor: torch.Tensor) -> Any:
        check = self.deferred.get(id(tensor))
        if check is None:
            return tensor
        if check.result is None:
            # First the operand, which may be deferred itself: `isfinite(x).all()` used as a mask makes two calls.
            operand, self.is_calling = self._resolve_check(check.operand), True
            try:
                check.result = self.make_call(check.func, operand)
            finally:
                self.is_calling = False
        return check.result

    def _defer_check(self, value: bool, shape: tuple[int, ...], func: Any, operand: torch.Tensor) -> torch.Tensor:
        # One element for any shape: the check of a tensor of a billion numbers must not allocate an answer of that size.
        constant = torch.full((), value).expand(shape)
        self.deferred[id(constant)] = DeferredCheck(constant, value, func, operand)
        return constant
