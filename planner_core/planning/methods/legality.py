"""Why a model cannot follow a stated layout: each reason is a sentence with the value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner_core.core import Block, Graph, Op, Sentence, Term
from planner_core.ops import DISPATCH, Kind, operator, rows
from planner_core.planning.methods.layout import CP_TYPES, Layout
from planner_core.search.network import Problem, find_infeasible_group

OTHERS = {
    "ring": "cp_type=ulysses or cp_type=gather",
    "ulysses": "cp_type=ring or cp_type=gather",
    "gather": "cp_type=ulysses",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason why a model cannot follow a layout, and what would do for somebody who states it."""

    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.way_out}"


def may_state(graph: Graph) -> frozenset[str]:
    """Return which of the words `cp` and `ep` a layout of this model may have: it has attention over tokens, and experts that can be dealt
    out."""
    splits = {(operator(op.fn).kind, row.name) for block, op in _ops_of(graph) for row in rows(op, block.values)}
    # The row `heads` says nothing of tokens: any attention over several heads has it.
    by_tokens = any((Kind.ATTENTION, name) in splits for names in CP_TYPES.values() for name in names - {"heads"})
    return frozenset(["cp"] * by_tokens + ["ep"] * ((Kind.EXPERTS, DISPATCH) in splits))


def operator_faults(graph: Graph, layout: Layout) -> list[Fault]:
    """Return the reasons, known from sizes alone, why the model's operators cannot follow a layout; see `undecided_fault` for one whose
    list is empty and that has no plan all the same."""
    return list(dict.fromkeys(_all_faults(graph, layout)))


def undecided_fault(problem: Problem, layout: Layout) -> str:
    """Return the operator because of which a layout has no plan, as a sentence without a way out."""
    group = find_infeasible_group(problem)
    if group is None:
        return f"the operators of {problem.coarse.graph.name} cannot follow {layout} together"
    op = next((op for op in group.ops if _joins_samples_and_tokens(group.block, op)), group.ops[0])
    shape, result = (list(group.block.values[values[0]].meta.shape) for values in (op.inputs, op.outputs))
    where = f"{op.name} of {group.block.name}" if group.block.name else op.name
    why = ", which puts the tokens of all samples in one row" if _joins_samples_and_tokens(group.block, op) else ""
    return f"no way to run {where} ({shape} to {result}{why}) follows {layout} after what runs before it"


def _joins_samples_and_tokens(block: Block, op: Op) -> bool:
    """Return whether an operator is a view that makes one dim of the samples and their tokens."""
    shape, result = (block.values[values[0]].meta.shape if values else () for values in (op.inputs, op.outputs))
    return len(shape) > len(result) > 0 and shape[0] > 1 and result[0] == shape[0] * shape[1]


def unsearchable_faults(graph: Graph, layout: Layout, *, of_any_samples: bool = False) -> list[Fault]:
    """Return the reasons that a search would not find: it would price a layout that the model does not have, or that no tool runs so.

    `of_any_samples`: only those that hold for smaller micro-batches too."""
    return list(dict.fromkeys(_all_unsearchable_faults(graph, layout, of_any_samples)))


def _all_unsearchable_faults(graph: Graph, layout: Layout, of_any_samples: bool = False) -> Iterator[Fault]:
    experts = [(block, op) for block, op in _ops_of(graph) if operator(op.fn).kind is Kind.EXPERTS]
    if layout.cp > 1 and all(operator(op.fn).kind is not Kind.ATTENTION for _, op in _ops_of(graph)):
        yield Fault(f"cp={layout.cp} splits the tokens of attention, which {graph.name} does not have", "leave cp out")
    if layout.ep > 1 and not experts:
        yield Fault(
            f"ep={layout.ep} deals experts out, and {graph.name} has none that tokens are sent to", "leave ep out"
        )
    micro = graph.workload["batch"] // layout.data
    # Experts take the tokens of all samples in one row, of which a context rank with several samples has several pieces.
    if layout.cp > 1 and micro > 1 and experts and not of_any_samples:
        yield Fault(
            f"a micro-batch of {micro} samples cannot be split by cp={layout.cp} where experts take the tokens of all samples in a row",
            f"give micro-batches of 1, {micro} times as many",
        )


def _all_faults(graph: Graph, layout: Layout) -> Iterator[Fault]:
    batch = graph.workload["batch"]
    if batch % layout.data:
        yield Fault(
            f"{batch} samples cannot be dealt to {layout.data} ranks (dp x fsdp)", f"give a multiple of {layout.data}"
        )
    attention = [(block, op) for block, op in _ops_of(graph) if operator(op.fn).kind is Kind.ATTENTION]
    by_heads = {"tp": layout.tp, "cp": layout.cp if layout.cp_type == "ulysses" else 1}
    for block, op in attention:
        yield from _uneven_heads(block, op, by_heads)
        if layout.cp > 1:
            yield from _context_faults(block, op, layout)
    # Context ranks split the tokens, and with sp the tensor ranks split each part again.
    parts = layout.cp * (layout.tp if layout.sp else 1)
    if graph.workload["seq"] % parts:
        words = " x ".join(
            w for w, n in ((f"cp={layout.cp}", layout.cp), (f"tp={layout.tp}", parts // layout.cp)) if n > 1
        )
        yield Fault(
            f"a sequence of {graph.workload['seq']} tokens cannot be split over {words} ranks", "give a divisor"
        )
    yield from _all_unsearchable_faults(graph, layout)
    if layout.ep > 1:
        yield from _uneven_experts(graph, layout)


def _uneven_heads(block: Block, op: Op, by_heads: dict[str, int]) -> Iterator[Fault]:
    """Attention with fewer heads than ranks that take a part of them."""
    ranks, words = 1, list[str]()
    for word, n in by_heads.items():
        # In ulysses context ranks take heads too, of those that a tensor rank has: 32 heads over tp=8 and cp=8 are too few.
        ranks, words = ranks * n, [*words, *([f"{word}={n}"] if n > 1 else [])]
    shapes = [block.values[v].meta.shape for v in op.inputs[:2]]
    for shape, what in zip(shapes, ("attention heads", "key and value heads"), strict=True):
        # Operands of attention end in heads, tokens and the size of a head; without a dim of heads there is one.
        heads = shape[-3] if len(shape) > 3 else 1
        if heads % ranks:
            dealt_to = Term("layout", "", ",".join(words), " x ".join(words))
            reason = Sentence(f"{heads} {what} cannot be dealt to ", dealt_to, " ranks")
            yield Fault(reason, f"give a divisor of {heads}")


def _context_faults(block: Block, op: Op, layout: Layout) -> Iterator[Fault]:
    """Attention that cannot run so over the context ranks."""
    splits = [row for row in rows(op, block.values) if row.name in CP_TYPES[layout.cp_type]]
    if layout.cp_type == "ulysses":  # its heads are judged already
        return
    if not splits:
        yield Fault(
            f"this model's attention takes a mask or a window that cp_type={layout.cp_type} cannot split",
            f"give {OTHERS[layout.cp_type]}",
        )
    for n in (n for row in splits for n in row.divides if n % layout.cp):
        yield Fault(f"{n} blocks of tokens cannot be dealt to cp={layout.cp} ranks", f"give a divisor of {n}")


def _uneven_experts(graph: Graph, layout: Layout) -> Iterator[Fault]:
    """Experts that cannot be dealt out."""
    for block, op in _ops_of(graph):
        if operator(op.fn).kind is Kind.EXPERTS:
            splits = [row for row in rows(op, block.values) if row.name == DISPATCH]
            if not splits:
                yield Fault(
                    f"ep={layout.ep} deals experts out, but {graph.name} computes them one matrix at a time",
                    "leave ep out",
                )
            # Such a row divides the tokens first, which the other faults judge, and then the experts.
            for n in (n for row in splits for n in row.divides[1:] if n % layout.ep):
                yield Fault(f"{n} experts cannot be dealt to ep={layout.ep} ranks", f"give a divisor of {n}")


def _ops_of(graph: Graph) -> Iterator[tuple[Block, Op]]:
    return ((block, op) for block in graph.all_blocks for op in block.ops)
