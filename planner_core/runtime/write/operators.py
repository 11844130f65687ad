"""Write one operator for local tensors. The results of all ranks, joined by their placements, are the global result.

Most operators are written unchanged. The rules below write the others. Sizes that the model gives as literals are those of
global tensors. A mean must divide by the global count. If the vocabulary, the batch, the classes or the experts are sharded,
the function must know this rank's part.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from planner_core.core import Placements, SitePlan
from planner_core.models.hooks import RECURRENT, draws_dropout_mask
from planner_core.ops import LocalExecution, known_functions, operator
from planner_core.runtime.mismatch import CannotRewrite, MixesSamples
from planner_core.runtime.record import Ref, TapeCall
from planner_core.runtime.record.tape import map_leaves
from planner_core.runtime.write.expressions import write_arguments, write_call, write_callee
from planner_core.runtime.write.placed_tape import PlannedTape
from planner_core.runtime.write.syntax import WriteLeaf, attribute, is_path, literal, make_call, path, subscript

RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
EXPANSIONS = ("expand", "expand_as", "broadcast_to")
NEW_TENSORS = ("new_zeros", "new_ones", "new_empty", "new_full")
SPLITS = ("split", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split")
MEANS = tuple(sorted(name for name in known_functions() if operator(name).local_execution is LocalExecution.MEAN))
UNCHANGED_KINDS = (LocalExecution.AS_IT_IS, LocalExecution.MEMORY)


@dataclass
class LocalCall:
    """One call to write. `values` are its tensor operands on this rank, as code. `axis` gives the name of a mesh axis in the
    code."""

    layout: PlannedTape
    call: TapeCall
    row: SitePlan
    values: list[ast.expr]
    axis: Callable[[int], str]
    name_object: WriteLeaf
    next_seed: Callable[[], ast.expr] = lambda: path("seed")
    """Writes the seed of a call that draws random numbers."""
    function: str = ""
    """The function that replaces the model's own, if any."""

    def operand(self, i: int) -> Placements:
        """Return the placements with which the operator takes its i-th tensor operand."""
        return self.row.inputs[i].dst.forward

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Return this rank's shape of the i-th result."""
        return self.layout.local_shape(self.call.outputs[i], self.row.outputs[i].src.forward)

    def given_shape(self) -> tuple[int, ...]:
        """Return this rank's shape of the first operand."""
        return self.layout.local_shape(self.call.inputs[0], self.operand(0))

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """Return the axes that shard `dim`."""
        return self.layout.axes(placements, dim)

    def write_axes(self, axes: list[int]) -> ast.expr:
        """Write axes as a list."""
        return literal([path(self.axis(a)) for a in axes])

    def write_options(self, **options: Any) -> dict[str, ast.expr]:
        """Write keyword arguments, without those that are false or empty."""
        return {name: literal(value, self.name_object) for name, value in options.items() if value}

    def method(self, name: str, *args: Any, **kwargs: Any) -> ast.expr:
        """Write a call of a method of the first operand."""
        return make_call(attribute(self.values[0], name), *args, **kwargs)

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """Return an argument by name or position."""
        args = self.call.args
        return self.call.kwargs.get(name, args[position] if position < len(args) else default)

    def arguments_by_name(self, *names: str) -> dict[str, Any]:
        """Return the arguments by name, each tensor as its operand. `names`: those of the function, in order."""
        order = iter(self.values)
        arguments = dict(zip(names, self.call.args, strict=False)) | self.call.kwargs
        return {k: next(order) if isinstance(v, Ref) else v for k, v in arguments.items()}

    def unchanged(self) -> ast.expr:
        """Write the call as it is."""
        args, kwargs = self.with_operand_positions()
        if self.function:
            places, named = write_arguments(self.call.func, args, kwargs, self.write_leaf)
            return make_call(self.function, *places, **named)
        return write_call(self.call.func, self.call.fn, args, kwargs, self.write_leaf)

    def with_operand_positions(self) -> tuple[Any, Any]:
        """Return the arguments, in which each tensor has its position among the operands."""
        count = iter(range(len(self.values)))

        def number_operand(leaf: Any) -> Any:
            return _OperandRef(leaf.number, next(count)) if isinstance(leaf, Ref) else leaf

        return map_leaves(self.call.args, number_operand), map_leaves(self.call.kwargs, number_operand)

    def write_leaf(self, item: Any) -> ast.expr:
        """Write a leaf of the numbered arguments."""
        return self.values[item.position] if isinstance(item, _OperandRef) else self.name_object(item)


@dataclass(frozen=True)
class _OperandRef(Ref):
    """A tensor operand by its position. One tensor may be taken twice, with different placements."""

    position: int = 0


Rule = Callable[[LocalCall], ast.expr]
_RULES: dict[str, Rule] = {}


def write_operator(local: LocalCall) -> ast.expr:
    """Write the call on local tensors."""
    fn = local.call.fn
    if fn not in _RULES and operator(fn).local_execution not in UNCHANGED_KINDS and fn != "to":
        raise CannotRewrite(f"{local.call.site}: {fn} has no form for parts of its tensors in generated code")
    return _RULES.get(fn, LocalCall.unchanged)(local)


def _register_rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# --- sizes written as literals ------------------------------------------------------------------------


@_register_rule(*RESHAPES)
def _reshape(local: LocalCall) -> ast.expr:
    if any(isinstance(a, torch.dtype) for a in local.call.args):
        return local.unchanged()
    x, given_shape, result_shape = local.values[0], local.given_shape(), local.result_shape()
    return write_reshape(x, given_shape, result_shape)


def write_reshape(x: ast.expr, old: tuple[int, ...], new: tuple[int, ...]) -> ast.expr:
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
        return make_call(attribute(x, "unsqueeze"), head)
    if len(new_dims) == 1 and len(old_dims) > 1:
        return make_call(attribute(x, "flatten"), head, *([head + len(old_dims) - 1] if tail else []))
    sizes: list[Any] = list(new_dims)
    if is_path(x):
        shape = attribute(x, "shape")
        if head:
            sizes.insert(0, _unpack_argument(subscript(shape, slice(head))))
        if tail:
            sizes.append(_unpack_argument(subscript(shape, slice(-tail, None))))
    else:  # an expression, which must be evaluated once
        head, new_dims, sizes = 0, new, list(new)
    if not head and new_dims and 0 not in old:
        sizes[0] = -1  # usually the samples; so the code is right for any number of them
    return make_call(attribute(x, "reshape"), *sizes)


def _unpack_argument(value: ast.expr) -> ast.expr:
    return ast.Starred(value, ast.Load())


@_register_rule("getitem")
def _getitem(local: LocalCall) -> ast.expr:
    index = local.call.args[1]
    whole = all(isinstance(i, slice) and i.step in (None, 1) for i in (index if isinstance(index, tuple) else (index,)))
    return local.values[0] if whole and local.given_shape() == local.result_shape() else local.unchanged()


@_register_rule(*EXPANSIONS)
def _expand(local: LocalCall) -> ast.expr:
    given_shape, result_shape = local.given_shape(), local.result_shape()
    grown = len(result_shape) - len(given_shape)
    sizes = [n if i < grown or given_shape[i - grown] != n else -1 for i, n in enumerate(result_shape)]
    return local.method("expand", *sizes)


@_register_rule("repeat", "tile")
def _repeat(local: LocalCall) -> ast.expr:
    """Write the counts of this rank: those of the recording may be of its own samples where the result has all."""
    given_shape, result_shape = local.given_shape(), local.result_shape()
    given_shape = (1,) * (len(result_shape) - len(given_shape)) + tuple(given_shape)
    return local.method("repeat", *(m // h for h, m in zip(given_shape, result_shape, strict=True)))


@_register_rule(*NEW_TENSORS)
def _new(local: LocalCall) -> ast.expr:
    options = {
        k: literal(v, local.name_object) for k, v in local.call.kwargs.items() if k not in ("size", "fill_value")
    }
    fill = []
    if local.call.fn == "new_full":
        value = local.argument("fill_value", 2)
        fill = [local.values[1] if isinstance(value, Ref) else literal(value, local.name_object)]
    return local.method(local.call.fn, tuple(local.result_shape()), *fill, **options)


@_register_rule(*SPLITS)
def _split(local: LocalCall) -> ast.expr:
    dim = local.argument("dim", 2, 0)
    # A fused dim is sharded part by part, so a rank's pieces have the model's proportions and not its sizes.
    sizes = [local.result_shape(i)[dim] for i in range(len(local.call.outputs))]
    if len(set(sizes)) == 1:
        return local.method("chunk", len(sizes), dim)
    return local.method("split", sizes, dim)


@_register_rule("as_strided")
def _as_strided(local: LocalCall) -> ast.expr:
    """Write the sizes of this rank. The strides are those of the recording, so samples must be in the outermost dim.

    The operand must lie in memory as it did there, since a collective may have moved its elements.
    """
    offset, strides = local.argument("storage_offset", 3), local.call.strides
    if local.layout.num_parts > 1 and (strides or local.layout.samples[local.call.inputs[0]] not in (None, 0)):
        raise MixesSamples(f"{local.call.site} has strides that depend on the number of samples")
    laid = make_call("laid_out", local.values[0], strides) if strides else local.method("contiguous")
    sizes, steps = tuple(local.result_shape()), tuple(local.argument("stride", 2))
    return make_call(attribute(laid, "as_strided"), sizes, steps, *([offset] if offset else []))


@_register_rule("conv1d", "conv2d", "conv3d")
def _conv(local: LocalCall) -> ast.expr:
    groups = local.argument("groups", 6, 1)
    if groups == 1 or not local.axes(local.operand(0), 1):
        return local.unchanged()
    arguments = local.arguments_by_name("input", "weight", "bias", "stride", "padding", "dilation")
    # Channels of a depthwise convolution are sharded with their kernels, one group each.
    arguments["groups"] = groups // math.prod(local.layout.sizes[a] for a in local.axes(local.operand(0), 1))
    x, weight = arguments.pop("input"), arguments.pop("weight")
    return make_call(
        f"F.{local.call.fn}", x, weight, **{k: literal(v, local.name_object) for k, v in arguments.items()}
    )


# --- sums and means -----------------------------------------------------------------------------------


@_register_rule(*MEANS)
def _mean(local: LocalCall) -> ast.expr:
    """Write a mean. If the averaged dim is sharded over n ranks, this rank's term of the global mean is its local mean divided
    by n."""
    split = local.axes(local.operand(0))
    parts = [a for a in local.layout.partial(local.row.outputs[0].src.forward) if a in split]
    if not parts or local.call.kwargs.get("reduction", "mean") != "mean":
        return local.unchanged()
    # Shards are of equal length, so the mean of all is the mean of the ranks' means: of 1 3 | 5 7 it is (2 + 6) / 2 = 4.
    return ast.BinOp(local.unchanged(), ast.Div(), literal(math.prod(local.layout.sizes[a] for a in parts)))


@_register_rule("cross_entropy")
def _cross_entropy(local: LocalCall) -> ast.expr:
    split, classes = local.axes(local.operand(0)), local.axes(local.operand(0), 1)
    if not split:
        return local.unchanged()
    return _write_loss(local, "cross_entropy", samples=[a for a in split if a not in classes], classes=classes)


@_register_rule("nll_loss")
def _nll_loss(local: LocalCall) -> ast.expr:
    split = local.axes(local.operand(0))
    return _write_loss(local, "nll_loss", samples=split) if split else local.unchanged()


def _write_loss(local: LocalCall, name: str, **split: list[int]) -> ast.expr:
    known = (("ignore_index", 4, -100), ("reduction", 6, "mean"), ("label_smoothing", 7, 0.0))
    options = {name: (local.argument(name, at, default), default) for name, at, default in known}
    changed = {k: v for k, (v, default) in options.items() if v != default}
    return make_call(name, *local.values, **changed, **{k: local.write_axes(axes) for k, axes in split.items() if axes})


# --- lookups, norms, experts --------------------------------------------------------------------------


@_register_rule("embedding")
def _embedding(local: LocalCall) -> ast.expr:
    rows = local.axes(local.operand(1), 0)
    if not rows:
        return local.unchanged()
    padding = local.argument("padding_idx", 2)
    options = {} if padding is None else {"padding_idx": padding}
    return make_call("embedding", *local.values, **options, rows=local.write_axes(rows))


@_register_rule("histc")
def _histc(local: LocalCall) -> ast.expr:
    known = (("bins", 1, 100), ("min", 2, 0), ("max", 3, 0))
    return make_call("histc", local.values[0], *(local.argument(*argument) for argument in known))


@_register_rule("batch_norm")
def _batch_norm(local: LocalCall) -> ast.expr:
    samples = local.axes(local.operand(0), 0)
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    arguments = local.arguments_by_name(*names)
    if not samples or not arguments.get("training", False):
        return local.unchanged()
    options = {n: arguments[n] for n in ("momentum", "eps") if n in arguments}
    return make_call("batch_norm", *map(arguments.get, names[:5]), **options, samples=local.write_axes(samples))


@_register_rule("moe_experts")
def _moe_experts(local: LocalCall) -> ast.expr:
    experts = local.axes(local.operand(3), 0)
    if not experts:
        return local.unchanged()
    args, kwargs = local.with_operand_positions()
    layer = write_callee(local.call.func, local.write_leaf)
    places, named = write_arguments(local.call.func, args, kwargs, local.write_leaf)
    dispatch = [axis for axis in experts if axis in local.axes(local.operand(0), 0)]
    if dispatch:
        return make_call("dispatched_experts", layer, *places, **named, dispatch=path(local.axis(dispatch[0])))
    return make_call("own_experts", layer, *places, **named, experts=local.write_axes(experts))


@_register_rule("copy_")
def _copy(local: LocalCall) -> ast.expr:
    return make_call("with_item", local.values[0], ..., local.values[1])


@_register_rule("setitem")
def _setitem(local: LocalCall) -> ast.expr:
    (target, index, value), _ = local.with_operand_positions()
    return make_call("with_item", *(literal(item, local.write_leaf) for item in (target, index, value)))


@_register_rule("scaled_dot_product_attention")
def _attention(local: LocalCall) -> ast.expr:
    p = local.argument("dropout_p", 4, 0.0)
    ring = local.axes(local.operand(1), 2)
    if ring:
        return _write_ring_attention(local, ring, p)
    queries = local.axes(local.operand(0), 2) if local.argument("is_causal", 5, False) else []
    if not p and not queries:
        return local.unchanged()
    scale, grouped = local.call.kwargs.get("scale"), local.call.kwargs.get("enable_gqa")
    causal = local.argument("is_causal", 5, False) and not queries
    options = local.write_options(dropout_p=p, is_causal=causal, scale=scale, enable_gqa=grouped)
    options |= {"queries": local.write_axes(queries)} if queries else {}
    if p:
        options |= {"seed": local.next_seed(), "split": local.write_axes(local.axes(local.operand(0)))}
    return make_call("attention" if p else "causal_attention", *local.values, **options)


def _recurrent(local: LocalCall) -> ast.expr:
    """Write recurrent layers. Those that drop values between layers draw masks of this rank's samples."""
    if not draws_dropout_mask(local.call.fn, local.call.args, local.call.kwargs):
        return local.unchanged()
    draw = ast.Lambda(ast.arguments([], [], None, [], [], None, []), local.unchanged())
    return make_call("masked", local.next_seed(), local.write_axes(local.axes(local.operand(0))), path("DEVICE"), draw)


for _name in RECURRENT:
    _register_rule(_name)(_recurrent)


def _write_ring_attention(local: LocalCall, ring: list[int], dropout_p: float) -> ast.expr:
    scale, grouped = local.call.kwargs.get("scale"), local.call.kwargs.get("enable_gqa")
    causal = local.argument("is_causal", 5, False)
    options = local.write_options(is_causal=causal, dropout_p=dropout_p, scale=scale, enable_gqa=grouped)
    return make_call("ring_attention", *local.values[:3], **options, ring=local.write_axes(ring))
