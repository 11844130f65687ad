"""A layout as teams state it: degrees of parallelism, in the words of Megatron-LM, torchtitan and DeepSpeed.

    dp=2,fsdp=8,tp=4,sp      64 GPUs: weights are sharded over 8 ranks, Replicate over 2, products are sharded over 4

`dp` ranks hold whole weights; their optimizer states follow the ZeRO stage `zero`. Over `fsdp` ranks the weights are sharded too
(ZeRO-3). Both together are HSDP. Over `tp` ranks products are sharded as in Megatron-LM. With `sp` the activations between them
are sharded by tokens. The mesh has an axis for each degree above 1. The tensor axis is innermost, where links are fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner_core.core import Block, Cluster, DeviceMesh, Graph, InputError, Op, Shard, Value, nearest, short
from planner_core.ops import Kind, operator
from planner_core.planning.methods.restrictions import (
    AxisRules,
    PairTest,
    batch_split,
    is_matrix,
    sequence_split,
    used_in_parts,
    whole,
)
from planner_core.search.network import AxisState

DEGREES = ("dp", "fsdp", "tp", "cp", "ep")
WORDS = (*DEGREES, "sp", "zero", "hsdp")
WHOLE_STAGES = (0, 1, 2)
"""The ZeRO stages in which every rank keeps a whole working copy."""
EXAMPLE = "dp=2,fsdp=8,tp=4,sp"
MOST_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class Space:
    """The plans of one mesh that follow a rule. `stages` and `joined` are those of `CostModel`."""

    mesh: DeviceMesh
    restriction: Callable[[Graph], AxisRules]
    stages: tuple[int, ...]
    joined: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The degree of each kind of parallelism. Their product is the number of GPUs."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    zero: int = 0

    def __str__(self) -> str:
        words = [f"{name}={n}" for name in DEGREES if (n := getattr(self, name)) > 1] or ["dp=1"]
        return ",".join([*words, *(["sp"] if self.sp else []), *([f"zero={self.zero}"] if self.zero else [])])

    @property
    def num_gpus(self) -> int:
        """The product of the degrees. Experts are sharded over ranks that also shard the batch, so `ep` is not a factor."""
        return self.dp * self.fsdp * self.tp * self.cp

    @property
    def data(self) -> int:
        """The number of ranks that shard the batch."""
        return self.dp * self.fsdp

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """(role, ranks) of each mesh axis, the outermost first. There is at least one axis."""
        found = [(role, n) for role, n in (("data", self.dp), ("shard", self.fsdp), ("tensor", self.tp)) if n > 1]
        return tuple(found) or (("data", 1),)

    @property
    def joined(self) -> tuple[int, ...]:
        """The mesh axes that operators treat as one with the axis before: in HSDP the axis of shards."""
        return (1,) if self.dp > 1 and self.fsdp > 1 else ()

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages of its weights."""
        return tuple(sorted({0, *([self.zero] if self.dp > 1 else []), *([3] if self.fsdp > 1 else [])}))

    def mesh(self) -> DeviceMesh:
        """The mesh, its axes named by their roles."""
        names, sizes = zip(*self.degrees, strict=True)
        return DeviceMesh(names, sizes)

    def space(self) -> Space:
        """The plans that follow the layout."""
        return Space(self.mesh(), self.restriction, self.stages, self.joined)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `price --json` shows it."""
        return asdict(self)

    def restriction(self, graph: Graph) -> AxisRules:
        """The layout as a restriction of the space of plans on its mesh. A weight whose sizes cannot be sharded is not restricted."""
        rules = {"data": (batch_split, at_stage(self.zero)), "shard": (batch_split, at_stage(3)),
                 "tensor": (sequence_split if self.sp else whole, used_in_parts)}  # fmt: skip
        tests = [rules[role] for role, _ in self.degrees]
        return AxisRules(graph, tuple(a for a, _ in tests), tuple(p for _, p in tests))


def at_stage(stage: int) -> PairTest:
    """The test of a weight that is used Replicate: a matrix is in this ZeRO stage; biases and norms have a summed gradient."""

    def test(value: Value, pair: AxisState) -> bool:
        wanted = stage if is_matrix(value) else 0
        return bool(pair[3] == wanted) if value.grad else not isinstance(pair[0], Shard)

    return test


def faults(graph: Graph, layout: Layout) -> list[str]:
    """The reasons why the model's operators cannot follow a layout."""
    found = dict.fromkeys(_faults(graph, layout))
    return list(found) or [f"no way to run every operator of this model follows {layout}; try other degrees"]


def _faults(graph: Graph, layout: Layout) -> Iterator[str]:
    tp, batch = layout.tp, graph.workload["batch"]
    if batch % layout.data:
        yield f"{batch} samples cannot be dealt to {layout.data} ranks (dp x fsdp); give a multiple of {layout.data}"
    for block, op in _ops(graph):
        if operator(op.fn).kind is not Kind.ATTENTION:
            continue
        shapes = [block.values[v].meta.shape for v in op.inputs[:2]]
        for shape, what in zip(shapes, ("attention heads", "key and value heads"), strict=True):
            heads = shape[-3] if len(shape) > 3 else 1
            if heads % tp:
                yield f"{heads} {what} cannot be dealt to tp={tp} ranks; give a divisor of {heads}"
    if layout.sp and graph.workload["seq"] % tp:
        yield f"a sequence of {graph.workload['seq']} tokens cannot be split over tp={tp} ranks; give a divisor"


def _ops(graph: Graph) -> Iterator[tuple[Block, Op]]:
    for block in (graph.top, *graph.blocks.values()):
        yield from ((block, op) for op in block.ops)


def parse_layout(text: str) -> Layout:
    """Read `dp=2,fsdp=8,tp=4,sp,zero=1`. Raises InputError for the first word that is wrong."""
    found: dict[str, Any] = {}
    for word, value in _words(text):
        if word in found:
            raise InputError(f"layout {text[:80]!r}: {word} is given twice; leave one out")
        found[word] = value
    if found.get("zero") == 3:
        raise InputError(
            f"layout {text[:80]!r}: zero=3 shards the weights too; say fsdp={found.get('dp', 8)} instead of dp={found.get('dp', 8)},zero=3"
        )
    layout = Layout(**found)
    if layout.sp and layout.tp == 1:
        raise InputError(
            f"layout {text[:80]!r}: sp splits tokens over the tensor ranks; give tp=2 or more, or leave sp out"
        )
    return layout


def _words(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.replace(" ", "").split(","):
        word, _, value = part.partition("=")
        if word not in WORDS:
            raise InputError(
                f"layout {text[:80]!r}: {short(word)} is not a word; {nearest(word, WORDS)}, as in {EXAMPLE}"
            )
        if word == "hsdp":
            sizes = re.fullmatch(r"(\d{1,6})x(\d{1,6})", value)
            if not sizes:
                raise InputError(
                    f"layout {text[:80]!r}: hsdp is {short(value)}, but must be replicas x shards, e.g. hsdp=2x8"
                )
            yield from (("dp", int(sizes[1])), ("fsdp", int(sizes[2])))
        elif word == "sp":
            if value not in ("", "1", "0"):
                raise InputError(
                    f"layout {text[:80]!r}: sp is {short(value)}, but takes no value; write sp, or leave it out"
                )
            yield "sp", value != "0"
        elif not value.isdecimal() or not _in_range(word, int(value)):
            wanted = "0, 1 or 2" if word == "zero" else "a whole number from 1"
            raise InputError(f"layout {text[:80]!r}: {word} is {short(value)}, but must be {wanted}, as in {EXAMPLE}")
        else:
            yield word, int(value)


def _in_range(word: str, value: int) -> bool:
    return value in (*WHOLE_STAGES, 3) if word == "zero" else 1 <= value <= MOST_RANKS


def check_layout(layout: Layout, cluster: Cluster) -> None:
    """Raise InputError for a layout that does not suit the cluster, or that cannot be priced yet."""
    for word, what in (("cp", "context parallelism"), ("ep", "an expert axis of its own")):
        if getattr(layout, word) > 1:
            raise InputError(f"layout {layout}: {word} asks for {what}, which cannot be priced yet; leave {word} out")
    if layout.num_gpus != cluster.num_gpus:
        fill = cluster.num_gpus // max(1, layout.num_gpus // layout.fsdp)
        held = replace(layout, fsdp=fill)
        hint = (
            f"say for example {held}"
            if fill and held.num_gpus == cluster.num_gpus
            else f"its product must be {cluster.num_gpus}"
        )
        raise InputError(
            f"layout {layout} takes {layout.num_gpus} GPUs, but {cluster.name} has {cluster.num_gpus}; {hint}"
        )
