"""17. Memory through a step: the planner's walk as a curve, and how recomputation and micro-batches shape it."""

from __future__ import annotations

from functools import lru_cache

from explorer.figures.palette import COMMUNICATION, COMPUTE, DEVICES, MEMORY_COLOURS, MEMORY_NAMES
from explorer.figures.svg_tensors import Drawing, amount, table
from explorer.learn import links
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import way_back
from explorer.learn.lessons.times.stated import Stated, at_tokens, names, stated, texts
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.area import Stratum, area
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars
from explorer.text import units
from planner_core.cost.memory import Moment, walk

TOKENS = 8192
"""Tokens of one GPU in a step."""
MICRO_BATCHES = (1, 2, 4, 8)
GRADIENT = 4
"""Bytes of a parameter's gradient (fp32)."""
NOTABLE = 0.01
"""A share of what forward keeps that is told."""


def case(learner: Learner, recompute: str, micro_batches: int) -> Stated:
    """FSDP over all GPUs with `TOKENS` per GPU and step."""
    found, samples, _ = texts(learner, TOKENS // micro_batches)
    made = stated(found, names(found.cluster)["FSDP (ZeRO-3)"], samples, micro_batches, recompute)
    assert made, "FSDP splits samples only"
    return made


@lru_cache(maxsize=64)
def moments(made: Stated) -> tuple[tuple[Moment, ...], int, int]:
    """Every moment of the last micro-batch and of the optimizer, where backward begins, and where the optimizer's step is."""
    found = walk(made.plan.blocks, made.planner.graph, made.model)
    turn = len(found.forward)
    return (*found.forward, *found.backward, found.step), turn, turn + len(found.backward)


def standing(made: Stated) -> int:
    """Bytes that are there all the time: weights and optimizer states."""
    memory = made.plan.cost.memory_bytes
    return memory["params"] + memory["optimizer"]


def fullest(made: Stated) -> tuple[int, int]:
    """The moment with the most memory, and its bytes."""
    found, _, _ = moments(made)
    at = max(range(len(found)), key=lambda i: found[i].total)
    return at, standing(made) + found[at].total


def when(made: Stated) -> int:
    """When memory is fullest: 0 on the way forward, 1 where it turns, 2 on the way back, 3 in the optimizer's step."""
    _, turn, step = moments(made)
    at, _ = fullest(made)
    if at >= step:
        return 3
    near = max(2, turn // 20)
    return 1 if turn - near <= at < turn + near else 0 if at < turn else 2


def live(learner: Learner, values: Values) -> Live:
    """Forward, the whole curve, its fullest moment, recomputation, and micro-batches."""
    recompute, m = str(values["recompute"]), int(values["m"])
    _, _, note = texts(learner, TOKENS)
    made = case(learner, recompute, m)
    found, turn, step = moments(made)
    at, peak = fullest(made)
    cost, base = made.plan.cost, standing(made)
    numbers = {
        "peak": peak,
        "walk": cost.memory_bytes["peak"],
        "kept": max(x.kept for x in found),
        "standing": base,
        "step_s": cost.step_time_s,
        "when": when(made),
        "turn": turn,
        "at": at,
        "optimizer": step,
    }
    loss = found[turn - 1].kept - found[turn - 2].kept
    plain, again = case(learner, "none", m), case(learner, "full", m)
    before, after = plain.plan.cost, again.plan.cost
    facts = numbers | {
        "gpus": made.planner.cluster.num_gpus,
        "tokens": TOKENS,
        "loss": loss if loss > NOTABLE * found[turn - 1].kept else 0,
        "turning": base + found[turn - 1].kept + found[turn - 1].grads,
        "gradients": GRADIENT * made.planner.graph.num_params,
        "end_of_forward": base + found[turn - 1].total,
        "end_of_step": base + found[-1].total,
        "recomputed": {
            "longer": after.compute_time_s / before.compute_time_s - 1,
            "before": before.memory_bytes["peak"],
            "after": after.memory_bytes["peak"],
        },
        "stands_in": note,
    }
    pictures: dict[str, Picture] = {
        "forward": _curve(made, turn),
        "sketch": _way_back(made),
        "both": _curve(made, None),
        "stack": _stack(made),
        "recomputed": _recomputed(plain, again),
        "cut": _cut(learner, recompute),
    }
    return Live(facts, pictures, numbers)


def _way_back(made: Stated) -> str:
    """A prediction to draw: what is kept on the way back."""
    found, turn, step = moments(made)
    base, params = standing(made), made.planner.graph.num_params
    without = [float(base + x.kept + x.grads) for x in found]
    return way_back(without[:turn], without[turn:step], base, GRADIENT * params, made.planner.cluster.num_gpus)


def _curve(made: Stated, upto: int | None) -> Drawing:
    found, turn, step = moments(made)
    room = made.planner.cluster.gpu.memory_bytes
    at, peak = fullest(made)
    memory = made.plan.cost.memory_bytes
    kinds = (
        ("params", [memory["params"]] * len(found)),
        ("optimizer", [memory["optimizer"]] * len(found)),
        ("grads", [x.grads for x in found]),
        ("activations", [x.kept for x in found]),
        ("buffers", [x.flying + x.ahead for x in found]),
    )
    bands = [
        Stratum(MEMORY_NAMES[k], tuple(map(float, h)), MEMORY_COLOURS[k], k in ("grads", "activations"))
        for k, h in kinds
    ]
    limit = (float(room), f"{made.planner.cluster.gpu.name}: {units.memory(room)}")
    mark = (at, f"fullest: {units.memory(peak)}") if upto is None else None
    return area(bands, units.memory, limit, ((0, "forward"), (turn, "backward"), (step, "")), mark, upto)


def _stack(made: Stated) -> Drawing:
    found, _, _ = moments(made)
    at, _ = fullest(made)
    memory, moment = made.plan.cost.memory_bytes, found[at]
    sizes = {
        "params": memory["params"],
        "optimizer": memory["optimizer"],
        "grads": moment.grads,
        "activations": moment.kept,
        "buffers": moment.flying + moment.ahead,
    }
    items = [
        StackedBar(
            MEMORY_NAMES[k],
            (BarPiece(MEMORY_NAMES[k], float(size), MEMORY_COLOURS[k], dotted=k in ("grads", "activations")),),
        )
        for k, size in sizes.items()
    ]
    return bars(items, units.memory)


def _recomputed(plain: Stated, again: Stated) -> Drawing:
    items = []
    for name, made in (("keep all", plain), ("recompute all", again)):
        c = made.plan.cost
        parts = (
            BarPiece("compute", c.compute_time_s, COMPUTE),
            BarPiece("communication that shows", c.exposed_comm_time_s, COMMUNICATION, True),
            BarPiece("optimizer", c.optimizer_time_s, DEVICES[2]),
        )
        items.append(StackedBar(name, parts, units.memory(c.memory_bytes["peak"])))
    return bars(items, units.seconds)


def _cut(learner: Learner, recompute: str) -> str:
    rows = []
    for m in MICRO_BATCHES:
        made = case(learner, recompute, m)
        c = made.plan.cost
        found, _, _ = moments(made)
        sent = sum(t.wire_bytes for t in c.traffic)
        fits = "fits" if made.plan.fits else "does not fit"
        rows.append(
            (
                str(m),
                units.memory(max(x.kept for x in found)),
                units.memory(c.memory_bytes["peak"]),
                amount(sent),
                units.seconds(c.step_time_s),
                fits,
            )
        )
    head = ("micro-batches", "activations", "fullest moment", "sent per GPU", "step", "")
    return table(head, rows)


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The usual plans side by side at the lesson's tokens, micro-batches and recomputation."""
    m = int(values["m"])
    return {**links.ways(learner, values), **at_tokens(learner, TOKENS // m, m, str(values["recompute"]))}


LESSON = read_lesson("17-memory-walk", live, focus=focus)
