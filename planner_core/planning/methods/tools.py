"""What other people's tools can be told: the layouts that their settings state, as parts of the one space of plans.

A tool takes degrees: how many ranks hold whole weights, over how many the weights are sharded, over how many products are. Each
combination of degrees that fills the cluster is one `Space`. A search for a tool looks at all of them that its export holds exactly: on
up to three mesh axes, with context ranks only where samples are long or few, and beside tensor ranks then with tokens split there too.

Example: Megatron-LM on 4 GPUs takes tp = 1, 2 or 4, each with and without sequence parallelism and a distributed optimizer; and where
the model has experts, ep = 2 or 4 beside tp = 1, and ep = 2 beside tp = 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

from planner_core.core import MAX_AXES, Cluster, Graph, InputError, Sentence, Term, divisors, named
from planner_core.planning.methods.layout import CP_TYPES, SHARDED, WHOLE_STAGES, Layout, Space
from planner_core.planning.methods.legality import may_state
from planner_core.planning.methods.pair_forms import PAIR_FORMS

FREE = "torchrun"
"""The form that runs every plan."""
SWITCHES = ("none", "full")
"""A tool recomputes all blocks or none: its settings know no copies."""
MORE_SWITCHES = {"torchtitan": ("none", "selective", "full")}
"""The recomputations of a tool that has others, from the one of the least work. Not Megatron-LM's `selective`, which has the name alone in
common with the planner's: it runs core attention again, or by --recompute-modules parts that no policy of the planner does."""
TOOL_SWITCHES = frozenset((*SWITCHES, *(word for words in MORE_SWITCHES.values() for word in words)))
"""The recomputations of which some tool can be told one, for all blocks alike."""
PLUGINS: Mapping[str, Mapping[str, str]] = {"accelerate": {"fsdp2": "bfloat16", "deepspeed": "bfloat16"}}
"""The tools that another tool starts as well, by a section of its own file, and the dtype in which they then sum gradients. No field of
such a section says another: accelerate (its dataclasses.py) gives FSDP the dtype that computes for its sums too."""
GRADIENTS = {"deepspeed": "bfloat16"}
"""The dtype in which a tool keeps and sums gradients unless its file says another: DeepSpeed those of the model, float16 too, which has
the bytes of bfloat16 (its engine.py: communication_data_type, get_data_types)."""
LONG_TOKENS = 16_384
"""Samples of so many tokens, or fewer samples than GPUs, may be shared by context ranks."""
MOST_SEARCHED_AXES = 2
"""The mesh axes of a search that nothing bounds."""

OTHER_NAMES = {"transformers": "hf", "huggingface": "hf", "megatron-lm": "megatron", "fsdp": "fsdp2"}
"""What people call the tools, the page's list among them, by the names that the command line has."""

SEARCHED_FORMS = {
    "fsdp2": "with reshard_after_forward True, or False without replicas",
    "accelerate": "of data-parallel ranks alone: by DDP, FSDP, HSDP, or ZeRO-1 to 3 of its DeepSpeed plugin",
    "deepspeed": "by ZeRO-1 to 3 over all ranks",
    "torchtitan": "with tensor ranks that split tokens, experts over data-parallel ranks alone, and context ranks that gather, for long or "
    "few samples",
    "megatron": "without its FSDP, and with context ranks for long or few samples and not beside expert ranks",
    **dict.fromkeys(PAIR_FORMS, "with layers sharded in pairs"),
}
"""Which settings of a tool are searched where it has others, which `price` reads: accelerate's tensor ranks, DeepSpeed's tensor and
context ranks, Megatron-LM's two kinds of FSDP. Without these words "the best that torchtitan can be told" was beaten by a file that
torchtitan takes."""


def tool_term(tool: str) -> Term:
    """Return a tool for a sentence; the page has another name for it."""
    return Term("tool", tool, None, tool)


def describe_tool_space(tool: str) -> str:
    """Name the plans that a search for a tool is among, after "plans" or "the best plan"."""
    return f"that {tool} can be told {SEARCHED_FORMS[tool]}"


def bounding_tool(tool: str | None) -> str | None:
    """Return the tool whose settings bound the plans; None if every plan may be chosen, since none is named or the form that runs them
    all."""
    return None if tool == FREE else tool


def check_tool(tool: str | None) -> None:
    """Raise InputError for a tool whose settings are not known here."""
    if tool not in TOOLS:
        meant = OTHER_NAMES.get(str(tool).lower())
        hint = f"did you mean {meant}?" if meant else f"give {FREE}, {', '.join(TOOLS)}"
        raise InputError(named("tool", tool), f" is not a tool whose settings can bound the search; {hint}")


def tool_spaces(
    tool: str | None, cluster: Cluster, seq: int | None = None, batch: int | None = None
) -> tuple[Space, ...]:
    """Return all that a tool can be told on a cluster for samples of `seq` tokens, `batch` a step; empty if every plan may be chosen, since
    no tool is named or the form that runs every plan. Raises InputError for a tool whose settings are not known here."""
    tool = bounding_tool(tool)
    if tool is None:
        return ()
    check_tool(tool)
    long = _are_long_or_few(seq or 0, batch, cluster.num_gpus)
    layouts = (x for x in TOOLS[tool](cluster.num_gpus) if (long or x.cp == 1) and len(x.degrees) <= MAX_AXES)
    return tuple(layout.space() for layout in layouts)


def list_layouts(graph: Graph, batch: int, num_gpus: int) -> list[Layout]:
    """List every layout of a model on meshes of one axis or two, for `batch` samples a step; context ranks if these are long or few."""
    words, sizes = may_state(graph), divisors(num_gpus)
    contexts = sizes if "cp" in words and _are_long_or_few(graph.workload["seq"], batch, num_gpus) else [1]
    layouts = []
    for tensor, context, shards in product(sizes, contexts, sizes):
        replicas, rest = divmod(num_gpus, tensor * context * shards)
        if rest:
            continue
        dealt = divisors(shards if shards > 1 else replicas) if "ep" in words else [1]
        # Replicas share states in stages 1 and 2; without them only context ranks are left to shard over, which is stage 3.
        stages = WHOLE_STAGES if replicas > 1 else (0, SHARDED) if context > 1 and shards == 1 else (0,)
        kinds = tuple(CP_TYPES) if context > 1 else ("ring",)
        for tokens, experts, zero, kind in product((False, True)[: min(tensor, 2)], dealt, stages, kinds):
            layouts.append(Layout(replicas, shards, tensor, tokens, context, experts, zero, kind))
    return [layout for layout in layouts if len(layout.degrees) <= MOST_SEARCHED_AXES]


def _are_long_or_few(seq: int, batch: int | None, num_gpus: int) -> bool:
    """Return whether context ranks may share samples of `seq` tokens, `batch` a step: they are long, or fewer than the GPUs."""
    return seq >= LONG_TOKENS or (batch is not None and batch < num_gpus)


def list_switches(tool: str | None) -> tuple[str, ...]:
    """List the recomputations that a tool can be told, each of all blocks."""
    return MORE_SWITCHES.get(str(tool), SWITCHES)


def note_recompute(recompute: str | None, tool: str | None) -> tuple[str, ...]:
    """Return a sentence about a recomputation that is priced, but that the tool which runs the plan cannot be told.

    Megatron-LM has a `selective` too, but its own runs core attention again, of which a flash kernel keeps next to nothing."""
    if tool not in TOOLS or recompute in (None, "auto", *list_switches(tool)):
        return ()
    words = " or ".join(list_switches(tool))
    aside = (
        " (its own selective, of core attention, is priced as none)"
        if (tool, recompute) == ("megatron", "selective")
        else ""
    )
    note = Sentence(
        named("recompute", recompute), " is priced, but ", tool_term(str(tool)), f" can be told {words} alone{aside}"
    )
    return (note,)


def _fsdp_spaces(num_gpus: int) -> Iterator[Layout]:
    """FSDP2 and HSDP: every rank has its own samples. With reshard_after_forward=False weights stay whole between forward and backward,
    and gradients and states are sharded: ZeRO-2."""
    # As many replicas as GPUs would be plain data parallelism, which is not FSDP.
    for replicas in divisors(num_gpus)[: -1 if num_gpus > 1 else 1]:
        yield Layout(dp=replicas, fsdp=num_gpus // replicas)
    if num_gpus > 1:
        yield Layout(dp=num_gpus, zero=2)


def _accelerate_spaces(num_gpus: int) -> Iterator[Layout]:
    """DDP; what its plugins run is of those tools (`PLUGINS`)."""
    yield Layout(dp=num_gpus)


def _deepspeed_spaces(num_gpus: int) -> Iterator[Layout]:
    """DeepSpeed's ZeRO: stages 1 and 2 with whole weights, and stage 3, which gathers them at use."""
    for stage in (1, 2):
        yield Layout(dp=num_gpus, zero=stage)
    if num_gpus > 1:
        yield Layout(fsdp=num_gpus)


def _megatron_spaces(num_gpus: int) -> Iterator[Layout]:
    """Tensor and sequence parallelism beside data, context or expert parallelism, and the distributed optimizer."""
    for tensor in divisors(num_gpus):
        ranks = num_gpus // tensor
        for zero in (0, 1) if ranks > 1 else (0,):
            for sequence in (False, True) if tensor > 1 else (False,):
                yield Layout(dp=ranks, tp=tensor, sp=sequence, zero=zero)
            for n in divisors(ranks)[1:]:
                for kind, sequence in product(CP_TYPES, (False, True) if tensor > 1 else (False,)):
                    yield Layout(dp=ranks // n, tp=tensor, sp=sequence, cp=n, cp_type=kind, zero=zero)
                # Beside tensor ranks Megatron-LM deals out experts with sequence parallelism alone.
                yield Layout(dp=ranks, tp=tensor, sp=tensor > 1, ep=n, zero=zero)


def _torchtitan_spaces(num_gpus: int) -> Iterator[Layout]:
    """Replicate, FSDP2 or HSDP, beside tensor parallelism, which always splits the tokens between the products. Context ranks shard
    weights too, and gather keys and values. Experts are dealt to ranks that shard weights. Without replicas and context ranks
    fsdp_reshard_after_forward may be "never", which is ZeRO-2."""
    for tensor in divisors(num_gpus):
        for context in divisors(num_gpus // tensor):
            ranks = num_gpus // tensor // context
            for replicas in divisors(ranks):
                # Without ranks of fsdp the context ranks are left to shard weights over.
                states = 3 if context > 1 and replicas == ranks else 0
                layout = Layout(dp=replicas, fsdp=ranks // replicas, tp=tensor, sp=tensor > 1, cp=context, zero=states)
                yield replace(layout, cp_type="gather") if context > 1 else layout
            if context == 1 < ranks:
                yield Layout(dp=ranks, tp=tensor, sp=tensor > 1, zero=2)
    for shards in divisors(num_gpus)[1:]:
        for experts in divisors(shards)[1:]:
            yield Layout(dp=num_gpus // shards, fsdp=shards, ep=experts)
    for experts in divisors(num_gpus)[1:]:
        yield Layout(dp=num_gpus, ep=experts, zero=2)


def _pair_spaces(num_gpus: int, *, tokens: bool) -> Iterator[Layout]:
    """Layers split in pairs, with or without `tokens` split between them, beside data parallelism, DDP or FSDP2, by the trainer."""
    for tensor in divisors(num_gpus)[1:]:
        ranks = num_gpus // tensor
        for sequence in (False, True) if tokens else (False,):
            yield Layout(dp=ranks, tp=tensor, sp=sequence)
            if ranks > 1:
                yield Layout(fsdp=ranks, tp=tensor, sp=sequence)


TOOLS: Mapping[str, Callable[[int], Iterator[Layout]]] = {
    "fsdp2": _fsdp_spaces,
    "accelerate": _accelerate_spaces,
    "deepspeed": _deepspeed_spaces,
    "megatron": _megatron_spaces,
    "torchtitan": _torchtitan_spaces,
    **{name: partial(_pair_spaces, tokens=form.tokens) for name, form in PAIR_FORMS.items()},
}
"""The tools, as `export --to` names them. The export of such a plan does what the plan says, but that FSDP2 and DeepSpeed shard norms and
biases too, which the space keeps whole. `PAIR_FORMS` take layers by name, so a plan of these layouts is not theirs yet: see
`fitting.for_tool`."""
