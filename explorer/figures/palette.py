"""Colours, one meaning each, for both themes.

Devices have the Okabe–Ito colours in rank order (safe for colour blindness). Communication is orange, compute blue; the five
kinds of memory have a fixed order. Nothing is shown by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEVICES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999933")
"""Okabe–Ito, black replaced by an olive that shows on both themes; grey is Replicate."""
COMPUTE, COMMUNICATION = "#0072B2", "#D55E00"
MEMORY_KINDS = ("params", "grads", "optimizer", "activations", "buffers")
MEMORY_NAMES = {
    "params": "weights",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "saved activations",
    "buffers": "buffers",
}
MEMORY_COLOURS = dict(zip(MEMORY_KINDS, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7"), strict=True))
MEMORY_INK = {kind: "#ffffff" if kind == "params" else "#000000" for kind in MEMORY_KINDS}
"""The colour of words on these colours (WCAG AA)."""
KIND_COLOURS = {
    "all_reduce": "#D55E00",
    "all_gather": "#0072B2",
    "reduce_scatter": "#009E73",
    "all_to_all": "#CC79A7",
    "send_recv": "#E69F00",
}


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours that a figure takes from the page: text, muted text, grid and surface colours."""

    text: str
    muted: str
    grid: str
    surface: str
    faint: str


LIGHT = Theme(text="#1c2024", muted="#5b636b", grid="#e4e7ea", surface="#ffffff", faint="#8a97a3")
DARK = Theme(text="#eceff2", muted="#a5aeb8", grid="#333a42", surface="#14181d", faint="#7d8a97")


def theme_of(name: str | None) -> Theme:
    """Return the theme by Streamlit's name for it."""
    return DARK if name == "dark" else LIGHT


def device_colour(rank: int) -> str:
    """Return the colour of a device; it is the same on every page."""
    return DEVICES[rank % len(DEVICES)]


_DARK, _LIGHT = "#000000", "#ffffff"
_HELD, _UPDATE, _AGAIN = "#E69F00", "#8C8C8C", "#56B4E9"
WORK: tuple[dict[str, Any], ...] = (
    {"kind": "part", "words": "", "told": "lasts", "colour": "", "ink": "", "pale": False},
    {"kind": "compute", "words": "compute", "told": "computes", "colour": COMPUTE, "ink": _LIGHT, "pale": False},
    {
        "kind": "recomputation",
        "words": "recomputation",
        "told": "computes again",
        "colour": _AGAIN,
        "ink": _DARK,
        "pale": False,
    },
    {
        "kind": "waits",
        "words": "exposed: waits",
        "told": "exposed, the GPU waits",
        "colour": COMMUNICATION,
        "ink": _DARK,
        "pale": False,
    },
    {
        "kind": "held up by weight traffic",
        "words": "exposed: held up by weights",
        "told": "exposed, the GPU is held up",
        "colour": _HELD,
        "ink": _DARK,
        "pale": False,
    },
    {
        "kind": "host",
        "words": "waits for the host",
        "told": "the GPU waits for the host",
        "colour": "#F0E442",
        "ink": _DARK,
        "pale": False,
    },
    {"kind": "optimizer", "words": "optimizer", "told": "updates", "colour": _UPDATE, "ink": _DARK, "pale": False},
    {"kind": "sends", "words": "hidden traffic", "told": "sends", "colour": _HELD, "ink": "", "pale": True},
    {
        "kind": "sends now",
        "words": "",
        "told": "sends, an operator waits",
        "colour": COMMUNICATION,
        "ink": _DARK,
        "pale": False,
    },
    {"kind": "forward", "words": "forward", "told": "forward", "colour": COMPUTE, "ink": _LIGHT, "pale": False},
    {"kind": "backward", "words": "backward", "told": "backward", "colour": "#009E73", "ink": _DARK, "pale": False},
    {
        "kind": "input",
        "words": "gradients of operands",
        "told": "gradients of operands",
        "colour": "#009E73",
        "ink": _DARK,
        "pale": False,
    },
    {
        "kind": "weight",
        "words": "gradients of weights",
        "told": "gradients of weights",
        "colour": "#CC79A7",
        "ink": _DARK,
        "pale": False,
    },
    {
        "kind": "bubble",
        "words": "bubble",
        "told": "waits for other stages",
        "colour": "",
        "ink": "",
        "pale": False,
        "hatch": True,
    },
)
"""How the streams of a step are drawn, by kind of work: words of the legend and of a card, colour, ink on it. Without a colour it is
drawn in the page's ink."""
