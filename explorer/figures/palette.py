"""Colours, one meaning each, for both themes.

Devices have the Okabe–Ito colours in rank order (safe for colour blindness). Communication is orange, compute blue; the five
kinds of memory have a fixed order. Nothing is shown by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEVICES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999933")
"""Okabe–Ito, black replaced by an olive that shows on both themes; grey is Replicate."""
GREY = "#8a97a3"
"""Axes and frames, and what no GPU has for itself: readable on both themes."""
COMPUTE, COMMUNICATION, HOST_WAIT = "#0072B2", "#D55E00", "#F0E442"
MEMORY_KINDS = ("params", "grads", "optimizer", "activations", "buffers")
MEMORY_NAMES = {
    "params": "weights",
    "grads": "gradients",
    "optimizer": "optimizer states",
    "activations": "saved activations",
    "buffers": "buffers",
}
MEMORY_COLOURS = dict(zip(MEMORY_KINDS, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7"), strict=True))
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


LIGHT = Theme(text="#1c2024", muted="#5b636b", grid="#e4e7ea", surface="#ffffff", faint=GREY)
DARK = Theme(text="#eceff2", muted="#a5aeb8", grid="#333a42", surface="#14181d", faint="#7d8a97")


def theme_of(name: str | None) -> Theme:
    """Return the theme by Streamlit's name for it."""
    return DARK if name == "dark" else LIGHT


def device_colour(rank: int) -> str:
    """Return the colour of a device; it is the same on every page."""
    return DEVICES[rank % len(DEVICES)]


_DARK, _LIGHT = "#000000", "#ffffff"
_TRAFFIC, _UPDATE, _RECOMPUTATION = "#E69F00", "#8C8C8C", "#56B4E9"


def _make_look(
    kind: str, words: str, description: str, colour: str = "", ink: str = "", **more: bool
) -> dict[str, Any]:
    return {"kind": kind, "words": words, "told": description, "colour": colour, "ink": ink, "pale": False, **more}


WORK: tuple[dict[str, Any], ...] = (
    _make_look("part", "", "lasts"),
    _make_look("compute", "compute", "computes", COMPUTE, _LIGHT),
    _make_look("recomputation", "recomputation", "computes again", _RECOMPUTATION, _DARK),
    _make_look("waits", "waits", "exposed, the GPU waits", COMMUNICATION, _DARK),
    _make_look("held up by weight traffic", "weight traffic", "exposed, the GPU is held up", _TRAFFIC, _DARK),
    _make_look("host", "waits for the host", "the GPU waits for the host", HOST_WAIT, _DARK),
    _make_look("optimizer", "optimizer", "updates", _UPDATE, _DARK),
    _make_look("outside", "", "the GPU has no work"),
    _make_look("sends", "hidden traffic", "sends", _TRAFFIC, pale=True),
    _make_look("sends now", "", "sends, an operator waits", COMMUNICATION, _DARK),
    _make_look("forward", "forward", "forward", COMPUTE, _LIGHT),
    _make_look("backward", "backward", "backward", "#009E73", _DARK),
    _make_look("input", "gradients of operands", "gradients of operands", "#009E73", _DARK),
    _make_look("weight", "gradients of weights", "gradients of weights", "#CC79A7", _DARK),
    _make_look("bubble", "bubble", "waits for other stages", hatch=True),
)
"""How the streams of a step are drawn, by kind of work: words of the legend and of a card, colour, ink on it. Without a colour it is
drawn in the page's ink."""
