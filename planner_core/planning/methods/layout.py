"""A layout as teams state it: degrees of parallelism, in the words of Megatron-LM, torchtitan and DeepSpeed.

    dp=2,fsdp=8,tp=4,sp      64 GPUs: weights are sharded over 8 ranks, Replicate over 2, products are sharded over 4

`dp` ranks hold whole weights; their optimizer states follow the ZeRO stage `zero`. Over `fsdp` ranks the weights are sharded too
(ZeRO-3). Both together are HSDP. Over `tp` ranks products are sharded as in Megatron-LM. With `sp` the activations between them
are sharded by tokens. Over `cp` ranks every sample is sharded by tokens, through attention too: keys and values go round (`ring`), or
heads are exchanged for tokens (`ulysses`), or keys and values are gathered (`gather`). These ranks store weights as the data-parallel
ranks do, and `zero=3` shards weights over them alone. Over `ep` of the data-parallel ranks experts are dealt out, and tokens sent to them.
The mesh has an axis for each degree above 1. The tensor axis is innermost, where links are fastest, then the context axis.

    dp=8,tp=8,pp=8,vp=2,schedule=interleaved     512 GPUs: 16 stages of the model on 8 groups of 64 GPUs, which lie one behind the other

`pp` groups of GPUs run stages of the model, `vp` each, in the order of `schedule`, with as many copies of blocks as `copies` says. All
other degrees are those inside a group. `order` says which ranks are neighbours, the innermost first, in Megatron-LM's words:

    tp-dp-pp    a group is whole nodes where it can be, and stages send between nodes (the default)
    tp-pp-dp    the ranks that share a batch lie outside of the stages: stages may send inside a node, gradients are summed between nodes
    pp-tp-dp    the stages of one GPU's data and tensor rank are neighbours
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner_core.core import (
    MAX_AXES,
    ONE_EACH,
    ONE_RANK,
    SCHEDULES,
    USUAL_STACK,
    V_SHAPED,
    VIRTUAL_OF_V,
    Cluster,
    DeviceMesh,
    Graph,
    InputError,
    Pipeline,
    PipelineAxis,
    Sentence,
    Shard,
    Term,
    Value,
    load_stack,
    named,
    nearest_multiple,
    shorten_value,
    suggest_names,
)
from planner_core.cost import check_micro_batches, even_copies
from planner_core.ops import CONTEXT, DISPATCH, RING, Kind
from planner_core.planning.methods.restrictions import (
    BY_HEADS,
    AxisRules,
    OperatorRows,
    StreamTest,
    WeightTest,
    is_batch_split,
    is_expert_parallel,
    is_matrix,
    is_sequence_split,
    is_unsplit,
    is_used_in_parts,
)
from planner_core.search.network import WeightState

DEGREES = ("dp", "fsdp", "tp", "cp", "ep", "pp", "vp")
CP_TYPES: Mapping[str, frozenset[str]] = {
    "ring": frozenset({RING}),
    "ulysses": frozenset({"heads"}),
    "gather": frozenset({CONTEXT, "queries"}),
}
"""How attention runs on a context axis: the names of its rows. The first is the default, as in Megatron-LM."""
PEERS_TYPES = {"p2p": "ring", "a2a": "ulysses", "all_gather": "gather", "allgather": "gather"}
"""The words of Megatron-LM's `--cp-comm-type`, and of torchtitan for a gather."""
ORDERS = ("tp-dp-pp", "tp-pp-dp", "pp-tp-dp")
"""Which of the tensor (with context), data and pipeline ranks are neighbours, the innermost first."""
WORDS = (*DEGREES, "sp", "zero", "hsdp", "cp_type", "schedule", "copies", "order")
WHOLE_STAGES = (0, 1, 2)
"""The ZeRO stages in which every rank keeps a whole working copy."""
SHARDED = 3
"""The stage in which weights are sharded too."""
EXAMPLE = "dp=2,fsdp=8,tp=4,sp"
MAX_DEGREE = 100_000


@dataclass(frozen=True, slots=True)
class Space:
    """The plans of one mesh that follow a layout. `stages` and `joined` are those of `CostModel`. `pipe`: the axis of the pipeline; the
    mesh is that of one of its ranks."""

    layout: Layout
    mesh: DeviceMesh
    restriction: Callable[[Graph], AxisRules]
    stages: tuple[int, ...]
    joined: tuple[int, ...] = ()
    pipe: PipelineAxis = ONE_RANK


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
    cp_type: str = "ring"
    pp: int = 1
    vp: int = 1
    schedule: str = ""
    copies: tuple[int, ...] = ()
    order: str = ORDERS[0]

    def __str__(self) -> str:
        words = [f"{name}={n}" for name in DEGREES if (n := getattr(self, name)) > 1] or ["dp=1"]
        words += ["sp"] if self.sp else []
        words += [f"cp_type={self.cp_type}"] if self.cp_type != "ring" else []
        words += [f"schedule={self.schedule}"] if self.schedule else []
        words += [f"copies={'-'.join(map(str, self.copies))}"] if self.copies else []
        words += [f"order={self.order}"] if self.order != ORDERS[0] else []
        return ",".join([*words, *([f"zero={self.zero}"] if self.zero else [])])

    @property
    def term(self) -> Term:
        """The layout for a sentence of an error; the page writes it as teams do, `FSDP 8 × TP 8`."""
        return Term("layout", "", str(self), f"layout {self}")

    @property
    def num_gpus(self) -> int:
        """The product of the degrees. Experts are sharded over ranks that also shard the batch, so `ep` is not a factor."""
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def run_schedule(self) -> str:
        """The schedule of its stages: the one that is stated, or the usual one for as many stages a rank."""
        return self.schedule or ("interleaved" if self.vp > 1 else "1f1b")

    def pipeline(self, graph: Graph, micro_batches: int) -> Pipeline | None:
        """Its stages of a model, with equally many copies where they can be, unless they are stated; None if it has one stage. Raises
        InputError if the model has fewer copies than stages, or the schedule cannot have so many micro-batches."""
        calls, stages = sum(graph.num_repeats.values()), self.pp * self.vp
        if self.pp == 1:
            return None
        if calls < stages:
            raise InputError(
                self.term,
                f" has {stages} stages, but {graph.name} has {calls} copies of repeated blocks to deal out; ",
                f"give pp={max(1, calls // self.vp)} or fewer",
            )
        if self.copies and sum(self.copies) != calls:
            raise InputError(
                self.term,
                f" deals out {sum(self.copies)} copies of repeated blocks, and {graph.name} has {calls}; give as many",
            )
        cut = Pipeline(self.pp, self.run_schedule, self.copies or even_copies(calls, stages), outer=self.pipe.outer)
        check_micro_batches(cut, micro_batches)
        return cut

    def count_micro_batches(self, batch: int, of_chosen: int, micro_batch: int | None = None) -> int:
        """Return the micro-batches of a step of `batch` samples, of which a rank computes `micro_batch` at once. Raises InputError if these
        do not divide the batch.

        Where nobody states their size, a layout with stages takes one sample, since its ranks stand idle less with many micro-batches. Any
        other has as many as the chosen plan, `of_chosen`. Example: 64 samples on dp=4,tp=2,pp=2 are 16 micro-batches; 2 would leave it
        idle a third of the step.
        """
        if micro_batch is None:
            return batch // self.data if self.pp > 1 and batch % self.data == 0 else of_chosen
        each = micro_batch * self.data
        if batch % each:
            ranks = f"{self.data} data-parallel ranks take at once with "
            raise InputError(
                self.term,
                f": {batch} samples a step are not a multiple of the {each} that {ranks}",
                named("micro_batch", micro_batch),
                "; give ",
                named("batch", nearest_multiple(batch, each)),
                " or another ",
                named("micro_batch"),
            )
        return batch // each

    @property
    def data(self) -> int:
        """The number of ranks that shard the batch."""
        return self.dp * self.fsdp

    @property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """(role, ranks) of each mesh axis, the outermost first. There is at least one axis. Raises InputError if experts cannot be
        dealt to the ranks."""
        dp, fsdp = self.dp, self.fsdp
        if self.ep > 1 and (fsdp if fsdp > 1 else dp) % self.ep:
            word, n = ("fsdp", fsdp) if fsdp > 1 else ("dp", dp)
            raise InputError(
                self.term, f": the {self.ep} ranks of ep are of the {n} ranks of {word}; give a divisor of {n}"
            )
        # Experts are dealt to some of the ranks that shard the batch, so these become an axis of their own: fsdp=8,ep=2 is 4 x 2.
        dp, fsdp = (dp, fsdp // self.ep) if fsdp > 1 else (dp // self.ep, fsdp)
        # The outermost first: the ranks of the last axis are neighbours, where links are fastest.
        sizes = {"data": dp, "shard": fsdp, "expert": self.ep, "context": self.cp, "tensor": self.tp}
        return tuple((role, n) for role, n in sizes.items() if n > 1) or (("data", 1),)

    @property
    def pipe(self) -> PipelineAxis:
        """The axis of its stages' ranks. Those that lie outside of it are the last in `order`."""
        outside = {
            "tp-dp-pp": (),
            "tp-pp-dp": ("data", "shard", "expert"),
            "pp-tp-dp": tuple(r for r, _ in self.degrees),
        }
        return PipelineAxis(self.pp, sum(role in outside[self.order] for role, n in self.degrees if n > 1))

    @property
    def joined(self) -> tuple[int, ...]:
        """The mesh axes that operators treat as one with the axis before: in HSDP the axis of shards."""
        return (1,) if [role for role, _ in self.degrees[:2]] == ["data", "shard"] else ()

    @property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages of its weights."""
        return tuple(sorted({0, self._whole_stage, self._context_stage, *([3] if self.fsdp > 1 else [])}))

    @property
    def _whole_stage(self) -> int:
        """The stage over the ranks that hold whole weights."""
        return self.zero if self.zero in WHOLE_STAGES and self.dp > 1 else 0

    @property
    def _context_stage(self) -> int:
        """The stage over the ranks that share a sample."""
        # Context ranks hold the same weights as data-parallel ones, and share them in the same stage.
        return 0 if self.cp == 1 else 3 if self.fsdp > 1 else self.zero

    def mesh(self) -> DeviceMesh:
        """Return the mesh, its axes named by their roles."""
        names, sizes = zip(*self.degrees, strict=True)
        return DeviceMesh(names, sizes)

    def space(self) -> Space:
        """Return the plans that follow the layout."""
        return Space(self, self.mesh(), self.restriction, self.stages, self.joined, self.pipe)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `price --json` shows it."""
        return asdict(self)

    def restriction(self, graph: Graph) -> AxisRules:
        """Return the layout as a restriction of the space of plans on its mesh. A weight whose sizes cannot be sharded is not
        restricted."""
        # Ranks of experts are some of those of fsdp, or else of dp: other weights lie on them as on the rest.
        dealt = weights_at_stage(3 if self.fsdp > 1 else self._whole_stage)
        rules: dict[str, tuple[StreamTest, WeightTest, Mapping[Kind, OperatorRows]]] = {
            "data": (is_batch_split, weights_at_stage(self._whole_stage), {}),
            "shard": (is_batch_split, weights_at_stage(3), {}),
            "expert": (is_batch_split, dealt, {Kind.EXPERTS: OperatorRows(frozenset({DISPATCH}), is_expert_parallel)}),
            "context": (
                is_sequence_split,
                weights_at_stage(self._context_stage),
                {Kind.ATTENTION: OperatorRows(CP_TYPES[self.cp_type])},
            ),
            "tensor": (is_sequence_split if self.sp else is_unsplit, is_used_in_parts, BY_HEADS),
        }
        activations, parameters, kinds = zip(*(rules[role] for role, _ in self.degrees), strict=True)
        return AxisRules(graph, activations, parameters, kinds=kinds, ranks=self.data)


def weights_at_stage(stage: int) -> WeightTest:
    """Return the test of a weight that is used Replicate: a matrix is in this ZeRO stage; biases and norms have a summed gradient. A weight
    that is not trained has neither gradient nor states, so stages below 3 keep it whole, and stage 3 shards it as it shards others."""

    def test(value: Value, state: WeightState) -> bool:
        wanted = stage if is_matrix(value) else 0
        if not value.grad:
            return state.stage == SHARDED if wanted == SHARDED else not isinstance(state.working, Shard)
        return state.stage == wanted

    return test


def parse_layout(text: str) -> Layout:
    """Read `dp=2,fsdp=8,tp=4,sp,zero=1`. Raises InputError for the first word that is wrong."""
    if not text:
        raise InputError("a layout is needed, such as dp=2,tp=8,sp")
    fields: dict[str, Any] = {}
    for word, value in _parse_words(text):
        if word in fields:
            raise InputError(f"layout {text[:80]!r}: {word} is given twice; leave one out")
        fields[word] = value
    layout = Layout(**fields)
    contradiction = _find_contradiction(layout)
    if contradiction:
        raise InputError(f"layout {text[:80]!r}: {contradiction}")
    return layout


def _find_contradiction(layout: Layout) -> str:
    """Return what contradicts itself in a layout, and what would do; empty if nothing does."""
    if layout.zero == 3 and layout.fsdp > 1:
        return f"fsdp={layout.fsdp} shards the weights already; leave zero=3 out"
    if layout.zero == 3 and layout.cp == 1:
        stated = (
            f"fsdp={layout.dp} instead of dp={layout.dp},zero=3"
            if layout.dp > 1
            else "fsdp=N for N ranks instead of zero=3"
        )
        return f"zero=3 shards the weights too; say {stated}"
    if layout.sp and layout.tp == 1:
        return "sp splits tokens over the tensor ranks; give tp=2 or more, or leave sp out"
    if layout.cp_type != "ring" and layout.cp == 1:
        return "cp_type says how attention runs over the context ranks; give cp=2 or more, or leave cp_type out"
    return _stage_contradiction(layout)


def _stage_contradiction(layout: Layout) -> str:
    """Return what contradicts itself in the stages of a layout."""
    if layout.pp == 1 and (layout.vp > 1 or layout.schedule or layout.copies or layout.order != ORDERS[0]):
        return "vp, schedule, copies and order say how the stages of pp ranks run; give pp=2 or more, or leave them out"
    if layout.copies and len(layout.copies) != layout.pp * layout.vp:
        wanted = layout.pp * layout.vp
        return f"copies is for {len(layout.copies)} stages, and pp x vp are {wanted}; give a number for each, as copies=9-11-11-9"
    if layout.run_schedule in ONE_EACH and layout.vp > 1:
        return f"schedule={layout.run_schedule} has one stage a rank; leave vp out, or give schedule=interleaved"
    if layout.run_schedule == "interleaved" and layout.vp == 1:
        return "schedule=interleaved has several stages a rank; give vp=2 or more, or schedule=1f1b"
    if layout.run_schedule == V_SHAPED and layout.vp != VIRTUAL_OF_V:
        return f"schedule=zbv has two stages a rank; give vp={VIRTUAL_OF_V}"
    return ""


def _parse_words(text: str) -> Iterator[tuple[str, Any]]:
    # Spaces are dropped below, which would make one word of `dp=2 tp=8`.
    if re.search(r"[^\s,=]\s+[^\s,=]", text):
        raise InputError(f"layout {text[:80]!r}: its words are not separated by commas; write it as {EXAMPLE}")
    for part in re.sub(r"\s", "", text).split(","):
        word, _, value = part.partition("=")
        where = f"layout {text[:80]!r}: {word} is {shorten_value(value)}, but"
        if word not in WORDS:
            raise InputError(
                f"layout {text[:80]!r}: {shorten_value(word)} is not a word, as in {EXAMPLE}; {suggest_names(word, WORDS)}"
            )
        if word == "hsdp":
            sizes = re.fullmatch(r"(\d{1,6})x(\d{1,6})", value)
            if not sizes:
                raise InputError(f"{where} must be replicas x shards, e.g. hsdp=2x8")
            yield from (("dp", int(sizes[1])), ("fsdp", int(sizes[2])))
        elif word == "sp":
            if value not in ("", "1", "0"):
                raise InputError(f"{where} takes no value; write sp, or leave it out")
            yield "sp", value != "0"
        elif word in ("cp_type", "schedule", "copies", "order"):
            yield word, _parse_choice(word, value, where)
        elif not value.isdecimal() or not _in_range(word, int(value)):
            wanted = "0, 1 or 2" if word == "zero" else "a whole number from 1"
            raise InputError(f"{where} must be {wanted}, as in {EXAMPLE}")
        else:
            yield word, int(value)


def _parse_choice(word: str, value: str, where: str) -> str | tuple[int, ...]:
    """Return the kind of attention on context ranks, of schedule or of order that a word names, or the copies of each stage. Raises
    InputError."""
    if word == "copies":
        if not re.fullmatch(r"[1-9]\d{0,3}(-[1-9]\d{0,3})+", value):
            raise InputError(f"{where} must be the copies of each stage, as in copies=9-11-11-9")
        return tuple(map(int, value.split("-")))
    if word == "schedule":
        if value.lower() not in SCHEDULES:
            raise InputError(f"{where} must be one of {', '.join(SCHEDULES)}")
        return value.lower()
    if word == "order":
        if value not in ORDERS:
            raise InputError(f"{where} must be one of {', '.join(ORDERS)}, the innermost ranks first")
        return value
    if PEERS_TYPES.get(value, value) not in CP_TYPES:
        raise InputError(f"{where} must be {', '.join(CP_TYPES)}, or Megatron-LM's p2p, a2a, all_gather")
    return PEERS_TYPES.get(value, value)


def _in_range(word: str, value: int) -> bool:
    # Stage 3 is one of context ranks alone; `_find_contradiction` judges it beside the other words.
    return value in (*WHOLE_STAGES, 3) if word == "zero" else 1 <= value <= MAX_DEGREE


def check_layout(layout: Layout, cluster: Cluster) -> None:
    """Raise InputError for a layout that contradicts itself, or that does not suit the cluster."""
    if contradiction := _find_contradiction(layout):
        raise InputError(layout.term, f": {contradiction}")
    if layout.num_gpus != cluster.num_gpus:
        # The other degrees stay as stated, and fsdp takes what is left, if that divides.
        fill = cluster.num_gpus // max(1, layout.num_gpus // layout.fsdp)
        filled = replace(layout, fsdp=fill)
        hint = (
            Sentence("say for example ", Term("layout", "", str(filled), str(filled)))
            if fill and filled.num_gpus == cluster.num_gpus
            else f"its product must be {cluster.num_gpus}"
        )
        where = Term("cluster", "", None, cluster.name)
        raise InputError(layout.term, f" takes {layout.num_gpus} GPUs, but ", where, f" has {cluster.num_gpus}; ", hint)
    if len(layout.degrees) > MAX_AXES:
        roles = ", ".join(role for role, _ in layout.degrees)
        raise InputError(
            layout.term,
            f" makes a mesh of {len(layout.degrees)} axes ({roles}), and at most {MAX_AXES} can be priced; say all ranks ",
            "of dp as fsdp, or leave one of ep, cp and tp out",
        )


def list_schedules(stack: str | None) -> tuple[str, ...]:
    """List the schedules of stages that a stack runs."""
    return load_stack(stack or USUAL_STACK).schedules or SCHEDULES


def note_schedule(layout: Layout, stack: str | None) -> tuple[str, ...]:
    """Return a sentence about stages that are priced, but that the stated stack does not run."""
    runs = list_schedules(stack)
    if layout.pp == 1 or not layout.schedule or layout.schedule in runs:
        return ()
    runner = f"{stack} runs" if stack and stack != USUAL_STACK else "apply and the exported script run"
    note = Sentence(
        f"schedule={layout.schedule} is priced, but {runner} {', '.join(runs)} only; state schedule={runs[-1]}, or ",
        named("stack", "torchtitan"),
        " for a run by torchtitan",
    )
    return (note,)
