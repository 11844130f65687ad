"""Fields that a reader did not read, and that may change the layout, the workload or the memory: such a file is refused.

A field is *risky* if its name has one of `RISKY`. Its value is *neutral* if it asks for nothing: no value, false, none, auto, 0; and for
degrees 1 and -1. A risky field that was not read, and that is not neutral, refuses the file. A reader says which risky fields have no
effect on a price at any value (the folder of a checkpoint, the size of a bucket).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner_core.core import short

RISKY = ("parallel", "shard", "replicate", "size", "offload", "stage", "seq", "checkpoint")
DEGREES = ("parallel", "shard", "replicate", "size", "stage")
"""Words of fields whose value 1, or -1 for what is left, asks for nothing."""
NOTHING = frozenset({"", "auto", "none", "null", "false", "no", "off", "default", "0", "0.0", "[]", "{}", "()"})
WAYS = (
    ("offload", "--offload keeps the optimizer's moments in the host's memory"),
    ("pipeline", "leave pipeline stages out of the file to price the rest"),
    ("context", "--layout states context parallelism as cp=N"),
    ("seq_parallel", "--layout states it as sp, or as cp=N where whole samples are split"),
    ("sequence_parallel", "--layout states it as sp, or as cp=N where whole samples are split"),
    ("expert", "--layout states expert parallelism as ep=N"),
    ("tensor", "--layout states tensor parallelism as tp=N"),
    ("tp_", "--layout states tensor parallelism as tp=N"),
    ("replicate", "--layout states replicas of shards as dp=N,fsdp=M"),
    ("shard", "--layout states weights in shards as fsdp=N, optimizer states in shards as dp=N,zero=1"),
    ("stage", "--layout states ZeRO as dp=N,zero=1, or stage 3 as fsdp=N"),
    ("checkpoint", "--recompute states what backward computes again"),
    ("seq", "--seq states the tokens of a sample"),
    ("batch", "--micro-batch and --accumulate state the samples"),
    ("parallel", "--layout states degrees, such as dp=2,fsdp=8,tp=4,sp"),
)
"""What states a field of a name in the planner's own words; the first that is in the name counts."""
ANY_WAY = "--layout, --micro-batch, --seq and --recompute state a run without a file"


def is_risky(name: str) -> bool:
    """Whether a field's name says that it may change the layout, the workload or the memory."""
    plain = name.lower().replace("-", "_")
    return any(word in plain for word in RISKY)


def is_neutral(name: str, value: Any) -> bool:
    """Whether a value asks for nothing. A list asks for nothing if all its entries do."""
    if isinstance(value, (list, tuple)):
        return all(is_neutral(name, v) for v in value)
    text = "none" if value is None else str(value).strip().lower()
    degree = any(word in name.lower() for word in DEGREES)
    return text in NOTHING or (degree and text in ("1", "-1", "1.0"))


def way_of(name: str) -> str:
    """How the planner's own options state what a field of this name states."""
    plain = name.lower().replace("-", "_")
    return next((way for word, way in WAYS if word in plain), ANY_WAY)


def refusal(where: str, tool: str, risky: Iterable[tuple[str, Any]]) -> str:
    """The sentence about the fields that are not read, with their values."""
    fields = list(risky)
    shown = ", ".join(f"{name} {short(value)}" for name, value in fields[:4])
    more = f" and {len(fields) - 4} more" if len(fields) > 4 else ""
    ways = "; ".join(dict.fromkeys(way_of(name) for name, _ in fields[:2]))
    return f"{where} ({tool}): {shown}{more} may change the layout or the memory, and cannot be read; {ways}"
