"""24. How planners think: a copy becomes a table, copies multiply, memory gets a price, and a bound is a proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import PAPER, Drawing, column, svg, table, text
from explorer.learn.blocks import placing
from explorer.learn.blocks.arranged import suited
from explorer.learn.learner import Learner, standard
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, typed
from explorer.learn.lessons.planners.l13_choose import scored
from explorer.learn.lessons.planners.prices import Priced, priced
from explorer.learn.pictures.charts import WIDTH
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.search import Answer, RunTable, run_tables, search
from planner_core.search.network import Problem

Floats = NDArray[np.float64]
ROOMS = (10, 25, 50, 75)
CODE = """\
from functools import reduce
import numpy as np  # this asks the planner, so it needs Shardscope; put your model for llama-3-8b
from explorer.learn.learner import Learner
from explorer.learn.lessons.planners.l24_think import asked, choices
from planner_core.planning import Request
from planner_core.search import run_tables, search
learner, gpus = Learner(Request("llama-3-8b")), 8
problem, memory = asked(learner, gpus)
run = run_tables(problem)[0]  # seconds of a copy, from the state of the row to that of the column
def then(a, b): return (a[:, :, None] + b[None, :, :]).min(axis=1)  # the least over every state between: (min, +) instead of (+, x)
copies, products, table = 1, 0, run.one.round(6)
while copies < run.copies:
    table, copies, products = then(table, table), 2 * copies, products + 1
print(f"ways of a copy 10^{run.ways:.2f}, of all 10^{run.ways * copies:.0f}; products {products}, copies {copies}")
print(f"least {1e3 * table.min():.3f} ms, of one copy {1e3 * run.one.min():.3f} ms")
slow = reduce(then, [run.one.round(6)] * copies)  # one copy after the other
print(f"difference {max(abs(a - b) for a, b in zip(slow.flat, table.flat) if b < np.inf):.1g}")
ms, gib, room = choices(learner, gpus, 25)
fits = gib <= room  # below: the lowest line, at `room`, from a choice that fits to one that does not
line = ms[fits] + (room - gib[fits]) / (gib[~fits, None] - gib[fits]) * (ms[~fits, None] - ms[fits])
j, i = np.unravel_index(line.argmin(), line.shape)
price = (ms[fits][i] - ms[~fits][j]) / (gib[~fits][j] - gib[fits][i])
print(f"allowed {room:.2f} GiB: price {price:.3f} ms per GiB, bound {line.min():.3f} ms, best {ms[fits].min():.3f} ms, left {(ms + price * (gib - room) < ms[fits].min() - 1e-9).sum()}")
answer = search(problem, budget=memory)
print(f"whole model: bound {answer.bound:.3f} s, best {answer.value:.3f} s, solved {answer.solves} times, proven {answer.optimal}")
"""


@dataclass(frozen=True)
class Thought:
    """What the search of the learner's model on some neighbours rests on: the table of a copy, and the answer."""

    run: RunTable
    answer: Answer
    budget: float


def of_model(learner: Learner) -> tuple[Learner, str]:
    """A learner whose model has equal copies one after the other, and a sentence if it is another model."""
    found, note = learner.transformer()
    if _run(found, 2) is not None:
        return found, note
    return standard(
        learner
    ), f"The layers of {found.name} pass on more than one tensor, so this lesson shows Llama-3-8B on your cluster."


@lru_cache(maxsize=32)
def _run(learner: Learner, devices: int) -> RunTable | None:
    return max(run_tables(asked(learner, devices)[0]), key=lambda r: r.copies, default=None)


@lru_cache(maxsize=32)
def thought(learner: Learner, devices: int) -> Thought:
    """The table and the answer; call it on what `of_model` gives."""
    run, (problem, budget) = _run(learner, devices), asked(learner, devices)
    assert run is not None
    return Thought(run, search(problem, budget=budget), budget)


def asked(learner: Learner, devices: int) -> tuple[Problem, float]:
    """What is searched, the learner's model on some neighbours, and the memory allowed on each."""
    planner = placing.neighbours(learner, devices)
    return planner.problem(DeviceMesh(("gpus",), (devices,))), planner.budget


def then(a: Floats, b: Floats) -> Floats:
    """[entry, exit]: one table after the other, by the least over every state between."""
    found: Floats = (a[:, :, None] + b[None, :, :]).min(axis=1)
    return found


def products(copies: int) -> int:
    """Products of tables for so many copies: squarings, and one for each further binary digit."""
    return copies.bit_length() - 1 + copies.bit_count() - 1


def squares(run: RunTable) -> list[tuple[int, Floats]]:
    """(copies, their table) at 1, 2, 4, ... copies, and at all of them."""
    found = [(1, run.one)]
    while 2 * found[-1][0] <= run.copies:
        n, last = found[-1]
        found.append((2 * n, then(last, last)))
    if found[-1][0] < run.copies:
        found.append((run.copies, reduce(then, [t for n, t in found if run.copies & n])))
    return found


def choices(learner: Learner, devices: int, share: int) -> tuple[Floats, Floats, float]:
    """Communication in ms and memory in GiB of all choices of lesson 13, and the memory allowed: so many percent of the way from
    the least to what the quickest choice needs."""
    learner, block, _ = suited(learner)
    found = scored(learner, block, devices)
    can = np.isfinite(found.comm_s)
    ms, gib = found.comm_s[can] * 1e3, found.memory_bytes[can] / units.GIB
    quickest = float(gib[ms == ms.min()].min())
    return ms, gib, float(gib.min() + share / 100 * (quickest - gib.min()))


def rounded(run: RunTable) -> RunTable:
    """The same with the table of a copy in whole microseconds and that of all copies made from it: what is shown adds up as shown."""
    run = replace(run, one=run.one.round(6))
    return replace(run, all=squares(run)[-1][1])


def scene(learner: Learner, values: Values) -> Scene:
    """Ways, a table, two copies, all copies, the price of memory, the proof."""
    learner, note = of_model(learner)
    devices = int(values["t"])
    t = thought(learner, devices)
    ms, gib, room = choices(learner, devices, int(values["room"]))
    p = priced(ms, gib, room)
    run = rounded(t.run)
    steps = (
        _ways(learner, run, devices), _as_table(run), _two_copies(run), _all_copies(run, t.run), _with_memory(learner, p, ms, gib), _proof(learner, t, devices),
    )  # fmt: skip
    numbers = {
        "ways": run.ways, "all_ways": run.ways * run.copies, "copies": run.copies, "products": products(run.copies), "one_ms": float(run.one.min()) * 1e3, "all_ms": float(run.all.min()) * 1e3,
        "price": p.price, "bound_ms": p.bound_ms, "best_ms": p.best_ms, "left": p.left, "room_gib": p.room_gib,
        "bound_s": t.answer.bound, "solves": t.answer.solves, "proven": float(t.answer.optimal),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=3, note=note)


def _ten(exponent: float) -> str:
    return f"10^{exponent:,.0f}".replace(",", "\u202f")


def _ways(learner: Learner, run: RunTable, devices: int) -> Step:
    one, every = run.ways, run.ways * run.copies
    rows = [
        ("one copy of the block", "1", _ten(one)), (f"{run.copies} copies, each its own way", str(run.copies), _ten(every)),
        (f"{run.copies} copies, all the same way", str(run.copies), _ten(one)),
    ]  # fmt: skip
    says = (
        f"On {devices} GPUs each tensor of {learner.name} may lie in a few ways, and each operator may run in a few. One copy of its block has "
        f"about **{_ten(one)}** joint ways (10^{one:.2f}), all {run.copies} copies {_ten(every)}: {run.copies} times the exponent. Folding (lesson 23) leaves one block to look at, but not one "
        "way: neighbours may differ. No computer tries them. The planner finds the best all the same, and proves it."
    )
    return Step("Too many ways", says, table(("of", "copies", "joint ways"), rows))


def _shown(run: RunTable) -> list[int]:
    """The states that a copy can begin in."""
    return [i for i in range(len(run.states)) if np.isfinite(run.one[i]).any()]


def _never(run: RunTable) -> str:
    """The states that no copy can begin in, as the end of a sentence."""
    left = [s for i, s in enumerate(run.states) if i not in _shown(run)]
    return f"; no copy can begin from {' or '.join(left)}" if left else ""


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3f}".replace(",", "\u202f") if math.isfinite(value) else "cannot"


def _as_table(run: RunTable) -> Step:
    rows = [(f"from {run.states[i]}", *map(_milliseconds, run.one[i])) for i in _shown(run)]
    best = np.unravel_index(int(run.one.argmin()), run.one.shape)
    says = (
        "A copy touches the rest of the model only through the tensor that comes in and the one that goes out. So ask: for each way that "
        "comes in and each that goes out, how little time can the inside take? Inside, the same trick again: an operator is settled "
        f"for each way of its neighbours, then forgotten. Such a way is written as a pair: in `S(0)|R` the tensor is S(0) and its gradient R. "
        f"{len(_shown(run))} × {len(run.states)} numbers are left, in ms of forward and backward, rounded to whole microseconds{_never(run)}. The least is **{_milliseconds(float(run.one.min()))} ms**, from {run.states[best[0]]} to {run.states[best[1]]}."
    )
    return Step(
        "A copy becomes a table",
        says,
        table(("", *(f"to {s}" for s in run.states)), rows, _shown(run).index(int(best[0]))),
    )


def _ends(run: RunTable) -> tuple[int, int]:
    """From where to where two copies are spelled out: the best way of all of them."""
    i, j = np.unravel_index(int(run.all.argmin()), run.all.shape)
    return int(i), int(j)


def _two_copies(run: RunTable) -> Step:
    i, j = _ends(run)
    sums = run.one[i] + run.one[:, j]
    middle = [k for k in range(len(run.states)) if np.isfinite(sums[k])]
    rows = [(run.states[k], *map(_milliseconds, (run.one[i, k], run.one[k, j], sums[k]))) for k in middle]
    best = int(sums.argmin())
    says = (
        f"Put two copies together, from {run.states[i]} to {run.states[j]}. Between them the tensor lies in one of {len(middle)} ways: add both tables' "
        f"numbers for each, and keep the least, **{_milliseconds(float(sums[best]))} ms** through {run.states[best]}. Done for every pair of ends, this is called a "
        "product of tables. It goes as a product of matrices does, row by column, but two numbers are added where those multiply, and of the results the "
        "least is taken where those add up."
    )
    head = ("between", "first copy, ms", "second copy, ms", "together, ms")
    return Step("Two copies", says, table(head, rows, middle.index(best)))


def _all_copies(run: RunTable, exact: RunTable) -> Step:
    i, j = _ends(run)
    found = squares(run)
    rows = [
        (str(n), str(products(n)), _milliseconds(float(t[i, j])), _milliseconds(n * float(run.one.min())))
        for n, t in found
    ]
    says = (
        f"The product of two tables is again such a table, now of two copies. Square it: four, eight, and so on. **{products(run.copies)} products** make all "
        f"{run.copies} copies, and the least way from end to end is among them: {_milliseconds(float(run.all[i, j]))} ms from the rounded table (the planner does not round, and has {_milliseconds(float(exact.all[i, j]))} ms). Nothing was left out, since what lies inside "
        "matters to nobody outside once the ends are known. That is dynamic programming."
    )
    head = ("copies", "products", f"from {run.states[i]} to {run.states[j]}, ms", "if each took the least, ms")
    return Step("All copies", says, table(head, rows, len(rows) - 1))


def _with_memory(learner: Learner, p: Priced, ms: Floats, gib: Floats) -> Step:
    gap = (
        f"a gap of {units.significant(p.best_ms - p.bound_ms, 2)} ms"
        if p.best_ms > p.bound_ms * (1 + 1e-9)
        else "no gap"
    )
    left = f"{units.whole(p.left)} of {units.whole(len(ms))}" if p.left else "none"
    says = (
        f"Memory breaks this: whether all fits is known only at the end. An example that can be drawn, in other units: lesson 13's choices for one layer, by the "
        f"communication of that layer alone, and the memory that the slider allows. Let memory cost time, here {units.significant(p.price, 2)} ms per GiB, and "
        f"minimise the sum, which works as before. Every choice lies on or above the line. Where the line meets the {units.significant(p.room_gib)} GiB allowed, it is a "
        f"**bound: nothing that fits is below {units.significant(p.bound_ms)} ms**. The best choice that fits takes {units.significant(p.best_ms)} ms: {gap}. Between line and best lie "
        f"{left}: they are looked at one by one, and then the best is proven."
    )
    return Step(
        "Memory gets a price",
        says,
        svg(_cloud(p, ms, gib), "Choices of a block, the line of a price and the memory allowed"),
    )


def _cloud(p: Priced, ms: Floats, gib: Floats) -> Drawing:
    left, top, width, height = 60.0, 24.0, WIDTH - 80, 260.0
    most_x, low, most_y = (
        float(gib.max()) * 1.03,
        float(gib.min()) * 0.9,
        min(float(ms.max()), 4 * p.best_ms) * 1.05 or 1.0,
    )

    def px(v: float) -> float:
        return left + (v - low) / (most_x - low) * width

    def py(v: float) -> float:
        return top + height - v / most_y * height

    below = (ms + p.price * gib) < p.best_ms + p.price * p.room_gib - 1e-9
    spots = {
        (round(px(a)), round(py(b)), bool(c))
        for a, b, c in zip(gib.tolist(), ms.tolist(), below.tolist(), strict=True)
        if b <= most_y
    }
    parts = [f'<path d="M{left} {top}V{top + height}H{left + width}" stroke="#8a97a3" fill="none"/>']
    parts += [
        f'<circle cx="{a}" cy="{b}" r="{3.4 if c else 2.4}" fill="{COMMUNICATION if c else "#8a97a3"}" fill-opacity="{0.9 if c else 0.4}"/>'
        for a, b, c in sorted(spots, key=lambda s: s[2])
    ]
    ends = [(x, p.bound_ms + p.price * (p.room_gib - x)) for x in (low, most_x)]
    clipped = [(x, min(max(y, 0.0), most_y)) if p.price == 0 else _clip(p, x, y, most_y) for x, y in ends]
    line = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in clipped)
    parts.append(f'<path d="M{line}" stroke="{COMPUTE}" stroke-width="2" fill="none"/>')
    parts.append(f'<path d="M{px(p.room_gib):.1f} {top}V{top + height}" stroke="currentColor" stroke-dasharray="5 4"/>')
    best, bound = (px(p.best_gib), py(p.best_ms)), (px(p.room_gib), py(p.bound_ms))
    parts += _marks(p, best, bound, left + width, top, top + height)
    parts += [
        f'<text x="{left - 6}" y="{py(v) + 4:.1f}" font-size="12" text-anchor="end" fill="currentColor">{units.significant(v)}</text>'
        for v in (0.0, most_y / 2, most_y)
    ]
    parts += [
        f'<text x="{px(v):.1f}" y="{top + height + 18:.0f}" font-size="12" text-anchor="middle" fill="currentColor">{units.significant(v)}</text>'
        for v in (float(gib.min()), (low + most_x) / 2, float(gib.max()))
    ]
    chart = Drawing(WIDTH, top + height + 24, "".join(parts))
    return column(text("communication of a layer, ms", 13, muted=True), chart, text("memory per layer and GPU, GiB; each dot is a choice, orange: below the best", 13, muted=True), gap=6)  # fmt: skip


def _marks(
    p: Priced, best: tuple[float, float], bound: tuple[float, float], right: float, top: float, bottom: float
) -> list[str]:
    """Rings around the best choice and the bound, each with a line to its words, which stand apart however near the two are."""
    x = bound[0]
    beside, toward = (x + 22, -3) if x + 175 < right else (x - 175, 75)
    above, under = min(best[1], bound[1]) - 28, min(max(best[1], bound[1]) + 30, bottom - 8)
    parts = []
    for (at_x, at_y), y, word, colour in (
        (best, above, f"best that fits: {units.significant(p.best_ms)} ms", COMMUNICATION),
        (bound, under, f"bound: {units.significant(p.bound_ms)} ms", COMPUTE),
    ):
        line = f"M{at_x:.1f} {at_y:.1f}L{beside + toward:.1f} {y - 4:.1f}"
        parts.append(f'<path d="{line}" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts.append(_word(beside, y, word))
    return [*parts, _word(min(x - 4, right - 170), top - 7, f"memory allowed: {units.significant(p.room_gib)} GiB")]


def _clip(p: Priced, x: float, y: float, most: float) -> tuple[float, float]:
    """The end of the line, moved along it into the picture."""
    inside = min(max(y, 0.0), most)
    return x + (y - inside) / p.price, inside


def _word(x: float, y: float, word: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="13" font-weight="600" fill="currentColor" stroke="{PAPER}" stroke-width="5" '
        f'paint-order="stroke">{word}</text>'
    )


def _proof(learner: Learner, t: Thought, devices: int) -> Step:
    a = t.answer
    fits = a.assignment is not None
    rows = [
        ("memory allowed per GPU", units.memory(t.budget)),
        ("bound: no plan takes less than", units.seconds(a.bound)),
        ("best plan that fits", units.seconds(a.value) if fits else "none: the least memory is too much"),
        ("times that the folded network was solved", str(a.solves)),
        (
            "proven",
            "yes, the bound reaches the value" if a.optimal else "there is nothing to prove" if not fits else "no",
        ),
    ]
    says = (
        f"The planner does all of it for {learner.name} on {devices} neighbours. A layer's time is the longer of two sides (lesson 15), which is not a "
        "sum; a weighted mean of the two is, and never more. So tables give bounds, and where a bound is not yet the true time it is sharpened "
        "and solved again. **When the bound reaches a plan's own time, no other plan can beat it**: of the plans that the planner knows, which have no pipeline stages, and under its model of costs, which lesson 19 puts to the test."
    )
    return Step("The proof", says, table(("", ""), rows, len(rows) - 1))


def question(learner: Learner, values: Values) -> Question:
    """How many products are needed for all copies?"""
    learner, _ = of_model(learner)
    copies = thought(learner, int(values["t"])).run.copies
    right, doubled = products(copies), copies.bit_length() - 1
    why = f"1 → 2 → 4 → … by squaring takes {doubled}, up to {2**doubled} copies" + (
        f", and {right - doubled} more to put together what {copies} is made of." if right > doubled else "."
    )
    wrong = (
        (
            float(copies - 1),
            "That is one copy after the other. The table of two copies may be multiplied by itself: that is four.",
        ),
        (float(copies), f"Even one after the other takes {copies - 1}; and a table may be multiplied by itself."),
        (copies / 2, "That joins pairs, and then? All pairs are equal, so one product serves them all."),
        (float(doubled), f"That is {2**doubled} copies. {copies - 2**doubled} more have to be joined."),
        (float(doubled + 1), f"{doubled} squarings are enough: the first table is one copy already."),
    )
    return typed(
        f"There are {copies} equal copies, and a product of tables may be used again. How few products give the table of all {copies}?",
        "products", (float(right), why), tuple(w for w in wrong if w[0] != right), lambda v: f"{v:g} products",
    )  # fmt: skip


LESSON = Lesson(
    24, "planners", "How planners think", "A copy becomes a table, tables multiply, memory gets a price, and a bound is a proof.",
    (
        "A planner that only tries good-looking plans cannot say how much better another one would be. An exact search can: it goes through more "
        "plans than there are atoms without trying them, on your model and your GPUs. Lessons 22 and 23 showed two papers' ideas, a formula and folding; this search starts from the second.",),
    (
        ("Dynamic programming", "settle a part for every way that its ends can be, and forget its inside"),
        ("Bound", "a number that no plan can be below"),
        ("Gap", "how far the best plan that was found is above the bound; at zero it is proven"),
    ),
    (
        Control("t", "GPUs, neighbours in a node", (2, 4, 8), 8, kind="slider"),
        Control("room", "Memory allowed, from the least (0 %) to what the quickest wants", ROOMS, 25, {r: f"{r} %" for r in ROOMS}, kind="slider", step=5),
    ),
    scene, question, CODE, ("plans", "The front of this model's plans, with what is proven"), uses_model=True,
)  # fmt: skip
