"""The block as something to build: cuts are dragged onto its matrices, and the traffic is counted while they are.

`static/js/lessons/pictures/builder.js` moves them. The time and memory of every choice are in the picture, so that a choice is counted while it is held
over a matrix; where its messages go is drawn once it is placed.
"""

from __future__ import annotations

import html

import numpy as np

from explorer.figures.svg_tensors import svg
from explorer.learn.blocks.arranged import ArrangedBlock
from explorer.learn.pictures import block
from explorer.text import units
from planner_core.cost import Floats

INSTRUCTIONS = "Drag a cut onto a matrix, or click both in turn. With keys: Tab to a matrix, then the arrow keys."


def draw_builder(case: ArrangedBlock, cost_words: str, seconds: Floats, memory: Floats) -> str:
    """Return the picture with its cuts. `cost_words` say what the choice shown costs; `seconds` and `memory` [choices] are those of all
    choices, the first weight's the slowest to change; a choice that cannot run is infinite."""
    cuts = "".join(_cut_button(letter, case.devices) for letter in block.CUTS)
    drawn = svg(block.draw_block(case, block.PLACED), "The block with its seven weights, each of which can be cut")
    drawn = drawn.replace('role="img"', 'role="group"', 1)  # an image may hold nothing that takes the focus
    tables = f'data-seconds="{_numbers(seconds * 1e6)}" data-memory="{_numbers(memory / units.GIB * 1e3)}"'
    keys = " ".join(case.weights)
    return (
        f'<div class="builder" data-keys="{keys}" data-letters="{" ".join(block.CUTS)}" {tables}>'
        f'<p class="tray" role="group" aria-label="Cuts">{cuts}</p><p class="how">{INSTRUCTIONS}</p>'
        f'<p class="count" aria-live="polite">{html.escape(cost_words)}</p>{drawn}</div>'
    )


def _numbers(values: Floats) -> str:
    """Write whole numbers, empty where a choice cannot run."""
    return ",".join(f"{v:.0f}" if np.isfinite(v) else "" for v in values)


def _cut_button(letter: str, devices: int) -> str:
    box = block.draw_slices(38, 24, letter, devices, across=letter == "S(0)")
    drawn = f'<svg viewBox="-1 -1 40 26" width="40" height="26" aria-hidden="true">{box.body}</svg>'
    return f'<button type="button" class="cut" data-cut="{letter}" aria-pressed="false">{drawn}<span>{block.CUTS[letter]}, {letter}</span></button>'
