"""Write one operator for local tensors. The results of all ranks, joined by their placements, are the global result.

Most operators are written unchanged. Those below need more. If sizes are literals, they are those of the global tensors. A mean
must divide by the global count. If the vocabulary, batch, classes or experts are sharded, the function must know this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from planner_core.core import Placements, Shard, SitePlan
from planner_core.models.hooks import RECURRENT, draws_dropout_mask
from planner_core.ops import Local, known_functions, operator
from planner_core.runtime.record import CannotRewrite, MixesSamples, Ref, TapeCall
from planner_core.runtime.write.expressions import WriteLeaf, write_call, write_literal
from planner_core.runtime.write.placed_tape import PlannedTape

RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
EXPANSIONS = ("expand", "expand_as", "broadcast_to")
NEW_TENSORS = ("new_zeros", "new_ones", "new_empty", "new_full")
SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split")
MEANS = tuple(sorted(name for name in known_functions() if operator(name).local is Local.MEAN))
UNCHANGED_KINDS = (Local.AS_IT_IS, Local.MEMORY)


@dataclass
class LocalCall:
    """One call to write. `texts` are its tensor operands on this rank, as code; `axis` gives the name of a mesh axis in the code."""

    layout: PlannedTape
    call: TapeCall
    row: SitePlan
    texts: list[str]
    axis: Callable[[int], str]
    foreign: WriteLeaf

    def operand(self, i: int) -> Placements:
        """Placements with which the operator takes its i-th tensor operand."""
        return self.row.inputs[i].dst.forward

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """This rank's shape of the i-th result."""
        return self.layout.local(self.call.outputs[i], self.row.outputs[i].src.forward)

    def given(self, i: int = 0) -> tuple[int, ...]:
        """This rank's shape of the i-th operand."""
        return self.layout.local(self.call.inputs[i], self.operand(i))

    def axes(self, placements: Placements, dim: int | None = None) -> list[int]:
        """The axes that shard `dim`."""
        return self.layout.axes(placements, dim)

    def named(self, axes: list[int]) -> str:
        """The axes as the text of a list."""
        return f"[{', '.join(map(self.axis, axes))}]"

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """An argument by name or place."""
        args = self.call.args
        return self.call.kwargs.get(name, args[position] if position < len(args) else default)

    def plain(self, **changed: Any) -> str:
        """The text of the call with some keywords changed."""
        args, kwargs = self.numbered()
        return write_call(self.call.func, self.call.fn, args, {**kwargs, **changed}, self.leaf)

    def numbered(self) -> tuple[Any, Any]:
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

    def leaf(self, item: Any) -> str:
        """The text of a leaf of the numbered arguments."""
        return self.texts[item.position] if isinstance(item, _OperandRef) else self.foreign(item)


@dataclass(frozen=True)
class _OperandRef(Ref):
    """A tensor operand by its position: one tensor may be taken twice, with different placements."""

    position: int = 0


Rule = Callable[[LocalCall], str]
_RULES: dict[str, Rule] = {}


def write_operator(local: LocalCall) -> str:
    """The call on local tensors."""
    fn = local.call.fn
    if fn not in _RULES and operator(fn).local not in UNCHANGED_KINDS and fn != "to":
        raise CannotRewrite(f"{local.call.site}: {fn} has no form for parts of its tensors in generated code")
    return _RULES.get(fn, LocalCall.plain)(local)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# --- sizes written as literals ------------------------------------------------------------------------


@_rule(*RESHAPES)
def _reshape(local: LocalCall) -> str:
    if any(isinstance(a, torch.dtype) for a in local.call.args):
        return local.plain()
    x, had, made = local.texts[0], local.given(), local.shape()
    return write_reshape(x, had, made)


def write_reshape(x: str, had: tuple[int, ...], made: tuple[int, ...]) -> str:
    """The text of a reshape from one local shape to another. If possible it does not name the number of samples or tokens."""
    same = 0
    while same < min(len(had), len(made)) and had[same] == made[same]:
        same += 1
    behind = 0
    while behind < min(len(had), len(made)) - same and had[-1 - behind] == made[-1 - behind]:
        behind += 1
    cut, new = had[same : len(had) - behind], made[same : len(made) - behind]
    if not cut and not new:
        return x
    if not cut and new == (1,):
        return f"{x}.unsqueeze({same})"
    if len(new) == 1 and len(cut) > 1:
        return f"{x}.flatten({same}, {same + len(cut) - 1})" if behind else f"{x}.flatten({same})"
    if x.replace(".", "").isidentifier():
        sizes = [
            *([f"*{x}.shape[:{same}]"] if same else []),
            *map(str, new),
            *([f"*{x}.shape[-{behind}:]"] if behind else []),
        ]
    else:  # an expression, which must be evaluated once
        same, new, sizes = 0, made, list(map(str, made))
    if not same and new and 0 not in had:
        sizes[0] = "-1"  # usually the samples; so the code is right for any number of them
    return f"{x}.reshape({', '.join(sizes)})"


@_rule("getitem")
def _getitem(local: LocalCall) -> str:
    index = local.call.args[1]
    whole = all(isinstance(i, slice) and i.step in (None, 1) for i in (index if isinstance(index, tuple) else (index,)))
    return local.texts[0] if whole and local.given() == local.shape() else local.plain()


@_rule(*EXPANSIONS)
def _expand(local: LocalCall) -> str:
    had, made = local.given(), local.shape()
    grown = len(made) - len(had)
    sizes = [str(n) if i < grown or had[i - grown] != n else "-1" for i, n in enumerate(made)]
    return f"{local.texts[0]}.expand({', '.join(sizes)})"


@_rule("repeat", "tile")
def _repeat(local: LocalCall) -> str:
    """The counts are this rank's: those of the recording are of its own samples, also where the result is whole."""
    had, made = local.given(), local.shape()
    had = (1,) * (len(made) - len(had)) + tuple(had)
    return f"{local.texts[0]}.repeat({', '.join(str(m // h) for h, m in zip(had, made, strict=True))})"


@_rule(*NEW_TENSORS)
def _new(local: LocalCall) -> str:
    kwargs = {name: value for name, value in local.call.kwargs.items() if name not in ("size", "fill_value")}
    shown = [
        str(tuple(local.shape())),
        *(f"{name}={write_literal(value, local.foreign)}" for name, value in kwargs.items()),
    ]
    if local.call.fn == "new_full":
        fill = local.argument("fill_value", 2)
        shown.insert(1, local.texts[1] if isinstance(fill, Ref) else write_literal(fill, local.foreign))
    return f"{local.texts[0]}.{local.call.fn}({', '.join(shown)})"


@_rule(*SPLITS)
def _split(local: LocalCall) -> str:
    dim = local.argument("dim", 2, 0)
    sizes = [local.shape(i)[dim] for i in range(len(local.call.outputs))]
    if len(set(sizes)) == 1:
        return f"{local.texts[0]}.chunk({len(sizes)}, {dim})"
    return f"{local.texts[0]}.split({sizes}, {dim})"


@_rule("as_strided")
def _as_strided(local: LocalCall) -> str:
    """The sizes are this rank's. Strides are those of the recording, so samples must be in the outermost dim, and the operand must lie in
    memory as it did there: a collective may have moved its elements."""
    offset, strides = local.argument("storage_offset", 3), local.call.strides
    if local.layout.num_parts > 1 and (strides or local.layout.samples[local.call.inputs[0]] not in (None, 0)):
        raise MixesSamples(f"{local.call.site} has strides that depend on the number of samples")
    rest = f", {offset}" if offset else ""
    x = local.texts[0]
    laid = f"laid_out({x}, {strides})" if strides else f"{x}.contiguous()"
    return f"{laid}.as_strided({local.shape()}, {tuple(local.argument('stride', 2))}{rest})"


@_rule("conv1d", "conv2d", "conv3d")
def _conv(local: LocalCall) -> str:
    groups = local.argument("groups", 6, 1)
    if groups == 1 or not local.axes(local.operand(0), 1):
        return local.plain()
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    given = dict(zip(names, local.call.args, strict=False)) | local.call.kwargs
    given["groups"] = groups // math.prod(local.layout.sizes[a] for a in local.axes(local.operand(0), 1))
    order = iter(local.texts)
    shown = {k: next(order) if isinstance(v, Ref) else write_literal(v, local.foreign) for k, v in given.items()}
    first = ", ".join(shown.pop(n) for n in names[:2])
    return f"F.{local.call.fn}({first}, {', '.join(f'{k}={v}' for k, v in shown.items())})"


# --- sums and means -----------------------------------------------------------------------------------


@_rule(*MEANS)
def _mean(local: LocalCall) -> str:
    """If the averaged dim is sharded over n ranks, this rank's term of the global mean is its local mean divided by n."""
    split = local.axes(local.operand(0))
    parts = [a for a in local.layout.partial(local.row.outputs[0].src.forward) if a in split]
    if not parts or local.call.kwargs.get("reduction", "mean") != "mean":
        return local.plain()
    return f"{local.plain()} / {math.prod(local.layout.sizes[a] for a in parts)}"


@_rule("cross_entropy")
def _cross_entropy(local: LocalCall) -> str:
    split, classes = local.axes(local.operand(0)), local.axes(local.operand(0), 1)
    if not split:
        return local.plain()
    return _write_loss(local, "cross_entropy", samples=[a for a in split if a not in classes], classes=classes)


@_rule("nll_loss")
def _nll_loss(local: LocalCall) -> str:
    split = local.axes(local.operand(0))
    return _write_loss(local, "nll_loss", samples=split) if split else local.plain()


def _write_loss(local: LocalCall, name: str, **split: list[int]) -> str:
    known = (("ignore_index", 4, -100), ("reduction", 6, "mean"), ("label_smoothing", 7, 0.0))
    options = {name: (local.argument(name, at, default), default) for name, at, default in known}
    shown = [f"{k}={v!r}" for k, (v, default) in options.items() if v != default]
    shown += [f"{k}={local.named(axes)}" for k, axes in split.items() if axes]
    return f"{name}({', '.join([*local.texts, *shown])})"


# --- lookups, norms, experts --------------------------------------------------------------------------


@_rule("embedding")
def _embedding(local: LocalCall) -> str:
    rows = local.axes(local.operand(1), 0)
    if not rows:
        return local.plain()
    if local.argument("max_norm", 3) is not None:
        raise CannotRewrite(f"{local.call.site}: embedding with max_norm cannot split its vocabulary")
    padding = local.argument("padding_idx", 2)
    shown = [*local.texts, *([] if padding is None else [f"padding_idx={padding}"]), f"rows={local.named(rows)}"]
    return f"embedding({', '.join(shown)})"


@_rule("histc")
def _histc(local: LocalCall) -> str:
    known = (("bins", 1, 100), ("min", 2, 0), ("max", 3, 0))
    return f"histc({local.texts[0]}, {', '.join(repr(local.argument(*argument)) for argument in known)})"


@_rule("batch_norm")
def _batch_norm(local: LocalCall) -> str:
    samples = local.axes(local.operand(0), 0)
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, local.call.args, strict=False)) | local.call.kwargs
    if not samples or not given.get("training", False):
        return local.plain()
    order = iter(local.texts)
    shown = {k: next(order) if isinstance(v, Ref) else write_literal(v, local.foreign) for k, v in given.items()}
    first = [shown.get(n, "None") for n in names[:5]]
    options = [f"{n}={shown[n]}" for n in ("momentum", "eps") if n in shown]
    return f"batch_norm({', '.join([*first, *options])}, samples={local.named(samples)})"


@_rule("moe_experts")
def _moe_experts(local: LocalCall) -> str:
    experts = local.axes(local.operand(3), 0)
    if not experts:
        return local.plain()
    inner = local.plain()
    name, _, rest = inner.partition("(")
    dispatch = [axis for axis in experts if axis in local.axes(local.operand(0), 0)]
    if dispatch:
        return f"dispatched_experts({name}, {rest[:-1]}, dispatch={local.axis(dispatch[0])})"
    return f"own_experts({name}, {rest[:-1]}, experts={local.named(experts)})"


@_rule("copy_")
def _copy(local: LocalCall) -> str:
    return f"with_item({local.texts[0]}, ..., {local.texts[1]})"


@_rule("setitem")
def _setitem(local: LocalCall) -> str:
    (target, index, value), _ = local.numbered()
    return f"with_item({local.leaf(target)}, {write_literal(index, local.leaf)}, {write_literal(value, local.leaf)})"


@_rule("scaled_dot_product_attention")
def _attention(local: LocalCall) -> str:
    p = local.argument("dropout_p", 4, 0.0)
    ring = local.axes(local.operand(1), 2)
    if ring:
        return _write_ring_attention(local, ring, p)
    queries = local.axes(local.operand(0), 2) if local.argument("is_causal", 5, False) else []
    if not p and not queries:
        return local.plain()
    shown = [*local.texts, *([f"dropout_p={p}"] if p else [])]
    options = {"is_causal": local.argument("is_causal", 5, False) and not queries}
    options |= {name: local.call.kwargs.get(name) for name in ("scale", "enable_gqa")}
    shown += [f"{name}={write_literal(value, local.foreign)}" for name, value in options.items() if value]
    shown += [f"queries={local.named(queries)}"] if queries else []
    if p:
        split = [a for a, s in enumerate(local.operand(0)) if isinstance(s, Shard) and local.layout.sizes[a] > 1]
        shown += ["seed=seed + {site}", f"split={local.named(split)}"]
    return f"{'attention' if p else 'causal_attention'}({', '.join(shown)})"


def _recurrent(local: LocalCall) -> str:
    """Layers between which values are dropped draw masks of the samples that a rank has."""
    if not draws_dropout_mask(local.call.fn, local.call.args, local.call.kwargs):
        return local.plain()
    split = [a for a, s in enumerate(local.operand(0)) if isinstance(s, Shard) and local.layout.sizes[a] > 1]
    return f"masked(seed + {{site}}, {local.named(split)}, DEVICE, lambda: {local.plain()})"


for _name in RECURRENT:
    _rule(_name)(_recurrent)


def _write_ring_attention(local: LocalCall, ring: list[int], dropout_p: float) -> str:
    options = {"is_causal": local.argument("is_causal", 5, False), "dropout_p": dropout_p}
    options |= {name: local.call.kwargs.get(name) for name in ("scale", "enable_gqa")}
    shown = [f"{name}={write_literal(value, local.foreign)}" for name, value in options.items() if value]
    return f"ring_attention({', '.join([*local.texts[:3], *shown])}, ring={local.named(ring)})"
