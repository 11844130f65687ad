"""13. Choose a plan yourself: the seven weights of a Llama block, predicted, then held against every other choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from explorer.address.settings import MODELS
from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import PAPER, Box, amount, column, row, svg, table, text, tile
from explorer.learn.learner import STANDARD, Learner, standard
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.lessons.planners import placing
from explorer.learn.pictures.charts import WIDTH
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost import CostModel, cost_model
from planner_core.cost.communication import collective_time
from planner_core.search.candidates import Candidates, matrices, score

WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LETTERS = ("R", "S(0)", "S(1)")
NAMES: dict[Choice, str] = {"R": "R whole", "S(0)": "S(0) outputs", "S(1)": "S(1) inputs"}
START = dict(zip(WEIGHTS, ("S(0)", "S(0)", "S(0)", "S(1)", "S(0)", "S(0)", "R"), strict=True))
CODE = """\
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

# Megatron-LM's answer, as PyTorch writes it: columns (S(0) of weight), then rows (S(1))
plan = {
    "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
# on real GPUs: parallelize_module(block, mesh, plan)
weight = torch.empty(14336, 4096)  # gate_proj of Llama-3-8B: [out, in], so S(0) cuts outputs
print(f"{len(plan)} weights, {3 ** len(plan)} choices, one of 8 GPUs holds {tuple(weight.chunk(8, dim=0)[0].shape)}")
"""


def suited(learner: Learner) -> tuple[Learner, str, str]:
    """A learner whose model has a block with the seven weights, the block's name, and a sentence if it is another model."""
    for name, block in learner.graph.blocks.items():
        if tuple(_short(block.values[w].name) for w in matrices(block)) == WEIGHTS:
            return learner, name, ""
    found, name, _ = suited(standard(learner))
    return found, name, f"{learner.name} has no block with these seven weights, so this lesson uses {MODELS[STANDARD]}."


def _short(weight: str) -> str:
    return weight.removesuffix(".weight").rpartition(".")[2]


@lru_cache(maxsize=16)
def scored(learner: Learner, block: str, devices: int) -> Candidates:
    """All 3^7 choices on `devices` neighbouring GPUs, scored by the planner."""
    planner, mesh = placing.neighbours(learner, devices), DeviceMesh(("tensor",), (devices,))
    model: CostModel = cost_model(planner.cluster, mesh, replace(planner.workload, zero=0))
    found = score(planner.coarse.blocks[block], planner.strategies[block], model, planner.graph.num_repeats[block])
    assert found is not None
    return found


def index(values: Values) -> int:
    """The row of the learner's choice among the candidates."""
    return sum(LETTERS.index(str(values[w])) * 3 ** (len(WEIGHTS) - 1 - i) for i, w in enumerate(WEIGHTS))


def best_within(found: Candidates, mine: int) -> int:
    """The candidate that communicates least with no more memory than the learner's; of equal ones the smallest."""
    room = found.memory_bytes[mine] if np.isfinite(found.memory_bytes[mine]) else np.inf
    comm = np.where(found.memory_bytes <= room, found.comm_s, np.inf)
    return int(np.lexsort((found.memory_bytes, comm))[0])


def sent_by(learner: Learner, block: str, devices: int, letters: list[str]) -> tuple[placing.Sent, ...]:
    """Every collective of one layer with its seven weights placed so."""
    layer = learner.graph.blocks[block]
    names = [layer.values[w].name for w in matrices(layer)]
    return placing.sent(learner, block, devices, tuple(zip(names, letters, strict=True)))


def scene(learner: Learner, values: Values) -> Scene:
    """The learner's placements, the messages they cause, all candidates, the optimum beside them, and why it is better."""
    learner, block, note = suited(learner)
    devices, mine = int(values["t"]), index(values)
    found = scored(learner, block, devices)
    best = best_within(found, mine)
    comm, memory = found.comm_s, found.memory_bytes
    can = bool(np.isfinite(comm[mine]))
    yours = sent_by(learner, block, devices, [str(values[w]) for w in WEIGHTS]) if can else ()
    least = sent_by(learner, block, devices, [LETTERS[int(c)] for c in found.choice[best]])
    mine_s, best_s = (sum(x.seconds for x in messages) for messages in (yours, least))
    own = (
        f"{units.seconds(mine_s)} of communication and {units.memory(float(memory[mine]))} per layer and GPU"
        if can
        else "a choice that cannot run here, because a split would not be even"
    )
    worse = _worse(float(comm[mine]), float(comm[best])) if can else "Change one of the weights"
    fewer = int(
        ((comm <= comm[mine]) & (memory <= memory[mine]) & ((comm < comm[mine]) | (memory < memory[mine]))).sum()
    )
    steps = (
        Step("Your placements",
            f"One block of {learner.name} on {devices} GPUs. Weights are [outputs, inputs]: S(0) is a cut "
            "by columns in the words of lesson 2, S(1) by rows. Whatever must be moved to make your choice right, "
            "the planner moves as cheaply as possible.", svg(_weights(values, devices), "Your placement of the seven weights")),
        Step("What it causes", _causes(yours, can), _messages(yours)),
        Step("All choices",
            f"Every dot is one of {units.whole(found.scored)} choices that can run (of "
            f"{units.whole(found.space)}). Yours: {own}. {units.whole(fewer)} are better in both.", svg(_cloud(found, mine, best), "All candidates by communication and memory")),
        Step("The optimum",
            f"With no more memory than yours, the least communication is **{units.seconds(best_s)}**. "
            f"{worse}.", _side_by_side(found, values, best)),
        Step("Why", _why(yours, least), _difference(yours, least)),
    )  # fmt: skip
    numbers = {
        "mine_s": float(comm[mine]), "mine_bytes": float(memory[mine]), "best_s": float(comm[best]), "best_bytes": float(memory[best]),
        "better": fewer, "space": found.space, "scored": found.scored, "mine_sent_s": mine_s,
        "best_sent_s": best_s, "mine_messages": len(yours), "best_messages": len(least),
    }  # fmt: skip
    return Scene(steps, numbers, reveal=1, note=note)


def _causes(yours: tuple[placing.Sent, ...], can: bool) -> str:
    if not can:
        return "This choice cannot run: a split would not be even. Change one of the weights."
    if not yours:
        return "Nothing is sent."
    first = max(yours, key=lambda x: x.seconds)
    return (
        f"{len(yours)} collectives in one layer, forward and backward, {units.seconds(sum(x.seconds for x in yours))} "
        f"together. The slowest: **{first.kind}** at {first.where} ({first.moved}). Of an activation S(0) is a cut by "
        "samples, S(1) by tokens, S(2) by features."
    )


def _messages(sent: tuple[placing.Sent, ...]) -> str:
    rows = [(x.phase, x.where, x.moved, x.kind, amount(x.num_bytes), units.seconds(x.seconds)) for x in sent]
    return table(("phase", "at", "what is put right", "collective", "bytes", "time"), rows)


def _why(yours: tuple[placing.Sent, ...], least: tuple[placing.Sent, ...]) -> str:
    more, fewer = placing.compare(yours, least)
    if not more and not fewer:
        return "Yours sends what the optimum sends."
    if sum(x.seconds for x in yours) <= sum(x.seconds for x in least) * (1 + 1e-9):
        return "Yours sends elsewhere, and no longer in all. The optimum of equal time is the one with less memory."
    told = []
    if more:
        told.append(
            f"Only yours: {len(more)} collectives, {units.seconds(sum(x.seconds for x in more))}; above all the "
            f"{more[0].kind} at {more[0].where} ({more[0].moved})."
        )
    if fewer:
        told.append(f"Only the optimum: {len(fewer)}, {units.seconds(sum(x.seconds for x in fewer))}.")
    return " ".join(told) + " A placement that suits the next operation's needs no message."


def _difference(yours: tuple[placing.Sent, ...], least: tuple[placing.Sent, ...]) -> str:
    rows = []
    for name, these in zip(("yours", "optimum"), placing.compare(yours, least), strict=True):
        rows += [(name, x.phase, x.where, x.moved, x.kind, units.seconds(x.seconds)) for x in these]
    return table(("only in", "phase", "at", "what is put right", "collective", "time"), rows)


def _worse(mine: float, best: float) -> str:
    if mine <= best * (1 + 1e-9):
        return "Yours is an optimum: nothing that fits sends less"
    if best == 0:
        return f"Yours takes {units.seconds(mine)} more"
    return f"Yours takes {units.significant(mine / best, 2)} times as long"


def _weights(values: Values, devices: int) -> Box:
    boxes = []
    for w in WEIGHTS:
        letter, wide = str(values[w]), 84.0
        if letter == "R":
            body = tile(wide, 64, ("R", None), "R", 15)
        elif letter == "S(0)":
            body = column(*(tile(wide, 64 / devices, ("S", r)) for r in range(devices)), gap=0)
        else:
            body = row(*(tile(wide / devices, 64, ("S", r)) for r in range(devices)), gap=0)
        boxes.append(column(text(w, 13, 600), body, text(NAMES[letter], 12.5, muted=True), gap=4))
    return column(row(*boxes[:4], gap=26), row(*boxes[4:], gap=26), gap=18)


def _cloud(found: Candidates, mine: int, best: int) -> Box:
    x, y = found.comm_s * 1e3, found.memory_bytes / units.GIB
    ok = np.isfinite(x) & np.isfinite(y)
    left, top, width, height = 64.0, 12.0, WIDTH - 80, 250.0
    xs, ys = (0.0, float(x[ok].max()) * 1.04 or 1.0), (0.0, float(y[ok].max()) * 1.08)

    def px(v: Any) -> Any:
        return left + (v - xs[0]) / (xs[1] - xs[0]) * width

    def py(v: Any) -> Any:
        return top + height - (v - ys[0]) / (ys[1] - ys[0]) * height

    spots = np.unique(np.rint(np.stack([px(x[ok]), py(y[ok])], axis=1)).astype(int), axis=0)
    parts = [f'<path d="M{left} {top}V{top + height}H{left + width}" stroke="#8a97a3" fill="none"/>']
    parts += [f'<circle cx="{a}" cy="{b}" r="2.6" fill="#8a97a3" fill-opacity="0.5"/>' for a, b in spots.tolist()]
    front = np.flatnonzero(found.on_front)
    front = front[np.argsort(x[front])]
    parts.append(
        f'<path d="M{"L".join(f"{px(x[i]):.1f} {py(y[i]):.1f}" for i in front)}" fill="none" '
        f'stroke="{COMPUTE}" stroke-width="2"/>'
    )
    parts += [f'<circle cx="{px(x[i]):.1f}" cy="{py(y[i]):.1f}" r="4" fill="{COMPUTE}"/>' for i in front]
    labelled = [(best, "optimum", COMPUTE, 22.0)] + ([(mine, "yours", COMMUNICATION, -12.0)] if ok[mine] else [])
    for i, word, colour, down in labelled:
        cx, cy = float(px(x[i])), float(py(y[i]))
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="9" fill="none" stroke="{colour}" stroke-width="3"/>')
        parts.append(
            f'<text x="{min(cx + 10, WIDTH - 60):.1f}" y="{cy + down + 4:.1f}" font-size="14" font-weight="600" '
            f'fill="currentColor" stroke="{PAPER}" stroke-width="5" paint-order="stroke">{word}</text>'
        )
    parts += [
        f'<text x="{left - 6}" y="{py(v) + 4:.1f}" font-size="12" text-anchor="end" '
        f'fill="currentColor">{units.significant(v)}</text>'
        for v in (0.0, ys[1] / 2, ys[1])
    ]
    parts += [
        f'<text x="{px(v):.1f}" y="{top + height + 18:.0f}" font-size="12" text-anchor="middle" '
        f'fill="currentColor">{units.significant(v)}</text>'
        for v in (xs[1] / 2, xs[1] * 0.97)
    ]
    chart = Box(WIDTH, top + height + 24, "".join(parts))
    return column(
        text("memory per layer and GPU, GiB", 13, muted=True),
        chart,
        text("communication per layer, ms; the line is the front: no choice is better in both", 13, muted=True),
        gap=6,
    )


def _side_by_side(found: Candidates, values: Values, best: int) -> str:
    rows = []
    for i, w in enumerate(WEIGHTS):
        mine, other = str(values[w]), LETTERS[int(found.choice[best, i])]
        rows.append((w, NAMES[mine], NAMES[other], "" if mine == other else "differs"))
    return table(("weight", "yours", "optimum with no more memory", ""), rows)


def question(learner: Learner, values: Values) -> Question:
    """How long do the messages of a layer take?"""
    learner, block, _ = suited(learner)
    devices = int(values["t"])
    found, mine = scored(learner, block, devices), index(values)
    own, load = float(found.comm_s[mine]), learner.planner.workload
    model = cost_model(placing.neighbours(learner, devices).cluster, DeviceMesh(("tensor",), (devices,)), load)
    num_bytes = load.batch * load.seq * learner.layer().hidden * 2
    one = collective_time("all_reduce", num_bytes, model.links[0])[0]
    hint = (
        f"One all_reduce of a layer's activations ({amount(num_bytes)}) takes {units.seconds(one)} here, an all_gather "
        "or a reduce_scatter half of that. "
    )
    stuck = "Nothing: it cannot run"
    if not np.isfinite(own):
        right, fact = stuck, "A weight would be cut unevenly, or an operation between has no rule for it."
        times = [one, 2 * one, 4 * one]
    else:
        best = [LETTERS[int(c)] for c in found.choice[best_within(found, mine)]]
        least, yours = (sent_by(learner, block, devices, x) for x in (best, [str(values[w]) for w in WEIGHTS]))
        own, kinds = sum(x.seconds for x in yours), Counter(x.kind for x in yours)
        told = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "no collective"
        right, fact = (
            units.seconds(own),
            f"{told}. The best with no more memory takes {units.seconds(sum(x.seconds for x in least))}.",
        )
        times = [own / 3, 2 * own, 4 * own] if own else [one, 2 * one, 4 * one]
    truth = f"It takes {right}: {fact}" if right != stuck else fact
    slips = ("Less than it sends. ", "Some of these messages you counted twice. ", "Far more than it sends. ")
    wrong = [(units.seconds(t), slip + truth) for t, slip in zip(times, slips, strict=True)]
    wrong += (
        [(stuck, "Every cut is even and every operation between has a rule, so it can run. " + truth)]
        if right != stuck
        else []
    )
    return asked(
        hint
        + "Predict before you look: with your placements, how long do all messages of one layer take, forward and backward?",
        (right, fact),
        tuple(wrong[:3]),
        mine,
    )


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """The block whose candidates are meant."""
    found, block, _ = suited(learner)
    return {**({} if found is learner else {"model": STANDARD}), "block": block}


def cases(learner: Learner, values: Values) -> list[tuple[str, dict[str, Choice]]]:
    """For a file: the learner's own choice and three that are worth knowing."""
    found, block, _ = suited(learner)
    best = scored(found, block, int(values["t"])).choice[
        best_within(scored(found, block, int(values["t"])), index(values))
    ]
    letters = {
        "your own placement": [str(values[w]) for w in WEIGHTS],
        "columns, then rows (Megatron-LM)": ["S(0)", "S(0)", "S(0)", "S(1)", "S(0)", "S(0)", "S(1)"],
        "everything whole": ["R"] * len(WEIGHTS),
        "the optimum with no more memory than yours": [LETTERS[int(c)] for c in best],
    }
    return [(name, {**values, **dict(zip(WEIGHTS, chosen, strict=True))}) for name, chosen in letters.items()]


LESSON = Lesson(
    13, "Choose a plan yourself", "Place the seven weights of a block, predict the cost, then see the optimum.",
    (
        "Everything so far in one task. R keeps a weight whole, S(0) cuts its outputs, S(1) its inputs. Think of "
        "what each output will be (R, S or P) and of what the next weight wants.",),
    (("Front", "the choices that no other one beats in communication and memory both"),),
    (
        *(Control(w, w, LETTERS, START[w]) for w in WEIGHTS),
        Control("t", "Devices", (2, 4, 8), 4, kind="slider"),
    ),
    scene, question, CODE, ("plans", "All candidates of this model's blocks"), uses_model=True, focus=focus, cases=cases,
)  # fmt: skip
