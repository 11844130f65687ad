"""13. Choose a plan yourself: the seven weights of a Llama block, predicted, then held against every other choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from explorer.figures.svg_tensors import amount, svg, table
from explorer.learn.blocks import arranged, placing
from explorer.learn.blocks.arranged import WEIGHTS, Arranged, suited
from explorer.learn.learner import STANDARD, Learner
from explorer.learn.lesson import Choice, Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.pictures.block import CUTS
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.builder import builder, placed
from explorer.learn.pictures.cloud import cloud
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost import CostModel, cost_model
from planner_core.cost.communication import collective_time
from planner_core.search.candidates import Candidates, score

LETTERS = ("R", "S(0)", "S(1)")
NAMES: dict[Choice, str] = {letter: f"{letter} {word}" for letter, word in CUTS.items()}
START = dict(zip(WEIGHTS, ("S(0)", "S(0)", "S(0)", "S(1)", "S(0)", "S(0)", "R"), strict=True))
CODE = """\
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

# Megatron-LM's answer, as PyTorch writes it: columns (S(0) of weight), then rows (S(1))
columns, rows = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]
plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
# on real GPUs: parallelize_module(block, mesh, {"self_attn.q_proj": plan["q_proj"], ...})

import numpy as np  # what follows asks the planner, so it needs Shardscope; put your model for llama-3-8b
from explorer.learn.blocks import arranged
from explorer.learn.learner import Learner
from explorer.learn.lessons.planners.l13_choose import scored
from planner_core.planning import Request

learner, gpus, cuts = Learner(Request("llama-3-8b")), 4, ["R", "S(0)", "S(1)"]
found = scored(learner, "LlamaDecoderLayer", gpus)  # every choice, by the planner's prices
ms, gib = 1e3 * found.comm_s, found.memory_bytes / 2**30
mine = int((found.choice == [1, 1, 1, 2, 1, 1, 0]).all(axis=1).argmax())  # the picture's: all but down_proj as Megatron-LM
least = int(np.lexsort((gib, np.where(gib <= gib[mine], ms, np.inf)))[0])
better = (ms <= ms[mine]) & (gib <= gib[mine]) & ((ms < ms[mine]) | (gib < gib[mine]))
print(f"choices {found.space}, can run {found.scored}, better in both than yours {better.sum()}")
for who, row in {"yours": mine, "optimum": least}.items():
    sent = arranged.own(learner, gpus, tuple(cuts[i] for i in found.choice[row])).messages
    print(f"{who}: {ms[row]:.2f} ms of communication, {gib[row]:.2f} GiB, {len(sent)} messages of {1e3 * sum(m.sent.seconds for m in sent):.2f} ms")
usual = [m.sent for m in arranged.megatron(learner, gpus, False).messages if m.sent.kind == "all_reduce" and not m.sent.weight]
print(f"columns, then rows: {len(usual)} all_reduces of {usual[0].num_bytes / 1e6:.0f} MB, {1e3 * sum(m.seconds for m in usual):.2f} ms")
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


def sent_by(learner: Learner, block: str, devices: int, letters: list[str]) -> tuple[placing.BlockMessage, ...]:
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
    def yours(self) -> tuple[placing.BlockMessage, ...]:
        return tuple(m.sent for m in self.own.messages) if self.own else ()

    @property
    def least(self) -> tuple[placing.BlockMessage, ...]:
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
            f"{_own(c, mine_s)}. {units.whole(fewer)} are better in both." + (f" {_in_all(c.own, learner)}" if c.own else ""), svg(cloud(c.found, c.row, c.best_row), "All candidates by communication and memory")),
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
        "what must be moved, as cheaply as it can. What comes into the block and what goes out of it is whole on every GPU (R)."
    )
    return Step("Build it", says, builder(case, told, c.found.comm_s, c.found.memory_bytes))


def _in_all(case: Arranged, learner: Learner) -> str:
    """What the whole model needs, beside what one layer keeps."""
    peak, room, load = _peak(case), learner.cluster.gpu.memory_bytes, learner.planner.workload
    says = f"The whole model needs {units.memory(peak)} at its fullest moment; a GPU has {units.memory(room)}."
    if peak > room:
        says += f" So a run would take its {load.batch} samples in smaller parts (lesson 18): the same bytes of activations are sent in all."
    return says


def _peak(case: Arranged) -> int:
    assert case.plan and case.plan.cost, "a case that runs is priced"
    return case.plan.cost.memory_bytes["peak"]


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
    start = c.best.wires[0, "start"]
    stream = (
        "All this with the stream whole, R, between blocks."
        if start == "R"
        else f"The choices were compared with the stream whole, R, between blocks. The picture is of a copy in the whole model, where the least communication leaves the stream {start}."
    )
    return f"With no more memory than yours, the least communication is **{units.seconds(best_s)}**. {worse}.{differs} {stream}"


def _exact(learner: Learner, devices: int) -> Step:
    """What the planner takes if weights may also be gathered at each use, and time is what counts."""
    best = arranged.best(learner, devices)
    gathered, layers = len(best.gathered), learner.planner.graph.num_repeats[best.block]
    cost = best.plan.cost if best.plan else None
    assert cost
    how = (
        f"It gathers {'all' if gathered == len(WEIGHTS) else gathered} of the seven weights for each use, beside compute, instead of sending "
        "activations, as FSDP does (lesson 8)"
        if gathered
        else "It keeps every weight where it is used"
    )
    says = (
        f"The planner may do one thing more: keep a weight in parts and gather it whenever it is used, and leave the stream between blocks cut. On these {devices} GPUs, with {learner.planner.workload.batch} "
        f"samples, its exact plan takes {units.seconds(cost.step_time_s)} a step, the least of all; that is {units.seconds(cost.step_time_s / layers)} for each of "
        f"{layers} layers, most of it compute. {how}. Its messages are {units.seconds(best.seconds)} in a layer, and many of them wait for nobody. {_in_all(best, learner)}"
    )
    return Step("The exact plan", says, svg(drawn(best), "The block under the exact plan"))


def _causes(yours: tuple[placing.BlockMessage, ...], can: bool) -> str:
    if not can:
        return "This choice cannot run: a split would not be even. Change one of the weights."
    if not yours:
        return "Nothing is sent."
    first = max(yours, key=lambda x: x.seconds)
    return (
        f"{len(yours)} collectives in one layer, forward and backward, {units.seconds(sum(x.seconds for x in yours))} "
        f"together. The slowest: **{first.kind}** at {first.where} ({first.moved}). Of an activation S(0) is a cut by "
        "samples, S(1) by tokens, S(2) by features." + _bucket(yours)
    )


def _bucket(yours: tuple[placing.BlockMessage, ...]) -> str:
    """How the sums of weights' gradients are timed, if there are any."""
    if not any(x.weight for x in yours):
        return ""
    return (
        " The gradients of whole weights are summed once a step and not one by one: those of a layer ride in one bucket (lesson 15), and each bears "
        "its share of the bucket's time. So a small one has no latency of its own, as it would have if sent alone (lesson 4)."
    )


def _took(x: placing.BlockMessage) -> str:
    return units.seconds(x.seconds) + (" of its bucket" if x.weight else "")


def _messages(sent: tuple[placing.BlockMessage, ...]) -> str:
    rows = [(x.phase, x.where, x.moved, x.kind, amount(x.num_bytes), _took(x)) for x in sent]
    return table(("phase", "at", "what is put right", "collective", "bytes", "time"), rows)


def _why(yours: tuple[placing.BlockMessage, ...], least: tuple[placing.BlockMessage, ...]) -> str:
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


def _difference(yours: tuple[placing.BlockMessage, ...], least: tuple[placing.BlockMessage, ...]) -> str:
    rows = []
    for name, these in zip(("yours", "optimum"), placing.compare(yours, least), strict=True):
        rows += [(name, x.phase, x.where, x.moved, x.kind, _took(x)) for x in these]
    return table(("only in", "phase", "at", "what is put right", "collective", "time"), rows)


def _worse(mine: float, best: float) -> str:
    if mine <= best * (1 + 1e-9):
        return "Yours is an optimum: nothing that fits sends less"
    if best == 0:
        return f"Yours takes {units.seconds(mine)} more"
    return f"Yours takes {units.significant(mine / best, 2)} times as long"


def question(learner: Learner, values: Values) -> Question:
    """How long are the messages of columns, then rows?"""
    learner, block, _ = suited(learner)
    c, devices = _chosen(learner, block, values), int(values["t"])
    usual, one = arranged.megatron(learner, devices, False), _one_sum(learner, devices)
    own, best = (sum(x.seconds for x in messages) for messages in (c.yours, c.least))
    kinds = Counter(x.kind for x in c.least)
    told = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "no collective"
    least = f" The least with no more memory than yours is {units.seconds(best) if best else 'nothing'} ({told}): the next steps show it."
    if usual is None:
        right = ("It cannot run here", f"The heads do not divide by {devices} (lesson 6).{least}")
    else:
        right = (
            units.seconds(usual.seconds),
            f"Each half has one all_reduce forward (g) and one backward (f): 4 · {units.seconds(one, 4)} = {units.seconds(4 * one)}.{least}",
        )
    wrong = [
        (units.seconds(2 * one), "Two are those forward, one behind each half. The backward pass has its own, f."),
        (units.seconds(7 * one), "That is one for each weight. A product that wants what the one before leaves needs no message."),
    ]  # fmt: skip
    if usual is None:
        uneven = f"So it would be, but heads do not divide by {devices}: some GPUs would have more of them than others."
        wrong.insert(0, (units.seconds(4 * one), uneven))
    mine_too = c.own is not None and usual is not None and abs(own - usual.seconds) <= 0.01 * usual.seconds
    if c.own is not None and not mine_too:
        wrong.insert(
            0,
            (units.seconds(own), "That is yours, with the cuts in the picture; the question is about another choice."),
        )
    start = "" if mine_too else f"Yours sends for {units.seconds(own)}. " if c.own else "Yours cannot run. "
    size = amount(_stream_bytes(learner))
    ask = (
        f"{start}Another choice: columns, then rows in both halves (lessons 5, 6). An all_reduce of a layer's activations, {size}, "
        f"takes {units.seconds(one, 4)} on {devices} GPUs. How long are all messages of that choice in a layer?"
    )
    return asked(ask, right, tuple(wrong[:3]))


def _stream_bytes(learner: Learner) -> int:
    """Bytes of the residual stream of all samples."""
    load = learner.planner.workload
    return load.batch * load.seq * learner.layer().hidden * 2


def _one_sum(learner: Learner, devices: int) -> float:
    """Seconds of one all_reduce of a layer's activations."""
    load = learner.planner.workload
    model = cost_model(placing.neighbours(learner, devices).cluster, DeviceMesh(("tensor",), (devices,)), load)
    return collective_time("all_reduce", _stream_bytes(learner), model.links[0])[0]


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
    13, "choose", "Choose a plan yourself", "Cut the seven weights of a block, count what they send, and try to beat the usual way; then see the optimum.",
    (
        "Everything so far in one task. Columns are outputs, S(0) of PyTorch's [outputs, inputs]; rows are inputs, S(1). Think of "
        "what each product will be (R, S or P), and of what the next weight wants. Times here are messages of one layer, sent one after the other.",),
    (("Front", "the choices that no other one beats in communication and memory both"),),
    (
        *(Control(w, w, LETTERS, START[w], NAMES, kind="placed") for w in WEIGHTS),
        Control("t", "Devices", (2, 4, 8), 4, kind="slider"),
    ),
    scene, question, CODE, ("plans", "All candidates of this model's blocks"), uses_model=True, focus=focus, cases=cases,
    block=mine,
)  # fmt: skip
