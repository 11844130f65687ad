"""The steps of plans as streams of work, in the form that the browser draws. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.text import units
from planner_core.core import Plan
from planner_core.planning.analysis import STREAMS, Work

NAMES = {"parts": "model", "compute": "compute", "collectives": "collectives", "weights": "weights"}
"""What the lanes are called."""
DARK, LIGHT = "#000000", "#ffffff"
HELD, UPDATE, AGAIN = "#E69F00", "#8C8C8C", "#56B4E9"
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "part", "words": "", "told": "lasts", "colour": "", "ink": "", "pale": False},
    {"kind": "compute", "words": "compute", "told": "computes", "colour": COMPUTE, "ink": LIGHT, "pale": False},
    {"kind": "recomputation", "words": "recomputation", "told": "computes again", "colour": AGAIN, "ink": DARK, "pale": False},
    {"kind": "waits", "words": "exposed: waits", "told": "exposed, the GPU waits", "colour": COMMUNICATION, "ink": DARK, "pale": False},
    {
        "kind": "held up by weight traffic", "words": "exposed: held up by weights", "told": "exposed, the GPU is held up",
        "colour": HELD, "ink": DARK, "pale": False,
    },
    {"kind": "optimizer", "words": "optimizer", "told": "updates", "colour": UPDATE, "ink": DARK, "pale": False},
    {"kind": "sends", "words": "hidden traffic", "told": "sends", "colour": HELD, "ink": "", "pale": True},
    {"kind": "sends now", "words": "", "told": "sends, an operator waits", "colour": COMMUNICATION, "ink": DARK, "pale": False},
)  # fmt: skip
_NUMBER = {str(k["kind"]): i for i, k in enumerate(KINDS)}


def streams(steps: Mapping[str, Sequence[Work]], plans: Mapping[str, Plan]) -> dict[str, Any]:
    """What `streams.js` draws: the work of each plan by name, its texts by number."""
    words: dict[str, int] = {"": 0}
    shown = [
        {
            "name": name, "told": units.seconds(plans[name].cost.step_time_s), "step_s": plans[name].cost.step_time_s,
            "works": [_row(w, words) for w in step],
        }
        for name, step in steps.items()
    ]  # fmt: skip
    there = {w.kind for step in steps.values() for w in step}
    kinds = [
        {k: v for k, v in kind.items() if k != "kind"} | ({} if kind["kind"] in there else {"words": ""})
        for kind in KINDS
    ]
    alt = "; ".join(f"{name}: {_told(step)}" for name, step in steps.items())
    lanes = [NAMES[s] for s in STREAMS]
    return {"plans": shown, "streams": lanes, "kinds": kinds, "words": list(words), "alt": f"One step in time. {alt}"}


def _row(w: Work, words: dict[str, int]) -> list[float]:
    part = f"{w.part} {w.copy} of {w.copies}" if w.copies > 1 else w.part
    batch = f", micro-batch {w.micro_batch}" if w.micro_batch else ""
    kind = "sends now" if w.stream == "collectives" else w.kind
    where = f"{part}, {w.phase}{batch}"
    number = [words.setdefault(text, len(words)) for text in (where, w.name, w.note)]
    return [STREAMS.index(w.stream), _NUMBER[kind], number[0], w.start_s, w.seconds, number[1], number[2], w.copy % 2]


def _told(step: Sequence[Work]) -> str:
    """Seconds of the compute stream by kind."""
    sums: dict[str, float] = {}
    for w in step:
        if w.stream == "compute":
            sums[w.kind] = sums.get(w.kind, 0.0) + w.seconds
    return ", ".join(f"{kind} {units.seconds(seconds)}" for kind, seconds in sums.items())
