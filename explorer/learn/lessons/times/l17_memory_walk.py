"""17. Memory through a step: the planner's walk as a curve, and how recomputation and micro-batches shape it."""

from __future__ import annotations

from explorer.figures.palette import MEMORY_COLOURS, MEMORY_NAMES
from explorer.figures.svg_tensors import Drawing
from explorer.jobs.result_cache import remember
from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from explorer.learn.lessons.predictions import sketch_backward_memory
from explorer.learn.lessons.times.stated import PricedLayout, price_usual, token_settings, with_samples
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.area import Stratum, draw_area
from explorer.learn.pictures.sketch import Prediction
from explorer.text import units
from planner_core.core import Plan
from planner_core.cost.memory import Moment, walk

TOKENS = 8192
"""Tokens of one GPU in a step."""
MICRO_BATCHES = (1, 2, 4, 8)
GRADIENT = 4
"""Bytes of a parameter's gradient (fp32)."""
MENTIONED_SHARE = 0.01
"""A smaller share of what forward keeps is not mentioned."""


@remember(64)
def memory_moments(case: PricedLayout) -> tuple[tuple[Moment, ...], int, int]:
    """Return every moment of the last micro-batch and of the optimizer, where backward begins, and where the optimizer's step is."""
    memory_walk = walk(case.plan.blocks, case.planner.graph, case.model)
    turn = len(memory_walk.forward)
    return (*memory_walk.forward, *memory_walk.backward, memory_walk.step), turn, turn + len(memory_walk.backward)


def standing_bytes(case: PricedLayout) -> int:
    """Return the bytes that are there all the time: weights and optimizer states."""
    memory = case.plan.cost.memory_bytes
    return memory["params"] + memory["optimizer"]


def fullest_moment(case: PricedLayout) -> tuple[int, int]:
    """Return the moment with the most memory, and its bytes."""
    moments, _, _ = memory_moments(case)
    at = max(range(len(moments)), key=lambda i: moments[i].total)
    return at, standing_bytes(case) + moments[at].total


def phase_of_peak(case: PricedLayout) -> int:
    """Tell when memory is fullest: 0 on the way forward, 1 where it turns, 2 on the way back, 3 in the optimizer's step."""
    _, turn, step = memory_moments(case)
    at, _ = fullest_moment(case)
    if at >= step:
        return 3
    # A peak within a twentieth of forward from the turn is said to be at it.
    near = max(2, turn // 20)
    return 1 if turn - near <= at < turn + near else 0 if at < turn else 2


def live(learner: Learner, values: Values) -> Live:
    """Return forward, the whole curve, its fullest moment, recomputation, and micro-batches."""
    recompute, m = str(values["recompute"]), int(values["m"])
    shown, _, note = with_samples(learner, TOKENS)
    case = price_usual(learner, "FSDP (ZeRO-3)", TOKENS // m, m, recompute)
    moments, turn, step = memory_moments(case)
    at, peak = fullest_moment(case)
    cost, base = case.plan.cost, standing_bytes(case)
    numbers = {
        "peak": peak,
        "walk": cost.memory_bytes["peak"],
        "kept": max(x.kept for x in moments),
        "standing": base,
        "step_s": cost.step_time_s,
        "when": phase_of_peak(case),
        "turn": turn,
        "at": at,
        "optimizer": step,
    }
    # What autograd keeps for the last item of forward, which is the loss.
    loss = moments[turn - 1].kept - moments[turn - 2].kept
    before, after = (
        price_usual(learner, "FSDP (ZeRO-3)", TOKENS // m, m, policy).plan.cost for policy in ("none", "full")
    )
    facts = {
        "tokens": TOKENS,
        "loss": loss if loss > MENTIONED_SHARE * moments[turn - 1].kept else 0,
        "turning": base + moments[turn - 1].kept + moments[turn - 1].grads,
        "gradients": GRADIENT * case.planner.graph.num_params,
        "end_of_forward": base + moments[turn - 1].total,
        "end_of_step": base + moments[-1].total,
        "recomputed": {
            "longer": after.gpu_compute_s / before.gpu_compute_s - 1,
            "before": before.memory_bytes["peak"],
            "after": after.memory_bytes["peak"],
        },
        "at_peak": {MEMORY_NAMES[k]: {k: size} for k, size in _sizes_at_peak(case).items()},
        "both": {"keep all": before, "recompute all": after},
        "cuts": _price_cuts(learner, recompute),
    }
    pictures: dict[str, Picture] = {
        "forward": _memory_chart(case, turn),
        "sketch": _make_sketch(case),
        "both": _memory_chart(case, None),
    }
    return Live(facts, pictures, numbers, shown, note)


def _sizes_at_peak(case: PricedLayout) -> dict[str, int]:
    """Return the bytes by kind at the fullest moment."""
    memory, moment = case.plan.cost.memory_bytes, memory_moments(case)[0][fullest_moment(case)[0]]
    return {
        "params": memory["params"],
        "optimizer": memory["optimizer"],
        "grads": moment.grads,
        "activations": moment.kept,
        "buffers": moment.flying + moment.ahead,
    }


def _price_cuts(learner: Learner, recompute: str) -> list[tuple[int, Plan, int, int]]:
    """Price each number of micro-batches: the plan, bytes of activations, and bytes that one GPU sends."""
    cuts = []
    for m in MICRO_BATCHES:
        case = price_usual(learner, "FSDP (ZeRO-3)", TOKENS // m, m, recompute)
        activations, sent = max(x.kept for x in memory_moments(case)[0]), case.sent_bytes
        cuts.append((m, case.plan, activations, sent))
    return cuts


def _make_sketch(case: PricedLayout) -> Prediction:
    """Return a prediction to draw: what is kept on the way back."""
    moments, turn, step = memory_moments(case)
    base, params = standing_bytes(case), case.planner.graph.num_params
    without = [float(base + x.kept + x.grads) for x in moments]
    return sketch_backward_memory(
        without[:turn], without[turn:step], base, GRADIENT * params, case.planner.cluster.num_gpus
    )


def _memory_chart(case: PricedLayout, upto: int | None) -> Drawing:
    moments, turn, step = memory_moments(case)
    room = int(case.planner.budget)
    at, peak = fullest_moment(case)
    memory = case.plan.cost.memory_bytes
    kinds = (
        ("params", [memory["params"]] * len(moments)),
        ("optimizer", [memory["optimizer"]] * len(moments)),
        ("grads", [x.grads for x in moments]),
        ("activations", [x.kept for x in moments]),
        ("buffers", [x.flying + x.ahead for x in moments]),
    )
    bands = [
        Stratum(MEMORY_NAMES[k], tuple(map(float, h)), MEMORY_COLOURS[k], k in ("grads", "activations"))
        for k, h in kinds
    ]
    limit = (float(room), f"a plan may fill {units.memory(room)}")
    mark = (at, f"fullest: {units.memory(peak)}") if upto is None else None
    return draw_area(bands, units.memory, limit, ((0, "forward"), (turn, "backward"), (step, "")), mark, upto)


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """Return the lesson's tokens, micro-batches and recomputation."""
    m = int(values["m"])
    return token_settings(learner, TOKENS // m, m, str(values["recompute"]))


LESSON = read_lesson("17-memory-walk", live, focus=focus)
