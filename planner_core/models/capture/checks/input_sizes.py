"""Sizes that depend on the values of a model's inputs: one that is equal in all batches of a kind is planned, any other is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner_core.models.capture.checks.refusals import model_line, refusal
from planner_core.models.hooks.input_values import InputValues
from planner_core.models.hooks.row_masks import has_one_distinct_value, pick_per_sample


class InputSizes:
    """Check calls whose results have sizes that depend on the inputs.

    `call` makes a recorded call, so a run asks the same questions of its inputs. `picked_by_line` holds the lines at which a mask picks
    elements, with their number in words.
    """

    def __init__(self, inputs: InputValues, call: Callable[..., Any]) -> None:
        self.inputs, self.call = inputs, call
        self.picked_by_line: dict[str, str] = {}

    def check_call(self, scope: str, fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that was made in another form; NotImplemented if it can be made as it is. Raises CaptureError."""
        masks = self.inputs.find_masks(fn, args)
        if masks and fn == "getitem":
            picked, number = pick_per_sample(self.call, self._record_question, args[0], args[1], masks)
            if number:
                self.picked_by_line[model_line()] = f"{number} of {masks[0].shape[1]} elements of each sample"
                return picked
        for mask in masks:
            if not self._record_question(self.call(torch.Tensor.all, mask)):
                raise refusal(
                    scope,
                    "picks as many elements as the values of its inputs say",
                    "multiply by the mask, choose with torch.where, or let the loss leave elements out (ignore_index), so that sizes stay",
                )
            self.picked_by_line[model_line()] = "all elements"
        if self.inputs.decide_size(fn, args, kwargs) and not has_one_distinct_value(
            self.call, self._record_question, fn, args, kwargs
        ):
            raise refusal(
                scope,
                f"makes a tensor whose size the values of its inputs say ({fn})",
                "give the number as an argument (num_classes=, minlength=), or compute it without that call",
            )
        return NotImplemented

    def _record_question(self, asked: torch.Tensor) -> bool:
        # A recorded call, and not `bool(asked)`: a run asks the same of its own inputs, and notices where the answer is another one.
        return bool(self.call(torch.Tensor.__bool__, asked))
