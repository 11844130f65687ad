"""The steps of plans as streams of work, in the form that the browser draws. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorer.text import units
from planner_core.core import Plan
from planner_core.planning.analysis import STREAMS, TraceWork

NAMES = {"parts": "model", "compute": "compute", "collectives": "collectives", "weights": "weights"}
"""What the lanes are called."""
Look = Mapping[str, Any]
"""How one kind of work is drawn: see `explorer.figures.palette.WORK`."""


def streams(
    steps: Mapping[str, Sequence[TraceWork]], plans: Mapping[str, Plan], looks: Sequence[Look], lit: Sequence[str] = ()
) -> dict[str, Any]:
    """Data for `streams.js`: the work of each plan by name, its texts and kinds by number. `lit` is (phase, collective, axis) of what
    stands out; everything is drawn alike without it."""
    number = {str(k["kind"]): i for i, k in enumerate(looks)}
    words: dict[str, int] = {"": 0}
    shown = [
        {
            "name": name, "told": units.seconds(plans[name].cost.step_time_s), "step_s": plans[name].cost.step_time_s,
            "works": [[*_row(w, words, number), int(not lit or is_lit(w, lit))] for w in step],
        }
        for name, step in steps.items()
    ]  # fmt: skip
    there = {w.kind for step in steps.values() for w in step}
    kinds = [
        {k: v for k, v in kind.items() if k != "kind"} | ({} if kind["kind"] in there else {"words": ""})
        for kind in looks
    ]
    alt = "; ".join(f"{name}: {_told(step)}" for name, step in steps.items())
    lanes = [NAMES[s] for s in STREAMS]
    return {"plans": shown, "streams": lanes, "kinds": kinds, "words": list(words), "alt": f"One step in time. {alt}"}


def _row(w: TraceWork, words: dict[str, int], kinds: Mapping[str, int]) -> list[float]:
    part = f"{w.part} {w.copy} of {w.copies}" if w.copies > 1 else w.part
    batch = f", micro-batch {w.micro_batch}" if w.micro_batch else ""
    kind = "sends now" if w.stream == "collectives" else w.kind
    where = f"{part}, {w.phase}{batch}"
    texts = [words.setdefault(text, len(words)) for text in (where, w.name, w.note)]
    return [STREAMS.index(w.stream), kinds[kind], texts[0], w.start_s, w.seconds, texts[1], texts[2], w.copy % 2]


def is_lit(w: TraceWork, lit: Sequence[str]) -> bool:
    """Whether work is a collective of this phase, kind and mesh axis."""
    phase, kind, axis = lit
    return w.phase == phase and w.name.startswith(f"{kind} of ") and f"({axis})" in w.note


def _told(step: Sequence[TraceWork]) -> str:
    """Seconds of the compute stream by kind."""
    sums: dict[str, float] = {}
    for w in step:
        if w.stream == "compute":
            sums[w.kind] = sums.get(w.kind, 0.0) + w.seconds
    return ", ".join(f"{kind} {units.seconds(seconds)}" for kind, seconds in sums.items())
