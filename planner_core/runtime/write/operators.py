"""Write one operator for local tensors. The results of all ranks, joined by their placements, are the global result.

Most operators are written unchanged. The rules below write the others. Sizes that the model gives as literals are those of
global tensors. A mean must divide by the global count. If the vocabulary, the batch, the classes or the experts are sharded,
the function must know this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from planner_core.core import Placements, Shard, SitePlan
from planner_core.models.hooks import RECURRENT, draws_dropout_mask
from planner_core.ops import LocalExecution, known_functions, operator
from planner_core.runtime.record import CannotRewrite, MixesSamples, Ref, TapeCall
from planner_core.runtime.write.expressions import WriteLeaf, write_arguments, write_call, write_callee, write_literal
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.source import is_path

RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
EXPANSIONS = ("expand", "expand_as", "broadcast_to")
NEW_TENSORS = ("new_zeros", "new_ones", "new_empty", "new_full")
SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
MEANS = tuple(sorted(name for name in known_functions() if operator(name).local_execution is LocalExecution.MEAN))
UNCHANGED_KINDS = (LocalExecution.AS_IT_IS, LocalExecution.MEMORY)


@dataclass
class LocalCall:
    """One call to write. `texts` are its tensor operands on this rank, as code. `axis` gives the name of a mesh axis in the
    code."""

    layout: PlannedTape
    call: TapeCall
    row: SitePlan
    texts: list[str]
    axis: Callable[[int], str]
    name_object: WriteLeaf
    next_seed: Callable[[], str] = lambda: "seed"
    """Writes the seed of a call that draws random numbers."""
    function: str = ""
    """The function that replaces the model's own, if any."""

    def operand(self, i: int) -> Placements:
        """Return the placements with which the operator takes its i-th tensor operand."""
        return self.row.inputs[i].dst.forward

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Return this rank's shape of the i-th result."""
        return self.layout.local_shape(self.call.outputs[i], self.row.outputs[i].src.forward)

    def given_shape(self, i: int = 0) -> tuple[int, ...]:
        """Return this rank's shape of the i-th operand."""
        return self.layout.local_shape(self.call.inputs[i], self.operand(i))

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """Return the axes that shard `dim`."""
        return self.layout.axes(placements, dim)

    def write_axes(self, axes: list[int]) -> str:
        """Write axes as a list."""
        return f"[{', '.join(map(self.axis, axes))}]"

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """Return an argument by name or position."""
        args = self.call.args
        return self.call.kwargs.get(name, args[position] if position < len(args) else default)

    def unchanged(self, **changed: Any) -> str:
        """Write the call as it is, with some keywords replaced."""
        args, kwargs = self.with_operand_positions()
        if self.function:
            return f"{self.function}({write_arguments(self.call.func, args, {**kwargs, **changed}, self.write_leaf)})"
        return write_call(self.call.func, self.call.fn, args, {**kwargs, **changed}, self.write_leaf)

    def with_operand_positions(self) -> tuple[Any, Any]:
        """The arguments, in which each tensor has its position among the operands."""
        count = iter(range(len(self.texts)))

        def numbered(tree: Any) -> Any:
            if isinstance(tree, Ref):
                return _OperandRef(tree.number, next(count))
            if isinstance(tree, (tuple, list)):
                items = [numbered(i) for i in tree]
                return items if isinstance(tree, list) else tuple(items)
            if isinstance(tree, dict):
                return {k: numbered(v) for k, v in tree.items()}
            if isinstance(tree, slice):
                return slice(*(numbered(i) for i in (tree.start, tree.stop, tree.step)))
            return tree

        return numbered(self.call.args), numbered(self.call.kwargs)

    def write_leaf(self, item: Any) -> str:
        """Write a leaf of the numbered arguments."""
        return self.texts[item.position] if isinstance(item, _OperandRef) else self.name_object(item)


@dataclass(frozen=True)
class _OperandRef(Ref):
    """A tensor operand by its position. One tensor may be taken twice, with different placements."""

    position: int = 0


Rule = Callable[[LocalCall], str]
_RULES: dict[str, Rule] = {}


def write_operator(local: LocalCall) -> str:
    """Write the call on local tensors."""
    fn = local.call.fn
    if fn not in _RULES and operator(fn).local_execution not in UNCHANGED_KINDS and fn != "to":
        raise CannotRewrite(f"{local.call.site}: {fn} has no form for parts of its tensors in generated code")
    return _RULES.get(fn, LocalCall.unchanged)(local)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# --- sizes written as literals ------------------------------------------------------------------------


@_rule(*RESHAPES)
def _reshape(local: LocalCall) -> str:
    if any(isinstance(a, torch.dtype) for a in local.call.args):
        return local.unchanged()
    x, given_shape, result_shape = local.texts[0], local.given_shape(), local.result_shape()
    return write_reshape(x, given_shape, result_shape)


def write_reshape(x: str, old: tuple[int, ...], new: tuple[int, ...]) -> str:
    """Write a reshape from one local shape to another, if possible without naming the number of samples or tokens.

    Example: (8, 16, 64) to (8, 16, 4, 16) changes the last dim only, so it is x.reshape(*x.shape[:2], 4, 16).
    """
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    old_dims, new_dims = (
        old[head : len(old) - tail],
        new[head : len(new) - tail],
    )
    if not old_dims and not new_dims:
        return x
    if not old_dims and new_dims == (1,):
        return f"{x}.unsqueeze({head})"
    if len(new_dims) == 1 and len(old_dims) > 1:
        return f"{x}.flatten({head}, {head + len(old_dims) - 1})" if tail else f"{x}.flatten({head})"
    if is_path(x):
        sizes = [
            *([f"*{x}.shape[:{head}]"] if head else []),
            *map(str, new_dims),
            *([f"*{x}.shape[-{tail}:]"] if tail else []),
        ]
    else:  # an expression, which must be evaluated once
        head, new_dims, sizes = 0, new, list(map(str, new))
    if not head and new_dims and 0 not in old:
        sizes[0] = "-1"  # usually the samples; so the code is right for any number of them
    return f"{x}.reshape({', '.join(sizes)})"


@_rule("getitem")
def _getitem(local: LocalCall) -> str:
    index = local.call.args[1]
    whole = all(isinstance(i, slice) and i.step in (None, 1) for i in (index if isinstance(index, tuple) else (index,)))
    return local.texts[0] if whole and local.given_shape() == local.result_shape() else local.unchanged()


@_rule(*EXPANSIONS)
def _expand(local: LocalCall) -> str:
    given_shape, result_shape = local.given_shape(), local.result_shape()
    grown = len(result_shape) - len(given_shape)
    sizes = [str(n) if i < grown or given_shape[i - grown] != n else "-1" for i, n in enumerate(result_shape)]
    return f"{local.texts[0]}.expand({', '.join(sizes)})"


@_rule("repeat", "tile")
def _repeat(local: LocalCall) -> str:
    """Write the counts of this rank: those of the recording may be of its own samples where the result has all."""
    given_shape, result_shape = local.given_shape(), local.result_shape()
    given_shape = (1,) * (len(result_shape) - len(given_shape)) + tuple(given_shape)
    return f"{local.texts[0]}.repeat({', '.join(str(m // h) for h, m in zip(given_shape, result_shape, strict=True))})"


@_rule(*NEW_TENSORS)
def _new(local: LocalCall) -> str:
    kwargs = {name: value for name, value in local.call.kwargs.items() if name not in ("size", "fill_value")}
    parts = [
        str(tuple(local.result_shape())),
        *(f"{name}={write_literal(value, local.name_object)}" for name, value in kwargs.items()),
    ]
    if local.call.fn == "new_full":
        fill = local.argument("fill_value", 2)
        parts.insert(1, local.texts[1] if isinstance(fill, Ref) else write_literal(fill, local.name_object))
    return f"{local.texts[0]}.{local.call.fn}({', '.join(parts)})"


@_rule(*SPLITS)
def _split(local: LocalCall) -> str:
    dim = local.argument("dim", 2, 0)
    sizes = [local.result_shape(i)[dim] for i in range(len(local.call.outputs))]
    if len(set(sizes)) == 1:
        return f"{local.texts[0]}.chunk({len(sizes)}, {dim})"
    return f"{local.texts[0]}.split({sizes}, {dim})"


@_rule("as_strided")
def _as_strided(local: LocalCall) -> str:
    """Write the sizes of this rank. The strides are those of the recording, so samples must be in the outermost dim.

    The operand must lie in memory as it did there, since a collective may have moved its elements.
    """
    offset, strides = local.argument("storage_offset", 3), local.call.strides
    if local.layout.num_parts > 1 and (strides or local.layout.samples[local.call.inputs[0]] not in (None, 0)):
        raise MixesSamples(f"{local.call.site} has strides that depend on the number of samples")
    rest = f", {offset}" if offset else ""
    x = local.texts[0]
    laid = f"laid_out({x}, {strides})" if strides else f"{x}.contiguous()"
    return f"{laid}.as_strided({local.result_shape()}, {tuple(local.argument('stride', 2))}{rest})"


@_rule("conv1d", "conv2d", "conv3d")
def _conv(local: LocalCall) -> str:
    groups = local.argument("groups", 6, 1)
    if groups == 1 or not local.axes(local.operand(0), 1):
        return local.unchanged()
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    arguments = dict(zip(names, local.call.args, strict=False)) | local.call.kwargs
    arguments["groups"] = groups // math.prod(local.layout.sizes[a] for a in local.axes(local.operand(0), 1))
    order = iter(local.texts)
    parts = {
        k: next(order) if isinstance(v, Ref) else write_literal(v, local.name_object) for k, v in arguments.items()
    }
    first = ", ".join(parts.pop(n) for n in names[:2])
    return f"F.{local.call.fn}({first}, {', '.join(f'{k}={v}' for k, v in parts.items())})"


# --- sums and means -----------------------------------------------------------------------------------


@_rule(*MEANS)
def _mean(local: LocalCall) -> str:
    """Write a mean. If the averaged dim is sharded over n ranks, this rank's term of the global mean is its local mean divided
    by n."""
    split = local.axes(local.operand(0))
    parts = [a for a in local.layout.partial(local.row.outputs[0].src.forward) if a in split]
    if not parts or local.call.kwargs.get("reduction", "mean") != "mean":
        return local.unchanged()
    return f"{local.unchanged()} / {math.prod(local.layout.sizes[a] for a in parts)}"


@_rule("cross_entropy")
def _cross_entropy(local: LocalCall) -> str:
    split, classes = local.axes(local.operand(0)), local.axes(local.operand(0), 1)
    if not split:
        return local.unchanged()
    return _write_loss(local, "cross_entropy", samples=[a for a in split if a not in classes], classes=classes)


@_rule("nll_loss")
def _nll_loss(local: LocalCall) -> str:
    split = local.axes(local.operand(0))
    return _write_loss(local, "nll_loss", samples=split) if split else local.unchanged()


def _write_loss(local: LocalCall, name: str, **split: list[int]) -> str:
    known = (("ignore_index", 4, -100), ("reduction", 6, "mean"), ("label_smoothing", 7, 0.0))
    options = {name: (local.argument(name, at, default), default) for name, at, default in known}
    parts = [f"{k}={v!r}" for k, (v, default) in options.items() if v != default]
    parts += [f"{k}={local.write_axes(axes)}" for k, axes in split.items() if axes]
    return f"{name}({', '.join([*local.texts, *parts])})"


# --- lookups, norms, experts --------------------------------------------------------------------------


@_rule("embedding")
def _embedding(local: LocalCall) -> str:
    rows = local.axes(local.operand(1), 0)
    if local.argument("scale_grad_by_freq", 5, False) and (rows or local.axes(local.operand(0))):
        raise CannotRewrite(
            f"{local.call.site}: scale_grad_by_freq divides a gradient by how often an id occurs in the whole batch, of which each rank "
            "has a part; build the embedding without it, or plan a mesh that does not split the batch"
        )
    if not rows:
        return local.unchanged()
    if local.argument("max_norm", 3) is not None:
        raise CannotRewrite(f"{local.call.site}: embedding with max_norm cannot split its vocabulary")
    padding = local.argument("padding_idx", 2)
    parts = [*local.texts, *([] if padding is None else [f"padding_idx={padding}"]), f"rows={local.write_axes(rows)}"]
    return f"embedding({', '.join(parts)})"


@_rule("histc")
def _histc(local: LocalCall) -> str:
    known = (("bins", 1, 100), ("min", 2, 0), ("max", 3, 0))
    return f"histc({local.texts[0]}, {', '.join(repr(local.argument(*argument)) for argument in known)})"


@_rule("batch_norm")
def _batch_norm(local: LocalCall) -> str:
    samples = local.axes(local.operand(0), 0)
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    arguments = dict(zip(names, local.call.args, strict=False)) | local.call.kwargs
    if not samples or not arguments.get("training", False):
        return local.unchanged()
    order = iter(local.texts)
    parts = {
        k: next(order) if isinstance(v, Ref) else write_literal(v, local.name_object) for k, v in arguments.items()
    }
    first = [parts.get(n, "None") for n in names[:5]]
    options = [f"{n}={parts[n]}" for n in ("momentum", "eps") if n in parts]
    return f"batch_norm({', '.join([*first, *options])}, samples={local.write_axes(samples)})"


@_rule("moe_experts")
def _moe_experts(local: LocalCall) -> str:
    experts = local.axes(local.operand(3), 0)
    if not experts:
        return local.unchanged()
    args, kwargs = local.with_operand_positions()
    layer = write_callee(local.call.func, local.write_leaf)
    given = f"{layer}, {write_arguments(local.call.func, args, kwargs, local.write_leaf)}"
    dispatch = [axis for axis in experts if axis in local.axes(local.operand(0), 0)]
    if dispatch:
        return f"dispatched_experts({given}, dispatch={local.axis(dispatch[0])})"
    return f"own_experts({given}, experts={local.write_axes(experts)})"


@_rule("copy_")
def _copy(local: LocalCall) -> str:
    return f"with_item({local.texts[0]}, ..., {local.texts[1]})"


@_rule("setitem")
def _setitem(local: LocalCall) -> str:
    (target, index, value), _ = local.with_operand_positions()
    return f"with_item({local.write_leaf(target)}, {write_literal(index, local.write_leaf)}, {write_literal(value, local.write_leaf)})"


@_rule("scaled_dot_product_attention")
def _attention(local: LocalCall) -> str:
    p = local.argument("dropout_p", 4, 0.0)
    ring = local.axes(local.operand(1), 2)
    if ring:
        return _write_ring_attention(local, ring, p)
    queries = local.axes(local.operand(0), 2) if local.argument("is_causal", 5, False) else []
    if not p and not queries:
        return local.unchanged()
    parts = [*local.texts, *([f"dropout_p={p}"] if p else [])]
    options = {"is_causal": local.argument("is_causal", 5, False) and not queries}
    options |= {name: local.call.kwargs.get(name) for name in ("scale", "enable_gqa")}
    parts += [f"{name}={write_literal(value, local.name_object)}" for name, value in options.items() if value]
    parts += [f"queries={local.write_axes(queries)}"] if queries else []
    if p:
        split = [a for a, s in enumerate(local.operand(0)) if isinstance(s, Shard) and local.layout.sizes[a] > 1]
        parts += [f"seed={local.next_seed()}", f"split={local.write_axes(split)}"]
    return f"{'attention' if p else 'causal_attention'}({', '.join(parts)})"


def _recurrent(local: LocalCall) -> str:
    """Write recurrent layers. Those that drop values between layers draw masks of this rank's samples."""
    if not draws_dropout_mask(local.call.fn, local.call.args, local.call.kwargs):
        return local.unchanged()
    split = [a for a, s in enumerate(local.operand(0)) if isinstance(s, Shard) and local.layout.sizes[a] > 1]
    return f"masked({local.next_seed()}, {local.write_axes(split)}, DEVICE, lambda: {local.unchanged()})"


for _name in RECURRENT:
    _rule(_name)(_recurrent)


def _write_ring_attention(local: LocalCall, ring: list[int], dropout_p: float) -> str:
    options = {"is_causal": local.argument("is_causal", 5, False), "dropout_p": dropout_p}
    options |= {name: local.call.kwargs.get(name) for name in ("scale", "enable_gqa")}
    parts = [f"{name}={write_literal(value, local.name_object)}" for name, value in options.items() if value]
    return f"ring_attention({', '.join([*local.texts[:3], *parts])}, ring={local.write_axes(ring)})"
