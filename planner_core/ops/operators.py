"""The value `Operator`: all that the planner knows of one torch function.

The catalogue holds one `Operator` for each function; `registry.operator(fn)` finds it by any of its spellings. Three things need
torch, so they are in modules that import it, and tests hold them complete: how a spelling is recognised in a running model
(`models/hooks/callsites.py`), how an ATen call is written in Python (`models/exported/aten.py`), and how the operator runs on one
GPU's part of its tensors, if that is not the function itself (`runtime/write/operators.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from planner_core.core import Attr, Op
from planner_core.ops.rules import RuleFn, Shapes, unknown
from planner_core.ops.work import WorkFn


class Kind(StrEnum):
    """The kind of work that an operator does."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    EXPERTS = "experts"
    LOOKUP = "lookup"
    SCAN = "scan"
    NORM = "norm"
    LOSS = "loss"
    VIEW = "view"
    MOVE = "move"  # shapes, joins and rearranges elements
    INDEX = "index"  # picks or writes elements
    CREATE = "create"  # makes a tensor like another
    CAST = "cast"
    ELEMENTWISE = "elementwise"
    RANDOM = "random"
    ALONG = "along"  # works along some dims: reductions, softmax, sort, Fourier transforms
    POOL = "pool"
    UNKNOWN = "unknown"


FLOPS_BOUND_KINDS = frozenset({Kind.PRODUCT, Kind.CONVOLUTION, Kind.ATTENTION, Kind.EXPERTS, Kind.SCAN})
"""Kinds whose time follows from FLOPs. An operator of such a kind without `work` raises an error."""
GROUP_LEADING_KINDS = FLOPS_BOUND_KINDS | {Kind.LOOKUP, Kind.NORM, Kind.LOSS}
"""Kinds that lead a group of their own (see `grouping`)."""


class CallDescription(StrEnum):
    """How capture describes a call beside its operands (see `models/capture/attributes.py`)."""

    BY_ARGUMENTS = "arguments"
    BY_SHAPES = "shapes"  # the shapes of the results are enough
    BY_ORDER = "order"  # `dims`: the dim of the operand that each dim of the result is
    BY_INDEX = "index"  # `index`: one item for each dim, in full
    BY_SIZES = "sizes"  # `dim` and the `sizes` of the pieces
    BY_DIM = "dim"  # `dim` alone
    BY_NEW_DIM = "new dim"  # `dim` of the result
    BY_SCALAR = "scalar"  # the number in place of an operand is called `scalar`


class LocalExecution(StrEnum):
    """How an op runs on one GPU's part of its tensors. All but the first have a function in `runtime/write/operators.py`."""

    AS_IT_IS = "as it is"
    SIZES = "sizes"  # sizes written in the call are those of whole tensors
    MEAN = "mean"  # divides by the number of elements of the whole tensor
    PART = "part"  # must know which part of the whole tensor it holds
    EXCHANGE = "exchange"  # sends messages itself
    MEMORY = "memory"  # the same numbers, but with the memory or the types of a GPU's kernel


@dataclass(frozen=True, slots=True)
class LocalBytes:
    """The bytes of one op on one GPU: of its operands as it takes them, and of its results as it makes them.

    `item_bytes`: bytes of one element of each operand. `splits`: the names of the dims that are split. `grads`: which operands get
    a gradient. `whole`: the global shapes of its operands, `shapes`: those on one GPU. `load`: how many times the mean the fullest GPU
    gets of what is dealt out.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    item_bytes: tuple[int, ...]
    splits: frozenset[str]
    grads: tuple[bool, ...]
    whole: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    load: float = 1.0


BytesFn: TypeAlias = Callable[[LocalBytes], int]
WHOLE_LOGITS = "whole logits"
"""The attribute of a loss that every tensor-parallel rank computes of all logits."""
AS_RUN = "as run"
"""The attribute of an op that runs otherwise than the model's code has it: how (`cost.compute.as_run`)."""


def operand_bytes(count: int) -> BytesFn:
    """Return the bytes of `count` tensors of the first operand's size."""
    return lambda local: count * local.ins[0]


SavedSplitFn: TypeAlias = Callable[[str, tuple[int, ...], Shapes], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One torch function: how it may be sharded, what it costs, what is kept for its backward, how it is written and shown.

    name: the canonical name, as `models/hooks/callsites.py` gives it. The in-place form has `_` after the name.
    rule: the strategies along one mesh axis.
    spellings: other names of the same function: methods, operators of Python, ATen ops.
    arguments: the names of positional arguments, if torch's own signature does not have them.
    defaults: arguments that a call may leave out and that the rule needs; `default_dim` is that of `dim`.
    ignored: arguments that do not matter here.
    work: the kernels; None for an operator that is bound by memory.
    lookup_argument: the argument of which only the looked-up rows are read.
    memory_passes: four numbers of passes over memory: forward and backward run by itself, then forward and backward fused. They are
        given if they do not follow from operands and results (see `traffic`). They count passes over the result of a lookup, and
        over the first operand of any other operator.
    copies_when: which calls of a view (kind VIEW, which takes no time) copy nevertheless; None: none.
    passes_gradient_through: whether an operand's gradient is the gradient of the result, the same tensor.
    splits_saved: whether a split also splits a tensor that autograd keeps beside operands and results; None: it
        does. Arguments: the name of the split, the shape of that tensor, shapes of the operands.
    extra_saved_bytes: bytes that are kept for backward beside operands and results; replaces what capture saw.
    forward_workspace_bytes: bytes that forward uses for a moment, beside operands, results and what it keeps.
    backward_workspace_bytes: bytes that backward uses for a moment, beside the gradients that it takes and makes.
    is_logits_loss: whether it is a loss of logits that the model also returns.
    chunkable: whether it may make its result in parts of the last dim, one after the other (`Workload.chunks`).
    local_execution: how it runs on one GPU's part of its tensors.
    leads_group: whether it leads a group of its own; None: its kind decides.
    title: its name for people; "": `name`.
    """

    name: str
    kind: Kind
    rule: RuleFn
    spellings: tuple[str, ...] = ()
    arguments: str = ""
    defaults: Mapping[str, Attr] = field(default_factory=dict)
    default_dim: int | None = None
    ignored: tuple[str, ...] = ()
    described_by: CallDescription = CallDescription.BY_ARGUMENTS
    work: WorkFn | None = None
    lookup_argument: str = ""
    memory_passes: tuple[float, float, float, float] | None = None
    copies_when: Callable[[Op], bool] | None = None
    passes_gradient_through: bool = False
    splits_saved: SavedSplitFn | None = None
    extra_saved_bytes: BytesFn | None = None
    forward_workspace_bytes: BytesFn | None = None
    backward_workspace_bytes: BytesFn | None = None
    local_execution: LocalExecution = LocalExecution.AS_IT_IS
    is_logits_loss: bool = False
    chunkable: bool = False
    leads_group: bool | None = None
    title: str = ""

    def __post_init__(self) -> None:
        if self.kind in FLOPS_BOUND_KINDS and self.work is None:
            raise ValueError(
                f"{self.name} is of kind {self.kind} and says no kernels, so its FLOPs would count as zero; give `work`"
            )

    @property
    def is_known(self) -> bool:
        """Whether the catalogue has it."""
        return self.kind is not Kind.UNKNOWN

    @property
    def is_heavy(self) -> bool:
        """Whether it leads a group of its own: a product, a lookup, a norm, attention, a scan or a loss."""
        return self.kind in GROUP_LEADING_KINDS if self.leads_group is None else self.leads_group

    @property
    def plain_title(self) -> str:
        """Its name for people."""
        return self.title or self.name.strip("_").replace("_", " ")


def operators(names: str, **common: Any) -> tuple[Operator, ...]:
    """One operator for each of `names` (separated by blanks). They differ only in the name."""
    return tuple(Operator(name=name, **common) for name in names.split())


def unknown_operator(fn: str) -> Operator:
    """Return the operator of a function that the catalogue lacks. It runs Replicate on every GPU, and the report lists it."""
    return Operator(name=fn, kind=Kind.UNKNOWN, rule=unknown)


def writes_in_place(fn: str) -> bool:
    """Return whether a function (by canonical name) writes its first operand: `add_`, `setitem`."""
    return fn == "setitem" or (fn.endswith("_") and not fn.endswith("__"))
