"""13. Choose a plan yourself: the seven weights of a Llama block, predicted, then held against every other choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from explorer.figures.palette import COMMUNICATION, COMPUTE
from explorer.figures.svg_tensors import PAPER, Box, amount, column, svg, table, text
from explorer.learn.blocks import arranged, placing
from explorer.learn.blocks.arranged import WEIGHTS, Arranged, suited
from explorer.learn.learner import STANDARD, Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.block import CUTS
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.builder import builder, placed
from explorer.learn.pictures.charts import WIDTH
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost import CostModel, cost_model
from planner_core.cost.communication import collective_time
from planner_core.search.candidates import Candidates, score

LETTERS = ("R", "S(0)", "S(1)")
NAMES: dict[Choice, str] = {letter: f"{letter} {word}" for letter, word in CUTS.items()}
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
    return placed([str(values[w]) for w in WEIGHTS])


def best_within(found: Candidates, mine: int) -> int:
    """The candidate that communicates least with no more memory than the learner's; of equal ones the smallest."""
    room = found.memory_bytes[mine] if np.isfinite(found.memory_bytes[mine]) else np.inf
    comm = np.where(found.memory_bytes <= room, found.comm_s, np.inf)
    return int(np.lexsort((found.memory_bytes, comm))[0])


def sent_by(learner: Learner, block: str, devices: int, letters: list[str]) -> tuple[placing.Sent, ...]:
    """Every collective of one layer with its seven weights placed so; none where that cannot run."""
    case = arranged.own(learner, devices, tuple(letters))
    return tuple(m.sent for m in case.messages) if case else ()


def mine(learner: Learner, values: Values) -> Arranged | None:
    """The block as the learner placed it; None if that cannot run."""
    return arranged.own(learner, int(values["t"]), tuple(str(values[w]) for w in WEIGHTS))


@dataclass(frozen=True)
class _Chosen:
    """The learner's choice among all: its row and the optimum's, and both as they run."""

    found: Candidates
    row: int
    best_row: int
    own: Arranged | None
    best: Arranged

    @property
    def yours(self) -> tuple[placing.Sent, ...]:
        return tuple(m.sent for m in self.own.messages) if self.own else ()

    @property
    def least(self) -> tuple[placing.Sent, ...]:
        return tuple(m.sent for m in self.best.messages)


def _chosen(learner: Learner, block: str, values: Values) -> _Chosen:
    devices, row = int(values["t"]), index(values)
    found = scored(learner, block, devices)
    best_row = best_within(found, row)
    best = arranged.own(learner, devices, _letters(found, best_row))
    assert best, "a choice with a time can run"
    own = mine(learner, values) if np.isfinite(found.comm_s[row]) else None
    return _Chosen(found, row, best_row, own, best)


def _letters(found: Candidates, row: int) -> tuple[str, ...]:
    return tuple(LETTERS[int(c)] for c in found.choice[row])


def scene(learner: Learner, values: Values) -> Scene:
    """The block to build, the messages it causes, all candidates, the optimum as a block, why it is better, and the exact plan."""
    learner, block, note = suited(learner)
    c = _chosen(learner, block, values)
    comm, memory = c.found.comm_s, c.found.memory_bytes
    fewer = int(_better(comm, memory, c.row).sum())
    mine_s, best_s = (sum(x.seconds for x in messages) for messages in (c.yours, c.least))
    steps = (
        _build(learner, values, c, mine_s),
        Step("What it causes", _causes(c.yours, c.own is not None), _messages(c.yours)),
        Step("All choices",
            f"Every dot is one of {units.whole(c.found.scored)} choices that can run (of {units.whole(c.found.space)}). Yours: "
            f"{_own(c, mine_s)}. {units.whole(fewer)} are better in both.", svg(_cloud(c.found, c.row, c.best_row), "All candidates by communication and memory")),
        Step("The optimum", _optimum(c, values, mine_s, best_s), svg(drawn(c.best), "The block under the optimum")),
        Step("Why", _why(c.yours, c.least), _difference(c.yours, c.least)),
        _exact(learner, int(values["t"])),
    )  # fmt: skip
    numbers = {
        "mine_s": float(comm[c.row]), "mine_bytes": float(memory[c.row]), "best_s": float(comm[c.best_row]), "best_bytes": float(memory[c.best_row]),
        "better": fewer, "space": c.found.space, "scored": c.found.scored, "mine_sent_s": mine_s,
        "best_sent_s": best_s, "mine_messages": len(c.yours), "best_messages": len(c.least),
    }  # fmt: skip
    return Scene(steps, {k: v for k, v in numbers.items() if np.isfinite(v)}, reveal=2, note=note)


def _better(comm: Any, memory: Any, row: int) -> Any:
    """Which choices send no longer and keep no more, and one of both less."""
    no_worse = (comm <= comm[row]) & (memory <= memory[row])
    return no_worse & ((comm < comm[row]) | (memory < memory[row]))


def _build(learner: Learner, values: Values, c: _Chosen, mine_s: float) -> Step:
    devices = int(values["t"])
    case = c.own or arranged.bare(learner, devices, tuple(str(values[w]) for w in WEIGHTS))
    told = (
        f"{len(c.yours)} collectives in a layer take {units.seconds(mine_s)}, and {units.memory(float(c.found.memory_bytes[c.row]))} "
        "are kept per layer and GPU."
        if c.own
        else "This cannot run: a cut would not be even."
    )
    says = (
        f"One block of {learner.name} on {devices} GPUs. Cut its seven matrices, or leave them whole. Between them the planner moves "
        "what must be moved, as cheaply as it can."
    )
    return Step("Build it", says, builder(case, told, c.found.comm_s, c.found.memory_bytes))


def _own(c: _Chosen, mine_s: float) -> str:
    if c.own is None:
        return "a choice that cannot run here, because a split would not be even"
    return f"{units.seconds(mine_s)} of communication and {units.memory(float(c.found.memory_bytes[c.row]))} per layer and GPU"


def _optimum(c: _Chosen, values: Values, mine_s: float, best_s: float) -> str:
    worse = (
        _worse(float(c.found.comm_s[c.row]), float(c.found.comm_s[c.best_row]))
        if c.own
        else "Change one of the weights"
    )
    other = [f"{w} {CUTS[x]}" for w, x in c.best.weights.items() if x != values[w]]
    differs = f" It differs in {', '.join(other)}." if other else ""
    return f"With no more memory than yours, the least communication is **{units.seconds(best_s)}**. {worse}.{differs}"


def _exact(learner: Learner, devices: int) -> Step:
    """What the planner takes if weights may also be gathered at each use, and time is what counts."""
    best = arranged.best(learner, devices)
    gathered = len(best.gathered)
    cost = best.plan.cost if best.plan else None
    assert cost
    how = (
        f"It gathers {'all' if gathered == len(WEIGHTS) else gathered} of the seven weights for each use, beside compute, instead of sending activations"
        if gathered
        else "It keeps every weight where it is used"
    )
    says = (
        f"The planner may do one thing more: keep a weight in parts and gather it whenever it is used. On these {devices} GPUs, with {learner.planner.workload.batch} "
        f"samples, its exact plan takes {units.seconds(cost.step_time_s)} a step, the least of all. {how}. The code of your block "
        "stands beside this picture."
    )
    return Step("The exact plan", says, svg(drawn(best), "The block under the exact plan"))


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


def question(learner: Learner, values: Values) -> Question:
    """How little could be sent with no more memory?"""
    learner, block, _ = suited(learner)
    c = _chosen(learner, block, values)
    own, best = (sum(x.seconds for x in messages) for messages in (c.yours, c.least))
    kinds = Counter(x.kind for x in c.least)
    told = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "no collective"
    right = units.seconds(best) if best else "Nothing"
    optimal = c.own is not None and own <= best * (1 + 1e-9)
    fact = f"{'Yours is an optimum' if optimal else 'The best with no more memory sends'}: {told}."
    whole = units.memory(float(c.found.memory_bytes[0]))
    wrong: list[tuple[str, str]] = []
    if best:
        why = f"Only with every weight whole and every GPU computing everything, and that keeps {whole} per layer and GPU. "
        wrong.append(("Nothing", why + fact))
        wrong.append(
            (
                units.seconds(best / 2),
                f"All {units.whole(c.found.scored)} choices were scored, and none sends so little. {fact}",
            )
        )
        wrong.append((units.seconds(2 * best), f"There are choices that send less. {fact}"))
    else:
        one = _one_sum(learner, int(values["t"]))
        wrong += [
            (units.seconds(k * one), f"That is {k} all_reduce of activations; there is a choice without any. {fact}")
            for k in (1, 2)
        ]
    if c.own and not optimal:
        wrong.insert(0, (units.seconds(own), f"That is yours, and it can be improved. {fact}"))
    start = f"Yours sends for {units.seconds(own)}. " if c.own else "Yours cannot run. "
    limit = "with no more memory than yours" if c.own else "whatever it keeps"
    ask = f"{start}Predict before you look: how long are the messages of the choice that sends least, {limit}?"
    return asked(ask, (right, fact), tuple(wrong[:3]), c.row)


def _one_sum(learner: Learner, devices: int) -> float:
    """Seconds of one all_reduce of a layer's activations."""
    load = learner.planner.workload
    model = cost_model(placing.neighbours(learner, devices).cluster, DeviceMesh(("tensor",), (devices,)), load)
    return collective_time("all_reduce", load.batch * load.seq * learner.layer().hidden * 2, model.links[0])[0]


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
    13, "Choose a plan yourself", "Cut the seven weights of a block, predict how little could be sent, then see the optimum.",
    (
        "Everything so far in one task. Columns are outputs, S(0) of PyTorch's [outputs, inputs]; rows are inputs, S(1). Think of "
        "what each product will be (R, S or P), and of what the next weight wants.",),
    (("Front", "the choices that no other one beats in communication and memory both"),),
    (
        *(Control(w, w, LETTERS, START[w], NAMES, kind="placed") for w in WEIGHTS),
        Control("t", "Devices", (2, 4, 8), 4, kind="slider"),
    ),
    scene, question, CODE, ("plans", "All candidates of this model's blocks"), uses_model=True, focus=focus, cases=cases,
    block=mine,
)  # fmt: skip
