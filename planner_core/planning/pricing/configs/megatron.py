"""Megatron-LM's arguments, from a command line or a script."""

from __future__ import annotations

import re
import shlex

from planner_core.core import InputError
from planner_core.planning.methods import Layout
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
    """A run by Megatron-LM. The ranks that tensor parallelism does not use are data parallel."""
    for name, what in (("pipeline", "pipeline parallelism"), ("expert", "expert parallelism")):
        fields.only(f"--{name}-model-parallel-size", 1, what)
    fields.only("--context-parallel-size", 1, "context parallelism")
    fields.off("--cpu-offload", "CPU offload")
    tp = fields.whole("--tensor-model-parallel-size", 1)
    ranks = shared_out(fields, "--tensor-model-parallel-size", num_gpus, tp)
    sharded = fields.flag("--use-torch-fsdp2") | fields.flag("--use-megatron-fsdp")
    zero = 1 if fields.flag("--use-distributed-optimizer") else 0
    layout = (
        Layout(fsdp=ranks, tp=tp, sp=_sp(fields, tp))
        if sharded
        else Layout(dp=ranks, tp=tp, sp=_sp(fields, tp), zero=zero)
    )
    micro = fields.whole("--micro-batch-size", 1)
    options = {
        "micro_batch": micro, "accumulate": accumulation(fields, "--global-batch-size", micro, ranks) or 1,
        "recompute": _recompute(fields), "optimizer": {"adam": "adamw", "sgd": "sgd"}[fields.text("--optimizer", "adam", ("adam", "sgd"))],
    }  # fmt: skip
    if fields.has("--seq-length"):
        options["seq"] = fields.whole("--seq-length", 1)
    for name, dtype in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        if fields.flag(name):
            options["dtype"] = dtype
    return Setup(layout, options, (*_attention_alone(fields), *fields.unread()))


def _sp(fields: Fields, tp: int) -> bool:
    return fields.flag("--sequence-parallel") and tp > 1


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
