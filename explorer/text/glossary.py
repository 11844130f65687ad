"""Meanings of the field's words; pages show them on hover. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from planner_core.planning.methods import BASELINES, EXACT

GLOSSARY = {
    "R": "Replicate: every device along this axis holds the whole tensor",
    "S": "Shard: each device along this axis holds one slice",
    "P": "Partial: each device holds one term of a sum that has not been taken yet",
    "world": "all GPUs",
    "data": "GPUs that hold different samples, mostly one in each node",
    "tensor": "neighbouring GPUs, mostly of one node, that share the work on each sample",
    "all_reduce": "every device ends with the sum of what all of them had",
    "all_gather": "every device ends with the slices of all of them",
    "reduce_scatter": "the sum is taken, and each device ends with one slice of it",
    "all_to_all": "each device sends a different slice to each other one",
    "send_recv": "each device sends what it has to the next one around a ring",
    "exposed": "time that a step waits for communication, also where collectives slow each other; the rest hides behind compute",
    "mesh": "the GPUs as a grid of named axes; a tensor is split or repeated along each axis by itself",
    "gathered at use": "each GPU stores a slice; the whole weight is fetched shortly before it is used, and dropped after",
    "ring": "each GPU passes pieces on to its neighbour; least bytes, many steps",
    "hierarchical": "first within the nodes, then between them: few bytes leave a node",
    "pairwise": "each pair of GPUs exchanges its pieces",
    "NVLink": "the links between the GPUs of one node",
    "InfiniBand": "the network between nodes",
}
LAYOUT_TERMS = {
    "DP": ("Data parallel: each GPU holds the whole model and takes other samples; gradients are summed", "backward"),
    "FSDP": (
        "Fully sharded data parallel, ZeRO-3: each GPU takes other samples and keeps a slice of every weight, which is gathered whole "
        "shortly before it is used",
        "zero",
    ),
    "ZeRO-1": ("Data parallel, with the optimizer’s states sharded over the GPUs", "zero"),
    "ZeRO-2": ("Data parallel, with gradients and the optimizer’s states sharded over the GPUs", "zero"),
    "TP": ("Tensor parallel: GPUs share the work on each sample, and each holds a slice of every matrix", "mlp"),
    "SP": (
        "Sequence parallel: between the matrices of tensor parallel, each GPU holds a part of the tokens",
        "sequence",
    ),
    "CP": ("Context parallel: GPUs share a sample, and each has a part of its tokens", "long-sequences"),
    "EP": ("Expert parallel: GPUs hold different experts, and tokens travel to them", "experts"),
    "PP": ("Pipeline parallel: GPUs hold consecutive layers, and micro-batches pass from one to the next", "pipeline"),
}
"""What a word in a plan's name means, and the lesson that teaches it."""
_TERM = re.compile(r"\b(?:" + "|".join(sorted(LAYOUT_TERMS, key=len, reverse=True)) + r")\b")


def layout_terms(names: Iterable[str]) -> list[str]:
    """Return the words of `LAYOUT_TERMS` in the names of plans, as they come."""
    return list(dict.fromkeys(word for name in names for word in _TERM.findall(name)))


ROW_WORDS = {
    "communication": "What one GPU sends in a step",
    "exposed": GLOSSARY["exposed"],
    "reserved": "What PyTorch’s allocator holds, freed blocks too: this range in nine in ten published runs",
    **{word: meaning for word, (meaning, _) in LAYOUT_TERMS.items()},
    "mixed": "Some weights are placed otherwise than most; “How every weight lies” on Plans lists each",
    "split": "Each GPU uses its slice of these weights, and partial results are exchanged",
    "trade-off": "Less memory for a longer step; no plan shown is better in both",
    "proven": "No plan of the row’s kind that these settings allow has a shorter predicted step",
    "bound": "No plan that these settings allow is predicted to be faster than this",
    "doubt": "What the prediction cannot tell apart, by published runs",
    "micro-batches": "Parts of the batch that go through the model one after the other; their gradients are summed",
    "recomputation": "Activations that are not kept are computed again in backward: less memory, a longer step",
}
"""What a word in a plan's row means: of its name, and of what stands below it."""
AXES = {
    **{name: GLOSSARY[name] for name in ("world", "data", "tensor")},
    "shard": "GPUs that hold different samples and a slice of each weight, which is gathered at use",
    "context": "GPUs that share a sample: each has a part of its tokens",
    "expert": "GPUs that hold different experts",
    "idle": "GPUs that do the same work: faster links would let them share it",
}
"""What the GPUs along a mesh axis do, by its name."""
PLANS = {
    EXACT.name: EXACT.defined,
    "trade-off": "Trade-off: less memory for a longer step, no plan shown is better in both",
    **{b.name: b.defined for b in BASELINES.values()},
}
PLAN_WORDS = ". ".join(PLANS.values()) + "."


def describe_axis(name: str) -> str:
    """Say what the GPUs along a mesh axis do. Two axes that do the same have names that end in `_outer` and `_inner`."""
    return AXES.get(name.partition("_")[0], "a group of the GPUs")


IN_TEXT = tuple(k for k in GLOSSARY if len(k) > 1 and k != "exposed")
# Chips say themselves what they mean, and words inside a tag are its attributes.
_WHOLE = re.compile(r'<span class="chip.*?</span>|<[^>]*>')
_WORD = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(IN_TEXT, key=len, reverse=True))) + r")\b")


def mark_terms(markup: str) -> str:
    """Let each word of the glossary show its meaning on hover and on focus, at its first place in the markup."""
    marked: set[str] = set()

    def one(match: re.Match[str]) -> str:
        word = match[0]
        if word in marked:
            return word
        marked.add(word)
        return f'<span class="term" tabindex="0" title="{html.escape(GLOSSARY[word])}">{word}</span>'

    pieces, end = [], 0
    for tag in _WHOLE.finditer(markup):
        pieces += [_WORD.sub(one, markup[end : tag.start()]), tag[0]]
        end = tag.end()
    return "".join(pieces) + _WORD.sub(one, markup[end:])
