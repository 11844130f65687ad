"""Megatron-LM's arguments, from a command line or a script."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

from planner_core.core import InputError
from planner_core.planning.methods import PEERS_TYPES, Layout
from planner_core.planning.pricing.configs.fields import Fields, Setup, accumulation, shared_out

NAME = "Megatron-LM"
OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def read(text: str, where: str) -> Fields:
    """Read options and their values. Comments, line ends and the rest of a script are ignored. Raises InputError."""
    plain = re.sub(r"(?m)(^|\s)#.*$", "", text).replace("\\\n", " ")
    try:
        words = shlex.split(plain.replace("=(", " ( "), posix=True)
    except ValueError as error:
        raise InputError(f"{where} is not a list of arguments ({error}); give options of Megatron-LM") from None
    found: dict[str, object] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, given, value = word.partition("=")
        if OPTION.fullmatch(name):
            found[name] = value if given else True if after.startswith("--") or after in ("", ")") else after
    return Fields(where, found)


def setup(fields: Fields, num_gpus: int) -> Setup:
    """A run by Megatron-LM. The ranks that neither tensor nor context parallelism uses are data parallel, and experts are dealt to some of
    them. Its distributed optimizer and its FSDP shard over context ranks too, as the layout does."""
    fields.only("--pipeline-model-parallel-size", 1, "pipeline parallelism")
    fields.off("--cpu-offload", "CPU offload")
    tp, cp = fields.whole("--tensor-model-parallel-size", 1), fields.whole("--context-parallel-size", 1)
    by = "--tensor-model-parallel-size" + (" with --context-parallel-size" if cp > 1 else "")
    ranks = shared_out(fields, by, num_gpus, tp * cp)
    sharded = fields.flag("--use-torch-fsdp2") | fields.flag("--use-megatron-fsdp")
    zero = 1 if fields.flag("--use-distributed-optimizer") else 0
    common = Layout(
        tp=tp,
        sp=_sp(fields, tp),
        cp=cp,
        cp_type=_cp_type(fields, cp),
        ep=fields.whole("--expert-model-parallel-size", 1),
    )
    states: dict[str, Any] = (
        {"fsdp": ranks, "zero": 3 if ranks == 1 < cp else 0} if sharded else {"dp": ranks, "zero": zero}
    )
    layout = replace(common, **states)
    micro = fields.whole("--micro-batch-size", 1)
    options = {
        "micro_batch": micro, "accumulate": accumulation(fields, "--global-batch-size", micro, ranks) or 1,
        "recompute": _recompute(fields), "optimizer": {"adam": "adamw", "sgd": "sgd"}[fields.text("--optimizer", "adam", ("adam", "sgd"))],
    }  # fmt: skip
    capacity = fields.number("--moe-expert-capacity-factor", 1.0)
    if layout.ep > 1 and capacity > 1 and fields.flag("--moe-pad-expert-input-to-capacity"):
        options["expert_imbalance"] = capacity  # every expert computes so many times the mean
    if fields.has("--seq-length"):
        options["seq"] = fields.whole("--seq-length", 1)
    for name, dtype in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        if fields.flag(name):
            options["dtype"] = dtype
    return Setup(layout, options, (*_attention_alone(fields), *_experts_apart(fields, layout), *fields.unread()))


def _sp(fields: Fields, tp: int) -> bool:
    return fields.flag("--sequence-parallel") and tp > 1


def _cp_type(fields: Fields, cp: int) -> str:
    """How attention runs over the context ranks."""
    asked = fields.text("--cp-comm-type", "p2p", ("p2p", "a2a", "all_gather", "a2a+p2p"))
    if cp > 1 and asked == "a2a+p2p":
        raise InputError(
            f"{fields.where}: --cp-comm-type a2a+p2p exchanges heads inside a ring, which cannot be priced; set it to p2p or a2a"
        )
    return PEERS_TYPES[asked] if cp > 1 else "ring"


def _experts_apart(fields: Fields, layout: Layout) -> tuple[str, ...]:
    """Notes about experts that are priced in another way than Megatron-LM runs them."""
    if layout.ep == 1:
        return ()
    notes = []
    sent = fields.text("--moe-token-dispatcher-type", "allgather")
    if sent != "alltoall":
        notes.append(f"--moe-token-dispatcher-type {sent} of {fields.where}: priced as alltoall")
    if fields.whole("--expert-tensor-parallel-size", layout.tp) != layout.tp:
        notes.append(
            f"--expert-tensor-parallel-size of {fields.where}: priced with experts split over all {layout.tp} tensor-parallel ranks too"
        )
    if layout.cp > 1:
        notes.append(
            f"{fields.where}: Megatron-LM deals experts to context ranks as well as data-parallel ones; priced over the latter"
        )
    if fields.has("--moe-expert-capacity-factor") and not fields.flag("--moe-pad-expert-input-to-capacity"):
        notes.append(f"--moe-expert-capacity-factor of {fields.where}: priced as if no token were dropped")
    return tuple(notes)


def _recompute(fields: Fields) -> str:
    """The recomputation. Megatron-LM's `selective` recomputes core attention, of which a flash kernel keeps almost nothing, so it is
    priced as none."""
    asked = fields.text("--recompute-granularity", "none", ("none", "full", "selective"))
    return "full" if asked == "full" else "none"


def _attention_alone(fields: Fields) -> tuple[str, ...]:
    """A note about recomputation that is priced as none."""
    short = fields.flag("--recompute-activations")
    if not short and fields.text("--recompute-granularity", "none") != "selective":
        return ()
    name = "--recompute-activations" if short else "--recompute-granularity selective"
    told = "runs core attention again, of which a flash kernel keeps next to nothing: priced as no recomputation"
    return (f"{name} of {fields.where} {told}",)
