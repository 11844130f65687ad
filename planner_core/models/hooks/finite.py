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
JOINED = frozenset({"all", "any"})
ASKED = frozenset({"__bool__", "item", "is_nonzero"})


@dataclass(slots=True)
class Open:
    """A call that was not made: the constant that stands for its result, the value of its elements, the function and its operand, which
    may stand for another call; and the result, if it was needed after all."""

    stands: torch.Tensor
    value: bool
    func: Callable[[torch.Tensor], Any]
    operand: torch.Tensor
    result: Any = None


class TakenFinite:
    """Answers whether all or any numbers of a computed tensor are finite, infinite or not a number as for finite numbers.

    `computed(tensor)` says which tensors have no values yet, `call(func, tensor)` makes a call, and `asked()` is called at each
    question. Until the question is asked, the result of `torch.isfinite(x)` is a constant that stands for the call. If it is used for
    anything else, as a mask, the call is made after all, once. `open` holds operands, so it is to be emptied after a pass.
    """

    def __init__(
        self, computed: Callable[[torch.Tensor], bool], call: Callable[[Any, Any], Any], asked: Callable[[], None]
    ) -> None:
        self.computed, self.call, self.asked = computed, call, asked
        self.open: dict[int, Open] = {}
        self.calling = False  # a call is made after all

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call that need not be made; NotImplemented for any other."""
        name = getattr(func, "__name__", "")
        if self.calling or len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            return NotImplemented
        x = args[0]
        if name in ANSWERS and self.computed(x):
            return self._stands(ANSWERS[name], tuple(x.shape), func, x)
        known = self.open.get(id(x))
        if known is not None and name in JOINED:
            return self._stands(known.value, (), func, x)
        if known is not None and name in ASKED:
            del self.open[id(x)]
            self.open.pop(id(known.operand), None)
            self.asked()
            return known.value
        return NotImplemented

    def made(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with the results of calls that are needed after all."""
        if not self.open:
            return args, kwargs
        return pytree.tree_map_only(torch.Tensor, self._made, (args, kwargs))  # type: ignore[no-any-return]

    def _made(self, tensor: torch.Tensor) -> Any:
        known = self.open.get(id(tensor))
        if known is None:
            return tensor
        if known.result is None:
            operand, self.calling = self._made(known.operand), True
            try:
                known.result = self.call(known.func, operand)
            finally:
                self.calling = False
        return known.result

    def _stands(self, value: bool, shape: tuple[int, ...], func: Any, operand: torch.Tensor) -> torch.Tensor:
        constant = torch.full((), value).expand(shape)
        self.open[id(constant)] = Open(constant, value, func, operand)
        return constant
