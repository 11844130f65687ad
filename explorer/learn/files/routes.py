"""Ways through the course for a class: stops with minutes, what may be left out, and the misconceptions to expect.

The page for teachers shows them with links into the app; the lecturer's folder of the bundle has them with links to its files.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from explorer.learn.files import export
from explorer.learn.lesson import Choice, Lesson
from explorer.learn.lessons import LESSONS
from explorer.learn.visit import address


@dataclass(frozen=True, slots=True)
class RouteStop:
    """A lesson of a route: the step and settings to open it at, and what to do there."""

    lesson: int
    does: str
    step: int = 1
    settings: tuple[tuple[str, Choice], ...] = ()
    minutes: int = 0

    @property
    def takes(self) -> int:
        """Minutes, the lesson's own where the stop states none."""
        return self.minutes or LESSONS[self.lesson - 1].minutes


@dataclass(frozen=True, slots=True)
class Session:
    """Stops in one sitting of `minutes`, what the class can do by its end, and what to leave out first when time runs short."""

    name: str
    minutes: int
    aim: str
    stops: tuple[RouteStop, ...]
    drop: str


@dataclass(frozen=True, slots=True)
class Misconception:
    """What students believe, and the lesson and step where it breaks."""

    belief: str
    lesson: int
    step: int
    breaks: str


NINETY = Session(
    "90 minutes",
    90,
    "say where memory goes, what a cut makes GPUs send, and when each way of splitting pays",
    (
        RouteStop(1, "Let them make it fit before you explain anything."),
        RouteStop(2, "Columns, then rows: what must be put together, and how."),
        RouteStop(3, "Draw cases until nobody hesitates."),
        RouteStop(4, "Play the ring, then the question. Latency against bandwidth at the end."),
        RouteStop(5, "Rows first: let them see GeLU fail, then columns.", settings=(("first", "rows"),)),
        RouteStop(6, "Only as far as the key-value heads: lesson 13 deals heads.", minutes=6),
        RouteStop(
            8,
            "The first step only, for two words that 14 needs: data parallelism, and FSDP, which deals the weights out too.",
            minutes=5,
        ),
        RouteStop(
            14,
            "Steps 1 to 4 with the question, then the map as what to take home; step 6 is for reading at home. ZeRO-1 deals out the optimizer's states.",
        ),
        RouteStop(13, "A contest: who finds the placement with the shortest messages?"),
    ),
    "Leave out 6 first (then leave attention whole in 13), next the last two steps of 3. Do not leave out 4: 14 needs it.",
)

FIVE = (
    Session(
        "Session 1: cutting",
        45,
        "say where memory goes, and what must be sent after a cut",
        (
            RouteStop(1, "The failure first; the question at step 5."),
            RouteStop(2, "Both cuts."),
            RouteStop(3, "Draw cases."),
        ),
        "Leave out the table of all moves in 3.",
    ),
    Session(
        "Session 2: messages and layers",
        45,
        "count the bytes of a ring, and say why columns come before rows",
        (
            RouteStop(4, "Predict, then play."),
            RouteStop(5, "Rows first.", settings=(("first", "rows"),)),
            RouteStop(6, "Which models cannot be dealt to 16?", settings=(("t", 16),)),
        ),
        "Leave out the last step of 6.",
    ),
    Session(
        "Session 3: a whole model",
        45,
        "tell which gradients are terms of a sum, and what each ZeRO stage deals out",
        (
            RouteStop(7, "Between the products; the vocabulary is for reading at home."),
            RouteStop(8, "The question comes first: let them argue."),
            RouteStop(16, "Then with 4 micro-batches: who pays each time?"),
        ),
        "Leave out the vocabulary in 7 (its last two steps).",
    ),
    Session(
        "Session 4: time and memory",
        45,
        "say what hides beside compute, when memory is fullest, and what a slow link does",
        (
            RouteStop(10, "Bytes are not time."),
            RouteStop(15, "Let them draw the two streams, then compare. The longer side counts."),
            RouteStop(17, "Predict the moment, then draw the way back."),
            RouteStop(18, "Four micro-batches."),
        ),
        "Leave out the buckets in 15.",
    ),
    Session(
        "Session 5: choosing",
        45,
        "say when each way pays, find a plan that beats the usual ones, know how far to trust it, and find a fault",
        (
            RouteStop(14, "The map."),
            RouteStop(13, "The contest."),
            RouteStop(19, "Fit one constant by hand."),
            RouteStop(11, "In pairs: one reads losses, one the trace."),
        ),
        "Leave out the last step of 19.",
    ),
)

MISCONCEPTIONS = (
    Misconception("The weights fit, so training fits", 1, 4, "16 to 18 bytes per parameter in mixed precision"),
    Misconception(
        "A term of a sum is a part of the tensor", 3, 3, "P has the whole shape, and no entry of it is right alone"
    ),
    Misconception(
        "An all_reduce sends the tensor once", 4, 9, "it sends 2 (n - 1) / n of it: a reduce_scatter and an all_gather"
    ),
    Misconception("Heads can be dealt to any number of GPUs", 6, 3, "the key-value heads must divide too"),
    Misconception(
        "Cutting by rows first is as good", 5, 3, "with rows first the result is wrong by more than rounding"
    ),
    Misconception(
        "FSDP saves messages because each GPU holds less",
        16,
        3,
        "it sends more than ZeRO-1, and again in each micro-batch",
    ),
    Misconception(
        "FSDP sends 1.5 times what data parallelism sends", 16, 3, "so with gradients in 2 bytes; here they travel in 4"
    ),
    Misconception(
        "More tokens hide tensor parallelism's messages too", 14, 3, "drawn by hand: the sums grow with the tokens"
    ),
    Misconception(
        "Compute and communication add up", 15, 1, "drawn by hand: both run at once, and the longer side counts"
    ),
    Misconception("Twice the GPUs, half the memory", 1, 6, "drawn by hand: some activations stay whole on every GPU"),
    Misconception("Memory is fullest at the end of a step", 17, 1, "the question"),
    Misconception("Accumulation is free", 18, 3, "what FSDP sends is multiplied"),
    Misconception("As many bytes take as much time", 10, 3, "links differ"),
    Misconception("A model that fits the data is a good model", 19, 5, "judge it where it has not looked"),
    Misconception("The loss falls, so the run is right", 11, 1, "all three faults fall"),
    Misconception("The plan that is 1 % quicker is better", 15, 8, "ties"),
)

LEFT_OUT = (
    "Left out on purpose, their place is kept: pipeline stages (bubbles, 1F1B) and with them three dimensions at once. The planner does not place "
    "stages yet, so nothing here could be computed. Also left out: large-batch training, loss scaling and fp8, offload to the CPU, faults and checkpoints."
)
"""What the course does not teach."""

Link = Callable[[Lesson, int, tuple[tuple[str, Choice], ...]], str]
"""The address of a lesson at a step (from 1) with these settings."""


def in_app(lesson: Lesson, step: int, settings: tuple[tuple[str, Choice], ...]) -> dict[str, str]:
    """The parameters of the lesson's address."""
    return address.write(lesson, {**lesson.defaults(), **dict(settings)}, step - 1)


def page(lessons: Sequence[Lesson], link: Link) -> str:
    """The routes as HTML."""
    by_number = {x.number: x for x in lessons}
    sessions = "".join(_session(s, by_number, link) for s in (NINETY, *FIVE))
    rows = "".join(
        f"<tr><td>“{html.escape(m.belief)}”</td><td>{_named(by_number, m.lesson, m.step, (), link)}, step {m.step}</td><td>{html.escape(m.breaks)}</td></tr>"
        for m in MISCONCEPTIONS
        if m.lesson in by_number
    )
    minutes = ", ".join(f"{x.number}: {x.minutes}" for x in lessons)
    return (
        f"<p>Minutes are an estimate that no class has tried. By lesson: {minutes}.</p>{sessions}"
        f"<h2>Misconceptions to expect</h2><table><tr><th>belief</th><th>breaks in</th><th>by</th></tr>{rows}</table>"
        f"<h2>What the course leaves out</h2><p>{html.escape(LEFT_OUT)}</p>"
    )


def _session(session: Session, lessons: dict[int, Lesson], link: Link) -> str:
    stops = [s for s in session.stops if s.lesson in lessons]
    rows = "".join(
        f"<tr><td>{s.takes}</td><td>{_named(lessons, s.lesson, s.step, s.settings, link)}</td><td>{html.escape(s.does)}</td></tr>"
        for s in stops
    )
    planned = sum(s.takes for s in session.stops)
    return (
        f"<h2>{html.escape(session.name)}</h2><p>By the end they can {html.escape(session.aim)}. {planned} minutes planned of {session.minutes}. "
        f"When time runs short: {html.escape(session.drop[0].lower() + session.drop[1:])}</p><table><tr><th>minutes</th><th>lesson</th><th>do</th></tr>{rows}</table>"
    )


def _named(
    lessons: dict[int, Lesson], number: int, step: int, settings: tuple[tuple[str, Choice], ...], link: Link
) -> str:
    lesson = lessons[number]
    return f'<a href="{html.escape(link(lesson, step, settings))}">{number}. {html.escape(lesson.title)}</a>'


def in_bundle(lesson: Lesson, step: int, settings: tuple[tuple[str, Choice], ...]) -> str:
    """The lesson's file, seen from the lecturer's folder; a case of it is chosen by its settings."""
    case = ",".join(f"{k}:{v}" for k, v in settings)
    return f"../lessons/{export.file_name(lesson)}#step={step}" + (f"&with={case}" if case else "")
