"""A model as a graph of operations on values. Repeated parts are stored once.

A `Graph` has one top `Block`, whose items are `Op`s and `Call`s of other blocks. A block that repeats (a decoder layer) is stored
once, and called with the prefix of each copy's parameter names. So size and cost do not grow with depth. Values are integers that
are local to their block. They describe *global* (unsharded) tensors.

Shapes that depend on the workload are stored in JSON as text in b (batch, samples) and s (sequence length), for example "b", "b*s"
or "4*s+1", so that one snapshot serves every workload. A `Graph` in memory has plain integers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

Attr: TypeAlias = int | float | str | bool | tuple["Attr", ...] | None
ValueKind: TypeAlias = Literal["activation", "parameter", "constant"]

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_REAL_DTYPES = {"complex64": "float32", "complex128": "float64"}
"""The dtype of the parts of a complex number."""
VARIES = "varies"
"""The attribute of an op in a repeated block whose literal, a float, differs from copy to copy."""
NO_GRADIENT = "no gradient to"
"""The attribute with the positions of the operands to which a model's own backward gives none, though they could have one."""


def differentiable_inputs(inputs: Sequence[int], attrs: Mapping[str, Any]) -> list[int]:
    """Return the operands of a call to which its backward gives a gradient, if they can have one."""
    return [v for k, v in enumerate(inputs) if k not in attrs.get(NO_GRADIENT, ())]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in a block.

    `kind` is "activation" (it depends on a parameter), "parameter" or "constant" (all else: token ids, masks, rotary tables,
    buffers). Constants are Replicate and do not have a gradient. `name` is that of a parameter in `model.named_parameters()`,
    relative to the call's prefix. `storage` is the id of the value whose memory this one shares (it is a view), or its own id.
    `grad`: whether a gradient flows to it. `parts`: the number of parts in which it is made and freed, one after the other. `computed`:
    whether forward computes this constant of inputs that are real numbers, so that it takes memory in each pass.
    """

    meta: TensorMeta
    kind: ValueKind
    name: str = ""
    storage: int = -1
    grad: bool = False
    parts: int = 1
    computed: bool = False


def nth_call(scope: str, number: int) -> str:
    """Return the scope of a later call of a module: `stack@1` is the second call of `stack`, and its first call is number 0."""
    return f"{scope}@{number}" if number else scope


def is_later_call(scope: str) -> bool:
    """Return whether a scope is a later call of a module, or lies in one."""
    return "@" in scope


def module_path(scope: str) -> str:
    """Return the path of the module that a scope is a call of: `stack.0` for `stack@1.0`."""
    return re.sub(r"@\d+", "", scope)


class CallSite(NamedTuple):
    """The place of one call of a function in a model: `scope/fn`, and `scope/fn.n` for the n-th repetition in one call of the module.

    `scope` is the path of the module call, with the numbers of later calls (`stack@1.0`), and empty for the model itself. A graph and a
    plan hold sites as text; text is parsed and written here alone.
    """

    scope: str
    fn: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> CallSite:
        """Return the site of a text, as `stack@1.0/linear.2`. No text fails."""
        return _parse_site(text)

    @property
    def module(self) -> str:
        """The path of the module, whichever of its calls this is."""
        return module_path(self.scope)

    @property
    def call(self) -> str:
        """The function and its number, as in the text: `linear.2`."""
        return f"{self.fn}.{self.number}" if self.number else self.fn

    def __str__(self) -> str:
        return f"{self.scope}/{self.call}"


@lru_cache(maxsize=4096)
def _parse_site(text: str) -> CallSite:
    scope, _, call = text.rpartition("/")
    fn, _, number = call.rpartition(".")
    return CallSite(scope, fn, int(number)) if fn and number.isdecimal() else CallSite(scope, call)


def is_within(site: str, scope: str) -> bool:
    """Return whether a call site lies in the module call `scope`. A call of a module outside of it does not."""
    return not scope or site.startswith((scope + ".", scope + "/"))


@dataclass(frozen=True, slots=True)
class Op:
    """One torch function call.

    `name` is the text of its call site, by which it is found again in a running model. `inputs` are the tensor operands, in order of
    the call. `attrs` are the other arguments that matter for sharding. `saved` are the values whose storage autograd keeps for backward.
    `saved_extra` are kept tensors that are not values of the graph (the log-sum-exp, for example).
    """

    name: str
    fn: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Attr]
    module: str = ""
    saved: tuple[int, ...] = ()
    saved_extra: tuple[TensorMeta, ...] = ()

    @property
    def site(self) -> CallSite:
        """Its call site."""
        return CallSite.parse(self.name)


@dataclass(frozen=True, slots=True)
class Call:
    """One copy of a repeated block. The full name of its parameter is `prefix` + "." + the name in the block."""

    block: str
    prefix: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the model. `inputs` are the values that the caller gives, `outputs` those that it gets back. `recomputed`: the model's own
    code says that it is computed again in backward (a checkpoint), whatever a plan says of other blocks."""

    name: str
    values: tuple[Value, ...]
    items: tuple[Op | Call, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    recomputed: bool = False

    @property
    def ops(self) -> tuple[Op, ...]:
        """The block's own operations, without calls."""
        return tuple(i for i in self.items if isinstance(i, Op))

    @property
    def call_positions(self) -> tuple[int, ...]:
        """Where in `items` calls of repeated blocks stand."""
        return tuple(k for k, item in enumerate(self.items) if isinstance(item, Call))

    @property
    def own_parameters(self) -> dict[int, Value]:
        """The parameters that the block holds itself, by number. Those among its inputs are the caller's."""
        return {i: v for i, v in enumerate(self.values) if v.kind == "parameter" and i not in self.inputs}

    def ops_at(self, positions: Iterable[int]) -> tuple[Op, ...]:
        """Return the operations at these positions of `items`, without calls."""
        return tuple(op for i in positions if isinstance(op := self.items[i], Op))

    def with_ops(self, changed: Mapping[str, Op]) -> Block:
        """Return the block with other operations in the place of those of the same names."""
        return replace(self, items=tuple(changed.get(i.name, i) if isinstance(i, Op) else i for i in self.items))

    def has_backward(self, op: Op) -> bool:
        """Return whether an operation runs backward: a gradient comes to one of its results."""
        return any(self.values[o].grad for o in op.outputs)

    def parameters_of(self, op: Op) -> tuple[Value, ...]:
        """Return the parameters that an operation takes, in order of the call."""
        return tuple(v for i in op.inputs if (v := self.values[i]).kind == "parameter")


STANDIN_SCOPE = "loss"
"""The scope of the operators of a stand-in loss, which no module of the model calls."""
STANDIN_LOSS = "stand-in: mean of the output to the fourth power, in float32"
"""The name of the loss of a model that returns none, in a graph and in the model of a plan."""


class GraphSizes(TypedDict):
    """Samples of one global micro-batch, and tokens of a sample."""

    batch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A model at one workload. `blocks` holds the repeated blocks by name, `top` the rest.

    `loss` names the loss: the model's own, or a stand-in that was added. `config` is what rebuilds the model (a Hugging Face config, or
    the path of the user's file), for export. `buffer_bytes`: bytes of the model's buffers (running statistics, tables), which every GPU
    holds whole. `own_shapes`: the model's own shapes of parameters that are padded here, by name. `as_run`: its operators are those of
    the software that trains (`cost.graph_as_run`), not those of the model's code.
    """

    name: str
    source: str
    top: Block
    blocks: Mapping[str, Block]
    workload: GraphSizes
    loss: str
    config: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()
    buffer_bytes: int = 0
    own_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    as_run: bool = False

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """The top block, and each repeated block once."""
        return self.top, *self.blocks.values()

    def calls(self) -> Iterator[Call]:
        """Return every copy of every repeated block, in order."""
        return (item for item in self.top.items if isinstance(item, Call))

    @property
    def num_repeats(self) -> dict[str, int]:
        """The number of calls of each block."""
        # A block without calls counts 0 and is not missing.
        counts = dict.fromkeys(self.blocks, 0)
        for call in self.calls():
            counts[call.block] += 1
        return counts

    @property
    def num_ops(self) -> int:
        """Number of operations of the unfolded model."""
        repeats = self.num_repeats
        return len(self.top.ops) + sum(len(b.ops) * repeats[n] for n, b in self.blocks.items())

    def parameters(self) -> dict[str, TensorMeta]:
        """Return every parameter by its full name; shared parameters once."""
        # By name: a weight that two modules share has one name, and counts once.
        metas = {v.name: v.meta for v in self.top.values if v.kind == "parameter"}
        for call in self.calls():
            block = self.blocks[call.block]
            # A weight that the caller passes in is one of the top block's, and is counted there.
            passed = set(block.inputs)
            for i, v in enumerate(block.values):
                if v.kind == "parameter" and i not in passed:
                    metas[join_name(call.prefix, v.name)] = v.meta
        return metas

    @property
    def num_params(self) -> int:
        """Number of parameters; shared ones once. A weight in 4 bits counts as the numbers that are packed in it, not as its bytes."""
        in_4_bits = (self.config.get("lora") or {}).get("weights") == "nf4"
        total = 0
        for meta in self.parameters().values():
            # A frozen weight in 4 bits is a column [n, 1] of the computing dtype, two numbers a byte (`models.adapters.nf4`).
            packed = in_4_bits and meta.shape[1:] == (1,)
            total += math.prod(meta.shape) * (2 * ITEM_BYTES[meta.dtype] if packed else 1)
        return total

    @property
    def main_dtype(self) -> str | None:
        """The dtype of most elements of all parameters, every copy of a block counted; None if the model has no parameters.

        A complex dtype counts as the real dtype of its parts: it stays complex beside weights of that dtype.
        """
        elements: Counter[str] = Counter()
        # A scalar has the product 1 of no dims; a weight with an empty dim still counts, so that a model of such weights has a dtype.
        for meta in self.parameters().values():
            elements[_REAL_DTYPES.get(meta.dtype, meta.dtype)] += max(1, math.prod(meta.shape))
        return elements.most_common(1)[0][0] if elements else None


def root(block: Block, value: int) -> int:
    """Return the value whose memory `value` shares, through views of views."""
    while True:
        storage = block.values[value].storage
        if storage < 0 or storage == value:
            return value
        value = storage


def with_result_as_output(graph: Graph) -> Graph:
    """Return the graph with the model's result (its loss) as the output of the top block."""
    last = graph.top.items[-1] if graph.top.items else None
    if graph.top.outputs or last is None:
        return graph
    return replace(graph, top=replace(graph.top, outputs=last.outputs[:1]))


def join_name(prefix: str, name: str) -> str:
    """Return the full name of a part of a called block: `layers.0` + `attn.q/linear`, `layers.0` + `/add`."""
    if not prefix or not name:
        return prefix or name
    return prefix + name if name.startswith("/") else f"{prefix}.{name}"


def numbered_names(name: str, separator: str = "") -> Iterator[str]:
    """Yield a name, and then the same with numbers from 2 on, without an end."""
    yield name
    yield from (f"{name}{separator}{number}" for number in itertools.count(2))


def unfold_graph(graph: Graph) -> Graph:
    """Return the same model with every call written out: one flat top block."""
    values = list(graph.top.values)
    items: list[Op | Call] = []
    names = {v.name: i for i, v in enumerate(values) if v.kind == "parameter"}
    for item in graph.top.items:
        items.extend([item] if isinstance(item, Op) else _inline_call(graph.blocks[item.block], item, values, names))
    top = replace(graph.top, values=tuple(values), items=tuple(items))
    return replace(graph, top=top, blocks={})


def _inline_call(block: Block, call: Call, values: list[Value], names: dict[str, int]) -> list[Op]:
    ids = dict(zip(block.inputs, call.inputs, strict=True))
    for inner, outer in zip(block.outputs, call.outputs, strict=True):
        # A block may return its operand as it is. Then the caller's number of the operand stands for both.
        ids.setdefault(inner, outer)
    for i, value in enumerate(block.values):
        if i in ids:
            continue
        name = join_name(call.prefix, value.name) if value.kind == "parameter" else value.name
        # Two calls of one module (a shared layer) have one prefix, so their weights are one value of the flat block.
        if value.kind == "parameter" and name in names:
            ids[i] = names[name]
            continue
        ids[i] = len(values)
        values.append(replace(value, name=name))
        if value.kind == "parameter":
            names[name] = ids[i]
    # Storages are numbered last: a view may stand before the value whose memory it shares.
    for i, value in enumerate(block.values):
        if value.storage not in (-1, i) and i not in block.inputs:
            values[ids[i]] = replace(values[ids[i]], storage=ids[value.storage])
        elif value.storage == i:
            values[ids[i]] = replace(values[ids[i]], storage=ids[i]) if i not in block.inputs else values[ids[i]]

    def rename(items: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(ids[i] for i in items)

    return [
        replace(
            op,
            name=join_name(call.prefix, op.name),
            inputs=rename(op.inputs),
            outputs=rename(op.outputs),
            saved=rename(op.saved),
        )
        for op in block.ops
    ]


def check_graph(graph: Graph) -> None:
    """Assert the invariants of a graph: every value is made once, and before it is used."""
    # Asserts, since a graph that breaks these is a fault of the capture and not of a user.
    for block in graph.all_blocks:
        known = set(block.inputs) | {i for i, v in enumerate(block.values) if v.kind != "activation"}
        for item in block.items:
            assert set(item.inputs) <= known, f"{block.name}: {item} uses a value before it is made"
            fresh = set(item.outputs)
            # An op that writes in place returns its operand, a value that exists already. A call has no such result.
            assert not fresh & known or isinstance(item, Op), f"{block.name}: {item} makes a value twice"
            known |= fresh
            if isinstance(item, Call):
                callee = graph.blocks[item.block]
                assert len(callee.inputs) == len(item.inputs) and len(callee.outputs) == len(item.outputs)
        assert set(block.outputs) <= known
