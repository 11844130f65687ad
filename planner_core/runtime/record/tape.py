"""The recording of a forward pass: numbered tensors, and the calls that made them, with their arguments as templates.

In a template a `Ref` to its number replaces every tensor of an argument, and `DEVICE` every device. So a call can be written as
code for one rank's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from planner_core.core import Value, differentiable_inputs

PARAMETER, INPUT, BUFFER, LITERAL, CONSTANT, COMPUTED = (
    "parameter",
    "input",
    "buffer",
    "literal",
    "constant",
    "computed",
)
"""Kinds of tensors. `constant`: computed, but not from a parameter. `literal`: a tensor that the model's code holds."""
TapeCallKind: TypeAlias = Literal["op", "constant", "dropout", "guard"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor in a template, by its number."""

    number: int


class _Device:
    """The place of a device in a template: the device on which this rank runs."""

    def __repr__(self) -> str:
        return "DEVICE"


DEVICE = _Device()


@dataclass(slots=True)
class TapeTensor:
    """One numbered tensor. `name` is that of a parameter, buffer or input; `value` that of a literal.

    `varies`: it depends on inputs, buffers or random numbers, so every pass computes it. `grad`: a gradient flows to it.
    `root`: the tensor whose memory it shares.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    grad: bool = False
    varies: bool = False
    root: int = -1
    value: torch.Tensor | None = None


@dataclass(slots=True)
class TapeCall:
    """One call. `kind`: "op" (it has a row in the plan, by `site`), "dropout", "constant" or "guard".

    `inputs`: the tensor operands, in the order of the plan's row. `outputs`: the tensors that it made. A guard is a question
    about a constant; its `answer` decided which path the model's code took. `names`: the names that the model's own line gives
    to the result. `line`: the place of that line. `scope`: the module call.
    """

    kind: TapeCallKind
    fn: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    site: str = ""
    scope: str = ""
    names: tuple[str, ...] = ()
    line: str = ""
    answer: Any = None
    stops: bool = False
    """Whether it was called under torch.no_grad."""
    saved: tuple[int, ...] = ()
    """The tensors that autograd saves for its backward."""
    strides: tuple[int, ...] = ()
    """The strides of the operand of `as_strided`, unless it is contiguous."""
    attrs: Mapping[str, Any] | None = None
    """What a rule needs in addition to its operands: of an op, and of a constant that may mix samples."""
    shape: Any = None
    """The result of the call as a template, in which each tensor is replaced by its position among the outputs."""

    def gives_gradient(self) -> list[int]:
        """Return the operands to which its backward gives a gradient, if they can have one."""
        return differentiable_inputs(self.inputs, self.attrs or {})


@dataclass(slots=True)
class Tape:
    """A whole forward pass. `arguments` is the template of the model's arguments, `result` that of what it returned."""

    tensors: list[TapeTensor] = field(default_factory=list)
    calls: list[TapeCall] = field(default_factory=list)
    arguments: Any = None
    result: Any = None
    values: Sequence[Value] = ()
    """The tensors as a rule takes them."""
    fixed_values: dict[int, torch.Tensor] = field(default_factory=dict)
    """The values of constants that depend neither on inputs nor on random numbers, such as positions."""
    buffer_versions: set[int] = field(default_factory=set)
    """The values that constants have written into whole buffers. Each is a tensor of its own, so that operators may read the
    one before."""
    fed: set[int] = field(default_factory=set)
    """The constants that depend on inputs or random numbers."""
    received: tuple[int, ...] = ()
    """If the tape is one stage of a model: the computed tensors that come from the stage before."""

    def results(self) -> list[int]:
        """Return the numbers of the tensors that the model returns, each once."""
        leaves = pytree.tree_leaves(self.result, is_leaf=lambda x: isinstance(x, Ref))
        return list(dict.fromkeys(leaf.number for leaf in leaves if isinstance(leaf, Ref)))

    def views(self, call: TapeCall, number: int) -> bool:
        """Return whether a call makes a view of a tensor."""
        return any(self.tensors[n].root == self.tensors[number].root for n in call.outputs)


def refs(tree: Any) -> Iterator[int]:
    """Yield the numbers of all tensors in a template, in order."""
    if isinstance(tree, Ref):
        yield tree.number
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from refs(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from refs(item)
    elif isinstance(tree, slice):
        yield from refs((tree.start, tree.stop, tree.step))


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same nested arguments with `change` applied to every leaf."""
    if isinstance(tree, torch.Size):  # code writes it as a plain tuple
        return tuple(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_leaves(item, change) for item in tree]
        if hasattr(tree, "_fields"):  # a named tuple takes its fields one by one
            return type(tree)(*items)
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {name: map_leaves(item, change) for name, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_leaves(item, change) for item in (tree.start, tree.stop, tree.step)))
    return change(tree)
