"""What a learner has done: keys of lessons whose question was answered right, as a link and the browser keep them, and what one can do then."""

from __future__ import annotations

import re
from collections.abc import Iterable

from explorer.learn.lessons import FORMER, key_of

RANGE = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?", re.ASCII)
LONGEST = 600
"""Characters that are read, at most."""

ABLE = (
    "say what takes a GPU's memory, and what to move when it is too little",
    "cut a matrix by columns or rows, and put the product together",
    "name the collective between two placements",
    "count the bytes of a ring, and tell latency from bandwidth",
    "cut an MLP with one sum each way",
    "deal attention's heads to GPUs, and say when they do not divide",
    "split the tokens between the products, and the vocabulary",
    "tell which gradients are terms of a sum",
    "say when a ring, a tree or a switch wins",
    "say why bytes are not time",
    "find a silent fault from losses, weights and messages",
    "send tokens to experts and back",
    "find a plan that sends less than the usual ones",
    "say from how many tokens on a gather hides",
    "say what shows in a step, and when two plans tie",
    "tell what each ZeRO stage keeps and sends",
    "find the moment at which memory is fullest",
    "choose the number of micro-batches",
    "fit a constant, read residuals, and say what a model is for",
    "tell what one hot expert costs",
    "deal a long text to GPUs fairly",
    "choose a mesh of two dimensions",
    "fold a model into what must be planned once",
    "say how a search proves its plan without trying all",
    "fill a pipeline's bubble, and say when stages beat FSDP",
)
"""What one can do after each lesson, in order."""


COOKIE = "shardscope_done"
"""Where the browser keeps the keys (static/js/lessons/rail.js): the page has them before it draws anything. Were they told once it is drawn,
that run would take widgets whose value has not arrived yet for moved ones."""


def write(done: Iterable[str]) -> str:
    """`memory,heads` of these keys."""
    return ",".join(done)


def read(text: str) -> tuple[set[str], list[str]]:
    """The keys of the lessons that such a text names, and the parts of it that name none. The numbers that lessons once had are
    understood, and ranges of them, as `1,4-6`; of `3-99` nothing is taken."""
    found: set[str] = set()
    left: list[str] = []
    for part in filter(None, text[:LONGEST].split(",")):
        ends = RANGE.fullmatch(part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if 1 <= first <= last <= len(FORMER):
            found |= set(FORMER[first - 1 : last])
        elif not ends and key_of(part):
            found.add(part)
        else:
            left.append(part)
    return found, left


def from_cookie(text: str) -> set[str]:
    """The lessons of the browser's `memory.collectives`."""
    return read(text.replace(".", ","))[0]
