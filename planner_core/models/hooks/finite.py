"""Models that ask whether their numbers are finite, and clamp them or stop if not.

if self.training and not torch.isfinite(hidden_states).all(): hidden_states = torch.clamp(hidden_states, ...)

A graph has one way through the model's code, which cannot depend on computed values. In a run that goes well the answer is always
the same. So it is given at once, nothing is computed for it, and the plan says what was taken for granted.
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
    """A call that was not made: the constant that stands for its result, the value of its elements, the function and its operand, which
    may stand for another call; and the result, if it was needed after all."""

    placeholder: torch.Tensor
    value: bool
    func: Callable[[torch.Tensor], Any]
    operand: torch.Tensor
    result: Any = None


class AssumeFinite:
    """Answers whether all or any numbers of a computed tensor are finite, infinite or not a number as for finite numbers.

    `computed(tensor)` says which tensors have no values yet, `call(func, tensor)` makes a call, and `on_question()` is called at each
    question. Until the question is asked, the result of `torch.isfinite(x)` is a constant that stands for the call. If it is used for
    anything else, as a mask, the call is made after all, once. `deferred` holds operands, so it is to be emptied after a pass.
    """

    def __init__(
        self,
        is_computed: Callable[[torch.Tensor], bool],
        make_call: Callable[[Any, Any], Any],
        on_question: Callable[[], None],
    ) -> None:
        self.is_computed, self.make_call, self.on_question = is_computed, make_call, on_question
        self.deferred: dict[int, DeferredCheck] = {}
        self.is_calling = False  # a call is made after all

    def answer_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call that need not be made; NotImplemented for any other."""
        name = getattr(func, "__name__", "")
        if self.is_calling or len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        x = args[0]
        if name in ANSWERS and self.is_computed(x):
            return self._defer(ANSWERS[name], tuple(x.shape), func, x)
        check = self.deferred.get(id(x))
        if check is not None and name in REDUCTIONS:
            return self._defer(check.value, (), func, x)
        if check is not None and name in QUESTIONS:
            del self.deferred[id(x)]
            self.deferred.pop(id(check.operand), None)
            self.on_question()
            return check.value
        return NotImplemented

    def resolve_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with the results of calls that are needed after all."""
        if not self.deferred:
            return args, kwargs
        return pytree.tree_map_only(torch.Tensor, self._resolve, (args, kwargs))  # type: ignore[no-any-return]

    def _resolve(self, tensor: torch.Tensor) -> Any:
        check = self.deferred.get(id(tensor))
        if check is None:
            return tensor
        if check.result is None:
            operand, self.is_calling = self._resolve(check.operand), True
            try:
                check.result = self.make_call(check.func, operand)
            finally:
                self.is_calling = False
        return check.result

    def _defer(self, value: bool, shape: tuple[int, ...], func: Any, operand: torch.Tensor) -> torch.Tensor:
        constant = torch.full((), value).expand(shape)
        self.deferred[id(constant)] = DeferredCheck(constant, value, func, operand)
        return constant
