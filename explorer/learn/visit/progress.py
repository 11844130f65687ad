"""What a learner has done: numbers of lessons whose question was answered right, as a link and the browser keep them, and what one can do then."""

from __future__ import annotations

import re
from collections.abc import Iterable

RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)

ABLE = (
    "say what takes a GPU's memory, and what to move when it is too little", "cut a matrix by columns or rows, and put the product together", "name the collective between two placements",
    "count the bytes of a ring, and tell latency from bandwidth", "cut an MLP with one sum each way", "deal attention's heads to GPUs, and say when they do not divide",
    "split the tokens between the products, and the vocabulary", "tell which gradients are terms of a sum", "fold a model into what must be planned once",
    "say why bytes are not time", "choose a mesh of two dimensions", "send tokens to experts and back", "find a plan that sends less than the usual ones",
    "say from how many tokens on a gather hides", "say what shows in a step, and when two plans tie", "tell what each ZeRO stage keeps and sends",
    "find the moment at which memory is fullest", "choose the number of micro-batches", "fit a constant, read residuals, and say what a model is for",
    "say when a ring, a tree or a switch wins", "tell what one hot expert costs", "deal a long text to GPUs fairly", "find a silent fault from losses, weights and messages",
    "say how a search proves its plan without trying all",
)  # fmt: skip
"""What one can do after each lesson, in order."""


COOKIE = "shardscope_done"
"""Where the browser keeps the numbers (static/js/lessons/rail.js): the page has them before it draws anything. Were they told once it is drawn,
that run would take widgets whose value has not arrived yet for moved ones."""


def write(done: Iterable[int]) -> str:
    """`1,4-6` of {1, 4, 5, 6}."""
    parts: list[list[int]] = []
    for n in sorted(set(done)):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def read(text: str) -> tuple[set[int], list[str]]:
    """The lessons that such a text names, and the parts of it that name none, e.g. `3-99`: nothing is taken from those."""
    found: set[int] = set()
    left: list[str] = []
    for part in filter(None, text[:200].split(",")):
        ends = RANGE.fullmatch(part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if 1 <= first <= last <= len(ABLE):
            found |= set(range(first, last + 1))
        else:
            left.append(part)
    return found, left


def from_cookie(text: str) -> set[int]:
    """The lessons of the browser's `1.4.5`."""
    return read(text.replace(".", ","))[0]
