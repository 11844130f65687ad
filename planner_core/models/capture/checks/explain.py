"""Explain an error of a model's code in one sentence: what went wrong, at which line, and what would help."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner_core.core import CaptureError, NeedsValues, NotRunnable, named
from planner_core.models.capture.checks.refusals import TRANSFORM, TRANSFORM_HELP, format_line
from planner_core.models.capture.constants import MAX_COMPUTED_ELEMENTS

_VALUE_DEPENDENT = frozenset(
    {"nonzero", "bincount", "equal", "masked_select", "_unique", "_unique2", "unique_dim", "histc"}
)
"""ATen ops whose result has a size, or a truth value, that depends on values."""
_DEFAULT_HELP = (
    "use a form of the model without data-dependent control flow; if it asks an input, give that as bool or int, and if it asks a "
    "buffer (a counter, a flag), keep that as a plain attribute"
)
_HELP = {
    "pack_padded_sequence": "give the padded batch to the layer, and mask the padding in the loss",
    "nested_tensor": "give one padded tensor and a mask",
    "bincount": "count without it: torch.nn.functional.one_hot(ids, n).sum(0)",
    "nonzero": "multiply by the mask, or choose with torch.where, so that sizes stay as they are",
}
"""What would help, by the function or kernel of torch in which a capture ended."""
_HELP["masked_select"] = _HELP["nonzero"]


_BUILDER_HELP = "let a function of a file build the model and its inputs, and give path.py:function"
"""What would help for a module in memory."""
_KNOWN_ERRORS = {
    "yet support saved tensor hooks": f"{{model}} {TRANSFORM}{{where}}; {TRANSFORM_HELP}",
    "to numpy": "{model} takes the values of computed tensors out of torch{where}, which no graph can hold; compute it in torch",
    "no padding token is defined": "{model} looks for the end of each sample{where}, and no padding token is defined; "
    "give pad_token_id in the config",
    "Expected inputs of BF16": "{model} runs its experts by a kernel for bfloat16 alone{where}; cast it to bfloat16, "
    "or choose another kernel: "
    "model.set_experts_implementation('batched_mm')",
}
"""Words of an error of torch or transformers, and the sentence that replaces it."""


@dataclass
class CurrentCall:
    """The call that is being recorded: the module call, and the function with its arguments."""

    part: str | None = None
    fn: str = ""
    args: Any = ()


def explain_error(
    error: BaseException, model: str, running: CurrentCall, unknown: int, *, copied: bool
) -> CaptureError:
    """Return an error with one sentence: what went wrong, and at which line of the model's code.

    Args:
        error: What the model's code raised.
        model: The name of the model's class.
        running: The call that raised it.
        unknown: Elements of the largest constant (a mask, positions) that was too large to be computed.
        copied: Whether a copy of the user's module ran.
    """
    stack = traceback.extract_tb(error.__traceback__)
    where = format_line(stack)
    text = " ".join(str(error).split()) or type(error).__name__
    # From the precise to the vague: a kernel that meta lacks also fails with "meta" in its text, and is no question about values.
    kernel = re.search(r"aten::(\w+)\S*: attempted to run this operator with Meta tensors", text)
    if kernel and kernel[1] not in _VALUE_DEPENDENT:
        what = f"{model} calls aten::{kernel[1]}{where}"
        return NeedsValues(f"{what}, which torch cannot run without values; compute it by other functions", what=what)
    known = next((message for words, message in _KNOWN_ERRORS.items() if words in text), "")
    if known:
        return CaptureError(known.format(model=model, where=where))
    if kernel or (
        isinstance(error, (NotImplementedError, RuntimeError)) and ("meta" in text or "data-dependent" in text)
    ):
        if unknown:
            return CaptureError(
                f"{model} asks for values{where} while a table of {unknown:,} elements that it made from constants is too large to ",
                f"be computed for a plan (at most {MAX_COMPUTED_ELEMENTS:,}); give a smaller ",
                named("batch"),
                " or ",
                named("seq"),
            )
        what = f"{running.part or model} decides by the values of computed tensors{where}"
        return NeedsValues(f"{what}, which no graph can hold; {_suggest_help(running, stack, kernel)}", what=what)
    missing = re.search(rf"{model}\.forward\(\) missing \d+ required positional arguments?: (.+)", text)
    if missing:
        return CaptureError(
            f"{model} needs {missing[1]}, for which no example input is known; give path.py:callable, which returns both"
        )
    if len(text) > 200:
        text = text[:200] + "..."
    if "expected scalar type" in text or "Unsupported dtype" in text or "must have the same dtype" in text:
        return CaptureError(f"{model} cannot be run in this type{where}: {text}; try ", named("dtype", "float32"))
    message = f"{model} could not be run on example inputs{where}: {type(error).__name__}: {text.rstrip('.')}"
    if copied:
        message += (
            "; planning runs a copy of the module, of which a table by id(module) or a weak reference knows nothing"
        )
        return NotRunnable(f"{message}: if that is why, or if it needs other inputs, {_BUILDER_HELP}")
    return NotRunnable(
        f"{message}; if it needs other inputs, give path.py:callable, which returns the model and its inputs"
    )


def _suggest_help(running: CurrentCall, stack: Iterable[traceback.FrameSummary], kernel: re.Match[str] | None) -> str:
    masked = any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in pytree.tree_leaves(running.args))
    if running.fn in ("getitem", "setitem") and not masked:
        return "a computed number cannot be an index: use index_select, gather or take_along_dim, which take it as a tensor"
    frames = list(stack)
    if re.search(r"\.item\(|(?<![.\w])float\(", line := format_line(frames)) and not re.search(
        r"\b(if|while|assert)\b", line
    ):
        return "if a number is only looked at (a log), return the tensor, and call .item() outside"
    names = [*([kernel[1]] if kernel else []), *(f.name for f in frames)]
    return next((_HELP[name] for name in names if name in _HELP), _DEFAULT_HELP)
