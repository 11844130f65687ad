"""The setup that a team runs now, as text in the address: its layout, and what else of a step it states. No Streamlit here.

fsdp=16                                  FSDP over 16 GPUs, in as many micro-batches as the recommended plan
dp=2,fsdp=8,accumulate=4,recompute=full  HSDP in four micro-batches, every block recomputed
fsdp=2,cp=8,cp_type=ulysses              FSDP over 16 GPUs, of which eight share the tokens of a sample
dp=2,tp=8,pp=4,vp=2,zero=1               four pipeline ranks of two stages each
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_core.core import RECOMPUTE, SCHEDULES, InputError, short
from planner_core.planning.methods import CP_TYPES, Layout, parse_layout
from planner_core.planning.pricing import Setup, Statement, read_setup

PLAN_ID = "our-current-setup"
"""The plan's id in the address."""
NO_RECOMPUTATION = "none"
MAX_MICRO_BATCHES = 10**6
WORKLOAD_SETTINGS = ("seq", "dtype", "optimizer", "precision")
"""The settings of a step that a file may have, as the sentence of the page has them."""


@dataclass(frozen=True, slots=True)
class StatedSetup:
    """A layout, the micro-batches of a step (None: as many as the recommended plan has), and what is recomputed."""

    layout: Layout
    accumulate: int | None = None
    recompute: str = NO_RECOMPUTATION

    def write(self) -> tuple[str, ...]:
        """Return the texts of the address."""
        more = [f"accumulate={self.accumulate}"] if self.accumulate else []
        more += [f"recompute={self.recompute}"] if self.recompute != NO_RECOMPUTATION else []
        return (*str(self.layout).split(","), *more)

    def line(self, batch: int) -> str:
        """Write it as people do, for a step of `batch` samples: `FSDP 8 × TP 8, mbs 1, selective`."""
        x = self.layout
        data = f"ZeRO-{x.zero}" if x.zero in (1, 2) else "DP"
        degrees = [("PP", x.pp), (data, x.dp), ("FSDP", x.fsdp), ("CP", x.cp), ("TP", x.tp)]
        parts = [" × ".join(f"{word} {n}" for word, n in degrees if n > 1) or "DP 1"]
        parts += [f"EP {x.ep}"] if x.ep > 1 else []
        parts += ["SP"] if x.sp else []
        parts += [x.cp_type] if x.cp > 1 and x.cp_type != "ring" else []
        parts += [x.order + (f" {x.vp}" if x.vp > 1 else "")] if x.schedule or x.vp > 1 else []
        if self.accumulate:
            each = batch / (x.dp * x.fsdp * self.accumulate)
            parts += [f"mbs {each:g}" if each == int(each) else f"{self.accumulate} micro-batches"]
        return ", ".join([*parts, *([self.recompute] if self.recompute != NO_RECOMPUTATION else [])])


def parse_setup(words: Sequence[str]) -> StatedSetup:
    """Invert `StatedSetup.write`. Raises InputError."""
    options = dict(w.split("=", 1) for w in words if w.startswith(("accumulate=", "recompute=")))
    layout = parse_layout(",".join(w for w in words if w.partition("=")[0] not in options))
    micro_batches, recompute = options.get("accumulate"), options.get("recompute", NO_RECOMPUTATION)
    if micro_batches is not None and not (micro_batches.isdecimal() and 1 <= int(micro_batches) <= MAX_MICRO_BATCHES):
        raise InputError(
            f"accumulate is {short(micro_batches)}, but must be a whole number from 1; give e.g. accumulate=4"
        )
    if recompute not in RECOMPUTE or recompute == "auto":
        kinds = ", ".join(r for r in RECOMPUTE if r != "auto")
        raise InputError(f"recompute is {short(recompute)}, but must be one of {kinds}")
    return StatedSetup(layout, None if micro_batches is None else int(micro_batches), recompute)


DEGREE_PATTERN = re.compile(
    r"(hsdp|fsdp2?|zero-?3|zero-?[12]|ddp|dp|tp|pp|vp|cp|ep|mbs|accumulate)[ =-]*(\d+)(?:x(\d+))?|(\d+) *micro-?batch(?:es)?"
)
"""One part of a line, in small letters: a kind and its ranks."""
DEGREE_NAMES = {"ddp": "dp", "fsdp2": "fsdp", "zero3": "fsdp"}
SCHEDULE_PATTERN = re.compile(rf"({'|'.join(SCHEDULES)}|zero[ -]bubble)(?: +(\d+))?")
"""How stages run their micro-batches, and the stages of a rank: `interleaved 2`."""
SEPARATORS = re.compile(r",|×|\s+[x*]\s+|\s*\+\s*")
NO_RECOMPUTATION_WORDS = ("no recomputation", "none", "no recompute")


def parse_line(text: str, batch: int) -> StatedSetup:
    """Read a line such as `FSDP 8 x TP 8, mbs 1, selective`, for a step of `batch` samples.

    Raises InputError for the first part that is not understood.
    """
    stated: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in SEPARATORS.split(text.lower()))):
        stated |= _parse_part(part)
    recompute, micro_batches, micro_batch_size = (stated.pop(k, None) for k in ("recompute", "accumulate", "mbs"))
    layout = Layout(**stated)
    if micro_batch_size is not None:
        ranks = layout.dp * layout.fsdp
        micro_batches = (
            batch // (micro_batch_size * ranks) if micro_batch_size and batch % (micro_batch_size * ranks) == 0 else 0
        )
        if not micro_batches:
            raise InputError(
                f"mbs {micro_batch_size} on {ranks} ranks does not divide a batch of {batch}; give a divisor of {batch // ranks}"
            )
    return parse_setup(StatedSetup(layout, micro_batches, recompute or NO_RECOMPUTATION).write())


def _parse_part(part: str) -> dict[str, Any]:
    """Read one part of a line, by the names of `Layout` and of `StatedSetup`; `mbs` is a size."""
    if part in (*RECOMPUTE, *NO_RECOMPUTATION_WORDS) and part != "auto":
        return {"recompute": NO_RECOMPUTATION if part in NO_RECOMPUTATION_WORDS else part}
    if part == "sp" or part in CP_TYPES:
        return {"sp": True} if part == "sp" else {"cp_type": part}
    if order := SCHEDULE_PATTERN.fullmatch(part):
        name = order[1] if order[1] in SCHEDULES else "zb"
        return {"schedule": name, **({"vp": int(order[2])} if order[2] else {"vp": 2} if name == "zbv" else {})}
    match = DEGREE_PATTERN.fullmatch(part)
    if match is None:
        raise InputError(f"{short(part)} is not understood; write for example FSDP 8 x TP 8, mbs 1, selective")
    if match[4]:
        return {"accumulate": int(match[4])}
    kind, ranks = match[1].replace("-", ""), int(match[2])
    if kind == "hsdp":
        return {"dp": ranks, "fsdp": int(match[3] or 1)}
    if kind in ("zero1", "zero2"):
        return {"dp": ranks, "zero": int(kind[-1])}
    return {DEGREE_NAMES.get(kind, kind): ranks}


def parse_file(name: str, content: bytes, num_gpus: int) -> tuple[StatedSetup, Mapping[str, Any], tuple[str, ...]]:
    """Read a tool's own file, by its name: its setup, the settings of the sentence that it states, and notes. Raises InputError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / Path(name).name
        file.write_bytes(content)
        setup = read_setup(file, num_gpus)
    options = dict(setup.options)
    statement = Statement(setup.layout, options.pop("micro_batch", 1), options.pop("accumulate", 1))
    stated = StatedSetup(setup.layout, statement.accumulate, options.pop("recompute", NO_RECOMPUTATION))
    work: dict[str, Any] = {"batch": statement.batch}
    work |= {key: options.pop(key) for key in WORKLOAD_SETTINGS if key in options}
    return stated, work, _describe_unpriced(setup, options)


def _describe_unpriced(setup: Setup, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the options of the file that the page leaves out."""
    unpriced = [f"{key} {value}" for key, value in options.items() if value]
    more = (
        (f"the page does not price {', '.join(unpriced)}; `python -m planner_core price --config` does",)
        if unpriced
        else ()
    )
    return (*setup.describe({}), *more)
