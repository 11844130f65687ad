"""Refuse a file with an unread field that may change the layout, the workload or the memory.

A field is *risky* if its name contains one of `RISKY_WORDS`. Its value is *neutral* if it asks for nothing: no value, false, none,
auto, 0; for degrees also 1 and -1. A file with an unread risky field is refused unless the value is neutral. The table of a tool
lists the risky fields that never change a price, such as the folder of a checkpoint or the size of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner_core.core import Sentence, list_names, named, shorten_value

MAX_NAMED_FIELDS = 4
"""A refusal names so many fields."""
RISKY_WORDS = ("parallel", "shard", "replicate", "size", "offload", "stage", "seq", "checkpoint")
DEGREE_WORDS = ("parallel", "shard", "replicate", "size", "stage")
"""Words in the names of degrees. A degree of 1 asks for nothing, nor does -1, which means all remaining ranks."""
NEUTRAL_VALUES = frozenset({"", "auto", "none", "null", "false", "no", "off", "default", "0", "0.0", "[]", "{}", "()"})
OPTION_BY_WORD = (
    ("offload", Sentence(named("offload"), " keeps the optimizer's moments in the host's memory")),
    ("pipeline", Sentence(named("layout"), " states pipeline stages as pp=N")),
    ("context", Sentence(named("layout"), " states context parallelism as cp=N")),
    ("seq_parallel", Sentence(named("layout"), " states it as sp, or as cp=N where whole samples are split")),
    ("sequence_parallel", Sentence(named("layout"), " states it as sp, or as cp=N where whole samples are split")),
    ("expert", Sentence(named("layout"), " states expert parallelism as ep=N")),
    ("tensor", Sentence(named("layout"), " states tensor parallelism as tp=N")),
    ("tp_", Sentence(named("layout"), " states tensor parallelism as tp=N")),
    ("replicate", Sentence(named("layout"), " states replicas of shards as dp=N,fsdp=M")),
    (
        "shard",
        Sentence(named("layout"), " states weights in shards as fsdp=N, optimizer states in shards as dp=N,zero=1"),
    ),
    ("stage", Sentence(named("layout"), " states ZeRO as dp=N,zero=1, or stage 3 as fsdp=N")),
    ("checkpoint", Sentence(named("recompute"), " states what backward computes again")),
    ("seq", Sentence(named("seq"), " states the tokens of a sample")),
    ("batch", Sentence(named("micro_batch"), " and ", named("accumulate"), " state the samples")),
    ("parallel", Sentence(named("layout"), " states degrees, such as dp=2,fsdp=8,tp=4,sp")),
)
"""The planner's option for a field, by a word in its name. Specific words come first, since the first match counts."""
GENERAL_OPTIONS = Sentence(
    *(part for name in ("layout", "micro_batch", "seq") for part in (named(name), ", " if name != "seq" else " and ")),
    named("recompute"),
    " state a run without a file",
)


def is_risky(name: str) -> bool:
    """Return whether a field may change the layout, the workload or the memory, judged by its name."""
    plain = name.lower().replace("-", "_")
    return any(word in plain for word in RISKY_WORDS)


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value asks for nothing. A list asks for nothing if all its entries do."""
    if isinstance(value, (list, tuple)):
        return all(is_neutral(name, v) for v in value)
    text = "none" if value is None else str(value).strip().lower()
    degree = any(word in name.lower() for word in DEGREE_WORDS)
    return text in NEUTRAL_VALUES or (degree and text in ("1", "-1", "1.0"))


def option_for(name: str) -> Sentence:
    """Return the sentence about the planner's option for a field of this name."""
    plain = name.lower().replace("-", "_")
    return next((sentence for word, sentence in OPTION_BY_WORD if word in plain), GENERAL_OPTIONS)


def refusal_text(where: str, tool: str, risky: Iterable[tuple[str, Any]]) -> Sentence:
    """Return the sentence that refuses a file for these fields, with their values."""
    fields = list(risky)
    shown = list_names([f"{name} {shorten_value(value)}" for name, value in fields], MAX_NAMED_FIELDS)
    options = Sentence.from_list("; ", dict.fromkeys(option_for(name) for name, _ in fields[:2]))
    return Sentence(f"{where} ({tool}): {shown} may change the layout or the memory, and cannot be read; ", options)
