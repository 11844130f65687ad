"""What a call makes, as global tensors on meta, and whether it can run as planned. Each kind of call is looked at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner_core.core import Op, TensorMeta, Value
from planner_core.models.capture import describe, with_picks
from planner_core.models.hooks import is_inplace, outputs, tensors
from planner_core.runtime.dispatch.local_ops import attention, on_meta
from planner_core.runtime.dispatch.parameters import Parameters
from planner_core.runtime.plan_reader import Row
from planner_core.runtime.record.by_rules import check_by_rules


class WholeResults:
    """The results of calls of the running model, by their signature."""

    def __init__(self, params: Parameters, sizes: tuple[int, ...]) -> None:
        self.params, self.sizes = params, sizes
        self.inferring = False  # global tensors on meta are in use, which take no memory
        self._seen: dict[Any, tuple[list[torch.Tensor], int | None]] = {}
        self._checked: set[Any] = set()

    def of(self, fn: str, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], int | None]:
        """The results with global shapes on meta, or the number of the operand that the call returns unchanged."""
        if fn in SIZED:
            args, kwargs = (*args[:1], *_numbers(args[1:])), _numbers(kwargs)
        if fn == "getitem":
            args = (args[0], _with_bounds(args[1]))
            args = with_picks(args, args)  # the result depends on how many elements a mask picks
        key = (func, _signature(args), _signature(kwargs))
        if key not in self._seen:
            with self._inference():
                self._seen[key] = _infer(fn, func, *on_meta(replaced((args, kwargs), self._without_values)))
        return self._seen[key]

    def check(self, site: str, fn: str, func: Any, args: Any, kwargs: dict[str, Any], row: Row) -> None:
        """Raise PlanMismatch if such a call cannot run by `row`."""
        key = (site, func, _signature(args), _signature(kwargs))
        if key in self._checked:
            return
        self._checked.add(key)
        made, _ = self.of(fn, func, args, kwargs)
        operands = tensors((args, kwargs))
        values = [
            Value(TensorMeta(tuple(t.shape), str(t.dtype).removeprefix("torch.")), "activation")
            for t in (*operands, *made)
        ]
        ids = tuple(range(len(values)))
        if fn in ("getitem", "setitem"):
            args = (args[0], _with_bounds(args[1]), *args[2:])
        if fn in SIZED:
            args, kwargs = (*args[:1], *_numbers(args[1:])), _numbers(kwargs)
        with self._inference():
            moved, moved_kw = replaced((args, kwargs), self._without_values)
            attrs = describe(fn, func, moved, moved_kw, made)
        check_by_rules(Op(site, fn, ids[: len(operands)], ids[len(operands) :], attrs), values, row, self.sizes)

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        self.inferring = True
        try:
            yield
        finally:
            self.inferring = False

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The global tensor on meta, as the model's code sees it: a master weight in float32 computes in the plan's dtype."""
        return meta(tensor).to(self.params.dtype(tensor)) if tensor in self.params else meta(tensor)


def _infer(fn: str, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], int | None]:
    """The results of a call on meta tensors, or the number of the operand that it returns unchanged."""
    operands = tensors((args, kwargs))
    with torch.no_grad():
        out = (attention if fn == "scaled_dot_product_attention" else func)(*args, **kwargs)
    if is_inplace(fn):
        return [operands[0]], None
    if fn != "contiguous":
        unchanged = [i for i, t in enumerate(operands) if out is t]
        if unchanged:
            return [], unchanged[0]
    return outputs(fn, () if fn == "contiguous" else args, out), None


SIZED = (
    "view",
    "reshape",
    "unflatten",
    "expand",
    "broadcast_to",
    "as_strided",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
)
"""Functions that take sizes behind their operand."""


def _numbers(tree: Any) -> Any:
    """Sizes that are tensors of one number as numbers: a shape follows from their values."""
    return replaced(tree, lambda t: t if t.dim() or t.is_meta or t.is_floating_point() else int(t))


def _with_bounds(index: Any) -> Any:
    """An index whose slices end at numbers, not at tensors of one number."""
    if isinstance(index, tuple):
        return tuple(map(_with_bounds, index))
    return _numbers(index) if isinstance(index, slice) else index


def meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form, without values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _signature(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, (tuple, list)):
        return tuple(map(_signature, tree))
    if isinstance(tree, dict):
        return tuple((name, _signature(item)) for name, item in tree.items())
    if isinstance(tree, slice):
        return "slice", _signature((tree.start, tree.stop, tree.step))
    return type(tree), tree if isinstance(tree, (int, float, str, torch.dtype)) else repr(tree)


def replaced(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nested arguments with every tensor replaced, in the order of `tensors`."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [replaced(item, change) for item in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        if type(tree).__module__ == "torch.return_types":  # named results: .values, .indices
            return type(tree)(items)
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {name: replaced(item, change) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(replaced(item, change) for item in (tree.start, tree.stop, tree.step)))
    return tree
